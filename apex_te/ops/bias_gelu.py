"""GELU of x + bias, forward and backward with the bias gradient, also with a fused cast to FP8."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..runtime import op_options
from .activation import allocate_fp8, as_matrix, reference_gelu
from .binding import OpFunction, bind, checked, needs_autograd, note_written, once_differentiable
from .fp8_output import FP8Output

_fwd = bind("bias_gelu", "bias_gelu_fwd")
_bwd = bind("bias_gelu", "bias_gelu_bwd")
_fwd_fp8 = bind("bias_gelu", "bias_gelu_fwd_fp8")
bwd_fp8_into = bind("bias_gelu", "bias_gelu_bwd_fp8")

# Rows that one line of the bias-gradient workspace sums (csrc/common/activation/arguments.h).
TILE_ROWS = 64


class BiasGeluGrads(NamedTuple):
    """Gradients of ``bias_gelu``.

    Attributes:
        input: gradient of x, of its shape and dtype.
        dbias: gradient of the bias, [cols] in x's dtype; None if not requested.
    """

    input: torch.Tensor
    dbias: torch.Tensor | None


class BiasGeluFP8Grads(NamedTuple):
    """Gradients of ``bias_gelu``, with x's in FP8.

    Attributes:
        output: FP8 data of x's gradient, as a matrix [rows, cols].
        dbias: gradient of the bias, [cols] in x's dtype; None if not requested.
    """

    output: FP8Output
    dbias: torch.Tensor | None


@checked
def bias_gelu(
    x: torch.Tensor, bias: torch.Tensor | None = None, *, form: str = "tanh"
) -> torch.Tensor:
    """Computes gelu(x + bias) in float32, rounded once; differentiable.

    If x + bias is NaN, value and gradient are NaN. If it is -Inf, the value is NaN; if it is
    +Inf or -Inf, the gradient is NaN.

    Args:
        x: [..., cols] float32, float16 or bfloat16; made contiguous if it is not.
        bias: [cols] in x's dtype; None adds nothing.
        form: "tanh" or "erf" (exact).

    Returns:
        A tensor of x's shape and dtype. Autograd keeps x and bias for backward.

    Raises:
        TypeError: x has a dtype that is not listed, or another argument's dtype does not match.
        ValueError: a shape or device does not match, or ``form`` is not listed.
    """
    if needs_autograd(x, bias):
        return _BiasGelu.apply(x, bias, form)
    return bias_gelu_fwd(x, bias, form=form)


@checked
def bias_gelu_fwd(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    form: str = "tanh",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``bias_gelu`` without autograd.

    Args:
        x: [..., cols] float32, float16 or bfloat16; made contiguous if it is not.
        bias: [cols] in x's dtype; None adds nothing.
        form: "tanh" or "erf" (exact).
        out: tensor of x's shape and dtype to write instead of a new one; may be x.

    Returns:
        ``out`` or the new tensor.

    Raises:
        TypeError: x has a dtype that is not listed, or another argument's dtype does not match.
        ValueError: a shape or device does not match, or ``form`` is not listed.
    """
    is_tanh = op_options.is_tanh("bias_gelu_fwd", form)
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    _fwd(x, _dense(bias), y, is_tanh)
    note_written(out)
    return y


@checked
def bias_gelu_bwd(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    form: str = "tanh",
    with_dbias: bool = False,
    out: torch.Tensor | None = None,
) -> BiasGeluGrads:
    """Computes the gradients of ``bias_gelu``: grad_output * gelu'(x + bias) and its column sums.

    Args:
        grad_output: gradient of the output, in x's shape and dtype.
        x: [..., cols] float32, float16 or bfloat16.
        bias: [cols] in x's dtype, or None.
        form: "tanh" or "erf", as passed to ``bias_gelu``.
        with_dbias: also return the bias's gradient, the column sums, added in float32 in a fixed
            order.
        out: tensor of x's shape and dtype to write x's gradient to; may be ``grad_output``.

    Returns:
        The gradient of x, in its shape and dtype, and of the bias, [cols] or None.

    Raises:
        TypeError: x has a dtype that is not listed, or another argument's dtype does not match.
        ValueError: a shape or device does not match, or ``form`` is not listed.
    """
    is_tanh = op_options.is_tanh("bias_gelu_bwd", form)
    grad_output, x = grad_output.contiguous(), x.contiguous()
    grad_input = torch.empty_like(x) if out is None else out
    dbias, workspace = _dbias(x) if with_dbias else (None, None)
    _bwd(grad_output, x, _dense(bias), grad_input, dbias, workspace, is_tanh)
    note_written(out)
    return BiasGeluGrads(grad_input, dbias)


