"""FP8 GEMMs of an MLP with GELU or its gradient in the same kernel (sm_90).

Elsewhere the GEMMs and the ops ``activation`` and ``bias_gelu`` run one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .. import runtime
from ..runtime.op_options import activation_number, is_tanh
from . import activation, bias_gelu, dense_gemm, dense_gemm_swiglu
from .binding import Launch, bind, checked, note_written, under_name
from .fp8_output import FP8Output, check_fp8_dtype, columnwise_length
from .gemm_common import check_operands, prepare

_lib = runtime.ops("dense_gemm")

_GROUP = 16  # columns: rows of FP8 data begin at multiples of 16 bytes
_SUM_ROWS = 32  # rows that a line of the workspace sums (csrc/dense_gemm/dense_gemm.h)
_SPLIT = 512


class GeluHidden(NamedTuple):
    """Result of ``dense_gemm_gelu``.

    Attributes:
        hidden: bfloat16 [M, F], the input of the activation.
        act: FP8 data of the activation, rowwise [M, F].
    """

    hidden: torch.Tensor
    act: FP8Output


class GeluGradient(NamedTuple):
    """Result of ``dense_gemm_gelu_bwd``.

    Attributes:
        output: FP8 data of the gradient of ``hidden``: rowwise [M, F] and columnwise
            [F, M rounded up to 16].
        act_columnwise: FP8 data of the activation, [F, M rounded up to 16]; None if not requested.
        dbias: bfloat16 [F], the gradient of the bias; None if not requested.
    """

    output: FP8Output
    act_columnwise: torch.Tensor | None
    dbias: torch.Tensor | None


@checked
def dense_gemm_gelu(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> GeluHidden:
    """Computes hidden = a @ b.T + bias in bfloat16, and gelu(``hidden``), tanh form, as FP8 data.

    In this formula a and b are the operands times their scale_inv.

    Results are bitwise identical to ``dense_gemm`` without ``use_split_accumulator``, then
    ``activation_fwd_fp8`` of its result with "gelu" and E4M3 as ``fp8_dtype``.

    Args:
        a: [M, K] E4M3, contiguous; the input.
        b: [F, K] E4M3, contiguous; the weight. F must be a multiple of 16.
        a_scale_inv: one float32 element on the device.
        b_scale_inv: one float32 element on the device.
        scale: one float32 element, the scale of the activation's FP8 data.
        bias: [F], converted to bfloat16; None adds nothing.
        amax: one float32 element, becomes max(amax, max |gelu(hidden)|), before scaling; NaN counts
            as largest. None computes no amax.

    Returns:
        ``hidden`` [M, F] in bfloat16, and the activation [M, F] as E4M3 data with its scale_inv.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match.
    """
    name = "dense_gemm_gelu"
    check_operands(name, a, b)
    hidden, bias = prepare(name, a, b, None, torch.bfloat16, bias, accumulate=False)
    _check_rows(name, b)
    act = a.new_empty(hidden.shape, dtype=torch.float8_e4m3fn)
    scale_inv = a.new_empty(1, dtype=torch.float32)
    _fwd(a, b, a_scale_inv, b_scale_inv, hidden, bias, scale, act, amax, scale_inv)
    note_written(amax)
    return GeluHidden(hidden, FP8Output(act, None, scale_inv))


@checked
def dense_gemm_gelu_bwd(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    hidden: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    columnwise: bool = True,
    amax: torch.Tensor | None = None,
    act_scale: torch.Tensor | None = None,
    with_dbias: bool = False,
) -> GeluGradient:
    """Computes the gradient of ``hidden`` as FP8 data, from dy, the gradient of the MLP's output.

    Results are bitwise identical to ``dense_gemm`` to bfloat16 with ``use_split_accumulator``, then
    ``bias_gelu_bwd_fp8``, but for ``dbias``: the kernel adds rows in another order, which only the
    shape fixes, too.

    Args:
        a: [M, K] FP8, contiguous; dy.
        b: [F, K] E4M3, contiguous; the columnwise copy of the second weight. F must be a multiple
            of 16.
        a_scale_inv: one float32 element on the device.
        b_scale_inv: one float32 element on the device.
        hidden: bfloat16 [M, F], contiguous, from ``dense_gemm_gelu``.
        scale: one float32 element, the scale of the gradient's FP8 data.
        fp8_dtype: dtype of the gradient's FP8 data, torch.float8_e4m3fn or torch.float8_e5m2.
        columnwise: also make the gradient's columnwise copy.
        amax: one float32 element, becomes max(amax, max |gradient|), before scaling; NaN counts as
            largest. None computes no amax.
        act_scale: one float32 element, the scale of the activation's FP8 data; also makes the
            activation's columnwise copy, in E4M3. None does not.
        with_dbias: also return the gradient of the bias, the column sums of the gradient of
            ``hidden`` in float32, before its cast.

    Returns:
        FP8 copies of the gradient of ``hidden``, [M, F], and of the activation if requested, and
        the gradient of the bias if requested.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match.
    """
    name = "dense_gemm_gelu_bwd"
    check_fp8_dtype(name, fp8_dtype)
    check_operands(name, a, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{name}: a and b must be [M, K] and [N, K], got {list(a.shape)} and {list(b.shape)}"
        )
    rows, cols = a.shape[0], b.shape[0]
    _check_rows(name, b)
    if hidden.shape != (rows, cols):
        raise ValueError(f"{name}: hidden must have shape {[rows, cols]}, got {list(hidden.shape)}")
    length = columnwise_length(rows, True)
    rowwise = a.new_empty((rows, cols), dtype=fp8_dtype)
    columns = a.new_empty((cols, length), dtype=fp8_dtype) if columnwise else None
    act = None if act_scale is None else a.new_empty((cols, length), dtype=torch.float8_e4m3fn)
    scale_inv = a.new_empty(1, dtype=torch.float32)
    dbias = lines = None
    if with_dbias:
        dbias = a.new_empty(cols, dtype=torch.bfloat16)
        lines = a.new_empty((-(-rows // _SUM_ROWS), cols), dtype=torch.float32)
    _bwd(
        a, b, a_scale_inv, b_scale_inv, hidden, scale, rowwise, columns, amax, scale_inv,
        act_scale, act, dbias, lines, _SPLIT,
    )  # fmt: skip
    note_written(amax)
    return GeluGradient(FP8Output(rowwise, columns, scale_inv), act, dbias)


def _check_rows(name: str, b: torch.Tensor) -> None:
    """Raises ValueError unless the rows of ``b`` come in whole groups."""
    if b.shape[0] % _GROUP:
        raise ValueError(f"{name}: rows of b must be a multiple of {_GROUP}, got {b.shape[0]}")


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Has errors of other ops name the op ``name``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise under_name(name, error) from error


def _launch_fwd(a, b, a_scale_inv, b_scale_inv, hidden, bias, *rest):
    """Returns the ``Launch`` of the fused kernel; None if it does not take these arguments."""
    is_e4m3 = a.dtype is torch.float8_e4m3fn
    fuses = is_e4m3 and dense_gemm_swiglu.fuses(a, b) and dense_gemm.reads_bias(bias)
    if not (fuses and dense_gemm_swiglu.aligned(hidden, rest[1])):
        return None
    args = (a, b, a_scale_inv, b_scale_inv, hidden, bias, *rest, 0, dense_gemm.STREAM_RESULTS)
    return Launch(_lib.dense_gemm_gelu, args, 1)


def _run_fwd(a, b, a_scale_inv, b_scale_inv, hidden, bias, *rest):
    if dense_gemm_swiglu.ran(_launch_fwd(a, b, a_scale_inv, b_scale_inv, hidden, bias, *rest)):
        return
    scale, act, amax, scale_inv = rest
    with _named("dense_gemm_gelu"):
        dense_gemm.multiply_into(a, b, a_scale_inv, b_scale_inv, hidden, bias, None, False, 0)
        activation.fwd_fp8_into(hidden, scale, act, None, amax, scale_inv, _GELU)


def _launch_bwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest):
    """Returns the ``Launch`` of the fused kernel; None if it does not take these arguments."""
    _, rowwise, columnwise, _, _, _, act_columnwise, _, _, _ = rest
    given = hidden, rowwise, columnwise, act_columnwise
    fuses = rowwise.dtype is a.dtype and dense_gemm_swiglu.fuses(a, b)
    if not (fuses and dense_gemm_swiglu.aligned(*given)):
        return None
    args = (a, b, a_scale_inv, b_scale_inv, hidden, *rest, 0, dense_gemm.STREAM_RESULTS)
    return Launch(_lib.dense_gemm_gelu_bwd, args, 1)


def _run_bwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest):
    if dense_gemm_swiglu.ran(_launch_bwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest)):
        return
    scale, rowwise, columnwise, amax, scale_inv, act_scale, act, dbias, lines, promotion = rest
    grad = a.new_empty(hidden.shape, dtype=torch.bfloat16)
    if lines is not None:  # bias_gelu sums more rows in a line
        lines = lines[: -(-len(a) // bias_gelu.TILE_ROWS)]
    with _named("dense_gemm_gelu_bwd"):
        dense_gemm.multiply_into(a, b, a_scale_inv, b_scale_inv, grad, None, None, False, promotion)
        bias_gelu.bwd_fp8_into(
            grad, hidden, None, scale, rowwise, columnwise, amax, scale_inv, dbias, lines, _TANH
        )
        if act is not None:
            activation.fwd_fp8_into(hidden, act_scale, None, act, None, None, _GELU)


_GELU = activation_number("dense_gemm_gelu", "gelu")
_TANH = is_tanh("dense_gemm_gelu", "tanh")
_TILING = ("strip", "cache")
_fwd = bind("dense_gemm", "dense_gemm_gelu", _run_fwd, without=_TILING, launch=_launch_fwd)
_bwd = bind("dense_gemm", "dense_gemm_gelu_bwd", _run_bwd, without=_TILING, launch=_launch_bwd)
