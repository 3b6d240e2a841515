"""FP8 data of groups of rows whose sizes only the device knows; nothing waits for the device.

The groups lie one after the other in a matrix of rows; what is left of it behind the last group is
padding, which no function here reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..runtime.former_names import former_fields
from . import fp8_output, reference_codec
from .argument_errors import checked
from .registration import bind, note_written

__all__ = [
    "ALIGN",
    "GroupedOutput",
    "Groups",
    "check_rows",
    "column_sums",
    "decode",
    "finish_rows",
    "first_scales",
    "groups_of",
    "quantize_groups",
    "quantize_matrices",
    "scale_rows",
    "scales_of",
    "zero_unused",
]

ALIGN = 16  # columns of a group in the columnwise copy (csrc/grouped_quantize/grouped_quantize.h)

_offsets = bind("grouped_quantize", "grouped_offsets")
_quantize = bind("grouped_quantize", "grouped_quantize")
_quantize_matrices = bind("grouped_quantize", "grouped_quantize_matrices")
_scales = bind("grouped_quantize", "grouped_scales")
_first_scales = bind("grouped_quantize", "grouped_first_scales")
_finish = bind("grouped_quantize", "grouped_finish")
_clear = bind("grouped_quantize", "grouped_clear")
_sum = bind("grouped_quantize", "grouped_sum")
_decode = bind("grouped_quantize", "grouped_decode")
_scale_rows = bind("grouped_quantize", "grouped_scale_rows")


class Groups(NamedTuple):
    """Places of groups in ``rows`` rows, as ``groups_of`` returns them."""

    table: torch.Tensor  # int32 [3 num_groups + 1]: ends, column ends, used, bad
    rows: int
    num_groups: int

    @property
    def ends(self) -> torch.Tensor:
        """Row after each group's last, int32 [num_groups]."""
        return self.table[: self.num_groups]

    @property
    def column_ends(self) -> torch.Tensor:
        """Column after each group's last in the columnwise copy, int32 [num_groups]."""
        return self.table[self.num_groups : 2 * self.num_groups]

    @property
    def columns(self) -> int:
        """Number of columns of the columnwise copy, enough for any groups."""
        return -(-self.rows // ALIGN) * ALIGN + self.num_groups * ALIGN


@former_fields(transposed="columnwise")
class GroupedOutput(NamedTuple):
    """FP8 data of groups, with None for a copy that was not asked for, and each scale_inv."""

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None
    scale_inv: torch.Tensor  # float32 [groups]
    row_scale_inv: torch.Tensor | None  # float32 [rows], of quantize_groups


@checked
def groups_of(splits: torch.Tensor, rows: int) -> Groups:
    """Returns the places of groups in a matrix of ``rows`` rows.

    Splits that are no such groups, because one is negative or their sum exceeds ``rows``, are seen
    on the device alone: then no group has rows, every scale_inv is NaN, and ``finish_rows``,
    ``zero_unused`` and ``column_sums`` write NaN.

    Args:
        splits: [groups] int32 or int64, the numbers of rows in order; made contiguous if it is not;
            1 to 1023 groups.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.
        NotImplementedError: another number of groups.
    """
    count = int(splits.numel())  # torch.jit.trace gives a tensor
    table = splits.new_empty(3 * count + 1, dtype=torch.int32)
    _offsets(splits.contiguous(), table, rows)
    return Groups(table, rows, count)


def check_rows(name: str, rows: int, groups: Groups) -> None:
    """Raises ValueError unless ``groups`` are of a matrix of ``rows`` rows."""
    if rows != groups.rows:
        raise ValueError(f"{name}: groups must be of {rows} rows, got groups of {groups.rows} rows")


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
    """Quantizes q = saturating_cast(float(x) * scale[g]), round to nearest even, in one pass.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        groups: of as many rows.
        scale: float32 [groups], of any stride.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make [rows, cols]; rows of no group are left without values.
        columnwise: make [cols, groups.columns], in which each group begins at a multiple of 16
            columns and has 16 at least: zeros where it has no row. What lies behind the
            last group has no values.
        amax: float32 [groups], of any stride, becomes max(amax, max |x| of the group), NaN largest.
        scale_inv: float32 [groups] to be used instead of 1 / scale.
        due: int32 [groups]; only groups that are not 0 are looked at.

    Raises:
        TypeError: a dtype that does not match.
        ValueError: a shape or device that does not match.
    """
    x = fp8_output.contiguous_matrix("grouped_quantize", x)
    rows, cols = x.shape
    check_rows("grouped_quantize", rows, groups)
    row = x.new_empty((rows, cols), dtype=fp8_dtype) if rowwise else None
    col = x.new_empty((cols, groups.columns), dtype=fp8_dtype) if columnwise else None
    of_rows = x.new_empty(rows, dtype=torch.float32) if rowwise else None
    given = scale_inv is not None
    if scale_inv is None:
        scale_inv = x.new_empty(groups.num_groups, dtype=torch.float32)
    _quantize(x, groups.table, scale, scale_inv, row, col, of_rows, amax, due, given)
    note_written(amax)
    return GroupedOutput(row, col, scale_inv, of_rows)


@checked
def quantize_matrices(
    matrices: Sequence[torch.Tensor],
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    groups: Groups | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    due: torch.Tensor | None = None,
    out: GroupedOutput | None = None,
) -> GroupedOutput:
    """Quantizes one matrix for each group, all of one shape and dtype, in one launch.

    Args:
        matrices: [rows, cols] each; made contiguous if they are not.
        groups: those without rows leave their matrix alone; None: all are quantized.
        rowwise: make [groups, rows, cols].
        columnwise: make [groups, cols, rows].
        scale, fp8_dtype, amax, scale_inv, due: as in ``quantize_groups``.
        out: what an earlier call has made, both copies and their scales, to be written instead of
            new tensors; groups that are not due keep theirs.
    """
    matrices = [matrix.contiguous() for matrix in matrices]
    like, count = matrices[0], len(matrices)
    given = scale_inv is not None
    if out is None:
        row = like.new_empty((count, *like.shape), dtype=fp8_dtype) if rowwise else None
        col = like.new_empty((count, *like.shape[::-1]), dtype=fp8_dtype) if columnwise else None
        if scale_inv is None:
            scale_inv = like.new_empty(count, dtype=torch.float32)
        out = GroupedOutput(row, col, scale_inv, None)
    else:
        note_written(out.rowwise, out.columnwise, out.scale_inv)
    table = None if groups is None else groups.table
    _quantize_matrices(
        matrices, table, scale, out.scale_inv, out.rowwise, out.columnwise, amax, due, given
    )
    note_written(amax)
    return out


@checked
def scales_of(
    amax: torch.Tensor, fp8_dtype: torch.dtype, *, eps: float = 0.0, pow2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(scale, scale_inv)`` [groups] by ``current_scale``'s rules for float32 amaxes."""
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
    """Writes the scale that delayed scaling takes for an amax to groups that are due and have rows.

    These are then due no more. An amax of 0, infinity or NaN leaves the scale.

    Args:
        amax: float32 [groups].
        due: int32 [groups].
        scale, scale_inv: float32 [groups], of any stride.
        fp8_max, margin, pow2: as in ``amax_scale_update``.
    """
    _first_scales(amax, groups.table, due, scale, scale_inv, fp8_max, margin, pow2)
    note_written(due, scale, scale_inv)


@checked
def finish_rows(out: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None) -> None:
    """Adds ``bias`` [groups, cols] to the groups' rows of ``out``, and zeroes rows of no group.

    Args:
        out: [rows, cols], contiguous float32, float16 or bfloat16.
        groups: the places of groups in ``rows`` rows.
        bias: of ``out``'s dtype.

    Raises:
        ValueError: groups of another number of rows.
    """
    check_rows("grouped_finish", out.shape[0], groups)
    _finish(out, groups.table, bias)
    note_written(out)


@checked
def zero_unused(out: torch.Tensor, groups: Groups) -> None:
    """Zeroes ``out[g]`` of groups without rows; ``out`` is contiguous [groups, ..]."""
    _clear(out.flatten(1), groups.table)
    note_written(out)


@checked
def decode(fp8_data: torch.Tensor) -> torch.Tensor:
    """Returns the values of float8_e4m3fn or float8_e5m2 data of any shape, exact in bfloat16."""
    fp8_data = fp8_data.contiguous()
    out = torch.empty_like(fp8_data, dtype=torch.bfloat16)
    _decode(fp8_data.view(-1), out.view(-1))
    return out


@checked
def scale_rows(out: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiplies the rows of ``out`` [rows, ..] by ``factor`` float32 [rows], in float32.

    ``out`` is contiguous float32, float16 or bfloat16.
    """
    _scale_rows(out.flatten(1), factor)
    note_written(out)


@checked
def column_sums(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Sums the rows of each group of ``x`` [rows, cols] in float32, deterministically.

    Returns:
        The sums [groups, cols] in the dtype of ``x``: float32, float16 or bfloat16.

    Raises:
        ValueError: groups of another number of rows.
    """
    x = fp8_output.contiguous_matrix("grouped_sum", x)
    check_rows("grouped_sum", x.shape[0], groups)
    out = x.new_empty((groups.num_groups, x.shape[1]))
    _sum(x, groups.table, out)
    return out


def reference_table(splits: torch.Tensor, rows: int) -> torch.Tensor:
    """Computes the table of ``groups_of`` in plain Python, on the CPU."""
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
    """Returns for each group its FP8 data [rows, cols], the padded columnwise copy, and amax.

    In plain PyTorch with its own integer rounding; the specification of ``quantize_groups``.
    """
    results = []
    for part, factor in zip(x[: sum(splits)].split(list(splits)), scale, strict=True):
        codes = reference_codec.encode_fp8(part.float() * factor, fp8_dtype)
        columns = max(ALIGN, -(-len(part) // ALIGN) * ALIGN)
        columnwise = torch.zeros(x.shape[1], columns, dtype=torch.uint8)
        columnwise[:, : len(part)] = codes.view(torch.uint8).t()
        results.append((codes, columnwise.view(fp8_dtype), reference_codec.amax_of(part)))
    return results
