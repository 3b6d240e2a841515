"""FP8 GEMMs of a gated MLP with the activation or its gradient in the same kernel (sm_90).

Elsewhere the GEMMs and ``swiglu`` run one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import runtime
from ..op_builder.jit import env
from ..runtime.op_options import BLOCK_SCALES, gated_activation_number
from . import dense_gemm, gemm_common, swiglu
from .binding import Launch, bind, checked, note_written, under_name
from .block_quantize import block_quantize, quantize_into, scale_shape
from .fp8_output import FP8Output, check_fp8_dtype, columnwise_length
from .gemm_common import check_operands, prepare

_lib = runtime.ops("dense_gemm")

_BLOCK = 128
_SPLIT = 512
# On an H200 an MLP of 1.2e11 multiplications (M x F x K) gains 2 to 4%, one of 1.5e11 or more with
# a K of 768 or 1024 -1 to 1%. In one of 3.4e10 the host takes longer than the GPU, and longer for
# these kernels. With GELU a K of 4096 or more gains 0 to 1.5%; 3072 gains only memory, an
# eighth; 2048 loses 2 to 9%.
_MIN_ROWS, _MIN_DEPTH, _MIN_WORK = 2048, 1536, 10**11

is_active: bool = env.boolean("APEX_TE_FUSED_SWIGLU", True)


class GatedHidden(NamedTuple):
    """Result of ``dense_gemm_swiglu``.

    Attributes:
        hidden: bfloat16 [M, 2F], the input of the activation, gates first.
        act: FP8 data of the activation, rowwise [M, F]; None without a scale.
    """

    hidden: torch.Tensor
    act: FP8Output | None


class HeldHidden(NamedTuple):
    """Result of ``dense_gemm_swiglu_held``.

    Attributes:
        hidden: E4M3 [M, 2F], the input of the activation, gates first.
        hidden_scale_inv: float32 [ceil(2F / 128), M rounded up to 4], its blocks' scale_inv.
        act: FP8 data of the activation, rowwise [M, F].
    """

    hidden: torch.Tensor
    hidden_scale_inv: torch.Tensor
    act: FP8Output


class GatedGradient(NamedTuple):
    """Result of ``dense_gemm_swiglu_bwd``.

    Attributes:
        output: FP8 data of the gradient of ``hidden``: rowwise [M, 2F] and columnwise
            [2F, M rounded up to 16]; None without a scale.
        act_columnwise: FP8 data of the activation, [F, M rounded up to 16]; None if not requested.
    """

    output: FP8Output | None
    act_columnwise: torch.Tensor | None


@checked
def dense_gemm_swiglu(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    amax: torch.Tensor | None = None,
) -> GatedHidden:
    """Computes hidden = a @ b.T + bias in bfloat16, and act(gate) * up of ``hidden`` as FP8 data.

    In this formula a and b are the operands times their scale_inv.

    Results are bitwise identical to ``dense_gemm`` without ``use_split_accumulator``, then
    ``swiglu_fwd_fp8`` of its result with E4M3 as ``fp8_dtype``.

    Args:
        a: [M, K] E4M3, contiguous; the input.
        b: [2F, K] E4M3, contiguous; the weight, gates first. F must be a multiple of 16.
        a_scale_inv: one float32 element on the device.
        b_scale_inv: one float32 element on the device.
        scale: one float32 element, the scale of the activation's FP8 data. None computes ``amax``
            alone, for a scale that depends on it: ``swiglu_fwd_fp8`` then makes the FP8 data.
        bias: [2F], converted to bfloat16; None adds nothing.
        activation: a name that ``swiglu`` accepts, such as "silu" or "gelu".
        amax: one float32 element, becomes max(amax, max |act(gate) * up|), before scaling; NaN
            counts as largest. None computes no amax.

    Returns:
        ``hidden`` [M, 2F] in bfloat16, and the activation [M, F] as E4M3 data with its scale_inv,
        or None.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match, or ``activation`` is not
            supported.
    """
    code = gated_activation_number("dense_gemm_swiglu", activation)
    check_operands("dense_gemm_swiglu", a, b)
    hidden, bias = prepare("dense_gemm_swiglu", a, b, None, torch.bfloat16, bias, accumulate=False)
    _check_rows("b", b.shape[0], 32)
    act = scale_inv = out = None
    if scale is not None:
        act = a.new_empty((a.shape[0], b.shape[0] // 2), dtype=torch.float8_e4m3fn)
        scale_inv = a.new_empty(1, dtype=torch.float32)
        out = FP8Output(act, None, scale_inv)
    _fwd(a, b, a_scale_inv, b_scale_inv, hidden, bias, scale, act, amax, scale_inv, code)
    note_written(amax)
    return GatedHidden(hidden, out)


@checked
def dense_gemm_swiglu_held(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    amax: torch.Tensor | None = None,
) -> HeldHidden:
    """Computes ``dense_gemm_swiglu``, with ``hidden`` in E4M3 instead of bfloat16.

    Results are bitwise identical to those of ``dense_gemm_swiglu``, then ``block_quantize`` of
    ``hidden`` in blocks of 1x128. One kernel computes them if F is a multiple of 128.

    Args:
        a, b, a_scale_inv, b_scale_inv, scale, bias, activation, amax: as in ``dense_gemm_swiglu``.

    Returns:
        ``hidden`` [M, 2F] in E4M3 with its scale_inv, and the activation [M, F] as E4M3 data.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match, or ``activation`` is not
            supported.
    """
    name = "dense_gemm_swiglu_held"
    if a.dim() == b.dim() == 2 and b.shape[0] % (2 * _BLOCK):
        try:
            found = dense_gemm_swiglu(
                a, b, a_scale_inv, b_scale_inv, scale, bias=bias, activation=activation, amax=amax
            )
        except (TypeError, ValueError) as error:
            raise under_name(name, error) from error
        assert found.act is not None
        held = block_quantize(found.hidden, torch.float8_e4m3fn, columnwise=False)
        assert held.rowwise is not None
        assert held.rowwise_scale_inv is not None
        return HeldHidden(held.rowwise, held.rowwise_scale_inv, found.act)
    code = gated_activation_number(name, activation)
    check_operands(name, a, b)
    rows, cols = len(a), len(b)
    hidden = a.new_empty((rows, cols), dtype=torch.float8_e4m3fn)
    prepare(name, a, b, hidden, hidden.dtype, None, accumulate=False)
    bias = None if bias is None else bias.to(torch.bfloat16)
    hidden_scale_inv = a.new_empty(scale_shape(rows, cols, 1), dtype=torch.float32)
    act = a.new_empty((rows, cols // 2), dtype=torch.float8_e4m3fn)
    scale_inv = a.new_empty(1, dtype=torch.float32)
    _fwd_held(
        a, b, a_scale_inv, b_scale_inv, hidden, hidden_scale_inv, bias, scale, act, amax,
        scale_inv, code,
    )  # fmt: skip
    note_written(amax)
    return HeldHidden(hidden, hidden_scale_inv, FP8Output(act, None, scale_inv))


@checked
def dense_gemm_swiglu_bwd(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    hidden: torch.Tensor,
    scale: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    *,
    hidden_scale_inv: torch.Tensor | None = None,
    activation: str = "silu",
    columnwise: bool = True,
    amax: torch.Tensor | None = None,
    act_scale: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
) -> GatedGradient:
    """Computes the gradient of ``hidden`` as FP8 data, from dy, the gradient of the MLP's output.

    Results are bitwise identical to ``dense_gemm`` to bfloat16 with ``use_split_accumulator``, then
    ``swiglu_bwd_fp8``.

    Args:
        a: [M, K] FP8, contiguous; dy.
        b: [F, K] E4M3, contiguous; the columnwise copy of the second weight. F must be a multiple
            of 16.
        a_scale_inv: one float32 element on the device.
        b_scale_inv: one float32 element on the device.
        hidden: bfloat16 [M, 2F], contiguous, from ``dense_gemm_swiglu``; or E4M3 with
            ``hidden_scale_inv``.
        scale: one float32 element, the scale of the gradient's FP8 data. None computes ``amax`` and
            ``grad`` instead, for a scale that depends on ``amax``: ``swiglu_bwd_fp8`` then makes
            the FP8 data of ``grad``.
        fp8_dtype: dtype of the gradient's FP8 data, torch.float8_e4m3fn or torch.float8_e5m2.
        hidden_scale_inv: of a ``hidden`` in E4M3, its scale_inv as ``block_quantize`` makes it with
            blocks of 1x128. Results are those of its values in bfloat16, which are not written to
            memory. None: ``hidden`` is not in FP8.
        activation: as passed to ``dense_gemm_swiglu``.
        columnwise: also make the gradient's columnwise copy.
        amax: one float32 element, becomes max(amax, max |gradient|), before scaling; NaN counts as
            largest. None computes no amax.
        act_scale: one float32 element, the scale of the activation's FP8 data; also makes the
            activation's columnwise copy, in E4M3. None does not.
        grad: bfloat16 [M, F], contiguous, overwritten with the gradient of the activation's output;
            given without ``scale``, and only then.

    Returns:
        FP8 copies of the gradient of ``hidden``, [M, 2F], or None without ``scale``; and of the
        activation if requested.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match, or ``activation`` is not
            supported.
    """
    name = "dense_gemm_swiglu_bwd"
    code = gated_activation_number(name, activation)
    check_fp8_dtype(name, fp8_dtype)
    check_operands(name, a, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{name}: a and b must be [M, K] and [N, K], got {list(a.shape)} and {list(b.shape)}"
        )
    rows, cols = a.shape[0], b.shape[0]
    _check_rows("b", cols, 16)
    if hidden.shape != (rows, 2 * cols):
        raise ValueError(
            f"{name}: hidden must have shape {[rows, 2 * cols]}, got {list(hidden.shape)}"
        )
    length = columnwise_length(rows, True)
    rowwise = columns = scale_inv = out = None
    if scale is None:
        _check_grad(name, grad, (rows, cols))
    elif grad is not None:
        raise ValueError(f"{name}: grad must be None with a scale, got a tensor")
    else:
        rowwise = a.new_empty((rows, 2 * cols), dtype=fp8_dtype)
        columns = a.new_empty((2 * cols, length), dtype=fp8_dtype) if columnwise else None
        scale_inv = a.new_empty(1, dtype=torch.float32)
        out = FP8Output(rowwise, columns, scale_inv)
    act = None if act_scale is None else a.new_empty((cols, length), dtype=torch.float8_e4m3fn)
    rest = scale, grad, rowwise, columns, amax, scale_inv, act_scale, act, code, _SPLIT
    if hidden_scale_inv is None:
        _bwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest)
    else:
        _bwd_held(a, b, a_scale_inv, b_scale_inv, hidden, hidden_scale_inv, *rest)
    note_written(amax)
    note_written(grad)
    return GatedGradient(out, act)


def _check_rows(name: str, rows: int, multiple: int) -> None:
    """Raises ValueError unless ``rows`` of the argument ``name`` is a multiple of ``multiple``."""
    if rows % multiple:
        raise ValueError(
            f"dense_gemm_swiglu: rows of {name} must be a multiple of {multiple}, got {rows}"
        )


def _check_grad(name: str, grad: torch.Tensor | None, shape: tuple[int, int]) -> None:
    """Raises an error unless ``grad`` is a contiguous bfloat16 tensor of ``shape``."""
    if grad is None:
        raise ValueError(f"{name}: grad must be given without a scale, got None")
    if grad.dtype is not torch.bfloat16:
        raise TypeError(f"{name}: grad must have dtype torch.bfloat16, got {grad.dtype}")
    if grad.shape != shape or not grad.is_contiguous():
        raise ValueError(
            f"{name}: grad must be contiguous with shape {list(shape)}, got {list(grad.shape)} "
            f"with strides {list(grad.stride())}"
        )


def fuses(a: torch.Tensor, b: torch.Tensor, activation: str = "silu") -> bool:
    """Returns True if one kernel computes the GEMM of FP8 operands and the activation."""
    if activation != "silu" or b.dtype is not torch.float8_e4m3fn:
        return False
    return dense_gemm.multiplies(a, b) and a.numel() > 0 and b.numel() > 0


def gains(rows: int, features: int, depth: int, is_gated: bool = True) -> bool:
    """Returns True if fused kernels support an MLP and are faster than separate GEMMs and ops.

    Always False while ``is_active`` is False, which ``APEX_TE_FUSED_SWIGLU=0`` causes. ``rows`` is
    M, ``features`` F and ``depth`` K; without ``is_gated`` the activation is GELU.
    """
    if not is_active or features % 16 or depth % 16:
        return False
    is_deep = depth >= _MIN_DEPTH * (1 if is_gated else 2)
    return rows >= _MIN_ROWS and is_deep and rows * features * depth >= _MIN_WORK


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Returns True if all tensors begin at multiples of 16 bytes; None counts as aligned."""
    return not any(t is not None and t.data_ptr() % 16 for t in tensors)


