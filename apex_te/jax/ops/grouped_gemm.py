"""GEMMs of groups of rows, such as an expert's tokens, whose sizes are on the device.

On sm_90 kernels of the suite multiply FP8 data, E4M3 and E5M2 in any pair. Elsewhere, and in bf16
or fp32, every group is multiplied with all rows, and those of other groups are masked: the
result is the same, but the work grows with the number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _library
from .._call import call
from .._partition import vary_alike
from . import _checks
from ._checked import checked
from .block_quantize import block_dequantize
from .grouped_quantize import ALIGN, Groups, block_values_of_columns, check_rows, decode, scale_rows

__all__ = [
    "block_contract_groups", "block_multiply_groups", "contract_groups", "multiply_groups",
    "scaled_contract_groups", "scaled_multiply_groups",
]  # fmt: skip

_BLOCK = 128
_GROUPED_FP8 = (9, 0)
_S = jax.ShapeDtypeStruct


@checked
def multiply_groups(a: jax.Array, b: jax.Array, groups: Groups) -> jax.Array:
    """Multiplies each row by its group's matrix: ``out[r] = b[g] @ a[r]``, row r in group g.

    a is [rows, K], b [groups, N, K]. The result is [rows, N] in the dtype of a, summed in float32,
    with zeros in rows after the last group. Other shapes raise ValueError.
    """
    _check_operands("multiply_groups", a, b, groups)
    a = jnp.asarray(a)
    return _multiplied(a, jnp.asarray(b), groups.ends, a.dtype)


def _multiplied(a: jax.Array, b: jax.Array, ends: jax.Array, dtype: Any) -> jax.Array:
    """Computes ``multiply_groups`` with masked rows, one group after the other."""
    at = jnp.arange(a.shape[0])[:, None]
    out = jnp.zeros((a.shape[0], b.shape[1]), dtype)
    out, a, b, ends = vary_alike([out, a, b, ends])

    def add(out: jax.Array, group: tuple[Any, ...]) -> tuple[jax.Array, None]:
        matrix, begin, end = group
        own = (at >= begin) & (at < end)
        # Masked, not multiplied by 0: rows of no group may have NaN.
        product = _dot(jnp.where(own, a, 0), matrix.T).astype(dtype)
        return jnp.where(own, product, out), None

    return jax.lax.scan(add, out, (b, *_places(ends)))[0]


def _places(ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where the groups begin and end."""
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies with sums in float32."""
    exact = jax.lax.Precision.HIGHEST
    return jnp.dot(a, b, precision=exact, preferred_element_type=jnp.float32)


@checked
def contract_groups(a: jax.Array, b: jax.Array, groups: Groups, wide: bool = False) -> jax.Array:
    """Multiplies each group's slices of two matrices: ``out[g] = a[:, i:j] @ b[i:j]``.

    a is [M, rows], b [rows, N]. The result is [groups, M, N] in the dtype of a, or with ``wide``
    float32 sums that are not rounded. Other shapes raise ValueError.
    """
    a, b = _checks.array("contract_groups", "a", a), _checks.array("contract_groups", "b", b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            "contract_groups: a and b must be [M, rows] and [rows, N], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    check_rows("contract_groups", b.shape[0], groups)
    return _contracted(a, b, groups.ends, wide)


def _contracted(a: jax.Array, b: jax.Array, ends: jax.Array, wide: bool) -> jax.Array:
    """Computes ``contract_groups`` with masked rows, one group after the other."""
    at = jnp.arange(a.shape[1])
    dtype = jnp.float32 if wide else a.dtype

    def of_group(places: tuple[jax.Array, jax.Array]) -> jax.Array:
        own = (at >= places[0]) & (at < places[1])
        return _dot(jnp.where(own, a, 0), jnp.where(own[:, None], b, 0)).astype(dtype)

    return jax.lax.map(of_group, _places(ends))


def _check_operands(name: str, a: Any, b: Any, groups: Groups) -> None:
    """Raises ValueError unless a is [rows, K] and b [groups, N, K], with ``groups``' extents."""
    a, b = _checks.array(name, "a", a), _checks.array(name, "b", b)
    if a.ndim != 2 or b.ndim != 3 or b.shape[0] != groups.num_groups or b.shape[2] != a.shape[1]:
        raise ValueError(
            f"{name}: a and b must be [rows, K] and [{groups.num_groups}, N, K], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    check_rows(name, a.shape[0], groups)


def _multiplies_codes(a: jax.Array, b: jax.Array) -> bool:
    """Returns True if the suite's kernel multiplies the FP8 data on GPUs.

    It needs sm_90, and rows of the operands and of the result that begin at multiples of 16 bytes.
    """
    found = _library.gpu_capability()
    has_kernel = found is None or found == _GROUPED_FP8
    return has_kernel and a.shape[-1] % ALIGN == 0 and b.shape[-2] % 8 == 0


@checked
def scaled_multiply_groups(
    a: jax.Array,
    a_scale_inv: jax.Array,
    b: jax.Array,
    b_scale_inv: jax.Array,
    groups: Groups,
    fast: bool,
) -> jax.Array:
    """Computes ``multiply_groups`` of FP8 data, with a scale_inv for each row of a and matrix of b.

    Args:
        a: [rows, K] FP8.
        a_scale_inv: float32 [rows].
        b: [groups, N, K] FP8.
        b_scale_inv: float32 [groups].
        groups: places of the groups in the rows, from ``groups_of``.
        fast: accumulate along K in the tensor cores only, which keep fewer bits than float32.
            Ignored where the FP8 data is decoded, such as on a CPU or a GPU other than sm_90.

    Returns:
        [rows, N] bfloat16; rows after the last group have undefined values.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    name = "scaled_multiply_groups"
    _check_operands(name, a, b, groups)
    operands = _checked(name, a, a_scale_inv, (groups.rows,), b, b_scale_inv, groups.num_groups)

    def decoded(a: Any, a_scale: Any, b: Any, b_scale: Any, ends: Any) -> jax.Array:
        out = _multiplied(decode(a), decode(b), ends, jnp.float32)
        group = jnp.searchsorted(ends, jnp.arange(a.shape[0], dtype=jnp.int32), side="right")
        # One combined factor: multiplying by two would round the result twice.
        factor = a_scale * b_scale[jnp.minimum(group, groups.num_groups - 1)]
        return scale_rows(out, factor).astype(jnp.bfloat16)

    result = _S((groups.rows, operands[2].shape[1]), jnp.bfloat16)
    options = {"use_split_accumulator": not fast}
    return _computed("gemm_multiply", decoded, (*operands, groups.ends), result, **options)


@checked
def scaled_contract_groups(
    a: jax.Array,
    a_scale_inv: jax.Array,
    b: jax.Array,
    b_scale_inv: jax.Array,
    ends: jax.Array,
    fast: bool,
    wide: bool = False,
) -> jax.Array:
    """Computes ``contract_groups`` of columnwise FP8 data, with the scale_inv of each group.

    Args:
        a: [M, K] FP8, a columnwise copy from ``quantize_groups``: K is ``groups.columns``.
        a_scale_inv: float32 [groups].
        b: [N, K] FP8, with the same groups along K.
        b_scale_inv: float32 [groups].
        ends: int32 [groups], ``groups.column_ends``.
        fast: accumulate along K in the tensor cores only, which keep fewer bits than float32.
            Ignored where the FP8 data is decoded, such as on a CPU or a GPU other than sm_90.
        wide: return float32 instead of bfloat16.

    Returns:
        [groups, M, N] in bfloat16 or float32.

    Raises:
        TypeError: an argument has a dtype that is not listed, or ``ends`` is not int32 [groups].
        ValueError: a shape does not match.
    """
    name = "scaled_contract_groups"
    ends = _checks.array(name, "ends", ends)
    if ends.dtype != jnp.int32 or ends.ndim != 1:
        actual = f"{ends.dtype} {list(ends.shape)}"
        raise TypeError(f"{name}: ends must be int32 [groups], got {actual}")
    operands = _checked(name, a, a_scale_inv, ends.shape, b, b_scale_inv, ends.size)
    a, b = operands[0], operands[2]
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{name}: a and b must be [M, K] and [N, K], got {list(a.shape)} and {list(b.shape)}"
        )
    dtype = jnp.float32 if wide else jnp.bfloat16

    def decoded(a: Any, a_scale: Any, b: Any, b_scale: Any, ends: Any) -> jax.Array:
        out = _contracted(decode(a), decode(b).T, jnp.clip(ends, 0, a.shape[1]), True)
        # A factor for each row: one for each group alone would not keep a GPU busy.
        factor = jnp.repeat(a_scale * b_scale, a.shape[0])
        return scale_rows(out.reshape(-1, out.shape[2]), factor).reshape(out.shape).astype(dtype)

    result = _S((ends.size, a.shape[0], b.shape[0]), dtype)
    options = {"use_split_accumulator": not fast, "accumulate": False}
    return _computed("gemm_contract", decoded, (*operands, ends), result, **options)


def _computed(
    function: str, decoded: Any, operands: Sequence[jax.Array], result: Any, **options: Any
) -> jax.Array:
    """Multiplies a, b, their scales and ends by ``decoded``, or by a C function on GPUs."""

    def fused(a: Any, a_scale: Any, b: Any, b_scale: Any, ends: Any) -> jax.Array:
        given = {"a": a, "a_scale_inv": a_scale, "b": b, "b_scale_inv": b_scale, "ends": ends}
        made = call("grouped_gemm", f"grouped_{function}", {"out": result}, **given, **options)
        return made["out"]

    on_gpu = fused if _multiplies_codes(operands[0], operands[2]) else decoded
    return jax.lax.platform_dependent(*operands, cpu=decoded, cuda=on_gpu)


def _checked(
    name: str, a: Any, a_scale_inv: Any, a_shape: tuple[int, ...], b: Any, b_scale_inv: Any,
    num_groups: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Returns the operands with their scales, whose dtypes and shapes are checked."""
    a, b = (_checks.has_dtype(name, n, x, _checks.FP8) for n, x in (("a", a), ("b", b)))
    a_scale = _checks.has_dtype(name, "a_scale_inv", a_scale_inv, ["float32"], a_shape)
    b_scale = _checks.has_dtype(name, "b_scale_inv", b_scale_inv, ["float32"], (num_groups,))
    return a, a_scale, b, b_scale


@checked
def block_multiply_groups(
    a: jax.Array, a_scale_inv: jax.Array, b: jax.Array, b_scale_inv: jax.Array, groups: Groups
) -> jax.Array:
    """Computes ``multiply_groups`` of FP8 data with block scales, in bfloat16.

    Args:
        a, a_scale_inv: [rows, K] FP8 and its scales, a rowwise copy from
            ``grouped_cast.cast_source`` with a ``BlockRule``.
        b, b_scale_inv: [groups, N, K] FP8 and its scales, a copy from ``block_quantize_matrices``.
        groups: places of the groups in the rows, from ``groups_of``.

    Returns:
        [rows, N] bfloat16; rows after the last group have undefined values.

    Raises:
        ValueError: a shape does not match.
    """
    name = "block_multiply_groups"
    _check_operands(name, a, b, groups)

    def decoded(a: Any, a_scale: Any, b: Any, b_scale: Any, ends: Any) -> jax.Array:
        x = block_dequantize(a, a_scale, jnp.float32)
        scales = jnp.repeat(b_scale, _BLOCK, 1)[:, : b.shape[1]]
        scales = jnp.repeat(scales, _BLOCK, 2)[:, :, : b.shape[2]]
        w = decode(b).astype(jnp.float32) * scales
        return _multiplied(x, w, ends, jnp.float32).astype(jnp.bfloat16)

    operands = a, a_scale_inv, b, b_scale_inv, groups.ends
    result = _S((a.shape[0], b.shape[1]), jnp.bfloat16)
    return _computed("block_multiply", decoded, operands, result)


@checked
def block_contract_groups(
    a: jax.Array,
    a_scale_inv: jax.Array,
    b: jax.Array,
    b_scale_inv: jax.Array,
    groups: Groups,
    wide: bool = False,
) -> jax.Array:
    """Computes ``contract_groups`` of columnwise FP8 data with block scales.

    Args:
        a, a_scale_inv: [M, groups.columns] FP8 and its scales, a columnwise copy from
            ``grouped_cast.cast_source`` with a ``BlockRule``.
        b, b_scale_inv: [N, groups.columns] FP8 and its scales, the same of 1x128 blocks.
        groups: places of the groups in the rows, from ``groups_of``.
        wide: return float32 instead of bfloat16.

    Returns:
        [groups, M, N] in bfloat16 or float32.
    """
    dtype = jnp.float32 if wide else jnp.bfloat16

    def decoded(a: Any, a_scale: Any, b: Any, b_scale: Any, ends: Any) -> jax.Array:
        x, y = (block_values_of_columns(*each, ends) for each in ((a, a_scale), (b, b_scale)))
        return _contracted(x, y.T, jnp.clip(ends, 0, a.shape[1]), True).astype(dtype)

    operands = a, a_scale_inv, b, b_scale_inv, groups.column_ends
    result = _S((groups.num_groups, a.shape[0], b.shape[0]), dtype)
    return _computed("block_contract", decoded, operands, result, accumulate=False, b_block_rows=1)
