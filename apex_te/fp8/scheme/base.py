"""Base of all schemes: quantizers, their slots, stored layouts, and the registry of schemes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from ...ops._head_order import sorted_heads
from ...ops.block_quantize import BlockQuantized
from ...ops.fp8_output import FP8_DTYPES, FP8Output
from ...ops.grouped_cast import Gather, Source, quantize_source
from ...ops.grouped_quantize import GroupedOutput, Groups, quantize_groups, quantize_matrices
from ..tensor import QuantizedTensor
from .gemm_backend import GemmBackend

if TYPE_CHECKING:
    from ...recipe import Recipe


class ScaleSharing(Protocol):
    """Protocol of an object that knows which ranks compute a state's scales together."""

    def over(self, group: Any) -> bool:
        """Returns True if all ranks of ``group`` have equal scales, and updates keep them equal."""

    def reduced_over(self, group: Any) -> bool:
        """Returns True if the next scales come from the amax values of all ranks of ``group``."""


class Slot(NamedTuple):
    """Named tuple of views, fp32 ``[1]``, of an FP8 state's entries for one tensor of a GEMM.

    ``amax`` is in row 0 of the history, which collects amax values until the next update.
    ``pending_scale`` is the scale that a pending update will give; None for gradients. ``number``
    counts the forward slots first, then the backward ones.
    """

    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor
    pending_scale: torch.Tensor | None
    number: int


class GemmSlots(NamedTuple):
    """Named tuple of the slots of a GEMM's three quantized tensors in forward and backward."""

    input: Slot
    weight: Slot
    grad_output: Slot


@dataclass(frozen=True)
class Slots:
    """Views of a module's FP8 state, over which a scheme with state builds quantizers.

    ``first_due`` is True for slots whose first scale is still to be computed. ``first_on_device``
    has such flags, int32, for groups of rows, since only the device knows which are empty.
    ``handle`` is the module's number, for ops in compiled code.
    """

    gemms: tuple[GemmSlots, ...]
    first_due: list[bool]
    first_on_device: dict[tuple[int, ...], torch.Tensor]
    sync: ScaleSharing
    update_scales: Callable[..., None]
    handle: torch.Tensor


