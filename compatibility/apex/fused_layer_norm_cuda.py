"""apex's fused_layer_norm_cuda: layer norm and RMS norm over the trailing dimensions.

``normalized_shape`` is the shape of the trailing dimensions, and rows the product of the sizes of
the others. ``mean`` and ``invvar``, 1 / sqrt(variance + epsilon), are float32 [rows]; RMS norm has
the mean square for the variance. A memory-efficient backward gets the output instead of the input,
and computes the normalised values from it in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.layer_norm import layer_norm_bwd, layer_norm_fwd
from apex_te.ops.rms_norm import rms_norm_bwd, rms_norm_fwd

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]

Shape = Sequence[int]


def forward(
    input: torch.Tensor, normalized_shape: Shape, epsilon: float
) -> list[torch.Tensor | None]:
    """Computes layer norm without weights; returns [output, mean, invvar]."""
    out = layer_norm_fwd(_rows("input", input, normalized_shape), None, None, float(epsilon))
    return [_like(out.y, input), out.mean, out.rstd]


def forward_affine(
    input: torch.Tensor,
    normalized_shape: Shape,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
) -> list[torch.Tensor | None]:
    """Computes layer norm with gamma and beta; returns [output, mean, invvar].

    gamma and beta have ``normalized_shape`` and the input's dtype or float32.
    """
    rows = _rows("input", input, normalized_shape)
    weight = _flat("gamma", gamma, normalized_shape)
    bias = _flat("beta", beta, normalized_shape)
    out = layer_norm_fwd(rows, weight, bias, float(epsilon))
    return [_like(out.y, input), out.mean, out.rstd]


def forward_affine_mixed_dtypes(
    input: torch.Tensor,
    normalized_shape: Shape,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
) -> list[torch.Tensor | None]:
    """Computes ``forward_affine`` with the output in gamma's dtype, rounded once."""
    x, weight, bias = _one_dtype(input, gamma, beta)
    y, mean, invvar = forward_affine(x, normalized_shape, weight, bias, epsilon)
    assert y is not None
    return [y.to(gamma.dtype), mean, invvar]


def rms_forward(input: torch.Tensor, normalized_shape: Shape, epsilon: float) -> list[torch.Tensor]:
    """Computes RMS norm without weights; returns [output, invvar]."""
    out = rms_norm_fwd(_rows("input", input, normalized_shape), None, float(epsilon))
    return [_like(out.y, input), out.rstd]


def rms_forward_affine(
    input: torch.Tensor, normalized_shape: Shape, gamma: torch.Tensor, epsilon: float
) -> list[torch.Tensor]:
    """Computes RMS norm with gamma, in the input's dtype or float32; returns [output, invvar]."""
    rows = _rows("input", input, normalized_shape)
    out = rms_norm_fwd(rows, _flat("gamma", gamma, normalized_shape), float(epsilon))
    return [_like(out.y, input), out.rstd]


def rms_forward_affine_mixed_dtypes(
    input: torch.Tensor, normalized_shape: Shape, gamma: torch.Tensor, epsilon: float
) -> list[torch.Tensor]:
    """Computes ``rms_forward_affine`` with the output in gamma's dtype, rounded once."""
    x, weight = _one_dtype(input, gamma)
    y, invvar = rms_forward_affine(x, normalized_shape, weight, epsilon)
    return [y.to(gamma.dtype), invvar]


