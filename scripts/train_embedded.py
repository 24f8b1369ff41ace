"""Train the networks that ship in the package, on CIFAR-10 or Tiny-ImageNet at 32 pixels, on a GPU.

    python scripts/train_embedded.py --data DIR --out DIR [--model mini_vit] [--epochs N]
    python scripts/train_embedded.py --data DIR --out FIRST --model tiny200_resnet_gn --minutes 9
    python scripts/train_embedded.py --data DIR --out DIR --model tiny200_vit \
        --teacher FIRST/tiny200_resnet_gn.safetensors

DIR holds CIFAR-10's files for the `mini_*` networks, and `train.*.npz` and `val.npz` for the
`tiny200_*` ones. With `--minutes` a run ends in time and the next one continues it, bit for bit,
from `NAME.resume.pt` in the output folder.

Everything is resident on the device. The augmentation holds none of the corruptions that the
benchmark (or the choice of settings) uses: shifts, flips, affine maps, solarising, posterising,
swapped channels, cut-out squares, mixup, CutMix. See the model card, docs/models.md.
"""

from __future__ import annotations

import argparse
import copy
import io
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fata.data import cifar
from fata.zoo import mini, model_file
from fata.zoo.preprocess import Preprocess

SMOOTHING = 0.1
MIXUP = 0.2  # of Beta(a, a)
SAVE_EVERY = 10  # epochs


@dataclass(frozen=True)
class Data:
    """Where a network's images come from, and what they are."""

    images: str
    classes: int
    mean: tuple[float, float, float]  # of the training images
    std: tuple[float, float, float]

    @property
    def preprocess(self) -> Preprocess:
        """As the networks take them."""
        return Preprocess(32, 32, "bilinear", self.mean, self.std)


CIFAR10 = Data(
    "CIFAR-10, 50,000 training images", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
)
TINY200 = Data(
    "Tiny-ImageNet at 32 pixels, 100,000 training images",
    200,
    (0.4802, 0.4481, 0.3975),
    (0.2636, 0.2563, 0.2686),
)


@dataclass(frozen=True)
class Recipe:
    """How one network is trained."""

    epochs: int
    optimizer: str
    lr: float
    weight_decay: float
    batch: int = 512
    warmup: float = 0.05  # of the steps
    cutmix: float = 0.0  # share of the batches; the others have mixup
    average: float = 0.0  # decay of the moving average of the weights, which is kept; 0: none
    plain: float = 0.0  # of the epochs, at the end, without mixing and holes


RECIPES = {
    "mini_resnet_bn": Recipe(90, "sgd", 0.4, 5e-4),
    "mini_resnet_gn": Recipe(110, "sgd", 0.2, 5e-4),
    "mini_vit": Recipe(130, "adamw", 1e-3, 0.05),
    "tiny200_resnet_bn": Recipe(140, "sgd", 0.2, 5e-4, cutmix=0.5, average=0.999, plain=0.1),
    "tiny200_resnet_gn": Recipe(140, "sgd", 0.2, 5e-4, cutmix=0.5, average=0.999, plain=0.1),
    "tiny200_vit": Recipe(140, "adamw", 1e-3, 0.05, cutmix=0.5, average=0.999, plain=0.1),
}


# -- images -------------------------------------------------------------------------------------


def augmented(pixels: Tensor, g: torch.Generator, holes: bool = True) -> Tensor:
    """Each image its own map, colours and, if wanted, hole."""
    n, _, side, _ = pixels.shape

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *shape, generator=g, device=pixels.device)

    def chosen(share: float) -> Tensor:
        return (uniform(0, 1) < share)[:, None, None, None]

    warp = (uniform(0, 1) < 0.5).float()  # half of the images are only shifted, by whole pixels
    angle = uniform(-1, 1) * warp * math.radians(20)
    scale, shear = 1 + uniform(-0.2, 0.2) * warp, uniform(-0.2, 0.2) * warp
    flip = (uniform(0, 1) < 0.5).float() * -2 + 1
    shift = uniform(-4.499, 4.499, 2).round() * 2 / side
    cos, sin = angle.cos(), angle.sin()
    maps = torch.stack(
        [
            torch.stack([scale * flip * cos, scale * (shear * cos - sin), shift[:, 0]], 1),
            torch.stack([scale * flip * sin, scale * (shear * sin + cos), shift[:, 1]], 1),
        ],
        1,
    )
    grid = F.affine_grid(maps, list(pixels.shape), align_corners=False)
    x = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    limit = uniform(0.3, 1, 1, 1, 1)
    x = torch.where(chosen(0.1), torch.where(x > limit, 1 - x, x), x)
    levels = torch.exp2(uniform(2, 5, 1, 1, 1).round())
    x = torch.where(chosen(0.1), (x * levels).floor() / levels, x)
    swapped = x[:, torch.randperm(3, generator=g, device=x.device)]
    x = torch.where(chosen(0.1), swapped, x)
    if not holes:
        return x
    hole = _squares(uniform(0, side, 2).floor(), 5, side)
    return torch.where(hole & chosen(0.5), 0.5, x)


