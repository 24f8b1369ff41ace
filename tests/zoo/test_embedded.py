"""The networks and images in the package."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import train_embedded as script

import fata
from fata.corruptions import BY_NAME
from fata.network.structure import auto_layer
from fata.zoo import embedded, mini
from reference_corruptions import reference_corrupt

DETERMINISTIC = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate")
DETERMINISTIC += ("jpeg_compression", "gaussian_blur", "saturate")  # held pixel by pixel
PACKAGE = Path(fata.__file__).parent


@pytest.fixture(scope="module")
def pictures():
    return fata.data.open("embedded").of(fata.data.Domain("clean"))


def accuracy(loaded, pixels, labels):
    with torch.inference_mode():
        right = [
            (loaded.model(loaded.preprocess.normalise(x)).argmax(1) == y).float()
            for x, y in zip(pixels.split(250), labels.split(250), strict=True)
        ]
    return 100 * torch.cat(right).mean().item()


@pytest.mark.parametrize("name", mini.CIFAR10)
def test_a_network_is_as_good_as_its_file_says(name, pictures):
    loaded = fata.zoo.load(name)
    reached = accuracy(loaded, pictures.images.float() / 255, pictures.labels)
    assert reached == pytest.approx(loaded.recipe["accuracy"], abs=2)
    assert loaded.labels == fata.data.open("embedded", fit=loaded).classes


@pytest.mark.parametrize("name", mini.TINY200)
def test_a_network_of_200_classes_tells_ten_others_apart(name, pictures):
    """Its own images may not be in the package: each of its classes stands for one of CIFAR-10."""
    loaded = fata.zoo.load(name)
    with torch.inference_mode():
        pixels = loaded.preprocess.normalise(pictures.images.float() / 255)
        predicted = torch.cat([loaded.model(x).argmax(1) for x in pixels.split(250)])
    assert loaded.classes == 200
    known, asked = torch.arange(0, 2000, 2), torch.arange(1, 2000, 2)
    counts = torch.zeros(200, 10).index_put(
        (predicted[known], pictures.labels[known]), torch.ones(1000), accumulate=True
    )
    named = counts.argmax(1)[predicted[asked]]
    assert (named == pictures.labels[asked]).float().mean() > 0.4


def test_the_package_stays_small():
    weights = sum(file.stat().st_size for file in PACKAGE.glob("zoo/weights/*"))
    images = sum(file.stat().st_size for file in PACKAGE.glob("data/embedded/*"))
    assert weights + images <= 40e6


@pytest.mark.parametrize(
    ("name", "layer"), [("mini_resnet_gn", "layer3"), ("mini_vit", "blocks.10")]
)
def test_fata_taps_where_the_paper_does(name, layer):
    assert auto_layer(mini.build(name)) == layer


@pytest.mark.parametrize("name", embedded.NAMES)
def test_presets_are_settings_of_their_methods(name):
    loaded = fata.zoo.load(name)
    found = {spec.partition("+")[0] for spec in loaded.presets}
    assert found == {"tent", "eata", "sar", "deyo", "roid", "zerosiam", "nctta"}
    for spec, fields in loaded.presets.items():
        settings = {**loaded.settings(spec), "fisher_alpha": 0} if "eata" in spec else fields
        fata.adapt(loaded.model, spec, **settings).unwrap()


def test_adapting_helps_where_the_statistics_moved():
    """Contrast of severity 5 is what batch statistics are known to undo."""
    loaded = fata.zoo.load("mini_resnet_bn")
    data = fata.data.open("embedded", fit=loaded)
    stream = fata.stream(data, domains=["contrast"], images=256)
    right = {}
    for spec in ("source", "norm", "tent+fata"):
        adapter = fata.adapt(loaded.model, spec, **loaded.settings(spec))
        answers = [adapter(loaded.preprocess.normalise(b.images)).argmax(1) for b in stream]
        right[spec] = (torch.cat(answers) == torch.cat([b.labels for b in stream])).float().mean()
        adapter.reset()
        adapter.unwrap()
    assert right["norm"] > right["source"] + 0.2
    assert right["tent+fata"] > right["source"] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in DETERMINISTIC])
def test_a_corruption_costs_as_much_accuracy_as_the_references(name, pictures):
    loaded = fata.zoo.load("mini_resnet_bn")
    ours = fata.corrupt(pictures.images.float() / 255, name, 5)
    np.random.seed(0)
    theirs = reference_corrupt(pictures.images.permute(0, 2, 3, 1).numpy(), name, 5, 32)
    theirs = torch.from_numpy(theirs).permute(0, 3, 1, 2).float() / 255
    costs = [accuracy(loaded, pixels, pictures.labels) for pixels in (ours, theirs)]
    assert costs[0] == pytest.approx(costs[1], abs=2)


def test_training_augments_without_leaving_the_pixels_range(pictures):
    images = pictures.images[:200].float() / 255
    seen = script.augmented(images, torch.Generator().manual_seed(0))
    again = script.augmented(images, torch.Generator().manual_seed(0))
    assert torch.equal(seen, again)
    assert seen.min() >= 0
    assert seen.max() <= 1
    assert not (seen == images).all((1, 2, 3)).any()


@pytest.mark.parametrize("cutmix", [0.0, 1.0])
def test_training_mixes_labels_as_it_mixes_images(cutmix):
    """An image of one value only shows how much is left of it."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    images = torch.arange(64.0)[:, None, None, None].expand(64, 3, 32, 32)
    x, y = script.mixed(images, torch.eye(64), cutmix, generator)
    torch.testing.assert_close(y.sum(1), torch.ones(64))
    torch.testing.assert_close(x.mean((1, 2, 3)), y @ torch.arange(64.0))
    assert ((y > 0).sum(1) == 2).any()


def test_the_training_script_learns(pictures, monkeypatch):
    """Shown two classes in a short run of the same code, a network predicts no other."""
    monkeypatch.setattr(script, "augmented", lambda pixels, g, holes: pixels)
    two = torch.cat([torch.nonzero(pictures.labels == label)[:8, 0] for label in (0, 9)])
    recipe = replace(script.RECIPES["mini_resnet_gn"], batch=16, lr=0.1, epochs=12)
    training = script.Training("mini_resnet_gn", script.CIFAR10, recipe, 0, "cpu")
    for _ in range(12):
        training.run(pictures.images[two], pictures.labels[two])
    model = training.finished().float()
    answers = model(script.CIFAR10.preprocess(pictures.images[:50].float() / 255)).argmax(1)
    assert set(answers.tolist()) <= {0, 9}


def test_training_that_was_stopped_continues_bit_for_bit(pictures, tmp_path):
    recipe = replace(script.RECIPES["tiny200_resnet_bn"], batch=16, epochs=3)
    images, labels = pictures.images[:32], pictures.labels[:32]

    def start():
        return script.Training("mini_resnet_bn", script.CIFAR10, recipe, 0, "cpu")

    whole, first = start(), start()
    for _ in range(2):
        whole.run(images, labels)
    first = start()
    first.run(images, labels)
    torch.save(first.state(), tmp_path / "resume.pt")
    second = start()
    torch.rand(7)  # other random numbers in between
    second.resume(tmp_path / "resume.pt")
    second.run(images, labels)
    for one, other in ((whole.model, second.model), (whole.average, second.average)):
        pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
