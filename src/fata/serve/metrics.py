"""Prometheus metrics: by stream up to a limit, beyond it summed under the name `other`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from fata.engine.record import StepRecord
    from fata.guard.events import Health

PHASES = ("adapting", "aside", "rest", "off")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
OTHER = "other"


class Metrics:
    """Those of the process of the network.

    Args:
        most: streams with metrics of their own.
    """

    def __init__(self, most: int = 100) -> None:
        self.registry, self._most, self._named = CollectorRegistry(), most, set[str]()
        registry = self.registry
        self.images = Counter(
            "fata_images", "Images predicted.", ["stream", "predicted_by"], registry=registry
        )
        self.selected = Counter(
            "fata_selected_rows",
            "Rows selected to learn from.",
            ["stream", "term"],
            registry=registry,
        )
        self.events = Counter(
            "fata_guard_events", "Actions of the guard.", ["action"], registry=registry
        )
        self.phases = Gauge(
            "fata_stream_phase", "1 for the guard's phase.", ["stream", "phase"], registry=registry
        )
        self._health: dict[str, Health] = {}  # by stream
        registry.register(_Estimates(self._health, self._named))
        self.failures = Counter("fata_failed_steps", "Steps that failed.", registry=registry)
        self.late = Counter(
            "fata_late_images", "Images past the deadline, not learned.", registry=registry
        )
        self.steps = Histogram(
            "fata_step_seconds", "Time of a batch.", buckets=SECONDS, registry=registry
        )
        self.rows = Histogram(
            "fata_batch_images", "Images of a batch.", buckets=ROWS, registry=registry
        )

    def label(self, stream: str) -> str:
        """What a stream is called in the metrics."""
        if stream not in self._named and len(self._named) < self._most:
            self._named.add(stream)
        return stream if stream in self._named else OTHER

    def add(self, stream: str, rows: int, record: StepRecord | None, seconds: float) -> None:
        """A batch of a stream was predicted."""
        label = self.label(stream)
        by = "source" if record is None or record.source_predicted else "adapted"
        self.images.labels(label, by).inc(rows)
        self.rows.observe(rows)
        self.steps.observe(seconds)
        if record is None:
            self.failures.inc()
            return
        for term, count in record.selected.items():
            self.selected.labels(label, term).inc(count)
        if record.health:
            self._health[stream] = record.health
        else:
            self._health.pop(stream, None)
        for event in record.events:
            self.events.labels(event.action).inc()
        if label != OTHER:
            for phase in PHASES:
                self.phases.labels(label, phase).set(phase == record.phase)

    def forget(self, stream: str) -> None:
        """The stream is gone: another one may have metrics of its own."""
        self._health.pop(stream, None)
        if stream in self._named:
            self._named.discard(stream)
            for metric in (self.images, self.selected, self.phases):
                metric.remove_by_labels({"stream": stream})

    def restart(self, stream: str) -> None:
        """The stream is at the source weights again: nothing was checked there."""
        self._health.pop(stream, None)

    def watch(self, name: str, what: str, read: Callable[[], float], total: bool = False) -> None:
        """A number that is read when the metrics are; `total`: one that only grows."""
        self.registry.register(_Read(name, what, read, total))

    def text(self) -> bytes:
        """As Prometheus reads them."""
        return generate_latest(self.registry)


class RequestMetrics:
    """Those of the HTTP process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.seconds = Histogram(
            "fata_request_seconds",
            "Time from a request to its predictions.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.requests = Counter(
            "fata_requests", "Requests by HTTP status.", ["status"], registry=self._registry
        )

    def text(self) -> bytes:
        """As Prometheus reads them."""
        return generate_latest(self._registry)


class _Estimates(Collector):
    """Estimated accuracies: of each stream with metrics of its own, and the mean of the others."""

    def __init__(self, health: Mapping[str, Health], named: Container[str]) -> None:
        self._health, self._named = health, named

    def collect(self) -> Iterable[Metric]:
        """As of the last check of each stream."""
        found: dict[str, list[Health]] = {}
        for stream, health in dict(self._health).items():  # a copy: another thread adds to it
            label = stream if stream in self._named else OTHER
            found.setdefault(label, []).append(health)
        what = "Estimated accuracy, from 0 to 1; of other streams the mean."
        family = GaugeMetricFamily("fata_health", what, labels=["stream", "model"])
        for label, some in found.items():
            family.add_metric([label, "source"], fmean(health.source for health in some))
            family.add_metric([label, "adapted"], fmean(health.adapted for health in some))
        yield family


class _Read(Collector):
    def __init__(self, name: str, what: str, read: Callable[[], float], total: bool) -> None:
        self._given, self._total = (name, what), total
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """The number now."""
        family = CounterMetricFamily if self._total else GaugeMetricFamily
        yield family(*self._given, value=self._read())
