"""Current scaling: one scale for each tensor, computed from the tensor itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..ops.current_scale import current_scale, scale_of
from ..tensor import QuantizedTensor
from . import GemmQuantizers, QuantizerSets, stateless_sets
from .base import Producer, Quantizer, shared_scale
from .products import FP8Products

if TYPE_CHECKING:
    from ..recipe import CurrentScaling
    from ..state import FP8State

__all__ = ["CurrentScalingQuantizer", "build_quantizers"]


class CurrentScalingQuantizer(Quantizer):
    """Turns a matrix into FP8 with scale = fp8_max / max |x|.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2: round the scale down to a power of two.
        eps: smallest amax.
    """

    __slots__ = ("eps", "pow2")

    def __init__(self, dtype: torch.dtype, pow2: bool, eps: float) -> None:
        self.dtype = dtype
        self.pow2 = pow2
        self.eps = eps

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        transposed: bool = True,
        with_dbias: bool = False,
        noop: torch.Tensor | None = None,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        out = current_scale(
            x, self.dtype, rowwise=rowwise, transposed=transposed, eps=self.eps, pow2=self.pow2
        )
        return shared_scale(out, self.dtype), x.sum(0) if with_dbias else None

    def produce(
        self, producer: Producer, rowwise: bool = True, transposed: bool = True
    ) -> QuantizedTensor:
        """The op runs twice, first for its amax alone: cheaper than writing its result."""
        if not producer.can_fuse:
            return super().produce(producer, rowwise, transposed)
        dtype = self.dtype
        amax, scale, scale_inv = producer.scalars()
        producer.fp8(scale, dtype, False, False, amax)
        scale_of(amax, dtype, scale, scale_inv, eps=self.eps, pow2=self.pow2)
        return shared_scale(producer.fp8(scale, dtype, rowwise, transposed, None), dtype)


def build_quantizers(
    recipe: CurrentScaling, state: FP8State, device: torch.device
) -> QuantizerSets:
    """One set of quantizers for every GEMM: nothing is kept."""
    formats = recipe.fp8_format.value
    forward = CurrentScalingQuantizer(formats.fwd_dtype, recipe.pow2, recipe.eps)
    backward = CurrentScalingQuantizer(formats.bwd_dtype, recipe.pow2, recipe.eps)
    products = FP8Products(recipe.use_split_accumulator, device)
    override = recipe.override_linear_precision[2]
    quantizers = GemmQuantizers(forward, forward, forward, backward, products, override)
    return stateless_sets(quantizers, state.gemms)
