"""LayerNorm: torch.nn.LayerNorm over the fused layer_norm op."""

from __future__ import annotations

import torch

from ..ops.layer_norm import layer_norm
from ._core.arguments import VAGUE, explain
from ._core.norm_module import NormModule

__all__ = ["LayerNorm", "LayerNormLayer"]


class LayerNormLayer(NormModule):
    """``y = (x - mean) / sqrt(var + eps) * gamma + bias`` over the last dimension(s).

    Args:
        normalized_shape: the last dimension(s) of the input, an int or several.
        eps: added to the variance.
        hidden_size: another name of ``normalized_shape``.
        sequence_parallel: sets the attribute ``sequence_parallel`` of the parameters, for trainers;
            does not change the computation.
        params_dtype: dtype of the parameters, default ``torch.get_default_dtype()``; another name:
            ``dtype``.
        zero_centered_gamma: gamma is ``1 + weight``, and the weight starts at 0.
        device: device of the parameters; those on ``"meta"`` get memory by ``reset_parameters()``.

    Its parameters are ``weight`` and ``bias``, both in ``normalized_shape``. Interface and defaults
    follow TransformerEngine's LayerNorm.
    """

    _PARAMETERS = ("weight", "bias")
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Normalises ``inp`` [..., *normalized_shape]; returns a tensor of its shape.

        Args:
            inp: fp32, fp16 or bf16, in the dtype of the parameters. Under ``torch.autocast`` it may
                have any of these, and the output has autocast's dtype. Like torch's, ``LayerNorm``
                also takes an fp16 or bf16 input with fp32 parameters; the output then has the
                input's dtype.

        Raises:
            TypeError: ``inp`` has another dtype than those above.
            ValueError: the last dimensions of ``inp`` are not ``normalized_shape``.
        """
        try:
            return self._normalize(layer_norm, inp, self.weight, self.bias)
        except VAGUE as error:
            explain(self, error, {"inp": inp})
            raise

    # Python's own errors about a call then name the class that users construct.
    forward.__qualname__ = "LayerNorm.forward"


class LayerNorm(LayerNormLayer, torch.nn.LayerNorm):
    """``LayerNormLayer`` as a ``torch.nn.LayerNorm``, for tools that look for that class."""

    __doc__ = LayerNormLayer.__doc__

    def _mixes(self, dtype: torch.dtype, given: set[torch.dtype]) -> bool:
        return given == {torch.float32} and dtype in (torch.float16, torch.bfloat16)
