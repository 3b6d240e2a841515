"""Quantizers that also report what they quantize, for ``fp8_statistics``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import runtime
from ...ops._head_order import sorted_heads
from ..tensor import QuantizedTensor
from .base import FusedCast, Quantizer, QuantizerSets

if TYPE_CHECKING:
    from .base import GroupQuantizer

# Fields of a measurement: the first COUNTS add up over several tensors, of the others the largest
# counts.
FIELDS = (
    "elements", "nonfinite", "nonzero", "saturated", "underflowed",
    "amax", "scale_max", "scale_inv_max",
)  # fmt: skip
COUNTS = 5

# Takes a slot's tensor [rows, cols], its quantized form and the quantizer that made it.
Note = Callable[[torch.Tensor, QuantizedTensor, Quantizer], None]

# (largest value, byte of 1.0, mask of the bits that only a zero lacks). HiF8 and the fnuz formats
# have no negative zero.
_FORMATS = {
    torch.float8_e4m3fn: (448.0, 0x38, 0x7F),
    torch.float8_e5m2: (57344.0, 0x3C, 0x7F),
    torch.float8_e4m3fnuz: (240.0, 0x40, 0xFF),
    torch.float8_e5m2fnuz: (57344.0, 0x40, 0xFF),
    torch.uint8: (32768.0, 0x08, 0xFF),
}
# An amax that its own scale brings to the largest value may exceed it by the roundings of the
# scale, of its inverse and of the product.
_ROUNDINGS = 1 + 2.0**-22


class ObservedQuantizer(Quantizer):
    """Quantizes with ``inner``, unchanged, and reports each tensor to ``note``.

    It does not report tensors that torch.compile traces or a CUDA graph captures, and groups whose
    sizes only the device knows. ``twin`` makes equal FP8 data but records no amax; it casts the
    tensors whose amax alone ``inner`` records (calibration).
    """

    __slots__ = ("inner", "keeps_scale", "measures", "note", "pad_columnwise", "twin")

    def __init__(self, inner: Quantizer, twin: Quantizer, note: Note) -> None:
        self.dtype = inner.dtype
        self.pad_columnwise = inner.pad_columnwise
        self.keeps_scale = inner.keeps_scale
        self.measures = inner.measures
        self.inner = inner
        self.twin = twin
        self.note = note

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        out = self.inner.quantize(x, rowwise, columnwise, with_dbias)
        self.report(x, out[0])
        return out

    def report(self, x: torch.Tensor, quantized: QuantizedTensor) -> None:
        """Reports what ``x`` was quantized to, here or by others in place of this quantizer."""
        if _is_eager(x):
            self.note(x, quantized, self.inner)

    def produce(
        self, producer: FusedCast, rowwise: bool = True, columnwise: bool = True
    ) -> QuantizedTensor:
        return self._produced(self.inner.produce, producer, rowwise, columnwise)

    def produce_measured(
        self,
        producer: FusedCast,
        measured: tuple[torch.Tensor, torch.Tensor],
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> QuantizedTensor:
        def produce(producer: FusedCast, *copies: bool) -> QuantizedTensor:
            return self.inner.produce_measured(producer, measured, *copies)

        return self._produced(produce, producer, rowwise, columnwise)

    def _produced(
        self,
        produce: Callable[..., QuantizedTensor],
        producer: FusedCast,
        rowwise: bool,
        columnwise: bool,
    ) -> QuantizedTensor:
        """Quantizes what an op makes by ``produce`` of the inner quantizer, and reports it."""
        if hasattr(producer, "overwrites"):
            producer.overwrites = False  # the op runs again below
        quantized = produce(producer, rowwise, columnwise)
        fp8_data = quantized.rowwise if rowwise else quantized.columnwise
        if fp8_data is not None and _is_eager(fp8_data):
            # Running the op again may set dbias: it runs on a copy of the producer.
            self.note(copy.copy(producer).plain(), quantized, self.inner)
        return quantized

    def quantize_heads(
        self, weight: torch.Tensor, repeats: int, groups: int, columnwise: bool
    ) -> tuple[QuantizedTensor, bool]:
        quantized, is_sorted = self.inner.quantize_heads(weight, repeats, groups, columnwise)
        if _is_eager(weight):
            x = sorted_heads(weight, repeats=repeats, groups=groups) if is_sorted else weight
            self.note(x, quantized, self.inner)
        return quantized, is_sorted

    def sort_heads(
        self, quantized: QuantizedTensor, repeats: int, groups: int
    ) -> QuantizedTensor | None:
        return self.inner.sort_heads(quantized, repeats, groups)

    def shared(self, group: Any) -> Quantizer | None:
        inner = self.inner.shared(group)
        return None if inner is None else ObservedQuantizer(inner, self.twin, self.note)

    def settings(self) -> tuple:
        return self.inner.settings()

    def needs_whole_amax(self) -> bool:
        return self.inner.needs_whole_amax()

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.inner.quantize_rows(x, amax, keep)

    def stage(self, amax: torch.Tensor, group: Any) -> None:
        self.inner.stage(amax, group)

    def grouped(self, quantizers: Sequence[Any]) -> GroupQuantizer | None:
        return self.inner.grouped([quantizer.inner for quantizer in quantizers])

    def record(self, x: torch.Tensor) -> None:
        self.inner.record(x)
        if _is_eager(x):
            self.note(x, self.twin.quantize(x, True, False)[0], self.twin)

    def dequantize(
        self, quantized: QuantizedTensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return self.inner.dequantize(quantized, dtype)

    def known_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return self.inner.known_scale(x)

    def rewrite(self, x: torch.Tensor, held: QuantizedTensor, noop: torch.Tensor | None) -> bool:
        return self.inner.rewrite(x, held, noop)

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        return self.inner.state_tensors()

    def snapshot(self, made: QuantizedTensor | None = None) -> torch.Tensor | None:
        return self.inner.snapshot(made)

    def requantize(
        self, x: torch.Tensor | FusedCast, snapshot: torch.Tensor | None
    ) -> QuantizedTensor:
        return self.inner.requantize(x, snapshot)


def _is_eager(x: torch.Tensor) -> bool:
    """Returns True if ``x`` is neither traced nor captured in a CUDA graph."""
    if runtime.is_traced():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def observed_sets(
    sets: QuantizerSets, note: Callable[[int, str, Any, Any, Any], None]
) -> QuantizerSets:
    """Returns ``sets`` with recording quantizers that report what they quantize."""
    recording, recompute = [], []
    for gemm, (new, again, frozen, _) in enumerate(zip(*sets, strict=True)):

        def observed(role: str, new: Any = new, frozen: Any = frozen, gemm: int = gemm) -> Any:
            return ObservedQuantizer(
                getattr(new, role), getattr(frozen, role), lambda *seen: note(gemm, role, *seen)
            )

        grad_output = observed("grad_output")
        recording.append(
            new._replace(
                input=observed("input"), weight=observed("weight"), grad_output=grad_output
            )
        )
        recompute.append(again._replace(grad_output=grad_output))
    return QuantizerSets(tuple(recording), tuple(recompute), sets.frozen, sets.previewed)


def measure(
    x: torch.Tensor, quantized: QuantizedTensor, quantizer: Quantizer
) -> torch.Tensor | None:
    """Returns ``FIELDS`` of a tensor as float64 on its device; None without elements or FP8 data.

    Elements with ``|x * scale|`` above the format's largest value are saturated; non-zero elements
    whose FP8 value is zero have underflowed. These counts and the amax ignore NaN and infinities.
    """
    fp8_data, scale_inv = quantized.rowwise, quantized.rowwise_scale_inv
    is_rowwise = fp8_data is not None and scale_inv is not None
    if not is_rowwise:  # rows without scales are cast later
        fp8_data, scale_inv, x = quantized.columnwise, quantized.columnwise_scale_inv, x.t()
    if fp8_data is None or scale_inv is None or x.numel() == 0:
        return None
    largest, one, mask = _FORMATS[fp8_data.dtype]
    cols = x.shape[1]  # a padded columnwise copy has more
    with torch.no_grad():
        magnitude = x.detach().float().abs()
        finite = torch.isfinite(magnitude)
        magnitude = magnitude.masked_fill(~finite, 0.0)
        inverse = _elementwise(fp8_data, scale_inv, quantizer, one, is_rowwise)
        if inverse.dim() == 2:
            inverse = inverse[:, :cols]
        # Where an infinity made it infinite the scale is 1.
        inverse = inverse.masked_fill(torch.isinf(inverse), 1.0)
        saturated = magnitude > inverse * (largest * _ROUNDINGS)
        nonzero = magnitude > 0
        underflowed = (fp8_data.view(torch.uint8)[:, :cols] & mask == 0) & nonzero
        # A block's scale is NaN where the block has one.
        usable = torch.isfinite(inverse)
        smallest = inverse.masked_fill(~usable, float("inf")).amin()
        return torch.stack(
            [
                magnitude.new_full((), x.numel(), dtype=torch.float64),
                (~finite).sum().double(),
                nonzero.sum().double(),
                saturated.sum().double(),
                underflowed.sum().double(),
                magnitude.amax().double(),
                1.0 / smallest.double(),
                inverse.masked_fill(~usable, 0.0).amax().double(),
            ]
        )


def _elementwise(
    fp8_data: torch.Tensor,
    scale_inv: torch.Tensor,
    quantizer: Quantizer,
    one: int,
    is_rowwise: bool,
) -> torch.Tensor:
    """Returns each element's ``scale_inv``, or ``[1]``; ``one`` is the byte of an FP8 1.0."""
    if scale_inv.dtype is torch.float32 and scale_inv.numel() == 1:
        return scale_inv
    ones = torch.full(fp8_data.shape, one, dtype=torch.uint8, device=fp8_data.device)
    copy = ones.view(fp8_data.dtype), scale_inv
    if is_rowwise:
        return quantizer.dequantize(QuantizedTensor(*copy, None, None, fp8_data.dtype))
    return quantizer.dequantize(QuantizedTensor(None, None, *copy, fp8_data.dtype)).t()
