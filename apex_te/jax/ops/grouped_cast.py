"""Casts to FP8 of groups of rows that are gathered or computed where they are cast.

On a CPU, and for shapes and dtypes that the kernels do not take, the ops that they stand for run
one after the other, as on PyTorch's side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime.op_options import GATE, ClampedSwiglu, gate_arguments, scales_number
from .._call import call
from . import _checks, grouped_quantize
from ._checked import checked
from .grouped_quantize import ALIGN, GroupedOutput, Groups
from .swiglu import swiglu_bwd, swiglu_fwd

__all__ = [
    "Gated", "GatedGradient", "Gather", "SourceGrads", "block_quantize_source", "quantize_source",
]  # fmt: skip

_BLOCK, _VECTOR = 128, 8
_OP = "grouped_cast"
_S = jax.ShapeDtypeStruct


class Gather(NamedTuple):
    """Rows x[row_of[r]], zeros for -1."""

    x: jax.Array
    row_of: jax.Array


class Gated(NamedTuple):
    """Rows act(gate) * up * factor[r] of x [rows, 2F], after each group's bias is added to x."""

    x: jax.Array
    factor: jax.Array
    activation: str | ClampedSwiglu = "silu"
    bias: jax.Array | None = None


class GatedGradient(NamedTuple):
    """Rows of the gradient of ``Gated`` with respect to x; ``grad`` [rows, F] is its output's."""

    grad: jax.Array
    x: jax.Array
    factor: jax.Array
    activation: str | ClampedSwiglu = "silu"
    bias: jax.Array | None = None


class SourceGrads(NamedTuple):
    """Gradients of the factor [rows] and the bias [groups, 2F] of a ``GatedGradient``.

    They are None if they were not asked for.
    """

    factor: jax.Array | None
    bias: jax.Array | None


Source = Gather | Gated | GatedGradient


@checked
def quantize_source(
    source: Source,
    groups: Groups,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    scale_inv: jax.Array | None = None,
    factor_grad: bool = False,
    bias_grad: bool = False,
) -> tuple[GroupedOutput, SourceGrads]:
    """Quantizes the rows of a source with one scale for each group, as ``quantize_groups`` does.

    ``factor_grad`` and ``bias_grad`` ask for gradients, of a ``GatedGradient`` alone.
    """
    rows, cols = _shape(source)
    dtype = jnp.dtype(_checks.fp8_dtype_of(_OP, fp8_dtype))
    results: dict[str, Any] = {}
    if rowwise:
        results = {"rowwise": _S((rows, cols), dtype), "row_scale_inv": _S((rows,), jnp.float32)}
    if columnwise:
        results["columnwise"] = _S((cols, groups.columns), dtype)
    given = {"scale": scale, "amax": amax, "scale_inv": scale_inv}

    def cast(rows: jax.Array, own: Groups, given: Mapping[str, Any]) -> GroupedOutput:
        copies = {"rowwise": rowwise, "columnwise": columnwise}
        return grouped_quantize.quantize_groups(rows, own, fp8_dtype=dtype, **given, **copies)

    def kernel(lines: Any, source: Any, given: Any) -> tuple[dict[str, Any], GroupedOutput]:
        is_given = given["scale_inv"] is not None
        inverse = {} if is_given else {"scale_inv": _S((groups.num_groups,), jnp.float32)}
        given = {name: x for name, x in given.items() if x is not None}
        written = {**results, **inverse, **lines}
        made = call(_OP, "grouped_cast", written, **source, **given, inverse_given=is_given)
        return made, GroupedOutput(*(made.get(name) for name in GroupedOutput._fields))

    return _run(source, groups, given, cast, kernel, factor_grad, bias_grad)


@checked
def block_quantize_source(
    source: Source,
    groups: Groups,
    fp8_dtype: Any,
    *,
    columnwise_block_rows: int = 1,
    rowwise: bool = True,
    columnwise: bool = True,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
    factor_grad: bool = False,
    bias_grad: bool = False,
) -> tuple[GroupedOutput, SourceGrads]:
    """Quantizes the rows of a source in 1x128 blocks, as ``block_quantize_groups`` does.

    ``factor_grad`` and ``bias_grad`` are as in ``quantize_source``.
    """
    name = "block_quantize_source"
    number = scales_number(name, scales, pow2)
    options = {"columnwise_block_rows": columnwise_block_rows, "eps": float(eps)}
    results = grouped_quantize.block_results(
        name, _shape(source), groups, fp8_dtype, rowwise, columnwise
    )

    def cast(rows: jax.Array, own: Groups, _: Any) -> GroupedOutput:
        return grouped_quantize.block_quantize_groups(
            rows, own, fp8_dtype, rowwise=rowwise, columnwise=columnwise, scales=scales, pow2=pow2,
            **options,
        )  # fmt: skip

    def kernel(lines: Any, source: Any, _: Any) -> tuple[dict[str, Any], GroupedOutput]:
        written = {**results, **lines}
        made = call(_OP, "grouped_block_cast", written, **source, **options, scales=number)
        return made, grouped_quantize.blocks_of(made)

    splits_halves = isinstance(source, GatedGradient) and source.grad.shape[1] % _BLOCK
    fused = None if splits_halves else kernel
    return _run(source, groups, {}, cast, fused, factor_grad, bias_grad)


