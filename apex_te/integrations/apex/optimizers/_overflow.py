"""Attributes by which programs call ``amp_C`` through an optimizer."""

from __future__ import annotations

import torch

from ....optimizers._base import FusedOptimizer


class Overflow(FusedOptimizer):
    """Base with the flag that programs hand to the functions of ``amp_C``."""

    @property
    def _dummy_overflow_buf(self) -> torch.Tensor:
        """Flag of one int32 element on the device of the first parameter, 0."""
        param = self.param_groups[0]["params"][0]
        return torch.zeros(1, dtype=torch.int32, device=param.device)