@checked
def bias_gelu_fwd_fp8(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    form: str = "tanh",
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
    out: FP8Output | None = None,
) -> FP8Output:
    """Computes ``bias_gelu`` and quantizes: q = saturating_cast(gelu(x + bias) * scale).

    The result of gelu is float32 and not rounded before the cast.

    Args:
        x: [..., cols] float32, float16 or bfloat16; made contiguous if it is not. rows is the
            product of all dimensions but the last.
        bias: [cols] in x's dtype; None adds nothing.
        scale: one float32 element on x's device.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        form: "tanh" or "erf" (exact).
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros. A GEMM that sums over the rows needs this.
        amax: one float32 element, becomes max(amax, max |gelu(x + bias)|), before scaling; NaN
            counts as largest. None computes no amax.
        out: result of an earlier call, whose tensors are overwritten. ``rowwise``, ``columnwise``
            and ``pad_columnwise`` are then ignored.

    Returns:
        FP8 copies of the result, a matrix [rows, cols], and their scale_inv.

    Raises:
        TypeError: x has a dtype that is not listed, or another argument's dtype does not match.
        ValueError: a shape or device does not match, or ``form`` is not listed.
    """
    is_tanh = op_options.is_tanh("bias_gelu_fwd_fp8", form)
    x = as_matrix("bias_gelu_fwd_fp8", x)
    result = allocate_fp8(
        "bias_gelu_fwd_fp8", x, fp8_dtype, rowwise, columnwise, pad_columnwise, out
    )
    outputs = (result.rowwise, result.columnwise, amax, result.scale_inv)
    _fwd_fp8(x, _dense(bias), scale, *outputs, is_tanh)
    note_written(amax, *(out or ()))
    return result


@checked
def bias_gelu_bwd_fp8(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    form: str = "tanh",
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
    with_dbias: bool = False,
    out: FP8Output | None = None,
) -> BiasGeluFP8Grads:
    """Computes ``bias_gelu_bwd`` and quantizes x's gradient, which stays float32 until the cast.

    The bias's gradient is the column sum of the float32 gradient.

    Args:
        grad_output: gradient of the output, in x's shape and dtype.
        x: [..., cols] float32, float16 or bfloat16; rows is the product of all dimensions but the
            last.
        bias: [cols] in x's dtype, or None.
        scale: one float32 element on x's device.
        form: "tanh" or "erf", as passed to ``bias_gelu``.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros.
        out: result of an earlier call, whose tensors are overwritten. ``rowwise``, ``columnwise``
            and ``pad_columnwise`` are then ignored.
        with_dbias: also return the gradient of the bias.
        amax: one float32 element, becomes max(amax, max |gradient of x|), before scaling; NaN
            counts as largest. None computes no amax.

    Returns:
        FP8 copies of x's gradient, a matrix [rows, cols], and the bias's gradient, [cols] or None.

    Raises:
        TypeError: x has a dtype that is not listed, or another argument's dtype does not match.
        ValueError: a shape or device does not match, or ``form`` is not listed.
    """
    is_tanh = op_options.is_tanh("bias_gelu_bwd_fp8", form)
    grad_output = as_matrix("bias_gelu_bwd_fp8", grad_output)
    x = as_matrix("bias_gelu_bwd_fp8", x)
    result = allocate_fp8(
        "bias_gelu_bwd_fp8", x, fp8_dtype, rowwise, columnwise, pad_columnwise, out
    )
    dbias, workspace = _dbias(x) if with_dbias else (None, None)
    outputs = (result.rowwise, result.columnwise, amax, result.scale_inv)
    bwd_fp8_into(grad_output, x, _dense(bias), scale, *outputs, dbias, workspace, is_tanh)
    note_written(amax, *(out or ()))
    return BiasGeluFP8Grads(result, dbias)


def _dense(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.contiguous()


def _dbias(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uninitialised (bias gradient [cols], float32 workspace of its sums) for x."""
    cols = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    return x.new_empty(cols), x.new_empty((-(-rows // TILE_ROWS), cols), dtype=torch.float32)


class _BiasGelu(OpFunction):
    LABEL = "bias_gelu"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, form: str) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, bias)
        ctx.form = form
        return bias_gelu_fwd(x, bias, form=form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        grads = bias_gelu_bwd(
            grad_output, x, bias, form=ctx.form, with_dbias=ctx.needs_input_grad[1]
        )
        return grads.input, grads.dbias, None


def reference(
    x: torch.Tensor, bias: torch.Tensor | None = None, *, form: str = "tanh"
) -> torch.Tensor:
    """Computes ``bias_gelu`` in plain PyTorch in x's dtype, as a differentiable specification.

    x is [..., cols] in any floating-point dtype, ``bias`` [cols] or None, ``form`` "tanh" or "erf".
    """
    return reference_gelu(x if bias is None else x + bias, form == "tanh")
