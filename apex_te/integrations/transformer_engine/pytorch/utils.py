"""Small functions of ``transformer_engine.pytorch.utils`` that frameworks call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._names import named

__all__ = [
    "SplitAlongDim", "attention_mask_func", "cast_if_needed", "deinterleave_glu_tensor", "divide",
    "get_cudnn_version", "get_default_init_method", "get_device_compute_capability",
    "init_method_constant", "init_method_normal", "interleave_glu_tensor", "is_bf16_available",
    "is_bf16_compatible", "make_weak_ref", "nvtx_range_pop", "nvtx_range_push",
    "scaled_init_method_normal",
]  # fmt: skip


def divide(numerator: int, denominator: int) -> int:
    """Returns the quotient ``numerator / denominator`` of two integers.

    Raises:
        ValueError: the division leaves a remainder.
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
    return init_method_normal(0.023)


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that fills a tensor from a normal distribution with mean 0."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(
    sigma: float, num_layers: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns ``init_method_normal(sigma / sqrt(2 * num_layers))``."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def init_method_constant(val: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that fills a tensor with ``val``."""
    return functools.partial(torch.nn.init.constant_, val=val)


def attention_mask_func(
    attention_scores: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Sets scores to -10000, in place, where a mask is True, and returns them.

    Args:
        attention_scores: floating-point tensor of any shape.
        attention_mask: bool, broadcast to the scores.
    """
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def get_cudnn_version() -> tuple[int, int, int]:
    """Returns cuDNN's version (major, minor, patch); three zeros without cuDNN."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None:
        return 0, 0, 0
    major, rest = divmod(version, 1000 if version < 90000 else 10000)
    return major, *divmod(rest, 100)


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Returns a copy whose first dimension has blocks of both halves in turn.

    Args:
        tensor: [rows, ...], the rows of one half before those of the other.
        interleave_size: rows of a block; twice it divides the rows.

    Raises:
        ValueError: ``interleave_size`` is below 1 or does not divide the halves.
    """
    return _blocks(tensor, interleave_size, (2, -1))


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Returns a copy with the halves one after the other; inverse of ``interleave_glu_tensor``.

    Args:
        tensor: [rows, ...], blocks of both halves in turn.
        interleave_size: rows of a block; twice it divides the rows.

    Raises:
        ValueError: ``interleave_size`` is below 1 or does not divide the halves.
    """
    return _blocks(tensor, interleave_size, (-1, 2))


def _blocks(tensor: torch.Tensor, size: int, counts: tuple[int, int]) -> torch.Tensor:
    """Exchanges the two dimensions ``counts`` of the blocks of ``size`` rows of a tensor."""
    if size <= 0 or tensor.shape[0] % (2 * size):
        raise ValueError(
            "interleave_glu_tensor: interleave_size must be above 0, and twice it divide the "
            f"{tensor.shape[0]} rows, got {size}"
        )
    split = tensor.reshape(*counts, size, *tensor.shape[1:])
    return split.transpose(0, 1).reshape(tensor.shape)


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

    ``msg`` is not read: ranges end in the opposite order of their beginnings.
    """
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def make_weak_ref(x: Any) -> Any:
    """Returns tensors over the memory of ``x`` that do not keep it alive.

    A caller that knows that the memory stays valid, such as that of a CUDA graph's pool, can drop
    the tensors themselves. Reading a result after its memory was freed is undefined.

    Args:
        x: a tensor, or a list, plain tuple or dict of such, at any depth; other values are
            returned as they are.

    Returns:
        ``x`` with each tensor replaced by one of equal memory, shape, strides and dtype, without
        its gradient history.
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
            mixed_x_layer: tensor of any shape and dtype.
            split_dim: dimension to split.
            split_size_or_sections: size of each part, or the sizes of all parts.
            squeeze: remove ``split_dim`` from parts in which its size is 1.
        """
        sizes = split_size_or_sections
        sizes = sizes if isinstance(sizes, int) else list(sizes)
        parts = torch.split(mixed_x_layer, sizes, dim=split_dim)
        return tuple(part.squeeze(split_dim) if squeeze else part for part in parts)
