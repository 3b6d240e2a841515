"""``LayerAdvice``: measurements of one layer, and the advice that follows from them."""

from __future__ import annotations

import math
from typing import NamedTuple

from .trial import RoleStatistics, Times


class LayerAdvice(NamedTuple):
    """Measurements of one layer, and the resulting advice.

    Attributes:
        name: dotted name of the layer in the model.
        kind: name of its class.
        in_features, out_features: sizes of its weight; 0 if there are several.
        rows: number of rows of its input; 0 if it did not run.
        calls: number of calls in one forward of the sample.
        times: milliseconds of one call; None if it was not measured.
        roles: statistics by role, "input", "weight" and "grad_output"; a role is missing if its
            tensor was not cast to FP8.
        against: reasons to keep the layer in bf16 or fp32.
        kept: reason why ``from_torch`` does not convert the layer; None if it does.
    """

    name: str
    kind: str
    in_features: int
    out_features: int
    rows: int
    calls: int
    times: Times | None
    roles: dict[str, RoleStatistics]
    against: tuple[str, ...]
    kept: str | None

    @property
    def gain(self) -> float:
        """Time in bf16 or fp32 divided by time in FP8; NaN if they were not measured."""
        return self.times.high / self.times.fp8 if self.times else math.nan

    def advice(self) -> str:
        """Returns the advice as a phrase, such as "FP8" or "keep: <reasons>"."""
        if self.kept is not None:
            return f"kept: {self.kept}"
        if self.times is None:
            return "did not run"
        return f"keep: {'; '.join(self.against)}" if self.against else "FP8"
