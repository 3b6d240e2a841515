"""FP8 health of a step: how many elements saturate or underflow, and where most of them do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import apex_te


class Health:
    """Records FP8 statistics of single steps.

    Args:
        model: the model.
        every: steps between two that are recorded; 0 records none.
        is_fp8: the model runs in FP8, neither compiled nor captured.
    """

    def __init__(self, model: torch.nn.Module, every: int, is_fp8: bool) -> None:
        self.model, self.every = model, every if is_fp8 else 0
        self._recorded: list[tuple[int, Any]] = []

    def watch(self, step: int) -> AbstractContextManager[Any]:
        """Returns the context for a step, from 1, which records if it is that step's turn."""
        if not self.every or step % self.every:
            return nullcontext()
        statistics = apex_te.fp8_statistics(self.model)
        self._recorded.append((step, statistics))
        return statistics

    def figures(self) -> list[dict[str, Any]]:
        """Returns the figures of each step recorded since the last call; waits for the device."""
        recorded, self._recorded = self._recorded, []
        return [{"step": step, **_summary(statistics.to_dict())} for step, statistics in recorded]


def _summary(series: dict[str, dict[str, list]]) -> dict[str, Any]:
    """Returns the figures of a step.

    Args:
        series: by tensor, figures of each microbatch, as ``fp8_statistics.to_dict``.

    Returns:
        ``saturation`` and ``underflow``, the largest shares of a tensor's elements;
        ``saturation_of`` and ``underflow_of``, those tensors; ``saturation_mean`` and
        ``underflow_mean`` over tensors; ``nonfinite``, a count.
    """
    figures: dict[str, Any] = {}
    for key in ("saturation", "underflow"):
        rates = {name: max(values[f"{key}_rate"]) for name, values in series.items()}
        worst = max(rates, key=rates.__getitem__)
        figures |= {key: rates[worst], f"{key}_of": worst}
        figures[f"{key}_mean"] = sum(rates.values()) / len(rates)
    figures["nonfinite"] = sum(sum(values["nonfinite"]) for values in series.values())
    return figures
