"""Ops before a GEMM, norms and activations, that write their result in FP8 themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...fp8.scheme.base import BlockOptions
from ...ops import activation, bias_gelu, layer_norm, rms_norm, swiglu, swiglu_block
from ...ops.block_quantize import BlockQuantized, block_dequantize
from ...ops.fp8_output import FP8Output
from ...runtime.named_arguments import did_you_mean
from ...runtime.op_options import ClampedSwiglu
from .arguments import checked_number

# Names of LayerNormMLP's activations: the gated ones by their activation in ops.swiglu, the others
# by their kind in ops.activation.
GATED: dict[str, str | ClampedSwiglu] = {
    "clamped_swiglu": ClampedSwiglu(),
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": ClampedSwiglu(limit=math.inf, offset=0.0),
    "reglu": "relu",
    "sreglu": "squared_relu",
    "swiglu": "silu",
}
PLAIN = {
    "gelu": "gelu",
    "qgelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "srelu": "squared_relu",
}
ACTIVATIONS = (*sorted((*GATED, *PLAIN)),)


def activation_of(owner: str, name: str, params: Mapping[str, float] | None) -> Any:
    """Returns an activation in the form of this module's functions: name or ``ClampedSwiglu``."""
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{owner}: activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}"
            + did_you_mean(name, ACTIVATIONS)
        )
    # Transformer Engine's names and defaults.
    known = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(
            f"{owner}: activation_params must be a dict of floats, got {type(params).__name__}"
        )
    given = dict(params or {})
    for key, value in given.items():
        checked_number(owner, f"activation_params[{key!r}]", value)
    if given and (name != "clamped_swiglu" or not known.keys() >= given.keys()):
        raise ValueError(
            f"{owner}: activation_params must be None, or for 'clamped_swiglu' have keys of "
            f"{', '.join(known)}, got {sorted(given)} with {name!r}"
        )
    return ClampedSwiglu(*map(float, (known | given).values())) if given else name


def is_gated(name: Any) -> bool:
    """Returns True if the activation is ``act(gate) * up`` of the two halves of its input."""
    return name in GATED or isinstance(name, ClampedSwiglu)


def gate_of(name: Any) -> str | ClampedSwiglu:
    """Returns what ``ops.swiglu`` takes for a gated activation."""
    return name if isinstance(name, ClampedSwiglu) else GATED[name]


def activate(name: Any, x: torch.Tensor) -> torch.Tensor:
    """Applies an activation to ``[..., F]``, or ``[..., 2F]`` if gated, differentiably."""
    if is_gated(name):
        return swiglu.swiglu(x, activation=gate_of(name))
    return activation.activation(x, PLAIN[name])


