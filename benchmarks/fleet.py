"""Cameras that adapt, so many on one GPU: a simulation, `python -m benchmarks.fleet`.

Each camera sends images at its own pace. When a batch of it is full it waits for a free process of
the GPU, which takes the last camera's state out, puts this one's in (unless it has it already),
predicts and learns. A batch that still waits when the camera's next one is full is lost. All times
are flags; the defaults were measured (`python -m benchmarks.scale`; docs/lab/scale.md says where).
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What serves, and what is asked of it; times in seconds."""

    step: float  # of a batch, in one process while all others are at work
    processes: int
    swap: float  # one state out, another in
    batch: int
    rate: float  # images a second, of a camera

    @property
    def period(self) -> float:
        """Seconds in which a camera fills a batch."""
        return self.batch / self.rate

    @property
    def ceiling(self) -> float:
        """Streams at which every process is busy all the time."""
        return self.processes * self.period / (self.step + self.swap)


@dataclass(frozen=True)
class Seen:
    """What a number of streams came to."""

    streams: int
    images: float  # a second, answered
    busy: float  # share of the time
    wait: float  # seconds from a full batch to its answer, of 95 % of the batches
    lost: float  # share of the batches

    @property
    def hours(self) -> float:
        """GPU-hours a million images."""
        return 1e6 / self.images / 3600


def simulate(gpu: Gpu, streams: int, periods: int = 3, seed: int = 0) -> Seen:
    """Some periods of so many streams, each with a phase of its own."""
    draw = random.Random(seed)
    full = [(draw.uniform(0, gpu.period), camera) for camera in range(streams)]
    heapq.heapify(full)
    free = [0.0] * gpu.processes  # from when on
    has: list[int | None] = [None] * gpu.processes  # whose state each process holds
    holder: dict[int, int] = {}
    end, busy, lost, waits = periods * gpu.period, 0.0, 0, list[float]()
    queue: deque[tuple[float, int]] = deque()
    while full[0][0] < end:
        at, camera = full[0]
        heapq.heapreplace(full, (at + gpu.period * draw.uniform(0.95, 1.05), camera))
        queue.append((at, camera))
        until = full[0][0]
        while queue and (soonest := min(free)) <= until:
            asked, camera = queue.popleft()
            start = max(asked, soonest)
            if start - asked > gpu.period:
                lost += 1
                continue
            process = holder.get(camera, -1)
            known = process >= 0 and has[process] == camera and free[process] <= start
            if not known:
                process = free.index(soonest)
                has[process], holder[camera] = camera, process
            taken = gpu.step if known else gpu.step + gpu.swap
            free[process] = start + taken
            busy += taken
            waits.append(start + taken - asked)
    waits.sort()
    return Seen(
        streams,
        len(waits) * gpu.batch / end,
        min(1.0, busy / end / gpu.processes),
        waits[int(0.95 * len(waits))],
        lost / (len(waits) + lost),
    )


def knee(gpu: Gpu, patience: float) -> Seen:
    """The most streams of which 95 % of the batches are answered in so many seconds."""
    low, high = 1, max(2, int(1.2 * gpu.ceiling))
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        seen = simulate(gpu, middle)
        low, high = (middle, high) if seen.wait <= patience and not seen.lost else (low, middle)
    return simulate(gpu, low)


def main() -> None:
    """Print images a second and cost by the number of streams, and where the knee is."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--step", type=float, default=16.7, help="ms of a batch")
    parser.add_argument("--processes", type=int, default=15, help="at work on one GPU")
    parser.add_argument("--swap", type=float, default=21.4, help="ms to change the state")
    parser.add_argument("--state", type=float, default=423, help="KiB of a state")
    parser.add_argument("--batch", type=int, default=64, help="images of one camera")
    parser.add_argument("--rate", type=float, default=1.0, help="images a second of a camera")
    parser.add_argument("--patience", type=float, default=0.1, help="s that an answer may take")
    parser.add_argument("--cameras", type=int, default=10_000, help="in the fleet")
    args = parser.parse_args()
    gpu = Gpu(args.step / 1e3, args.processes, args.swap / 1e3, args.batch, args.rate)
    best = knee(gpu, args.patience)
    shares = (0.01, 0.1, 0.5, 0.8, 0.9, 0.95, 1.0, 1.1, 1.5)
    print(f"{'streams':>8}{'images/s':>10}{'busy':>7}{'p95, ms':>10}{'lost':>7}{'h/million':>11}")
    counts = sorted({max(1, round(share * gpu.ceiling)) for share in shares} | {best.streams})
    for seen in (simulate(gpu, streams) for streams in counts):
        mark = "  <- knee" if seen.streams == best.streams else ""
        print(
            f"{seen.streams:8,}{seen.images:10,.1f}{seen.busy:7.0%}{1e3 * seen.wait:10,.1f}"
            f"{seen.lost:7.1%}{seen.hours:11.4f}{mark}"
        )
    held = best.streams * args.state / 2**20
    print(
        f"at the knee: {best.streams:,} streams on a GPU, {held:.2f} GiB of states, "
        f"{best.streams / gpu.period:,.0f} swaps a second; "
        f"{args.cameras:,} cameras take {-(-args.cameras // best.streams):,} GPUs"
    )


if __name__ == "__main__":
    main()
