"""Data sets from small files laid out as the real ones, right and wrong; and `fata data`."""

import json
import os
import pickle
import re
import struct
import urllib.request
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder
from typer.testing import CliRunner

import fata
from fata import zoo
from fata.commands.app import app
from fata.corruptions import EXTRA, NAMES, weather
from fata.data import DataError, Domain, cifar
from fata.data.dataset import ImageFiles
from fata.zoo.loaded import Loaded, Weights
from fata.zoo.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

TENCH, GOLDFISH, BANANA = "n01440764", "n01443537", "n07753592"
SMALL = Preprocess(36, 32, "bilinear", IMAGENET_MEAN, IMAGENET_STD)
CLEAN = Domain("clean")


def pixels(seed, height=40, width=48):
    """An image without structure: any other crop, scale or order shows."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def picture(path, seed=0, height=40, width=48):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, height, width)).save(path)
    return path


def classes(folder, *names, images=2, suffix=".png"):
    for number, name in enumerate(names):
        for image in range(images):
            picture(folder / name / f"{image}{suffix}", seed=10 * number + image)
    return folder


def model(classes, use=SMALL, labels=()):
    weights = Weights("none", "here", "0" * 32)
    return Loaded("net", torch.nn.Identity(), use, classes, weights, labels=tuple(labels))


def opened(spec, **options):
    data = fata.data.open(spec, **options)
    return [data.of(domain) for domain in data.domains]


def refused(*parts, spec, **options):
    """Opening and listing every domain fails, and the message has all these parts."""
    with pytest.raises(DataError) as error:
        opened(spec, **options)
    for part in map(str, parts):
        assert part in str(error.value)


# --- specs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "parts"),
    [
        ("imagenet_c:x", {}, ["unknown data 'imagenet_c:x'", "Did you mean 'imagenet-c'"]),
        ("/nope", {}, ["unknown data '/nope'", "A folder is folder:/nope."]),
        ("embedded:x", {}, ["'embedded:x': give embedded."]),
        ("imagenet", {}, ["give imagenet:DIR"]),
        ("folder:no/such", {}, ["there is no folder 'no/such'"]),
        ("imagenet-c:x", {"jpeg": True}, ["jpeg", "imagenet-c"]),
        ("cifar10-c:x", {"jpeg": True}, ["jpeg", "cifar10-c"]),
        ("imagenet:x", {"download": True}, ["download", "cannot be downloaded", "docs/data.md"]),
    ],
)
def test_specs_that_cannot_be(spec, options, parts):
    refused(*parts, spec=spec, **options)


def test_a_file_is_no_folder_and_home_is_understood(tmp_path, monkeypatch):
    (tmp_path / "x.tar").touch()
    refused(tmp_path / "x.tar", spec=f"imagenet-c:{tmp_path}/x.tar")
    monkeypatch.setenv("HOME", str(tmp_path))
    classes(tmp_path / "mine", "a", "b")
    assert fata.data.open("folder:~/mine").classes == ("a", "b")


def test_embedded():
    data = fata.data.open("embedded")
    images = data.of(CLEAN)
    assert images.images.shape == (2000, 3, 32, 32)
    assert images.labels.bincount().tolist() == [200] * 10
    assert data.classes == cifar.CLASSES
    assert {domain.name for domain in data.domains} == {"clean", *NAMES, *EXTRA}
    assert [str(d) for d in data.domains[:3]] == ["clean", "gaussian_noise-1", "gaussian_noise-2"]


# --- ImageNet-C ----------------------------------------------------------------------------------


@pytest.fixture(params=["", "noise", "ImageNet-C"])
def imagenet_c(tmp_path, request):
    """Two corruptions, one of them at one severity only, as unpacked or a folder deeper."""
    for part in ("gaussian_noise/3", "gaussian_noise/5", "speckle_noise/5"):
        place = tmp_path / "data" / request.param / part
        for seed, synset in enumerate((BANANA, TENCH, GOLDFISH)):
            picture(place / synset / "ILSVRC2012_val_00000001.png", seed, 224, 224)
            (place / synset / "ILSVRC2012_val_00000001.png").rename(
                place / synset / "ILSVRC2012_val_00000001.JPEG"  # Pillow goes by the content
            )
    return tmp_path / "data"


def test_imagenet_c(imagenet_c):
    (imagenet_c / "gaussian_noise" / "12").mkdir(parents=True, exist_ok=True)
    (imagenet_c / "notes").mkdir()
    data = fata.data.open(f"imagenet-c:{imagenet_c}")
    assert list(map(str, data.domains)) == [
        "gaussian_noise-3", "gaussian_noise-5", "speckle_noise-5"
    ]  # fmt: skip
    images = data.of(Domain("gaussian_noise", 5))
    assert images.labels.tolist() == [0, 1, 954]
    assert [data.classes[label] for label in images.labels] == [TENCH, GOLDFISH, BANANA]
    assert np.array_equal(images.read(2).permute(1, 2, 0), pixels(0, 224, 224))  # as stored
    assert data.named(None, 5) == [Domain("gaussian_noise", 5)]


def test_what_imagenet_c_lacks_is_named(imagenet_c):
    data = fata.data.open(f"imagenet-c:{imagenet_c}")
    with pytest.raises(DataError, match=r"has no 'fog': it has 'gaussian_noise', 'speckle_noise'"):
        fata.stream(data, domains=["fog"])
    with pytest.raises(DataError, match=r"'gaussian_noise' at severity 4: it has 3, 5"):
        fata.stream(data, severity=4)


def test_extra_corruptions_alone_come_once_each(tmp_path):
    for severity in (1, 5):
        picture(tmp_path / "saturate" / str(severity) / TENCH / "a.png")
    data = fata.data.open(f"imagenet-c:{tmp_path}")
    assert data.named(None, 5) == [Domain("saturate", 5)]


def test_imagenet_c_is_listed_domain_by_domain(imagenet_c):
    """A folder is looked into when its domain is met, so a damaged one does not disturb others."""
    place = next(imagenet_c.rglob("gaussian_noise/3"))
    for file in (place / BANANA).iterdir():
        file.unlink()
    data = fata.data.open(f"imagenet-c:{imagenet_c}")
    assert len(data.of(Domain("gaussian_noise", 5)).labels) == 3
    with pytest.raises(DataError, match=re.escape(f"{place / BANANA} has no image")):
        data.of(Domain("gaussian_noise", 3))


def test_wrong_imagenet_c(tmp_path):
    (tmp_path / "fog" / "5" / "dogs").mkdir(parents=True)
    refused(tmp_path / "fog" / "5", "found 'dogs'", "n01440764/", spec=f"imagenet-c:{tmp_path}")
    refused("no ImageNet-C in", "'5'", "5/n01440764/", spec=f"imagenet-c:{tmp_path / 'fog'}")
    refused("found nothing", spec=f"imagenet-c:{tmp_path / 'fog/5/dogs'}")


# --- ImageNet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "val"])
def test_imagenet(tmp_path, inside):
    classes(tmp_path / inside, GOLDFISH, TENCH, BANANA, suffix=".JPEG")
    data = fata.data.open(f"imagenet:{tmp_path}", fit=model(1000))
    images = data.of(Domain("fog", 3))
    assert images.labels.tolist() == [0, 0, 1, 1, 954, 954]
    assert images.read(0).shape == (3, 32, 32)
    assert data.of(CLEAN) is images  # all corruptions are of the same images
    assert fata.data.open(f"imagenet:{tmp_path}").of(CLEAN).read(0).shape == (3, 224, 224)


def test_unsorted_validation_images(tmp_path):
    picture(tmp_path / "ILSVRC2012_val_00000001.JPEG")
    refused(tmp_path, "sorted into", "'ILSVRC2012_val_", spec=f"imagenet:{tmp_path}")


@pytest.mark.parametrize("kind", ["imagenet", "embedded"])
@pytest.mark.parametrize("jpeg", [False, True])
def test_corruptions_on_the_fly_are_those_of_corrupt(tmp_path, kind, jpeg):
    """With an image's number as its id, whatever the batch it comes in."""
    spec, fit = "embedded", None
    if kind == "imagenet":
        classes(tmp_path, TENCH, GOLDFISH)
        spec, fit = f"imagenet:{tmp_path}", model(1000)
    data = fata.data.open(spec, fit=fit, jpeg=jpeg)
    images = data.of(CLEAN)
    for size in (1, 3):
        for batch in fata.stream(data, domains=["snow"], severity=4, images=4, batch_size=size):
            ids = batch.index.tolist()
            clean = torch.stack([images.read(i) for i in ids]).float() / 255
            wanted = fata.corrupt(clean, "snow", 4, ids=ids, jpeg=jpeg)
            assert torch.equal(batch.images, wanted)
            assert not torch.equal(batch.images, clean)
            assert batch.labels.tolist() == images.labels[batch.index].tolist()


