"""What tells a batch of many classes from one of a single class: `python -m benchmarks.mixed`.

    python -m benchmarks.mixed --data cifar10:DIR --every 8

The mini_resnet_bn with its running statistics and with the batch's, on the corruptions that the
benchmark never sees, shuffled and class by class: how even the running ones' answers are (H over
its maximum), how much surer they are, how many batches the guard takes for mixed, and which answers
are right.
"""

from __future__ import annotations

import argparse
import math
from itertools import islice

import torch

import fata
from benchmarks.speed import markdown
from fata.corruptions import EXTRA
from fata.data import DataError
from fata.guard.evidence import compare

MODEL = "mini_resnet_bn"


def judged(data: str, scenario: str, domain: str, every: int) -> list[list[float]]:
    """Of each batch: evenness, surer, whether it is mixed, share right with either statistics."""
    loaded = fata.zoo.load(MODEL)
    norm = fata.adapt(fata.zoo.load(MODEL).model, "norm")
    stream = fata.stream(fata.data.open(data, fit=loaded), scenario, domains=[domain])
    found = []
    for batch in islice(stream, 0, None, every):
        images = loaded.preprocess.normalise(batch.images)
        with torch.no_grad():
            running, own = loaded.model.eval()(images), norm(images)
        memory, (*_, mixed, _) = compare({}, running, own, len(images))
        even = torch.special.entr(memory["brief.source"]).sum() / math.log(loaded.classes)
        right = [(logits.argmax(1) == batch.labels).float().mean() for logits in (running, own)]
        found.append([float(x) for x in (even, memory["brief.confidence_gap"], mixed, *right)])
    return found


def row(domain: str, scenario: str, found: list[list[float]]) -> list[str]:
    """Least and most of the signs, means of the rest."""
    even, surer, mixed, running, own = zip(*found, strict=True)
    share, *right = (100 * sum(some) / len(found) for some in (mixed, running, own))
    signs = [f"{min(some):.2f} to {max(some):.2f}" for some in (even, surer)]
    figures = [f"{share:.0f} %", *(f"{one:.1f}" for one in right)]
    return [domain, scenario, str(len(found)), *signs, *figures]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--domains", nargs="+", default=list(EXTRA))
    parser.add_argument("--every", type=int, default=1, help="of so many batches, one")
    args = parser.parse_args()
    if args.every < 1:
        parser.error(f"--every {args.every}: give 1 or more.")
    head = ["corruption", "order", "batches", "evenness", "running surer by", "mixed"]
    head += ["right, running", "right, batch's"]
    try:
        rows = [
            row(domain, scenario, judged(args.data, scenario, domain, args.every))
            for domain in args.domains
            for scenario in ("normal", "label-shift")
        ]
    except DataError as error:
        parser.error(str(error))
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
