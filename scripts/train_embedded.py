"""Train the networks that ship in the package, on CIFAR-10, on a GPU.

    python scripts/train_embedded.py --data DIR --out DIR [--model mini_vit] [--epochs N]

Everything is resident on the device. The augmentation holds none of the corruptions that the
benchmark (or the choice of settings) uses: shifts, flips, affine maps, solarising, posterising,
swapped channels, cut-out squares, mixup. See the model card, docs/models.md.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fata.data import cifar
from fata.zoo import mini, model_file
from fata.zoo.preprocess import Preprocess

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images
PREPROCESS = Preprocess(32, 32, "bilinear", MEAN, STD)
SMOOTHING = 0.1
MIXUP = 0.2  # of Beta(a, a)


@dataclass(frozen=True)
class Recipe:
    """How one network is trained."""

    epochs: int
    optimizer: str
    lr: float
    weight_decay: float
    batch: int = 512
    warmup: float = 0.05  # of the steps


RECIPES = {
    "mini_resnet_bn": Recipe(90, "sgd", 0.4, 5e-4),
    "mini_resnet_gn": Recipe(110, "sgd", 0.2, 5e-4),
    "mini_vit": Recipe(130, "adamw", 1e-3, 0.05),
}


def augmented(pixels: Tensor, g: torch.Generator) -> Tensor:
    """Each image its own map, colours and hole."""
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
    place = torch.arange(side, device=x.device)
    middle = (uniform(0, side, 2)).floor()
    hole = ((place - middle[:, :1]).abs() < 5)[:, :, None] & ((place - middle[:, 1:]).abs() < 5)[
        :, None, :
    ]
    return torch.where(hole[:, None] & chosen(0.5), 0.5, x)


def normalised(pixels: Tensor) -> Tensor:
    """As the networks take them."""
    return PREPROCESS.normalise(pixels).contiguous(memory_format=torch.channels_last)


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


def train(
    model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe, epochs: int, seed: int
) -> nn.Module:
    """Supervised, bfloat16, a cosine after a short warm-up."""
    device = images.device
    g = torch.Generator(device).manual_seed(seed)
    optimizer = optimizer_of(model, recipe)
    total = epochs * (len(images) // recipe.batch)

    def rate(step: int) -> float:
        warm = max(1, int(recipe.warmup * total))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    beta = torch.distributions.Beta(MIXUP, MIXUP)
    torch.manual_seed(seed)
    started = time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=g, device=device)
        for index in order[: len(order) // recipe.batch * recipe.batch].split(recipe.batch):
            x = augmented(images[index].float() / 255, g)
            share = beta.sample((len(x), 1, 1, 1)).to(device)
            other = torch.randperm(len(x), generator=g, device=device)
            x = normalised(share * x + (1 - share) * x[other])
            y = F.one_hot(labels[index], 10).float()
            y = share[:, 0, 0] * y + (1 - share[:, 0, 0]) * y[other]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y, label_smoothing=SMOOTHING)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if recipe.optimizer == "adamw":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if epoch % 10 == 9:
            took = time.perf_counter() - started
            print(f"epoch {epoch + 1}/{epochs} loss {loss.item():.3f} {took:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images that the network gets right, in %, in full precision."""
    model = copy.deepcopy(model).float()
    right = sum(
        (model(normalised(x.float() / 255)).argmax(1) == y).sum().item()
        for x, y in zip(images.split(1000), labels.split(1000), strict=True)
    )
    return 100 * right / len(images)


def main() -> None:
    """Train, measure, write half-precision weights with their recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=mini.NAMES, action="append")
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument("--limit", type=int, help="images to train on (a trial)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    train_set = [t[: args.limit].to(args.device) for t in cifar.read(args.data, "train")]
    test_set = [t.to(args.device) for t in cifar.read(args.data, "test")]
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.model or mini.NAMES:
        recipe = RECIPES[name]
        torch.manual_seed(args.seed)
        model = mini.build(name).to(args.device, memory_format=torch.channels_last)
        epochs = args.epochs or recipe.epochs
        train(model, *train_set, recipe, epochs, args.seed)
        model.half()  # what is shipped is what is measured
        reached = accuracy(model, *test_set)
        print(f"{name}: {reached:.2f} % of the test images", flush=True)
        facts = {"data": "CIFAR-10, 50,000 training images", "epochs": epochs, "seed": args.seed}
        constants = {"mixup": MIXUP, "label_smoothing": SMOOTHING, "accuracy": round(reached, 2)}
        model_file.save(
            args.out / f"{name}.safetensors",
            model,
            arch=name,
            preprocess=PREPROCESS,
            labels=cifar.CLASSES,
            recipe={**asdict(recipe), **facts, **constants},
        )


if __name__ == "__main__":
    main()
