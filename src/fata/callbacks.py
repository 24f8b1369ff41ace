"""Ready-made callbacks for `fata.adapt(..., callbacks=[...])`; each needs its own package.

fata.adapt(model, callbacks=[TensorBoard("runs/camera-7")])
"""

from __future__ import annotations

import os
from typing import Any

from fata.engine.record import Callback, StepRecord

__all__ = ["Callback", "MLflow", "Prometheus", "StepRecord", "TensorBoard", "WeightsAndBiases"]


def numbers(record: StepRecord) -> dict[str, float]:
    """What is logged of a batch, by name."""
    selected = {f"fata/selected_{term}": float(n) for term, n in record.selected.items()}
    health = record.health.as_dict() if record.health else {}
    return {
        "fata/rows": float(record.rows),
        "fata/entropy": record.entropy,
        "fata/stepped": float(record.stepped),
        "fata/source_predicted": float(record.source_predicted),
        "fata/guard_events": float(len(record.events)),
        **selected,
        **{f"fata/health_{name}": number for name, number in health.items()},
        **({} if record.loss is None else {"fata/loss": record.loss}),
    }


class TensorBoard:
    """Writes scalars, and the guard's actions as text.

    Args:
        writer: a `SummaryWriter`, or the folder for a new one (needs `tensorboard`).
    """

    def __init__(self, writer: Any) -> None:
        if isinstance(writer, str | os.PathLike):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(os.fspath(writer))
        self.writer = writer

    def on_step(self, record: StepRecord) -> None:
        """Write a batch."""
        for name, number in numbers(record).items():
            self.writer.add_scalar(name, number, record.batch)
        for event in record.events:
            self.writer.add_text("fata/guard", event.action, record.batch)


class WeightsAndBiases:
    """Logs to a run of Weights & Biases (needs `wandb`).

    Args:
        run: from `wandb.init`; None: the current one.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            import wandb

            run = wandb
        self.run = run

    def on_step(self, record: StepRecord) -> None:
        """Log a batch."""
        self.run.log({**numbers(record), "fata/phase": record.phase}, step=record.batch)


class MLflow:
    """Logs metrics to the active run of MLflow (needs `mlflow`)."""

    def __init__(self) -> None:
        import mlflow

        self._mlflow = mlflow

    def on_step(self, record: StepRecord) -> None:
        """Log a batch."""
        self._mlflow.log_metrics(numbers(record), step=record.batch)


class Prometheus:
    """Keeps Prometheus metrics up to date (needs `prometheus-client`).

    Args:
        stream: label of the metrics.
        registry: where they are registered; None: the default one.
    """

    def __init__(self, stream: str = "default", registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        given: dict[str, Any] = {"registry": registry or REGISTRY}
        by = ["stream"]
        self._images = Counter("fata_images", "Images predicted.", by, **given).labels(stream)
        self._entropy = Gauge("fata_entropy", "Mean entropy of a batch.", by, **given)
        self._loss = Gauge("fata_loss", "Loss of a batch.", by, **given)
        self._selected = Counter("fata_selected_rows", "Rows selected.", [*by, "term"], **given)
        self._events = Counter("fata_guard_events", "Actions.", [*by, "action"], **given)
        self._source = Gauge("fata_source_predicted", "1: the source model's.", by, **given)
        self._health = Gauge("fata_health", "Estimated accuracy.", [*by, "model"], **given)
        self._stream = stream

    def on_step(self, record: StepRecord) -> None:
        """Count a batch."""
        self._images.inc(record.rows)
        self._entropy.labels(self._stream).set(record.entropy)
        self._source.labels(self._stream).set(record.source_predicted)
        if record.loss is not None:
            self._loss.labels(self._stream).set(record.loss)
        if record.health is not None:
            self._health.labels(self._stream, "source").set(record.health.source)
            self._health.labels(self._stream, "adapted").set(record.health.adapted)
        for term, rows in record.selected.items():
            self._selected.labels(self._stream, term).inc(rows)
        for event in record.events:
            self._events.labels(self._stream, event.action).inc()
