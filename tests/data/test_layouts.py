"""Data sets of ImageNet's classes and of several domains, from small files laid out as theirs."""

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.test_data import (
    BANANA,
    CLEAN,
    IMAGES,
    SMALL,
    TENCH,
    call,
    classes,
    model,
    picture,
    pixels,
    python_3,
    refused,
)

import fata
from fata.data import DataError, Domain
from fata.zoo.preprocess import Preprocess

GOLDFISH, SHARK = "n01443537", "n01484850"  # both in ImageNet-R; BANANA too, TENCH not
RAY, ROBIN = "n01498041", "n01558993"  # the first is in ImageNet-A, both are in ImageNet


def names(data):
    return [str(domain) for domain in data.domains]


# --- ImageNet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "imagenet-r"])
def test_imagenet_r_is_numbered_among_its_200_classes(tmp_path, inside):
    classes(tmp_path / inside, BANANA, SHARK, GOLDFISH, images=1)
    picture(tmp_path / inside / TENCH / "0.png")  # no class of ImageNet-R
    data = fata.data.open(f"imagenet-r:{tmp_path}", fit=model(1000))
    assert names(data) == ["imagenet-r"]
    assert len(data.classes) == len(data.mask) == 200
    images = data.of(Domain("imagenet-r"))
    assert [data.classes[label] for label in images.labels] == [GOLDFISH, SHARK, BANANA]
    assert images.labels[:2].tolist() == [0, 1]
    assert [data.mask[label] for label in images.labels] == [1, 2, 954]  # of the 1,000
    assert list(data.mask) == sorted(data.mask)


def test_imagenet_a_has_other_200_classes(tmp_path):
    classes(tmp_path, RAY, images=1)
    data = fata.data.open(f"imagenet-a:{tmp_path}", fit=model(1000))
    other = fata.data.open(f"imagenet-r:{classes(tmp_path / 'r', SHARK)}")
    assert data.of(data.domains[0]).labels.tolist() == [0]
    assert data.mask[0] == 6
    assert len(data.mask) == 200
    assert data.mask != other.mask
    refused("no ImageNet images", "n01498041/", spec=f"imagenet-a:{tmp_path / 'r'}")


def test_imagenet_sketch_has_all_classes(tmp_path):
    classes(tmp_path / "sketch", BANANA, TENCH, images=1)
    data = fata.data.open(f"imagenet-sketch:{tmp_path}", fit=model(1000))
    assert data.of(Domain("imagenet-sketch")).labels.tolist() == [0, 954]
    assert data.mask is None


@pytest.mark.parametrize("inside", ["", "imagenetv2-matched-frequency-format-val"])
def test_imagenet_v2_is_numbered_by_its_folders(tmp_path, inside):
    classes(tmp_path / inside, "10", "2", "999", images=1)
    data = fata.data.open(f"imagenet-v2:{tmp_path}", fit=model(1000))
    assert data.of(Domain("imagenet-v2")).labels.tolist() == [2, 10, 999]
    assert data.classes[0] == TENCH
    refused("0/ to 999/", spec=f"imagenet-v2:{classes(tmp_path / 'x', 'cat')}")


@pytest.mark.parametrize("kind", ["imagenet-r", "imagenet-v2", "pacs", "cifar100-c"])
def test_images_that_are_used_as_they_are_take_no_jpeg(kind, tmp_path):
    refused("jpeg", kind, spec=f"{kind}:{tmp_path}", jpeg=True)


# --- Tiny-ImageNet -------------------------------------------------------------------------------

WNIDS = [SHARK, BANANA, GOLDFISH]  # the file's order is not the classes'


def tiny(folder, layout):
    """Two images of the banana, one of the goldfish, none of the shark."""
    (folder / "val").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    files = [(f"val_{n}.png", wnid) for n, wnid in enumerate((BANANA, GOLDFISH, BANANA))]
    place = {"annotated": "images", "folders": "{}", "inner": "{}/images"}[layout]
    for number, (file, wnid) in enumerate(files):
        picture(folder / "val" / place.format(wnid) / file, number, 64, 64)
    lines = [f"{file}\t{wnid}\t0\t0\t63\t63" for file, wnid in files]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("layout", ["annotated", "folders", "inner"])
