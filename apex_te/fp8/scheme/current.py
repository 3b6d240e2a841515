"""Current scaling: one scale for each tensor, computed from the tensor itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...comm.collectives import max_over_ranks
from ...ops.current_scale import current_scale, scale_of, tensor_amax
from ...ops.fp8_output import FP8_DTYPES
from ...ops.grouped_quantize import scales_of
from ..formats import formats_of
from ..tensor import QuantizedTensor
from . import GemmQuantizers, QuantizerSets, stateless_sets
from .base import FusedCast, Quantizer, shared_scale
from .grouped import CurrentGroups, GroupQuantizer
from .products import FP8Gemm

if TYPE_CHECKING:
    from ...recipe import CurrentScaling
    from .base import Slots

__all__ = ["CurrentScalingQuantizer", "build_quantizers"]


class CurrentScalingQuantizer(Quantizer):
    """Turns a matrix into FP8 with scale = fp8_max / max |x|.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, or their fnuz forms.
        pow2: round the scale down to a power of two.
        eps: smallest amax.
        group: ranks whose largest amax counts; None: this rank's alone.
    """

    __slots__ = ("eps", "group", "pow2")

    def __init__(self, dtype: torch.dtype, pow2: bool, eps: float, group: Any = None) -> None:
        self.dtype = dtype
        self.pow2 = pow2
        self.eps = eps
        self.group = group

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        amax = None if self.group is None else max_over_ranks(tensor_amax(x), self.group)
        out = current_scale(
            x, self.dtype, rowwise=rowwise, columnwise=columnwise, eps=self.eps, pow2=self.pow2,
            amax=amax,
        )  # fmt: skip
        return shared_scale(out, self.dtype), x.sum(0) if with_dbias else None

    def settings(self) -> tuple:
        return (*super().settings(), self.pow2, self.eps)

    def needs_whole_amax(self) -> bool:
        return True

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        out = current_scale(
            x, self.dtype, columnwise=False, eps=self.eps, pow2=self.pow2, amax=amax
        )
        assert out.rowwise is not None
        return out.rowwise, out.scale_inv, None

    def scales_of_rows(
        self, quantizers: Sequence[Any], amaxes: torch.Tensor | None
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor] | None:
        if self.dtype not in FP8_DTYPES:
            return None
        assert amaxes is not None
        scales, inverses = scales_of(amaxes, self.dtype, eps=self.eps, pow2=self.pow2)
        return scales.split(1), inverses

    def produce(
        self, producer: FusedCast, rowwise: bool = True, columnwise: bool = True
    ) -> QuantizedTensor:
        """The op runs twice, first for its amax alone: cheaper than writing its result."""
        if not self.can_fuse(producer):
            return super().produce(producer, rowwise, columnwise)
        dtype = self.dtype
        # The products read scale_inv, which has to be aligned: the first of the two is.
        amax, scale_inv, scale = producer.scalars()
        producer.fp8(scale, dtype, False, False, amax)
        if self.group is not None:
            max_over_ranks(amax, self.group)
        scale_of(amax, dtype, scale, scale_inv, eps=self.eps, pow2=self.pow2)
        out = producer.fp8(scale, dtype, rowwise, columnwise, None)
        # The op's own inverse of the scale does not show an infinite amax.
        return QuantizedTensor(out.rowwise, scale_inv, out.columnwise, scale_inv, dtype)

    def grouped(self, quantizers: Sequence[Any]) -> GroupQuantizer | None:
        return CurrentGroups(quantizers) if self.dtype in FP8_DTYPES else None

    def shared(self, group: Any) -> CurrentScalingQuantizer:
        return CurrentScalingQuantizer(self.dtype, self.pow2, self.eps, group)


def build_quantizers(
    recipe: CurrentScaling, slots: Slots | None, gemms: int, device: torch.device
) -> QuantizerSets:
    """One set of quantizers for every GEMM: nothing is kept."""
    formats = formats_of(recipe.fp8_format, device)
    forward = CurrentScalingQuantizer(formats.fwd_dtype, recipe.pow2, recipe.eps)
    backward = CurrentScalingQuantizer(formats.bwd_dtype, recipe.pow2, recipe.eps)
    products = FP8Gemm(recipe.use_split_accumulator, device)
    override = recipe.override_linear_precision[2]
    quantizers = GemmQuantizers(forward, forward, forward, backward, products, override)
    return stateless_sets(quantizers, gemms)
