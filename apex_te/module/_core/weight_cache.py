"""FP8 copies of weights that a module keeps between calls, apart for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...fp8.autocast import graph_task_id, local


class WeightCache(dict[Any, tuple[tuple, Any]]):
    """Dict of ``(key, copies)`` by GEMM index: FP8 copies of weights, made in training.

    The key's first item tells if the weight is up to date. Evaluations read these copies, but keep
    their own in ``evaluated``, so that later microbatches of a step find the scales of the first
    one.
    """

    __slots__ = ("evaluated",)

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: dict[Any, tuple[tuple, Any]] = {}

    def clear(self) -> None:
        """Drops all copies."""
        super().clear()
        self.evaluated.clear()

    def copies(self, gemm: Any, key: tuple, fill: bool | None, make: Callable[[], Any]) -> Any:
        """Returns FP8 copies of a weight: cached ones with key ``key``, unless ``fill`` is True."""
        region = local.region
        evaluates = region is not None and not region.records
        own, other = (self.evaluated, self) if evaluates else (self, self.evaluated)
        if not fill:
            found = own.get(gemm)
            if found is not None and found[0] == key:
                return found[1]
            # Training reads none of an evaluation, but for a recompute of one, as torch's
            # reentrant checkpoint runs its forward.
            found = other.get(gemm) if evaluates or graph_task_id() != -1 else None
            if found is not None and found[0] == key:
                own.pop(gemm, None)
                return found[1]
        made = make()
        own[gemm] = key, made
        # What evaluations keep of other values, and training, no call will read again.
        if not evaluates or (gemm in other and other[gemm][0][0] != key[0]):
            other.pop(gemm, None)
        return made
