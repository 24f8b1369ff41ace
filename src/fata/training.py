"""Source models: a network of the zoo, fine-tuned on one domain. docs/train-source.md says why so.

The paper adapts models trained on one domain of Office-Home and does not say how they were trained.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from fata._text import listed, near
from fata.data.dataset import Dataset, Domain, ImageFiles, data_name
from fata.data.errors import DataError
from fata.data.serve import intact_rows, read, refuse
from fata.engine.rates import is_transformer_like
from fata.network.outputs import logits_of
from fata.zoo import checkpoint, sources
from fata.zoo.loaded import Loaded, ZooError
from fata.zoo.preprocess import Preprocess

MOMENTUM = 0.9
RATIO = 4 / 3  # of a crop's sides, at most
_OPTIMIZERS = ("sgd", "adamw")


class TrainingError(ValueError):
    """A recipe that cannot train, or a training that came to nothing."""


@dataclass(frozen=True)
class Recipe:
    """How a source model is trained; `Recipe.suiting` has the numbers for a network.

    Args:
        optimizer: `sgd` with momentum 0.9, or `adamw`.
        lr: highest learning rate of the network; it rises over the warm-up and falls by a cosine.
        weight_decay: of matrices and filters.
        head: the new classifier learns so many times faster.
        epochs: passes over the images.
        batch_size: images a step, at most; those of an epoch are spread evenly over its steps.
        warmup: share of the steps.
        smoothing: of the labels.
        crop: smallest share of an image that a random crop keeps.
        held_out: share of each class that is not learned from.
        seed: of the split, the new classifier, the order, the crops and any dropout.
    """

    optimizer: str = "sgd"
    lr: float = 0.01
    weight_decay: float = 1e-4
    head: float = 10.0
    epochs: int = 30
    batch_size: int = 64
    warmup: float = 0.05
    smoothing: float = 0.1
    crop: float = 0.25
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        accepted = {
            "optimizer": (self.optimizer in _OPTIMIZERS, f"one of {', '.join(_OPTIMIZERS)}"),
            "lr": (0 < self.lr < math.inf, "a positive number"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "a number, at least 0"),
            "head": (0 < self.head < math.inf, "a positive number"),
            "epochs": (self.epochs >= 1, "at least 1"),
            "batch_size": (self.batch_size >= 2, "at least 2"),
            "warmup": (0 <= self.warmup <= 1, "a share, 0 to 1"),
            "smoothing": (0 <= self.smoothing < 1, "at least 0 and below 1"),
            "crop": (0 < self.crop <= 1, "a share, above 0 and at most 1"),
            "held_out": (0 < self.held_out < 1, "a share, above 0 and below 1"),
        }
        for name, (fine, expected) in accepted.items():
            if not fine:
                raise TrainingError(f"Recipe({name}={getattr(self, name)!r}): give {expected}.")

    @classmethod
    def suiting(cls, model: nn.Module, **fields: Any) -> Recipe:
        """The recipe for a network, with the fields that are given and not None."""
        if is_transformer_like(model):
            start = cls(optimizer="adamw", lr=3e-5, weight_decay=0.05)
        else:
            start = cls()
        given = {name: value for name, value in fields.items() if value is not None}
        return replace(start, **given)


class Epoch(NamedTuple):
    """What a finished epoch came to."""

    number: int  # from 1
    loss: float  # mean over the images learned from
    accuracy: float  # of the held-out images, in %
    damaged: tuple[str, ...]  # images left out so far, and why


def train_source(
    loaded: Loaded,
    dataset: Dataset,
    domain: str,
    out: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    device: torch.device | str = "cpu",
    workers: int | None = None,
    skip_damaged: bool = False,
    on_batch: Callable[[float, float], None] = lambda done, loss: None,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> Loaded:
    """Fine-tune a network on one domain, with a new classifier for the data's classes.

    The file is written after every epoch: whatever ends the training, the last finished one is in
    it. On a CPU the same seed gives the same bits, whatever the number of workers.

    Args:
        loaded: where to start, of `fata.zoo.load`; it is not changed.
        dataset: images in folders, of `fata.data.open`.
        domain: to train on; `clean` for data without domains.
        out: a file that ends in `.safetensors`, for `fata.zoo.load`.
        recipe: None: the one that suits the network.
        device: where to train.
        workers: processes that decode images (None: a few); 0 decodes in this one.
        skip_damaged: leave damaged images out, where one would be an error.
        on_batch: is told, after each step, the share of all steps that is done, and the loss.
        on_epoch: is told of each epoch, once it is in the file.

    Raises:
        DataError: no such domain, or an image that cannot be read.
        ZooError: a network that cannot be given a new classifier.
        TrainingError: the training diverged.
        OSError: the file cannot be written; found out before the training starts.
    """
    device, out = torch.device(device), Path(out)
    pictures = pictures_of(dataset, domain)
    _check_writable(out)
    recipe = recipe or Recipe.suiting(loaded.model)
    plan = _Plan(pictures, loaded.preprocess, recipe)
    facts = {
        **asdict(recipe),
        "data": data_name(dataset.spec),
        "domain": domain,
        "images": pictures.digest,
        "learned_from": len(plan.learned),
        "tested_on": len(plan.held),
        "source": {"tag": loaded.weights.tag, "sha256": loaded.weights.sha256},
        "versions": _versions(),
    }
    damaged: dict[str, None] = {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        arch, model, head = _with_new_head(loaded, len(dataset.classes))
        optimizer = _optimizer(model.to(device), head, recipe)
        schedule = _schedule(recipe.epochs * plan.steps, recipe.warmup)
        with closing(_served(plan, device, workers, skip_damaged, damaged)) as batches:
            for number in range(1, recipe.epochs + 1):
                steps = zip(islice(batches, plan.steps), schedule, strict=False)
                loss = _learn(model, optimizer, steps, recipe.smoothing, on_batch)
                accuracy = _accuracy(model, islice(batches, plan.tests))
                reached = {"finished": number, "accuracy": round(accuracy, 2)}
                checkpoint.save(
                    out,
                    model,
                    arch=arch,
                    preprocess=loaded.preprocess,
                    labels=dataset.classes,
                    recipe={**facts, **reached, "damaged": len(damaged)},
                )
                on_epoch(Epoch(number, loss, accuracy, tuple(damaged)))
        return checkpoint.load(out)


def domains(dataset: Dataset) -> list[str]:
    """Those that can be trained on: folders, or `clean` where the data has none."""
    return [domain.name for domain in dataset.domains if domain.severity is None]


def pictures_of(dataset: Dataset, domain: str) -> ImageFiles:
    """The images to train on."""
    known = domains(dataset)
    if domain not in known:
        raise DataError(
            f"{dataset.spec} has no domain {domain!r} to train on: it has "
            f"{listed(known, 20) or 'corruptions alone'}.{near(domain, known)}"
        )
    pictures = dataset.of(Domain(domain))
    if not isinstance(pictures, ImageFiles):
        raise DataError(
            f"{dataset.spec} is no folder of images: train on office-home:DIR or folder:DIR."
        )
    if len(dataset.classes) < 2:
        raise DataError(f"{dataset.spec} has one class alone: a classifier needs two.")
    return pictures


def places(dataset: Dataset, domain: str | None, model: str, out: Path | None) -> dict[str, Path]:
    """A file for each domain to train on, once it is sure that all can be read and written.

    Args:
        dataset: images in folders.
        domain: a name, `all`, or None for data that has only one.
        model: what the files are called by, as in `resnet50_gn-office-home-Art.safetensors`.
        out: a file, or a folder for files with such names; None: this folder.
    """
    known = domains(dataset)
    if not known:
        raise DataError(f"{dataset.spec} has corruptions alone, no domain to train on.")
    if domain is None and len(known) > 1:
        raise DataError(
            f"{dataset.spec} has {len(known)} domains: name the one to train on, "
            f"{listed(known, 20)}, or all."
        )
    wanted = known if domain not in known and domain in (None, "all") else [str(domain)]
    folder = Path() if out is None else out
    if not folder.suffix:
        _make_folder(folder)
    if folder.is_dir():
        found = {one: folder / _file_name(model, dataset.spec, one) for one in wanted}
    elif len(wanted) == 1:
        found = {wanted[0]: folder}
    else:
        raise OSError(f"cannot write {len(wanted)} models to {str(out)!r}: give a folder")
    for one, place in found.items():
        pictures_of(dataset, one)
        _check_writable(place)
    return found


def _file_name(model: str, data: str, domain: str) -> str:
    start = re.sub(r"\.(safetensors|pth|pt)\b", "", Path(model).name)
    return re.sub(r"[^\w.]+", "-", f"{start}-{data_name(data)}-{domain}") + ".safetensors"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write to {str(folder)!r}: {error.strerror}") from error


def _check_writable(out: Path) -> None:
    """Find out now, not after the first epoch."""
    if out.suffix != ".safetensors":
        raise OSError(f"cannot write {str(out)!r}: give a name that ends in .safetensors")
    if out.is_dir():
        raise IsADirectoryError(f"cannot write {str(out)!r}: it is a folder")
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise OSError(f"cannot write {str(out)!r}: {error.strerror}") from error


def _versions() -> dict[str, str]:
    import timm
    import torchvision

    import fata

    return {one.__name__: str(one.__version__) for one in (fata, torch, torchvision, timm)}


def _with_new_head(loaded: Loaded, classes: int) -> tuple[str, nn.Module, set[str]]:
    """Architecture, network, and the names of the tensors that did not come from the source.

    The head is what grows with the number of classes; networks spell and place it in many ways.
    """
    arch = re.sub(r".*\.(safetensors|pth|pt):", "", loaded.weights.tag)
    if arch.startswith("hf:"):
        raise ZooError(
            f"{loaded.name}: networks of transformers cannot be trained here: choose one of timm "
            f"or torchvision, or fine-tune it with transformers and load it as hf:./folder."
        )
    network = sources.architecture(arch)
    model, wider = network.build(classes), network.build(classes + 1).state_dict()
    own, source = model.state_dict(), loaded.model.state_dict()
    head = {name for name, tensor in own.items() if tensor.shape != wider[name].shape}
    kept = {name: source[name] for name in own if name in source and name not in head}
    model.load_state_dict(kept, strict=False)
    return network.tag, model, head


def _optimizer(model: nn.Module, head: set[str], recipe: Recipe) -> torch.optim.Optimizer:
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim > 1 and len(parameter) > 1  # no norm, bias, token or position
        decay = recipe.weight_decay if matrix else 0.0
        rate = recipe.lr * (recipe.head if name in head else 1)
        groups.setdefault((rate, decay), []).append(parameter)
    settings = [
        {"params": members, "lr": rate, "highest": rate, "weight_decay": decay}
        for (rate, decay), members in groups.items()
    ]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(settings)
    return torch.optim.SGD(settings, momentum=MOMENTUM)


def _schedule(steps: int, warmup: float) -> Iterator[tuple[float, float]]:
    """Share of the highest learning rate, up in a line and down by a cosine; share of the steps."""
    warm = max(1, round(warmup * steps))
    for step in range(steps):
        fallen = (step - warm) / max(1, steps - warm)
        rate = (step + 1) / warm if step < warm else (1 + math.cos(math.pi * fallen)) / 2
        yield rate, (step + 1) / steps


def _learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[tuple[tuple[Tensor, Tensor], tuple[float, float]]],
    smoothing: float,
    on_batch: Callable[[float, float], None],
) -> float:
    """One epoch; its mean loss."""
    model.train()
    total = rows = 0.0
    for (images, labels), (rate, done) in steps:
        if len(labels) < 2:  # BatchNorm cannot learn from one
            continue
        for group in optimizer.param_groups:
            group["lr"] = rate * group["highest"]
        logits = logits_of(model(images), len(images))
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        value = loss.item()
        total, rows = total + len(images) * value, rows + len(images)
        on_batch(done, value)
    return _mean(total, rows)


@torch.no_grad()
def _accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Share of the images that the network gets right, in %."""
    model.eval()
    right = rows = 0.0
    for images, labels in batches:
        if len(labels):
            logits = logits_of(model(images), len(images))
            if not logits.isfinite().all():
                raise TrainingError("the training diverged: give a lower learning rate (--lr).")
            right += (logits.argmax(1) == labels).sum().item()
            rows += len(images)
    return 100 * _mean(right, rows)


