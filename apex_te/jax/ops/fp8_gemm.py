"""FP8 GEMMs with one scale for each tensor or block: fprop, dgrad and wgrad.

On a GPU cuBLASLt multiplies; on a CPU the operands are decoded and multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...runtime import scratch_sizes
from .._call import call
from . import _checks
from ._checked import checked
from ._rows import rowwise
from .block_quantize import scale_dims, unpadded, with_padding

__all__ = ["bias_dtype", "block_scaled_gemm", "fp8_gemm", "shared_product"]

_S = jax.ShapeDtypeStruct
_MULTIPLE = 16  # cuBLASLt reads FP8 operands in 16-byte units along K and writes N in units of 16
_ROWS = 4  # it multiplies block-scaled operands in units of so many rows
_SLICE = 128


@checked
def bias_dtype(out_dtype: Any) -> Any:
    """Returns the dtype of the bias: the output's, except bfloat16 for a float32 output."""
    dtype = jnp.dtype(out_dtype)
    return jnp.dtype(jnp.bfloat16) if dtype == jnp.float32 else dtype


def _prepare(
    name: str, a: Any, b: Any, out_dtype: Any, bias: Any, c: Any, inner: int
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], Any]:
    """Returns the operands, bias and c where they are given, and the output's dtype."""
    fnuz = [f"{dtype}uz" if dtype.endswith("fn") else f"{dtype}fnuz" for dtype in _checks.FP8]
    a = _checks.has_dtype(name, "a", a, [*_checks.FP8, *fnuz])
    b = _checks.has_dtype(name, "b", b, [*_checks.FP8, *fnuz])
    fits = min(a.ndim, b.ndim) > inner and a.shape[-inner:] == b.shape[-inner:]
    if not fits:
        raise ValueError(
            f"{name}: a and b must be [M, K] and [N, K], got {list(a.shape)} and {list(b.shape)}"
        )
    if "e5m2" in a.dtype.name and "e5m2" in b.dtype.name:
        raise NotImplementedError(
            f"{name}: one of a and b must have dtype float8_e4m3fn, got float8_e5m2 twice"
        )
    dtype = _checks.float_dtype_of(name, "out", out_dtype)
    rest = {}
    if bias is not None:
        bias = _checks.has_shape(name, "bias", jnp.asarray(bias), b.shape[: b.ndim - inner])
        rest["bias"] = bias.astype(bias_dtype(dtype))
    if c is not None:
        shape = (*a.shape[: a.ndim - inner], *b.shape[: b.ndim - inner])
        c = _checks.array(name, "c", c)
        if c.dtype != dtype:
            raise TypeError(f"{name}: c must have the dtype of the output, {dtype}, got {c.dtype}")
        rest["c"] = _checks.has_shape(name, "c", c, shape)
    return a, b, rest, dtype


