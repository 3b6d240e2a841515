"""Gated activations act(gate) * up: SwiGLU, GeGLU, ReGLU and others, also with a cast to FP8."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..runtime import scratch_sizes
from ..runtime.op_options import ACTIVATIONS as ACTIVATIONS
from ..runtime.op_options import ClampedSwiglu as ClampedSwiglu
from ..runtime.op_options import gate_arguments
from . import reference_codec
from ._gated_matrices import (
    dense_biases,
    held_input,
    input_matrices,
    output_gradient,
    result_extents,
)
from .binding import OpFunction, bind, checked, needs_autograd, note_written, once_differentiable
from .fp8_output import FP8Output, allocate

_fwd = bind("swiglu", "swiglu_fwd")
fwd_fp8_into = bind("swiglu", "swiglu_fwd_fp8")
_bwd = bind("swiglu", "swiglu_bwd")
bwd_fp8_into = bind("swiglu", "swiglu_bwd_fp8")
fwd_held_into = bind("swiglu", "swiglu_fwd_held_fp8")
bwd_held_into = bind("swiglu", "swiglu_bwd_held_fp8")
HELD_MULTIPLE = 8  # of F, for which kernels read held inputs


class SwigluGrads(NamedTuple):
    """Gradients of ``swiglu``.

    Attributes:
        input: gradient of ``input``, of its shape and dtype.
        up: gradient of ``up``; None if ``up`` was not given.
        dbias: [2F] in the input's dtype: the gradients of the gate's bias, then of up's bias; None
            if not asked for.
    """

    input: torch.Tensor
    up: torch.Tensor | None
    dbias: torch.Tensor | None


class SwigluFP8Grads(NamedTuple):
    """Gradients of ``swiglu``, those of gate and up in FP8.

    Attributes:
        output: FP8 data of the gradients of gate and up, one matrix [M, 2F] with the gate's first.
        dbias: [2F] in the input's dtype, as in ``SwigluGrads``, not in FP8.
    """

    output: FP8Output
    dbias: torch.Tensor | None


@checked
def swiglu(
    input: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str | ClampedSwiglu = "silu",
) -> torch.Tensor:
    """Computes the gated activation act(gate) * up in float32, differentiable once.

    Args:
        input: float32, float16 or bfloat16. The gate, [..., F]; if ``up`` is None, gate and up
            concatenated along the last dimension, gate first, [..., 2F]. Rows may be apart in
            memory; other strides are made contiguous.
        up: [..., F], of the gate's shape and dtype, or None.
        bias: added before the activation, in the input's dtype: [F] for the gate if ``up_bias`` is
            given, otherwise [2F] for gate and up. None adds nothing.
        up_bias: [F], added to up, in the input's dtype; needs ``bias``.
        activation: "silu" (SwiGLU), "gelu" (GeGLU, tanh form), "gelu_erf", "relu" (ReGLU),
            "squared_relu", "sigmoid" (GLU), or a ``ClampedSwiglu`` with its parameters.

    Returns:
        [..., F] in the input's dtype. NaN gives NaN. act(-Inf) is NaN, but 0 for "relu",
        "squared_relu" and "sigmoid".

    Raises:
        TypeError: ``input`` has a dtype that is not listed, another argument's dtype differs, or a
            field of ``ClampedSwiglu`` is not a number.
        ValueError: a shape or device does not match, ``activation`` is not listed or its limit is
            negative, or ``up_bias`` is given without ``bias``.
    """
    if needs_autograd(input, up, bias, up_bias):
        return _Swiglu.apply(input, up, bias, up_bias, activation)
    return swiglu_fwd(input, up, bias, up_bias, activation=activation)


@checked
def swiglu_fwd(
    input: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str | ClampedSwiglu = "silu",
) -> torch.Tensor:
    """Computes ``swiglu`` without autograd.

    Args:
        input: float32, float16 or bfloat16, the gate [..., F], or without ``up`` gate and up [...,
            2F].
        up: [..., F] in the input's dtype, or None.
        bias, up_bias, activation: as in ``swiglu``.

    Returns:
        [..., F] in the input's dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``activation`` is not supported.
    """
    gate = gate_arguments("swiglu_fwd", activation)
    matrix, up_matrix = input_matrices("swiglu_fwd", input, up)
    rows, cols = result_extents(matrix, up_matrix)
    biases = dense_biases(bias, up_bias)
    out = matrix.new_empty((rows, cols))
    _fwd(matrix, up_matrix, *biases, out, *gate)
    return out if input.dim() == 2 else out.view(*input.shape[:-1], cols)


@checked
def swiglu_fwd_fp8(
    input: torch.Tensor,
    up: torch.Tensor | None,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    input_scale_inv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str | ClampedSwiglu = "silu",
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
) -> FP8Output:
    """Computes ``swiglu`` and quantizes its float32 result y: q = saturating_cast(y * scale).

    Args:
        input: float32, float16 or bfloat16, the gate [..., F], or without ``up`` gate and up [...,
            2F]. M is the product of all its dimensions but the last.
        up: [..., F] in the input's dtype, or None.
        input_scale_inv: scale_inv of an E4M3 ``input``, as ``block_quantize`` returns it for 1x128
            blocks. ``input`` must then be [M, 2F], without biases. Results equal those for the
            dequantized bfloat16 values. None if ``input`` is not in FP8.
        bias, up_bias, activation: as in ``swiglu``.
        scale: one float32 element on the input's device.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [M, F].
        columnwise: make the columnwise copy, the transpose [F, M].
        pad_columnwise: pad the columnwise copy to [F, M rounded up to 16]; the added columns are
            zeros. A GEMM that sums over the rows needs this.
        amax: one float32 element, becomes max(amax, max |y|), before scaling; NaN counts as
            largest. None computes no amax.

    Returns:
        The FP8 copies of y and their scale_inv.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``activation`` is not supported.
    """
    gate = gate_arguments("swiglu_fwd_fp8", activation)
    held = None
    if input_scale_inv is not None:
        input, held = held_input("swiglu_fwd_fp8", input, input_scale_inv, up, bias, HELD_MULTIPLE)
    matrix, up_matrix = input_matrices("swiglu_fwd_fp8", input, up)
    rows, cols = result_extents(matrix, up_matrix)
    biases = dense_biases(bias, up_bias)
    out = allocate(
        "swiglu_fwd_fp8", matrix, rows, cols, fp8_dtype, rowwise, columnwise, pad_columnwise
    )
    written = out.rowwise, out.columnwise, amax, out.scale_inv
    if held is not None:
        fwd_held_into(matrix, held, scale, *written, *gate)
    else:
        fwd_fp8_into(matrix, up_matrix, *biases, scale, *written, *gate)
    note_written(amax)
    return out


@checked
def swiglu_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str | ClampedSwiglu = "silu",
    with_dbias: bool = False,
) -> SwigluGrads:
    """Computes the gradients of ``swiglu`` with respect to gate, up and biases.

    Args:
        grad_output: [..., F], gradient of the output, in the input's dtype.
        input: as passed to ``swiglu``: float32, float16 or bfloat16, the gate [..., F], or without
            ``up`` gate and up [..., 2F].
        up: [..., F] in the input's dtype, or None.
        bias, up_bias, activation: as passed to ``swiglu``.
        with_dbias: also return the gradients of the biases, even without biases: the column sums of
            the gradients of gate and up, added in float32 in a fixed order.

    Returns:
        The gradients of ``input``, ``up`` and the biases; None for one that does not exist.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``activation`` is not supported.
    """
    gate = gate_arguments("swiglu_bwd", activation)
    matrix, up_matrix = input_matrices("swiglu_bwd", input, up)
    rows, cols = result_extents(matrix, up_matrix)
    biases = dense_biases(bias, up_bias)
    grad_matrix = output_gradient("swiglu_bwd", grad_output, input, cols)
    grad_input = matrix.new_empty(matrix.shape)
    grad_up = None if up_matrix is None else up_matrix.new_empty(up_matrix.shape)
    dbias, workspace = _dbias(matrix, rows, cols, with_dbias)
    _bwd(grad_matrix, matrix, up_matrix, *biases, grad_input, grad_up, dbias, workspace, *gate)
    return SwigluGrads(
        grad_input.view(input.shape), None if grad_up is None else grad_up.view(input.shape), dbias
    )


@checked
def swiglu_bwd_fp8(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    up: torch.Tensor | None,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    input_scale_inv: torch.Tensor | None = None,
    overwrite_input: bool = False,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str | ClampedSwiglu = "silu",
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
    with_dbias: bool = False,
) -> SwigluFP8Grads:
    """Computes ``swiglu_bwd`` and quantizes the float32 gradients as one matrix [M, 2F].

    The matrix has the gradient of the gate in its first F columns and that of up in its last F,
    even if gate and up are two tensors. M is the product of all dimensions of ``input`` but the
    last.

    Args:
        grad_output: [..., F], gradient of the output, in the input's dtype.
        input: float32, float16 or bfloat16, the gate [..., F], or without ``up`` gate and up [...,
            2F].
        up: [..., F] in the input's dtype, or None.
        scale: one float32 element on the input's device.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        input_scale_inv: scale_inv of an E4M3 ``input``, as ``block_quantize`` returns it for 1x128
            blocks. ``input`` must then be [M, 2F], without biases. Results equal those for the
            dequantized bfloat16 values. None if ``input`` is not in FP8.
        overwrite_input: allow the rowwise copy to reuse the memory of an ``input`` given with
            ``input_scale_inv``, which is then lost. Ops that cannot do so allocate new memory.
        bias, up_bias, activation: as in ``swiglu``.
        rowwise: make the rowwise copy, [M, 2F].
        columnwise: make the columnwise copy, the transpose [2F, M].
        pad_columnwise: pad the columnwise copy to [2F, M rounded up to 16]; the added columns are
            zeros. A GEMM that sums over the rows needs this.
        amax: one float32 element, becomes max(amax, max |gradient|), before scaling; NaN counts as
            largest. None computes no amax.
        with_dbias: also return the gradients of the biases, [2F] in the input's dtype.

    Returns:
        The FP8 copies of the matrix, and the biases' gradients or None.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``activation`` is not supported.
    """
    gate = gate_arguments("swiglu_bwd_fp8", activation)
    held = None
    if input_scale_inv is not None:
        input, held = held_input("swiglu_bwd_fp8", input, input_scale_inv, up, bias, HELD_MULTIPLE)
    matrix, up_matrix = input_matrices("swiglu_bwd_fp8", input, up)
    rows, cols = result_extents(matrix, up_matrix)
    biases = dense_biases(bias, up_bias)
    grad_matrix = output_gradient("swiglu_bwd_fp8", grad_output, input, cols)
    overwrites = overwrite_input and rowwise and held is not None
    makes = rowwise and not overwrites
    out = allocate(
        "swiglu_bwd_fp8", matrix, rows, 2 * cols, fp8_dtype, makes, columnwise, pad_columnwise
    )
    if overwrites:
        out = out._replace(rowwise=matrix.view(fp8_dtype))
    dbias, workspace = _dbias(grad_matrix, rows, cols, with_dbias)
    written = out.rowwise, out.columnwise, amax, out.scale_inv, dbias, workspace
    if held is not None:
        bwd_held_into(grad_matrix, matrix, held, scale, *written, *gate)
    else:
        bwd_fp8_into(grad_matrix, matrix, up_matrix, *biases, scale, *written, *gate)
    note_written(amax, matrix if overwrites else None)
    return SwigluFP8Grads(out, dbias)


class _Swiglu(OpFunction):
    LABEL = "swiglu"

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        up: torch.Tensor | None,
        bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        activation: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, up, bias, up_bias)
        ctx.activation = activation
        return swiglu_fwd(input, up, bias, up_bias, activation=activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, up, bias, up_bias = ctx.saved_tensors
        with_dbias = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        grads = swiglu_bwd(
            grad_output, input, up, bias, up_bias,
            activation=ctx.activation, with_dbias=with_dbias,
        )  # fmt: skip
        dbias, dup_bias = grads.dbias, None
        if dbias is not None and up_bias is not None:
            dbias, dup_bias = dbias.split(up_bias.shape[0])
        return grads.input, grads.up, dbias, dup_bias, None


def reference(
    input: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str | ClampedSwiglu = "silu",
) -> torch.Tensor:
    """Computes ``swiglu`` in plain PyTorch in the dtype of its inputs, differentiably.

    ``input`` is [..., F] or, if ``up`` is None, [..., 2F] with the gate first; other arguments are
    as in ``swiglu``. Returns [..., F].
    """
    gate, up = _gate_and_up(input, up, bias, up_bias)
    functional = torch.nn.functional
    if isinstance(activation, ClampedSwiglu):
        limit, alpha, offset = activation
        low = gate.clamp(max=limit)
        return low * torch.sigmoid(alpha * low) * (up.clamp(-limit, limit) + offset)
    if activation == "gelu":
        return functional.gelu(gate, approximate="tanh") * up
    if activation == "gelu_erf":
        return functional.gelu(gate) * up
    acts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": functional.silu,
        "relu": functional.relu,
        "sigmoid": torch.sigmoid,
        "squared_relu": lambda x: functional.relu(x).square(),
    }
    return acts[activation](gate) * up


def reference_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str | ClampedSwiglu = "silu",
) -> torch.Tensor:
    """Computes the gradients of gate and up, [..., 2F], in plain PyTorch in the inputs' dtype."""
    gate, up = _gate_and_up(input, up, bias, up_bias)
    if isinstance(activation, ClampedSwiglu):
        limit, alpha, offset = activation
        low = gate.clamp(max=limit)
        s = torch.sigmoid(alpha * low)
        gate_grad = torch.where(gate > limit, 0.0, grad_output)
        up_grad = torch.where(up.abs() > limit, 0.0, grad_output)
        slope = s + alpha * low * s * (1 - s)
        dgate = gate_grad * (up.clamp(-limit, limit) + offset) * slope
        return torch.cat([dgate, up_grad * low * s], dim=-1)
    if activation in ("relu", "squared_relu"):
        root = torch.where(gate <= 0, 0.0, gate)
        slope = 2 * root if activation == "squared_relu" else torch.where(gate > 0, 1.0, gate)
        value = root.square() if activation == "squared_relu" else root
        dgate = torch.where(gate <= 0, 0.0, grad_output * up * slope)
        return torch.cat([dgate, grad_output * value], dim=-1)
    if activation == "gelu_erf":
        cdf = torch.special.erfc(-gate * math.sqrt(0.5)) / 2
        slope = cdf + gate * torch.exp(-gate * gate / 2) / math.sqrt(2 * math.pi)
        value = gate * cdf
    elif activation == "gelu":
        factor = 2 * math.sqrt(2 / math.pi)
        s = torch.sigmoid(factor * gate * (1 + 0.044715 * gate * gate))
        slope = s + gate * s * (1 - s) * factor * (1 + 3 * 0.044715 * gate * gate)
        value = gate * s
    else:
        s = torch.sigmoid(gate)
        slope = s * (1 - s) if activation == "sigmoid" else s + gate * s * (1 - s)
        value = s if activation == "sigmoid" else gate * s
    return torch.cat([grad_output * up * slope, grad_output * value], dim=-1)