@pytest.mark.parametrize("inside", ["", "tiny-imagenet-200"])
def test_tiny_imagenet(tmp_path, layout, inside):
    tiny(tmp_path / inside, layout)
    data = fata.data.open(f"tiny-imagenet:{tmp_path}", fit=model(3))
    assert data.classes == (GOLDFISH, SHARK, BANANA)
    found = data.of(CLEAN)
    seen = {found.name(i)[-9:]: label for i, label in enumerate(found.labels.tolist())}
    assert seen == {"val_0.png": 2, "val_1.png": 0, "val_2.png": 2}
    assert Domain("fog", 3) in data.domains
    assert found.read(0).shape == (3, 32, 32)  # as the model takes them
    batch = next(iter(fata.stream(data, domains=["contrast"], severity=2)))
    clean = torch.stack([found.read(i) for i in batch.index.tolist()]).float() / 255
    wanted = fata.corrupt(clean, "contrast", 2, ids=batch.index.tolist())
    assert torch.equal(batch.images, wanted)
    said = call(f"tiny-imagenet:{tmp_path}")[1]
    assert ("ignored" in said) == (layout != "annotated")  # the annotations, among the folders


def test_tiny_imagenet_follows_the_order_that_the_model_names(tmp_path):
    tiny(tmp_path, "annotated")
    data = fata.data.open(f"tiny-imagenet:{tmp_path}", fit=model(3, labels=WNIDS))
    assert data.classes == tuple(WNIDS)
    assert data.of(CLEAN).labels.tolist() == [1, 2, 1]


def test_wrong_tiny_imagenet(tmp_path):
    refused("no Tiny-ImageNet", "val_annotations.txt", spec=f"tiny-imagenet:{tmp_path}")
    tiny(tmp_path, "annotated")
    (tmp_path / "wnids.txt").write_text(SHARK)
    refused(BANANA, "wnids.txt", spec=f"tiny-imagenet:{tmp_path}")
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.png n01443537\n")
    refused("val_annotations.txt", "a file and a class", spec=f"tiny-imagenet:{tmp_path}")


def npz(path, labels=(3, 199), cut=0):
    files = []
    for seed in range(2):
        Image.fromarray(pixels(seed, 32, 32)).save(file := io.BytesIO(), "JPEG", quality=100)
        files.append(np.frombuffer(file.getvalue(), np.uint8))
    blob = np.concatenate(files)
    blob = blob[: len(blob) - cut]
    lens = np.array([len(file) for file in files], np.int32)
    np.savez(path, blob=blob, lens=lens, labels=np.array(labels, np.int16))
    return [np.array(Image.open(io.BytesIO(file.tobytes()))) for file in files]


def test_tiny_imagenet_in_one_file(tmp_path):
    stored = npz(tmp_path / "val.npz")
    use = Preprocess(32, 32, "bilinear", SMALL.mean, SMALL.std)
    data = fata.data.open(f"tiny-imagenet:{tmp_path}", fit=model(200, use))
    images = data.of(CLEAN)
    assert images.labels.tolist() == [3, 199]
    for index, wanted in enumerate(stored):
        assert np.array_equal(images.read(index).permute(1, 2, 0), wanted)
    assert sum(len(batch.images) for batch in fata.stream(data, domains=["fog", "snow"])) == 4
    before = images.digest
    npz(tmp_path / "val.npz", labels=(4, 199))
    assert fata.data.open(f"tiny-imagenet:{tmp_path}").of(CLEAN).digest != before


@pytest.mark.parametrize(
    ("wrong", "part"),
    [({"labels": (3, 200)}, "0 to 199"), ({"labels": (3,)}, "belong"), ({"cut": 1}, "belong")],
)
def test_wrong_tiny_imagenet_in_one_file(tmp_path, wrong, part):
    npz(tmp_path / "val.npz", **wrong)
    refused(tmp_path / "val.npz", part, spec=f"tiny-imagenet:{tmp_path}")
    (tmp_path / "val.npz").write_bytes(b"no archive")
    refused("cannot read", tmp_path / "val.npz", spec=f"tiny-imagenet:{tmp_path}")