# --- CIFAR-10 ------------------------------------------------------------------------------------

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), np.uint8))
LABELS = [3, 8, 8, 0, 9]


def python_2(images, labels):
    """A batch as Python 2 and the NumPy of the time wrote it: the bytes of the real files."""

    def text(value):
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else long(value)

    def long(value):
        return b"T" + struct.pack("<i", len(value)) + value

    def whole(value):
        return b"J" + struct.pack("<i", value)

    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    kind += b"(K\x03" + text(b"|") + b"NNN" + whole(-1) + whole(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    array += b"\x87R(K\x01" + whole(len(images)) + whole(3072) + b"\x86" + kind + b"\x89"
    array += long(images.numpy().tobytes()) + b"tb"
    numbers = b"](" + b"".join(map(whole, labels)) + b"e"
    parts = text(b"batch_label") + text(b"testing batch 1 of 1") + text(b"labels") + numbers
    return b"\x80\x02}(" + parts + text(b"data") + array + b"u."


def python_3(protocol, keys=str, order="C"):
    def write(images, labels):
        data = np.array(images.flatten(1).numpy(), order=order)
        batch = {keys("data"): data, keys("labels"): labels}
        return pickle.dumps(batch, protocol)

    return write


def write_pickles(folder, how=python_2, images=IMAGES, labels=LABELS, names=("test_batch",)):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(how(images, labels))
    return folder


def write_pngs(folder, labels=LABELS, split="test", names=("test_batch",), list_name="lables"):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        rows = IMAGES.permute(0, 2, 3, 1).reshape(len(IMAGES), 1024, 3).numpy()
        Image.fromarray(rows).save(folder / f"{name}.png")
    (folder / f"{split}_{list_name}.json").write_text(json.dumps(labels))
    return folder


def ascii_bytes(text):
    return text.encode()


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
@pytest.mark.parametrize(
    "how",
    [
        python_2,
        *(python_3(protocol, keys) for protocol in (2, 4, 5) for keys in (str, ascii_bytes)),
        *(python_3(protocol, order="F") for protocol in (2, 4, 5)),
    ],
)
def test_cifar_pickles(tmp_path, how, inside):
    write_pickles(tmp_path / inside, how)
    images = fata.data.open(f"cifar10:{tmp_path}").of(CLEAN)
    assert torch.equal(images.images, IMAGES)
    assert images.labels.tolist() == LABELS


@pytest.mark.parametrize(("inside", "name"), [("", "lables"), ("package", "labels")])
def test_cifar_pngs(tmp_path, inside, name):
    write_pngs(tmp_path / inside, list_name=name)
    images = fata.data.open(f"cifar10:{tmp_path}").of(CLEAN)
    assert torch.equal(images.images, IMAGES)
    assert images.labels.tolist() == LABELS


@pytest.mark.parametrize("write", [write_pickles, write_pngs])
def test_cifar_training_images_are_in_five_parts(tmp_path, write):
    five = [f"data_batch_{number}" for number in range(1, 6)]
    png = write is write_pngs
    options = {"labels": 5 * LABELS, "split": "train"} if png else {}
    write(tmp_path, names=five, **options)
    images, labels = cifar.read(tmp_path, "train")
    assert torch.equal(images, IMAGES.repeat(5, 1, 1, 1))
    assert labels.tolist() == 5 * LABELS
    missing = tmp_path / f"data_batch_3{'.png' if png else ''}"
    missing.unlink()
    with pytest.raises(DataError, match=re.escape(f"{missing} is missing")):
        cifar.read(tmp_path, "train")


class Evil:
    def __init__(self, call, *arguments):
        self.made = call, arguments

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize(
    "evil",
    [
        lambda path: Evil(os.mkdir, str(path)),
        lambda path: Evil(eval, f"__import__('os').mkdir({str(path)!r})"),
        lambda path: Evil(np.memmap, str(path), "u1", "w+", 0, (1,)),
        lambda path: Evil(np.ndarray, (1,), np.dtype(object), bytes(8)),  # a pointer out of a file
    ],
    ids=["os", "eval", "memmap", "pointer"],
)
def test_pickles_that_would_run_code_are_refused(tmp_path, evil):
    content = {"data": evil(tmp_path / "run"), "labels": LABELS}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content))
    refused("cannot read", tmp_path / "test_batch", spec=f"cifar10:{tmp_path}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (python_2(IMAGES, LABELS)[:-20], "cannot read"),
        (b"not a pickle", "cannot read"),
        (pickle.dumps({"labels": LABELS}), "KeyError: 'data'"),
        (pickle.dumps([1]), "cannot read"),
        (python_3(4)(IMAGES, LABELS[:-1]), "expected 5 labels"),
        (python_3(4)(IMAGES, [*LABELS[:-1], 10]), "labels from 0 to 9"),
        (python_3(4)(IMAGES, [*LABELS[:-1], -1]), "labels from 0 to 9"),
        (python_3(4)(IMAGES, [*LABELS[:-1], 0.5]), "whole numbers"),
        (python_3(4)(IMAGES[:, :, :30], LABELS), "cannot read"),
        (python_3(4)(IMAGES.short(), LABELS), "expected bytes"),
    ],
)
def test_wrong_pickles(tmp_path, content, part):
    (tmp_path / "test_batch").write_bytes(content)
    refused(tmp_path / "test_batch", part, spec=f"cifar10:{tmp_path}")