_NAMES = {code: name for name, code in swiglu.ACTIVATIONS.items()}
_UNUSED = 0.0, 0.0, 0.0  # parameters of another activation
_POW2 = BLOCK_SCALES.index("pow2")


def _launch_fwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest):
    """Returns the ``Launch`` of the fused kernel; None if it does not take these arguments."""
    function = _lib.dense_gemm_swiglu
    return _launch_of_fwd(function, a, b, a_scale_inv, b_scale_inv, (hidden,), rest)


def _launch_fwd_held(a, b, a_scale_inv, b_scale_inv, hidden, hidden_scale_inv, *rest):
    """Returns the ``Launch`` of the fused kernel; None if it does not take these arguments."""
    function, written = _lib.dense_gemm_swiglu_held, (hidden, hidden_scale_inv)
    return _launch_of_fwd(function, a, b, a_scale_inv, b_scale_inv, written, rest)


def _launch_of_fwd(function, a, b, a_scale_inv, b_scale_inv, hidden, rest):
    bias, _, act, _, _, code = rest
    is_read = a.dtype is torch.float8_e4m3fn and dense_gemm.reads_bias(bias)
    if not (is_read and fuses(a, b, _NAMES[code]) and aligned(*hidden, act)):
        return None
    args = (a, b, a_scale_inv, b_scale_inv, *hidden, *rest, 0, dense_gemm.STREAM_RESULTS)
    return Launch(function, args, 1)