def reference_fp8(
    values: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    amax: torch.Tensor | None = None,
) -> FP8Output:
    """Quantizes a result or gradient [M, N] of floating-point values in plain PyTorch.

    Both copies are made. ``amax``, one float32 element or None, becomes max(amax, max |value|).
    """
    rounded = values.float()
    codes = reference_codec.encode_fp8(rounded * scale, fp8_dtype)
    if amax is not None and values.numel():
        found = rounded.abs().reshape(-1).view(torch.int32).max().reshape(amax.shape)
        amax.view(torch.int32).copy_(torch.maximum(amax.view(torch.int32), found))
    return FP8Output(codes, codes.t().contiguous(), 1.0 / scale)


def _gate_and_up(
    input: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (gate, up), each [..., F], with their biases added."""
    if up is not None and bias is not None and up_bias is None:
        bias, up_bias = bias.chunk(2)
    input = input if bias is None else input + bias
    if up is None:
        gate, up = input.chunk(2, dim=-1)
        return gate, up
    return input, up if up_bias is None else up + up_bias


def _dbias(
    matrix: torch.Tensor, rows: int, cols: int, with_dbias: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns uninitialised (bias gradient [2F], workspace of its sums), or (None, None)."""
    if not with_dbias:
        return None, None
    lines = scratch_sizes.lines(rows, scratch_sizes.ACTIVATION_ROWS)
    return matrix.new_empty(2 * cols), matrix.new_empty((lines, 2 * cols), dtype=torch.float32)
