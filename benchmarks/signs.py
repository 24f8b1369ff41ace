"""What could tell a model that goes wrong, without labels: `python -m benchmarks.signs`.

    python -m benchmarks.signs mini_resnet_gn tent:lr=0.001 speckle_noise --data cifar10:DIR

Every few batches of a stream: accuracy of the adapted model and of not adapting on the same images,
and the signs, averaged over the last 448 images or so: S of the guard from answers, the same from
probabilities, how often the two models agree, confidence, how often an answer is the same for the
image turned left to right, and the mean entropy, which every host lowers; how far the parameters
are, and by how much that entropy has risen at most from one batch to the next.
"""

from __future__ import annotations

import argparse
import warnings
from itertools import pairwise

import torch
from torch import Tensor

import fata
from fata.bench.grid import Grid
from fata.corruptions import EXTRA
from fata.methods.losses import entropy

_WEIGHT = 0.25  # of the newest batch


def spread(shares: Tensor) -> Tensor:
    """Entropy of shares of classes, 1 where they are even."""
    return torch.special.entr(shares).sum() / torch.tensor(len(shares)).log()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("method", help="with fields, as fata bench takes it")
    parser.add_argument("domain", choices=EXTRA)
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--scenario", default="normal")
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--every", type=int, default=4)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    loaded, source = fata.zoo.load(args.model), fata.zoo.load(args.model)
    data = fata.data.open(args.data, fit=loaded)
    grid = Grid((args.model,), (args.data,), (args.method,), (args.scenario,), (args.domain,))
    (cell,) = grid.cells(fata.data.open)
    adapted = fata.adapt(loaded.model, cell.method, guard=None, **cell.settings(loaded))
    still = fata.adapt(source.model, "norm")
    stream = fata.stream(
        data, args.scenario, domains=[args.domain], images=args.images, seed=args.seed
    )
    names = ("right", "still", "S", "S soft", "agree", "sure", "still sure", "turned", "still")
    names += ("entropy", "drift", "rise")
    print("batch   " + "  ".join(f"{name:>10}" for name in names))
    means: list[Tensor] = []
    losses: list[Tensor] = []
    for number, batch in enumerate(stream):
        images = loaded.preprocess.normalise(batch.images)
        logits = adapted(images)
        losses.append(entropy(logits).mean())
        if number % args.every:
            continue
        plain = still(images)
        with adapted.frozen():
            turned = adapted(images.flip(3)).argmax(1) == adapted(images).argmax(1)
        plain_turned = still(images.flip(3)).argmax(1) == plain.argmax(1)
        classes = logits.shape[1]
        now = [
            (logits.argmax(1) == batch.labels).float().mean(),
            (plain.argmax(1) == batch.labels).float().mean(),
            torch.nn.functional.one_hot(logits.argmax(1), classes).float().mean(0),
            torch.nn.functional.one_hot(plain.argmax(1), classes).float().mean(0),
            logits.softmax(1).mean(0),
            plain.softmax(1).mean(0),
            (logits.argmax(1) == plain.argmax(1)).float().mean(),
            logits.softmax(1).amax(1).mean(),
            plain.softmax(1).amax(1).mean(),
            turned.float().mean(),
            plain_turned.float().mean(),
            losses[-1],
        ]
        weight = max(_WEIGHT, 1 / (1 + number // args.every))
        means = [torch.lerp(a, b, weight) for a, b in zip(means or now, now, strict=True)]
        right, plain_right, hard, hard_still, soft, soft_still, *rest = means
        signs = [spread(hard_still) - spread(hard), spread(soft_still) - spread(soft)]
        engine = adapted._engine
        assert engine is not None
        drift = (engine.state.theta - engine.source).norm()
        rise = max((after - before for before, after in pairwise(losses)), default=torch.zeros(()))
        values = [right, plain_right, *signs, *rest, drift, rise]
        print(f"{number:5}   " + "  ".join(f"{value.item():10.3f}" for value in values))


if __name__ == "__main__":
    main()
