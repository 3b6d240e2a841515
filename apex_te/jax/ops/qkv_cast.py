"""Casts a fused QKV projection's weight, and the gradient of its output, to FP8.

Orders of heads are those of ``apex_te.ops.qkv_cast``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from . import _checks
from ._checked import checked
from ._contract import local_call, run
from ._rows import rowwise_by_name
from .fp8_output import FP8Output, wanted

__all__ = ["QkvGradOutput", "qkv_cast_grad", "qkv_cast_weight"]

_OP = "qkv_cast"


class QkvGradOutput(NamedTuple):
    """FP8 data of a QKV projection's output gradient.

    Attributes:
        output: FP8 copies of the gradient, a matrix [tokens, features].
        dbias: [features] in the gradient's dtype, its column sums; None if not requested.
    """

    output: FP8Output
    dbias: jax.Array | None


@checked
def qkv_cast_weight(
    weight: jax.Array,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    repeats: int,
    groups: int,
    columnwise: bool = False,
    amax: jax.Array | None = None,
) -> FP8Output:
    """Casts an interleaved QKV weight to FP8 and sorts the rowwise copy into queries, keys, values.

    Each element becomes saturating_cast(float(weight) * scale). The columns may be sharded over
    devices.

    Args:
        weight: [groups * (repeats + 2) * size, cols] float32, float16 or bfloat16; size is the
            number of rows of a head. Heads are ordered by group: query heads, key head, value head.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2; on a CPU also their fnuz forms.
        repeats: number of query heads in a group.
        groups: number of groups, each with one key head and one value head.
        columnwise: also make the transpose, [cols, rows], whose columns keep the weight's order.
        amax: one float32 element; the result's ``amax`` is then max(amax, max |weight|), before
            scaling, where NaN counts as largest. None computes no amax.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    name = "qkv_cast_weight"
    dtype = _checks.fp8_dtype_of(name, fp8_dtype, fnuz=True)
    weight = _checks.matrix_to_cast(name, weight, "weight")
    rows = weight.shape[0]
    if repeats < 0 or groups < 1 or rows % ((repeats + 2) * groups):
        raise ValueError(
            f"{name}: weight must have a multiple of (repeats + 2) * groups rows below 2^31, got"
            f" {rows} rows with repeats {repeats} and groups {groups}"
        )
    out = run(
        _OP, name, {"weight": weight, "scale": scale, "amax": amax},
        ["out_columnwise"] * bool(columnwise) + ["scale_inv"], dtypes={"F": dtype},
        repeats=repeats, groups=groups,
    )  # fmt: skip
    copies = out["out_rowwise"], out.get("out_columnwise")
    return FP8Output(*copies, out["scale_inv"], out.get("amax"))


@checked
def qkv_cast_grad(
    queries: jax.Array | None,
    keys: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    interleaved: bool,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    with_dbias: bool = False,
) -> QkvGradOutput:
    """Casts the gradient of a QKV projection's output to FP8, from the gradients of its heads.

    The copies equal those that ``cast_transpose`` makes of the joined matrix [tokens, features].
    Tokens may be sharded over devices.

    Args:
        queries: [..., repeats * groups, size] float32, float16 or bfloat16, with one or two leading
            dimensions of tokens; None for a projection to keys and values.
        keys, values: [..., groups, size] in the same dtype.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2; on a CPU also their fnuz forms.
        interleaved: order the features by group (query heads, key head, value head). If False, the
            order is all queries, all keys, all values.
        rowwise, columnwise: the copies to make: [tokens, features], and its transpose [features,
            tokens].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |gradient|), before
            scaling, where NaN counts as largest. None computes no amax.
        with_dbias: also return the column sums (deterministic).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or no copy is requested.
    """
    name = "qkv_cast_grad"
    dtype = _checks.fp8_dtype_of(name, fp8_dtype, fnuz=True)
    given = _heads(name, queries, keys, values)
    given["scale"] = _checks.is_scalar(name, "scale", scale)
    if amax is not None:
        given["amax"] = _checks.is_scalar(name, "amax", amax)
    dims = {"rowwise": "r c", "columnwise": "c r", "scale_inv": "_", "amax": "^", "dbias": "+ c"}
    names = [*wanted(name, rowwise, columnwise), "scale_inv"]
    names += [*(() if amax is None else ("amax",)), *(("dbias",) if with_dbias else ())]

    def body(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        heads = {n: tensors[n][:, None] for n in ("queries", "keys", "values") if n in tensors}
        return local_call(
            _OP, name, tensors | heads, names, {"F": dtype}, interleaved=bool(interleaved)
        )

    read = {"queries": "r q s", "keys": "r g s", "values": "r g s"}
    out = rowwise_by_name(name, given, read, {each: dims[each] for each in names}, body)
    output = FP8Output(*(out.get(each) for each in FP8Output._fields))
    return QkvGradOutput(output, out.get("dbias"))


def _heads(function: str, queries: Any, keys: Any, values: Any) -> dict[str, jax.Array]:
    """Returns the gradients of the heads as [tokens, heads, size] by parameter."""
    found = {}
    for name, x in (("keys", keys), ("values", values), ("queries", queries)):
        if x is None and name == "queries":
            continue
        x = _checks.array(function, name, x)
        if x.ndim not in (3, 4):
            raise ValueError(
                f"{function}: {name} must have 3 or 4 dimensions, got shape {list(x.shape)}"
            )
        found[name] = x if x.ndim == 4 else x[:, None]
    model = _checks.has_dtype(function, "keys", found["keys"], _checks.FLOATS)
    outer, inner, groups, size = model.shape
    same = [model.dtype.name]
    _checks.has_dtype(function, "values", found["values"], same, model.shape)
    if queries is not None:
        heads = found["queries"].shape[2]
        if not groups or heads < groups or heads % groups:
            raise ValueError(
                f"{function}: queries must have a multiple of the {groups} heads of keys, got"
                f" {heads}"
            )
        shape = outer, inner, heads, size
        _checks.has_dtype(function, "queries", found["queries"], same, shape)
    order = [name for name in ("queries", "keys", "values") if name in found]
    return {name: found[name].reshape(outer * inner, *found[name].shape[2:]) for name in order}