# --- CIFAR-100 -----------------------------------------------------------------------------------


def cifar_100(folder, meta=True):
    """As the python version: a file a split, the names of the classes in a third."""
    folder.mkdir(parents=True, exist_ok=True)
    content = pickle.loads(python_3(2)(IMAGES, [3, 8, 99, 0, 9]))
    content["fine_labels"] = content.pop("labels")
    content["coarse_labels"] = [0] * 5
    (folder / "test").write_bytes(pickle.dumps(content, 2))
    if meta:
        listed = {"fine_label_names": [f"class {n}" for n in range(100)]}
        (folder / "meta").write_bytes(pickle.dumps(listed, 2))
    return folder


@pytest.mark.parametrize("inside", ["", "cifar-100-python"])
def test_cifar_100(tmp_path, inside):
    cifar_100(tmp_path / inside)
    data = fata.data.open(f"cifar100:{tmp_path}", fit=model(100))
    assert data.classes[99] == "class 99"
    assert data.of(CLEAN).labels.tolist() == [3, 8, 99, 0, 9]
    assert torch.equal(data.of(CLEAN).images, IMAGES)
    assert Domain("fog", 5) in data.domains


def test_wrong_cifar_100(tmp_path):
    refused("no CIFAR-100 in", "cifar-100-python", spec=f"cifar100:{tmp_path}")
    refused("cannot read", "meta", spec=f"cifar100:{cifar_100(tmp_path, meta=False)}")


def test_cifar_100_c(tmp_path):
    np.save(tmp_path / "fog.npy", np.zeros((10, 32, 32, 3), np.uint8))
    np.save(tmp_path / "labels.npy", np.tile(np.array([99, 2]), 5))
    data = fata.data.open(f"cifar100-c:{tmp_path}", fit=model(100))
    assert data.of(Domain("fog", 2)).labels.tolist() == [99, 2]
    refused("has 100 classes, but net has 1000", spec=f"cifar100-c:{tmp_path}", fit=model(1000))
    np.save(tmp_path / "labels.npy", np.full(10, 100))
    refused("0 to 99", spec=f"cifar100-c:{tmp_path}")


# --- several domains -----------------------------------------------------------------------------

PACS = ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]


@pytest.mark.parametrize("art", ["art_painting", "art", "Art Painting"])
def test_pacs(tmp_path, art):
    for domain in (art, "cartoon", "photo", "sketch"):
        classes(tmp_path / "kfold" / domain, *PACS, images=1)
    data = fata.data.open(f"pacs:{tmp_path}", fit=model(7))
    assert names(data) == ["art_painting", "cartoon", "photo", "sketch"]
    assert data.classes == tuple(PACS)
    for domain in data.domains:
        assert data.of(domain).labels.tolist() == list(range(7))


def test_wrong_pacs(tmp_path):
    classes(tmp_path / "photo", *PACS)
    refused("no folder for 'art_painting'", spec=f"pacs:{tmp_path}")
    refused("no PACS in", "art_painting", spec=f"pacs:{tmp_path / 'photo'}")


def domainnet(folder):
    for domain in ("clipart", "real", "sketch"):
        classes(folder / domain, "ant", "bee", "cat", "dog", images=2)
    return folder