@pytest.mark.parametrize(
    ("labels", "part"),
    [(LABELS[1:], "expected 5 labels"), ({"a": 1}, "cannot read"), ([9, 9, 9, 9, 99], "0 to 9")],
)
def test_wrong_labels_of_pngs(tmp_path, labels, part):
    write_pngs(tmp_path, labels)
    refused(tmp_path / "test_lables.json", part, spec=f"cifar10:{tmp_path}")


def test_wrong_pngs(tmp_path):
    file = write_pngs(tmp_path) / "test_batch.png"
    Image.new("RGB", (3072, 5)).save(file)
    refused(file, "rows of 3072 pixels; expected 1,024", spec=f"cifar10:{tmp_path}")
    file.write_bytes(file.read_bytes()[:60])
    refused("cannot read", file, spec=f"cifar10:{tmp_path}")
    write_pngs(tmp_path)
    (tmp_path / "test_lables.json").unlink()
    refused(tmp_path / "test_lables.json", spec=f"cifar10:{tmp_path}")
    file.unlink()
    refused("no CIFAR-10 in", tmp_path, "test_batch", spec=f"cifar10:{tmp_path}")


def test_download(tmp_path, monkeypatch):
    """Tried only where CIFAR-10 is missing; without a network the error says what to do."""

    def offline(*_, **__):
        raise URLError("no network here")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    refused(tmp_path, "no network here", "docs/data.md", spec=f"cifar10:{tmp_path}", download=True)
    write_pngs(tmp_path)
    write_pngs(tmp_path, split="train", names=["data_batch_1"])
    data = fata.data.open(f"cifar10:{tmp_path}", download=True)
    assert len(data.of(CLEAN).labels) == 5


