"""Casts to FP8 of groups of rows that are gathered or computed where they are cast.

On a CPU, and for shapes and dtypes that the kernels do not take, the ops that they stand for run
one after the other, as on PyTorch's side.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime.op_options import BLOCK_SCALES, GATE, ClampedSwiglu, gate_arguments
from .._call import call
from .._partition import vary_alike
from . import _checks, grouped_quantize
from ._checked import checked
from .block_quantize import block_quantize, scale_shape
from .grouped_quantize import ALIGN, Alignment, GroupedOutput, Groups, begins_of, group_of
from .swiglu import swiglu_bwd, swiglu_fwd

__all__ = [
    "BlockRule", "Gated", "GatedGradient", "Gather", "GroupScales", "SourceGrads", "cast_source",
    "rows_of",
]  # fmt: skip

_BLOCK, _VECTOR = 128, 8
_OP = "grouped_cast"
_S = jax.ShapeDtypeStruct


class Gather(NamedTuple):
    """Source of rows x[row_of[r]], such as tokens sorted by expert.

    Attributes:
        x: [tokens, cols] float32, float16 or bfloat16.
        row_of: int32 [rows], from ``moe_permute.tokens_of_rows``; -1 is a row of zeros.
    """

    x: jax.Array
    row_of: jax.Array


class Gated(NamedTuple):
    """Source of rows act(gate) * up * factor[r], as ``swiglu`` computes them.

    Attributes:
        x: [rows, 2F] float32, float16 or bfloat16, gates first.
        factor: float32 [rows], such as the experts' probabilities.
        activation: a name that ``swiglu`` accepts, such as "silu", or a ``ClampedSwiglu``.
        bias: [groups, 2F] in the dtype of x, added to the rows of each group; None adds nothing.
    """

    x: jax.Array
    factor: jax.Array
    activation: str | ClampedSwiglu = "silu"
    bias: jax.Array | None = None


class GatedGradient(NamedTuple):
    """Source of rows of the gradient of ``Gated`` with respect to x, [rows, 2F].

    Attributes:
        grad: [rows, F] in the dtype of x, gradient of the gated rows.
        x, factor, activation, bias: as in ``Gated``.
    """

    grad: jax.Array
    x: jax.Array
    factor: jax.Array
    activation: str | ClampedSwiglu = "silu"
    bias: jax.Array | None = None


Source = Gather | Gated | GatedGradient


class GroupScales(NamedTuple):
    """Scales of a cast with one scale for each group, float32 [groups] each.

    Attributes:
        scale: factors of the values.
        scale_inv: used instead of 1 / scale; None computes it.
        amax: each group's result is the maximum of this and its own; None computes no amax.
    """

    scale: jax.Array
    scale_inv: jax.Array | None = None
    amax: jax.Array | None = None


class BlockRule(NamedTuple):
    """Options of ``block_quantize`` for a cast in blocks of 1x128.

    Attributes:
        scales: "pow2" rounds scales down to powers of two, "fp32" does not, "server" divides by
            amax / fp8_max, as vLLM's casts do.
        eps: smallest amax of a block.
        columnwise_block_rows: 1, or 128 for columnwise blocks of 128x128.
    """

    scales: str = "pow2"
    eps: float = 0.0
    columnwise_block_rows: int = 1


class SourceGrads(NamedTuple):
    """Gradients that ``cast_source`` computes; None for one that was not requested.

    Attributes:
        factor: float32 [rows].
        bias: [groups, 2F] in the dtype of x.
    """

    factor: jax.Array | None
    bias: jax.Array | None


@checked
def cast_source(
    source: Source,
    groups: Groups,
    fp8_dtype: Any,
    scaling: GroupScales | BlockRule,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    factor_grad: bool = False,
    bias_grad: bool = False,
) -> tuple[GroupedOutput, SourceGrads]:
    """Quantizes rows that are gathered or computed, with a scale for each group or 1x128 block.

    Args:
        source: a ``Gather``, ``Gated`` or ``GatedGradient``, which describes rows [rows, cols].
        groups: places of the groups in the rows, from ``groups_of``.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        scaling: a ``GroupScales`` or ``BlockRule``.
        rowwise, columnwise: the copies to make, [rows, cols] and [cols, groups.columns].
        factor_grad, bias_grad: also compute the gradient of the factor or bias of a
            ``GatedGradient``.

    Returns:
        (output, gradients), with scale_inv as in ``quantize_groups``, or for a ``BlockRule`` as in
        ``apex_te.ops.grouped_quantize.block_quantize_groups``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: ``groups`` was made for another number of rows, or ``activation`` is not
            supported.
    """
    dtype = jnp.dtype(_checks.fp8_dtype_of(_OP, fp8_dtype))
    shape, in_blocks = _shape(source), isinstance(scaling, BlockRule)
    grouped_quantize.check_rows(_OP, shape[0], groups)
    results = _results(shape, groups, dtype, rowwise, columnwise, in_blocks)
    activation = getattr(source, "activation", "silu")
    gate = dict(zip(GATE, gate_arguments(_OP, activation), strict=True))
    fields = {name: x for name, x in source._asdict().items() if name != "activation"}
    if not isinstance(source, Gather):
        _checks.has_dtype(_OP, "factor", source.factor, ["float32"], [shape[0]])
    scales = () if in_blocks else scaling

    def composed(fields: Any, table: Any, scales: Any) -> Any:
        own = dataclasses.replace(groups, table=table)
        whole = fields if isinstance(source, Gather) else {**fields, "activation": activation}
        rows, grads = rows_of(type(source)(**whole), own, factor_grad, bias_grad)
        if isinstance(scaling, BlockRule):
            return _block_cast(rows, own, dtype, scaling, rowwise, columnwise), grads
        out = grouped_quantize.quantize_groups(
            rows, own, scales.scale, dtype, rowwise=rowwise, columnwise=columnwise,
            amax=scales.amax, scale_inv=scales.scale_inv,
        )  # fmt: skip
        return out, grads

    def fused(fields: Any, table: Any, scales: Any) -> Any:
        given, written = {**fields, **gate, "interleaved": False, "table": table}, dict(results)
        if factor_grad:  # rows that are not read stay 0
            rows, cols = fields["grad"].shape
            given["partials"] = jnp.zeros((-(-cols // _BLOCK), rows), jnp.float32)
        if bias_grad:
            written["lines"] = _S((groups.columns // ALIGN, fields["x"].shape[1]), jnp.float32)
        if isinstance(scaling, BlockRule):
            options = {**scaling._asdict(), "scales": BLOCK_SCALES.index(scaling.scales)}
            made = call(_OP, "grouped_block_cast", written, **given, **options)
            out = grouped_quantize.blocks_of(made)
        else:
            given |= {name: x for name, x in scales._asdict().items() if x is not None}
            if scales.scale_inv is None:
                written["scale_inv"] = _S((groups.num_groups,), jnp.float32)
            given["inverse_given"] = scales.scale_inv is not None
            made = call(_OP, "grouped_cast", written, **given)
            out = GroupedOutput(*(made.get(name) for name in GroupedOutput._fields))
        of_bias = None
        if bias_grad:
            own = dataclasses.replace(groups, table=table)
            of_bias = _bias_gradient(made["lines"], own).astype(fields["x"].dtype)
        return out, SourceGrads(made["partials"].sum(0) if factor_grad else None, of_bias)

    on_gpu = fused if _has_kernel(source, in_blocks) else composed
    leaves, tree = jax.tree.flatten((fields, groups.table, scales))
    given = tree.unflatten(vary_alike(leaves))
    return jax.lax.platform_dependent(*given, cpu=composed, cuda=on_gpu)


def _shape(source: Source) -> tuple[int, int]:
    """Returns the shape of a source's rows."""
    if isinstance(source, Gather):
        return source.row_of.shape[0], source.x.shape[1]
    rows, cols = source.x.shape
    return rows, cols if isinstance(source, GatedGradient) else cols // 2


