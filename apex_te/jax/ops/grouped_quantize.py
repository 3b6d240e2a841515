"""Casts groups of rows, such as each expert's tokens, to FP8, with a scale for each group or block.

The numbers of rows are on the device. The groups lie one after the other in a matrix; its rows
after the last group are padding, which no function here reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime.op_options import scales_number
from .._call import Stacked, call
from .._partition import vary_alike
from . import _checks
from ._checked import checked
from ._contract import whole_call
from .block_quantize import block_quantize, scale_shape

__all__ = [
    "ALIGN", "GroupedOutput", "Groups", "block_quantize_matrices", "block_values_of_columns",
    "check_rows", "column_sums", "decode", "finish_rows", "first_scales", "groups_of",
    "quantize_groups", "quantize_matrices", "scale_rows", "scales_of", "zero_unused",
]  # fmt: skip

# csrc/grouped_quantize/grouped_quantize.h
ALIGN = 16  # a group's columns in the columnwise copy
_BLOCK = 128
_MAX_GROUPS = 1023
_MOST_ROWS = 2**31 - 1

_OP = "grouped_quantize"
_S = jax.ShapeDtypeStruct


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Places of groups in the rows of a matrix, as ``groups_of`` returns them.

    Attributes:
        table: int32 on the device, to pass on unread.
        rows: number of rows of the matrix.
        num_groups: number of groups.
    """

    table: jax.Array
    rows: int = dataclasses.field(metadata={"static": True})
    num_groups: int = dataclasses.field(metadata={"static": True})

    @property
    def ends(self) -> jax.Array:
        """The row after each group's last row, int32 [num_groups]."""
        return self.table[: self.num_groups]

    @property
    def column_ends(self) -> jax.Array:
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