# --- CIFAR-10-C ----------------------------------------------------------------------------------


@pytest.fixture
def cifar_c(tmp_path):
    """Two images at five severities; each image is of one value, which counts through the file."""
    for offset, name in ((0, "fog"), (100, "gaussian_noise")):
        images = np.arange(offset, offset + 10, dtype=np.uint8)[:, None, None, None]
        np.save(tmp_path / f"{name}.npy", np.tile(images, (1, 32, 32, 3)))
    np.save(tmp_path / "labels.npy", np.tile(np.array([7, 2], np.uint8), 5))
    return tmp_path


def test_cifar_c(cifar_c):
    data = fata.data.open(f"cifar10-c:{cifar_c}")
    assert data.named(None, 4) == [Domain("gaussian_noise", 4), Domain("fog", 4)]
    images = data.of(Domain("gaussian_noise", 4))
    assert images.images[:, 1, 2, 3].tolist() == [106, 107]
    assert images.labels.tolist() == [7, 2]
    (batch,) = fata.stream(data, domains=["fog"], severity=1)
    assert sorted(batch.images[:, 0, 0, 0].mul(255).round().tolist()) == [0, 1]  # as on the disk


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("fog", np.zeros((10, 32, 32, 3), np.float32), "expected uint8"),
        ("fog", np.zeros((9, 32, 32, 3), np.uint8), "(9, 32, 32, 3); expected uint8 of (10,"),
        ("fog", np.array([None]), "cannot read"),
        ("labels", np.full(10, 10), "labels from 0 to 9"),
        ("labels", np.zeros(9, int), "five severities"),
        ("labels", np.zeros((10, 1), int), "one an image"),
        ("labels", np.zeros(0, int), "labels from 0 to 9"),
    ],
)
def test_wrong_cifar_c(cifar_c, name, content, part):
    np.save(cifar_c / f"{name}.npy", content)
    refused(cifar_c / f"{name}.npy", part, spec=f"cifar10-c:{cifar_c}")


