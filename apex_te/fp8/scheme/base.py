"""What the quantizers have in common: how they take an op's result, and their defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ...ops.fp8_output import FP8_DTYPES, FP8Output
from ..tensor import QuantizedTensor

if TYPE_CHECKING:
    from .grouped import GroupQuantizer

__all__ = ["FusedCast", "GemmSlots", "Quantizer", "ScaleSharing", "Slot", "Slots", "shared_scale"]


class ScaleSharing(Protocol):
    """Says which ranks compute a state's scales together."""

    def over(self, group: Any) -> bool:
        """Returns True if the scales are equal on all ranks of ``group``, and will stay so."""

    def reduced_over(self, group: Any) -> bool:
        """Returns True if the next scales come from the amaxes of all ranks of ``group``."""


class Slot(NamedTuple):
    """Views, fp32 ``[1]``, of what an FP8 state keeps for one tensor of a GEMM.

    Attributes:
        scale, scale_inv: multiplier to FP8 and its inverse.
        amax: element of the staging row of the amax history, into which casts fold max |x|.
        pending_scale: the scale after the update that is due; None for gradients.
        number: the place of the slot in the module, forward slots first.
    """

    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor
    pending_scale: torch.Tensor | None
    number: int


class GemmSlots(NamedTuple):
    """Slots of the tensors that one GEMM and its gradients quantize."""

    input: Slot
    weight: Slot
    grad_output: Slot


@dataclass(frozen=True)
class Slots:
    """Views of a module's FP8 state for the quantizers of a scheme that keeps state.

    Attributes:
        gemms: one entry for each GEMM of the module.
        first_due: for each slot, True while its first scale has still to be computed from data.
        first_on_device: int32 flags ``[slots]`` for those whose data only the device counts, for
            each tuple of slot numbers.
        sharing: the ranks that compute the scales together.
        update_scales: rolls histories and sets scales and their inverses by the recipe's formula:
            ``(histories, scales, scale_invs, fp8_max, recipe, nonfinite_count)``.
    """

    gemms: tuple[GemmSlots, ...]
    first_due: list[bool]
    first_on_device: dict[tuple[int, ...], torch.Tensor]
    sharing: ScaleSharing
    update_scales: Callable[..., None]


class FusedCast(Protocol):
    """An op whose result is to be quantized.

    Attributes:
        x: what the op reads, [rows, ..].
        can_fuse: ``fp8`` exists; otherwise only ``plain``.
        with_dbias: the column sums of the result are wanted in ``dbias``.
        dbias: set by ``plain`` or ``fp8`` where the op can, else by the quantizer.
    """

    x: torch.Tensor
    can_fuse: bool
    with_dbias: bool
    dbias: torch.Tensor | None

    def scalars(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Three fp32 elements on the op's device: a zero, and two without values."""

    def plain(self) -> torch.Tensor:
        """The result [rows, cols] in high precision."""

    def fp8(
        self,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        amax: torch.Tensor | None,
    ) -> FP8Output:
        """The result quantized with ``scale``; without any output only ``amax`` is folded."""


class Quantizer:
    """Base of the quantizers; a subclass defines ``quantize``."""

    __slots__ = ("dtype",)

    dtype: torch.dtype

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """Low-precision copies of ``x`` [rows, cols] and, if asked for, its column sums [cols].

        ``x`` is contiguous fp32, fp16 or bf16; the sums have its dtype.
        """
        raise NotImplementedError

    def produce(
        self, producer: FusedCast, rowwise: bool = True, columnwise: bool = True
    ) -> QuantizedTensor:
        """Low-precision copies of an op's result, written by the op itself where it can."""
        x = producer.plain()
        sums = producer.with_dbias and producer.dbias is None
        quantized, dbias = self.quantize(x, rowwise, columnwise, sums)
        if sums:
            producer.dbias = dbias
        return quantized

    def shared(self, group: Any) -> Quantizer | None:
        """This quantizer with a scale that all ranks of ``group`` have, so that codes of rows can
        be gathered; None where the scheme has none, and values are gathered instead.
        """
        return None

    def settings(self) -> tuple:
        """What decides, besides amaxes, which codes a matrix gets."""
        return (type(self).__name__, self.dtype)

    def needs_whole_amax(self) -> bool:
        """Whether codes of a matrix's rows depend on the amax of all of its rows now."""
        return False

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes of some rows ``x`` as they are in the whole matrix, inverse scales, amax to stage.

        ``amax`` fp32 [1]: of the whole, where that counts; a state keeps what it makes of it with
        ``keep`` only.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: rows of a weight can not be quantized before they are "
            "gathered, because its columnwise copy is made of the values"
        )

    def scales_of_rows(
        self, quantizers: Sequence[Any], amaxes: torch.Tensor | None
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None] | None:
        """Scales fp32 [1] with which `multi_tensor.quantize` makes the codes of ``quantize_rows``.

        Of ``quantizers``, of which this is the first, for ``amaxes`` [quantizers] where they count.
        Second: the inverses [quantizers] if they are no plain ones. None where rows take more.
        """
        return None

    def stage(self, amax: torch.Tensor, group: Any) -> None:
        """Record ``amax`` fp32 [1] of this rank's rows of a matrix that ``group`` has whole."""

    def grouped(self, quantizers: Sequence[Any]) -> GroupQuantizer | None:
        """One quantizer for groups of rows whose sizes only the device knows, of these of a module,
        of which this is the first; None where the scheme has none.
        """
        return None

    def can_fuse(self, producer: FusedCast) -> bool:
        """Whether the op writes the codes itself; none writes fnuz formats."""
        return producer.can_fuse and self.dtype in FP8_DTYPES

    def record(self, x: torch.Tensor) -> None:
        """Stage what a later scale needs of ``x`` without quantizing it; nothing by default."""

    def dequantize(
        self, quantized: QuantizedTensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The values of ``quantized`` [rows, cols] in ``dtype``, from the copy that it has."""
        if quantized.rowwise is not None:
            return self._decode(quantized.rowwise, quantized.rowwise_scale_inv, dtype)
        if quantized.columnwise is None:
            raise ValueError("dequantize: rowwise or columnwise must be present, got neither")
        return self._decode(quantized.columnwise, quantized.columnwise_scale_inv, dtype).t()

    def _decode(self, codes: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        """Values of codes; here with one scale for all."""
        return (codes.to(torch.float32) * scale_inv).to(dtype)

    def known_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Scale and staging slot with which to cast ``x``; None where the scale comes from it."""
        return None

    def rewrite(self, x: torch.Tensor, held: QuantizedTensor, noop: torch.Tensor | None) -> bool:
        """Write both copies of ``x`` and their scales into ``held``, which ``quantize`` has made.

        ``noop`` is an int32 element on the device: non-zero leaves ``held``, and what would be
        staged, as they are. Returns False, and writes nothing, for a scheme that can be asked to
        quantize again with the same result.
        """
        return False

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of a state that a cast reads and writes."""
        return ()

    def snapshot(self) -> torch.Tensor | None:
        """What ``requantize`` needs to repeat a cast later; None where the data are enough."""
        return None

    def requantize(self, x: torch.Tensor, snapshot: torch.Tensor | None) -> QuantizedTensor:
        """The columnwise copy of ``x`` as ``quantize`` made it when ``snapshot`` was taken."""
        return self.quantize(x, False, True)[0]


def shared_scale(out: Any, dtype: torch.dtype) -> QuantizedTensor:
    """Copies of an op's output that has one scale for both layouts."""
    return QuantizedTensor(out.rowwise, out.scale_inv, out.columnwise, out.scale_inv, dtype)
