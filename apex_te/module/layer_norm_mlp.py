"""LayerNormMLP: a norm, a linear layer, an activation and a second linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..ops.op_function import unwrapped
from ..runtime.named_arguments import named_arguments
from ._core import arguments as _arguments
from ._core.arguments import VAGUE, explain
from ._core.context import without_autograd
from ._core.fused_casts import activate, activation_of, is_gated
from ._core.gemm import FP8Call, adds_in_product, cast_to
from ._core.layer_norm_mlp_function import LayerNormMLPFunction
from ._core.materialize import initialize, materialize
from ._core.norm_parameters import NormedModule
from ._core.parallel import divided, tag
from ._core.plain_functions import PlainActivationFunction
from ._core.recompute import Repeated, run_repeatable

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
            gated: ``"geglu"``, ``"glu"``, ``"reglu"``, ``"swiglu"``; or gated and computed by
            PyTorch's ops: ``"qgeglu"``, ``"sreglu"``, ``"clamped_swiglu"``.
        activation_params: dict of parameters of ``"clamped_swiglu"``, which is ``gate *
            sigmoid(alpha * gate) * (up + glu_linear_offset)`` with gate and up clamped to
            ``limit``. Keys: ``limit`` (default 7.0), ``alpha`` (1.702) and ``glu_linear_offset``
            (1.0).
        init_method, output_layer_init_method: fill FC1's and FC2's weight; default N(0, 0.023).
        zero_centered_gamma, return_layernorm_output: as in ``LayerNormLinear``.
        return_bias: also return FC2's bias, which is then not added.
        checkpoint: save only the input, and compute the norm, FC1 and the activation again in
            backward, with the same results and FP8 scales.
        fuse_wgrad_accumulation, params_dtype, dtype, delay_wgrad_compute, name, device: as in
            ``Linear``.
        seq_length, micro_batch_size: accepted for interface compatibility; nothing is warmed up.
        set_parallel_mode: split ``ffn_hidden_size`` over the ranks of ``tp_group``: FC1 is
            column-parallel, FC2 row-parallel. With a gated activation each rank has rows of both
            halves.
        sequence_parallel, tp_group, tp_size, get_rng_state_tracker: as in ``Linear``.

    Its parameters are ``layer_norm_weight``, ``layer_norm_bias``, ``fc1_weight`` ``[ffn, hidden]``
    (gated: ``[2 ffn, hidden]``, gate first), ``fc1_bias``, ``fc2_weight`` ``[hidden, ffn]``,
    ``fc2_bias``. Interface and defaults follow TransformerEngine's LayerNormMLP.
    """

    hidden_size: int
    ffn_hidden_size: int
    activation: str
    set_parallel_mode: bool
    output_layer_init_method: Callable[[torch.Tensor], Any] | None
    checkpoint = False
    activation_params: dict[str, float] | None = None
    _function: Any = None  # an activation that no name alone describes

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
        for option, flag in (("set_parallel_mode", set_parallel_mode), ("checkpoint", checkpoint)):
            if not isinstance(flag, bool):
                kind = type(flag).__name__
                raise TypeError(f"LayerNormMLP: {option} must be a bool, got {kind}")
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
        """Sets gamma to 1, beta and biases to 0, and the weights by their methods (N(0, 0.023)).

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
            inp: [..., hidden_size], of the dtypes that ``Linear.forward`` takes.
            is_first_microbatch: as in ``Linear.forward``.

        Returns:
            ``out`` in the shape of ``inp``; ``(out, bias)`` with ``return_bias``, ``(out, norm)``
            with ``return_layernorm_output``, ``(out, bias, norm)`` with both. ``norm`` is the
            norm's output.

        Raises:
            TypeError: a tensor has another dtype than those above.
            ValueError: an argument has another shape than that above.
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

        The norm's kernels do the addition, and in backward add the gradient of ``total``.

        Args:
            inp: as in ``forward``.
            residual: a tensor of the shape and dtype of ``inp``; None adds nothing.
            is_first_microbatch: as in ``Linear.forward``.
            return_residual: True if the caller needs ``total``. With False a call in FP8 may return
                None for it.
            add_residual: let FC2's GEMM add ``total`` to the result, if the GEMM can; the result is
                then rounded once. Requires ``return_residual``, and that no bias is returned.
            repeated: record of the first run, if ``checkpoint`` makes this call to compute it
                again; None in all other calls.

        Returns:
            ``(out, total)``: what ``forward`` returns, and the sum ``inp + residual`` (``inp``
            without a residual). ``total`` is None if FC2's GEMM has added it to ``out``.
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
                call,
                inp,
                residual,
                w1,
                b1,
                w2,
                applied,
                return_residual,
                add_residual,
                known,
                True,
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

        In FP8 ``norm`` and ``total``, the tensor that was normalised, are None if not asked for;
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
        rest = (options, self._function or self.activation, call, adds)
        if is_direct:
            return LayerNormMLPFunction.direct(*map(unwrapped, tensors), *rest, known)
        if torch.is_grad_enabled():
            return LayerNormMLPFunction.apply(*tensors, *rest, known)
        return without_autograd(LayerNormMLPFunction, tensors, *rest)