@pytest.mark.parametrize("gone", [["labels"], ["fog", "gaussian_noise"]])
def test_incomplete_cifar_c(cifar_c, gone):
    for name in gone:
        (cifar_c / f"{name}.npy").unlink()
    refused(cifar_c, "labels.npy", "gaussian_noise.npy", spec=f"cifar10-c:{cifar_c}")


# --- Office-Home ---------------------------------------------------------------------------------


def office_home(folder, *domains, number=65):
    content = picture(folder.parent / "one.png").read_bytes()
    for domain in domains:
        for one in range(number):
            place = folder / domain / f"Class_{one:02}"
            place.mkdir(parents=True)
            (place / "00001.jpg").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("inside", "domains"),
    [
        ("", ["Art", "Clipart", "Product", "Real World"]),
        ("OfficeHomeDataset_10072016", ["Art", "Clipart", "Product", "Real World"]),
        ("office-home", ["art", "clipart", "product", "real_world"]),
        ("", ["Art", "Clip Art", "Product", "RealWorld"]),
    ],
)
def test_office_home(tmp_path, inside, domains):
    office_home(tmp_path / "data" / inside, *domains)
    data = fata.data.open(f"office-home:{tmp_path}/data", fit=model(65))
    assert [str(domain) for domain in data.domains] == ["Art", "Clipart", "Product", "Real World"]
    assert data.named(None, 5) == list(data.domains)
    for domain in data.domains:
        assert data.of(domain).labels.tolist() == list(range(65))
    assert data.of(Domain("Real World")).name(0).endswith(f"{domains[3]}/Class_00/00001.jpg")


def test_wrong_office_home(tmp_path):
    folder = office_home(tmp_path / "data", "Art", "Clipart", "Product")
    refused("no folder for 'Real World'", folder, "'Clipart'", spec=f"office-home:{folder}")
    office_home(folder, "Real", number=64)
    refused(folder / "Real", "'Class_64', which other", spec=f"office-home:{folder}")
    few = office_home(tmp_path / "few", "Art", "Clipart", "Product", "Real", number=2)
    refused("has 65 classes", few, "has 2", spec=f"office-home:{few}")


