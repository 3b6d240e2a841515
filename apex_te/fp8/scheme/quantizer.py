"""Base class of quantizers, which cast matrices to FP8 by one scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ...ops._head_order import sorted_heads
from ...ops.block_quantize import BlockQuantized
from ...ops.fp8_output import FP8_DTYPES, FP8Output
from ..tensor import QuantizedTensor

if TYPE_CHECKING:
    from .grouped import GroupQuantizer


class BlockOptions(NamedTuple):
    """Arguments of ``block_quantize`` that all casts of a quantizer to blocks of 1x128 share."""

    dtype: torch.dtype
    pad_columnwise: bool
    pow2: bool
    eps: float


class FusedCast(Protocol):
    """Protocol of an op whose result a quantizer wants, and which may write that in FP8 itself.

    ``copies`` is True if ``plain`` only copies its inputs. The quantizer sets ``dbias``, column
    sums ``[cols]``, if the op does not.
    """

    x: torch.Tensor
    can_fuse: bool
    can_fuse_blocks: bool
    copies: bool
    with_dbias: bool
    dbias: torch.Tensor | None

    def scalars(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns three fp32 tensors ``[1]`` on the op's device: one zero, two uninitialized."""

    def plain(self) -> torch.Tensor:
        """Returns the result ``[rows, cols]`` in bf16 or fp32."""

    def fp8(
        self,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        amax: torch.Tensor | None,
        pad_columnwise: bool = False,
    ) -> FP8Output:
        """Returns the FP8 result and folds its amax into ``amax``, or does only the latter."""

    def blocks(self, options: BlockOptions, rowwise: bool, columnwise: bool) -> BlockQuantized:
        """Returns bitwise what ``block_quantize`` makes of ``plain``'s result, in 1x128 blocks."""


class Repeatable(NamedTuple):
    """Named tuple of the FP8 state that a quantizer's casts use, if all casts run the same ops.

    While the flag at the index in ``due`` is True, the next cast first computes its scale.
    """

    tensors: tuple[torch.Tensor, ...]
    due: tuple[list[bool], int] | None


