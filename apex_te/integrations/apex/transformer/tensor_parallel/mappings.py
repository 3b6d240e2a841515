"""Collectives of the tensor-parallel group in forward, and their adjoints in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .....comm.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from .. import parallel_state
from .utils import split_tensor_along_last_dim

Map = Callable[[torch.Tensor], torch.Tensor]


def _ranks() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def _group() -> Any:
    return parallel_state.get_tensor_model_parallel_group()


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum of ``x`` over the tensor-parallel ranks, as a new tensor."""
    return x if _ranks() == 1 else all_reduce(x.clone().contiguous(), _group()).wait()


def split_columns(x: torch.Tensor) -> torch.Tensor:
    """Returns this rank's columns, the last dimension's."""
    if _ranks() == 1:
        return x
    parts = split_tensor_along_last_dim(x, _ranks())
    return parts[parallel_state.get_tensor_model_parallel_rank()].contiguous()


def gather_columns(x: torch.Tensor) -> torch.Tensor:
    """Returns the columns of all tensor-parallel ranks, concatenated in order of rank."""
    if _ranks() == 1:
        return x
    return torch.cat(all_gather_rows(x[None], _group()).wait().unbind(), -1)


def split_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows, the first dimension's."""
    if _ranks() == 1:
        return x
    if x.shape[0] % _ranks():
        raise ValueError(
            f"the first dimension must be a multiple of {_ranks()} tensor-parallel ranks, got"
            f" {x.shape[0]}"
        )
    return x.chunk(_ranks())[parallel_state.get_tensor_model_parallel_rank()].contiguous()


def gather_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all tensor-parallel ranks, concatenated in order of rank."""
    return x if _ranks() == 1 else all_gather_rows(x, _group()).wait()


def sum_and_split_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows of the sum over ranks."""
    return x if _ranks() == 1 else reduce_scatter_rows(x, _group()).wait()


class _Mapped(torch.autograd.Function):
    """A map of a tensor, with another map for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Map, back: Map) -> torch.Tensor:
        ctx.back = back
        out = there(x)
        return out.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0]), None, None


def _mapped(x: torch.Tensor, there: Map, back: Map) -> torch.Tensor:
    out: torch.Tensor = _Mapped.apply(x, there, back)
    return out


def copy_to_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Returns the input; its gradient is summed over the tensor-parallel ranks.

    Collective in backward.
    """
    return _mapped(input_, _same, sum_over_ranks)


def reduce_from_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Returns the sum over the tensor-parallel ranks; the gradient is passed on as it is.

    Collective: ``input_`` has one shape and dtype on all ranks, and is not written.
    """
    return _mapped(input_, sum_over_ranks, _same)


def scatter_to_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Returns this rank's columns of the last dimension; the gradient's are gathered.

    ``input_`` is [..., n], the result [..., n / ranks]. Collective in backward.

    Raises:
        ValueError: the number of tensor-parallel ranks does not divide n.
    """
    return _mapped(input_, split_columns, gather_columns)


def gather_from_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Returns the columns of all ranks; of the gradient, this rank's are taken.

    Collective: ``input_`` is [..., n], the result [..., n * ranks], in the order of the
    tensor-parallel ranks.
    """
    return _mapped(input_, gather_columns, split_columns)


def scatter_to_sequence_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows of the first dimension; the gradient's are gathered.

    ``input_`` is [rows, ...], the result [rows / ranks, ...]. Collective in backward.

    Raises:
        ValueError: the number of tensor-parallel ranks does not divide the rows.
    """
    return _mapped(input_, split_rows, gather_rows)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor, to_model_parallel: bool = True
) -> torch.Tensor:
    """Returns the rows of all tensor-parallel ranks; collective.

    Args:
        input_: [rows, ...]; the result is [rows * ranks, ...], in the order of ranks.
        to_model_parallel: True if what follows is split over ranks: the gradient is then summed
            over ranks before it is split. False only splits it.
    """
    return _mapped(input_, gather_rows, sum_and_split_rows if to_model_parallel else split_rows)


def reduce_scatter_to_sequence_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows of the sum over ranks; the gradient's rows are gathered.

    Collective: ``input_`` is [rows, ...], the result [rows / ranks, ...]. The number of
    tensor-parallel ranks must divide the rows.
    """
    return _mapped(input_, sum_and_split_rows, gather_rows)