def _shape(source: Source) -> tuple[int, int]:
    """Returns the shape of a source's rows."""
    if isinstance(source, Gather):
        return source.row_of.shape[0], source.x.shape[1]
    rows, cols = source.x.shape
    return rows, cols if isinstance(source, GatedGradient) else cols // 2


def _run(
    source: Source,
    groups: Groups,
    given: dict[str, Any],
    cast: Callable[..., GroupedOutput],
    kernel: Callable[..., tuple[dict[str, Any], GroupedOutput]] | None,
    factor_grad: bool,
    bias_grad: bool,
) -> tuple[GroupedOutput, SourceGrads]:
    """Casts a source's rows by a kernel on GPUs, and elsewhere, or for None, by ``cast``."""
    activation = getattr(source, "activation", "silu")
    gate = dict(zip(GATE, gate_arguments(_OP, activation), strict=True))
    fields = {name: x for name, x in source._asdict().items() if name != "activation"}

    def composed(fields: Any, table: Any, given: Any) -> Any:
        own = dataclasses.replace(groups, table=table)
        whole = fields if isinstance(source, Gather) else {**fields, "activation": activation}
        rows, grads = rows_of(type(source)(**whole), own, factor_grad, bias_grad)
        return cast(rows, own, given), grads

    def fused(fields: Any, table: Any, given: Any) -> Any:
        assert kernel is not None
        sums: dict[str, Any] = {}
        if factor_grad:  # rows that are not read stay 0
            rows, cols = fields["grad"].shape
            sums["partials"] = jnp.zeros((-(-cols // _BLOCK), rows), jnp.float32)
        lines = {}
        if bias_grad:
            lines["lines"] = _S((groups.columns // ALIGN, fields["x"].shape[1]), jnp.float32)
        arguments = {**fields, **sums, **gate, "interleaved": False, "table": table}
        made, out = kernel(lines, arguments, given)
        own = dataclasses.replace(groups, table=table)
        found = made["partials"].sum(0) if factor_grad else None
        of_bias = _bias_gradient(made["lines"], own, fields["x"].dtype) if bias_grad else None
        return out, SourceGrads(found, of_bias)

    on_gpu = fused if kernel is not None and _has_kernel(source) else composed
    return jax.lax.platform_dependent(fields, groups.table, given, cpu=composed, cuda=on_gpu)


def _has_kernel(source: Source) -> bool:
    """Returns True if csrc/grouped_cast takes a source: vectors, and gated rows in 16 bits."""
    is_gather = isinstance(source, Gather)
    fits = source.x.shape[1] % (_VECTOR if is_gather else 2 * _VECTOR) == 0
    return fits and (is_gather or source.x.dtype.itemsize == 2)


def _bias_gradient(lines: jax.Array, groups: Groups, dtype: Any) -> jax.Array:
    """Adds the lines of column sums that a kernel wrote for each 16 columns of a group."""
    counts = jnp.diff(groups.column_ends // ALIGN, prepend=0)
    each = grouped_quantize.groups_of(counts, len(lines))
    sums = grouped_quantize.column_sums(lines, each)
    return grouped_quantize.zero_unused(sums, groups).astype(dtype)


@checked
def rows_of(
    source: Source, groups: Groups, factor_grad: bool = False, bias_grad: bool = False
) -> tuple[jax.Array, SourceGrads]:
    """Returns a source's rows by the ops that stand for the kernels, and the gradients."""
    if isinstance(source, Gather):
        return _gathered(*source), SourceGrads(None, None)
    x, dtype, gate = source.x, source.x.dtype, {"activation": source.activation}
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
    rows = swiglu_bwd(grad * factor, wide, **gate).astype(dtype)
    if bias_grad:
        of_bias = grouped_quantize.column_sums(rows.astype(jnp.float32), groups).astype(dtype)
    return rows, SourceGrads(of_factor, of_bias)


def _gathered(x: jax.Array, row_of: jax.Array) -> jax.Array:
    """Returns rows of ``x``, zeros for -1 and NaN for other numbers that are no row of it."""
    is_row = (row_of >= 0) & (row_of < len(x))
    rows = x[jnp.where(is_row, row_of, 0)]
    other = jnp.where(row_of == -1, 0, jnp.nan).astype(x.dtype)
    return jnp.where(is_row[:, None], rows, other[:, None])
