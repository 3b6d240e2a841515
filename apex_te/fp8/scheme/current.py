"""Current scaling: one scale for each tensor, computed from that tensor when it is cast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...comm.collectives import max_over_ranks
from ...ops.byte_transpose import byte_transpose
from ...ops.current_scale import current_scale, scale_of, tensor_amax
from ...ops.fp8_output import FP8_DTYPES
from ...ops.grouped_quantize import scales_of
from ...ops.qkv_cast import qkv_cast_weight
from ..tensor import QuantizedTensor, formats_of
from .base import (
    FusedCast,
    GroupMatrices,
    GroupQuantizer,
    GroupRows,
    GroupSource,
    Layout,
    Quantizer,
    Repeatable,
    Scheme,
    shared_scale,
)
from .gemm_backend import FP8Gemm

if TYPE_CHECKING:
    from ...recipe import CurrentScaling


class CurrentScalingQuantizer(Quantizer):
    """Casts a matrix to FP8 with ``scale = fp8_max / max |x|``, reduced over ``group`` if given.

    ``pow2`` rounds the scale down to a power of two.
    """

    __slots__ = ("eps", "group", "pad_columnwise", "pow2")

    transposes = True
    measures = True

    def __init__(
        self,
        dtype: torch.dtype,
        pow2: bool,
        eps: float,
        group: Any = None,
        pad_columnwise: bool = False,
    ) -> None:
        self.dtype = dtype
        self.pad_columnwise = pad_columnwise
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
        quantized = self._cast(x, rowwise, columnwise, amax)
        return quantized, x.sum(0) if with_dbias else None

    def recast(self, x: torch.Tensor, amax: torch.Tensor) -> QuantizedTensor:
        return self._cast(x, False, True, amax)

    def _cast(
        self, x: torch.Tensor, rowwise: bool, columnwise: bool, amax: torch.Tensor | None
    ) -> QuantizedTensor:
        """Quantizes ``x`` with a scale computed from ``amax``; None: its own."""
        out = current_scale(
            x, self.dtype, rowwise=rowwise, columnwise=columnwise,
            pad_columnwise=self.pad_columnwise, eps=self.eps, pow2=self.pow2, amax=amax,
        )  # fmt: skip
        quantized = shared_scale(out, self.dtype)
        quantized.amax = out.amax
        return quantized

    def repeatable(self) -> Repeatable | None:
        return Repeatable((), None) if self.group is None else None

    def quantize_heads(
        self, weight: torch.Tensor, repeats: int, groups: int, columnwise: bool
    ) -> tuple[QuantizedTensor, bool]:
        if not self.dtype.is_floating_point:  # HiF8, which an op of its own casts to
            return super().quantize_heads(weight, repeats, groups, columnwise)
        amax = tensor_amax(weight)
        if self.group is not None:
            amax = max_over_ranks(amax, self.group)
        # GEMMs read scale_inv, which has to be aligned: the first of the two is.
        scale_inv, scale = amax.new_empty(2).split(1)
        scale_of(amax, self.dtype, scale, scale_inv, eps=self.eps, pow2=self.pow2)
        out = qkv_cast_weight(
            weight, scale, self.dtype, repeats=repeats, groups=groups, columnwise=columnwise
        )
        # The op's own inverse of the scale does not show an infinite amax.
        quantized = QuantizedTensor(out.rowwise, scale_inv, out.columnwise, scale_inv, self.dtype)
        quantized.amax = amax
        return quantized, True

    def settings(self) -> tuple:
        return (*super().settings(), self.pow2, self.eps)

    def cast_key(self) -> tuple | None:
        return self.settings() if self.group is None else None

    def needs_whole_amax(self) -> bool:
        return True

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        out = self.cast_rows(x, amax)
        return out.rowwise, out.scale_inv, None

    def cast_rows(self, x: torch.Tensor, amax: torch.Tensor | None) -> Any:
        """Returns the rowwise copy of ``x``, scaled by ``amax``, fp32 ``[1]``; None: its own."""
        return current_scale(
            x, self.dtype, columnwise=False, eps=self.eps, pow2=self.pow2, amax=amax
        )

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
        """Runs the op twice, first only for the amax; this is cheaper than storing the result."""
        # torch sums the columns of what this quantizer casts, so it does of what is only copied:
        # the sums are then those of compiled code, which does not fuse copies.
        if not self.can_fuse(producer) or (producer.copies and producer.with_dbias):
            return super().produce(producer, rowwise, columnwise)
        amax, scales = producer.scalars()
        producer.fp8(scales[1:], self.dtype, False, False, amax)
        return self.produce_measured(producer, (amax, scales), rowwise, columnwise)

    def produce_measured(
        self,
        producer: FusedCast,
        measured: tuple[torch.Tensor, torch.Tensor],
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> QuantizedTensor:
        (amax, scales), dtype = measured, self.dtype
        # GEMMs read scale_inv, which has to be aligned: the first of the two is.
        scale_inv, scale = scales[:1], scales[1:]
        if self.group is not None:
            max_over_ranks(amax, self.group)
        scale_of(amax, dtype, scale, scale_inv, eps=self.eps, pow2=self.pow2)
        out = producer.fp8(scale, dtype, rowwise, columnwise, None, self.pad_columnwise)
        # The op's own inverse of the scale does not show an infinite amax.
        made = QuantizedTensor(out.rowwise, scale_inv, out.columnwise, scale_inv, dtype)
        made.scales = scales
        return made

    def snapshot(self, made: QuantizedTensor | None = None) -> torch.Tensor | None:
        return None if made is None else made.scales

    def requantize(
        self, x: torch.Tensor | FusedCast, snapshot: torch.Tensor | None
    ) -> QuantizedTensor:
        if snapshot is None or isinstance(x, torch.Tensor):
            return super().requantize(x, snapshot)
        scale_inv, scale = snapshot[:1], snapshot[1:]
        out = x.fp8(scale, self.dtype, False, True, None, self.pad_columnwise)
        return QuantizedTensor(None, None, out.columnwise, scale_inv, self.dtype)

    def grouped(self, quantizers: Sequence[Any]) -> GroupQuantizer | None:
        return CurrentGroups(quantizers) if self.dtype in FP8_DTYPES else None

    def shared(self, group: Any) -> CurrentScalingQuantizer:
        return CurrentScalingQuantizer(self.dtype, self.pow2, self.eps, group, self.pad_columnwise)


class CurrentGroups(GroupQuantizer):
    """Quantizes groups with one scale each, computed from the group's amax."""

    __slots__ = ("eps", "groups", "pow2")

    def __init__(self, quantizers: Sequence[CurrentScalingQuantizer]) -> None:
        first = quantizers[0]
        super().__init__(first.dtype)
        self.groups = len(quantizers)
        self.eps = first.eps
        self.pow2 = first.pow2

    def scaling(
        self, source: GroupRows | GroupSource | GroupMatrices
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        like = source[0] if isinstance(source[0], torch.Tensor) else source[0][0]
        amax = torch.zeros(self.groups, dtype=torch.float32, device=like.device)
        source.measure(amax, self.dtype)
        return (*scales_of(amax, self.dtype, eps=self.eps, pow2=self.pow2), None)

    def kept_scales(self, source: GroupMatrices) -> tuple[torch.Tensor, torch.Tensor] | None:
        scale, scale_inv, _ = self.scaling(source)
        assert scale_inv is not None
        return scale, scale_inv


class OneScale(Layout):
    """Form of a stored weight with one scale, computed from the amax rounded to bfloat16.

    The amax of the stored values then rounds to the same bfloat16, whatever dtype they are read in.
    """

    name = "one scale"
    block_rows = 0

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        return torch.empty(1, dtype=torch.float32, device=device)

    def scales_of_file(self, rows: int, cols: int) -> tuple[int, ...]:
        return (1,)

    def quantize(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        return self.quantize_part(quantizer, x, tensor_amax(x))

    def quantize_part(self, quantizer: Any, x: torch.Tensor, amax: torch.Tensor) -> QuantizedTensor:
        out = quantizer.cast_rows(x, amax.bfloat16().float())
        return QuantizedTensor(out.rowwise, out.scale_inv, None, None, quantizer.dtype)

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.columnwise_stack(held)

    def quantize_stack(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor | None:
        groups, source = quantizer.grouped((quantizer,) * x.shape[0]), GroupMatrices(x, None)
        if groups is None:
            return None
        amax = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
        source.measure(amax, groups.dtype)
        amax = amax.bfloat16().float()
        scales = scales_of(amax, groups.dtype, eps=quantizer.eps, pow2=quantizer.pow2)
        out = groups.quantize_matrices(x, None, True, False, scales)
        return QuantizedTensor(out.rowwise, out.scale_inv[:, None], None, None, groups.dtype)

    def columnwise_stack(self, held: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert held.rowwise is not None
        assert held.rowwise_scale_inv is not None
        return byte_transpose(held.rowwise), held.rowwise_scale_inv

    def gathered(
        self, fp8_data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensor:
        # A copy: until the next gather the weight keeps the scale of its data.
        return QuantizedTensor(fp8_data, scale_inv.clone(), None, None, dtype)


class CurrentScheme(Scheme):
    """Scheme of current scaling, for casts and for weights that are held in FP8 only."""

    name = "current"
    backend = FP8Gemm
    layout = OneScale()

    def gemm_quantizers(
        self, recipe: CurrentScaling, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        formats = formats_of(recipe.fp8_format, device)

        def quantizer(dtype: torch.dtype, pad: bool) -> CurrentScalingQuantizer:
            return CurrentScalingQuantizer(dtype, recipe.pow2, recipe.eps, pad_columnwise=pad)

        return (
            quantizer(formats.fwd_dtype, True),
            quantizer(formats.fwd_dtype, False),
            quantizer(formats.bwd_dtype, True),
        )
