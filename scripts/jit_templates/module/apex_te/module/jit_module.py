"""JitModule: an activation, which in FP8 writes FP8 itself, and a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..ops.binding import OpFunction
from ._core import arguments as _arguments
from ._core.arguments import initialize, materialize
from ._core.fused_casts import (
    ACTIVATIONS,
    ActivationBackward,
    ActivationForward,
    activate,
    is_gated,
)
from ._core.gemm import SAVED, FP8Call, as_matrix
from ._core.programs import apply_function, take_saved, without_autocast
from .linear import LinearParameters

__all__ = ["JitModule"]


class JitModule(LinearParameters):
    """``y = act(x) @ weight.T + bias``, in FP8 inside an enabled ``fp8_autocast`` region.

    Args:
        in_features: size of the activation's result; of a gated activation ``x`` has twice as many.
        out_features: size of the output.
        bias: learn a bias ``[out_features]``.
        activation: one of LayerNormMLP's.
        fuse_wgrad_accumulation, params_dtype, name, device: as in ``Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "gelu",
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        name: str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            owner, known = type(self).__name__, ", ".join(ACTIVATIONS)
            raise ValueError(f"{owner}: activation must be one of {known}, got {activation!r}")
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bool(bias)
        self.activation = activation
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.name = name
        self.init_method = None
        self.parallel_mode = None
        self._make_parallel(None, 1, False)
        self._make_fp8_state()  # for one GEMM; gemms=2 for two
        dtype = _arguments.params_dtype_of(type(self).__name__, params_dtype, None)
        self._make_linear(None, dtype, device)
        initialize(self)

    def reset_parameters(self) -> None:
        """Fill the weight with N(0, 0.023^2) and the bias with 0."""
        materialize(self)
        self._reset_linear()

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{text}, bias={self.use_bias}, activation={self.activation!r}"

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Applies the module to ``inp`` [.., features]; gives [.., out_features].

        dtypes and ``is_first_microbatch`` as in ``Linear.forward``.

        Raises:
            TypeError: a dtype.
            ValueError: a shape.
        """
        weight, bias = self._linear_operands()
        features = self.in_features * (2 if is_gated(self.activation) else 1)
        return self._call(
            inp, features, (weight, bias), (weight,), is_first_microbatch, weight, bias
        )

    def _run(
        self, call: FP8Call, inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        inp = inp.to(call.dtype)
        if not call.is_fp8:
            return self._linear(activate(self.activation, inp), weight, bias, call)
        arguments = inp, weight, bias
        return apply_function(JitModuleFunction, arguments, self.activation, call)


class JitModuleFunction(OpFunction):
    """The forward in FP8, and what its backward needs of it."""

    LABEL = "JitModule"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        call: FP8Call,
    ) -> torch.Tensor:
        need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
        gemm, cached = call.gemm(0, weight, need_input, need_weight), call.cached[0]
        x = as_matrix(inp)
        act = ActivationForward(activation, x)
        # In high precision only where backward wants it; else the op writes FP8 by itself.
        plain = act.plain() if gemm.saves_values else None
        quantized, part = gemm.cast_input(act if plain is None else plain)
        out = gemm.fprop(quantized, weight, cached, bias, call.dtype, inp.shape)
        saved = gemm.saved(plain, part, weight, cached)
        ctx.save_for_backward(*saved, x if need_input else None)
        ctx.gemm, ctx.activation = gemm, activation
        ctx.bias_dtype = bias.dtype if need_bias and bias is not None else None
        ctx.input_shape, ctx.device_type = inp.shape, inp.device.type
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return without_autocast(_backward, ctx, grad_output)


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
    gemm, saved = ctx.gemm, take_saved(ctx)
    operands, x = saved[:SAVED], saved[SAVED]
    quantized, grad_bias, dy = gemm.cast_gradient(as_matrix(grad_output), ctx.bias_dtype)
    grad_input = grad_weight = None
    if gemm.need_input:
        d_act = gemm.dgrad(operands, quantized, x.dtype)
        grad_input = ActivationBackward(ctx.activation, d_act, x, False).plain()
        grad_input = grad_input.view(ctx.input_shape)
    if gemm.need_weight:
        grad_weight = gemm.wgrad(operands, dy, quantized)
    return grad_input, grad_weight, grad_bias, None, None
