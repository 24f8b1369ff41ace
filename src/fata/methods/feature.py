"""Methods of the penultimate feature z, and of the classifier that it goes through: o = W z + b."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fata.methods.base import Batch, Method, Outputs
from fata.network.head import Head


@dataclasses.dataclass(frozen=True)
class FeatureMethod(Method):
    """A method that needs z and the classifier.

    Args:
        head: name of the linear layer that gives the logits; `auto`: the model's last one.
    """

    head: str = dataclasses.field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        if not isinstance(self.head, str):
            raise TypeError(
                f"{type(self).__name__}(head={self.head!r}): give the name of a linear layer, or "
                f"'auto'."
            )


def feature(of: Batch | Outputs) -> tuple[Tensor, Head]:
    """The feature z of a pass, and the classifier."""
    if of.head is None:
        raise ValueError("z is there for a FeatureMethod alone.")
    return of.features[0], of.head
