"""Schedule 1F1B of a step over the stages of a pipeline, one chunk of the model each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import parallel_state
from .. import p2p_communication as p2p
from ..utils import Model, get_kth_microbatch, get_model_type, get_num_microbatches
from .common import (
    Batch,
    FwdStepFunc,
    backward_step,
    check_model,
    forward_step,
    free_output_tensor,
    gradients_summed_once,
    message_shape,
)

_NAME = "forward_backward_pipelining_without_interleaving"


def forward_backward_pipelining_without_interleaving(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: Model,
    *,
    forward_only: bool,
    tensor_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    deallocate_pipeline_outputs: bool = False,
    async_comm: bool = False,
    sequence_parallel_enabled: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs a step: forwards fill the pipeline, then each forward is followed by a backward.

    Args:
        forward_step_func: as in ``forward_backward_no_pipelining``.
        batch: the step's samples; None on stages that need none.
        model: module, or list of one, with a method ``set_input_tensor``.
        forward_only: runs no backward.
        tensor_shape: shape of an output between stages, of a microbatch.
        dtype: dtype of outputs between stages; None for float32.
        grad_scaler: scales the loss by its method ``scale``.
        disable_autocast: runs the model without an autocast region.
        deallocate_pipeline_outputs: releases outputs once they are sent.
        async_comm: accepted; messages are waited for where they are needed.
        sequence_parallel_enabled: outputs between stages are split by rows.
        custom_sync_context_handler: context of the step instead of DistributedDataParallel's.
        kwargs: arguments of the other schedules, which are not used.

    Returns:
        On the last stage what the function of the loss returned beside the loss, for each
        microbatch; on others an empty list.

    Raises:
        ValueError: several chunks, or no ``tensor_shape``.
        NotImplementedError: a model with encoder and decoder.
    """
    chunks = check_model(model)
    if len(chunks) != 1:
        raise ValueError(f"{_NAME}: model must be one module, got {len(chunks)}")
    (module,) = chunks
    shape = message_shape(_NAME, tensor_shape, sequence_parallel_enabled)
    total = get_num_microbatches()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    warmup = min(total, stages - parallel_state.get_pipeline_model_parallel_rank() - 1)
    losses: list[Any] = []
    waiting: deque[tuple[Any, torch.Tensor]] = deque()

    def forward(k: int, received: torch.Tensor | None) -> torch.Tensor:
        """Runs a microbatch's forward, and keeps what its backward needs."""
        microbatch = get_kth_microbatch(batch, k)  # type: ignore[arg-type]
        output = forward_step(
            forward_step_func, microbatch, module, received, losses, dtype, disable_autocast
        )
        if not forward_only:
            waiting.append((received, output))
        return output

    def backward(grad: torch.Tensor | None) -> torch.Tensor | None:
        """Runs the backward of the earliest microbatch that waits for it."""
        received, output = waiting.popleft()
        return backward_step(
            received,
            output,
            grad,
            get_model_type(module),
            grad_scaler=grad_scaler,
            deallocate_pipeline_outputs=deallocate_pipeline_outputs,
        )

    with gradients_summed_once(chunks, custom_sync_context_handler):
        for k in range(warmup):
            output = forward(k, p2p.recv_forward(shape, dtype=dtype))
            p2p.send_forward(output, shape, dtype=dtype)
            free_output_tensor(output, deallocate_pipeline_outputs and not forward_only)
        received = p2p.recv_forward(shape, dtype=dtype) if warmup < total else None
        for k in range(warmup, total):
            is_last = k == total - 1
            output = forward(k, received)
            if forward_only:
                p2p.send_forward(output, shape, dtype=dtype)
                received = None if is_last else p2p.recv_forward(shape, dtype=dtype)
                continue
            grad = p2p.send_forward_recv_backward(output, shape, dtype=dtype)
            is_sent = not parallel_state.is_pipeline_last_stage()
            free_output_tensor(output, deallocate_pipeline_outputs and is_sent)
            grad = backward(grad)
            if is_last:
                p2p.send_backward(grad, shape, dtype=dtype)
            else:
                received = p2p.send_backward_recv_forward(grad, shape, dtype=dtype)
        while waiting:
            grad = backward(p2p.recv_backward(shape, dtype=dtype))
            p2p.send_backward(grad, shape, dtype=dtype)
    return losses