def _decoded(fp8_data: jax.Array) -> jax.Array:
    results = {"out": _S(fp8_data.shape, jnp.float32)}
    return call("fp8_gemm", "fp8_decode", results, fp8_data=fp8_data)["out"]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies decoded operands in float32."""
    exact = jax.lax.Precision.HIGHEST
    return jnp.dot(a, b.T, precision=exact, preferred_element_type=jnp.float32)


def _padded(x: jax.Array, *multiples: int) -> jax.Array:
    """Returns ``x`` with zeros up to multiples of its extents; of FP8 data, as bytes."""
    pads = [(0, -extent % to) for extent, to in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


def _sum_of(total: jax.Array, rest: dict[str, jax.Array]) -> jax.Array:
    """Returns a finished GEMM plus bias and c, in its dtype."""
    out = total.astype(jnp.float32)
    for each in rest.values():
        out = out + each.astype(jnp.float32)
    return out.astype(total.dtype) if rest else total


def _empty(a: Any, b: Any, rest: dict[str, jax.Array], dtype: Any, inner: int) -> jax.Array:
    """Returns the result of a GEMM with K = 0 or without elements: bias + c, or zeros."""
    shape = (*a.shape[: a.ndim - inner], *b.shape[: b.ndim - inner])
    bias = rest["bias"].astype(dtype) if "bias" in rest else jnp.zeros((), dtype)
    out = jnp.broadcast_to(bias, shape)
    return _sum_of(out, {"c": rest["c"]}) if "c" in rest else out


@checked
def shared_product(
    name: str,
    product: Callable[..., jax.Array],
    operands: dict[str, jax.Array],
    scales: dict[str, tuple[str, jax.Array]],
    rest: dict[str, jax.Array],
    inner: int,
) -> jax.Array:
    """Multiplies sharded operands: each device multiplies its shard; sums over a sharded K follow.

    ``product`` is a function of a, b, their scales and a dict of bias and c, all as matrices. Each
    of ``scales`` comes with its dimensions in the rule; ``inner`` dimensions are contracted.
    """
    inputs = {**operands, **{n: x for n, (_, x) in scales.items()}, **rest}
    dims = {"a": "m k", "b": "n k", "bias": "n", "c": "m n"}
    dims |= {n: d for n, (d, _) in scales.items()}
    ranks = {letter: operands[n].ndim - inner for letter, n in (("m", "a"), ("n", "b"))}

    def parts(arrays: tuple[jax.Array, ...]) -> tuple[list[jax.Array], dict[str, jax.Array]]:
        return list(arrays[:4]), dict(zip(rest, arrays[4:], strict=True))

    def body(*arrays: jax.Array) -> tuple[jax.Array]:
        factors, others = parts(arrays)
        return (product(*factors, others),)

    def reduced(reduce: Callable[..., jax.Array], *arrays: jax.Array) -> tuple[jax.Array]:
        factors, others = parts(arrays)
        return (_sum_of(reduce("out", product(*factors, {})), others),)

    rule = ", ".join(f"{n}: {dims[n]}" for n in inputs) + " -> out: + m n"
    run = rowwise(
        name, rule, body, split="m n k", ranks={**ranks, "k": inner}, reduced=reduced, fold="m n"
    )
    return run(*inputs.values())[0]


@checked
def fp8_gemm(
    a: jax.Array,
    b: jax.Array,
    a_scale_inv: jax.Array,
    b_scale_inv: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    bias: jax.Array | None = None,
    use_split_accumulator: bool = False,
    c: jax.Array | None = None,
    inner: int = 1,
) -> jax.Array:
    """Computes out[M, N] = (a[M, K] @ b[N, K].T) * a_scale_inv * b_scale_inv + bias + c.

    Args:
        a: [M, K] FP8.
        b: [N, K] FP8.
        a_scale_inv, b_scale_inv: one float32 element each.
        out_dtype: bfloat16, float16 or float32.
        bias: [N], converted to the output's dtype, or to bfloat16 for a float32 output; None adds
            nothing.
        use_split_accumulator: keep partial sums in float32 (slower, more exact); a CPU always does.
        c: [M, N] in the output's dtype, such as a residual, added before rounding; None adds
            nothing.
        inner: number of dimensions of K, the last ones of a and b. M and N may also stand for
            several dimensions, which the result keeps.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
        NotImplementedError: both operands are E5M2.
    """
    a, b, rest, dtype = _prepare("fp8_gemm", a, b, out_dtype, bias, c, inner)
    scales = {
        "a_scale_inv": _checks.is_scalar("fp8_gemm", "a_scale_inv", a_scale_inv),
        "b_scale_inv": _checks.is_scalar("fp8_gemm", "b_scale_inv", b_scale_inv),
    }
    if a.size == 0 or b.size == 0:
        return _empty(a, b, rest, dtype, inner)

    def on_cpu(a: Any, b: Any, scales: Any, rest: Any) -> jax.Array:
        results = {"out": _S((a.shape[0], b.shape[0]), dtype)}
        given = {"product": _product(_decoded(a), _decoded(b)), **scales, **rest}
        return call("fp8_gemm", "fp8_gemm_epilogue", results, **given, accumulate=False)["out"]

    def on_gpu(a: Any, b: Any, scales: Any, rest: Any) -> jax.Array:
        cols = b.shape[0]
        wide = {"bias": (_MULTIPLE,), "c": (1, _MULTIPLE)}
        given = {name: _padded(x, *wide[name]) for name, x in rest.items()}
        a, b = _padded(a, 1, _MULTIPLE), _padded(b, _MULTIPLE, _MULTIPLE)
        results = {
            "out": _S((a.shape[0], b.shape[0]), dtype),
            "workspace": _S((scratch_sizes.GEMM_BYTES,), jnp.uint8),
        }
        options = {"accumulate": False, "algorithm": 0}
        options["use_split_accumulator"] = bool(use_split_accumulator)
        made = call("fp8_gemm", "fp8_gemm", results, a=a, b=b, **scales, **given, **options)
        return made["out"][:, :cols]

    def product(a: Any, b: Any, a_scale: Any, b_scale: Any, rest: Any) -> jax.Array:
        given = {"a_scale_inv": a_scale, "b_scale_inv": b_scale}
        return jax.lax.platform_dependent(a, b, given, rest, cpu=on_cpu, cuda=on_gpu)

    whole = {name: ("_", scale) for name, scale in scales.items()}
    return shared_product("fp8_gemm", product, {"a": a, "b": b}, whole, rest, inner)


@checked
def block_scaled_gemm(
    a: jax.Array,
    b: jax.Array,
    a_scale_inv: jax.Array,
    b_scale_inv: jax.Array,
    *,
    a_block_rows: int = 1,
    b_block_rows: int = 128,
    out_dtype: Any = jnp.bfloat16,
    bias: jax.Array | None = None,
    c: jax.Array | None = None,
    inner: int = 1,
) -> jax.Array:
    """Computes out[M, N] = a @ b.T + bias + c of operands from ``block_quantize``.

    Args:
        a: [M, K] FP8.
        b: [N, K] FP8.
        a_scale_inv: float32 of shape ``block_quantize.scale_shape(M, K, a_block_rows)``, or
            unpadded.
        b_scale_inv: float32 of shape ``block_quantize.scale_shape(N, K, b_block_rows)``, or
            unpadded.
        a_block_rows: 1 (blocks of 1x128) or 128 (128x128).
        b_block_rows: 1 or 128, but not 128 if ``a_block_rows`` is 128.
        out_dtype: bfloat16, float16 or float32.
        bias: [N], converted to the output's dtype, or to bfloat16 for a float32 output; None adds
            nothing.
        c: [M, N] in the output's dtype, such as a residual, added before rounding; None adds
            nothing.
        inner: number of dimensions of K, the last ones of a and b. M and N may also stand for
            several dimensions, which the result keeps.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shapes of a, b, bias and c do not match.
        NotImplementedError: both operands are E5M2.
        jax.errors.JaxRuntimeError: a scale has another shape, or the numbers of block rows are not
            supported; raised when the program runs.
    """
    name = "block_scaled_gemm"
    a, b, rest, dtype = _prepare(name, a, b, out_dtype, bias, c, inner)
    if a.size == 0 or b.size == 0:
        return _empty(a, b, rest, dtype, inner)
    blocks = {"a_block_rows": a_block_rows, "b_block_rows": b_block_rows}

    def on_cpu(a: Any, b: Any, a_scale: Any, b_scale: Any, rest: Any) -> jax.Array:
        (rows, k), cols = a.shape, b.shape[0]
        a, b = _decoded(a), _decoded(b)
        total = jnp.zeros((rows, cols), jnp.float32)
        scales = {"a_scale_inv": a_scale, "b_scale_inv": b_scale}
        for i in range(-(-k // _SLICE)):
            part = slice(i * _SLICE, (i + 1) * _SLICE)
            given = {"product": _product(a[:, part], b[:, part]), "sum": total, **scales}
            places = {**blocks, "k": k, "slice": i}
            made = call("fp8_gemm", "fp8_block_accumulate", None, **given, **places)
            total = made["sum"]
        one = jnp.ones(1, jnp.float32)
        given = {"product": total, "a_scale_inv": one, "b_scale_inv": one, **rest}
        results = {"out": _S((rows, cols), dtype)}
        return call("fp8_gemm", "fp8_gemm_epilogue", results, **given, accumulate=False)["out"]

    def on_gpu(a: Any, b: Any, a_scale: Any, b_scale: Any, rest: Any) -> jax.Array:
        (rows, k), cols = a.shape, b.shape[0]
        multiple = _MULTIPLE if cols % _MULTIPLE or k % _MULTIPLE else _ROWS
        wide = {"bias": (_MULTIPLE,), "c": (multiple, _MULTIPLE)}
        given = {name: _padded(x, *wide[name]) for name, x in rest.items()}
        a, b = _padded(a, multiple, _MULTIPLE), _padded(b, _MULTIPLE, _MULTIPLE)
        given["a_scale_inv"] = _padded(a_scale, 1, multiple) if a_block_rows == 1 else a_scale
        given["b_scale_inv"] = _padded(b_scale, 1, _MULTIPLE) if b_block_rows == 1 else b_scale
        results = {
            "out": _S((a.shape[0], b.shape[0]), dtype),
            "workspace": _S((scratch_sizes.GEMM_BYTES,), jnp.uint8),
        }
        options = {**blocks, "accumulate": False, "algorithm": 0}
        made = call("fp8_gemm", "fp8_gemm_block", results, a=a, b=b, **given, **options)
        return made["out"][:rows, :cols]

    def product(a: Any, b: Any, a_scale: Any, b_scale: Any, rest: Any) -> jax.Array:
        given = a, b, with_padding(a_scale), with_padding(b_scale), rest
        return jax.lax.platform_dependent(*given, cpu=on_cpu, cuda=on_gpu)

    scales = {}
    for letter, side, x, scale_inv, block_rows in (
        ("m", "a", a, a_scale_inv, a_block_rows),
        ("n", "b", b, b_scale_inv, b_block_rows),
    ):
        scale_inv = jnp.asarray(scale_inv)
        if x.ndim == 2:
            scale_inv = unpadded(scale_inv, x.shape, block_rows)
        scales[f"{side}_scale_inv"] = scale_dims(letter, "k", block_rows), scale_inv
    return shared_product(name, product, {"a": a, "b": b}, scales, rest, inner)