# --- folders -------------------------------------------------------------------------------------


def test_a_folder_a_class(tmp_path):
    data = fata.data.open(f"folder:{classes(tmp_path, 'wasp', 'ant', 'Bee', images=3)}")
    assert data.classes == ("Bee", "ant", "wasp")
    assert data.of(CLEAN).labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.named(None, 5)[0] == Domain("gaussian_noise", 5)


def test_a_folder_a_domain(tmp_path):
    """All of them, though some have the name of a corruption."""
    for domain in ("night", "fog"):
        classes(tmp_path / domain, "cat", "dog")
    data = fata.data.open(f"folder:{tmp_path}")
    assert data.classes == ("cat", "dog")
    assert data.named(None, 5) == [Domain("fog"), Domain("night")]
    batches = list(fata.stream(data, domains=["fog"]))
    assert [batch.domain for batch in batches] == ["fog"]
    read = torch.stack([data.of(Domain("fog")).read(i) for i in batches[0].index.tolist()])
    assert torch.equal(batches[0].images, read.float() / 255)  # not corrupted
    refused("jpeg", tmp_path, spec=f"folder:{tmp_path}", jpeg=True)


def test_classes_named_by_numbers_are_labels(tmp_path):
    """So that a part of ImageNet as 0000/, 0001/, ... keeps its labels."""
    data = fata.data.open(f"folder:{classes(tmp_path, '0010', '0002', images=1)}", fit=model(12))
    assert data.of(CLEAN).labels.tolist() == [2, 10]
    assert len(data.classes) == 11
    refused("11 classes", "net has 10", spec=f"folder:{tmp_path}", fit=model(10))
    classes(tmp_path, "20261115")
    refused(tmp_path / "20261115", "taken for labels", spec=f"folder:{tmp_path}")


def test_wrong_folders(tmp_path):
    refused(tmp_path, "has no folders: expected one a class", spec=f"folder:{tmp_path}")
    classes(tmp_path / "mine", "a", "b")
    (tmp_path / "mine" / "empty").mkdir()
    refused(tmp_path / "mine" / "empty", "no image", ".jpg", spec=f"folder:{tmp_path / 'mine'}")
    classes(tmp_path / "both", "a")
    classes(tmp_path / "both" / "domain", "a")
    refused(
        tmp_path / "both" / "domain", tmp_path / "both" / "a", spec=f"folder:{tmp_path / 'both'}"
    )


def test_a_folder_that_cannot_be_listed_is_named(tmp_path):
    classes(tmp_path, "a")
    (tmp_path / "loop").symlink_to("loop")
    refused("cannot list", tmp_path, spec=f"folder:{tmp_path}")


def test_only_images_count(tmp_path):
    """Upper case and links do; hidden files, notes, and folders do not."""
    classes(tmp_path, "a", images=1)
    for name in (".DS_Store", "._0.png", "Thumbs.db", "notes.txt"):
        (tmp_path / "a" / name).touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a" / "folder.png").mkdir()
    picture(tmp_path / "a" / "B.JPEG")
    picture(tmp_path / "a" / "c.TiFF")
    (tmp_path / "a" / "link.png").symlink_to("0.png")
    (tmp_path / "linked").symlink_to("a")
    images = fata.data.open(f"folder:{tmp_path}").of(CLEAN)
    names = [Path(images.name(i)).name for i in range(len(images.labels))]
    assert names == 2 * ["0.png", "B.JPEG", "c.TiFF", "link.png"]
    assert torch.equal(images.read(3), images.read(4))