def mixed(x: Tensor, y: Tensor, cutmix: float, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images and one-hot labels, each mixed with those of another image of the batch."""
    n, side, device = len(x), x.shape[-1], x.device
    other = torch.randperm(n, generator=g, device=device)
    if torch.rand((), generator=g, device=device) < cutmix:
        kept = torch.rand(n, generator=g, device=device)
        middle = (torch.rand(n, 2, generator=g, device=device) * side).floor()
        hole = _squares(middle, (1 - kept).sqrt() * side / 2, side)
        share = 1 - hole.float().mean((1, 2, 3))
        x = torch.where(hole, x[other], x)
    else:
        share = torch.distributions.Beta(MIXUP, MIXUP).sample((n,)).to(device)
        x = share[:, None, None, None] * x + (1 - share[:, None, None, None]) * x[other]
    return x, share[:, None] * y + (1 - share[:, None]) * y[other]


def _squares(middle: Tensor, half: Tensor | float, side: int) -> Tensor:
    """One square an image, (n, 1, side, side), true inside."""
    place = torch.arange(side, device=middle.device)
    half = half[:, None] if isinstance(half, Tensor) else half
    rows, columns = ((place - middle[:, i : i + 1]).abs() < half for i in (0, 1))
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def read(data: Data, folder: Path, limit: int | None) -> list[Tensor]:
    """Training images and labels, test images and labels; images (n, 3, 32, 32), uint8."""
    if data is CIFAR10:
        parts = [cifar.read(folder, part) for part in ("train", "test")]
    else:
        files = sorted(folder.glob("train*.npz")), [folder / "val.npz"]
        parts = [_decoded(part, limit) for part in files]
    (images, labels), test = parts
    return [images[:limit], labels[:limit], *test]


def _decoded(files: Sequence[Path], limit: int | None) -> tuple[Tensor, Tensor]:
    """Images of files with `blob`, `lens` and `labels`: JPEG files one after another."""
    images, labels = [], []
    for file in files:
        part = np.load(file)
        blob, ends = part["blob"], part["lens"].cumsum()[:limit]
        starts = [0, *ends[:-1]]
        for start, end in zip(starts, ends, strict=True):
            image = Image.open(io.BytesIO(blob[start:end].tobytes())).convert("RGB")
            images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        labels.append(torch.from_numpy(part["labels"][: len(ends)].astype(np.int64)))
    return torch.stack(images), torch.cat(labels)


# -- training -----------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Weight decay on matrices and filters alone."""
    decayed = [p for p in model.parameters() if p.ndim > 1 and p.shape[0] > 1]
    others = [p for p in model.parameters() if not (p.ndim > 1 and p.shape[0] > 1)]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, recipe.lr, fused=True)
    return torch.optim.SGD(groups, recipe.lr, momentum=0.9, nesterov=True, fused=True)


