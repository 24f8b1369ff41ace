"""Images to train on: which come when, random crops, and the held-out ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from PIL import Image
from torch import Tensor

from fata._text import listed, near
from fata.data.dataset import Dataset, Domain, ImageFiles, View
from fata.data.errors import DataError
from fata.data.own import OwnImages
from fata.data.serve import intact_rows, raise_if_damaged, read
from fata.training.recipe import Recipe
from fata.zoo.preprocess import Preprocess

RATIO = 4 / 3  # of a crop's sides, at most
Images = ImageFiles | OwnImages  # what can be seen in another way than the model sees it


def domains(dataset: Dataset) -> list[str]:
    """Domains to train on: folders, or `clean` if the data has none."""
    return [domain.name for domain in dataset.domains if domain.severity is None]


def images_of(dataset: Dataset, domain: str) -> Images:
    """The images to train on."""
    known = domains(dataset)
    if domain not in known:
        raise DataError(
            f"{dataset.spec} has no domain {domain!r} to train on: it has "
            f"{listed(known, 20) or 'corruptions alone'}.{near(domain, known)}"
        )
    images = dataset.of(Domain(domain))
    if not isinstance(images, Images):
        raise DataError(
            f"{dataset.spec} is no folder of images: train on office-home:DIR, folder:DIR, or "
            f"my_module:loader."
        )
    if len(dataset.classes) < 2:
        raise DataError(f"{dataset.spec} has one class alone: a classifier needs two.")
    return images


class TrainingPlan:
    """Which images come when: in each epoch the training images, then the held-out ones.

    A batch is the number of its source and indices there. The first source gives random crops, the
    second the images as the network is tested on them.
    """

    def __init__(self, images: Images, preprocess: Preprocess, recipe: Recipe) -> None:
        self.labels, self.preprocess = images.labels, preprocess
        views = (
            partial(_crop, preprocess, recipe, len(images.labels)),
            partial(_same, preprocess.view),
        )
        self.sources = [Viewed(images, view) for view in views]
        generator = torch.Generator().manual_seed(recipe.seed)
        self.learned, self.held = split(self.labels, recipe.held_out, generator)
        parts = (self.learned, self.held)
        self.steps, self.tests = (math.ceil(len(part) / recipe.batch_size) for part in parts)
        self.batches: list[tuple[int, Tensor]] = []
        for epoch in range(recipe.epochs):
            order = self.learned[torch.randperm(len(self.learned), generator=generator)]
            order = order + epoch * len(self.labels)
            self.batches += [(0, part) for part in order.tensor_split(self.steps)]
            self.batches += [(1, part) for part in self.held.tensor_split(self.tests)]


@dataclass(frozen=True, eq=False)
class Viewed:
    """Images as a view shows them: index e N + i is image i of N in epoch e."""

    on_disk = True
    images: Images
    view: Callable[[int], View]  # by that index

    @property
    def labels(self) -> Tensor:
        """The class of each image."""
        return self.images.labels

    @property
    def digest(self) -> str:
        """Of the images."""
        return self.images.digest

    def read(self, index: int) -> Tensor:
        """One image, (3, H, W), bytes."""
        return self.images.read(index % len(self.labels), self.view(index))

    def name(self, index: int) -> str:
        """The image's name, for errors."""
        return self.images.name(index % len(self.labels))


def _same(view: View, _: int) -> View:
    return view


def _crop(preprocess: Preprocess, recipe: Recipe, rows: int, index: int) -> View:
    epoch, one = divmod(index, rows)
    return partial(random_crop, preprocess, recipe.crop, Random(f"{recipe.seed}/{epoch}/{one}"))


def random_crop(
    preprocess: Preprocess, least: float, random: Random, image: Image.Image
) -> Image.Image:
    """A random crop in the size that the network takes, mirrored half the time.

    Not torchvision's RandomResizedCrop: it draws from torch's global generator, which decoding
    threads share, and the same seed must give the same bits for any number of workers.
    """
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


def split(labels: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images to train on and to hold out: a share of each class, but never all of it."""
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


def served(
    plan: TrainingPlan,
    device: torch.device,
    workers: int | None,
    skip_damaged: bool,
    damaged: dict[str, None],
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Preprocessed images and labels; damaged images are added to `damaged`."""
    rows = ([(place, one) for one in index.tolist()] for place, index in plan.batches)
    with closing(read(plan.sources, rows, len(plan.batches), device, workers)) as decoded:
        for (_, index), (pixels, broken) in zip(plan.batches, decoded, strict=True):
            if not skip_damaged:
                raise_if_damaged(broken)
            damaged.update(dict.fromkeys(broken.values()))
            whole = intact_rows(broken, len(index))
            labels = plan.labels[index[whole] % len(plan.labels)]
            images = pixels.float().div_(255)
            yield plan.preprocess.normalise(images), labels.to(device, non_blocking=True)
