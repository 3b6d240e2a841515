"""Modules, functions and autograd functions of layer norm and RMS norm.

The output of the plain ones has the input's dtype, of the mixed ones the weight's. Shapes are
[..., *normalized_shape]; dtypes float32, float16 and bfloat16, and float64 by PyTorch's functions.
``memory_efficient`` saves the output instead of the input.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from ....compatibility.apex import fused_layer_norm_cuda as kernels
from .._autocast_utils import call_autocast

Shape = int | Sequence[int]


def _shape(normalized_shape: Shape) -> torch.Size:
    if isinstance(normalized_shape, numbers.Integral):
        return torch.Size((int(normalized_shape),))
    return torch.Size(normalized_shape)  # type: ignore[arg-type]


class _Norm(torch.autograd.Function):
    """Base of the autograd functions.

    ``FORWARD`` and ``BACKWARD`` are the kernels, whose results and arguments are layer norm's with
    ``HAS_MEAN``, else RMS norm's; ``PARAMS`` is the number of weights and biases.
    """

    FORWARD: Callable[..., Any]
    BACKWARD: Callable[..., Any]
    HAS_MEAN: bool
    PARAMS: int

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        params, (shape, eps, *more) = args[: cls.PARAMS], args[cls.PARAMS :]
        ctx.shape, ctx.eps, ctx.memory_efficient = _shape(shape), eps, bool(more and more[0])
        ctx.rest = 2 + len(more)
        out, *statistics = cls.FORWARD(x, ctx.shape, *params, eps)
        # The output of a memory-efficient one does not need the mean.
        mean = statistics[0] if cls.HAS_MEAN and not ctx.memory_efficient else None
        ctx.save_for_backward(out if ctx.memory_efficient else x, mean, statistics[-1], *params)
        ctx.dtypes = [x.dtype, *(param.dtype for param in params)]
        return out

    @classmethod
    def backward(cls, ctx: Any, grad_output: torch.Tensor) -> Any:
        saved, mean, invvar, *params = ctx.saved_tensors
        statistics = (mean, invvar) if cls.HAS_MEAN else (invvar,)
        grads = cls.BACKWARD(
            grad_output.contiguous(), *statistics, saved, ctx.shape, *params, ctx.eps,
            ctx.memory_efficient,
        )  # fmt: skip
        grads = grads if cls.PARAMS else [grads]
        pairs = zip(grads, ctx.dtypes, strict=True)
        return (*(grad.to(dtype) for grad, dtype in pairs), *[None] * ctx.rest)


def _kernel(name: str) -> Any:
    return staticmethod(getattr(kernels, name))


class FusedLayerNormFunction(_Norm):
    """Layer norm without weights: x, normalized_shape, eps, memory_efficient=False."""

    FORWARD, BACKWARD = _kernel("forward"), _kernel("backward")
    HAS_MEAN, PARAMS = True, 0


class FusedLayerNormAffineFunction(_Norm):
    """Layer norm: x, weight, bias, normalized_shape, eps, memory_efficient=False."""

    FORWARD, BACKWARD = _kernel("forward_affine"), _kernel("backward_affine")
    HAS_MEAN, PARAMS = True, 2


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer norm with the output in the weight's dtype."""

    FORWARD = _kernel("forward_affine_mixed_dtypes")


class FusedRMSNormFunction(_Norm):
    """RMS norm without a weight: x, normalized_shape, eps, memory_efficient=False."""

    FORWARD, BACKWARD = _kernel("rms_forward"), _kernel("rms_backward")
    HAS_MEAN, PARAMS = False, 0