class Training:
    """One network in training: supervised, bfloat16, a cosine after a short warm-up."""

    def __init__(
        self,
        name: str,
        data: Data,
        recipe: Recipe,
        seed: int,
        device: str,
        teacher: nn.Module | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.data, self.recipe, self.epoch = data, recipe, 0
        model = mini.build(name, data.classes)
        self.model = model.to(device, memory_format=torch.channels_last)
        decay = get_ema_multi_avg_fn(recipe.average)
        self.average = AveragedModel(self.model, multi_avg_fn=decay, use_buffers=True)
        self.optimizer = optimizer_of(self.model, recipe)
        self.forward, self.teacher = self.model, teacher
        if device.startswith("cuda"):
            self.forward = torch.compile(self.model)
            self.teacher = teacher and torch.compile(teacher.to(memory_format=torch.channels_last))
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = torch.device(device)

    def state(self) -> dict[str, Any]:
        """All that another run needs to continue."""
        return {
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "global": torch.get_rng_state(),
        }

    def resume(self, path: Path) -> None:
        """Continue where an earlier run ended."""
        state = torch.load(path, map_location=self.device)
        self.epoch = state["epoch"]
        for name in ("model", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["global"].cpu())

    def run(self, images: Tensor, labels: Tensor) -> float:
        """One epoch; returns the last loss."""
        recipe, g = self.recipe, self.generator
        self.model.train()
        order = torch.randperm(len(images), generator=g, device=self.device)
        plain = self.epoch >= round((1 - recipe.plain) * recipe.epochs)
        batches = order[: len(order) // recipe.batch * recipe.batch].split(recipe.batch)
        for step, index in enumerate(batches, self.epoch * len(batches)):
            self._set_rate(step, recipe.epochs * len(batches))
            x = augmented(images[index].float() / 255, g, holes=not plain)
            y = F.one_hot(labels[index], self.data.classes).float()
            if not plain:
                x, y = mixed(x, y, recipe.cutmix, g)
            x = self.data.preprocess(x).contiguous(memory_format=torch.channels_last)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=x.is_cuda):
                logits = self.forward(x)
                y = self._target(x, y)
            loss = F.cross_entropy(logits.float(), y)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if recipe.optimizer == "adamw":
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.average.update_parameters(self.model)
        self.epoch += 1
        return loss.item()

    @torch.no_grad()
    def _target(self, x: Tensor, y: Tensor) -> Tensor:
        """Smoothed labels; the mean of these and the teacher's predictions, if there is one."""
        y = (1 - SMOOTHING) * y + SMOOTHING / self.data.classes
        return y if self.teacher is None else (y + self.teacher(x).float().softmax(1)) / 2

    def _set_rate(self, step: int, total: int) -> None:
        warm = max(1, int(self.recipe.warmup * total))
        scale = (step + 1) / warm
        if step >= warm:
            scale = 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * scale

    def finished(self) -> nn.Module:
        """The network as it is shipped, in half precision."""
        return self.average.module.eval().half()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, images: Tensor, labels: Tensor) -> float:
    """Share of images that the network gets right, in %, in full precision."""
    model = copy.deepcopy(model).float().eval()
    right = sum(
        (model(data.preprocess(x.float() / 255)).argmax(1) == y).sum().item()
        for x, y in zip(images.split(1000), labels.split(1000), strict=True)
    )
    return 100 * right / len(images)


def main() -> None:
    """Train, measure, write half-precision weights with their recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=(*mini.CIFAR10, *mini.TINY200), action="append")
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument(
        "--teacher", type=Path, help="a file: half of the target is what it predicts"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="end in time; run again")
    parser.add_argument("--limit", type=int, help="images to train on (a trial)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    started = time.monotonic()
    torch.backends.cudnn.benchmark = True
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.model or mini.CIFAR10:
        data = TINY200 if name in mini.TINY200 else CIFAR10
        train(name, data, args, started + 60 * args.minutes)


def train(name: str, data: Data, args: argparse.Namespace, end: float) -> None:
    """One network, until it is finished or the time is up."""
    sets = [tensor.to(args.device) for tensor in read(data, args.data, args.limit)]
    recipe = RECIPES[name]
    recipe = Recipe(**{**asdict(recipe), "epochs": args.epochs or recipe.epochs})
    teacher = None
    if args.teacher:
        teacher = model_file.load(args.teacher).model
        teacher = teacher.to(args.device).eval().requires_grad_(False)
    training = Training(name, data, recipe, args.seed, args.device, teacher)
    resume = args.out / f"{name}.resume.pt"
    if resume.exists():
        training.resume(resume)
    while training.epoch < recipe.epochs:
        begun = time.monotonic()
        loss = training.run(*sets[:2])
        took, late = (
            time.monotonic() - begun,
            time.monotonic() + 2 * (time.monotonic() - begun) > end,
        )
        if late or training.epoch % SAVE_EVERY == 0 or training.epoch == recipe.epochs:
            torch.save(training.state(), resume)
            reached = accuracy(training.average, data, *sets[2:])
            print(
                f"{name} epoch {training.epoch}/{recipe.epochs} loss {loss:.3f} "
                f"{reached:.2f} % of the test images, {took:.1f} s an epoch",
                flush=True,
            )
        if late and training.epoch < recipe.epochs:
            return
    model = training.finished()  # what is shipped is what is measured
    reached = accuracy(model, data, *sets[2:])
    print(f"{name}: {reached:.2f} % of the test images", flush=True)
    facts = {"data": data.images, "seed": args.seed, "accuracy": round(reached, 2)}
    if args.teacher:
        facts["teacher"] = args.teacher.stem
    constants = {"mixup": MIXUP, "label_smoothing": SMOOTHING}
    model_file.save(
        args.out / f"{name}.safetensors",
        model,
        arch=name,
        preprocess=data.preprocess,
        labels=cifar.CLASSES if data is CIFAR10 else (),
        recipe={**asdict(recipe), **facts, **constants},
    )


if __name__ == "__main__":
    main()