def _run_fwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest):
    if ran(_launch_fwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest)):
        return
    bias, scale, act, amax, scale_inv, code = rest
    dense_gemm.multiply_into(a, b, a_scale_inv, b_scale_inv, hidden, bias, None, False, 0)
    if scale is None and amax is None:
        return
    scale = _any(hidden) if scale is None else scale
    swiglu.fwd_fp8_into(hidden, None, None, None, scale, act, None, amax, scale_inv, code, *_UNUSED)


def _any(like):
    """Returns a scale for what only computes an amax."""
    return like.new_ones(1, dtype=torch.float32)


def _run_fwd_held(a, b, a_scale_inv, b_scale_inv, hidden, hidden_scale_inv, *rest):
    if ran(_launch_fwd_held(a, b, a_scale_inv, b_scale_inv, hidden, hidden_scale_inv, *rest)):
        return
    values = torch.empty_like(hidden, dtype=torch.bfloat16)
    _run_fwd(a, b, a_scale_inv, b_scale_inv, values, *rest)
    quantize_into(values, hidden, hidden_scale_inv, None, None, None, 1, 1, 0.0, _POW2)


def ran(launch):
    """Runs a ``Launch``; returns False without one."""
    if launch is None:
        return False
    gemm_common.count_gemms()
    launch.function(*launch.args)
    return True