def activation_gradient(name: Any, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Computes the gradient of an activation's input ``x`` from ``dy`` ``[..., F]``."""
    if is_gated(name):
        return swiglu.swiglu_bwd(dy, x, activation=gate_of(name)).input
    return activation.activation_bwd(dy, x, PLAIN[name])


def scalars(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a zero, fp32 [1], and uninitialized fp32 [2] on the device of ``like``."""
    return like.new_zeros(1, dtype=torch.float32), like.new_empty(2, dtype=torch.float32)


class BaseFusedCast:
    """Base of the modules' fused casts, which follow ``fp8.scheme.quantizer.FusedCast``.

    With ``with_dbias``, the column sums of the result are put into the attribute ``dbias``.
    """

    __slots__ = ("dbias", "with_dbias", "x")
    can_fuse = True
    can_fuse_blocks = False
    copies = False

    def __init__(self, x: torch.Tensor, with_dbias: bool = False) -> None:
        self.x = x
        self.with_dbias = with_dbias
        self.dbias: torch.Tensor | None = None

    def scalars(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a zero, fp32 [1], and uninitialized fp32 [2] on the op's device."""
        return scalars(self.x)

    def blocks(self, options: BlockOptions, rowwise: bool, columnwise: bool) -> BlockQuantized:
        """Returns the result in blocks if ``can_fuse_blocks`` is True; see ``FusedCast.blocks``."""
        raise NotImplementedError


class NormOptions(NamedTuple):
    """Options of the norm before a linear layer or an MLP.

    Attributes:
        eps: added to the variance (RMSNorm: to the mean square).
        zero_centered_gamma: gamma is ``1 + weight``.
        return_norm: also return the norm's output in bf16 or fp32.
        return_residual: also return the norm's input: the input, or its sum with a residual.
    """

    is_rms: bool
    eps: float
    zero_centered_gamma: bool
    return_norm: bool
    return_residual: bool


class NormForward(BaseFusedCast):
    """LayerNorm or RMSNorm of ``x`` ``[rows, cols]``, or of ``x + residual``, as a fused cast.

    Running it sets ``mean`` and ``rstd``, fp32 ``[rows]`` (RMSNorm has no mean), and with a
    residual ``residual_sum``.
    """

    __slots__ = ("bias", "eps", "is_rms", "mean", "residual", "residual_sum", "rstd", "weight",
                 "zero_centered_gamma")  # fmt: skip

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_rms: bool,
        eps: float,
        zero_centered_gamma: bool,
        residual: torch.Tensor | None = None,
    ) -> None:
        super().__init__(x)
        self.weight, self.bias, self.is_rms, self.eps = weight, bias, is_rms, eps
        self.zero_centered_gamma = zero_centered_gamma
        self.residual = residual
        self.mean: torch.Tensor | None = None
        self.rstd: torch.Tensor | None = None
        self.residual_sum: torch.Tensor | None = None

    def plain(self) -> torch.Tensor:
        """Runs the norm without a cast, and sets ``mean``, ``rstd`` and ``residual_sum``."""
        options: dict[str, Any] = {
            "zero_centered_gamma": self.zero_centered_gamma,
            "residual": self.residual,
        }
        if self.is_rms:
            out = rms_norm.rms_norm_fwd(self.x, self.weight, self.eps, **options)
        else:
            out = layer_norm.layer_norm_fwd(self.x, self.weight, self.bias, self.eps, **options)
        self.mean, self.rstd, self.residual_sum = out.mean, out.rstd, out.residual_sum
        return out.y

    def fp8(
        self,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        amax: torch.Tensor | None,
        pad_columnwise: bool = False,
    ) -> FP8Output:
        """Returns the normalised rows ``[rows, cols]`` in FP8; see ``FusedCast.fp8``."""
        options: dict[str, Any] = {
            "rowwise": rowwise,
            "columnwise": columnwise,
            "pad_columnwise": pad_columnwise,
            "amax": amax,
            "zero_centered_gamma": self.zero_centered_gamma,
            "residual": self.residual,
        }
        if self.is_rms:
            out = rms_norm.rms_norm_fwd_fp8(self.x, self.weight, self.eps, scale, dtype, **options)
        else:
            out = layer_norm.layer_norm_fwd_fp8(
                self.x, self.weight, self.bias, self.eps, scale, dtype, **options
            )
        self.mean, self.rstd, self.residual_sum = out.mean, out.rstd, out.residual_sum
        return out.y


class NormAgain(BaseFusedCast):
    """Result of an earlier ``NormForward``, from its input and statistics, as a fused cast.

    Its kernels leave out the sums over rows, whose order differs between those of ``NormForward``.
    With ``is_rounded`` the forward cast its result in bf16 or fp32.
    """

    __slots__ = ("bias", "can_fuse", "mean", "rstd", "weight", "zero_centered_gamma")

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        rstd: torch.Tensor,
        zero_centered_gamma: bool,
        is_rounded: bool,
    ) -> None:
        super().__init__(x)
        self.weight, self.bias, self.mean, self.rstd = weight, bias, mean, rstd
        self.zero_centered_gamma = zero_centered_gamma
        self.can_fuse = not is_rounded

    def plain(self) -> torch.Tensor:
        """Returns the normalised rows ``[rows, cols]`` in the dtype of ``x``."""
        x, weight, rstd, centred = self.x, self.weight, self.rstd, self.zero_centered_gamma
        if self.mean is None:
            return rms_norm.rms_norm_again(x, weight, rstd, zero_centered_gamma=centred)
        return layer_norm.layer_norm_again(
            x, weight, self.bias, self.mean, rstd, zero_centered_gamma=centred
        )

    def fp8(
        self,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        amax: torch.Tensor | None,
        pad_columnwise: bool = False,
    ) -> FP8Output:
        """Returns the normalised rows ``[rows, cols]`` in FP8; see ``FusedCast.fp8``."""
        options: dict[str, Any] = {
            "rowwise": rowwise,
            "columnwise": columnwise,
            "pad_columnwise": pad_columnwise,
            "amax": amax,
            "zero_centered_gamma": self.zero_centered_gamma,
        }
        x, weight, rstd = self.x, self.weight, self.rstd
        if self.mean is None:
            return rms_norm.rms_norm_again_fp8(x, weight, rstd, scale, dtype, **options)
        return layer_norm.layer_norm_again_fp8(
            x, weight, self.bias, self.mean, rstd, scale, dtype, **options
        )


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    zero_centered_gamma: bool,
    d_residual: torch.Tensor | None,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Computes ``(dx, dweight, dbias)`` of LayerNorm, or of RMSNorm if ``mean`` is None.

    ``x`` ``[rows, cols]`` is the norm's input; ``d_residual`` is added to ``dx``.
    """
    if mean is None:
        grads = rms_norm.rms_norm_bwd(
            dy, x, weight, rstd, zero_centered_gamma=zero_centered_gamma, d_residual=d_residual,
            with_dweight=need_weight,
        )  # fmt: skip
    else:
        grads = layer_norm.layer_norm_bwd(
            dy, x, weight, mean, rstd, zero_centered_gamma=zero_centered_gamma,
            d_residual=d_residual, with_dweight=need_weight, with_dbias=need_bias,
        )  # fmt: skip
    return grads.dx, grads.dweight, grads.dbias


def _values(x: torch.Tensor, scale_inv: torch.Tensor | None) -> torch.Tensor:
    """Returns the bf16 values of a gated activation's input in E4M3; without scales ``x``."""
    return x if scale_inv is None else block_dequantize(x, scale_inv)


