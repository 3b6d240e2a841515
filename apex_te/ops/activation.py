"""Elementwise activation functions, forward and backward, also with a fused cast to FP8."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..runtime.op_options import KINDS as KINDS
from ..runtime.op_options import activation_number
from . import fp8_output, reference_codec
from .binding import OpFunction, bind, checked, needs_autograd, note_written, once_differentiable
from .fp8_output import FP8Output

_fwd = bind("activation", "activation_fwd")
_bwd = bind("activation", "activation_bwd")
fwd_fp8_into = bind("activation", "activation_fwd_fp8")
_bwd_fp8 = bind("activation", "activation_bwd_fp8")


@checked
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Applies an activation function to every element in float32 arithmetic; differentiable.

    NaN gives a NaN value and gradient. -Inf gives NaN, but 0 for relu and squared_relu. An infinite
    x has the gradient NaN, except with relu and squared_relu. The gradient of these two is 0
    if x <= 0, even if the output's gradient is NaN or infinite.

    Args:
        x: any shape, float32, float16 or bfloat16; made contiguous if it is not.
        kind: "gelu" (tanh form), "gelu_erf" (exact), "quick_gelu" (x sigmoid(1.702 x)), "relu",
            "squared_relu" or "silu".

    Returns:
        A tensor of x's shape and dtype. Autograd keeps x for backward.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: ``kind`` is not listed.
    """
    if needs_autograd(x):
        return _Activation.apply(x, kind)
    return activation_fwd(x, kind)


