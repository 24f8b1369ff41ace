"""Source models: what is learned, what is kept, what is written when, and wrong input."""

import dataclasses
import os
import signal
import subprocess
import sys
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageDraw
from typer.testing import CliRunner

from fata import data, training, zoo
from fata.commands.app import app
from fata.training import Epoch, Recipe, TrainingError, images, train_source
from fata.zoo import mini, model_file, sources
from fata.zoo.loaded import Loaded, Weights
from fata.zoo.preprocess import Preprocess

CLASSES = ("bar", "disc", "ring")
PLAIN = Preprocess(32, 32, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def shape(name, random, domain):
    """A shape of its own colour and place; the domains have other colours of the ground."""
    picture = Image.new("RGB", (44, 36), (230, 220, 200) if domain == "day" else (20, 30, 60))
    left, top, size = random.integers(0, 14), random.integers(0, 8), random.integers(20, 28)
    colour = tuple(int(c) for c in random.integers(60, 190, 3))
    box, draw = (left, top, left + size, top + size), ImageDraw.Draw(picture)
    if name == "bar":
        draw.rectangle((left, top + size // 2 - 3, left + size, top + size // 2 + 3), colour)
    else:
        draw.ellipse(box, colour if name == "disc" else None, colour, 3)
    return picture


def pictures(folder, domains=("day", "night"), each=20):
    for domain in domains:
        for label, name in enumerate(CLASSES):
            place = folder / domain / name
            place.mkdir(parents=True)
            for number in range(each):
                random = np.random.default_rng([label, number, domain == "day"])
                shape(name, random, domain).save(place / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return pictures(tmp_path_factory.mktemp("data") / "shapes")


@pytest.fixture(scope="module")
def spec(shapes):
    return f"folder:{shapes}"


def start(arch):
    """A network of the package, or one of timm with random weights."""
    if arch in mini.NAMES:
        return zoo.load(arch)
    torch.manual_seed(0)
    model = timm.create_model(arch, num_classes=10).eval()
    return Loaded(arch, model, PLAIN, 10, Weights.of(model, f"timm:{arch}", "nowhere"))


QUICK = Recipe(epochs=2, batch_size=16)


def train(spec, out, recipe=QUICK, arch="test_resnet", domain="day", **options):
    options = {"workers": 0, **options}
    return train_source(start(arch), data.open(spec), domain, out, recipe, **options)


def weights(path):
    return zoo.load(path).model.state_dict()


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


# -- what is learned -------------------------------------------------------------------------------


def test_it_learns_and_can_be_adapted_on_the_same_data(spec, tmp_path):
    seen: list[Epoch] = []
    out = tmp_path / "day.safetensors"
    recipe = Recipe(epochs=3, batch_size=16)
    trained = train(spec, out, recipe, "mini_resnet_gn", on_epoch=seen.append)
    assert [epoch.number for epoch in seen] == [1, 2, 3]
    assert seen[-1].loss < seen[0].loss
    assert seen[-1].accuracy > 80  # of 3 classes
    assert trained.recipe["accuracy"] == round(seen[-1].accuracy, 2)
    assert trained.labels == CLASSES

    dataset = data.open(spec, fit=trained)
    batch = next(iter(data.stream(dataset, domains=["day"])))
    with torch.no_grad():
        answers = trained.model(trained.preprocess.normalise(batch.images)).argmax(1)
    assert (answers == batch.labels).float().mean() > 0.8


@pytest.mark.parametrize(
    "arch", ["mini_resnet_gn", "mini_vit", "test_resnet", "test_vit", "test_convnext"]
)
def test_only_the_head_is_new(arch, spec, tmp_path):
    """At a rate next to nothing all tensors but the head's are the source's."""
    source = start(arch)
    before = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}
    recipe = Recipe(epochs=1, lr=1e-12, weight_decay=0.0)
    train(spec, tmp_path / "one.safetensors", recipe, arch)
    after = weights(tmp_path / "one.safetensors")
    other = {name for name in before if before[name].shape != after[name].shape}
    assert other
    assert all(name.startswith(("head", "fc")) and len(after[name]) == 3 for name in other)
    moving = ("running_mean", "running_var", "num_batches_tracked")
    for name in before.keys() - other:
        if not name.endswith(moving):
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)
    assert equal(before, source.model.state_dict())


def test_a_head_of_the_right_size_is_new_too(spec, tmp_path):
    recipe = Recipe(epochs=1, lr=1e-12)
    first = train(spec, tmp_path / "first.safetensors", recipe)
    second = train_source(
        first, data.open(spec), "night", tmp_path / "b.safetensors",
        dataclasses.replace(recipe, seed=1), workers=0,
    )  # fmt: skip
    old, new = first.model.state_dict(), second.model.state_dict()
    assert (old["fc.weight"] - new["fc.weight"]).abs().max() > 1e-3
    assert (old["bn1.weight"] - new["bn1.weight"]).abs().max() < 1e-6


def test_batch_norm_learns_statistics(spec, tmp_path):
    before = start("test_resnet").model.state_dict()["bn1.running_mean"]
    train(spec, tmp_path / "bn.safetensors")
    assert not torch.equal(before, weights(tmp_path / "bn.safetensors")["bn1.running_mean"])


def test_the_recipe_suits_the_network():
    assert Recipe.suiting(start("mini_resnet_gn").model) == Recipe("sgd", 0.01, 1e-4)
    vit = Recipe.suiting(start("mini_vit").model, epochs=3, lr=None)
    assert vit == Recipe("adamw", 3e-5, 0.05, epochs=3)


def test_rates_rise_then_fall_and_the_head_is_faster():
    model = mini.build("mini_resnet_gn", 3)
    recipe = Recipe(lr=0.5, weight_decay=0.1, warmup=0.1)
    optimizer = recipe.make_optimizer(model, {"fc.weight", "fc.bias"})
    scheduler = recipe.make_scheduler(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(scheduler.get_last_lr()[0] / 0.5)
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01
    groups = recipe.make_optimizer(model, {"fc.weight", "fc.bias"}).param_groups
    settings = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert settings[id(model.fc.weight)] == (5.0, 0.1)
    assert settings[id(model.fc.bias)] == (5.0, 0.0)
    assert settings[id(model.conv1.weight)] == (0.5, 0.1)
    assert settings[id(model.bn1.weight)] == (0.5, 0.0)


# -- the same seed, the same bits ------------------------------------------------------------------


def test_same_seed_same_bits_whatever_the_workers(spec, tmp_path, monkeypatch):
    """With dropout: the workers must not disturb its draws, nor the training the caller's."""

    def build(self, classes):
        return timm.create_model(self.name, num_classes=classes, drop_rate=0.5)

    monkeypatch.setattr(sources.Timm, "build", build)
    source, dataset = start("test_resnet"), data.open(spec)
    for name, workers, seed in (("a", 0, 0), ("b", 0, 0), ("c", 2, 0), ("d", 0, 1)):
        torch.rand(1)
        state = torch.get_rng_state()
        recipe = dataclasses.replace(QUICK, seed=seed)
        train_source(
            source, dataset, "day", tmp_path / f"{name}.safetensors", recipe, workers=workers
        )
        assert torch.equal(torch.get_rng_state(), state)
    a, b, c, d = (weights(tmp_path / f"{name}.safetensors") for name in "abcd")
    assert equal(a, b)
    assert equal(a, c)
    assert not equal(a, d)


def test_held_out_images_are_of_every_class_and_never_learned_from():
    labels = torch.tensor([0] * 40 + [1] * 15 + [2] * 3 + [3])
    learned, held = images.split(labels, 0.1, torch.Generator().manual_seed(0))
    assert labels[held].bincount(minlength=4).tolist() == [4, 2, 1, 0]
    assert sorted(torch.cat([learned, held]).tolist()) == list(range(len(labels)))
    again = images.split(labels, 0.1, torch.Generator().manual_seed(0))
    assert torch.equal(held, again[1])


def test_every_image_comes_once_an_epoch_each_time_another_way(spec):
    files = training.images_of(data.open(spec), "day")
    plan = images.TrainingPlan(files, PLAIN, Recipe(epochs=2, batch_size=20))
    assert [len(index) for _, index in plan.batches] == 2 * [18, 18, 18, 6]
    assert [place for place, _ in plan.batches] == 2 * [0, 0, 0, 1]
    first, second = (torch.cat([i for _, i in plan.batches[n : n + 3]]) for n in (0, 4))
    assert sorted(first.tolist()) == sorted((second - 60).tolist()) == sorted(plan.learned.tolist())
    assert not torch.equal(first, second - 60)
    learned, tested = plan.sources
    assert torch.equal(learned.read(7), learned.read(7))
    assert not torch.equal(learned.read(7), learned.read(67))
    assert learned.name(67) == tested.name(7)
    assert torch.equal(tested.read(7), dataclasses.replace(files, view=PLAIN.view).read(7))


def test_crops_stay_inside_and_fill_the_square():
    wide = Image.linear_gradient("L").convert("RGB").resize((300, 20))
    for number in range(200):
        view = images.random_crop(PLAIN, 0.25, Random(str(number)), wide)
        assert view.size == (32, 32)


# -- files -----------------------------------------------------------------------------------------


def test_the_file_says_how_it_was_made(spec, tmp_path):
    trained = train(spec, tmp_path / "day.safetensors")
    recipe, source = trained.recipe, start("test_resnet")
    assert dataclasses.asdict(QUICK).items() <= recipe.items()
    assert recipe["data"] == "shapes"  # not where it lies
    assert recipe["domain"] == "day"
    assert recipe["images"] == training.images_of(data.open(spec), "day").digest
    assert recipe["source"]["sha256"] == source.weights.sha256
    assert recipe["finished"] == 2
    assert (recipe["learned_from"], recipe["tested_on"], recipe["damaged"]) == (54, 6, 0)
    assert {"fata", "torch", "timm", "torchvision"} == recipe["versions"].keys()
    assert trained.preprocess == source.preprocess


def test_interrupted_training_leaves_the_last_finished_epoch(spec, tmp_path):
    out, after_two = tmp_path / "day.safetensors", []

    def interrupt(done, loss):
        if done > 0.7:  # within the third of four
            raise KeyboardInterrupt

    def keep(epoch):
        after_two[:] = [weights(out)]

    recipe = Recipe(epochs=4, batch_size=16)
    with pytest.raises(KeyboardInterrupt):
        train(spec, out, recipe, on_batch=interrupt, on_epoch=keep)
    assert zoo.load(out).recipe["finished"] == 2
    assert equal(weights(out), after_two[0])
    assert [file.name for file in tmp_path.iterdir()] == ["day.safetensors"]


def test_a_rate_too_high_is_told_and_not_written(spec, tmp_path):
    with pytest.raises(TrainingError, match="lower learning rate"):
        train(spec, tmp_path / "day.safetensors", Recipe(epochs=1, lr=1e30))
    assert not list(tmp_path.iterdir())


def test_hugging_face_is_refused(spec, tmp_path):
    model = mini.build("mini_resnet_gn")
    other = Loaded("hf:x/y", model, PLAIN, 10, Weights("hf:x/y", "x/y", "0"))
    with pytest.raises(zoo.ZooError, match=r"fine-tune it with transformers"):
        train_source(other, data.open(spec), "day", tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "fields", [{"epochs": 0}, {"batch_size": 1}, {"lr": 0.0}, {"optimizer": "lamb"}, {"crop": 2}]
)
def test_recipes_that_cannot_train(fields):
    with pytest.raises(TrainingError, match=rf"Recipe\({next(iter(fields))}="):
        Recipe(**fields)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file to start from."""
    path = tmp_path_factory.mktemp("models") / "small.safetensors"
    model_file.save(path, start("test_resnet").model, arch="timm:test_resnet", preprocess=PLAIN)
    return str(path)


@pytest.fixture
def call(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(spec, *arguments):
        usual = ["--epochs", "1", "--workers", "0", "--device", "cpu", "--model", small]
        return CliRunner().invoke(app, ["train-source", "--data", spec, *usual, *arguments])

    return call


def said(result):
    return " ".join(result.output.replace("│", " ").split())


def test_command_names_the_file_by_model_data_and_domain(call, spec, tmp_path):
    result = call(spec, "--domain", "night", "--model", "mini_resnet_gn")
    assert result.exit_code == 0, result.output
    assert "epoch 1/1: loss" in result.output
    assert "mini_resnet_gn-shapes-night.safetensors: learned from 54 images" in result.output
    trained = zoo.load(tmp_path / "mini_resnet_gn-shapes-night.safetensors")
    assert trained.recipe["domain"] == "night"
    assert trained.recipe["optimizer"] == "sgd"
    assert data.open(spec, fit=trained).classes == trained.labels


def test_command_trains_each_domain(call, spec, tmp_path):
    (tmp_path / "models").mkdir()
    result = call(spec, "--domain", "all", "-o", "models", "--seed", "3", "--lr", "0.02")
    assert result.exit_code == 0, result.output
    for domain in ("day", "night"):
        recipe = zoo.load(f"models/small-shapes-{domain}.safetensors").recipe
        assert (recipe["domain"], recipe["seed"], recipe["lr"]) == (domain, 3, 0.02)


def test_a_folder_without_domains_is_one(call, shapes):
    result = call(f"folder:{shapes / 'day'}", "-o", "day.safetensors")
    assert result.exit_code == 0, result.output
    assert zoo.load("day.safetensors").recipe["domain"] == "clean"


def test_damaged_images(call, tmp_path):
    folder = pictures(tmp_path / "shapes", ("day",), 6)
    broken = folder / "day" / "disc" / "00.png"
    broken.write_bytes(broken.read_bytes()[:60])
    result = call(f"folder:{folder}", "--domain", "day", "-o", "day.safetensors")
    assert result.exit_code == 2
    assert "disc/00.png" in "".join(said(result).split())
    assert "--skip-damaged" in said(result)
    result = call(
        f"folder:{folder}", "--domain", "day", "-o", "day.safetensors", "--skip-damaged",
        "--epochs", "3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "1 damaged" in result.output  # once, however often it is met
    assert zoo.load("day.safetensors").recipe["damaged"] == 1


def test_batches_that_are_all_damaged(tmp_path):
    folder = pictures(tmp_path / "shapes", ("day",), 8)
    out, options = tmp_path / "day.safetensors", {"skip_damaged": True}
    for file in (folder / "day" / "bar").iterdir():
        file.write_bytes(b"")
    recipe = Recipe(epochs=2, batch_size=2)  # of 21 images, 7 damaged
    assert train(f"folder:{folder}", out, recipe, **options).recipe["damaged"] == 8
    for file in folder.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(data.DataError, match="all images to learn from"):
        train(f"folder:{folder}", out, recipe, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has 2 domains: name the one to train on, 'day', 'night', or all"),
        (["--domain", "nite"], "it has 'day', 'night'. Did you mean 'night'?"),
        (["--domain", "day", "--model", "resnet51"], "unknown model 'resnet51'"),
        (["--domain", "day", "--epochs", "0"], "'--epochs'"),
        (["--domain", "day", "--lr", "0"], "lr=0.0"),
        (["--domain", "day", "--device", "abacus"], "no device 'abacus'"),
        (["--domain", "day", "-o", "no/such.safetensors"], "cannot write 'no/such.safetensors'"),
        (["--domain", "day", "-o", "model.bin"], "ends in .safetensors"),
        (["--domain", "all", "-o", "a.safetensors"], "cannot write 2 models"),
    ],
)
def test_command_refuses(call, spec, tmp_path, monkeypatch, arguments, message):
    def never(*arguments, **options):
        raise AssertionError("started to train")

    monkeypatch.setattr(training, "train_source", never)
    result = call(spec, *arguments)
    assert result.exit_code == 2, result.output
    assert message in said(result)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["pictures", "tensors"])
def test_command_trains_on_a_function_of_ones_own(call, shapes, tmp_path, kind):
    """The same images as from the folder, in the same crops: the same weights."""
    files = f"sorted(Path({str(shapes / 'day')!r}).glob('*/*.png'))"
    open_ = {
        "pictures": "Image.open(file)",
        "tensors": "torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)",
    }[kind]
    (tmp_path / "mine_to_train.py").write_text(
        "from pathlib import Path\n"
        "import numpy as np, torch\n"
        "from PIL import Image\n"
        "def loader():\n"
        f"    files = {files}\n"
        f"    names = {CLASSES!r}\n"
        f"    return [({open_}, names.index(file.parent.name)) for file in files]\n"
    )
    own = call("mine_to_train:loader", "--domain", "clean", "-o", "own.safetensors")
    assert own.exit_code == 0, own.output
    assert call(f"folder:{shapes}", "--domain", "day", "-o", "files.safetensors").exit_code == 0
    mine, theirs = (weights(tmp_path / f"{name}.safetensors") for name in ("own", "files"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_command_refuses_data_without_folders(call, shapes, tmp_path):
    corrupted = tmp_path / "c" / "fog" / "5" / "n01440764"
    corrupted.parent.mkdir(parents=True)
    corrupted.symlink_to(shapes / "day" / "disc")
    for spec, message in (
        ("embedded", "is no folder of images"),
        ("folder:no", "no folder"),
        (f"imagenet-c:{tmp_path / 'c'}", "corruptions alone"),
    ):
        result = call(spec)
        assert result.exit_code == 2
        assert message in said(result)


def test_control_c_keeps_the_last_epoch(spec, small, tmp_path):
    command = [
        sys.executable,
        "-c",
        "from fata.commands.app import app; app()",
        "train-source",
        "--data",
    ]
    command += [spec, "--domain", "day", "--model", small, "--epochs", "1000"]
    command += ["-o", str(tmp_path / "day.safetensors"), "--workers", "1", "--device", "cpu"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in running.stdout:
        if line.startswith("epoch 1/"):
            break
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130, err
    assert "Traceback" not in out + err
    finished = zoo.load(tmp_path / "day.safetensors").recipe["finished"]
    assert f"stopped after {finished} of 1000 epochs" in out
