"""Schedule of a step on one stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..utils import Model, get_kth_microbatch, get_model_type, get_num_microbatches, listify_model
from .common import Batch, FwdStepFunc, backward_step, forward_step, gradients_summed_once


def forward_backward_no_pipelining(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: Model,
    *,
    forward_only: bool,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs forward and backward of a step's microbatches, one after the other.

    Args:
        forward_step_func: takes a microbatch and the model, and returns the output and the function
            of the loss, which takes the output and returns the loss and what is to be returned.
        batch: tensors whose first dimension is that of the step's samples.
        model: module, or list of one.
        forward_only: runs no backward.
        dtype: float16 or bfloat16 runs the model in an autocast region.
        grad_scaler: scales the loss by its method ``scale``.
        disable_autocast: runs it without.
        custom_sync_context_handler: context of all microbatches but the last, instead of
            ``no_sync`` of DistributedDataParallel.
        kwargs: arguments of the other schedules, which are not used.

    Returns:
        What the function of the loss returned beside the loss, for each microbatch.

    Raises:
        ValueError: several chunks.
    """
    chunks = listify_model(model)
    if len(chunks) != 1:
        raise ValueError(
            f"forward_backward_no_pipelining: model must be one module, got {len(chunks)}"
        )
    (module,) = chunks
    losses: list[Any] = []

    def run(k: int) -> None:
        """Runs a microbatch."""
        microbatch = get_kth_microbatch(batch, k)  # type: ignore[arg-type]
        output = forward_step(
            forward_step_func, microbatch, module, None, losses, dtype, disable_autocast
        )
        if not forward_only:
            backward_step(None, output, None, get_model_type(module), grad_scaler=grad_scaler)

    last = get_num_microbatches() - 1
    if custom_sync_context_handler is not None:
        with gradients_summed_once(chunks, custom_sync_context_handler):
            for k in range(last):
                run(k)
        run(last)
        return losses
    with gradients_summed_once(chunks):
        for k in range(last + 1):
            run(k)
    return losses