class ActivationForward(BaseFusedCast):
    """Activation of ``x`` ``[rows, F]``, or ``[rows, 2F]`` if gated, as a fused cast.

    A gated one may have ``x`` in E4M3 with ``scale_inv``, as ``held_rows.hold`` returns them.
    """

    __slots__ = ("can_fuse_blocks", "name", "scale_inv")

    def __init__(self, name: Any, x: torch.Tensor, scale_inv: torch.Tensor | None = None) -> None:
        super().__init__(x)
        self.name = name
        self.scale_inv = scale_inv
        self.can_fuse_blocks = is_gated(name)

    def plain(self) -> torch.Tensor:
        """Returns the activation ``[rows, F]`` in the dtype of ``x``, without a cast to FP8."""
        if is_gated(self.name):
            x = _values(self.x, self.scale_inv)
            return swiglu.swiglu_fwd(x, activation=gate_of(self.name))
        return activation.activation_fwd(self.x, PLAIN[self.name])

    def fp8(
        self,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        amax: torch.Tensor | None,
        pad_columnwise: bool = False,
    ) -> FP8Output:
        """Returns the activation's result ``[rows, F]`` in FP8; see ``FusedCast.fp8``."""
        options: dict[str, Any] = {
            "rowwise": rowwise,
            "columnwise": columnwise,
            "pad_columnwise": pad_columnwise,
            "amax": amax,
        }
        if is_gated(self.name):
            options |= {"activation": gate_of(self.name), "input_scale_inv": self.scale_inv}
            return swiglu.swiglu_fwd_fp8(self.x, None, scale, dtype, **options)
        return activation.activation_fwd_fp8(self.x, PLAIN[self.name], scale, dtype, **options)

    def blocks(self, options: BlockOptions, rowwise: bool, columnwise: bool) -> BlockQuantized:
        """Returns the activation's result ``[rows, F]`` in blocks; see ``FusedCast.blocks``."""
        return swiglu_block.swiglu_fwd_block(
            self.x, None, options.dtype, input_scale_inv=self.scale_inv,
            activation=gate_of(self.name), columnwise_block_rows=options.columnwise_block_rows,
            rowwise=rowwise, columnwise=columnwise, pad_columnwise=options.pad_columnwise,
            scales=options.scales, eps=options.eps,
        )  # fmt: skip