class Quantizer:
    """Casts matrices to FP8 by one scheme; a subclass defines ``quantize``.

    Attributes:
        dtype: element type of the FP8 data; ``torch.uint8`` for HiF8.
        pad_columnwise: pad columnwise copies ``[cols, rows]`` with zeros to a multiple of 16 rows,
            over which weight gradients contract.
        keeps_scale: only the first scale may depend on the matrix that is cast.
    """

    __slots__ = ("dtype",)

    dtype: torch.dtype
    pad_columnwise = False
    keeps_scale = False

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """Returns FP8 copies of ``x`` ``[rows, cols]``, and its column sums ``[cols]`` or None."""
        raise NotImplementedError

    def produce(
        self, producer: FusedCast, rowwise: bool = True, columnwise: bool = True
    ) -> QuantizedTensor:
        """Runs an op and quantizes its result, in the op itself if possible; sets ``dbias``."""
        x = producer.plain()
        sums = producer.with_dbias and producer.dbias is None
        quantized, dbias = self.quantize(x, rowwise, columnwise, sums)
        if sums:
            producer.dbias = dbias
        return quantized

    def quantize_heads(
        self, weight: torch.Tensor, repeats: int, groups: int, columnwise: bool
    ) -> tuple[QuantizedTensor, bool]:
        """Quantizes the weight of a fused QKV projection, with rows sorted by kind if possible.

        Each group of ``weight`` has the rows of ``repeats`` query heads, a key head and a value
        head. The flag returned is False if the rowwise copy keeps that order, because a block of
        the scheme has rows of two heads. The columnwise copy always keeps it.
        """
        quantized = self.quantize(weight, True, columnwise)[0]
        by_kind = self.sort_heads(quantized, repeats, groups)
        return (quantized, False) if by_kind is None else (by_kind, True)

    def sort_heads(
        self, quantized: QuantizedTensor, repeats: int, groups: int
    ) -> QuantizedTensor | None:
        """Sorts the rowwise copy of a weight as ``quantize_heads`` does; None if it cannot."""
        scale_inv = quantized.rowwise_scale_inv
        if quantized.rowwise is None or scale_inv is None or scale_inv.numel() != 1:
            return None
        rowwise = sorted_heads(quantized.rowwise, repeats=repeats, groups=groups)
        return QuantizedTensor(
            rowwise, scale_inv, quantized.columnwise, quantized.columnwise_scale_inv, self.dtype
        )

    def shared(self, group: Any) -> Quantizer | None:
        """Returns a quantizer with an equal scale on all ranks of ``group``, if there is one."""
        return None

    def repeatable(self) -> Repeatable | None:
        """Returns the FP8 state that casts use, if they can be repeated without this quantizer.

        None if a cast does more than call ops on its arguments and on tensors of an FP8 state.
        """
        return None

    def settings(self) -> tuple:
        """Returns the settings that, with amax values, determine the FP8 data of a matrix."""
        return (type(self).__name__, self.dtype)

    def cast_key(self) -> tuple | None:
        """Returns a value that is equal for quantizers that make equal rowwise copies of a matrix.

        None if a cast cannot replace another: its scale is FP8 state, or it also stages an amax.
        """
        return None

    def needs_whole_amax(self) -> bool:
        """Returns True if the next ``quantize_rows`` needs the amax of the whole matrix."""
        return False

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Quantizes rows of a matrix bitwise as a cast of the whole matrix would.

        ``amax``, fp32 ``[1]``, is that of the whole matrix. The amax returned is that of ``x``, for
        ``stage``; None for a scheme that stages none.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: rows of a weight can not be quantized before they are "
            "gathered, because its columnwise copy is made of the values"
        )

    def scales_of_rows(
        self, quantizers: Sequence[Any], amaxes: torch.Tensor | None
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None] | None:
        """Computes scales for ``quantize_rows`` of several matrices by ``multi_tensor.quantize``.

        ``amaxes`` are of whole matrices. None if one launch cannot quantize the rows.
        """
        return None

    def stage(self, amax: torch.Tensor, group: Any) -> None:
        """Stages the amax, fp32 ``[1]``, of this rank's rows of a sharded matrix."""

    def grouped(self, quantizers: Sequence[Any]) -> GroupQuantizer | None:
        """Returns a quantizer for groups of rows whose sizes only the device knows, or None."""
        return None

    def can_fuse(self, producer: FusedCast) -> bool:
        """Returns True if ``producer`` can write this dtype itself; no op writes fnuz formats."""
        return producer.can_fuse and self.dtype in FP8_DTYPES

    def record(self, x: torch.Tensor) -> None:
        """Stages the amax of ``x`` without quantizing it; does nothing without a state."""

    def dequantize(
        self, quantized: QuantizedTensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Returns the values; rows of zeros follow if the only copy is a padded columnwise one."""
        if quantized.rowwise is not None:
            return self._decode(quantized.rowwise, quantized.rowwise_scale_inv, dtype)
        if quantized.columnwise is None:
            raise ValueError("dequantize: rowwise or columnwise must be present, got neither")
        return self._decode(quantized.columnwise, quantized.columnwise_scale_inv, dtype).t()

    def _decode(self, fp8_data: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values of FP8 data, here with a ``scale_inv`` that broadcasts."""
        return (fp8_data.to(torch.float32) * scale_inv).to(dtype)

    def known_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns the scale for ``x`` and the element to stage its amax in or None, fp32 ``[1]``.

        None for a scheme that computes the scale from ``x``: all its casts of one ``x`` are equal.
        """
        return None

    def scale_in_advance(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns the next scale and the element to stage the amax in or None, fp32 ``[1]``.

        None if the matrix must exist first: the scale depends on it, or this quantizer reads it.
        """
        return None

    def rewrite(self, x: torch.Tensor, held: QuantizedTensor, noop: torch.Tensor | None) -> bool:
        """Quantizes ``x`` into the copies ``held`` of an earlier ``quantize``, as a capture needs.

        If ``noop``, int32 ``[1]``, is not zero on the device, nothing changes. Returns False, with
        nothing written, for a scheme without state: its casts of one ``x`` are all equal.
        """
        return False

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of the FP8 state that a cast reads or writes."""
        return ()

    def snapshot(self) -> torch.Tensor | None:
        """Returns a copy of the scale, for ``requantize``; None for a scheme without state."""
        return None

    def requantize(self, x: torch.Tensor, snapshot: torch.Tensor | None) -> QuantizedTensor:
        """Returns the columnwise copy that ``quantize`` made of ``x`` ``[rows, cols]`` earlier."""
        return self.quantize(x, False, True)[0]


def shared_scale(out: Any, dtype: torch.dtype) -> QuantizedTensor:
    """Returns an op's output, in which one scale serves both copies, as a QuantizedTensor."""
    return QuantizedTensor(out.rowwise, out.scale_inv, out.columnwise, out.scale_inv, dtype)
