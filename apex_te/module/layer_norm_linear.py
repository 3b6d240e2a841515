"""LayerNormLinear: a norm and a linear layer; in FP8 the norm writes the GEMM's FP8 input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..fp8.tensor import QuantizedTensor
from ..ops.binding import OpFunction, once_differentiable, unwrapped
from ..runtime.named_arguments import named_arguments
from ._core.arguments import VAGUE, explain, initialize, materialize
from ._core.fused_casts import NormAgain, NormForward, NormOptions, norm_backward
from ._core.gemm import (
    SAVED,
    FP8Call,
    GemmCall,
    Operand,
    as_matrix,
    cast_to,
)
from ._core.heads import HeadGradients, HeadLayout, filled_gradients, sorted_bias, split_output
from ._core.norm_parameters import NormedModule
from ._core.programs import apply_function, repeatable, take_saved
from .linear import LinearParameters

__all__ = ["LayerNormLinear"]


class LayerNormLinear(NormedModule, LinearParameters):
    """``y = norm(x) @ weight.T + bias``, in FP8 inside an enabled ``fp8_autocast`` region.

    Args:
        in_features, out_features: sizes of input and output. Any size works; multiples of 16 are
            fastest.
        eps: added to the variance (for RMSNorm, to the mean square).
        bias: learn a bias ``[out_features]``.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: gamma is ``1 + layer_norm_weight``, which starts at 0.
        return_layernorm_output: also return the norm's output, in the dtype of ``y``.
        return_bias: also return the bias, which is then not added.
        fuse_wgrad_accumulation, init_method, params_dtype, dtype, parameters_split,
            delay_wgrad_compute, name, device: as in ``Linear``.
        sequence_parallel, tp_group, tp_size, get_rng_state_tracker, rng_tracker_name: as in
            ``Linear``.
        parallel_mode: None or ``"column"``, as in ``Linear``.

    Its parameters are ``layer_norm_weight``, ``layer_norm_bias`` ``[in_features]``, ``weight``
    ``[out_features, in_features]``, ``bias`` ``[out_features]``. Interface and defaults follow
    TransformerEngine's LayerNormLinear.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a size is below 1, the ranks do not divide ``out_features``, ``eps`` is not in
            [0, 1), an option is unknown, or ``parameters_split`` does not have ``out_features``
            rows or is given with ``fuse_wgrad_accumulation`` or ``delay_wgrad_compute``.
    """

    @named_arguments()
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        wanted = self._take_options(locals(), "in_features", "out_features")
        if self.parallel_mode == "row":  # its input's features would be split: the norm needs all
            raise ValueError("LayerNormLinear: parallel_mode must be None or 'column', got 'row'")
        self._make_norm(
            in_features, eps, normalization, zero_centered_gamma, return_layernorm_output,
            wanted, device,
        )  # fmt: skip
        self._make_linear(parameters_split, wanted, device)
        initialize(self)

    def reset_parameters(self) -> None:
        """Sets gamma to 1, beta and bias to 0, the weight by ``init_method`` (N(0, 0.023^2)).

        Parameters on the meta device get memory first; see ``Linear.reset_parameters``.
        """
        materialize(self)
        self.reset_layer_norm_parameters()
        self._reset_linear()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, normalization={self.normalization}, eps={self.eps}"
        )

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Applies the norm and the linear layer.

        Args:
            inp: [..., in_features] in the dtype of the parameters: fp32, fp16 or bf16. Under
                ``torch.autocast`` it may have any of these, and the output has autocast's dtype.
            is_first_microbatch: True caches the FP8 weight, False reuses it, None casts it in each
                call; as in ``Linear.forward``.

        Returns:
            ``out`` [..., out_features]; ``(out, bias)`` with ``return_bias``, ``(out, norm)`` with
            ``return_layernorm_output``, ``(out, bias, norm)`` with both. ``norm`` is the norm's
            output.

        Raises:
            TypeError: ``inp`` has another dtype than those above.
            ValueError: the last dimension of ``inp`` is not ``in_features``.
        """
        try:
            return self.forward_with_residual(inp, None, is_first_microbatch, False)[0]
        except VAGUE as error:
            explain(self, error, {"inp": inp})
            raise

    def forward_with_residual(
        self,
        inp: torch.Tensor,
        residual: torch.Tensor | None,
        is_first_microbatch: bool | None = None,
        return_residual: bool = True,
        heads: HeadLayout | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        """Applies the norm and the linear layer to ``inp + residual``.

        The norm kernels perform the addition, and in backward accumulate the gradient of ``total``.

        Args:
            inp: [..., in_features] in fp32, fp16 or bf16, as in ``forward``.
            residual: tensor in the shape and dtype of ``inp``; None adds nothing.
            is_first_microbatch: True caches the FP8 weight, False reuses it, None casts it in each
                call.
            return_residual: True if the caller needs ``total``; with False it may be None in FP8.
            heads: layout of attention heads in the output features, a ``HeadLayout`` (qkv_format,
                repeats, groups, size, interleaved); in FP8 the output is then returned split into
                heads. None does not split it.

        Returns:
            ``(out, total)``: what ``forward`` returns, and ``inp + residual`` (``inp`` without a
            residual). In FP8 with ``heads``, ``out`` is the tuple ``(queries, keys, values)``, each
            [..., heads, size].

        Raises:
            TypeError: a tensor has another dtype than those above.
            ValueError: a shape does not match.
        """
        weight, bias = self._linear_operands()
        if residual is not None:
            self._check_residual(inp, residual)
        parameters = (self._gamma_and_beta()[0], weight, bias)
        applied = None if self.return_bias else bias
        call = None
        if is_first_microbatch is None:
            call = self._known_call(inp, self.in_features, parameters)
        if call is not None and not call.is_fp8:
            norm, total = self._plain_norm(inp, residual)
            return self._returned(functional.linear(norm, weight, applied), bias, norm), total
        if call is not None:
            out, norm, total = self._run(
                call, inp, residual, weight, applied, return_residual, heads, True
            )
            return self._returned(out, bias, norm), total
        out, norm, total = self._call(
            inp, self.in_features, parameters, (weight,), is_first_microbatch, residual, weight,
            applied, return_residual, heads,
        )  # fmt: skip
        return self._returned(out, bias, norm), total

    def _run(
        self,
        call: FP8Call,
        inp: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        return_residual: bool,
        heads: HeadLayout | None,
        is_direct: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Computes ``(out, norm, total)`` as ``call`` says, which with ``is_direct`` is a known
        call.

        ``out`` may be queries, keys and values. In FP8 ``norm`` and ``total``, the tensor that was
        normalised, are None if the caller does not ask for them.
        """
        inp, residual = cast_to(inp, call.dtype), cast_to(residual, call.dtype)
        if not call.is_fp8:
            norm, total = self._plain_norm(inp, residual)
            return self._linear(norm, weight, bias, call), norm, total
        tensors = (inp, residual, *self._norm_operands(call.dtype), weight, bias)
        options = self._norm_options[1 if return_residual else 0]
        if is_direct:
            found = LayerNormLinearFunction.direct(*map(unwrapped, tensors), options, call, heads)
        else:
            found = apply_function(LayerNormLinearFunction, tensors, options, call, heads)
        return found if heads is None else (found[:-2], *found[-2:])


def normalized(
    norm: NormForward, gemm: GemmCall, options: NormOptions
) -> tuple[Operand, QuantizedTensor | None, torch.Tensor | None]:
    """Runs the norm and quantizes its result for fprop; returns ``(operand, local, y)``.

    ``operand`` has the rows of all ranks. ``local`` has this rank's FP8 copies, or is None if rows
    are gathered in bf16 or fp32. ``y``, the norm's output, is None if neither returned nor saved.
    """
    if not (options.return_norm or gemm.saves_values or gemm.rounds_input):
        return *gemm.cast_input(norm), None
    y = norm.plain()
    return *gemm.cast_input(y), y


SAVED_NORM = 5  # tensors that `saved_norm` returns


def saved_norm(
    norm: NormForward, inp: torch.Tensor, gemm: GemmCall
) -> tuple[torch.Tensor | None, ...]:
    """Returns ``(x, weight, bias, mean, rstd)`` for backward; ``x`` [..., cols] is contiguous.

    ``bias`` is None unless ``gemm`` remakes its input.
    """
    x = norm.residual_sum
    if x is None:
        x = inp if inp.is_contiguous() else norm.x
    bias = norm.bias if gemm.remakes_input else None
    return x, norm.weight, bias, norm.mean, norm.rstd


def norm_again(saved: tuple, options: NormOptions) -> NormAgain:
    """Returns the norm of a forward, from what ``saved_norm`` returned."""
    x, weight, bias, mean, rstd = saved
    return NormAgain(
        as_matrix(x), weight, bias, mean, rstd, options.zero_centered_gamma, options.return_norm
    )


def norm_gradients(
    ctx: Any, saved: tuple, d_norm: torch.Tensor, extra: Any, d_residual: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns ``(dx, dweight, dbias)`` of the norm, ``dx`` in the input's shape.

    ``d_norm`` comes from the GEMM. ``extra`` and ``d_residual`` are the gradients of the function's
    outputs ``norm`` and ``total`` (the norm's output and input), or None.
    """
    x, weight, _, mean, rstd = saved
    x = as_matrix(x)
    if extra is not None:
        d_norm = d_norm + extra.reshape(d_norm.shape)
    if d_residual is not None:
        d_residual = d_residual.reshape(x.shape)
    dx, dweight, dbias = norm_backward(
        d_norm, x, weight, mean, rstd, ctx.norm.zero_centered_gamma, d_residual, *ctx.needs_norm
    )
    return dx.view(ctx.input_shape), dweight, dbias


def residual_output(inp: torch.Tensor, norm: NormForward) -> torch.Tensor:
    """Returns the norm's input in the shape of ``inp``, as a new output."""
    if norm.residual_sum is None:
        return inp.view_as(inp)
    return norm.residual_sum if inp.dim() == 2 else norm.residual_sum.view(inp.shape)


class LayerNormLinearFunction(OpFunction):
    """``norm(inp [+ residual]) @ weight.T + bias`` in FP8.

    Returns ``(out, norm, total)``: ``norm`` is the norm's output and ``total`` its input, both None
    unless ``NormOptions`` ask for them. With ``heads`` queries, keys and values replace ``out``.
    """

    LABEL = "LayerNormLinear"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_options: NormOptions,
        call: FP8Call,
        heads: HeadLayout | None,
    ) -> tuple[torch.Tensor | None, ...]:
        tensors = (inp, residual, norm_weight, norm_bias, weight, bias)
        if call.programs is None:
            return _forward(ctx, *tensors, norm_options, call, heads)
        key = (
            ctx.needs_input_grad, inp.dtype, inp.shape, norm_options, heads, call.keep_columnwise,
            call.small,
        )  # fmt: skip
        return call.programs.forward(ctx, _forward, tensors, (norm_options, call, heads), key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        return _backward(ctx, *grads)


def _forward(
    ctx: Any,
    inp: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_options: NormOptions,
    call: FP8Call,
    heads: HeadLayout | None,
) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad
    need_norm = needs[0] or needs[1] or needs[2] or needs[3]
    gemm = call.gemm(0, weight, need_norm, needs[4], call.keep_columnwise, need_norm)
    rest = None if residual is None else as_matrix(residual)
    norm = NormForward(as_matrix(inp), norm_weight, norm_bias, *norm_options[:3], rest)
    quantized, part, y = normalized(norm, gemm, norm_options)
    operand, is_sorted = gemm.cast_weight(weight, call.cached[0], heads)
    applied = sorted_bias(bias, heads) if is_sorted else bias
    out = gemm.fprop(quantized, weight, operand, applied, inp.dtype, inp.shape)
    norm_saved = saved_norm(norm, inp, gemm) if need_norm else (None,) * SAVED_NORM
    ctx.save_for_backward(*gemm.saved(y, part, weight, operand), *norm_saved)
    ctx.set_materialize_grads(False)
    ctx.gemm, ctx.norm, ctx.programs, ctx.heads = gemm, norm_options, None, heads
    ctx.needs_norm = (needs[2], needs[3])
    ctx.bias_dtype = bias.dtype if bias is not None and needs[5] else None
    ctx.has_residual = residual is not None
    ctx.input_shape, ctx.input_dtype = inp.shape, inp.dtype
    outs = (out,) if heads is None else split_output(out, heads, is_sorted)
    ctx.output_shapes = [part.shape for part in outs]
    ctx.device_type = inp.device.type
    returned = None
    if norm_options.return_norm and y is not None:
        # A view of a matrix, too: torch 2.11 would compile y itself without its gradient.
        returned = y.view(inp.shape)
    total = residual_output(inp, norm) if norm_options.return_residual else None
    return *outs, returned, total


@repeatable
def _backward(ctx: Any, *grads: Any) -> tuple:
    *grad_outputs, grad_norm, grad_residual = grads
    gemm, saved = ctx.gemm, take_saved(ctx)
    saved_gemm, saved_norm_tensors = saved[:SAVED], saved[SAVED:]
    del saved
    filled = filled_gradients(ctx.output_shapes, grad_outputs, *grads)
    dy = as_matrix(filled[0]) if ctx.heads is None else HeadGradients(ctx.heads, filled)
    if gemm.remakes_input:
        source = norm_again(saved_norm_tensors, ctx.norm)
        saved_gemm = gemm.remade(saved_gemm, source, True)
    gathered = gemm.start_gather(saved_gemm)
    quantized, grad_bias, dy = gemm.cast_gradient(dy, ctx.bias_dtype)
    grad_weight = dx = d_gamma = d_beta = pending = None
    if gemm.need_input:
        d_norm, pending = gemm.reduced_dgrad(saved_gemm, quantized, ctx.input_dtype)
        if d_norm is not None:  # frees the norm's memory before the weight gradient takes its own
            dx, d_gamma, d_beta = norm_gradients(
                ctx, saved_norm_tensors, d_norm, grad_norm, grad_residual
            )
            del d_norm
    if gemm.need_weight:
        if gemm.remakes_input:
            saved_gemm = gemm.remade(saved_gemm, source, False)
        grad_weight = gemm.wgrad(saved_gemm, dy, quantized, gathered)
    if pending is not None:
        dx, d_gamma, d_beta = norm_gradients(
            ctx, saved_norm_tensors, pending.wait(), grad_norm, grad_residual
        )
    d_residual = dx if ctx.has_residual else None
    return dx, d_residual, d_gamma, d_beta, grad_weight, grad_bias, None, None, None
