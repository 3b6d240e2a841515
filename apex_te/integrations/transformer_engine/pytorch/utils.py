"""Small functions of ``transformer_engine.pytorch.utils`` that frameworks call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._names import named

__all__ = [
    "SplitAlongDim",
    "cast_if_needed",
    "divide",
    "get_default_init_method",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_bf16_compatible",
    "make_weak_ref",
    "nvtx_range_pop",
    "nvtx_range_push",
]


def divide(numerator: int, denominator: int) -> int:
    """Returns the quotient of two integers.

    Raises:
        ValueError: the denominator does not divide the numerator.
    """
    if numerator % denominator:
        raise ValueError(f"divide: numerator must be a multiple of {denominator}, got {numerator}")
    return numerator // denominator


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns ``tensor`` in ``dtype``, the tensor itself if it has that dtype; None for None."""
    if tensor is None or tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype)


def get_default_init_method() -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function that fills weights where no ``init_method`` is given.

    It draws from a normal distribution with mean 0 and standard deviation 0.023.
    """
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=0.023)


def get_device_compute_capability() -> tuple[int, int]:
    """Returns the current CUDA device's compute capability, ``(0, 0)`` without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def is_bf16_compatible() -> bool:
    """Returns True: bfloat16 is computed on every device."""
    return True


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Returns True, since bfloat16 is computed on every device; a pair with ``return_reason``."""
    return (True, "") if return_reason else True


def nvtx_range_push(msg: str) -> None:
    """Begins a range called ``msg`` for a profiler; does nothing without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """Ends the innermost range of ``nvtx_range_push``; does nothing without a GPU.

    Args:
        msg: name of the range, for the reader.
    """
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def make_weak_ref(x: Any) -> Any:
    """Returns tensors over the memory of ``x`` that do not keep it alive.

    A caller that knows the memory to stay, such as that of a CUDA graph's pool, can let go of the
    tensors themselves.

    Args:
        x: a tensor, or lists, tuples and dicts of tensors; other values are returned as they are.
    """
    if isinstance(x, torch.Tensor):
        return _unowned(x)
    if isinstance(x, (list, tuple)):
        return type(x)(make_weak_ref(item) for item in x)
    if isinstance(x, dict):
        return {key: make_weak_ref(item) for key, item in x.items()}
    return x


def _unowned(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the memory of ``x`` whose storage does not own it."""
    storage = x.untyped_storage()
    view: Any = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), x.device, storage.nbytes()
    )
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    return made.set_(view, x.storage_offset(), x.shape, x.stride())


@named("transformer_engine.pytorch.utils")
class SplitAlongDim:
    """Split of a tensor along one dimension, called as an autograd function is, by ``apply``."""

    @staticmethod
    def apply(
        mixed_x_layer: torch.Tensor,
        split_dim: int,
        split_size_or_sections: int | Sequence[int],
        squeeze: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Splits a tensor into views; differentiable.

        Args:
            mixed_x_layer: the tensor.
            split_dim: dimension to split.
            split_size_or_sections: size of each part, or a list of the sizes.
            squeeze: remove ``split_dim`` from the parts, where its size is 1.
        """
        sizes = split_size_or_sections
        sizes = sizes if isinstance(sizes, int) else list(sizes)
        parts = torch.split(mixed_x_layer, sizes, dim=split_dim)
        return tuple(part.squeeze(split_dim) if squeeze else part for part in parts)
