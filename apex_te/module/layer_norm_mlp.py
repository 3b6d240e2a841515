"""LayerNormMLP: a norm, a linear layer, an activation and a second linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..fp8.scheme.base import shared_scale
from ..fp8.tensor import QuantizedTensor
from ..ops import dense_gemm_gelu, dense_gemm_swiglu
from ..ops.binding import (
    OpFunction,
    once_differentiable,
    second_backward_is_refused,
    unwrapped,
)
from ..ops.dense_gemm import dense_gemm
from ..runtime.named_arguments import check_flags, named_arguments
from ._core import arguments as _arguments
from ._core import gemm as _gemm
from ._core.arguments import VAGUE, explain, initialize, materialize
from ._core.fused_casts import (
    ActivationBackward,
    ActivationForward,
    NormForward,
    NormOptions,
    activate,
    activation_of,
    is_gated,
    scalars,
)
from ._core.gemm import (
    SAVED,
    FP8Call,
    GemmCall,
    Operand,
    adds_in_product,
    as_matrix,
    cast_to,
    quantized_weight,
)
from ._core.heads import output_gradient
from ._core.held_rows import hold, input_of
from ._core.norm_parameters import NormedModule
from ._core.parallel import divided, tag
from ._core.plain_functions import PlainActivationFunction
from ._core.programs import apply_function, may_overwrite_saved, repeatable, take_saved
from ._core.recompute import Repeated, run_repeatable
from .layer_norm_linear import (
    SAVED_NORM,
    norm_again,
    norm_gradients,
    normalized,
    residual_output,
    saved_norm,
)

__all__ = ["LayerNormMLP"]

_LINEAR = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


class LayerNormMLP(NormedModule):
    """``act(norm(x) @ fc1.T + b1) @ fc2.T + b2``, in FP8 inside an enabled ``fp8_autocast`` region.

    Args:
        hidden_size: features of the input and of the output.
        ffn_hidden_size: features between the two GEMMs; a gated activation makes FC1 twice as wide.
        eps: added to the variance (for RMSNorm, to the mean square).
        bias: learn both biases.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: ``"gelu"`` (tanh form), ``"qgelu"``, ``"relu"``, ``"srelu"``, ``"silu"``; or
            gated: ``"geglu"``, ``"glu"``, ``"qgeglu"``, ``"reglu"``, ``"sreglu"``, ``"swiglu"``,
            ``"clamped_swiglu"``.
        activation_params: dict of parameters of ``"clamped_swiglu"``, which is ``gate *
            sigmoid(alpha * gate) * (up + glu_linear_offset)`` with gate and up clamped to
            ``limit``. Keys: ``limit`` (default 7.0), ``alpha`` (1.702) and ``glu_linear_offset``
            (1.0).
        init_method, output_layer_init_method: initialise the weights of FC1 and of FC2; default
            N(0, 0.023^2).
        zero_centered_gamma, return_layernorm_output: as in ``LayerNormLinear``.
        return_bias: also return FC2's bias, which is then not added.
        checkpoint: save only the input, and recompute the norm, FC1 and the activation in backward,
            with the same results and FP8 scales.
        fuse_wgrad_accumulation, params_dtype, dtype, delay_wgrad_compute, name, device: as in
            ``Linear``.
        seq_length, micro_batch_size: ignored, accepted for compatibility.
        set_parallel_mode: split ``ffn_hidden_size`` over the ranks of ``tp_group``: FC1 is
            column-parallel, FC2 row-parallel. With a gated activation each rank has rows of both
            halves.
        sequence_parallel, tp_group, tp_size, get_rng_state_tracker: as in ``Linear``.

    Its parameters are ``layer_norm_weight``, ``layer_norm_bias``, ``fc1_weight`` ``[ffn, hidden]``
    (gated: ``[2 ffn, hidden]``, gate first), ``fc1_bias``, ``fc2_weight`` ``[hidden, ffn]``,
    ``fc2_bias``. Interface and defaults follow TransformerEngine's LayerNormMLP.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a size is below 1, the ranks do not divide ``ffn_hidden_size``, ``eps`` is not
            in [0, 1), an option is unknown, or ``activation_params`` does not fit ``activation``.
    """

    hidden_size: int
    ffn_hidden_size: int
    activation: str
    set_parallel_mode: bool
    output_layer_init_method: Callable[[torch.Tensor], Any] | None
    checkpoint = False
    activation_params: dict[str, float] | None = None
    _function: Any = None  # an activation that no name alone describes
    can_separate_rows = True

    @named_arguments()
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        delay_wgrad_compute: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        name: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        checkpoint: bool = False,
        activation_params: dict[str, float] | None = None,
    ) -> None:
        function = activation_of("LayerNormMLP", activation, activation_params)
        check_flags("LayerNormMLP", set_parallel_mode=set_parallel_mode, checkpoint=checkpoint)
        wanted = self._take_options(locals(), "hidden_size", "ffn_hidden_size", gemms=2)
        self._function = None if isinstance(function, str) else function
        self._make_norm(
            hidden_size, eps, normalization, zero_centered_gamma, return_layernorm_output,
            wanted, device,
        )  # fmt: skip
        ffn = ffn_hidden_size
        if set_parallel_mode:
            ffn = divided("LayerNormMLP", "ffn_hidden_size", ffn, self.tp_size)
        inner = ffn * (2 if is_gated(function) else 1)
        shapes = ((inner, hidden_size), (inner,), (hidden_size, ffn), (hidden_size,))
        for parameter, shape, dim in zip(_LINEAR, shapes, (0, 0, 1, None), strict=True):
            own = self.use_bias or parameter.endswith("weight")
            value = _arguments.parameter(shape, wanted, device) if own else None
            if set_parallel_mode:
                tag(value, dim, dim is None and self.sequence_parallel, tp_group)
            self.register_parameter(parameter, value)
        initialize(self)

    def reset_parameters(self) -> None:
        """Sets gamma to 1, beta and biases to 0, and the weights by their methods (N(0, 0.023^2)).

        Parameters on the meta device get memory first; see ``Linear.reset_parameters``.
        """
        materialize(self)
        self.reset_layer_norm_parameters()
        with self._forked(self.set_parallel_mode):
            _arguments.fill(self._parameters["fc1_weight"], self.init_method)
            _arguments.fill(self._parameters["fc2_weight"], self.output_layer_init_method)
        for name in ("fc1_bias", "fc2_bias"):
            bias = self._parameters[name]
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"bias={self.use_bias}, normalization={self.normalization}, "
            f"activation={self.activation}, eps={self.eps}"
        )

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Applies the norm and the MLP.

        Args:
            inp: [..., hidden_size] in the dtype of the parameters: fp32, fp16 or bf16. Under
                ``torch.autocast`` it may have any of these, and the output has autocast's dtype.
            is_first_microbatch: True caches the FP8 weights, False reuses them, None casts them in
                each call; as in ``Linear.forward``.

        Returns:
            ``out`` in the shape of ``inp``; ``(out, bias)`` with ``return_bias``, ``(out, norm)``
            with ``return_layernorm_output``, ``(out, bias, norm)`` with both. ``norm`` is the
            norm's output.

        Raises:
            TypeError: ``inp`` has another dtype than those above.
            ValueError: the last dimension of ``inp`` is not ``hidden_size``.
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
        add_residual: bool = False,
        repeated: Repeated | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        """Applies the norm and the MLP to ``inp + residual``.

        The norm kernels perform the addition, and in backward accumulate the gradient of ``total``.

        Args:
            inp: [..., hidden_size] in fp32, fp16 or bf16, as in ``forward``.
            residual: tensor in the shape and dtype of ``inp``; None adds nothing.
            is_first_microbatch: True caches the FP8 weights, False reuses them, None casts them in
                each call.
            return_residual: True if the caller needs ``total``; with False it may be None in FP8.
            add_residual: let FC2's GEMM add ``total`` to its output where possible, which is then
                rounded once. Requires ``return_residual``, and that no bias is returned.
            repeated: only for the recompute with ``checkpoint``: the record of the first run.

        Returns:
            ``(out, total)``: what ``forward`` returns, and ``inp + residual`` (``inp`` without a
            residual). ``total`` is None if FC2's GEMM has added it to ``out``.

        Raises:
            TypeError: a tensor has another dtype than those above.
            ValueError: a shape does not match.
        """
        if residual is not None:
            self._check_residual(inp, residual)
        known = None
        if repeated is not None:
            known = repeated.shape
        elif self.checkpoint and torch.is_grad_enabled():
            args = (inp, residual, is_first_microbatch, return_residual, add_residual)
            return run_repeatable(self, self.forward_with_residual, args)
        linear = w1, b1, w2, b2 = tuple([getattr(self, name) for name in _LINEAR])
        parameters = (self._gamma_and_beta()[0], *linear)
        applied = None if self.return_bias else b2
        call = None
        if is_first_microbatch is None:
            call = self._known_call(inp, self.hidden_size, parameters)
        if call is not None and not call.is_fp8:
            norm, total = self._plain_norm(inp, residual)
            hidden = self._activated(functional.linear(norm, w1, b1))
            return self._returned(functional.linear(hidden, w2, applied), b2, norm), total
        if call is not None:
            out, norm, total = self._run(
                call, inp, residual, w1, b1, w2, applied, return_residual, add_residual, known, True
            )
            return self._returned(out, b2, norm), total
        out, norm, total = self._call(
            inp, self.hidden_size, parameters, (w1, w2), is_first_microbatch, residual, w1, b1, w2,
            applied, return_residual, add_residual, known,
        )  # fmt: skip
        return self._returned(out, b2, norm), total

    def _activated(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the activation in bf16 or fp32 to FC1's output."""
        function = self._function or self.activation
        programs = self._plain_programs() if hidden.requires_grad else None
        if programs is None:
            return activate(function, hidden)
        return PlainActivationFunction.direct(unwrapped(hidden), function, programs)

    def _split_modes(self) -> tuple[str | None, ...]:
        return ("column", "row") if self.set_parallel_mode else ()

    def _run(
        self,
        call: FP8Call,
        inp: torch.Tensor,
        residual: torch.Tensor | None,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        return_residual: bool,
        add_residual: bool,
        known: torch.Size | None,
        is_direct: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Computes ``(out, norm, total)`` as ``call`` says, which with ``is_direct`` is a known
        call.

        In FP8 ``norm`` and ``total``, the tensor that was normalised, are None if not requested;
        ``total`` also if it has been added to ``out``.
        """
        inp, residual = cast_to(inp, call.dtype), cast_to(residual, call.dtype)
        if not call.is_fp8:
            norm, total = self._plain_norm(inp, residual)
            hidden = self._activated(self._linear(norm, w1, b1, call, 0))
            return self._linear(hidden, w2, b2, call, 1), norm, total
        tensors = (inp, residual, *self._norm_operands(call.dtype), w1, b1, w2, b2)
        adds = add_residual and adds_in_product(call, 1, inp)
        options = self._norm_options[1 if return_residual and not adds else 0]
        rest = (options, self._function or self.activation, call, adds, known)
        if is_direct:
            return LayerNormMLPFunction.direct(*map(unwrapped, tensors), *rest)
        return apply_function(LayerNormMLPFunction, tensors, *rest)


# GEMMs with fused SwiGLU or GELU, for schemes that know the scale before the data (delayed
# scaling), whose epilogues write FP8 data, or, with SwiGLU, compute it from the amax (current
# scaling), which their epilogues find. A first delayed scale needs the tensor as well: the same
# kernels multiply, and the activation runs separately, with equal bits except for a bias's
# gradient. Block scales are found in the high-precision result, which these kernels do not
# write.
_GELU, _SWIGLU = "gelu", "swiglu"
_Operands = tuple[Any, Any, Any, Any]


class ActivatedProduct(NamedTuple):
    """FC1's output in bf16, and FP8 copies of the activation's result.

    With ``hidden_scale`` the output is in E4M3, as ``hold`` makes it. ``act_scale``, whose last
    element is the scale, is for the columnwise copy that backward makes; None if backward needs no
    such copy, or ``act`` has it.
    """

    hidden: torch.Tensor
    hidden_scale: torch.Tensor | None
    act: QuantizedTensor
    act_scale: torch.Tensor | None


def takes(
    gemm1: GemmCall,
    gemm2: GemmCall,
    activation: str,
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
) -> bool:
    """Returns True if the kernels of this module compute FC1 and FC2's dgrad for a call.

    This depends on shapes, dtypes, recipe and options, not on which tensors need a gradient, so
    that a recompute and an evaluation run the same GEMMs as the training step.
    """
    first, second = gemm1.quantizers, gemm2.quantizers
    if not (first.backend.fuses_swiglu and second.backend.fuses_swiglu):
        return False
    if activation != _GELU and (activation != _SWIGLU or b1 is not None):
        return False
    if x.dtype is not torch.bfloat16:
        return False
    for quantizer in (first.grad_output, second.input):
        if not (quantizer.keeps_scale or (quantizer.measures and activation == _SWIGLU)):
            return False
    for gemm in (gemm1, gemm2):
        if gemm.options.parallel is not None or gemm.quantizers.high_precision_wgrad:
            return False
    if gemm2.options.save_original:
        return False
    is_gated = activation == _SWIGLU
    features = w1.shape[0] // (2 if is_gated else 1)
    return dense_gemm_swiglu.gains(x.shape[0], features, w1.shape[1], is_gated)


def activated_product(
    gemm1: GemmCall,
    gemm2: GemmCall,
    activation: str,
    x: Operand,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    weight: QuantizedTensor | None,
    holds: bool,
) -> ActivatedProduct:
    """Computes FC1 and the activation; ``weight``, FP8 copies of ``w1``, are made here if None.

    With ``holds`` FC1's output is held in FP8 where its kernel does so.
    """
    assert isinstance(x, QuantizedTensor)  # no rows are gathered
    if weight is None:
        weight = quantized_weight(gemm1.quantizers, gemm1.quantizers.weight, w1, False)
    operands: _Operands = (
        x.rowwise, weight.rowwise, x.rowwise_scale_inv, weight.rowwise_scale_inv
    )  # fmt: skip
    quantizer = gemm2.quantizers.input
    # Backward makes the columnwise copy beside FC2's dgrad, if it computes that.
    later = gemm2.keeps_input and gemm2.need_input
    now = gemm2.keeps_input and not later
    known = None if now else quantizer.scale_in_advance()
    hidden_scale = out = None
    if quantizer.measures:
        assert x.rowwise is not None
        measured = scalars(x.rowwise)
        hidden = dense_gemm_swiglu.dense_gemm_swiglu(*operands, None, amax=measured[0]).hidden
        act = quantizer.produce_measured(ActivationForward(activation, hidden), measured, True, now)
    elif known is None:
        hidden = dense_gemm(*operands, bias=b1)
        act = quantizer.produce(ActivationForward(activation, hidden), True, now)
    else:
        scale, amax = known
        if activation == _GELU:
            hidden, out = dense_gemm_gelu.dense_gemm_gelu(*operands, scale, bias=b1, amax=amax)
        elif holds:
            held = dense_gemm_swiglu.dense_gemm_swiglu_held(*operands, scale, amax=amax)
            hidden, hidden_scale, out = held
        else:
            hidden, out = dense_gemm_swiglu.dense_gemm_swiglu(*operands, scale, amax=amax)
        act = shared_scale(out, quantizer.dtype)
    return ActivatedProduct(hidden, hidden_scale, act, quantizer.snapshot(act) if later else None)


def hidden_gradient(
    gemm1: GemmCall,
    gemm2: GemmCall,
    activation: str,
    saved: tuple,
    dy: QuantizedTensor,
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor | None,
    act_scale: torch.Tensor | None,
    with_dbias: bool,
    columns_later: bool,
    overwrites: bool,
) -> tuple[QuantizedTensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Computes FC2's dgrad and the activation's gradient, and the activation once more.

    Returns ``(d_hidden, act, d_b1)``; ``d_hidden`` is None if only FC1's bias learns; ``act`` has
    columnwise FP8 data, and is None without ``act_scale``. Frees the rowwise copy of ``dy``; wgrad
    may then reuse its memory. With ``columns_later`` FC1's dgrad makes the columnwise copy of
    ``d_hidden``; with ``overwrites`` the rowwise copy may take the memory of ``hidden``.
    """
    weight, quantizer = gemm2.recast_weight(saved), gemm1.quantizers.grad_output
    act_scale = None if act_scale is None else act_scale[-1:]
    operands: _Operands = (
        dy.rowwise, weight.columnwise, dy.rowwise_scale_inv, weight.columnwise_scale_inv
    )  # fmt: skip
    columnwise = gemm1.need_weight and not columns_later
    scale, amax = quantizer.scale_in_advance() or (None, None)
    if not (gemm1.need_input or gemm1.need_weight):
        scale = None  # nothing is cast where only the bias learns
    measured = scalars(hidden) if quantizer.measures else None
    out = act = d_act = d_b1 = None
    if scale is None and measured is None:
        d_act = dense_gemm(*operands, use_split_accumulator=True)
    elif activation == _GELU:
        assert scale is not None
        out, act, d_b1 = dense_gemm_gelu.dense_gemm_gelu_bwd(
            *operands, hidden, scale, quantizer.dtype, columnwise=columnwise, amax=amax,
            act_scale=act_scale, with_dbias=with_dbias,
        )  # fmt: skip
    else:
        if measured is not None:
            shape = hidden.shape[0], hidden.shape[1] // 2
            amax, d_act = measured[0], hidden.new_empty(shape, dtype=torch.bfloat16)
        out, act = dense_gemm_swiglu.dense_gemm_swiglu_bwd(
            *operands, hidden, scale, quantizer.dtype, hidden_scale_inv=hidden_scale,
            columnwise=columnwise, amax=amax, act_scale=act_scale, grad=d_act,
        )  # fmt: skip
    del weight, operands
    gemm2.drop_rows(dy)
    if out is not None:
        return shared_scale(out, quantizer.dtype), act, d_b1
    if act is None and act_scale is not None:
        forward = ActivationForward(activation, hidden, hidden_scale)
        act = forward.fp8(act_scale, gemm2.quantizers.input.dtype, False, True, None, True)[1]
    assert d_act is not None
    gradient = ActivationBackward(activation, d_act, hidden, with_dbias, hidden_scale, overwrites)
    if measured is None:
        quantized, _ = _quantized_hidden(gemm1, gradient, columns_later)
    else:
        quantized = quantizer.produce_measured(gradient, measured, gemm1.need_input, columnwise)
    return quantized, act, gradient.dbias


class LayerNormMLPFunction(OpFunction):
    """``act(norm(inp [+ residual]) @ w1.T + b1) @ w2.T + b2`` in FP8.

    With ``adds``, which requires ``adds_in_product``, the second GEMM adds the norm's input. A
    recompute passes the shape of ``out`` as ``known``: backward does not need the second GEMM, so
    it is skipped, and ``out`` is uninitialised. Returns ``(out, norm, total)``: ``norm`` is the
    norm's output and ``total`` its input, both None unless asked for.
    """

    LABEL = "LayerNormMLP"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        norm_options: NormOptions,
        activation: str,
        call: FP8Call,
        adds: bool,
        known: torch.Size | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        tensors = (inp, residual, norm_weight, norm_bias, w1, b1, w2, b2)
        if call.programs is None or known is not None:
            return _forward(ctx, *tensors, norm_options, activation, call, adds, known)
        key = (
            ctx.needs_input_grad, inp.dtype, inp.shape, norm_options, activation,
            call.keep_columnwise, call.small, adds, dense_gemm_swiglu.is_active,
        )  # fmt: skip
        rest = (norm_options, activation, call, adds, known)
        return call.programs.forward(ctx, _forward, tensors, rest, key)

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
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    norm_options: NormOptions,
    activation: str,
    call: FP8Call,
    adds: bool,
    known: torch.Size | None,
) -> tuple[torch.Tensor | None, ...]:
    needs, dtype = ctx.needs_input_grad, inp.dtype
    need_norm = needs[0] or needs[1] or needs[2] or needs[3]
    need_hidden = need_norm or needs[4] or needs[5]
    keep = call.keep_columnwise
    gemm1 = call.gemm(0, w1, need_norm, needs[4], keep, need_norm)
    gemm2 = call.gemm(1, w2, need_hidden, needs[6], keep, need_hidden)
    rest = None if residual is None else as_matrix(residual)
    norm = NormForward(as_matrix(inp), norm_weight, norm_bias, *norm_options[:3], rest)
    fuses = takes(gemm1, gemm2, activation, norm.x, w1, b1)
    if gemm2.remakes_input:  # a fused backward makes the activation again in any case
        gemm2 = gemm2._replace(remakes_input=not fuses, keeps_input=fuses)
    quantized, part, y = normalized(norm, gemm1, norm_options)
    weight1, _ = gemm1.cast_weight(w1, call.cached[0])
    saved1 = gemm1.saved(y, part, w1, weight1)
    plain = act_scale = hidden_scale = None
    operand: Operand
    holds = call.small and need_hidden
    if fuses:
        hidden, hidden_scale, operand, act_scale = activated_product(
            gemm1, gemm2, activation, quantized, w1, b1, weight1, holds
        )
        part = operand
        del quantized, weight1
    else:
        hidden = _gemm.multiply(gemm1.quantizers, quantized, w1, weight1, b1, dtype)
        del quantized, part, weight1
        act = ActivationForward(activation, hidden)
        plain = act.plain() if gemm2.saves_values or gemm2.rounds_input else None
        operand, part = gemm2.cast_input(act if plain is None else plain)
        del act
    if holds and hidden_scale is None:
        hidden, hidden_scale = hold(hidden)
    # With sequence parallelism the hidden rows are those of all ranks, and are split again.
    shape: tuple[int, ...] = inp.shape
    if gemm1.options.parallel is not None:
        shape = gemm1.options.parallel.output_shape(shape, shape[-1])
    weight2, _ = gemm2.cast_weight(w2, call.cached[1])
    c = None
    if adds:
        c = norm.x if norm.residual_sum is None else norm.residual_sum
    if known is None:
        out = gemm2.fprop(operand, w2, weight2, b2, dtype, shape, c)
    else:
        out = inp.new_empty(known, dtype=dtype)

    ctx.save_for_backward(
        *saved1,
        *gemm2.saved(plain, part, w2, weight2),
        *(saved_norm(norm, inp, gemm1) if need_norm else (None,) * SAVED_NORM),
        hidden if need_hidden else None,
        hidden_scale,
        act_scale,
    )
    ctx.set_materialize_grads(False)
    ctx.gemms, ctx.norm, ctx.activation = (gemm1, gemm2), norm_options, activation
    ctx.fuses, ctx.small = fuses, call.small
    ctx.owns_saved = second_backward_is_refused(ctx)
    ctx.needs_norm = (needs[2], needs[3])
    ctx.bias_dtypes = (
        b1.dtype if b1 is not None and needs[5] else None,
        b2.dtype if b2 is not None and needs[7] else None,
    )
    ctx.programs, ctx.has_residual, ctx.adds = None, residual is not None, adds
    ctx.input_shape, ctx.input_dtype = inp.shape, dtype
    ctx.output_shape = out.shape
    ctx.device_type = inp.device.type
    returned = None
    if norm_options.return_norm and y is not None:
        # A view of a matrix, too: torch 2.11 would compile y itself without its gradient.
        returned = y.view(inp.shape)
    total = residual_output(inp, norm) if norm_options.return_residual else None
    return out, returned, total