def _mean(total: float, rows: float) -> float:
    if not rows:
        raise DataError("all images to learn from, or all that were held out, are damaged.")
    return total / rows


class _Plan:
    """Which images come when: in each epoch those to learn from, then the held-out ones.

    A batch is the place of its source, and numbers there. The sources are the images as they are
    learned from, and as the network is tested on them.
    """

    def __init__(self, pictures: ImageFiles, preprocess: Preprocess, recipe: Recipe) -> None:
        self.labels, self.preprocess = pictures.labels, preprocess
        files = (pictures.folder, pictures.paths, pictures.labels, preprocess.view)
        crop = partial(_random_view, preprocess, recipe.crop)
        self.sources = [_Varied(*files, crop, recipe.seed), ImageFiles(*files)]
        generator = torch.Generator().manual_seed(recipe.seed)
        self.learned, self.held = _split(self.labels, recipe.held_out, generator)
        parts = (self.learned, self.held)
        self.steps, self.tests = (math.ceil(len(part) / recipe.batch_size) for part in parts)
        self.batches: list[tuple[int, Tensor]] = []
        for epoch in range(recipe.epochs):
            order = self.learned[torch.randperm(len(self.learned), generator=generator)]
            order = order + epoch * len(self.labels)
            self.batches += [(0, part) for part in order.tensor_split(self.steps)]
            self.batches += [(1, part) for part in self.held.tensor_split(self.tests)]