def backward(
    dout: torch.Tensor,
    mean: torch.Tensor | None,
    invvar: torch.Tensor,
    input_or_output: torch.Tensor,
    normalized_shape: Shape,
    epsilon: float,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Returns the gradient of the input of ``forward``; arguments as in ``backward_affine``."""
    return _layer_norm_backward(
        dout, mean, invvar, input_or_output, normalized_shape, None, None, epsilon, memory_efficient
    )[0]


def backward_affine(
    dout: torch.Tensor,
    mean: torch.Tensor | None,
    invvar: torch.Tensor,
    input_or_output: torch.Tensor,
    normalized_shape: Shape,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
    memory_efficient: bool = False,
) -> list[torch.Tensor]:
    """Returns [d_input, d_gamma, d_beta] of ``forward_affine`` and its mixed-dtype form.

    Args:
        dout: the output's gradient.
        mean: from the forward; not read if memory_efficient.
        invvar: from the forward.
        input_or_output: the output if memory_efficient, else the input; d_input has its dtype.
        normalized_shape, gamma, beta: as in the forward.
        epsilon: as in the forward; memory_efficient replaces a smaller |gamma| by epsilon.
        memory_efficient: compute the normalised values as (output - beta) / gamma.
    """
    return _layer_norm_backward(
        dout, mean, invvar, input_or_output, normalized_shape, gamma, beta, epsilon,
        memory_efficient,
    )  # fmt: skip


def rms_backward(
    dout: torch.Tensor,
    invvar: torch.Tensor,
    input_or_output: torch.Tensor,
    normalized_shape: Shape,
    epsilon: float,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Returns the gradient of the input of ``rms_forward``; arguments as in ``backward_affine``."""
    return _rms_norm_backward(
        dout, invvar, input_or_output, normalized_shape, None, epsilon, memory_efficient
    )[0]


def rms_backward_affine(
    dout: torch.Tensor,
    invvar: torch.Tensor,
    input_or_output: torch.Tensor,
    normalized_shape: Shape,
    gamma: torch.Tensor,
    epsilon: float,
    memory_efficient: bool = False,
) -> list[torch.Tensor]:
    """Returns [d_input, d_gamma] of ``rms_forward_affine``; arguments as in ``backward_affine``."""
    return _rms_norm_backward(
        dout, invvar, input_or_output, normalized_shape, gamma, epsilon, memory_efficient
    )


def _layer_norm_backward(
    dout, mean, invvar, input_or_output, shape, gamma, beta, epsilon, memory_efficient
) -> list[torch.Tensor]:
    affine = gamma is not None
    if memory_efficient:
        x = _normalised(input_or_output, gamma, beta, epsilon)
        mean, rstd = torch.zeros_like(invvar), torch.ones_like(invvar)
        dy, weight = dout.float(), gamma.float() if affine else None
    else:
        dy, x, weight = _one_dtype(dout, input_or_output, gamma)
        rstd = invvar
    grads = layer_norm_bwd(
        _rows("dout", dy, shape), _rows("input_or_output", x, shape),
        _flat("gamma", weight, shape), mean, rstd, with_dweight=affine, with_dbias=affine,
    )  # fmt: skip
    dx = grads.dx.mul_(invvar.unsqueeze(1)) if memory_efficient else grads.dx
    return _results(dx, input_or_output, (grads.dweight, gamma), (grads.dbias, beta))


def _rms_norm_backward(
    dout, invvar, input_or_output, shape, gamma, epsilon, memory_efficient
) -> list[torch.Tensor]:
    affine = gamma is not None
    if memory_efficient:
        x, rstd = _normalised(input_or_output, gamma, None, epsilon), torch.ones_like(invvar)
        dy, weight = dout.float(), gamma.float() if affine else None
    else:
        dy, x, weight = _one_dtype(dout, input_or_output, gamma)
        rstd = invvar
    grads = rms_norm_bwd(
        _rows("dout", dy, shape), _rows("input_or_output", x, shape),
        _flat("gamma", weight, shape), rstd, with_dweight=affine,
    )  # fmt: skip
    dx = grads.dx.mul_(invvar.unsqueeze(1)) if memory_efficient else grads.dx
    return _results(dx, input_or_output, (grads.dweight, gamma))


def _normalised(
    output: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Returns (output - beta) / gamma in float32, with |gamma| raised to at least epsilon."""
    x = output.float()
    if beta is not None:
        x = x - beta.float()
    if gamma is None:
        return x
    wide = gamma.float()
    return x / torch.where(wide >= 0, wide.clamp(min=epsilon), wide.clamp(max=-epsilon))


def _results(
    dx: torch.Tensor,
    like: torch.Tensor,
    *parameters: tuple[torch.Tensor | None, torch.Tensor | None],
) -> list[torch.Tensor]:
    """Returns gradients in the shapes and dtypes of their tensors, without those that are None.

    Args:
        like: tensor of dx's shape and dtype.
    """
    grads = [_like(dx, like).to(like.dtype)]
    for grad, parameter in parameters:
        if grad is not None and parameter is not None:
            grads.append(_like(grad, parameter).to(parameter.dtype))
    return grads


def _one_dtype(first: torch.Tensor, *others: torch.Tensor | None) -> list:
    """Returns the tensors as they are if they have one dtype, else in float32; None stays None."""
    tensors = [first, *others]
    if all(t is None or t.dtype is first.dtype for t in tensors):
        return tensors
    return [None if t is None else t.float() for t in tensors]


def _rows(name: str, t: torch.Tensor, normalized_shape: Shape) -> torch.Tensor:
    """Returns ``t`` as [rows, cols], its trailing dimensions ``normalized_shape`` being cols."""
    shape = tuple(normalized_shape)
    if not shape or t.shape[-len(shape) :] != shape:
        raise ValueError(
            f"fused_layer_norm_cuda: {name} must end in normalized_shape {list(shape)}, which has "
            f"at least 1 dimension, got shape {list(t.shape)}"
        )
    if t.dim() == 2 and len(shape) == 1:
        return t
    return t.reshape(math.prod(t.shape[: -len(shape)]), math.prod(shape))


def _flat(name: str, t: torch.Tensor | None, normalized_shape: Shape) -> torch.Tensor | None:
    if t is None:
        return None
    if t.shape != tuple(normalized_shape):
        raise ValueError(
            f"fused_layer_norm_cuda: {name} must have shape {list(normalized_shape)}, "
            f"got {list(t.shape)}"
        )
    return t if t.dim() == 1 else t.reshape(-1)


def _like(t: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns ``t`` in the shape of ``other``, of as many elements."""
    return t if t.shape == other.shape else t.view(other.shape)
