"""What the service sends, as OpenAPI describes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Guess(BaseModel):
    """A class, and how probable it is."""

    label: int
    name: str | None = None
    probability: float


class Prediction(BaseModel):
    """The most probable classes of one image, the most probable first."""

    top: list[Guess]


class Health(BaseModel):
    """Estimated accuracies on the latest images, from 0 to 1, as of the guard's last check."""

    source: float = Field(description="Of the source model.")
    adapted: float = Field(description="Of the adapted model.")
    gain: float = Field(description="Of the adapted model over the source model.")


class Predictions(BaseModel):
    """What is predicted for the images of a request, in their order."""

    stream: str
    predictions: list[Prediction]
    predicted_by: Literal["adapted", "source"]
    phase: str | None = Field(description="The guard's phase; null if the step failed.")
    batch: int | None = Field(description="Number of the stream's batch; null if the step failed.")
    health: Health | None = Field(description="Null without a guard, or before its first check.")
    learned: bool
    note: Literal["frozen", "deadline", "failed"] | None = Field(
        default=None, description="Why the images were not learned from."
    )


class StreamChange(BaseModel):
    """What may be set for a stream; what is left out stays as it is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    frozen: bool | None = None
    lr: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Learning rate; null: the server's."
    )
    method: str | None = Field(default=None, description="Such as sar+fata; null: the server's.")


class StreamSummary(BaseModel):
    """One line of the list of streams."""

    stream: str
    images: int = Field(description="Since the server started.")
    last: float = Field(description="Last request, in seconds since 1970; 0: none.")
    phase: str | None
    predicted_by: Literal["adapted", "source"] | None
    health: Health | None = Field(description="Null without a guard, or before its first check.")


class StreamList(BaseModel):
    """The streams that a token is for."""

    streams: list[StreamSummary]
    total: int


class Stream(StreamSummary):
    """All that is known of a stream."""

    method: str
    frozen: bool
    lr: float | None
    batches: int
    counts: dict[str, Any]
    events: list[dict[str, Any]]


class Point(BaseModel):
    """Some successive batches of a stream."""

    images: int
    selected: float = Field(description="Share of the images that were selected to learn from.")
    source: float = Field(description="Share that the source model predicted.")
    confidence: float = Field(description="Mean of the largest probability.")
    classes: dict[str, float] = Field(description="Shares of the most frequent labels.")
    health: Health | None = Field(description="At its last batch.")


class Points(BaseModel):
    """The latest batches of a stream since the server started."""

    points: list[Point]
    names: dict[str, str] = Field(description="Of the labels, if the server knows them.")


class LatestImage(BaseModel):
    """One of the latest images."""

    png: str = Field(description="In base64.")
    label: int
    name: str | None
    confidence: float


class LatestImages(BaseModel):
    """The latest images of a stream, the newest last."""

    images: list[LatestImage]


class Failure(BaseModel):
    """Why a request was not fulfilled."""

    error: str