class FusedRMSNormAffineFunction(_Norm):
    """RMS norm: x, weight, normalized_shape, eps, memory_efficient=False."""

    FORWARD, BACKWARD = _kernel("rms_forward_affine"), _kernel("rms_backward_affine")
    HAS_MEAN, PARAMS = False, 1


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS norm with the output in the weight's dtype."""

    FORWARD = _kernel("rms_forward_affine_mixed_dtypes")


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Returns the layer norm of ``input``, in its dtype.

    Args:
        input: [..., *normalized_shape] float32, float16 or bfloat16; float64 by PyTorch's
            operation. Under ``torch.autocast`` all tensors are cast to its dtype.
        weight, bias: [*normalized_shape], in the input's dtype or float32.
        normalized_shape: shape of the normalised trailing dimensions, or the last one's size.
        eps: added to the variance.
        memory_efficient: save the output instead of the input for backward.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape does not match.
    """
    if input.dtype is torch.float64:
        return functional.layer_norm(input, _shape(normalized_shape), weight, bias, eps)
    function = FusedLayerNormAffineFunction.apply
    return call_autocast(function, input, weight, bias, normalized_shape, eps, memory_efficient)


def fused_layer_norm(
    input: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Returns the layer norm of ``input`` without weights, in its dtype.

    Arguments and errors are those of ``fused_layer_norm_affine``.
    """
    if input.dtype is torch.float64:
        return functional.layer_norm(input, _shape(normalized_shape), None, None, eps)
    function = FusedLayerNormFunction.apply
    return call_autocast(function, input, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Returns the layer norm of ``input``, in the weight's dtype.

    Arguments and errors are those of ``fused_layer_norm_affine``, but weight and bias may also have
    another 16-bit dtype than the input.
    """
    function = FusedLayerNormAffineMixedDtypesFunction.apply
    return call_autocast(function, input, weight, bias, normalized_shape, eps, memory_efficient)


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Returns the RMS norm of ``input``, in its dtype.

    Arguments and errors are those of ``fused_layer_norm_affine``; ``eps`` is added to
    the mean square.
    """
    if input.dtype is torch.float64:
        return manual_rms_norm(input, normalized_shape, weight, eps)
    function = FusedRMSNormAffineFunction.apply
    return call_autocast(function, input, weight, normalized_shape, eps, memory_efficient)


def fused_rms_norm(
    input: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Returns the RMS norm of ``input`` without a weight, in its dtype.

    Arguments and errors are those of ``fused_rms_norm_affine``.
    """
    if input.dtype is torch.float64:
        return manual_rms_norm(input, normalized_shape, None, eps)
    function = FusedRMSNormFunction.apply
    return call_autocast(function, input, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Returns the RMS norm of ``input``, in the weight's dtype.

    Arguments and errors are those of ``mixed_dtype_fused_layer_norm_affine``; ``eps`` is added to
    the mean square.
    """
    function = FusedRMSNormAffineMixedDtypesFunction.apply
    return call_autocast(function, input, weight, normalized_shape, eps, memory_efficient)


def manual_rms_norm(
    input: torch.Tensor, normalized_shape: Shape, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Returns the RMS norm of ``input`` by ``torch.nn.functional.rms_norm``.

    Args:
        input: [..., *normalized_shape].
        normalized_shape: shape of the normalised trailing dimensions, or the last one's size.
        weight: [*normalized_shape], or None.
        eps: added to the mean square.
    """
    return functional.rms_norm(input, list(_shape(normalized_shape)), weight, eps)


class FusedRMSNorm(torch.nn.Module):
    """RMS norm with the output in the input's dtype.

    Args:
        normalized_shape: shape of the normalised trailing dimensions, or the last one's size.
        eps: added to the mean square.
        elementwise_affine: False has no weight.
        memory_efficient: save the output instead of the input.
    """

    weight: Any  # a parameter, or None without elementwise_affine

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        weight = torch.nn.Parameter(torch.empty(self.normalized_shape))
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ones."""
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the RMS norm of ``input`` [..., *normalized_shape].

        Dtypes and errors are those of ``fused_rms_norm_affine``.
        """
        rest = (self.normalized_shape, self.eps, self.memory_efficient)
        if self.weight is None:
            return fused_rms_norm(input, *rest)
        return fused_rms_norm_affine(input, self.weight, *rest)

    def extra_repr(self) -> str:
        """Returns the options for ``repr``."""
        return "{normalized_shape}, eps={eps}, elementwise_affine={elementwise_affine}".format(
            **self.__dict__
        )


class FusedLayerNorm(FusedRMSNorm):
    """Layer norm with the output in the input's dtype.

    Args:
        normalized_shape: shape of the normalised trailing dimensions, or the last one's size.
        eps: added to the variance.
        elementwise_affine: False has no weight and bias.
        memory_efficient: save the output instead of the input.
    """

    bias: Any  # a parameter, or None without elementwise_affine

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient)
        bias = torch.nn.Parameter(torch.zeros(self.normalized_shape))
        self.register_parameter("bias", bias if elementwise_affine else None)

    def reset_parameters(self) -> None:
        """Sets the weight to ones and the bias to zeros."""
        super().reset_parameters()
        if getattr(self, "bias", None) is not None:  # which the constructor registers last
            torch.nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the layer norm of ``input`` [..., *normalized_shape].

        Dtypes and errors are those of ``fused_layer_norm_affine``.
        """
        rest = (self.normalized_shape, self.eps, self.memory_efficient)
        if self.weight is None:
            return fused_layer_norm(input, *rest)
        return fused_layer_norm_affine(input, self.weight, self.bias, *rest)


def _check_affine(owner: str, keywords: dict[str, Any]) -> None:
    """Raises RuntimeError if a mixed norm is asked to be without weights."""
    unknown = [name for name in keywords if name != "elementwise_affine"]
    if unknown:
        raise TypeError(f"{owner}: unknown argument {unknown[0]!r}")
    if not keywords.get("elementwise_affine", True):
        raise RuntimeError(f"{owner}: elementwise_affine must be True, got False")


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer norm with the output in the weight's dtype; ``elementwise_affine`` must be True.

    Args:
        normalized_shape: shape of the normalised trailing dimensions, or the last one's size.
        eps: added to the variance.
        memory_efficient: save the output instead of the input.

    Raises:
        RuntimeError: ``elementwise_affine`` is False.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the layer norm of ``input`` [..., *normalized_shape].

        Dtypes and errors are those of ``mixed_dtype_fused_layer_norm_affine``.
        """
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS norm with the output in the weight's dtype; ``elementwise_affine`` must be True.

    Args:
        normalized_shape: shape of the normalised trailing dimensions, or the last one's size.
        eps: added to the mean square.
        memory_efficient: save the output instead of the input.

    Raises:
        RuntimeError: ``elementwise_affine`` is False.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the RMS norm of ``input`` [..., *normalized_shape].

        Dtypes and errors are those of ``mixed_dtype_fused_rms_norm_affine``.
        """
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps, self.memory_efficient
        )
