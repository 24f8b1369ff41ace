import numpy as np
import pytest
from PIL import Image

import fata
from fata.data import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data set in the hub's layout, and its cache beside it."""
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    for split, count in (("train", 3), ("validation", 2)):
        for shade, name in enumerate(("ant", "cat", "dog")):
            place = tmp_path / "animals" / split / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = np.full((40, 40, 3), 80 * shade + number, dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
    return tmp_path / "animals"


def test_a_data_set_of_the_hub_is_opened_by_name(folder):
    data = fata.data.open(f"hf:{folder}")
    assert data.classes == ("ant", "cat", "dog")
    (batch,) = fata.stream(data, domains=["clean"])
    assert len(batch.labels) == 6  # of `validation`
    shades = (batch.images.mean((1, 2, 3)) * 255 / 80).floor().int()
    assert shades.tolist() == batch.labels.tolist()


def test_another_split_is_named_behind_it(folder):
    (batch,) = fata.stream(fata.data.open(f"hf:{folder}@train"), domains=["clean"])
    assert len(batch.labels) == 9
    with pytest.raises(DataError, match="Unknown split"):
        fata.data.open(f"hf:{folder}@test")


def test_its_corruptions_are_made(folder):
    clean, fog = fata.stream(fata.data.open(f"hf:{folder}"), domains=["clean", "fog"], seed=1)
    assert fog.domain == "fog-5"
    assert clean.images.mean() != fog.images.mean()


def test_no_name_and_no_package_are_told(monkeypatch):
    with pytest.raises(DataError, match="give hf:NAME"):
        fata.data.open("hf:")
    monkeypatch.setattr("fata.data.hugging_face.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install timm datasets"):
        fata.data.open("hf:animals")
