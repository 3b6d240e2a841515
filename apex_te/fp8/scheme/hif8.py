"""HiF8: current scaling to HiFloat8, with a scale that brings the amax to 15 or 224.

With these targets, for forward and backward, HiF8 has 3 and 2 mantissa bits (as in MindSpeed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...comm.collectives import max_over_ranks
from ...ops import emulated_gemm, hif8
from ...ops.current_scale import tensor_amax
from ..tensor import QuantizedTensor
from .base import Quantizer, Scheme, shared_scale
from .current import CurrentScalingQuantizer, OneScale
from .gemm_backend import GemmBackend, warn_emulated

if TYPE_CHECKING:
    from ...recipe import CurrentScaling


class HiF8Quantizer(CurrentScalingQuantizer):
    """Casts a matrix to HiF8 with ``scale = target / max |x|``; the data are uint8."""

    __slots__ = ("target",)

    measures = False

    def __init__(
        self,
        target: float,
        pow2: bool,
        eps: float,
        group: Any = None,
        pad_columnwise: bool = False,
    ) -> None:
        super().__init__(torch.uint8, pow2, eps, group, pad_columnwise)
        self.target = target

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        amax = None if self.group is None else max_over_ranks(tensor_amax(x), self.group)
        out = hif8.quantize_current(
            x, self.target, rowwise=rowwise, columnwise=columnwise,
            pad_columnwise=self.pad_columnwise, eps=self.eps, pow2=self.pow2, amax=amax,
        )  # fmt: skip
        return shared_scale(out, self.dtype), x.sum(0) if with_dbias else None

    def settings(self) -> tuple:
        return (*super().settings(), self.target)

    def cast_rows(self, x: torch.Tensor, amax: torch.Tensor | None) -> Any:
        return hif8.quantize_current(
            x, self.target, columnwise=False, eps=self.eps, pow2=self.pow2, amax=amax
        )

    def shared(self, group: Any) -> HiF8Quantizer:
        return HiF8Quantizer(self.target, self.pow2, self.eps, group, self.pad_columnwise)

    def _decode(self, fp8_data: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        return hif8.decode(fp8_data, dtype, scale_inv=scale_inv)


class HiF8Gemm(GemmBackend):
    """Emulates GEMMs of HiF8 operands with one scale each; no supported GPU has such GEMMs."""

    __slots__ = ()

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        super().__init__(split, device)
        if device.type == "cuda":
            warn_emulated("HiF8 matrix products", "a GPU with HiF8 units")

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        return emulated_gemm.hif8_gemm(a, b, a_scale_inv, b_scale_inv, **options)


class HiF8Scheme(Scheme):
    """Scheme of current scaling to HiF8, for casts and for weights that are held in HiF8 only."""

    name = "hif8"
    backend = HiF8Gemm
    layout = OneScale()

    def gemm_quantizers(
        self, recipe: CurrentScaling, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        formats = recipe.fp8_format.value

        def quantizer(target: float, pad: bool) -> HiF8Quantizer:
            return HiF8Quantizer(target, recipe.pow2, recipe.eps, pad_columnwise=pad)

        return (
            quantizer(formats.max_fwd, True),
            quantizer(formats.max_fwd, False),
            quantizer(formats.max_bwd, True),
        )
