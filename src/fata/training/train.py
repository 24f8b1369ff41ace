"""Fine-tune a network of the zoo on one domain; docs/train-source.md explains the recipe.

The paper adapts models trained on one domain of Office-Home and does not say how they were trained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

import fata
from fata.data.dataset import Dataset, data_name
from fata.data.errors import DataError
from fata.network.logits import logits_of
from fata.training.images import TrainingPlan, images_of, served
from fata.training.outputs import check_writable
from fata.training.recipe import Recipe, TrainingError
from fata.zoo import model_file, sources
from fata.zoo.loaded import Loaded, ZooError


class Epoch(NamedTuple):
    """A finished epoch."""

    number: int  # from 1
    loss: float  # mean over the training images
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

    The file is written after every epoch, so it always has the last finished one. On a CPU the
    same seed gives the same bits, whatever the number of workers.

    Args:
        loaded: the pretrained model, from `fata.zoo.load`; it is not changed.
        dataset: images in folders, from `fata.data.open`.
        domain: to train on; `clean` for data without domains.
        out: a file that ends in `.safetensors`, for `fata.zoo.load`.
        recipe: None: `Recipe.suiting` the network.
        device: where to train.
        workers: processes that decode images (None: a few); 0 decodes in this one.
        skip_damaged: leave damaged images out instead of raising an error.
        on_batch: called after each step with the share of all steps that is done, and the loss.
        on_epoch: called after each epoch, once it is in the file.

    Raises:
        DataError: no such domain, or an image that cannot be read.
        ZooError: the network cannot be given a new classifier.
        TrainingError: the training diverged.
        OSError: the file cannot be written; checked before the training starts.
    """
    device, out = torch.device(device), Path(out)
    images = images_of(dataset, domain)
    check_writable(out)
    recipe = recipe or Recipe.suiting(loaded.model)
    plan = TrainingPlan(images, loaded.preprocess, recipe)
    facts = {
        **asdict(recipe),
        "data": data_name(dataset.spec),
        "domain": domain,
        "images": images.digest,
        "learned_from": len(plan.learned),
        "tested_on": len(plan.held),
        "source": {"tag": loaded.weights.tag, "sha256": loaded.weights.sha256},
        "versions": _versions(),
    }
    damaged: dict[str, None] = {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        arch, model, head = _with_new_head(loaded, len(dataset.classes))
        total = recipe.epochs * plan.steps
        optimizer = recipe.make_optimizer(model.to(device), head)
        scheduler = recipe.make_scheduler(optimizer, total)

        def on_step(loss: float) -> None:
            on_batch(scheduler.last_epoch / total, loss)

        with closing(served(plan, device, workers, skip_damaged, damaged)) as batches:
            for number in range(1, recipe.epochs + 1):
                steps = islice(batches, plan.steps)
                loss = _learn(model, optimizer, scheduler, steps, recipe.smoothing, on_step)
                accuracy = _accuracy(model, islice(batches, plan.tests))
                reached = {"finished": number, "accuracy": round(accuracy, 2)}
                model_file.save(
                    out,
                    model,
                    arch=arch,
                    preprocess=loaded.preprocess,
                    labels=dataset.classes,
                    recipe={**facts, **reached, "damaged": len(damaged)},
                )
                on_epoch(Epoch(number, loss, accuracy, tuple(damaged)))
        return model_file.load(out)


def _versions() -> dict[str, str]:
    known = ("torch", "torchvision", "timm")
    libraries = {name: version(name) for name in known if find_spec(name)}
    return {"fata": fata.__version__, **libraries}


def _with_new_head(loaded: Loaded, classes: int) -> tuple[str, nn.Module, set[str]]:
    """Architecture, network, and the names of the new head's tensors.

    The head is whatever grows with the number of classes: networks name and place it differently.
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


def _learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    batches: Iterable[tuple[Tensor, Tensor]],
    smoothing: float,
    on_step: Callable[[float], None],
) -> float:
    """One epoch; its mean loss."""
    model.train()
    total = rows = 0.0
    for images, labels in batches:
        if len(labels) < 2:  # BatchNorm cannot learn from one
            continue
        logits = logits_of(model(images), len(images))
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        value = loss.item()
        total, rows = total + len(images) * value, rows + len(images)
        on_step(value)
    return _mean(total, rows)


@torch.no_grad()
def _accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Accuracy in %."""
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
