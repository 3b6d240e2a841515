"""HiF8: one scale for each tensor, computed from the tensor itself, which brings amax to 15 or 224.

Those targets keep the values where HiF8 has 3 and 2 mantissa bits (as MindSpeed does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...comm.collectives import max_over_ranks
from ...ops import hif8
from ...ops.current_scale import tensor_amax
from ..tensor import QuantizedTensor
from . import GemmQuantizers, QuantizerSets, stateless_sets
from .base import Quantizer, shared_scale
from .products import HiF8Gemm

if TYPE_CHECKING:
    from ...recipe import CurrentScaling
    from .base import Slots

__all__ = ["HiF8Quantizer", "build_quantizers"]


class HiF8Quantizer(Quantizer):
    """Turns a matrix into HiF8 codes with scale = target / max |x|.

    Args:
        target: what the amax is scaled to.
        pow2: round the scale down to a power of two.
        eps: smallest amax.
        group: ranks whose largest amax counts; None: this rank's alone.
    """

    __slots__ = ("eps", "group", "pow2", "target")

    def __init__(self, target: float, pow2: bool, eps: float, group: Any = None) -> None:
        self.dtype = torch.uint8
        self.target = target
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
        out = hif8.quantize_current(
            x, self.target, rowwise=rowwise, columnwise=columnwise, eps=self.eps, pow2=self.pow2,
            amax=amax,
        )  # fmt: skip
        return shared_scale(out, self.dtype), x.sum(0) if with_dbias else None

    def settings(self) -> tuple:
        return (*super().settings(), self.target, self.pow2, self.eps)

    def needs_whole_amax(self) -> bool:
        return True

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        out = hif8.quantize_current(
            x, self.target, columnwise=False, eps=self.eps, pow2=self.pow2, amax=amax
        )
        assert out.rowwise is not None
        return out.rowwise, out.scale_inv, None

    def shared(self, group: Any) -> HiF8Quantizer:
        return HiF8Quantizer(self.target, self.pow2, self.eps, group)

    def _decode(self, codes: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        return hif8.decode(codes, dtype, scale_inv=scale_inv)


def build_quantizers(
    recipe: CurrentScaling, slots: Slots | None, gemms: int, device: torch.device
) -> QuantizerSets:
    """One set of quantizers for every GEMM: nothing is kept."""
    formats = recipe.fp8_format.value
    forward = HiF8Quantizer(formats.max_fwd, recipe.pow2, recipe.eps)
    backward = HiF8Quantizer(formats.max_bwd, recipe.pow2, recipe.eps)
    products = HiF8Gemm(recipe.use_split_accumulator, device)
    override = recipe.override_linear_precision[2]
    quantizers = GemmQuantizers(forward, forward, forward, backward, products, override)
    return stateless_sets(quantizers, gemms)
