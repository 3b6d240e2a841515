"""Division of sizes, and of tensors over the ranks of the tensor-parallel group."""

from __future__ import annotations

import torch

from ....comm.collectives import all_gather_rows
from . import parallel_state


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises ValueError unless ``denominator`` divides ``numerator``."""
    if numerator % denominator:
        raise ValueError(f"numerator must be a multiple of {denominator}, got {numerator}")


def divide(numerator: int, denominator: int) -> int:
    """Returns the quotient of two integers; raises ValueError if there is a rest."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this tensor-parallel rank's share of the flattened tensor, as a view."""
    size = divide(tensor.numel(), parallel_state.get_tensor_model_parallel_world_size())
    start = parallel_state.get_tensor_model_parallel_rank() * size
    return tensor.reshape(-1)[start : start + size]


def gather_split_1d_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the shares of all tensor-parallel ranks in one dimension, by rank."""
    return all_gather_rows(tensor, parallel_state.get_tensor_model_parallel_group()).wait()