def test_domainnet_by_its_folders(tmp_path):
    data = fata.data.open(f"domainnet:{domainnet(tmp_path)}", fit=model(4))
    assert names(data) == ["clipart", "real", "sketch"]
    assert data.classes == ("ant", "bee", "cat", "dog")
    assert data.mask is None
    assert data.of(Domain("sketch")).labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_domainnet_by_its_lists(tmp_path):
    """Images and labels are the lists'; a model of all classes is masked, one of these is not."""
    domainnet(tmp_path)
    (tmp_path / "clipart_list.txt").write_text("clipart/dog/1.png 1\nclipart/bee/0.png 0\n")
    (tmp_path / "real_list.txt").write_text("real/bee/1.png 0\n")
    data = fata.data.open(f"domainnet:{tmp_path}", fit=model(4))
    assert names(data) == ["clipart", "real"]
    assert data.classes == ("bee", "dog")
    assert data.mask == (1, 3)
    images = data.of(Domain("clipart"))
    assert images.labels.tolist() == [1, 0]
    assert images.name(0).endswith("clipart/dog/1.png")
    assert images.read(0).shape == (3, 32, 32)
    assert fata.data.open(f"domainnet:{tmp_path}", fit=model(2)).mask is None
    refused("has 2 classes (4 before the mask)", spec=f"domainnet:{tmp_path}", fit=model(3))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("clipart/dog/1.png", "line 1: expected a path and a label"),
        ("real/dog/1.png 0", "expected clipart/CLASS/FILE"),
        ("clipart/dog/1.png 1", "none missing"),
        ("clipart/dog/1.png 0\nclipart/bee/1.png 0", "label 0 is 'bee' here and 'dog' before"),
        ("\n", "lists no image"),
    ],
)
def test_wrong_lists(tmp_path, text, part):
    (domainnet(tmp_path) / "clipart_list.txt").write_text(text)
    refused(tmp_path / "clipart_list.txt", part, spec=f"domainnet:{tmp_path}")


VISDA = [f"class_{n:02}" for n in range(12)]


def test_visda_c(tmp_path):
    classes(tmp_path / "train", *VISDA, images=1)
    classes(tmp_path / "validation", *VISDA, images=1)
    picture(tmp_path / "test" / "trunk00" / "a.png")
    picture(tmp_path / "test" / "trunk01" / "b.png")
    (tmp_path / "test" / "image_list.txt").write_text("trunk00/a.png 11\ntrunk01/b.png 4\n")
    data = fata.data.open(f"visda-c:{tmp_path}", fit=model(12))
    assert names(data) == ["train", "validation", "test"]
    assert data.of(Domain("validation")).labels.tolist() == list(range(12))
    assert data.of(Domain("test")).labels.tolist() == [11, 4]
    (tmp_path / "test" / "image_list.txt").write_text("trunk00/a.png 12\n")
    refused("0 to 11", spec=f"visda-c:{tmp_path}")


def test_wrong_visda_c(tmp_path):
    refused("no VisDA-C in", spec=f"visda-c:{tmp_path}")
    classes(tmp_path / "train", *VISDA[:3])
    refused("has 12 classes", "'class_02'", spec=f"visda-c:{tmp_path}")


# --- folders without some of the classes ---------------------------------------------------------


def test_a_domain_may_lack_classes(tmp_path):
    """The labels are those of all domains together; an empty folder is a class without images."""
    classes(tmp_path / "day", "ant", "bee", "cat", images=1)
    classes(tmp_path / "night", "ant", "cat", images=1)
    (tmp_path / "night" / "bee").mkdir()
    classes(tmp_path / "rain", "bee", images=1)
    data = fata.data.open(f"folder:{tmp_path}", fit=model(3))
    assert data.classes == ("ant", "bee", "cat")
    labels = {str(domain): data.of(domain).labels.tolist() for domain in data.domains}
    assert labels == {"day": [0, 1, 2], "night": [0, 2], "rain": [1]}
    (tmp_path / "fog" / "ant").mkdir(parents=True)
    with pytest.raises(DataError, match="fog has no image"):
        fata.data.open(f"folder:{tmp_path}").of(Domain("fog"))


def test_a_domain_of_some_numbered_classes(tmp_path):
    classes(tmp_path / "a", "0", "7", images=1)
    classes(tmp_path / "b", "2", images=1)
    data = fata.data.open(f"folder:{tmp_path}", fit=model(10))
    assert data.of(Domain("b")).labels.tolist() == [2]


def test_a_model_that_names_its_classes_numbers_them(tmp_path):
    """So that classes may be missing everywhere."""
    for layout in ("one", "two/day"):
        classes(tmp_path / layout, "cat", "ant", images=1)
    for layout in ("one", "two"):
        fit = model(3, labels=["ant", "bee", "cat"])
        data = fata.data.open(f"folder:{tmp_path / layout}", fit=fit)
        assert data.classes == ("ant", "bee", "cat")
        assert data.of(data.domains[0]).labels.tolist() == [0, 2]
    refused("has 2 classes, but net has 3", spec=f"folder:{tmp_path / 'one'}", fit=model(3))
