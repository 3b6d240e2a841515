"""Schedules of a training step over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import parallel_state
from .fwd_bwd_no_pipelining import forward_backward_no_pipelining
from .fwd_bwd_pipelining_with_interleaving import forward_backward_pipelining_with_interleaving
from .fwd_bwd_pipelining_without_interleaving import (
    forward_backward_pipelining_without_interleaving,
)

__all__ = ["get_forward_backward_func"]


def get_forward_backward_func(
    virtual_pipeline_model_parallel_size: int | None, pipeline_model_parallel_size: int
) -> Callable[..., list[Any]]:
    """Returns the schedule for the pipeline stages of ``parallel_state``.

    It is ``forward_backward_no_pipelining`` for one stage, else the 1F1B schedule without or with
    interleaving.

    Args:
        virtual_pipeline_model_parallel_size: number of chunks of a stage; None is one, without
            interleaving.
        pipeline_model_parallel_size: not read.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return forward_backward_no_pipelining
    if virtual_pipeline_model_parallel_size is None:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving
