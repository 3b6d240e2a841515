"""RMSNorm: torch.nn.RMSNorm over the fused rms_norm op."""

from __future__ import annotations

import torch

from ..ops.rms_norm import rms_norm
from ._core.arguments import VAGUE, explain
from ._core.norm_module import NormModule

__all__ = ["RMSNorm", "RMSNormLayer"]


class RMSNormLayer(NormModule):
    """``y = x / sqrt(mean(x ** 2) + eps) * gamma`` over the last dimension(s).

    Args:
        normalized_shape: the last dimension(s) of the input, an int or several.
        eps: added to the mean square.
        hidden_size, sequence_parallel, params_dtype, dtype, zero_centered_gamma, device: as in
            ``LayerNorm``.

    Its parameter is ``weight`` in ``normalized_shape``. Interface and defaults follow
    TransformerEngine's RMSNorm.
    """

    _PARAMETERS = ("weight",)
    weight: torch.nn.Parameter

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Normalises ``inp`` [..., *normalized_shape]; returns a tensor of its shape.

        Args:
            inp: fp32, fp16 or bf16, in the dtype of the parameters. Under ``torch.autocast`` it may
                have any of these, and the output has autocast's dtype. Like torch's, ``RMSNorm``
                also takes an input of another dtype than its parameters; the output then has the
                input's dtype.

        Raises:
            TypeError: ``inp`` has another dtype than those above.
            ValueError: the last dimensions of ``inp`` are not ``normalized_shape``.
        """
        try:
            return self._normalize(rms_norm, inp, self.weight)
        except VAGUE as error:
            explain(self, error, {"inp": inp})
            raise

    # Python's own errors about a call then name the class that users construct.
    forward.__qualname__ = "RMSNorm.forward"


class RMSNorm(RMSNormLayer, torch.nn.RMSNorm):
    """``RMSNormLayer`` as a ``torch.nn.RMSNorm``, for tools that look for that class."""

    __doc__ = RMSNormLayer.__doc__

    def _mixes(self, dtype: torch.dtype, given: set[torch.dtype]) -> bool:
        return dtype in (torch.float32, torch.float16, torch.bfloat16)
