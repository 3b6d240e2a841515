"""``T5RMSNorm``, T5's norm over the fused op, for inputs of another dtype than the weight's."""

from __future__ import annotations

import torch

from ..module._core.context import is_autocast
from ..module.rms_norm import RMSNorm
from ..ops.rms_norm import rms_norm

__all__ = ["T5RMSNorm"]


class T5RMSNorm(RMSNorm):
    """RMSNorm that takes inputs of another dtype than the weight's, as T5's does.

    T5 in fp16 keeps the last linear layer of its MLPs in fp32, so that its residuals are fp32.
    """

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Normalises ``inp`` [..., hidden].

        Args:
            inp: fp32, fp16 or bf16.

        Returns:
            A tensor of the shape of ``inp`` in the weight's dtype; under ``torch.autocast`` in
            that of autocast.
        """
        weight = self.weight
        if inp.dtype is weight.dtype or is_autocast(inp.device.type):
            return super().forward(inp)
        out = rms_norm(inp.float(), weight.float(), self.eps)
        assert isinstance(out, torch.Tensor)
        return out.to(weight.dtype)