class ActivationBackward(BaseFusedCast):
    """Gradient of an activation's input ``x`` as a fused cast, from ``dy`` ``[rows, F]``.

    ``scale_inv`` as in ``ActivationForward``; with ``overwrites`` a rowwise copy may take the
    memory of an ``x`` in E4M3.
    """

    __slots__ = ("can_fuse", "can_fuse_blocks", "dy", "name", "overwrites", "scale_inv")

    def __init__(
        self,
        name: Any,
        dy: torch.Tensor,
        x: torch.Tensor,
        with_dbias: bool,
        scale_inv: torch.Tensor | None = None,
        overwrites: bool = False,
    ) -> None:
        super().__init__(x, with_dbias)
        self.name = name
        self.scale_inv = scale_inv
        self.overwrites = overwrites
        self.dy = dy
        # The kernels of the other activations have no column sums.
        self.can_fuse = is_gated(name) or name == "gelu" or not with_dbias
        self.can_fuse_blocks = is_gated(name) and not with_dbias

    def plain(self) -> torch.Tensor:
        """Returns the gradient in the dtype of ``x``, without a cast to FP8.

        Sets ``dbias`` if the op computes column sums and they are wanted.
        """
        grads: Any
        if is_gated(self.name):
            gate = gate_of(self.name)
            x = _values(self.x, self.scale_inv)
            grads = swiglu.swiglu_bwd(self.dy, x, activation=gate, with_dbias=self.with_dbias)
        elif self.name == "gelu":
            grads = bias_gelu.bias_gelu_bwd(self.dy, self.x, with_dbias=self.with_dbias)
        else:
            return activation.activation_bwd(self.dy, self.x, PLAIN[self.name])
        self.dbias = grads.dbias
        return grads.input

    def fp8(
        self,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        amax: torch.Tensor | None,
        pad_columnwise: bool = False,
    ) -> FP8Output:
        """Returns the gradient, in the shape of ``x``, in FP8; see ``FusedCast.fp8``."""
        options: dict[str, Any] = {
            "rowwise": rowwise,
            "columnwise": columnwise,
            "pad_columnwise": pad_columnwise,
            "amax": amax,
        }
        if not is_gated(self.name) and self.name != "gelu":
            kind = PLAIN[self.name]
            return activation.activation_bwd_fp8(self.dy, self.x, kind, scale, dtype, **options)
        # A run for the amax alone leaves the sums to the one that writes codes.
        options["with_dbias"] = self.with_dbias and (rowwise or columnwise)
        grads: Any
        if is_gated(self.name):
            gate = gate_of(self.name)
            grads = swiglu.swiglu_bwd_fp8(
                self.dy, self.x, None, scale, dtype, input_scale_inv=self.scale_inv,
                overwrite_input=self.overwrites, activation=gate, **options,
            )  # fmt: skip
        else:
            grads = bias_gelu.bias_gelu_bwd_fp8(self.dy, self.x, None, scale, dtype, **options)
        if grads.dbias is not None:
            self.dbias = grads.dbias
        return grads.output

    def blocks(self, options: BlockOptions, rowwise: bool, columnwise: bool) -> BlockQuantized:
        """Returns the gradient, in the shape of ``x``, in blocks; see ``FusedCast.blocks``."""
        return swiglu_block.swiglu_bwd_block(
            self.dy, self.x, None, options.dtype, input_scale_inv=self.scale_inv,
            overwrite_input=self.overwrites, activation=gate_of(self.name), rowwise=rowwise,
            columnwise=columnwise, pad_columnwise=options.pad_columnwise, scales=options.scales,
            eps=options.eps,
        )  # fmt: skip
