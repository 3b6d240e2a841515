"""LayerNormLinear: a norm and a linear layer; in FP8 the norm writes the GEMM's FP8 input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..ops.op_function import unwrapped
from ..runtime.named_arguments import named_arguments
from ._core.arguments import VAGUE, explain
from ._core.context import without_autograd
from ._core.gemm import FP8Call, cast_to
from ._core.heads import HeadLayout
from ._core.layer_norm_linear_function import LayerNormLinearFunction
from ._core.materialize import initialize, materialize
from ._core.norm_parameters import NormedModule
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
        """Sets gamma to 1, beta and the bias to 0, and the weight by ``init_method`` (N(0, 0.023)).

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
            inp: [..., in_features], of the dtypes that ``Linear.forward`` takes.
            is_first_microbatch: as in ``Linear.forward``.

        Returns:
            ``out`` [..., out_features]; ``(out, bias)`` with ``return_bias``, ``(out, norm)`` with
            ``return_layernorm_output``, ``(out, bias, norm)`` with both. ``norm`` is the norm's
            output.

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
        heads: HeadLayout | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        """Applies the norm and the linear layer to ``inp + residual``.

        The norm's kernels do the addition, and in backward add the gradient of ``total``.

        Args:
            inp: as in ``forward``.
            residual: a tensor of the shape and dtype of ``inp``; None adds nothing.
            is_first_microbatch: as in ``Linear.forward``.
            return_residual: True if the caller needs ``total``. With False a call in FP8 may return
                None for it.
            heads: the layout of attention heads in the output. A call in FP8 then returns the heads
                instead of ``out``, see below. None does not split the output.

        Returns:
            ``(out, total)``: what ``forward`` returns, and the sum ``inp + residual`` (``inp``
            without a residual). In FP8 with ``heads``, the tuple ``(queries, keys, values)``, each
            [..., heads, size], replaces the output [..., out_features].
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
        elif torch.is_grad_enabled():
            found = LayerNormLinearFunction.apply(*tensors, options, call, heads)
        else:
            found = without_autograd(LayerNormLinearFunction, tensors, options, call, heads)
        return found if heads is None else (found[:-2], *found[-2:])