@dataclass(frozen=True, eq=False)
class _Varied(ImageFiles):
    """Images that look new in each epoch: number e N + i is image i of N in epoch e."""

    crop: Callable[[Random, Image.Image], Image.Image]
    seed: int

    def read(self, index: int) -> Tensor:
        epoch, one = divmod(index, len(self.paths))
        view = partial(self.crop, Random(f"{self.seed}/{epoch}/{one}"))
        return ImageFiles(self.folder, self.paths, self.labels, view).read(one)

    def name(self, index: int) -> str:
        return super().name(index % len(self.paths))


def _random_view(
    preprocess: Preprocess, least: float, random: Random, image: Image.Image
) -> Image.Image:
    """A random part of an image in the size that the network takes, mirrored half the time."""
    share, log_ratio = random.uniform(least, 1), random.uniform(-1, 1) * math.log(RATIO)
    side = math.sqrt(share * image.width * image.height)
    width = min(side * math.exp(log_ratio / 2), image.width)
    height = min(side / math.exp(log_ratio / 2), image.height)
    left = random.uniform(0, image.width - width)
    top = random.uniform(0, image.height - height)
    part = image.resize(
        (preprocess.size, preprocess.size),
        Image.Resampling[preprocess.interpolation.upper()],
        (left, top, min(left + width, image.width), min(top + height, image.height)),
    )
    mirrored = random.random() < 0.5
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else part


