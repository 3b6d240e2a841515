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
        self._recorded: tuple[int, Any] | None = None

    def watch(self, step: int) -> AbstractContextManager[Any]:
        """Returns the context for a step, from 1, which records if it is that step's turn."""
        if not self.every or step % self.every:
            return nullcontext()
        statistics = apex_te.fp8_statistics(self.model)
        self._recorded = (step, statistics)
        return statistics

    def figures(self) -> dict[str, Any] | None:
        """Returns the figures of the recorded step, once; waits for the device.

        Returns:
            ``step``; ``saturation`` and ``underflow``, the largest shares of a tensor's elements,
            with the tensors' names; ``underflow_mean`` over tensors; ``nonfinite``, a count. None
            if no step was recorded.
        """
        if self._recorded is None:
            return None
        (step, statistics), self._recorded = self._recorded, None
        series = statistics.to_dict()
        if not series:
            return None
        figures: dict[str, Any] = {"step": step}
        for key in ("saturation", "underflow"):
            rates = {name: values[f"{key}_rate"][-1] for name, values in series.items()}
            worst = max(rates, key=rates.__getitem__)
            figures |= {key: rates[worst], f"{key}_of": worst}
            figures[f"{key}_mean"] = sum(rates.values()) / len(rates)
        figures["nonfinite"] = sum(values["nonfinite"][-1] for values in series.values())
        return figures