def test_the_order_and_the_pixels_are_those_of_torchvision(tmp_path):
    """Of photographs as they are: grey, with a palette, see-through, turned by EXIF."""
    classes(tmp_path, "b", "a", images=3, suffix=".jpg")
    Image.fromarray(pixels(1)[..., 0]).save(tmp_path / "a" / "grey.png")
    Image.fromarray(pixels(2)).convert("P").save(tmp_path / "b" / "palette.png")
    Image.fromarray(pixels(3)).convert("CMYK").save(tmp_path / "b" / "print.jpg")
    Image.fromarray(np.dstack([pixels(4), pixels(5)[..., 0]])).save(tmp_path / "b" / "a.webp")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by a quarter
    Image.fromarray(pixels(6)).save(tmp_path / "a" / "turned.jpg", exif=exif)
    images = fata.data.open(f"folder:{tmp_path}", fit=model(2)).of(CLEAN)
    view = transforms.Compose([transforms.Resize(36), transforms.CenterCrop(32)])
    theirs = ImageFolder(str(tmp_path), view)
    assert images.labels.tolist() == theirs.targets
    assert [images.name(i) for i in range(len(theirs))] == [path for path, _ in theirs.imgs]
    for i, (wanted, _) in enumerate(theirs):
        assert np.array_equal(images.read(i).permute(1, 2, 0), np.array(wanted))


def stored(tmp_path, image, **options):
    image.save(tmp_path / "one.png", **options)
    return ImageFiles(tmp_path, ["one.png"], torch.tensor([0]), lambda picture: picture).read(0)


def test_sixteen_bit_grey_is_scaled(tmp_path):
    grey = pixels(0)[..., 0]
    read = stored(tmp_path, Image.fromarray(grey.astype(np.uint16) * 256 + 255))
    assert torch.equal(read, torch.from_numpy(grey).expand(3, -1, -1))


def test_colours_that_are_seen_through_stay(tmp_path):
    """And Pillow's warning of such palettes is not heard."""
    image = Image.fromarray(pixels(0)).convert("P")
    read = stored(tmp_path, image, transparency=bytes(range(256)))
    assert np.array_equal(read.permute(1, 2, 0), np.array(image.convert("RGB")))


# --- models --------------------------------------------------------------------------------------


def test_the_model_decides_the_view(tmp_path):
    file = picture(tmp_path / "one" / "a.png", height=80, width=100)
    for use in (SMALL, Preprocess(20, 16, "bicubic", IMAGENET_MEAN, IMAGENET_STD, squash=True)):
        data = fata.data.open(f"folder:{tmp_path}", fit=model(1, use))
        with Image.open(file) as image:
            assert torch.equal(data.of(CLEAN).read(0).float() / 255, use.pixels(image))


def test_labels_must_fit_the_model(tmp_path):
    spec = f"folder:{classes(tmp_path, 'cat', 'dog')}"
    refused("has 2 classes, but net has 3", spec, spec=spec, fit=model(3))
    refused("has 2 classes, but net has 1", spec, spec=spec, fit=model(1))
    refused("in another order", spec, spec=spec, fit=model(2, labels=["dog", "cat"]))
    assert fata.data.open(spec, fit=model(2, labels=["cat", "dog"])).classes == ("cat", "dog")


def test_small_images_need_a_model_for_them():
    large = Preprocess(256, 224, "bilinear", IMAGENET_MEAN, IMAGENET_STD)
    refused("images of 32 pixels, but net takes 224", spec="embedded", fit=model(10, large))
    assert fata.data.open("embedded", fit=zoo.load("mini_resnet_gn")).classes == cifar.CLASSES


# --- what a result is kept with ------------------------------------------------------------------


def fingerprint(spec):
    data = fata.data.open(spec)
    return data.fingerprint(data.domains)


def test_fingerprints_follow_the_images_not_the_place(tmp_path, imagenet_c):
    before = fingerprint(f"imagenet-c:{imagenet_c}")
    moved = imagenet_c.rename(tmp_path / "elsewhere")
    assert fingerprint(f"imagenet-c:{moved}") == before
    changed = next(moved.rglob("speckle_noise/5")) / TENCH / "ILSVRC2012_val_00000001.JPEG"
    changed.write_bytes(changed.read_bytes() + b" ")
    assert fingerprint(f"imagenet-c:{moved}") != before