@checked
def activation_fwd(x: torch.Tensor, kind: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes ``activation`` without autograd.

    Args:
        x: any shape, float32, float16 or bfloat16; made contiguous if it is not.
        kind: as in ``activation``.
        out: tensor in x's shape and dtype to write instead of a new one; may be x.

    Returns:
        ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``kind`` is unknown.
    """
    number = activation_number("activation_fwd", kind)
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    _fwd(x, y, number)
    note_written(out)
    return y


@checked
def activation_bwd(
    grad_output: torch.Tensor, x: torch.Tensor, kind: str, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes the gradient with respect to x, grad_output * f'(x).

    Args:
        grad_output: gradient of the output, in x's shape and dtype.
        x: the input of ``activation``, any shape, float32, float16 or bfloat16.
        kind: as passed to ``activation``.
        out: tensor in x's shape and dtype to write instead of a new one; may be ``grad_output``.

    Returns:
        The gradient: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``kind`` is unknown.
    """
    number = activation_number("activation_bwd", kind)
    grad_output, x = grad_output.contiguous(), x.contiguous()
    grad_input = torch.empty_like(x) if out is None else out
    _bwd(grad_output, x, grad_input, number)
    note_written(out)
    return grad_input


@checked
def activation_fwd_fp8(
    x: torch.Tensor,
    kind: str,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
    out: FP8Output | None = None,
) -> FP8Output:
    """Applies an activation function and quantizes: q = saturating_cast(f(x) * scale).

    f(x) is float32 and not rounded before the cast, which rounds to nearest even. NaN stays NaN.

    Args:
        x: [..., cols] float32, float16 or bfloat16; made contiguous if it is not. rows is the
            product of all dimensions but the last.
        kind: as in ``activation``.
        scale: one float32 element on x's device.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros. A GEMM that sums over the rows needs this.
        amax: one float32 element, becomes max(amax, max |f(x)|), before scaling; NaN counts as
            largest. None computes no amax.
        out: result of an earlier call, whose tensors are overwritten. ``rowwise``, ``columnwise``
            and ``pad_columnwise`` are then ignored.

    Returns:
        The FP8 copies and their scale_inv: ``out`` or new tensors.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``kind`` is not listed.
    """
    number = activation_number("activation_fwd_fp8", kind)
    x = as_matrix("activation_fwd_fp8", x)
    result = allocate_fp8(
        "activation_fwd_fp8", x, fp8_dtype, rowwise, columnwise, pad_columnwise, out
    )
    fwd_fp8_into(x, scale, result.rowwise, result.columnwise, amax, result.scale_inv, number)
    note_written(amax, *(out or ()))
    return result


@checked
def activation_bwd_fp8(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
    out: FP8Output | None = None,
) -> FP8Output:
    """Computes ``activation_bwd`` and quantizes the gradient, which stays float32 until the cast.

    Args:
        grad_output: gradient of the output, in x's shape and dtype.
        x: [..., cols] float32, float16 or bfloat16; rows is the product of all dimensions but the
            last.
        scale: one float32 element on x's device.
        kind: as passed to ``activation``.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros.
        out: result of an earlier call, whose tensors are overwritten. ``rowwise``, ``columnwise``
            and ``pad_columnwise`` are then ignored.
        amax: one float32 element, becomes max(amax, max |gradient|), before scaling; NaN counts as
            largest. None computes no amax.

    Returns:
        FP8 copies of the gradient, a matrix [rows, cols]: ``out`` or new tensors.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``kind`` is unknown.
    """
    number = activation_number("activation_bwd_fp8", kind)
    grad_output = as_matrix("activation_bwd_fp8", grad_output)
    x = as_matrix("activation_bwd_fp8", x)
    result = allocate_fp8(
        "activation_bwd_fp8", x, fp8_dtype, rowwise, columnwise, pad_columnwise, out
    )
    _bwd_fp8(
        grad_output, x, scale, result.rowwise, result.columnwise, amax, result.scale_inv, number
    )
    note_written(amax, *(out or ()))
    return result


def as_matrix(op: str, x: torch.Tensor) -> torch.Tensor:
    """Returns x as a contiguous matrix [rows, cols], cols its last dimension; ValueError without
    one.
    """
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got shape []")
    return x.contiguous().view(math.prod(x.shape[:-1]), x.shape[-1])


def allocate_fp8(
    op: str,
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    pad_columnwise: bool,
    out: FP8Output | None,
) -> FP8Output:
    """Returns ``out`` if given, else uninitialised FP8 outputs for the matrix x."""
    if out is not None:
        fp8_output.check_fp8_dtype(op, fp8_dtype)
        return out
    return fp8_output.allocate(
        op, x, x.shape[0], x.shape[1], fp8_dtype, rowwise, columnwise, pad_columnwise
    )


class _Activation(OpFunction):
    LABEL = "activation"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.kind = kind
        return activation_fwd(x, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return activation_bwd(grad_output, x, ctx.kind), None


def reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Computes ``activation`` in plain PyTorch in x's dtype, as a differentiable specification.

    x has any shape and floating-point dtype, which the result has, too; ``kind`` is a name that
    ``activation`` accepts, such as "silu".
    """
    functional = torch.nn.functional
    if kind in ("gelu", "gelu_erf"):
        return reference_gelu(x, kind == "gelu")
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "silu":
        return functional.silu(x)
    positive = functional.relu(x)
    return positive * positive if kind == "squared_relu" else positive


def reference_gelu(x: torch.Tensor, is_tanh: bool) -> torch.Tensor:
    """Computes GELU in plain PyTorch in x's dtype, in tanh form or with erf.

    The tanh form in float64 uses a sigmoid, which is exact for large negative x, too.
    """
    if is_tanh and x.dtype is torch.float64:
        # (1 + tanh(u)) / 2 = sigmoid(2 u), where 1 + tanh(u) is 0 from u = -19 on.
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return torch.nn.functional.gelu(x, approximate="tanh" if is_tanh else "none")


def reference_fp8(
    values: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype
) -> tuple[FP8Output, torch.Tensor]:
    """Quantizes a matrix in plain PyTorch; returns both copies with scale_inv, and the amax."""
    rounded = values.float()
    codes = reference_codec.encode_fp8(rounded * scale, fp8_dtype)
    bits = rounded.abs().reshape(-1).view(torch.int32)
    amax = bits.max() if bits.numel() else torch.zeros((), dtype=torch.int32, device=bits.device)
    output = FP8Output(codes, codes.t().contiguous(), 1.0 / scale)
    return output, amax.reshape(1).view(torch.float32)
