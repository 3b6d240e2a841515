"""Casts groups of rows, such as each expert's tokens, to FP8, with a scale per group or block.

The numbers of rows are on the device, and the host never waits for them. The groups are consecutive
in a matrix; rows after the last group are padding, which no function here reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import runtime
from ..runtime.named_arguments import former_fields
from ..runtime.op_options import BLOCK_SCALES, scales_number
from . import fp8_output, reference_codec
from .binding import bind, checked, note_written
from .block_quantize import block_quantize, scale_shape

__all__ = [
    "ALIGN", "GroupedOutput", "Groups", "allocate", "allocate_blocks", "block_quantize_groups",
    "block_quantize_matrices", "block_values_of_columns", "check_rows", "column_sums", "decode",
    "finish_rows", "first_scales", "groups_of", "quantize_groups", "quantize_matrices",
    "scale_rows", "scales_of", "zero_unused",
]  # fmt: skip

ALIGN = 16  # a group's columns in the columnwise copy (csrc/grouped_quantize/grouped_quantize.h)

_offsets = bind("grouped_quantize", "grouped_offsets")
quantize_into = bind("grouped_quantize", "grouped_quantize")
_quantize_matrices = bind("grouped_quantize", "grouped_quantize_matrices")
_scales = bind("grouped_quantize", "grouped_scales")
_first_scales = bind("grouped_quantize", "grouped_first_scales")
_finish = bind("grouped_quantize", "grouped_finish")
_clear = bind("grouped_quantize", "grouped_clear")
_sum = bind("grouped_quantize", "grouped_sum")
_decode = bind("grouped_quantize", "grouped_decode")
_scale_rows = bind("grouped_quantize", "grouped_scale_rows")
_BLOCK = 128
_lib = runtime.ops("grouped_quantize")


class Groups(NamedTuple):
    """Row ranges of the groups in a matrix, from ``groups_of``.

    Attributes:
        table: int32 [3 * num_groups + 1] on the device, to pass on unread: the end of each group in
            the rows (``ends``) and in the columnwise copy (``column_ends``), a flag for each
            nonempty group, and a flag that is 1 if the numbers of rows are invalid.
        rows: number of rows of the matrix.
        num_groups: number of groups.
    """

    table: torch.Tensor
    rows: int
    num_groups: int

    @property
    def ends(self) -> torch.Tensor:
        """The row after each group's last row, int32 [num_groups]."""
        return self.table[: self.num_groups]

    @property
    def column_ends(self) -> torch.Tensor:
        """The column after each group's last column of the columnwise copy, int32 [num_groups]."""
        return self.table[self.num_groups : 2 * self.num_groups]

    @property
    def columns(self) -> int:
        """Number of columns of the columnwise copy, enough for any sizes of the groups."""
        return -(-self.rows // ALIGN) * ALIGN + self.num_groups * ALIGN

    @property
    def lines(self) -> int:
        """Number of lines of columnwise block scales, enough for any sizes of the groups."""
        return self.columns // _BLOCK + self.num_groups


@former_fields(transposed="columnwise")
class GroupedOutput(NamedTuple):
    """FP8 data of groups and its scale_inv; None for a copy that was not requested.

    Attributes:
        rowwise: [rows, cols] from ``quantize_groups``, [groups, rows, cols] from
            ``quantize_matrices``.
        columnwise: the transpose: [cols, ``Groups.columns``] from ``quantize_groups``, [groups,
            cols, rows] from ``quantize_matrices``.
        scale_inv: float32 [groups]; with block scaling, the scale_inv of the columnwise copy, or
            None without that copy.
        row_scale_inv: float32 [rows], the scale_inv of each row; with block scaling, that of the
            rowwise copy. None without a rowwise copy and from ``quantize_matrices``.
    """

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None
    scale_inv: torch.Tensor
    row_scale_inv: torch.Tensor | None

    @property
    def rowwise_scale_inv(self) -> torch.Tensor:
        """The scale_inv of the rowwise copy: ``row_scale_inv``, or ``scale_inv`` if it is None."""
        return self.scale_inv if self.row_scale_inv is None else self.row_scale_inv


@checked
def groups_of(splits: torch.Tensor, rows: int) -> Groups:
    """Returns the row ranges of groups in a matrix of ``rows`` rows.

    Splits are invalid if one is negative or their sum exceeds ``rows``. This raises no error,
    because the host does not read them. Instead every group is empty, every scale_inv is NaN, and
    ``finish_rows``, ``zero_unused`` and ``column_sums`` write NaN.

    Args:
        splits: int32 or int64 [groups], the number of rows of each group, in order; made contiguous
            if it is not.
        rows: number of rows of the matrix.

    Raises:
        TypeError: ``splits`` is neither int32 nor int64.
        ValueError: ``splits`` does not have one dimension.
        NotImplementedError: ``splits`` does not have 1 to 1023 groups.
    """
    count = int(splits.numel())  # torch.jit.trace gives a tensor
    table = splits.new_empty(3 * count + 1, dtype=torch.int32)
    _offsets(splits.contiguous(), table, rows)
    return Groups(table, rows, count)


def check_rows(name: str, rows: int, groups: Groups) -> None:
    """Raises ValueError unless ``groups`` was made for a matrix of ``rows`` rows.

    ``name`` is the name of the calling function, for the error.
    """
    if rows != groups.rows:
        raise ValueError(f"{name}: groups must be of {rows} rows, got groups of {groups.rows} rows")


def allocate(
    op: str,
    like: torch.Tensor,
    shape: tuple[int, ...],
    groups: Groups,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    scale_inv: torch.Tensor | None,
) -> GroupedOutput:
    """Returns uninitialised FP8 copies of groups of rows, on ``like``'s device, for a scale each.

    Args:
        op: name of the caller, for errors.
        like: tensor whose device the copies get.
        shape: (rows, cols).
        groups: the groups, made for ``rows`` rows.
        fp8_dtype: dtype of the data.
        rowwise, columnwise: the copies to allocate.
        scale_inv: float32 [groups] to use in the result; None allocates it.

    Raises:
        ValueError: ``groups`` was made for another number of rows.
    """
    rows, cols = shape
    check_rows(op, rows, groups)
    row = like.new_empty((rows, cols), dtype=fp8_dtype) if rowwise else None
    col = like.new_empty((cols, groups.columns), dtype=fp8_dtype) if columnwise else None
    of_rows = like.new_empty(rows, dtype=torch.float32) if rowwise else None
    if scale_inv is None:
        scale_inv = like.new_empty(groups.num_groups, dtype=torch.float32)
    return GroupedOutput(row, col, scale_inv, of_rows)


@checked
def quantize_groups(
    x: torch.Tensor,
    groups: Groups,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    due: torch.Tensor | None = None,
) -> GroupedOutput:
    """Quantizes groups of rows in one pass: q = saturating_cast(float(x) * scale[g]) for group g.

    Values are rounded to nearest even.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        groups: row ranges of the groups in x.
        scale: float32 [groups], of any stride.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols]; rows after the last group have undefined
            values.
        columnwise: make the columnwise copy, [cols, groups.columns]. Each group begins at a
            multiple of 16 columns and has at least 16; columns beyond its rows are zeros. Columns
            after the last group have undefined values.
        amax: float32 [groups], of any stride, becomes max(amax, max |x| of the group); NaN counts
            as largest. None computes no amax.
        scale_inv: float32 [groups] to use instead of 1 / scale.
        due: int32 [groups]; groups with 0 are neither read nor written. None quantizes all groups.

    Returns:
        The requested copies, with scale_inv [groups] and row_scale_inv [rows].

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    x = fp8_output.contiguous_matrix("grouped_quantize", x)
    given = scale_inv is not None
    out = allocate(
        "grouped_quantize", x, x.shape, groups, fp8_dtype, rowwise, columnwise, scale_inv
    )
    quantize_into(
        x, groups.table, scale, out.scale_inv, out.rowwise, out.columnwise, out.row_scale_inv,
        amax, due, given,
    )  # fmt: skip
    note_written(amax)
    return out


@checked
def quantize_matrices(
    matrices: Sequence[torch.Tensor] | torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    groups: Groups | None = None,
    rowwise: bool | None = None,
    columnwise: bool | None = None,
    amax: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    due: torch.Tensor | None = None,
    out: GroupedOutput | None = None,
) -> GroupedOutput:
    """Quantizes one matrix for each group, all of one shape and dtype, in one launch.

    Args:
        matrices: one float32, float16 or bfloat16 matrix [rows, cols] for each group, such as the
            experts' weights, or one tensor [groups, rows, cols]; made contiguous if they are not. A
            list of up to 8 tensors [groups, rows, cols] is quantized as their concatenation along
            dimension 1; the rows of each must then be a multiple of 16.
        groups: skips the matrices of empty groups; in new tensors their FP8 data is undefined. None
            quantizes all.
        rowwise: make the rowwise copies, [groups, rows, cols]. None means True, or with ``out`` the
            copies that ``out`` has.
        columnwise: make the transposes, [groups, cols, rows]; None as for ``rowwise``.
        scale: float32 [groups], with any strides.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        amax: float32 [groups], becomes max(amax, max |x| of the group); NaN counts as largest. None
            computes no amax.
        scale_inv: float32 [groups] to use instead of 1 / scale.
        due: int32 [groups]; matrices with 0 are neither read nor written. None quantizes all.
        out: result of an earlier call, whose tensors are overwritten.

    Returns:
        FP8 data of all matrices: ``out`` or new tensors.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``rowwise``, ``columnwise`` or
            ``scale_inv`` differs from that of ``out``.
    """
    name = "grouped_quantize.quantize_matrices"
    matrices, count, (rows, cols), swaps = _listed(name, matrices)
    like = matrices[0]
    given = scale_inv is not None
    if out is None:
        row = col = None
        if rowwise is not False:
            row = like.new_empty((count, rows, cols), dtype=fp8_dtype)
        if columnwise is not False:
            col = like.new_empty((count, cols, rows), dtype=fp8_dtype)
        if scale_inv is None:
            scale_inv = like.new_empty(count, dtype=torch.float32)
        out = GroupedOutput(row, col, scale_inv, None)
    else:
        _check_out(out, rowwise, columnwise, scale_inv)
        note_written(out.rowwise, out.columnwise, out.scale_inv)
    table = None if groups is None else groups.table
    copies = (out.rowwise, out.columnwise)[:: -1 if swaps else 1]
    _quantize_matrices(matrices, table, scale, out.scale_inv, *copies, amax, due, given)
    note_written(amax)
    return out


def allocate_blocks(
    op: str,
    like: torch.Tensor,
    shape: tuple[int, ...],
    groups: Groups,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
) -> GroupedOutput:
    """Returns uninitialised FP8 copies of groups of rows, as ``allocate``, for 1x128 blocks.

    Args:
        op, like, shape, groups, fp8_dtype, rowwise, columnwise: as in ``allocate``.

    Raises:
        TypeError: ``fp8_dtype`` is not an FP8 dtype.
        ValueError: ``groups`` was made for another number of rows, or no copy is requested.
    """
    fp8_output.check_fp8_dtype(op, fp8_dtype)
    rows, cols = shape
    check_rows(op, rows, groups)
    fp8_output.check_any_output(op, rowwise, columnwise, None)
    row = row_scales = None
    col: Any = None
    col_scales: Any = None
    if rowwise:
        row = like.new_empty((rows, cols), dtype=fp8_dtype)
        row_scales = like.new_empty(scale_shape(rows, cols, 1), dtype=torch.float32)
    if columnwise:
        col = like.new_empty((cols, groups.columns), dtype=fp8_dtype)
        col_scales = like.new_empty((groups.lines, -(-cols // 4) * 4), dtype=torch.float32)
    return GroupedOutput(row, col, col_scales, row_scales)


@checked
def block_quantize_groups(
    x: torch.Tensor,
    groups: Groups,
    fp8_dtype: torch.dtype,
    *,
    columnwise_block_rows: int = 1,
    rowwise: bool = True,
    columnwise: bool = True,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
) -> GroupedOutput:
    """Quantizes groups of rows with a scale for each block of 1x128, as ``block_quantize`` does.

    Blocks of the columnwise copy run along the rows of a group and begin with its first row.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        groups: row ranges of the groups in x.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        columnwise_block_rows: 1 casts the columnwise copy in blocks of 1x128; 128 in blocks of
            128x128, whose scale is repeated for each of their 128 columns.
        rowwise: make the rowwise copy, [rows, cols], whose row_scale_inv has the shape
            ``scale_shape(rows, cols, 1)``; rows after the last group have undefined values.
        columnwise: make the columnwise copy, [cols, groups.columns], in which each group begins at
            a multiple of 16 columns. Its scale_inv is float32 [groups.lines, cols rounded up to 4]:
            row ``begin // 128 + g + i`` has block i of group g, whose columns begin at ``begin``.
        scales, pow2, eps: as in ``block_quantize``; by default scales are powers of two.

    Returns:
        The requested copies with their scale_inv.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or neither copy is requested.
    """
    name = "grouped_quantize.block_quantize_groups"
    number = scales_number(name, scales, pow2)
    x = fp8_output.contiguous_matrix(name, x)
    check_block_rows(name, columnwise_block_rows)
    out = allocate_blocks(name, x, x.shape, groups, fp8_dtype, rowwise, columnwise)
    block_quantize_into(
        x, groups.table, out.rowwise, out.row_scale_inv, out.columnwise, out.scale_inv,
        columnwise_block_rows, eps, number,
    )  # fmt: skip
    return out


def check_block_rows(op: str, columnwise_block_rows: int) -> None:
    """Raises ValueError unless ``columnwise_block_rows`` is 1 or 128."""
    if columnwise_block_rows not in (1, _BLOCK):
        raise ValueError(
            f"{op}: columnwise_block_rows must be 1 or 128, got {columnwise_block_rows}"
        )


def _quantize_blocks(x, table, row, row_scales, col, col_scales, block_rows, eps, number):
    """Casts all groups in one launch; on the CPU, where the table can be read, one by one."""
    if x.is_cuda:
        rest = block_rows, eps, number
        _lib.grouped_block_quantize(x, table, row, row_scales, col, col_scales, *rest)
        return
    count = (table.numel() - 1) // 3
    ends, column_ends = table[: 2 * count].view(2, count).tolist()
    begin = column = 0
    for g, (end, column_end) in enumerate(zip(ends, column_ends, strict=True)):
        dtype = (col if row is None else row).dtype
        own: Any = block_quantize(
            x[begin:end], dtype, columnwise_block_rows=block_rows, scales=BLOCK_SCALES[number],
            eps=eps,
        )  # fmt: skip
        if row is not None:
            row[begin:end] = own.rowwise
            row_scales[:, begin:end] = own.rowwise_scale_inv[:, : end - begin]
        if col is not None:
            col[:, column:column_end] = 0
            col[:, column : column + end - begin] = own.columnwise
            line, scales = column // _BLOCK + g, own.columnwise_scale_inv
            if block_rows == _BLOCK:
                tiles = scales[:, : -(-(end - begin) // _BLOCK)].t()
                scales = torch.ones_like(col_scales[: len(tiles)])
                scales[:, : x.shape[1]] = tiles.repeat_interleave(_BLOCK, 1)[:, : x.shape[1]]
            col_scales[line] = 1
            col_scales[line : line + len(scales)] = scales
        begin, column = end, column_end


block_quantize_into = bind("grouped_quantize", "grouped_block_quantize", _quantize_blocks)


@checked
def block_quantize_matrices(
    matrices: Sequence[torch.Tensor] | torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    groups: Groups | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
) -> GroupedOutput:
    """Quantizes one matrix for each group with a scale for each 128x128 block, in one launch.

    Args:
        matrices: one float32, float16 or bfloat16 matrix [rows, cols] for each group, or one tensor
            [groups, rows, cols]; or up to 8 such tensors, concatenated along dimension 1, each with
            a multiple of 128 rows.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        groups: skips the matrices of empty groups, whose FP8 data and scales are undefined. None
            quantizes all.
        rowwise: make [groups, rows, cols], whose row_scale_inv is float32 [groups,
            *scale_shape(rows, cols, 128)].
        columnwise: make [groups, cols, rows], whose scale_inv is float32 [groups,
            *scale_shape(cols, rows, 128)].
        scales, pow2, eps: as in ``block_quantize``; by default scales are powers of two.

    Returns:
        The requested copies with their scale_inv.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or neither copy is requested.
    """
    name = "grouped_quantize.block_quantize_matrices"
    number = scales_number(name, scales, pow2)
    fp8_output.check_fp8_dtype(name, fp8_dtype)
    fp8_output.check_any_output(name, rowwise, columnwise, None)
    matrices, count, (rows, cols), swaps = _listed(name, matrices)
    like = matrices[0]
    if matrices[0].dim() == 3 and len(matrices) > 1 and matrices[0].shape[1] % _BLOCK:
        raise ValueError(
            f"{name}: matrices must have a multiple of {_BLOCK} rows in several stacks, "
            f"got {matrices[0].shape[1]}"
        )

    def pair(wanted: bool, rows: int, cols: int) -> tuple:
        if not wanted:
            return None, None
        scales = (count, *scale_shape(rows, cols, _BLOCK))
        return (
            like.new_empty((count, rows, cols), dtype=fp8_dtype),
            like.new_empty(scales, dtype=torch.float32),
        )

    row, row_scales = pair(rowwise, rows, cols)
    col, col_scales = pair(columnwise, cols, rows)
    table = None if groups is None else groups.table
    copies = (col, col_scales, row, row_scales) if swaps else (row, row_scales, col, col_scales)
    _block_quantize_matrices(matrices, table, *copies, eps, number)
    return GroupedOutput(row, col, col_scales, row_scales)


def _quantize_matrix_blocks(matrices, table, row, row_scales, col, col_scales, eps, number):
    """Casts all matrices in one launch; on the CPU one by one."""
    outs = row, row_scales, col, col_scales
    if matrices[0].is_cuda:
        _lib.grouped_block_quantize_matrices(matrices, table, *outs, eps, number)
        return
    dtype = (col if row is None else row).dtype
    each = torch.cat(matrices, 1) if matrices[0].dim() == 3 else matrices
    for g, matrix in enumerate(each):
        own = block_quantize(matrix, dtype, block_rows=_BLOCK, scales=BLOCK_SCALES[number], eps=eps)
        for target, source in zip(outs, own, strict=True):
            if target is not None:
                target[g] = source


_block_quantize_matrices = bind(
    "grouped_quantize", "grouped_block_quantize_matrices", _quantize_matrix_blocks
)


def block_values_of_columns(
    fp8_data: torch.Tensor, scale_inv: torch.Tensor, column_ends: torch.Tensor
) -> torch.Tensor:
    """Decodes a columnwise copy of ``block_quantize_groups`` to float32 [cols, columns].

    Args:
        fp8_data: FP8 [cols, columns].
        scale_inv: float32 [lines, cols rounded up to 4].
        column_ends: int32 [groups]; columns after the last group get undefined values.
    """
    at = torch.arange(fp8_data.shape[1], dtype=torch.int32, device=fp8_data.device)
    group = torch.searchsorted(column_ends, at, right=True).clamp_(max=column_ends.numel() - 1)
    begin = torch.nn.functional.pad(column_ends, (1, 0))[group]
    line = begin // _BLOCK + group + (at - begin).clamp_(min=0) // _BLOCK
    line.clamp_(max=scale_inv.shape[0] - 1)
    return decode(fp8_data).float() * scale_inv[line, : fp8_data.shape[0]].t()


def lies_transposed(matrices: torch.Tensor) -> bool:
    """Returns True for a stack [groups, rows, cols] that is contiguous as [groups, cols, rows]."""
    return (
        matrices.dim() == 3
        and not matrices.is_contiguous()
        and matrices.transpose(1, 2).is_contiguous()
    )


def _listed(
    name: str, matrices: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[list[torch.Tensor], int, tuple[int, int], bool]:
    """Returns contiguous matrices or stacks, the number of groups, a matrix's shape, and a flag.

    The flag is True if they are transposed, which avoids a copy of a stack that
    ``lies_transposed``.
    """
    if not isinstance(matrices, torch.Tensor):
        each = [matrix.contiguous() for matrix in matrices]
        rows, cols = each[0].shape[-2:]
        if each[0].dim() == 3:
            return each, each[0].shape[0], (rows * len(each), cols), False
        return each, len(each), (rows, cols), False
    if matrices.dim() != 3:
        raise ValueError(
            f"{name}: matrices must be [rows, cols] each or one tensor [groups, rows, cols], "
            f"got {list(matrices.shape)}"
        )
    shape = matrices.shape[1], matrices.shape[2]
    if lies_transposed(matrices):
        return [matrices.transpose(1, 2)], matrices.shape[0], shape, True
    return [matrices.contiguous()], matrices.shape[0], shape, False


def _check_out(
    out: GroupedOutput,
    rowwise: bool | None,
    columnwise: bool | None,
    scale_inv: torch.Tensor | None,
) -> None:
    """Raises ValueError if an argument asks for something else than ``out`` has."""
    for name, wanted, copy in (
        ("rowwise", rowwise, out.rowwise),
        ("columnwise", columnwise, out.columnwise),
    ):
        if wanted is not None and wanted != (copy is not None):
            raise ValueError(
                f"grouped_quantize.quantize_matrices: {name} must be {copy is not None} or None "
                f"for an out {'with' if copy is not None else 'without'} that copy, got {wanted}"
            )
    if scale_inv is not None and scale_inv is not out.scale_inv:
        raise ValueError(
            "grouped_quantize.quantize_matrices: scale_inv must be out.scale_inv or None if out is "
            "given, got another tensor"
        )


@checked
def scales_of(
    amax: torch.Tensor, fp8_dtype: torch.dtype, *, eps: float = 0.0, pow2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the scale of each group from its amax, with the rules of ``current_scale``.

    Args:
        amax: float32 [groups].
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        eps: smallest amax, zero or more.
        pow2: round scales down to powers of two.

    Returns:
        ``(scale, scale_inv)``, each float32 [groups].

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: ``eps`` is negative.
    """
    scale, scale_inv = torch.empty_like(amax), torch.empty_like(amax)
    _scales(amax, scale, scale_inv, torch.finfo(fp8_dtype).max, eps, pow2)
    return scale, scale_inv


@checked
def first_scales(
    amax: torch.Tensor,
    groups: Groups,
    due: torch.Tensor,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    fp8_max: float,
    *,
    margin: int = 0,
    pow2: bool = False,
) -> None:
    """Computes the first scales of delayed scaling, from amax values instead of an amax history.

    Each group with rows whose ``due`` is 1 gets a scale and scale_inv, and its ``due`` becomes 0.
    If its amax is 0, infinite or NaN, only ``due`` changes. Other groups are not changed.

    Args:
        amax: float32 [groups].
        groups: row ranges of the groups.
        due: int32 [groups]; 0 for each group that already has a scale, otherwise 1; written.
        scale: float32 [groups], of any stride; written.
        scale_inv: float32 [groups], of any stride; written.
        fp8_max: the format's largest value, 448 (E4M3) or 57344 (E5M2).
        margin: exponent of a power of two that scales are divided by, as headroom.
        pow2: round scales down to powers of two.
    """
    _first_scales(amax, groups.table, due, scale, scale_inv, fp8_max, margin, pow2)
    note_written(due, scale, scale_inv)


@checked
def finish_rows(out: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None) -> None:
    """Adds each group's bias to its rows of ``out``, and zeroes the rows after the last group.

    Args:
        out: [rows, cols], contiguous float32, float16 or bfloat16; written.
        groups: row ranges of the groups in ``out``.
        bias: [groups, cols] in ``out``'s dtype; None adds nothing.

    Raises:
        ValueError: ``groups`` was made for another number of rows.
    """
    check_rows("grouped_finish", out.shape[0], groups)
    _finish(out, groups.table, bias)
    note_written(out)


@checked
def zero_unused(out: torch.Tensor, groups: Groups) -> None:
    """Zeroes ``out[g]`` for each group g without rows.

    ``out`` is contiguous [groups, ...] in float32, float16 or bfloat16.
    """
    _clear(out.flatten(1), groups.table)
    note_written(out)


@checked
def decode(fp8_data: torch.Tensor) -> torch.Tensor:
    """Converts E4M3 or E5M2 data of any shape to bfloat16, exactly and without a scale_inv."""
    fp8_data = fp8_data.contiguous()
    out = torch.empty_like(fp8_data, dtype=torch.bfloat16)
    _decode(fp8_data.view(-1), out.view(-1))
    return out


@checked
def scale_rows(out: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiplies each row of a matrix by its factor, in place.

    Args:
        out: contiguous [rows, ...], in float32, float16 or bfloat16.
        factor: float32 [rows].
    """
    _scale_rows(out.flatten(1), factor)
    note_written(out)


@checked
def column_sums(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Sums the rows of each group of ``x`` [rows, cols] in float32, deterministically.

    Returns:
        The sums [groups, cols] in the dtype of ``x``: float32, float16 or bfloat16.

    Raises:
        ValueError: ``groups`` was made for another number of rows.
    """
    x = fp8_output.contiguous_matrix("grouped_sum", x)
    check_rows("grouped_sum", x.shape[0], groups)
    out = x.new_empty((groups.num_groups, x.shape[1]))
    _sum(x, groups.table, out)
    return out


def reference_table(splits: torch.Tensor, rows: int) -> torch.Tensor:
    """Computes ``groups_of(splits, rows).table`` in plain Python, as a CPU tensor."""
    counts = splits.tolist()
    bad = min(counts) < 0 or sum(counts) > rows
    if bad:
        counts = [0] * len(counts)
    columns = [max(ALIGN, -(-count // ALIGN) * ALIGN) for count in counts]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    column_ends = [sum(columns[: i + 1]) for i in range(len(counts))]
    used = [int(count > 0) for count in counts]
    return torch.tensor([*ends, *column_ends, *used, int(bad)], dtype=torch.int32)


def reference(
    x: torch.Tensor, splits: Sequence[int], scale: torch.Tensor, fp8_dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Computes ``quantize_groups`` in plain PyTorch, as its specification, by integer arithmetic.

    Returns for each group its rowwise copy, its columnwise copy [cols, rows rounded up to 16, at
    least 16] padded with zeros, and its amax.
    """
    results = []
    for part, factor in zip(x[: sum(splits)].split(list(splits)), scale, strict=True):
        codes = reference_codec.encode_fp8(part.float() * factor, fp8_dtype)
        columns = max(ALIGN, -(-len(part) // ALIGN) * ALIGN)
        columnwise = torch.zeros(x.shape[1], columns, dtype=torch.uint8)
        columnwise[:, : len(part)] = codes.view(torch.uint8).t()
        results.append((codes, columnwise.view(fp8_dtype), reference_codec.amax_of(part)))
    return results