class Layout:
    """Form in which a scheme stores a weight ``[rows, cols]`` in FP8 only: rowwise data and scales.

    Reading the values in any dtype and quantizing them again gives equal values, so that a weight
    is unchanged if its values are saved and loaded. This is not so for recipes without
    ``Scheme.restores`` and for scales that were given, whose weights are saved as data and scales.

    In the methods ``quantizer`` is the recipe's ``Quantizer`` of weights, ``held`` a stored weight.

    Attributes:
        block_rows, block_cols: number of rows and columns that share a scale; 0 if all do.
        exact: True if the values give the same columnwise data as the original weight.
        decoded: dtype that represents the values exactly; columnwise data are made from it.
    """

    name: str
    block_rows: ClassVar[int]
    block_cols: ClassVar[int] = 0
    exact: ClassVar[bool] = True
    decoded: ClassVar[torch.dtype] = torch.float32

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized ``scale_inv`` for a weight ``[rows, cols]``."""
        raise NotImplementedError

    def columnwise_scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized ``scale_inv`` for the columnwise copy of a weight.

        The weight is ``[rows, cols]``, its copy ``[cols, rows]``.
        """
        return self.scale_inv(cols, rows, device)

    def scales_of_file(self, rows: int, cols: int) -> tuple[int, ...] | None:
        """Returns the shape of the scales in files of a weight ``[rows, cols]``.

        They are the first of each dimension of ``scale_inv``, whose padding is not saved. None, the
        default, is for layouts whose columnwise copy is not the transposed rowwise one.
        """
        return None

    def quantize(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        """Returns the rowwise copy of ``x`` ``[rows, cols]``."""
        return quantizer.quantize(x, True, False)[0]

    def quantize_part(self, quantizer: Any, x: torch.Tensor, amax: torch.Tensor) -> QuantizedTensor:
        """Returns the rowwise copy of a part of a weight, with the scale of the whole weight.

        Args:
            quantizer: the weight's quantizer.
            x: ``[rows, cols]``, the part, in fp32, fp16 or bf16.
            amax: fp32 ``[1]``, that of the whole weight.

        Raises:
            NotImplementedError: a weight of this layout does not have one scale.
        """
        raise NotImplementedError

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the columnwise data ``[cols, rows]`` and ``scale_inv`` of a stored weight.

        Args:
            quantizer: the weight's quantizer.
            held: its rowwise copy.
        """
        made = quantizer.quantize(quantizer.dequantize(held, self.decoded), False, True)[0]
        assert made.columnwise is not None
        assert made.columnwise_scale_inv is not None
        return made.columnwise, made.columnwise_scale_inv

    def dequantize(self, quantizer: Any, held: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values ``[rows, cols]`` of a stored weight in ``dtype``.

        Args:
            quantizer: the weight's quantizer.
            held: its rowwise copy, which is decoded.
            dtype: floating-point dtype of the result.
        """
        return quantizer.dequantize(held, dtype)

    def quantize_stack(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor | None:
        """Returns the rowwise copies of weights ``[count, rows, cols]`` as ``quantize`` makes each.

        None, the default, has the caller quantize them one by one.

        Args:
            quantizer: the weights' quantizer.
            x: the weights in fp32, fp16 or bf16.
        """
        return None

    def columnwise_stack(self, held: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the columnwise data ``[count, cols, rows]`` and ``scale_inv`` of stored weights.

        None, the default, has the caller call ``columnwise`` for each.

        Args:
            held: rowwise copies ``[count, rows, cols]``, as ``quantize_stack`` makes them.
        """
        return None

    def rows(self, held: QuantizedTensor, start: int, stop: int) -> QuantizedTensor | None:
        """Returns views of rows ``start`` to ``stop - 1``; None if the rows cut a block."""
        fp8_data, scale_inv, block = held.rowwise, held.rowwise_scale_inv, self.block_rows
        assert fp8_data is not None
        assert scale_inv is not None
        if block:
            if start % block or (stop % block and stop != fp8_data.shape[0]):
                return None
            scale_inv = scale_inv[start // block : -(-stop // block)]
        return QuantizedTensor(fp8_data[start:stop], scale_inv, None, None, held.dtype)

    def joined(self, parts: list[QuantizedTensor]) -> QuantizedTensor | None:
        """Returns the rows of ``parts`` copied to one weight; None if a part ends inside a block.

        If a weight has one scale, the caller ensures that all parts have the same scale.
        """
        dtype = parts[0].dtype
        fp8_data: list[torch.Tensor] = []
        scales: list[torch.Tensor] = []
        for part in parts:
            assert part.rowwise is not None
            assert part.rowwise_scale_inv is not None
            if self.block_rows and fp8_data and fp8_data[-1].shape[0] % self.block_rows:
                return None
            fp8_data.append(part.rowwise.view(torch.uint8))
            scales.append(part.rowwise_scale_inv)
        scale_inv = torch.cat(scales) if self.block_rows else scales[0]
        return QuantizedTensor(torch.cat(fp8_data).view(dtype), scale_inv, None, None, dtype)

    def gathered(
        self, fp8_data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensor:
        """Returns the rowwise copy of the weight that is made of all ranks' shards.

        Args:
            fp8_data: ``[rows, cols]``, of ``dtype``.
            scale_inv: those of the weight, in the shape that ``Layout.scale_inv`` returns.
            dtype: FP8 dtype.
        """
        return QuantizedTensor(fp8_data, scale_inv, None, None, dtype)


class BlockOptions(NamedTuple):
    """Arguments of ``block_quantize`` that all casts of a quantizer to blocks of 1x128 share.

    Attributes:
        dtype: FP8 dtype of the data.
        pad_columnwise: pad the columnwise copy ``[cols, rows]`` to a multiple of 16 columns; the
            added columns are zeros.
        scales: rule of the scales, one of ``op_options.BLOCK_SCALES``.
        eps: lower bound of the amax from which a block's scale is computed.
        columnwise_block_rows: rows of a block of the columnwise copy, 1 or 128; a gradient's has 1.
    """

    dtype: torch.dtype
    pad_columnwise: bool
    scales: str
    eps: float
    columnwise_block_rows: int


class FusedCast(Protocol):
    """Protocol of an op whose result is to be quantized, and that may write FP8 itself.

    Attributes:
        x: the op's input, ``[rows, ...]``.
        can_fuse: True if the op has ``fp8``; otherwise it has only ``plain``.
        can_fuse_blocks: True if the op has ``blocks``.
        copies: True if ``plain`` only copies its inputs to one tensor and computes nothing.
        with_dbias: True if the column sums of the result are wanted in ``dbias``.
        dbias: column sums ``[cols]``, or None; set by ``plain`` or ``fp8`` if the op can compute
            them, else by the quantizer.
    """

    x: torch.Tensor
    can_fuse: bool
    can_fuse_blocks: bool
    copies: bool
    with_dbias: bool
    dbias: torch.Tensor | None

    def scalars(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a zero, fp32 ``[1]``, and uninitialized fp32 ``[2]`` on the op's device."""

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
        """Returns the result ``[rows, cols]`` quantized with one scale.

        Args:
            scale: fp32 ``[1]``.
            dtype: FP8 dtype of the data.
            rowwise, columnwise: the copies to write; with neither the op only computes the amax.
            amax: fp32 ``[1]``, updated to its maximum with the result's amax; None computes no
                amax.
            pad_columnwise: pad the columnwise copy ``[cols, rows]`` to a multiple of 16 columns;
                the added columns are zeros.
        """

    def blocks(self, options: BlockOptions, rowwise: bool, columnwise: bool) -> BlockQuantized:
        """Returns the result ``[rows, cols]`` with a scale for each block of 1x128.

        The result is bitwise equal to ``block_quantize`` of the result of ``plain``.

        Args:
            options: arguments of ``block_quantize``, such as FP8 dtype and rule of the scales.
            rowwise, columnwise: the copies to write, at least one.
        """


class Repeatable(NamedTuple):
    """Named tuple of the FP8 state that a quantizer's casts use, if all casts run the same ops.

    Attributes:
        tensors: tensors of the FP8 state that casts read or write.
        due: a list of flags and an index. While the flag at the index is True, the next cast first
            computes its scale. None if no cast does so.
    """

    tensors: tuple[torch.Tensor, ...]
    due: tuple[list[bool], int] | None


class Quantizer:
    """Casts matrices to FP8 by one scheme; a subclass defines ``quantize``.

    Attributes:
        dtype: element type of the FP8 data; ``torch.uint8`` for HiF8.
        pad_columnwise: columnwise copies ``[cols, rows]`` are padded with columns of zeros to a
            multiple of 16 columns, as GEMMs for weight gradients need, which sum over the rows.
        keeps_scale: the scale is part of the FP8 state; only the first scale may depend on the
            matrix that is cast.
        transposes: columnwise copies are the transposed rowwise ones, as both have one scale.
        measures: the scale is computed from the matrix's amax alone, which an op that computes the
            matrix or an earlier cast may find: for ``produce_measured`` and ``recast``.
    """

    __slots__ = ("dtype",)

    dtype: torch.dtype
    pad_columnwise = False
    keeps_scale = False
    transposes = False
    measures = False

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """Quantizes a matrix.

        Args:
            x: ``[rows, cols]``, contiguous fp32, fp16 or bf16.
            rowwise, columnwise: the copies to make.
            with_dbias: also sum the columns.

        Returns:
            quantized: the copies with their scales.
            sums: column sums ``[cols]`` in the dtype of ``x``, or None without ``with_dbias``.
        """
        raise NotImplementedError

    def produce(
        self, producer: FusedCast, rowwise: bool = True, columnwise: bool = True
    ) -> QuantizedTensor:
        """Runs an op and quantizes its result ``[rows, cols]``.

        The op writes the FP8 data itself if op and scheme support it, else its result is cast. With
        ``producer.with_dbias``, column sums are left in ``producer.dbias``.

        Args:
            producer: the op with its inputs.
            rowwise, columnwise: the copies to make.
        """
        x = producer.plain()
        sums = producer.with_dbias and producer.dbias is None
        quantized, dbias = self.quantize(x, rowwise, columnwise, sums)
        if sums:
            producer.dbias = dbias
        return quantized

    def produce_measured(
        self,
        producer: FusedCast,
        measured: tuple[torch.Tensor, torch.Tensor],
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> QuantizedTensor:
        """Runs an op that can fuse, as ``produce`` does, with a known amax; needs ``measures``.

        Args:
            producer: the op with its inputs.
            measured: the amax of the op's result, fp32 ``[1]``, and uninitialized fp32 ``[2]``.
            rowwise, columnwise: the copies to make.
        """
        raise NotImplementedError

    def recast(self, x: torch.Tensor, amax: torch.Tensor) -> QuantizedTensor:
        """Returns the columnwise copy of a matrix whose amax is known; needs ``measures``."""
        raise NotImplementedError

    def quantize_heads(
        self, weight: torch.Tensor, repeats: int, groups: int, columnwise: bool
    ) -> tuple[QuantizedTensor, bool]:
        """Quantizes the weight of a fused QKV projection, with rows sorted by kind if possible.

        Args:
            weight: ``[groups * (repeats + 2) * size, in]``, group by group: ``repeats`` query
                heads, a key head and a value head, each of ``size`` rows.
            columnwise: also make the columnwise copy, which keeps the weight's order.

        Returns:
            quantized: the copies.
            is_sorted: True if the rowwise copy has all queries, then all keys, then all values;
                False if it keeps the weight's order, because a block of the scheme has rows of two
                heads.
        """
        quantized = self.quantize(weight, True, columnwise)[0]
        by_kind = self.sort_heads(quantized, repeats, groups)
        return (quantized, False) if by_kind is None else (by_kind, True)

    def sort_heads(
        self, quantized: QuantizedTensor, repeats: int, groups: int
    ) -> QuantizedTensor | None:
        """Sorts the rowwise copy of a QKV weight by kind: queries, then keys, then values.

        Args:
            quantized: copies of the weight in its own order, group by group, as ``quantize`` makes
                them.
            repeats: number of query heads in a group.
            groups: number of groups.

        Returns:
            The copies, with an unchanged columnwise one; None if the rows cannot be sorted.
        """
        scale_inv = quantized.rowwise_scale_inv
        if quantized.rowwise is None or scale_inv is None or scale_inv.numel() != 1:
            return None
        rowwise = sorted_heads(quantized.rowwise, repeats=repeats, groups=groups)
        return QuantizedTensor(
            rowwise, scale_inv, quantized.columnwise, quantized.columnwise_scale_inv, self.dtype
        )

    def shared(self, group: Any) -> Quantizer | None:
        """Returns a quantizer like this one whose scale is equal on all ranks of ``group``.

        Rows that several ranks quantize with it can be gathered as FP8 data. Returns None for a
        scheme without such a scale; the caller then gathers values in bf16 or fp32.
        """
        return None

    def repeatable(self) -> Repeatable | None:
        """Returns the FP8 state that casts use, if they can be repeated without this quantizer.

        None, the default, means that they cannot: a cast does more than to call ops on its
        arguments and on tensors of an FP8 state, so the next forward may need other calls.
        """
        return None

    def settings(self) -> tuple:
        """Returns the settings that determine, with the amax values, a matrix's FP8 data."""
        return (type(self).__name__, self.dtype)

    def cast_key(self) -> tuple | None:
        """Returns a value that is equal for quantizers that make equal rowwise copies of a matrix.

        None, the default, means that a cast cannot replace another one: its scale is part of an FP8
        state, or it does more than casting, such as recording an amax.
        """
        return None

    def needs_whole_amax(self) -> bool:
        """Returns True if the next ``quantize_rows`` needs the amax of the whole matrix."""
        return False

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Quantizes some rows of a matrix to the data that a cast of the whole matrix would give.

        Args:
            x: ``[rows, cols]``, the rows.
            amax: fp32 ``[1]``, of the whole matrix; None if ``needs_whole_amax`` is False.
            keep: True if a first scale that is computed from ``amax`` stays in the FP8 state.

        Returns:
            fp8_data: rowwise FP8 data ``[rows, cols]``.
            scale_inv: ``1 / scale``, by which the data are multiplied to decode them.
            amax: fp32 ``[1]``, that of ``x``, to be passed to ``stage``; None for a scheme that
                records none.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: rows of a weight can not be quantized before they are "
            "gathered, because its columnwise copy is made of the values"
        )

    def scales_of_rows(
        self, quantizers: Sequence[Any], amaxes: torch.Tensor | None
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None] | None:
        """Computes scales for ``multi_tensor.quantize`` of several matrices' rows at once.

        The resulting data equal those of ``quantize_rows`` for each matrix.

        Args:
            amaxes: fp32 ``[len(quantizers)]``, of the whole matrices; None for a scheme with state,
                which does not use them.

        Returns:
            scales: fp32 ``[1]`` for each matrix.
            scale_invs: fp32 ``[len(quantizers)]``, or None if each is ``1 / scale``.

            None instead of the pair if one launch cannot quantize the rows; the caller then calls
            ``quantize_rows`` for each matrix.
        """
        return None

    def stage(self, amax: torch.Tensor, group: Any) -> None:
        """Records the amax of this rank's rows of a sharded matrix; does nothing without a state.

        Args:
            amax: fp32 ``[1]``.
            group: process group whose ranks have the other rows; None for none.

        Raises:
            ValueError: the region does not reduce amax values over ``group``.
        """

    def grouped(self, quantizers: Sequence[Any]) -> GroupQuantizer | None:
        """Returns a quantizer for groups of rows whose sizes only the device knows.

        Args:
            quantizers: the quantizers of one role (such as input) for all GEMMs of a module, this
                one first.

        Returns:
            The quantizer; None for a scheme without one, for which the sizes must be on the host.
        """
        return None

    def can_fuse(self, producer: FusedCast) -> bool:
        """Returns True if ``producer`` can write FP8 data of this quantizer's dtype itself."""
        return producer.can_fuse and self.dtype in FP8_DTYPES

    def record(self, x: torch.Tensor) -> None:
        """Records the amax of ``x`` without quantizing ``x``; does nothing without a state."""

    def dequantize(
        self, quantized: QuantizedTensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Returns the values ``[rows, cols]`` of ``quantized``, decoded from one of its copies.

        Raises:
            ValueError: ``quantized`` has neither copy.
        """
        if quantized.rowwise is not None:
            return self._decode(quantized.rowwise, quantized.rowwise_scale_inv, dtype)
        if quantized.columnwise is None:
            raise ValueError("dequantize: rowwise or columnwise must be present, got neither")
        return self._decode(quantized.columnwise, quantized.columnwise_scale_inv, dtype).t()

    def _decode(self, fp8_data: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values of FP8 data, here with a ``scale_inv`` that broadcasts."""
        return (fp8_data.to(torch.float32) * scale_inv).to(dtype)

    def known_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns the scale with which to cast ``x``, for code that keeps the copies between calls.

        Returns:
            scale: fp32 ``[1]``.
            amax: fp32 ``[1]``, the element in which to record the amax of ``x``, or None.

            None instead of the pair for a scheme that computes the scale from ``x``: its casts of
            one ``x`` are all equal, so the caller need not keep copies.
        """
        return None

    def scale_in_advance(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns the scale with which the next matrix is cast, for an op that computes the matrix.

        Returns:
            scale: fp32 ``[1]``.
            amax: fp32 ``[1]``, the element in which to record the matrix's amax, or None.

            None instead of the pair if the matrix must exist first: the scale depends on it, or
            this quantizer reads it.
        """
        return None

    def rewrite(self, x: torch.Tensor, held: QuantizedTensor, noop: torch.Tensor | None) -> bool:
        """Quantizes ``x`` into the copies of an earlier ``quantize``, as a CUDA graph needs.

        Args:
            x: ``[rows, cols]``.
            held: rowwise and columnwise copies, which are overwritten with their scales.
            noop: int32 ``[1]`` on the device; if it is not 0, neither ``held`` nor a recorded amax
                changes. None always writes.

        Returns:
            True if the copies were written, or will be written by replays of a capture. False, with
            nothing written, for a scheme without state: its casts of one ``x`` are all equal, so
            the caller need not keep copies between replays.
        """
        return False

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of the FP8 state that a cast reads or writes."""
        return ()

    def snapshot(self, made: QuantizedTensor | None = None) -> torch.Tensor | None:
        """Returns a copy of the scale, for ``requantize``; None if a cast finds the scale again.

        Args:
            made: what ``produce`` returned, for ``requantize`` of a ``FusedCast``.
        """
        return None

    def requantize(
        self, x: torch.Tensor | FusedCast, snapshot: torch.Tensor | None
    ) -> QuantizedTensor:
        """Returns the columnwise copy that ``quantize`` or ``produce`` made of ``x`` earlier.

        Args:
            x: ``[rows, cols]``, or an op with an equal result.
            snapshot: the scale at that time, from ``snapshot``.
        """
        if isinstance(x, torch.Tensor):
            return self.quantize(x, False, True)[0]
        return self.produce(x, False, True)


def shared_scale(out: Any, dtype: torch.dtype) -> QuantizedTensor:
    """Returns an op's output whose copies have one scale as a QuantizedTensor.

    Args:
        out: the output, with ``rowwise``, ``columnwise`` and ``scale_inv``.
        dtype: FP8 dtype of the data.
    """
    return QuantizedTensor(out.rowwise, out.scale_inv, out.columnwise, out.scale_inv, dtype)


# Weights of groups: one each, or one stack ``[groups, rows, cols]``.
Matrices = Sequence[torch.Tensor] | torch.Tensor


class GroupRows(NamedTuple):
    """Named tuple of the rows ``[rows, cols]`` of all groups, sorted by group."""

    x: torch.Tensor
    groups: Groups

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Updates ``amax`` to its maximum with the groups' amax values, where ``due`` is not 0."""
        quantize_groups(
            self.x, self.groups, amax, dtype, rowwise=False, columnwise=False, amax=amax, due=due
        )


class GroupSource(NamedTuple):
    """Named tuple of rows of all groups that casts gather or compute."""

    source: Source
    groups: Groups

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Updates ``amax`` as ``GroupRows.measure`` does."""
        source = self.source
        if isinstance(source, Gather) and source.factor is None and _repeats_rows(source):
            # Each row is read once, and what the groups gather is one vector of it.
            largest = torch.linalg.vector_norm(source.x, float("inf"), 1, keepdim=True)
            source = source._replace(x=largest.expand(-1, 8).contiguous())
        quantize_source(
            source, self.groups, amax, dtype, rowwise=False, columnwise=False, amax=amax,
            due=due,
        )  # fmt: skip


def _repeats_rows(source: Gather) -> bool:
    return source.x.is_cuda and 2 * source.x.shape[0] <= source.row_of.shape[0]


class GroupMatrices(NamedTuple):
    """Named tuple of matrices, one weight for each group; those of empty groups are skipped."""

    matrices: Matrices
    groups: Groups | None

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Updates ``amax``, fp32 ``[groups]``, for each matrix, like ``GroupRows.measure``."""
        quantize_matrices(
            self.matrices, amax, dtype, groups=self.groups, rowwise=False, columnwise=False,
            amax=amax, due=due,
        )  # fmt: skip


class GroupQuantizer:
    """Quantizes the rows, or the weights, of all groups at once; a scheme defines ``scaling``."""

    __slots__ = ("dtype",)

    keeps_state: ClassVar[bool] = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def quantize(
        self, x: torch.Tensor, groups: Groups, rowwise: bool = True, columnwise: bool = True
    ) -> GroupedOutput:
        """Returns FP8 copies of rows, sorted by group, with one scale for each group.

        Args:
            x: ``[rows, cols]``, the rows sorted by group.
            groups: their groups, on the device.
            rowwise, columnwise: the copies to make.
        """
        scale, scale_inv, amax = self.scaling(GroupRows(x, groups))
        return quantize_groups(
            x, groups, scale, self.dtype, rowwise=rowwise, columnwise=columnwise, amax=amax,
            scale_inv=scale_inv,
        )  # fmt: skip

    def produce(
        self,
        source: Source,
        groups: Groups,
        rowwise: bool,
        columnwise: bool,
        factor_grad: torch.Tensor | None = None,
        bias_grad: torch.Tensor | None = None,
    ) -> GroupedOutput:
        """Returns FP8 copies of rows that the cast gathers or computes, as ``quantize_source``."""
        scale, scale_inv, amax = self.scaling(GroupSource(source, groups))
        return quantize_source(
            source, groups, scale, self.dtype, rowwise=rowwise, columnwise=columnwise, amax=amax,
            scale_inv=scale_inv, factor_grad=factor_grad, bias_grad=bias_grad,
        )  # fmt: skip

    def produces(self, columns: int) -> bool:
        """Returns True if ``produce`` can compute a gated gradient of 2 ``columns`` columns."""
        return True

    def quantize_matrices(
        self,
        matrices: Matrices,
        groups: Groups | None,
        rowwise: bool = True,
        columnwise: bool = True,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> GroupedOutput:
        """Returns FP8 copies of matrices; with ``groups``, only of those whose groups have rows.

        Args:
            matrices: ``[rows, cols]`` each, one for each group, or a stack of them.
            groups: groups of the rows that the matrices multiply; None casts all matrices.
            rowwise, columnwise: the copies to make.
            scales: scale and ``scale_inv``, fp32 ``[groups]``, from ``kept_scales``; None finds
                them.
        """
        if scales is None:
            scale, scale_inv, amax = self.scaling(GroupMatrices(matrices, groups))
        else:
            scale, scale_inv, amax = *scales, None
        return quantize_matrices(
            matrices, scale, self.dtype, groups=groups, rowwise=rowwise, columnwise=columnwise,
            amax=amax, scale_inv=scale_inv,
        )  # fmt: skip

    def kept_scales(self, source: GroupMatrices) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns scales that both casts of a step can use; None if it costs nothing to find them.

        The pair is scale and ``scale_inv``, fp32 ``[groups]``.
        """
        return None

    def rewrite_matrices(
        self, matrices: Matrices, held: GroupedOutput, noop: torch.Tensor | None
    ) -> bool:
        """Quantizes into the copies of ``quantize_matrices``, as ``Quantizer.rewrite`` does."""
        return False

    def record(self, x: torch.Tensor, groups: Groups) -> None:
        """Records the amax values of the groups' rows; does nothing for a scheme without state."""

    def record_matrices(self, matrices: Matrices, groups: Groups) -> None:
        """Records amax values of the matrices of groups with rows; does nothing without a state."""

    def scaling(
        self, source: GroupRows | GroupSource | GroupMatrices
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns what the casts of a call read and write.

        Returns:
            scale: fp32 ``[groups]``.
            scale_inv: fp32 ``[groups]``, or None if each is ``1 / scale``.
            amax: fp32 ``[groups]``, in which to record amax values, or None.
        """
        raise NotImplementedError


class GemmQuantizers(NamedTuple):
    """Named tuple of the quantizers of one GEMM's operands, and of their GEMM backend.

    ``weight_recast`` casts the weight in backward and records no amax, because forward recorded it.
    ``backward`` is that of the recipe; other than None, dgrad and wgrad run in bf16 or fp32.
    """

    input: Any
    weight: Any
    weight_recast: Any
    grad_output: Any
    backend: GemmBackend
    high_precision_wgrad: bool
    backward: str | None = None


class GroupQuantizers(NamedTuple):
    """Named tuple like ``GemmQuantizers``, for groups of rows whose sizes only the device knows."""

    input: GroupQuantizer
    weight: GroupQuantizer
    weight_recast: GroupQuantizer
    grad_output: GroupQuantizer
    backend: GemmBackend
    high_precision_wgrad: bool


class QuantizerSets(NamedTuple):
    """Named tuple of a module's quantizers: for each of four kinds of forward a tuple by GEMM.

    Attributes:
        recording: for training and calibration; every cast records its amax for the next update.
        recompute: for a recompute of a recorded forward; only amax values of gradients are
            recorded.
        frozen: for evaluation; no cast records an amax.
        previewed: like ``frozen``, with the scales that the pending update will give.
    """

    recording: tuple[GemmQuantizers, ...]
    recompute: tuple[GemmQuantizers, ...]
    frozen: tuple[GemmQuantizers, ...]
    previewed: tuple[GemmQuantizers, ...]


def group_quantizers(sets: Sequence[GemmQuantizers]) -> GroupQuantizers | None:
    """Returns the group quantizers of a grouped module's GEMMs; None if the scheme has none."""
    if sets[0].backward is not None:
        return None
    made: dict[str, Any] = {}
    for role in ("input", "weight", "weight_recast", "grad_output"):
        quantizers = [getattr(gemm, role) for gemm in sets]
        made[role] = quantizers[0].grouped(quantizers)
        if made[role] is None:
            return None
    first = sets[0]
    return GroupQuantizers(
        **made, backend=first.backend, high_precision_wgrad=first.high_precision_wgrad
    )


class Scheme:
    """Base class of a scheme, which makes the quantizers of a recipe.

    A subclass registers itself by its ``name``, which is also the recipes' ``quantizer`` and the
    name of its file. A scheme with state defines ``build``, any other ``gemm_quantizers``.

    Attributes:
        layout: form of weights stored in FP8 only; None if ``stored_recipe`` returns a recipe of
            another scheme, or such weights are not supported.
        row_alignment: multiple to which ``Fp8Padding`` fills the rows of a group by default.
    """

    name: ClassVar[str]
    backend: ClassVar[type[GemmBackend]]
    layout: ClassVar[Layout | None] = None
    row_alignment: ClassVar[int] = 16  # rows that cuBLASLt reads at a time

    def __init_subclass__(cls) -> None:
        _schemes[cls.name] = cls()

    def build(
        self, recipe: Any, slots: Slots | None, gemms: int, device: torch.device
    ) -> QuantizerSets:
        """Builds a module's quantizers; here all GEMMs and kinds of forward share them.

        Args:
            recipe, slots, gemms, device: as in ``build_quantizers``.
        """
        inp, weight, grad_output = self.gemm_quantizers(recipe, device)
        backend = self.gemm_backend(recipe, device)
        backward = getattr(recipe, "backward", None)
        override = backward is not None or recipe.override_linear_precision[2]
        quantizers = GemmQuantizers(inp, weight, weight, grad_output, backend, override, backward)
        same = (quantizers,) * gemms
        return QuantizerSets(same, same, same, same)

    def gemm_backend(self, recipe: Any, device: torch.device) -> GemmBackend:
        """Makes the backend that multiplies the recipe's operands; by default a ``backend``.

        Args:
            recipe: the region's recipe, of this scheme.
            device: the operands' device.
        """
        return self.backend(recipe.use_split_accumulator, device)

    def gemm_quantizers(
        self, recipe: Any, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        """Makes the quantizers of input, weight and grad_output, for a scheme without state.

        Args:
            recipe: the region's recipe, of this scheme.
            device: the operands' device.

        Raises:
            NotImplementedError: the scheme does not define it; ``build`` is then overridden.
        """
        raise NotImplementedError

    def stored_recipe(self, recipe: Any) -> Recipe:
        """Returns the recipe that quantizes weights held in FP8 only; by default ``recipe``.

        Args:
            recipe: the region's recipe, of this scheme.
        """
        return recipe

    def restores(self, recipe: Any) -> bool:
        """Returns True if a stored weight's values in any dtype give the same data once more.

        True is the default. Weights of other recipes are saved as data and scales.

        Args:
            recipe: the recipe that the weight is stored with.
        """
        return True


_schemes: dict[str, Scheme] = {}


def scheme_of(recipe: Recipe) -> Scheme:
    """Returns the scheme of ``recipe``; imports the scheme's file if that was not imported yet.

    Raises:
        ValueError: ``recipe.quantizer`` names neither a registered scheme nor a file of schemes.
    """
    name = recipe.quantizer
    if name not in _schemes:
        where = f"{__package__}.{name}"
        try:
            importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name != where:
                raise
        if name not in _schemes:
            raise ValueError(
                f"{type(recipe).__name__}: quantizer must be the name of a scheme, one of "
                f"{', '.join(sorted(_schemes))} or a file of {__package__}, got {name!r}"
            )
    return _schemes[name]


def build_quantizers(
    recipe: Recipe, slots: Slots | None, gemms: int, device: torch.device
) -> QuantizerSets:
    """Builds a module's quantizers by the scheme of the recipe.

    Args:
        recipe: the region's recipe.
        slots: the module's FP8 state; None for a recipe without state.
        gemms: number of GEMMs of the module.
        device: the operands' device.
    """
    return scheme_of(recipe).build(recipe, slots, gemms, device)


def stored_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe with which writes quantize a weight that is stored in FP8 only.

    Delayed scaling becomes current scaling, because such a weight is written once per step, from
    its master weight.
    """
    return scheme_of(recipe).stored_recipe(recipe)


def layout_of(recipe: Recipe) -> Layout:
    """Returns the form in which weights quantized with ``recipe`` are stored.

    Raises:
        NotImplementedError: weights with this recipe cannot be held in FP8 only.
    """
    layout = scheme_of(recipe).layout
    if layout is None:
        raise NotImplementedError(
            "FP8Parameter: recipe must have a stored form for weights that are held in FP8 only, "
            f"got {type(recipe).__name__}"
        )
    return layout