def _launch_bwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest):
    """Returns the ``Launch`` of the fused kernel; None if it does not take these arguments."""
    return _launch_of_bwd(
        _lib.dense_gemm_swiglu_bwd, a, b, a_scale_inv, b_scale_inv, (hidden,), rest
    )


def _launch_bwd_held(a, b, a_scale_inv, b_scale_inv, hidden, hidden_scale_inv, *rest):
    """Returns the ``Launch`` of the fused kernel; None if it does not take these arguments."""
    given = hidden, hidden_scale_inv
    return _launch_of_bwd(
        _lib.dense_gemm_swiglu_held_bwd, a, b, a_scale_inv, b_scale_inv, given, rest
    )


def _launch_of_bwd(function, a, b, a_scale_inv, b_scale_inv, hidden, rest):
    _, grad, rowwise, columnwise, _, _, _, act_columnwise, code, _ = rest
    given = (*hidden, grad, rowwise, columnwise, act_columnwise)
    is_dtype = rowwise is None or rowwise.dtype is a.dtype
    if not (is_dtype and fuses(a, b, _NAMES[code]) and aligned(*given)):
        return None
    args = (a, b, a_scale_inv, b_scale_inv, *hidden, *rest, 0, dense_gemm.STREAM_RESULTS)
    return Launch(function, args, 1)


