"""What the page shows of a stream: its latest batches, summed up."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fata.engine.record import StepRecord
from fata.guard.events import Health

POINTS = 60  # of a curve
ROWS = 64  # images that a point stands for, at least
CLASSES = 8  # of a point, the most frequent
IMAGES = 12  # the latest, if they are shown


@dataclass(slots=True)
class _Point:
    """Some batches of a stream."""

    rows: int = 0
    selected: int = 0
    source: int = 0  # predictions of the source model
    confidence: float = 0.0  # summed
    classes: Counter[int] = field(default_factory=Counter)
    health: Health | None = None  # at the last of them

    def close(self) -> None:
        """Keep what is shown: of a thousand classes, 60 points would be over 200 KiB a stream."""
        self.classes = Counter(dict(self.classes.most_common(CLASSES)))

    def shown(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "images": self.rows,
            "selected": self.selected / self.rows,
            "source": self.source / self.rows,
            "confidence": self.confidence / self.rows,
            "classes": {str(c): n / self.rows for c, n in self.classes.most_common(CLASSES)},
            "health": self.health.as_dict() if self.health else None,
        }


@dataclass(slots=True)
class History:
    """The latest batches of one stream since the service started."""

    images: int = 0
    last: float = 0.0  # when, in seconds since 1970
    phase: str | None = None
    source_predicted: bool | None = None
    health: Health | None = None
    points: deque[_Point] = field(default_factory=lambda: deque(maxlen=POINTS))
    latest: deque[tuple[bytes, int, float]] = field(default_factory=lambda: deque(maxlen=IMAGES))

    def add(
        self, record: StepRecord | None, labels: Sequence[int], confidences: Sequence[float]
    ) -> None:
        """A batch was predicted; without a record, by the source model after a failed step."""
        rows = len(labels)
        if not self.points or self.points[-1].rows >= ROWS:
            if self.points:
                self.points[-1].close()
            self.points.append(_Point())
        point = self.points[-1]
        self.images, self.last = self.images + rows, time.time()
        self.source_predicted = record is None or record.source_predicted
        if record:
            self.phase, self.health = record.phase, record.health
        point.rows += rows
        point.selected += max(record.selected.values(), default=0) if record else 0
        point.source += rows if self.source_predicted else 0
        point.confidence += sum(confidences)
        point.classes.update(labels)
        point.health = self.health

    def summary(self) -> dict[str, Any]:
        """One line of the list of streams."""
        by = {None: None, True: "source", False: "adapted"}[self.source_predicted]
        return {
            "images": self.images,
            "last": self.last,
            "phase": self.phase,
            "predicted_by": by,
            "health": self.health.as_dict() if self.health else None,
        }