def _results(
    shape: tuple[int, int], groups: Groups, dtype: Any, rowwise: bool, columnwise: bool,
    in_blocks: bool,
) -> dict[str, Any]:  # fmt: skip
    """Returns shapes and dtypes of what a kernel writes, by parameter."""
    rows, cols = shape
    found: dict[str, Any] = {}
    if rowwise:
        name = "rowwise_scale_inv" if in_blocks else "row_scale_inv"
        scales = scale_shape(rows, cols, 1) if in_blocks else (rows,)
        found = {"rowwise": _S(shape, dtype), name: _S(scales, jnp.float32)}
    if columnwise:
        found["columnwise"] = _S((cols, groups.columns), dtype)
        if in_blocks:
            lines = groups.lines, -(-cols // 4) * 4
            found["columnwise_scale_inv"] = _S(lines, jnp.float32)
    return found


def _has_kernel(source: Source, in_blocks: bool) -> bool:
    """Returns True if csrc/grouped_cast takes a source: vectors, and gated rows in 16 bits.

    A block must not have gradients of gates and of ups.
    """
    if isinstance(source, Gather):
        return source.x.shape[1] % _VECTOR == 0
    if in_blocks and isinstance(source, GatedGradient) and source.grad.shape[1] % _BLOCK:
        return False
    return source.x.shape[1] % (2 * _VECTOR) == 0 and source.x.dtype.itemsize == 2


def _bias_gradient(lines: jax.Array, groups: Groups) -> jax.Array:
    """Adds the lines of column sums that a kernel wrote for each 16 columns of a group."""
    counts = jnp.diff(groups.column_ends // ALIGN, prepend=0)
    each = grouped_quantize.groups_of(counts, len(lines))
    return grouped_quantize.zero_unused(grouped_quantize.column_sums(lines, each), groups)


@checked
def rows_of(
    source: Source, groups: Groups, factor_grad: bool = False, bias_grad: bool = False
) -> tuple[jax.Array, SourceGrads]:
    """Returns a source's rows by the ops that stand for the kernels, and the gradients."""
    if isinstance(source, Gather):
        is_row = (source.row_of >= 0) & (source.row_of < len(source.x))
        rows = source.x[jnp.where(is_row, source.row_of, 0)]
        other = jnp.where(source.row_of == -1, 0, jnp.nan).astype(rows.dtype)
        return jnp.where(is_row[:, None], rows, other[:, None]), SourceGrads(None, None)
    x, dtype = source.x, source.x.dtype
    gate: dict[str, Any] = {"activation": source.activation}
    if source.bias is not None:
        x = grouped_quantize.finish_rows(x, groups, source.bias)
    wide, factor = x.astype(jnp.float32), source.factor[:, None]
    if isinstance(source, Gated):
        return (swiglu_fwd(wide, **gate) * factor).astype(dtype), SourceGrads(None, None)
    grad = source.grad.astype(jnp.float32)
    of_factor = of_bias = None
    if factor_grad:
        used = jnp.arange(len(x)) < groups.ends[-1]
        of_factor = jnp.where(used, (grad * swiglu_fwd(wide, **gate)).sum(1), 0)
    made: Any = swiglu_bwd(grad * factor, wide, **gate)
    rows = made.astype(dtype)
    if bias_grad:
        of_bias = grouped_quantize.column_sums(rows.astype(jnp.float32), groups).astype(dtype)
    return rows, SourceGrads(of_factor, of_bias)


def _block_cast(
    x: jax.Array, groups: Groups, dtype: Any, rule: BlockRule, rowwise: bool, columnwise: bool
) -> GroupedOutput:
    """Casts groups of rows in blocks by ``block_quantize``, of rows aligned to blocks."""
    options: dict[str, Any] = {"scales": rule.scales, "eps": rule.eps}
    by_row: Any = (None, None)
    by_column: Any = (None, None)
    if rowwise:
        by_row = block_quantize(x, dtype.name, columnwise=False, **options)[:2]
    if columnwise:
        options["columnwise_block_rows"] = rule.columnwise_block_rows
        aligned = Alignment.of(groups, _BLOCK)
        made = block_quantize(aligned.copies(x), dtype.name, rowwise=False, **options)
        by_column = _placed(aligned, *made[2:], rule.columnwise_block_rows)
    return GroupedOutput(by_row[0], by_column[0], by_column[1], by_row[1], None)


def _placed(
    aligned: Alignment, codes: Any, scales: Any, block_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Returns columnwise codes and scales of aligned rows in the places of the kernels."""
    groups, blocks = aligned.groups, aligned.rows // _BLOCK
    begins = begins_of(groups.column_ends)
    at = jnp.arange(groups.columns, dtype=jnp.int32)
    group = group_of(groups.column_ends, at)
    source = jnp.clip(aligned.begins[group] + at - begins[group], 0, aligned.rows - 1)
    moved = jax.lax.bitcast_convert_type(codes, jnp.uint8)[:, source]
    if block_rows == _BLOCK:
        scales = jnp.repeat(scales[:, :blocks].T, _BLOCK, 1)[:, : len(codes)]
        scales = jnp.pad(scales, ((0, 0), (0, -len(codes) % 4)), constant_values=1.0)
    first = begins // _BLOCK + jnp.arange(groups.num_groups)
    line = jnp.arange(groups.lines)
    group = jnp.searchsorted(first, line, side="right") - 1
    block = jnp.clip(aligned.begins[group] // _BLOCK + line - first[group], 0, blocks - 1)
    return jax.lax.bitcast_convert_type(moved, codes.dtype), scales[block]
