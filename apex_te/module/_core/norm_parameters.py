"""Base of the modules that begin with a norm, LayerNormLinear and LayerNormMLP."""

from __future__ import annotations

from typing import Any

import torch

from ...ops import layer_norm, rms_norm
from ...ops.binding import unwrapped
from ...runtime.named_arguments import did_you_mean
from . import arguments as _arguments
from .fused_casts import NormOptions
from .parallel import ParallelModule, tag
from .plain_functions import PlainNormFunction
from .programs import Programs, is_autocast

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def check_normalization(owner: str, normalization: Any) -> None:
    """Checks that ``normalization`` names a norm; ``owner`` is the module's name in errors."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(
            f"{owner}: normalization must be one of {', '.join(NORMALIZATIONS)}, "
            f"got {normalization!r}{did_you_mean(normalization, NORMALIZATIONS)}"
        )


class NormedModule(ParallelModule):
    """FP8 module that normalises its input before its first GEMM.

    Attributes:
        layer_norm_weight: parameter ``[features]``.
        layer_norm_bias: parameter ``[features]``, None for RMSNorm.
        return_bias: True if the module returns its last bias instead of adding it.
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None
    return_bias: bool

    def _make_norm(
        self,
        features: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        return_layernorm_output: bool,
        dtype: torch.dtype,
        device: Any,
    ) -> None:
        """Registers the norm's parameters, with no values yet, and sets its options."""
        owner = type(self).__name__
        check_normalization(owner, normalization)
        eps = _arguments.checked_eps(owner, "eps", eps)
        self.normalization = normalization
        self.zero_centered_gamma = bool(zero_centered_gamma)
        self.return_layernorm_output = bool(return_layernorm_output)
        self.layer_norm_weight = _arguments.parameter((features,), dtype, device)
        if normalization == "LayerNorm":
            self.layer_norm_bias = _arguments.parameter((features,), dtype, device)
        else:
            self.register_parameter("layer_norm_bias", None)
        if self.tp_size > 1:
            for parameter in (self.layer_norm_weight, self.layer_norm_bias):
                tag(parameter, None, self.sequence_parallel)
        is_rms = normalization == "RMSNorm"
        shared = (is_rms, eps, self.zero_centered_gamma, self.return_layernorm_output)
        self._norm_options = (NormOptions(*shared, False), NormOptions(*shared, True))

    @property
    def eps(self) -> float:
        """Returns the number that the norm adds to the variance (RMSNorm: to the mean square)."""
        return self._norm_options[0].eps

    @eps.setter
    def eps(self, eps: float) -> None:
        eps = _arguments.checked_eps(type(self).__name__, "eps", eps)
        plain, with_residual = self._norm_options
        self._norm_options = (plain._replace(eps=eps), with_residual._replace(eps=eps))

    def reset_layer_norm_parameters(self) -> None:
        """Sets ``layer_norm_weight`` so that gamma is 1, and ``layer_norm_bias`` to 0."""
        torch.nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            torch.nn.init.zeros_(self.layer_norm_bias)

    def _gamma_and_beta(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the norm's parameters; one that a parametrization makes is read as attribute."""
        own: Any = self._parameters
        if "layer_norm_weight" in own and "layer_norm_bias" in own:  # faster than the attributes
            return own["layer_norm_weight"], own["layer_norm_bias"]
        return self.layer_norm_weight, self.layer_norm_bias

    def _norm_operands(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns gamma and beta in a dtype that the op takes beside an input of ``dtype``."""
        weight, bias = self._gamma_and_beta()
        if weight.dtype is dtype or weight.dtype is torch.float32:
            return weight, bias
        return weight.to(dtype), None if bias is None else bias.to(dtype)

    def _check_residual(self, inp: torch.Tensor, residual: torch.Tensor) -> None:
        """Checks that ``residual`` has the shape and dtype of ``inp``."""
        if residual.shape != inp.shape:
            raise ValueError(
                f"{type(self).__name__}: residual must have shape {list(inp.shape)}, "
                f"got {list(residual.shape)}"
            )
        if residual.dtype is not inp.dtype and not is_autocast(inp.device.type):
            raise TypeError(
                f"{type(self).__name__}: residual must have dtype {inp.dtype} outside "
                f"torch.autocast, got {residual.dtype}"
            )

    def _returned(self, out: torch.Tensor, bias: torch.Tensor | None, norm: Any) -> Any:
        """Joins the results of the module's ``forward`` into its return value.

        A missing bias is an empty tensor with ``return_bias``.
        """
        if not self.return_bias and not self.return_layernorm_output:
            return out
        result = [out]
        if self.return_bias:
            result.append(out.new_empty(0) if bias is None else bias.to(out.dtype))
        if self.return_layernorm_output:
            result.append(norm)
        return tuple(result)

    def _plain_programs(self) -> Programs | None:
        """Returns the programs of the module's ops in bf16 or fp32; None if not usable now."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        programs = self._modes.plain
        return programs if programs.is_usable() else None

    def norm_of(self, inp: torch.Tensor) -> torch.Tensor:
        """Returns the norm of ``inp`` alone, in bf16 or fp32."""
        return self._plain_norm(inp, None)[0]

    def _plain_norm(
        self, inp: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of ``inp`` or ``inp + residual`` in bf16 or fp32, and that tensor."""
        weight, bias = self._norm_operands(inp.dtype)
        programs, known = self._plain_programs(), self._norm_options[0]
        if programs is not None and known.zero_centered_gamma == self.zero_centered_gamma:
            tensors = (unwrapped(inp), residual, weight, bias)
            found = PlainNormFunction.direct(*tensors, known, programs)
            return found if residual is not None else (found, inp)
        options: dict[str, Any] = {
            "zero_centered_gamma": self.zero_centered_gamma,
            "residual": residual,
        }
        y: Any
        if self.normalization == "RMSNorm":
            y = rms_norm.rms_norm(inp, weight, self.eps, **options)
        else:
            y = layer_norm.layer_norm(inp, weight, bias, self.eps, **options)
        return y if residual is not None else (y, inp)
