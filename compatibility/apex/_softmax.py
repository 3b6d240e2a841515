"""Makes the functions ``forward`` and ``backward`` of apex's four softmax extensions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from apex_te.ops.scaled_softmax import scaled_softmax_bwd, scaled_softmax_fwd

Functions = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]


def unmasked(module: str, dims: int, causal: str | None = None) -> Functions:
    """Makes the functions of a softmax module without a mask argument.

    Args:
        module: full name of the module.
        dims: number of dimensions that the functions' tensors must have.
        causal: "upper_left" to mask elements above the diagonal, None for no mask.

    Returns:
        The module's functions ``forward`` and ``backward``.
    """

    def forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
        """Computes softmax(scale_factor * input) over the last dimension.

        scaled_upper_triang_masked_softmax_cuda takes [b * heads, s, s] and gives 0 above the
        diagonal; scaled_softmax_cuda takes [b, heads, sq, sk]. Both take float32, too.
        """
        _check_dims(module, "input", input, dims)
        # apex's callers pass the scale as a tensor of one element on the CPU.
        return scaled_softmax_fwd(input, float(scale_factor), causal=causal)

    return _named(forward, module), _backward(module, dims, causal)


def masked(module: str) -> Functions:
    """Makes the functions of a softmax module whose forward takes a mask.

    Args:
        module: full name of the module.

    Returns:
        The module's functions ``forward`` and ``backward``.
    """

    def forward(
        input: torch.Tensor, mask: torch.Tensor | None, scale_factor: float
    ) -> torch.Tensor:
        """Computes softmax(scale_factor * input) over the last dimension, without masked elements.

        A row that is masked out altogether gives zeros.

        Args:
            input: [b, heads, sq, sk].
            mask: [b or 1, 1, sq, sk], bool or uint8, 1 = masked out; None masks nothing.
            scale_factor: number that the input is multiplied by.

        Raises:
            ValueError: input or mask has not 4 dimensions.
            TypeError: the mask is neither bool nor uint8.
        """
        _check_dims(module, "input", input, 4)
        if mask is not None:
            _check_dims(module, "mask", mask, 4)
            if mask.dtype is torch.uint8:
                mask = mask == 1
            elif mask.dtype is not torch.bool:
                raise TypeError(f"{_short(module)}: mask must be bool or uint8, got {mask.dtype}")
        return scaled_softmax_fwd(input, float(scale_factor), mask)

    return _named(forward, module), _backward(module, 4)


def _backward(module: str, dims: int, causal: str | None = None) -> Callable[..., torch.Tensor]:
    """Makes the function ``backward`` of a softmax module; takes the arguments of ``unmasked``."""

    def backward(
        output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
    ) -> torch.Tensor:
        """Computes the gradient of softmax's input as a new tensor.

        Args:
            output_grads: the output's gradient, which is not overwritten.
            softmax_results: the output of ``forward``.
            scale_factor: as in ``forward``.

        Raises:
            ValueError: a tensor has the wrong number of dimensions.
        """
        _check_dims(module, "output_grads", output_grads, dims)
        _check_dims(module, "softmax_results", softmax_results, dims)
        return scaled_softmax_bwd(output_grads, softmax_results, float(scale_factor), causal=causal)

    return _named(backward, module)


def _named(function: Callable[..., torch.Tensor], module: str) -> Callable[..., torch.Tensor]:
    """Returns the function after naming ``module`` as its module, so that ``pickle`` finds it."""
    function.__module__, function.__qualname__ = module, function.__name__
    return function


def _short(module: str) -> str:
    """Returns the last part of a module's full name."""
    return module.rpartition(".")[2]


def _check_dims(module: str, name: str, tensor: torch.Tensor, dims: int) -> None:
    """Checks the number of dimensions of the argument ``name``; raises ``ValueError``."""
    if tensor.dim() != dims:
        raise ValueError(
            f"{_short(module)}: {name} must have {dims} dimensions, got shape {list(tensor.shape)}"
        )