def _split(labels: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images to learn from and to hold out: the share of each class, but never all of it."""
    learned, held = [], []
    for label in sorted(set(labels.tolist())):
        own = torch.nonzero(labels == label)[:, 0]
        own = own[torch.randperm(len(own), generator=generator)]
        count = min(len(own) - 1, max(1, round(share * len(own))))
        held.append(own[:count])
        learned.append(own[count:])
    if not any(map(len, held)):
        raise DataError("every class has one image alone: there is none to hold out.")
    return torch.cat(learned), torch.cat(held)


def _served(
    plan: _Plan,
    device: torch.device,
    workers: int | None,
    skip_damaged: bool,
    damaged: dict[str, None],
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Images as the network takes them, and labels; damaged images are noted."""
    rows = ([(place, one) for one in index.tolist()] for place, index in plan.batches)
    with closing(read(plan.sources, rows, len(plan.batches), device, workers)) as decoded:
        for (_, index), (pixels, broken) in zip(plan.batches, decoded, strict=True):
            if not skip_damaged:
                refuse(broken)
            damaged.update(dict.fromkeys(broken.values()))
            whole = intact_rows(broken, len(index))
            labels = plan.labels[index[whole] % len(plan.labels)]
            images = pixels.float().div_(255)
            yield plan.preprocess.normalise(images), labels.to(device, non_blocking=True)
