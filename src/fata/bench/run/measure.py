"""Measure one cell: run an adapter over its stream and keep every row."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fata._device import Deferred
from fata.adapter import Adapter
from fata.bench.cost import Macs, effective
from fata.bench.run import memory
from fata.bench.samples import samples
from fata.bench.summary import Rows, health, summary
from fata.data import Samples, Stream
from fata.guard.events import Health
from fata.methods.losses import entropy
from fata.window import Window
from fata.zoo import Loaded

Tick = Callable[[int, float], None]  # images seen, accuracy so far


def measure(
    adapter: Adapter,
    loaded: Loaded,
    stream: Stream,
    batches: Iterable[Samples],
    device: torch.device,
    macs: tuple[Macs, Macs],
    tick: Tick,
    window: Window | None = None,
) -> dict[str, Any]:
    """Run a stream through an adapter; returns what the store keeps.

    With a `window`, a batch is the newest part of it. `macs` are those of a pass over the network
    and over the tail: see `cost.passes`.
    """
    predict = window or adapter
    memory.reset_peak(device)
    parts: list[list[Tensor]] = []
    damaged: list[str] = []
    domains: list[str] = []  # of each row
    estimates: list[tuple[Health, bool]] = []  # after each batch, if there is a guard
    clock = Clock(device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    known: tuple[int, int, Deferred] | None = (
        None  # rows seen, rows of this rank, how many of these are right
    )
    group, index = adapter.group, [torch.empty(0, dtype=torch.int64)]  # rows of this rank
    seen, ends, ticked = 0, list[int](), time.perf_counter()
    for batch in batches:
        part = group.share(len(batch.images))
        images = loaded.preprocess.normalise(batch.images[part])
        clock.start()
        logits = predict(images)
        clock.stop()
        if adapter.guard and adapter.health:
            estimates.append((adapter.health, adapter.guard.phase != "adapting"))
        parts.append(_columns(logits, batch.labels[part], adapter.selected))
        right = right + parts[-1][0].eq(parts[-1][1]).sum()
        damaged += batch.damaged
        domains += map(str, batch.domains)
        index.append(seen + torch.arange(len(batch.images))[part])
        seen += len(batch.images)
        ends.append(seen)
        if time.perf_counter() - ticked > 0.5:
            ticked = time.perf_counter()
            if known is not None:
                tick(known[0], known[2].read() / max(1, known[1]))  # a rank may have none
            known = seen, sum(map(len, index)), Deferred(right)
    columns = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    rows = Rows(*(group.whole(column, torch.cat(index), seen) for column in columns))
    counts = adapter.counts
    counts["rows_forward"] += window.rows_frozen if window else 0
    times = clock.read()
    shown = {"samples": samples(stream, batch, seen)} if adapter.name == "source" else {}
    return {
        **shown,
        **summary(rows, logits.shape[1], tuple(counts["selected"]), ends),
        "domains": _by_domain(rows, domains),
        "damaged": len(damaged),
        "counts": counts,
        "guard": [dataclasses.asdict(e) for e in adapter.guard.events] if adapter.guard else None,
        "health": health(estimates),
        "macs": dataclasses.asdict(effective(counts, *macs)),
        "seconds": sum(times),
        "latency": {name: _quantile(times, share) for name, share in (("p50", 0.5), ("p95", 0.95))},
        "images_per_second": seen / sum(times),
        "peak_memory": memory.peak(device),
    }


class Clock:
    """Times of many steps, without waiting for the device after each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        """A step begins."""
        self._mark()

    def stop(self) -> None:
        """It ends (on a GPU: when the device gets there)."""
        self._mark()

    def read(self) -> list[float]:
        """Seconds of each step."""
        begun, over = self._marks[::2], self._marks[1::2]
        pairs = zip(begun, over, strict=True)
        if self.cuda:
            torch.cuda.synchronize(self.device)
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in pairs]

    def _mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())


def _columns(logits: Tensor, labels: Tensor, selected: dict[str, Tensor]) -> list[Tensor]:
    """What is kept of each row, in the order of `Rows`; NaN predictions count as wrong."""
    classes, entropies = logits.shape[1], entropy(logits)
    confidence, prediction = logits.softmax(1).max(1)
    prediction = torch.where(entropies.isfinite(), prediction, classes)
    none = torch.zeros_like(prediction, dtype=torch.bool)
    newest = (rows[len(rows) - len(logits) :] for rows in selected.values())  # of a window
    host, plus, *_ = (*newest, none, none)
    entropies = entropies.nan_to_num(math.log(classes))
    return [labels, prediction, confidence.nan_to_num(0), entropies, host, plus]


def _by_domain(rows: Rows, domains: list[str]) -> dict[str, float]:
    right: dict[str, list[bool]] = {}
    for domain, one in zip(domains, rows.right.tolist(), strict=True):
        right.setdefault(domain, []).append(one)
    return {domain: 100 * sum(flags) / len(flags) for domain, flags in right.items()}


def _quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]