class Alignment(NamedTuple):
    """Copies of groups, each of which begins at a row that is a multiple of ``multiple``.

    A group has at least one multiple there; its rows beyond its own are zeros. ``begins`` and
    ``ends``, int32 [groups], are the places of the groups, ``rows`` is the number of rows.
    """

    groups: Groups
    multiple: int
    begins: jax.Array
    ends: jax.Array
    rows: int

    @classmethod
    def of(cls, groups: Groups, multiple: int) -> Alignment:
        """Returns the places of groups that are aligned to ``multiple``."""
        sizes = jnp.diff(groups.ends, prepend=0)
        padded = jnp.maximum(-(-sizes // multiple), 1) * multiple
        ends = jnp.cumsum(padded, dtype=jnp.int32)
        rows = -(-groups.rows // multiple) * multiple + groups.num_groups * multiple
        return cls(groups, multiple, ends - padded, ends, rows)

    def copies(self, x: jax.Array) -> jax.Array:
        """Returns the rows of ``x`` in their aligned places."""
        at = jnp.arange(self.rows, dtype=jnp.int32)
        group = group_of(self.ends, at)
        begins = begins_of(self.groups.ends)
        source = begins[group] + at - self.begins[group]
        is_row = (source < self.groups.ends[group]) & (at < self.ends[-1])
        rows = x[jnp.where(is_row, source, 0)] if len(x) else jnp.zeros((1, x.shape[1]), x.dtype)
        return jnp.where(is_row[:, None], rows, 0)


def begins_of(ends: jax.Array) -> jax.Array:
    """Returns where groups begin that follow one another."""
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])


def group_of(ends: jax.Array, at: jax.Array) -> jax.Array:
    """Returns the group of each place, the last one's for places after it."""
    return jnp.minimum(jnp.searchsorted(ends, at, side="right"), ends.size - 1)


class GroupedOutput(NamedTuple):
    """FP8 data of groups and its scale_inv; None for a result that was not requested.

    Attributes:
        rowwise: [rows, cols] of groups of rows, [groups, rows, cols] of matrices.
        columnwise: the transpose: [cols, ``Groups.columns``] or [groups, cols, rows].
        scale_inv: float32 [groups]; with block scales, the scale_inv of the columnwise copy.
        row_scale_inv: float32 [rows], the scale_inv of each row; with block scales, that of the
            rowwise copy. None for matrices with one scale each.
        amax: float32 [groups], the maximum of each group's given amax and its own.
    """

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    scale_inv: jax.Array
    row_scale_inv: jax.Array | None
    amax: jax.Array | None


@checked
def groups_of(splits: jax.Array, rows: int) -> Groups:
    """Returns the places of groups in a matrix of ``rows`` rows.

    Splits are invalid if one is negative or their sum exceeds ``rows``. They raise no error,
    because only the device knows them. Instead every group is empty, every scale_inv is NaN, and
    the results of ``finish_rows``, ``zero_unused`` and ``column_sums`` are NaN.

    Args:
        splits: int32 or int64 [groups], the number of rows of each group, in order.
        rows: number of rows of the matrix.

    Raises:
        TypeError: ``splits`` is neither int32 nor int64.
        ValueError: ``splits`` does not have one dimension.
        NotImplementedError: ``splits`` does not have 1 to 1023 groups, or there are about 2^31
            rows.
    """
    name = "grouped_offsets"
    splits = _checks.has_ndim(name, "splits", splits, 1, ["int32", "int64"])
    count = splits.size
    if not 1 <= count <= _MAX_GROUPS:
        raise NotImplementedError(f"{name}: groups must be 1 to {_MAX_GROUPS}, got {count}")
    if not 0 <= rows <= _MOST_ROWS - (count + 1) * ALIGN:
        raise NotImplementedError(
            f"{name}: rows must be from 0 to 2^31 - 1 with padding, got {rows}"
        )
    table = whole_call(_OP, name, {"splits": splits}, rows=rows)["table"]
    return Groups(table, rows, count)


@checked
def check_rows(name: str, rows: int, groups: Groups) -> None:
    """Raises ValueError unless ``groups`` was made for a matrix of ``rows`` rows.

    ``name`` is the name of the calling function, for the error.
    """
    if rows != groups.rows:
        raise ValueError(f"{name}: groups must be of {rows} rows, got groups of {groups.rows} rows")


def _of_groups(name: str, groups: int, **values: Any) -> dict[str, jax.Array]:
    """Returns those of ``values`` that are given, float32 [groups], after their checks."""
    found = {}
    for each, value in values.items():
        if value is not None:
            found[each] = _checks.has_dtype(name, each, value, ["float32"], (groups,))
    return found


@checked
def quantize_groups(
    x: jax.Array,
    groups: Groups,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    scale_inv: jax.Array | None = None,
) -> GroupedOutput:
    """Quantizes groups of rows in one pass: q = saturating_cast(float(x) * scale[g]) for group g.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        groups: places of the groups in the rows, from ``groups_of``.
        scale: float32 [groups].
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols]; rows after the last group have undefined
            values.
        columnwise: make the columnwise copy, [cols, groups.columns]. Each group begins at a
            multiple of 16 columns and has at least 16; columns beyond its rows are zeros.
        amax: float32 [groups]; the result's ``amax`` is then max(amax, max |x|) of each group,
            where NaN counts as largest. None computes no amax.
        scale_inv: float32 [groups] to use instead of 1 / scale.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or neither a copy nor an amax is requested.
    """
    x = _checks.matrix_to_cast(_OP, x)
    rows, cols = x.shape
    check_rows(_OP, rows, groups)
    dtype = jnp.dtype(_checks.fp8_dtype_of(_OP, fp8_dtype))
    results: dict[str, Any] = {}
    if rowwise:
        results = {"rowwise": _S((rows, cols), dtype), "row_scale_inv": _S((rows,), jnp.float32)}
    if columnwise:
        results["columnwise"] = _S((cols, groups.columns), dtype)
    given = _of_groups(_OP, groups.num_groups, scale=scale, amax=amax, scale_inv=scale_inv)
    return _quantized("grouped_quantize", results, {**given, "x": x, "table": groups.table}, groups)


def _quantized(
    function: str, results: dict[str, Any], given: dict[str, Any], groups: Groups | int
) -> GroupedOutput:
    """Calls a cast of groups; ``groups`` are the places of the groups, or their number."""
    if not {"rowwise", "columnwise"} & set(results) and "amax" not in given:
        raise ValueError(f"{_OP}: rowwise or columnwise must be True, got False for both")
    inverse_given = "scale_inv" in given
    if not inverse_given:
        count = groups if isinstance(groups, int) else groups.num_groups
        results = {**results, "scale_inv": _S((count,), jnp.float32)}
    made = call(_OP, function, results, **given, inverse_given=inverse_given)
    return GroupedOutput(*(made.get(name) for name in GroupedOutput._fields))


@checked
def quantize_matrices(
    matrices: jax.Array | Sequence[jax.Array],
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    groups: Groups | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    scale_inv: jax.Array | None = None,
) -> GroupedOutput:
    """Quantizes one matrix for each group, all of one shape and dtype, in one launch.

    Args:
        matrices: one float32, float16 or bfloat16 matrix [rows, cols] for each group, or one array
            [groups, rows, cols].
        scale: float32 [groups].
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        groups: skips the matrices of empty groups, whose FP8 data is undefined and whose amax is
            the given one. None quantizes all.
        rowwise, columnwise: the copies to make: [groups, rows, cols], and its transpose [groups,
            cols, rows].
        amax: float32 [groups]; the result's ``amax`` is then max(amax, max |x|) of each group,
            where NaN counts as largest. None computes no amax.
        scale_inv: float32 [groups] to use instead of 1 / scale.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or neither a copy nor an amax is requested.
    """
    name = "grouped_quantize_matrices"
    if isinstance(matrices, (list, tuple)):
        for each in matrices:
            _checks.same_shape(
                name, "matrices", each, _checks.matrix(name, "matrices", matrices[0])
            )
        count, shape = len(matrices), matrices[0].shape
        passed: Any = list(matrices)
    else:
        stack = _checks.has_ndim(name, "matrices", matrices, 3)
        count, shape, passed = stack.shape[0], stack.shape[1:], Stacked(stack)
    dtype = jnp.dtype(_checks.fp8_dtype_of(_OP, fp8_dtype))
    results = {}
    if rowwise:
        results["rowwise"] = _S((count, *shape), dtype)
    if columnwise:
        results["columnwise"] = _S((count, *shape[::-1]), dtype)
    given = _of_groups(name, count, scale=scale, amax=amax, scale_inv=scale_inv)
    if groups is not None:
        given["table"] = groups.table
    return _quantized(name, results, {**given, "matrices": passed}, count)


@checked
def block_quantize_matrices(
    matrices: jax.Array,
    fp8_dtype: Any,
    *,
    groups: Groups,
    rowwise: bool = True,
    columnwise: bool = True,
    scales: str = "pow2",
    eps: float = 0.0,
) -> GroupedOutput:
    """Quantizes one matrix for each group with a scale for each 128x128 block, in one launch.

    Args:
        matrices: [groups, rows, cols] float32, float16 or bfloat16.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        groups: skips the matrices of empty groups on a GPU; a CPU quantizes all.
        rowwise: make [groups, rows, cols], whose row_scale_inv is float32 [groups,
            *scale_shape(rows, cols, 128)].
        columnwise: make [groups, cols, rows], whose scale_inv is float32 [groups,
            *scale_shape(cols, rows, 128)].
        scales: "pow2", "fp32" or "server", as in ``block_quantize``.
        eps: smallest amax of a block.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``scales`` is unknown.
    """
    name = "grouped_block_quantize_matrices"
    dtype = _checks.fp8_dtype_of(name, fp8_dtype)
    stack = _checks.has_ndim(name, "matrices", matrices, 3)
    count, *shape = stack.shape
    results: dict[str, Any] = {}
    for side, is_wanted in (("rowwise", rowwise), ("columnwise", columnwise)):
        if is_wanted:
            results[side] = _S((count, *shape), jnp.dtype(dtype))
            lines = count, *scale_shape(shape[0], shape[1], _BLOCK)
            results[f"{side}_scale_inv"] = _S(lines, jnp.float32)
        shape = shape[::-1]
    options: dict[str, Any] = {"block_rows": _BLOCK, "scales": scales, "eps": eps}

    def on_cpu(stack: jax.Array, table: jax.Array) -> dict[str, jax.Array]:
        def one(matrix: jax.Array) -> dict[str, jax.Array]:
            made = block_quantize(matrix, dtype, rowwise=rowwise, columnwise=columnwise, **options)
            return {each: getattr(made, each) for each in results}

        return jax.lax.map(one, stack)

    def on_gpu(stack: jax.Array, table: jax.Array) -> dict[str, jax.Array]:
        number = scales_number(name, scales, None)
        given = {"matrices": Stacked(stack), "table": table, "eps": float(eps), "scales": number}
        return call(_OP, name, results, **given)

    operands = vary_alike([stack, groups.table])
    made = jax.lax.platform_dependent(*operands, cpu=on_cpu, cuda=on_gpu)
    return blocks_of(made)


def blocks_of(made: dict[str, Any]) -> GroupedOutput:
    """Returns what a cast in blocks wrote, by parameter, as a ``GroupedOutput``."""
    row, col, col_scales, row_scales = map(
        made.get, ("rowwise", "columnwise", "columnwise_scale_inv", "rowwise_scale_inv")
    )
    return GroupedOutput(row, col, col_scales, row_scales, None)


@checked
def block_values_of_columns(
    fp8_data: jax.Array, scale_inv: jax.Array, column_ends: jax.Array
) -> jax.Array:
    """Decodes a columnwise copy with block scales to float32 [cols, columns].

    Args:
        fp8_data: FP8 [cols, columns].
        scale_inv: float32 [lines, cols rounded up to 4].
        column_ends: int32 [groups]; columns after the last group get undefined values.
    """
    at = jnp.arange(fp8_data.shape[1], dtype=jnp.int32)
    group = group_of(column_ends, at)
    begin = begins_of(column_ends)[group]
    line = begin // _BLOCK + group + jnp.maximum(at - begin, 0) // _BLOCK
    factor = scale_inv[jnp.minimum(line, scale_inv.shape[0] - 1), : fp8_data.shape[0]]
    return decode(fp8_data).astype(jnp.float32) * factor.T


@checked
def scales_of(
    amax: jax.Array, fp8_dtype: Any, *, eps: float = 0.0, pow2: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes each group's scale from its amax, by the rules of ``current_scale``.

    Args:
        amax: float32 [groups].
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        eps: smallest amax, zero or more.
        pow2: round scales down to powers of two.

    Returns:
        (scale, scale_inv), each float32 [groups].

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: ``amax`` does not have one dimension.
        jax.errors.JaxRuntimeError: ``eps`` is negative; raised when the program runs.
    """
    name = "grouped_scales"
    amax = _checks.has_ndim(name, "amax", amax, 1, ["float32"])
    limit = float(jnp.finfo(_checks.fp8_dtype_of(name, fp8_dtype)).max)
    made = whole_call(_OP, name, {"amax": amax}, fp8_max=limit, eps=float(eps), pow2=bool(pow2))
    return made["scale"], made["scale_inv"]


@checked
def first_scales(
    amax: jax.Array,
    groups: Groups,
    due: jax.Array,
    scale: jax.Array,
    scale_inv: jax.Array,
    fp8_max: float,
    *,
    margin: int = 0,
    pow2: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the first scales of delayed scaling, from amax values instead of an amax history.

    Each group with rows whose ``due`` is 1 gets a scale and scale_inv, and its ``due`` becomes 0.
    If its amax is 0, infinite or NaN, only ``due`` changes. Other groups do not change.

    Args:
        amax, scale, scale_inv: float32 [groups].
        groups: places of the groups in the rows, from ``groups_of``.
        due: int32 [groups]; 0 for each group that already has a scale, otherwise 1.
        fp8_max: the format's largest value, 448 (E4M3) or 57344 (E5M2).
        margin: exponent of a power of two that scales are divided by, as headroom.
        pow2: round scales down to powers of two.

    Returns:
        The new (due, scale, scale_inv).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    given = {"amax": amax, "due": due, "scale": scale, "scale_inv": scale_inv}
    options: dict[str, Any] = {"fp8_max": float(fp8_max), "margin": margin, "pow2": bool(pow2)}
    made = _of_rows("grouped_first_scales", given, groups, **options)
    return made["due"], made["scale"], made["scale_inv"]


def _of_rows(
    function: str, given: dict[str, Any], groups: Groups, **options: Any
) -> dict[str, jax.Array]:
    """Calls a function that reads the table of groups."""
    given = {**given, "table": groups.table}
    return whole_call(_OP, function, given, extents={"g": groups.num_groups}, **options)


@checked
def finish_rows(out: jax.Array, groups: Groups, bias: jax.Array | None = None) -> jax.Array:
    """Returns ``out`` with each group's bias added to its rows, and zeros after the last group.

    Args:
        out: [rows, cols] float32, float16 or bfloat16.
        groups: places of the groups in the rows, from ``groups_of``.
        bias: [groups, cols] in the dtype of ``out``; None adds nothing.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``groups`` was made for another number of rows.
    """
    name = "grouped_finish"
    out = _checks.matrix(name, "out", out)
    check_rows(name, out.shape[0], groups)
    return _of_rows(name, {"out": out, "bias": bias}, groups)["out"]


@checked
def zero_unused(out: jax.Array, groups: Groups) -> jax.Array:
    """Returns ``out`` [groups, ...] with zeros in ``out[g]`` for each group g without rows.

    ``out`` is float32, float16 or bfloat16.
    """
    rows = jnp.asarray(out).reshape(groups.num_groups, -1)
    return _of_rows("grouped_clear", {"out": rows}, groups)["out"].reshape(jnp.shape(out))


@checked
def decode(fp8_data: jax.Array) -> jax.Array:
    """Converts E4M3 or E5M2 data of any shape to bfloat16, exactly and without a scale_inv."""
    name = "grouped_decode"
    fp8_data = _checks.has_dtype(name, "fp8_data", fp8_data, _checks.FP8)
    made = whole_call(_OP, name, {"fp8_data": fp8_data.reshape(-1)})
    return made["out"].reshape(fp8_data.shape)


@checked
def scale_rows(out: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns ``out`` [rows, ...] with each row multiplied by its factor in float32.

    ``out`` is float32, float16 or bfloat16, which the result has, too; ``factor`` is float32
    [rows].
    """
    name = "grouped_scale_rows"
    out = _checks.has_dtype(name, "out", out, _checks.FLOATS)
    given = {"out": out.reshape(out.shape[0], -1), "factor": factor}
    return whole_call(_OP, name, given)["out"].reshape(out.shape)


@checked
def column_sums(x: jax.Array, groups: Groups) -> jax.Array:
    """Sums the rows of each group of ``x`` [rows, cols] in float32, deterministically.

    ``x`` is float32, float16 or bfloat16. The result is [groups, cols] in its dtype. ``groups`` of
    another number of rows raise ValueError.
    """
    name = "grouped_sum"
    x = _checks.matrix_to_cast(name, x)
    check_rows(name, x.shape[0], groups)
    return _of_rows(name, {"x": x}, groups)["out"]
