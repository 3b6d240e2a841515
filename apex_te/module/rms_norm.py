"""RMSNorm: torch.nn.RMSNorm over the fused rms_norm op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops.rms_norm import rms_norm
from ..runtime.named_arguments import named_arguments
from ._core.arguments import VAGUE, explain
from ._core.norm_module import NormModule

__all__ = ["RMSNorm", "RMSNormLayer"]


class RMSNormLayer(NormModule):
    """``y = x / sqrt(mean(x ** 2) + eps) * gamma`` over the last dimension(s).

    Args:
        normalized_shape: the last dimension(s) of the input, an int or several.
        eps: added to the mean square.
        hidden_size: another name of ``normalized_shape``.
        sequence_parallel: sets the attribute of this name on the parameters, for trainers; it
            changes no computation.
        params_dtype: dtype of the parameters, default ``torch.get_default_dtype()``; another name:
            ``dtype``.
        zero_centered_gamma: gamma is ``1 + weight``, and the weight starts at 0.
        device: device of the parameters; those on ``"meta"`` get memory by ``reset_parameters()``.

    Its parameter is ``weight`` of ``normalized_shape``. Interface and defaults follow
    TransformerEngine's RMSNorm.
    """

    _PARAMETERS = ("weight",)
    weight: torch.nn.Parameter

    @named_arguments()
    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        hidden_size: int | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._construct(
            normalized_shape,
            hidden_size,
            eps,
            sequence_parallel,
            params_dtype,
            dtype,
            zero_centered_gamma,
            device,
        )

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