def _run_bwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest):
    if ran(_launch_bwd(a, b, a_scale_inv, b_scale_inv, hidden, *rest)):
        return
    inputs, functions = (hidden, None, None, None), (swiglu.bwd_fp8_into, swiglu.fwd_fp8_into)
    _bwd_apart(a, b, a_scale_inv, b_scale_inv, inputs, functions, *rest)


def _run_bwd_held(a, b, a_scale_inv, b_scale_inv, hidden, hidden_scale_inv, *rest):
    if ran(_launch_bwd_held(a, b, a_scale_inv, b_scale_inv, hidden, hidden_scale_inv, *rest)):
        return
    inputs, functions = (hidden, hidden_scale_inv), (swiglu.bwd_held_into, swiglu.fwd_held_into)
    _bwd_apart(a, b, a_scale_inv, b_scale_inv, inputs, functions, *rest)


def _bwd_apart(
    a, b, a_scale_inv, b_scale_inv, inputs, functions, scale, grad, rowwise, columnwise, amax,
    scale_inv, act_scale, act_columnwise, code, promotion,
):  # fmt: skip
    """Computes the GEMM, then its results by ``functions`` of the activation's ``inputs``."""
    backward, forward = functions
    if grad is None:
        grad = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)
    dense_gemm.multiply_into(a, b, a_scale_inv, b_scale_inv, grad, None, None, False, promotion)
    if scale is not None or amax is not None:
        scale = _any(grad) if scale is None else scale
        backward(
            grad, *inputs, scale, rowwise, columnwise, amax, scale_inv, None, None, code, *_UNUSED
        )
    if act_columnwise is not None:
        forward(*inputs, act_scale, None, act_columnwise, None, None, code, *_UNUSED)


_TILING = ("strip", "cache")
_fwd = bind("dense_gemm", "dense_gemm_swiglu", _run_fwd, without=_TILING, launch=_launch_fwd)
_bwd = bind("dense_gemm", "dense_gemm_swiglu_bwd", _run_bwd, without=_TILING, launch=_launch_bwd)
_fwd_held = bind(
    "dense_gemm", "dense_gemm_swiglu_held", _run_fwd_held, without=_TILING,
    launch=_launch_fwd_held,
)  # fmt: skip
_bwd_held = bind(
    "dense_gemm", "dense_gemm_swiglu_held_bwd", _run_bwd_held, without=_TILING,
    launch=_launch_bwd_held,
)  # fmt: skip