def test_fingerprints_of_images_in_memory(tmp_path):
    """Of the pixels and labels, whatever files they came in."""
    write_pngs(tmp_path)
    write_pickles(tmp_path / "pickles")
    before = fingerprint(f"cifar10:{tmp_path}")
    assert fingerprint(f"cifar10:{tmp_path / 'pickles'}") == before
    write_pngs(tmp_path, [0, *LABELS[1:]])
    assert fingerprint(f"cifar10:{tmp_path}") != before


def test_provenance_asks_no_file(imagenet_c):
    """So that a grid of results over a large disk can have it cheaply."""
    data = fata.data.open(f"imagenet-c:{imagenet_c}")
    assert data.provenance == {"data": f"imagenet-c:{imagenet_c}"}
    assert not data._opened
    made = fata.data.open("embedded", jpeg=True).provenance
    assert made["corruptions"] == "made, through JPEG 85"
    assert made["frost"] == weather.frost_source()


def test_the_snippets_of_the_docs_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for code in snippets:
        exec(compile(code, "docs/data.md", "exec"), {})
    assert len(snippets) == 4
    printed = capsys.readouterr().out
    assert "of 96 96" in printed
    assert "4 batches" in printed


# --- the command ---------------------------------------------------------------------------------


def call(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_the_command_says_what_is_there(imagenet_c):
    code, said = call(f"imagenet-c:{imagenet_c}")
    assert code == 0, said
    assert "1,000 classes: 'n01440764'" in said
    assert "gaussian_noise 3, 5 6" in said
    assert "speckle_noise 5 3" in said
    assert fingerprint(f"imagenet-c:{imagenet_c}") in said
    assert "frost" not in said


def test_the_command_on_made_corruptions():
    code, said = call("embedded", "--model", "mini_vit", "--check")
    assert code == 0, said
    assert "clean 2,000" in said
    assert f"19 corruptions, made, no JPEG; frost: {weather.frost_source()}" in said
    assert "fits mini_vit" in said
    assert "read 2,000 images, 0 damaged" in said


def test_the_command_says_what_it_passes_over(tmp_path):
    """Beside the class folders and in them; hidden files are not worth a word."""
    classes(tmp_path, "a", "b")
    assert "ignored" not in call(f"folder:{tmp_path}")[1]
    for name in ("b/notes.txt", "b/.DS_Store", "a/photo.heic", "stray.png"):
        (tmp_path / name).touch()
    picture(tmp_path / "b" / "deeper" / "0.png")
    code, said = call(f"folder:{tmp_path}")
    assert code == 0
    assert f"4 other files or folders ignored, first {tmp_path / 'a' / 'photo.heic'}" in said


def test_the_command_finds_damaged_images(tmp_path):
    classes(tmp_path, "a", "b", images=3)
    damaged = tmp_path / "b" / "1.png"
    damaged.write_bytes(damaged.read_bytes()[:200])
    assert call(f"folder:{tmp_path}")[0] == 0  # nothing was read
    code, said = call(f"folder:{tmp_path}", "--check")
    assert code == 1
    assert f"damaged: {damaged} (" in said
    assert "read 6 images, 1 damaged" in said
    code, said = call(f"folder:{tmp_path}", "--check", "--skip-damaged")
    assert code == 0
    assert f"damaged: {damaged} (" in said
    assert "read 6 images, 1 damaged" in said


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["cifar11:x"], "unknown data 'cifar11:x'"),
        (["folder:no/such"], "there is no folder"),
        (["embedded", "--download"], "cannot be downloaded"),
        (["embedded", "--skip-damaged"], "needs --check"),
        (["embedded", "--model", "mini"], "unknown model 'mini'"),
    ],
)
def test_the_command_refuses(arguments, part):
    code, said = call(*arguments)
    assert code == 2
    assert part in said


def test_the_command_refuses_a_model_that_does_not_fit(tmp_path):
    classes(tmp_path, "a", "b")
    code, said = call(f"folder:{tmp_path}", "--model", "mini_vit")
    assert code == 2
    assert "has 2 classes, but mini_vit has 10" in said