@repeatable
def _backward(ctx: Any, grad_output: Any, grad_norm: Any, grad_residual: Any) -> tuple:
    saved = take_saved(ctx)
    saved1, saved2 = saved[:SAVED], saved[SAVED : 2 * SAVED]
    norm, (hidden, hidden_scale, act_scale) = saved[2 * SAVED : -3], saved[-3:]
    del saved
    (gemm1, gemm2), (b1_dtype, b2_dtype) = ctx.gemms, ctx.bias_dtypes
    dy = as_matrix(output_gradient(ctx.output_shape, grad_output, grad_norm, grad_residual))
    if ctx.adds:  # the third output exists only otherwise
        grad_residual = grad_output
    # What is saved in FP8 is read as it is, and gradients have one copy at a time.
    if hidden_scale is not None:
        hidden, hidden_scale = input_of(ctx.activation, hidden, hidden_scale, ctx.input_dtype)
    later1, later2 = (ctx.small and gemm.transposes_gradient for gemm in (gemm1, gemm2))
    quantized, d_b2, dy = gemm2.cast_gradient(dy, b2_dtype, later2)
    d_w1 = d_b1 = d_w2 = d_act = d_fused = dx = d_gamma = d_beta = None
    # Every step frees what only it needed: the peak is that of bf16 modules or below.
    if gemm2.need_input and ctx.fuses:
        d_fused, act, d_b1 = hidden_gradient(
            gemm1, gemm2, ctx.activation, saved2, quantized, hidden, hidden_scale, act_scale,
            b1_dtype is not None, later1, hidden_scale is not None and may_overwrite_saved(ctx),
        )  # fmt: skip
        saved2 = saved2 if act is None else (act, *saved2[1:])
        del hidden, act
    elif gemm2.need_input:
        d_act = gemm2.dgrad(saved2, quantized, ctx.input_dtype)
        if gemm2.remakes_input:
            activated = ActivationForward(ctx.activation, hidden, hidden_scale)
            saved2 = gemm2.remade(saved2, activated, False)
            del activated
    if gemm2.need_weight:
        d_w2 = gemm2.wgrad(saved2, dy, quantized)
    del saved2, quantized, dy
    if gemm2.need_input:
        if gemm1.remakes_input:
            source = norm_again(norm, ctx.norm)
            saved1 = gemm1.remade(saved1, source, True)
        gathered = gemm1.start_gather(saved1)
        if d_act is None:
            quantized, plain, d_fused = d_fused, None, None
        else:
            overwrites = hidden_scale is not None and may_overwrite_saved(ctx)
            d_hidden = ActivationBackward(
                ctx.activation, d_act, hidden, b1_dtype is not None, hidden_scale, overwrites
            )
            quantized, plain = _quantized_hidden(gemm1, d_hidden, later1)
            d_b1 = d_hidden.dbias
            del d_act, d_hidden, hidden
        pending = None
        if gemm1.need_input:
            d_norm, pending = gemm1.reduced_dgrad(saved1, quantized, ctx.input_dtype)
            if d_norm is not None:
                dx, d_gamma, d_beta = norm_gradients(ctx, norm, d_norm, grad_norm, grad_residual)
            del d_norm
        if gemm1.need_weight:
            if gemm1.remakes_input:
                saved1 = gemm1.remade(saved1, source, False)
            d_w1 = gemm1.wgrad(saved1, plain, quantized, gathered)
        if pending is not None:
            dx, d_gamma, d_beta = norm_gradients(
                ctx, norm, pending.wait(), grad_norm, grad_residual
            )
    if d_b1 is not None and d_b1.dtype is not b1_dtype:
        d_b1 = d_b1.to(b1_dtype)
    d_residual = dx if ctx.has_residual else None
    gradients = (dx, d_residual, d_gamma, d_beta, d_w1, d_b1, d_w2, d_b2)
    return (*gradients, None, None, None, None, None)


def _quantized_hidden(gemm: Any, d_hidden: ActivationBackward, columns_later: bool) -> tuple:
    """Returns the gradient of the first GEMM's output in FP8, and in bf16 or fp32, or None.

    Sets ``d_hidden.dbias`` if its ``with_dbias`` is True. With ``columns_later`` dgrad makes the
    columnwise copy.
    """
    quantizer = gemm.quantizers.grad_output
    in_fp8 = gemm.quantizers.backward is None
    need_plain = not in_fp8 or (gemm.need_weight and gemm.quantizers.high_precision_wgrad)
    fp8_wgrad = gemm.need_weight and not need_plain
    if not need_plain and (gemm.need_input or fp8_wgrad):  # else only the bias learns
        return quantizer.produce(d_hidden, gemm.need_input, fp8_wgrad and not columns_later), None
    plain = d_hidden.plain()
    if d_hidden.with_dbias and d_hidden.dbias is None:
        d_hidden.dbias = plain.sum(0)
    if not gemm.need_input:
        return None, plain
    if not in_fp8:
        return plain, plain
    return quantizer.quantize(plain, True, False)[0], plain
