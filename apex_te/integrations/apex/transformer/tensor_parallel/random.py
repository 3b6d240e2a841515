"""Random numbers that differ between tensor-parallel ranks, and the recompute that repeats them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _checkpoint

from .....comm.rng import CudaRNGStatesTracker
from .. import parallel_state
from .memory import MemoryBuffer, allocate_mem_buff

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_tracker = CudaRNGStatesTracker()
_buffer: MemoryBuffer | None = None


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Returns the tracker whose ``fork()`` draws this tensor-parallel rank's own random numbers."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the default sequence of the ranks alike, and the tracker's by tensor-parallel rank."""
    own = seed + 2718 + parallel_state.get_tensor_model_parallel_rank()
    _tracker.reset()
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, own)


def init_checkpointed_activations_memory_buffer(
    micro_batch_size: int,
    max_position_embeddings: int,
    hidden_size: int,
    num_layers: int,
    tensor_model_parallel_size: int,
    checkpoint_num_layers: int,
    fp16: bool,
) -> MemoryBuffer:
    """Returns a buffer for the activations of all checkpoints of a microbatch.

    It is there for callers that want one: ``checkpoint`` does not use it.

    Args:
        micro_batch_size, max_position_embeddings, hidden_size: samples, tokens and channels of an
            activation.
        num_layers: number of layers.
        tensor_model_parallel_size: ranks that share an activation.
        checkpoint_num_layers: layers in a checkpoint.
        fp16: True for float16, False for float32.

    Raises:
        ValueError: there is such a buffer already.
    """
    global _buffer
    size = micro_batch_size * max_position_embeddings * hidden_size // tensor_model_parallel_size
    numel = size * (num_layers // checkpoint_num_layers)
    dtype = torch.half if fp16 else torch.float
    _buffer = allocate_mem_buff("checkpointed activations", numel, dtype, track_usage=False)
    return _buffer


def reset_checkpointed_activations_memory_buffer() -> None:
    """Resets that buffer, if there is one."""
    if _buffer is not None:
        _buffer.reset()


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Calls ``function(*args)``, which is called again in backward instead of keeping tensors.

    The second call draws the same random numbers, the tracker's included.

    Args:
        function: the function.
        distribute_saved_activations: no effect: each rank keeps the whole first argument.
        args: its positional arguments.

    Returns:
        What ``function`` returns.
    """
    before: list[dict[str, torch.Tensor]] = []

    def run(*inputs: Any) -> Any:
        """Calls the function, with the tracker's state of its first call."""
        if not before:
            before.append(_tracker.get_states())
            return function(*inputs)
        now = _tracker.get_states()
        _tracker.set_states(before[0])
        try:
            return function(*inputs)
        finally:
            _tracker.set_states(now)

    return _checkpoint(run, *args, use_reentrant=False)
