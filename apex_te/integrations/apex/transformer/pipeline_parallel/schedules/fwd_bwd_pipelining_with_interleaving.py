"""Interleaved schedule 1F1B: each stage has several chunks of the model, which lie apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import parallel_state
from .. import p2p_communication as p2p
from ..utils import get_kth_microbatch, get_num_microbatches
from .common import (
    FwdStepFunc,
    backward_step,
    check_model,
    forward_step,
    free_output_tensor,
    gradients_summed_once,
    message_shape,
)

_NAME = "forward_backward_pipelining_with_interleaving"


def forward_backward_pipelining_with_interleaving(
    forward_step_func: FwdStepFunc,
    batch: Any,
    model: list[torch.nn.Module],
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
    """Runs a step over stages with several chunks each; the pipeline fills and drains faster.

    The arguments and the result are those of ``forward_backward_pipelining_without_interleaving``,
    but ``model`` is the list of this stage's chunks. A unit is one microbatch in one chunk: units
    run in groups of as many microbatches as stages, chunk by chunk.

    Raises:
        ValueError: one chunk, no ``tensor_shape``, or a number of microbatches that is not a
            multiple of the stages.
        NotImplementedError: a model with encoder and decoder.
    """
    chunks = check_model(model)
    shape = message_shape(_NAME, tensor_shape, sequence_parallel_enabled)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    microbatches, count = get_num_microbatches(), len(chunks)
    if count < 2:
        raise ValueError(f"{_NAME}: model must be a list of several chunks, got {count}")
    if microbatches % stages:
        raise ValueError(
            f"{_NAME}: the number of microbatches must be a multiple of {stages} stages, got"
            f" {microbatches}"
        )
    units = microbatches * count
    warmup = units
    if not forward_only and microbatches > stages:
        warmup = min(units, 2 * (stages - stage - 1) + (count - 1) * stages)
    losses: list[Any] = []
    received: list[deque[Any]] = [deque() for _ in chunks]  # inputs that have arrived, by chunk
    grads: list[deque[Any]] = [deque() for _ in chunks]
    waiting: list[deque[Any]] = [deque() for _ in chunks]
    started = [0] * count  # microbatches of a chunk whose forward has run
    is_first, is_last = stage == 0, stage == stages - 1

    def chunk_of(unit: int, forward: bool = True) -> int:
        """Returns the chunk of a unit of the forwards, or of the backwards."""
        chunk = unit % (stages * count) // stages
        return chunk if forward else count - 1 - chunk

    def forward(unit: int) -> torch.Tensor:
        """Runs a unit's forward."""
        chunk = chunk_of(unit)
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        given = None if is_first and chunk == 0 else received[chunk].popleft()
        k, started[chunk] = started[chunk], started[chunk] + 1
        microbatch = get_kth_microbatch(batch, k)
        output = forward_step(
            forward_step_func, microbatch, chunks[chunk], given, losses, dtype, disable_autocast
        )
        if not forward_only:
            waiting[chunk].append((given, output))
        return output

    def backward(unit: int) -> torch.Tensor | None:
        """Runs a unit's backward."""
        chunk = chunk_of(unit, forward=False)
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        grad = None if is_last and chunk == count - 1 else grads[chunk].popleft()
        given, output = waiting[chunk].popleft()
        return backward_step(
            given,
            output,
            grad,
            grad_scaler=grad_scaler,
            deallocate_pipeline_outputs=deallocate_pipeline_outputs,
        )

    def sent(unit: int, output: torch.Tensor) -> torch.Tensor | None:
        """Returns the output of a unit if another stage waits for it."""
        return None if is_last and chunk_of(unit) == count - 1 else output

    def returned(unit: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the gradient of a unit's input if another stage waits for it."""
        return None if is_first and chunk_of(unit, forward=False) == 0 else grad

    def next_input(unit: int) -> int | None:
        """Returns the chunk whose input comes while ``unit`` of the forwards ends, if one does.

        The last stage's outputs, which it makes some units later, go to the first stage's next
        chunk.
        """
        if not is_first:
            return chunk_of(unit + 1) if unit + 1 < units else None
        source = unit - (stages - 1)
        chunk = chunk_of(source) + 1 if source >= 0 else 0
        return chunk if 0 < chunk < count else None

    def next_grad(unit: int) -> int | None:
        """Returns the chunk whose output's gradient comes while ``unit`` of the backwards ends."""
        if not is_last:
            return chunk_of(unit + 1, forward=False) if unit + 1 < units else None
        source = unit - (stages - 1)
        chunk = chunk_of(source, forward=False) - 1 if source >= 0 else -1
        return chunk if chunk >= 0 else None

    def exchange(
        output: torch.Tensor | None,
        grad: torch.Tensor | None,
        input_chunk: int | None,
        grad_chunk: int | None,
    ) -> None:
        """Sends what units made, and keeps what comes for chunks here."""
        has_input, has_grad = input_chunk is not None, grad_chunk is not None
        arrived = p2p.exchange(shape, dtype, output, grad, has_input, has_grad)
        if input_chunk is not None:
            received[input_chunk].append(arrived[0])
        if grad_chunk is not None:
            grads[grad_chunk].append(arrived[1])

    with gradients_summed_once(chunks, custom_sync_context_handler):
        exchange(None, None, None if is_first else 0, None)
        for unit in range(warmup):
            output = forward(unit)
            # the last gradient before backwards begin comes with the last of these
            begins = unit == warmup - 1 and not forward_only and not is_last
            exchange(sent(unit, output), None, next_input(unit), count - 1 if begins else None)
            free_output_tensor(sent(unit, output), deallocate_pipeline_outputs and not forward_only)
        for unit in range(0 if forward_only else units):
            is_left = unit + warmup < units
            made = sent(unit + warmup, forward(unit + warmup)) if is_left else None
            grad = returned(unit, backward(unit))
            input_chunk = next_input(unit + warmup) if is_left else None
            exchange(made, grad, input_chunk, next_grad(unit))
            free_output_tensor(made, deallocate_pipeline_outputs)
    return losses


# apex's name
_forward_backward_pipelining_with_interleaving = forward_backward_pipelining_with_interleaving
