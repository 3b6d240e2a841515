"""Activations and gradients sent between the stages of a pipeline.

A function waits for what it receives and for what it sends. Forward and backward messages have
different tags, so that two stages that are neighbours on both sides do not mix them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from .. import parallel_state

Shape = Sequence[int]
_FORWARD, _BACKWARD = 1, 2


class FutureTensor:
    """A received tensor; ``get`` returns it once it has arrived."""

    def __init__(self, tensor: torch.Tensor | None, works: Sequence[Any]) -> None:
        self.tensor = tensor
        self._works = list(works)

    def get(self) -> torch.Tensor | None:
        """Waits for the tensor and returns it."""
        for work in self._works:
            work.wait()
        self._works = []
        return self.tensor


def _device() -> torch.device:
    group = parallel_state.get_pipeline_model_parallel_group()
    is_cuda = "nccl" in distributed.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def exchange(
    tensor_shape: Shape,
    dtype: torch.dtype | None,
    to_next: torch.Tensor | None = None,
    to_prev: torch.Tensor | None = None,
    from_prev: bool = False,
    from_next: bool = False,
    async_comm: bool = False,
) -> tuple[Any, Any]:
    """Sends tensors and receives others, in one batch.

    Args:
        tensor_shape: shape of what is received.
        dtype: its dtype; None for float32.
        to_next: output for the next stage.
        to_prev: gradient for the previous stage.
        from_prev: receives an output.
        from_next: receives a gradient.
        async_comm: returns ``FutureTensor`` objects instead of waiting.

    Returns:
        What came from the previous and from the next stage, None each if nothing was to come.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    prev_rank = parallel_state.get_pipeline_model_parallel_prev_rank()
    next_rank = parallel_state.get_pipeline_model_parallel_next_rank()

    def empty() -> torch.Tensor:
        """Returns memory for a message."""
        kind = torch.float32 if dtype is None else dtype
        shape = torch.Size(tensor_shape)
        return torch.empty(shape, dtype=kind, device=_device(), requires_grad=True)

    arrived_prev = empty() if from_prev else None
    arrived_next = empty() if from_next else None
    planned = (
        (distributed.isend, to_prev, prev_rank, _BACKWARD),
        (distributed.isend, to_next, next_rank, _FORWARD),
        (distributed.irecv, arrived_next, next_rank, _BACKWARD),
        (distributed.irecv, arrived_prev, prev_rank, _FORWARD),
    )
    ops = [
        distributed.P2POp(call, tensor.detach().contiguous(), peer, group, tag)
        for call, tensor, peer, tag in planned
        if tensor is not None
    ]
    works = distributed.batch_isend_irecv(ops) if ops else []
    if async_comm:
        futures = (FutureTensor(each, works) for each in (arrived_prev, arrived_next))
        prev, following = futures
        return prev if from_prev else None, following if from_next else None
    for work in works:
        work.wait()
    return arrived_prev, arrived_next


def _is_first() -> bool:
    return parallel_state.is_pipeline_first_stage()


def _is_last() -> bool:
    return parallel_state.is_pipeline_last_stage()


def recv_forward(
    tensor_shape: Shape, *, dtype: torch.dtype | None = None, async_comm: bool = False
) -> Any:
    """Returns the previous stage's output, None on the first stage."""
    return exchange(tensor_shape, dtype, from_prev=not _is_first(), async_comm=async_comm)[0]


def recv_backward(
    tensor_shape: Shape, *, dtype: torch.dtype | None = None, async_comm: bool = False
) -> Any:
    """Returns the gradient from the next stage, None on the last stage."""
    return exchange(tensor_shape, dtype, from_next=not _is_last(), async_comm=async_comm)[1]


def send_forward(
    output_tensor: torch.Tensor | None,
    tensor_shape: Shape = (),
    *,
    dtype: torch.dtype | None = None,
    async_comm: bool = False,
) -> None:
    """Sends an output to the next stage, nothing on the last stage."""
    if not _is_last():
        exchange(tensor_shape, dtype, to_next=output_tensor, async_comm=async_comm)


def send_backward(
    input_tensor_grad: torch.Tensor | None,
    tensor_shape: Shape = (),
    *,
    dtype: torch.dtype | None = None,
    async_comm: bool = False,
) -> None:
    """Sends a gradient to the previous stage, nothing on the first stage."""
    if not _is_first():
        exchange(tensor_shape, dtype, to_prev=input_tensor_grad, async_comm=async_comm)


def send_forward_recv_backward(
    output_tensor: torch.Tensor | None,
    tensor_shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    async_comm: bool = False,
) -> Any:
    """Sends an output to the next stage and returns a gradient from it; None on the last stage."""
    if _is_last():
        return None
    return exchange(
        tensor_shape, dtype, to_next=output_tensor, from_next=True, async_comm=async_comm
    )[1]


def send_backward_recv_forward(
    input_tensor_grad: torch.Tensor | None,
    tensor_shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    async_comm: bool = False,
) -> Any:
    """Sends a gradient to the previous stage and returns an output of it; None on the first."""
    if _is_first():
        return None
    return exchange(
        tensor_shape, dtype, to_prev=input_tensor_grad, from_prev=True, async_comm=async_comm
    )[0]


def send_forward_recv_forward(
    output_tensor: torch.Tensor | None,
    recv_prev: bool,
    tensor_shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    async_comm: bool = False,
) -> Any:
    """Sends an output to the next stage and returns one of the previous stage, if it is to come."""
    return exchange(
        tensor_shape, dtype, to_next=output_tensor, from_prev=recv_prev, async_comm=async_comm
    )[0]


def send_backward_recv_backward(
    input_tensor_grad: torch.Tensor | None,
    recv_next: bool,
    tensor_shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    async_comm: bool = False,
) -> Any:
    """Sends a gradient to the previous stage and returns one from the next, if it is to come."""
    return exchange(
        tensor_shape, dtype, to_prev=input_tensor_grad, from_next=recv_next, async_comm=async_comm
    )[1]


def send_forward_backward_recv_forward_backward(
    output_tensor: torch.Tensor | None,
    input_tensor_grad: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    async_comm: bool = False,
) -> tuple[Any, Any]:
    """Sends an output and a gradient, and returns an output and a gradient, if they are to come."""
    return exchange(
        tensor_shape, dtype, output_tensor, input_tensor_grad, recv_prev, recv_next, async_comm
    )
