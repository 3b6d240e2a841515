"""Activation recompute, random states and collectives under Transformer Engine's names."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import distributed

from ....comm import collectives
from ....comm import rng as _rng
from ....distributed.checkpoint import RunConditions, checkpoint
from .._names import named, neutral
from .constants import dist_group_type
from .quantization import FP8GlobalStateManager

__all__ = [
    "CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint", "gather_along_first_dim",
    "get_activation_recompute_contexts", "get_all_rng_states", "get_distributed_rank",
    "get_distributed_world_size", "graph_safe_rng_available", "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled", "prepare_te_modules_for_fsdp",
    "reduce_scatter_along_first_dim",
]  # fmt: skip

_MODULE = "transformer_engine.pytorch.distributed"


# Activation recompute.


class _Phase:
    """Flags that ``activation_recompute_forward`` sets for the present forward."""

    def __init__(self) -> None:
        self.enabled = False
        self.recomputes = False


_phase = _Phase()


@named(_MODULE)
class activation_recompute_forward:
    """Marks a forward that will be recomputed, or its recompute; a context manager.

    apex_te tells a recompute by the backward that it runs in. The two objects of
    ``get_activation_recompute_contexts`` belong together: the second one gives the recompute the
    ``fp8_autocast`` region and the FP8 scales that the forward inside the first one had. An object
    that is made alone sets neither.

    Args:
        activation_recompute: the forward is, or will be, recomputed.
        recompute_phase: this is the recompute.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self.activation_recompute = activation_recompute
        self.recompute_phase = recompute_phase
        self._first: activation_recompute_forward | None = None
        self._conditions: RunConditions | None = None
        self._before = (False, False)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._before = (_phase.enabled, _phase.recomputes)
        _phase.enabled, _phase.recomputes = self.activation_recompute, self.recompute_phase
        first = self._first
        if first is not None and first._conditions is not None:
            self._stack.enter_context(first._conditions.restored())
        elif not self.recompute_phase:
            self._conditions = RunConditions()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _phase.enabled, _phase.recomputes = self._before
        if self._conditions is not None:
            self._conditions.note_scales()  # after the forward, which may have allocated them
        self._stack.close()


def get_activation_recompute_contexts() -> tuple[
    activation_recompute_forward, activation_recompute_forward
]:
    """Returns contexts for a forward and its recompute, a ``context_fn`` of torch's checkpoint."""
    forward = activation_recompute_forward(True, False)
    recompute = activation_recompute_forward(True, True)
    recompute._first = forward
    return forward, recompute


def is_fp8_activation_recompute_enabled() -> bool:
    """Returns True inside ``activation_recompute_forward(True, ..)`` and an enabled region."""
    return _phase.enabled and FP8GlobalStateManager.is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Returns True inside ``activation_recompute_forward(.., recompute_phase=True)``."""
    return _phase.recomputes


# Random states.

_trackers: weakref.WeakSet[CudaRNGStatesTracker] = weakref.WeakSet()


@named(_MODULE)
class CudaRNGStatesTracker(_rng.CudaRNGStatesTracker):
    """Several independent sequences of random numbers by name; apex_te's class of this name."""

    def __init__(self) -> None:
        super().__init__()
        _trackers.add(self)


def get_all_rng_states() -> dict[str, torch.Generator]:
    """Returns generators in the present states of all trackers' sequences, by name.

    The generators are copies: trackers draw from torch's default generator, which CUDA graphs
    register by themselves.
    """
    found = {}
    for tracker in list(_trackers):
        for name, state in tracker.get_states().items():
            device = "cuda" if torch.cuda.is_available() else "cpu"
            found[name] = torch.Generator(device)
            found[name].set_state(state)
    return found


def graph_safe_rng_available() -> bool:
    """Returns True if torch's generators can be registered with CUDA graphs."""
    return hasattr(torch.cuda.CUDAGraph, "register_generator_state")


# Collectives.


def get_distributed_world_size(group: dist_group_type | None = None) -> int:
    """Returns the number of ranks of ``group``; 1 if torch.distributed is not initialised."""
    return collectives.world_size(group)


def get_distributed_rank(group: dist_group_type | None = None) -> int:
    """Returns this process's rank in ``group``; 0 if torch.distributed is not initialised."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 0
    return distributed.get_rank(group)


def gather_along_first_dim(
    inp: torch.Tensor,
    process_group: dist_group_type | None,
    async_op: bool = False,
    quantizer: Any = None,
) -> tuple[torch.Tensor, Any]:
    """Gathers the rows of all ranks; not differentiable.

    Args:
        inp: ``[rows, ..]``, this rank's rows, as many on each rank.
        process_group: process group; None is the whole world.
        async_op: return before the rows have arrived.
        quantizer: must be None; the rows travel as they are.

    Returns:
        rows: ``[ranks * rows, ..]``, ordered by rank; ``inp`` itself in a group of one rank.
        handle: object whose ``wait`` must be called before ``rows`` is read; None without
            ``async_op``.
    """
    neutral("gather_along_first_dim", quantizer=(quantizer, None))
    if collectives.world_size(process_group) == 1:
        return inp, None
    with torch.no_grad():
        return _result(collectives.all_gather_rows(inp, process_group), async_op)


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: dist_group_type | None, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """Sums over ranks and gives each rank its share of the sum's rows; not differentiable.

    Args:
        inp: ``[rows, ..]``, this rank's summand.
        tp_group: process group; None is the whole world.
        async_op: return before the sum is there.

    Returns:
        rows: ``[rows / ranks, ..]``; ``inp`` itself in a group of one rank.
        handle: object whose ``wait`` must be called before ``rows`` is read; None without
            ``async_op``.
    """
    if collectives.world_size(tp_group) == 1:
        return inp, None
    with torch.no_grad():
        return _result(collectives.reduce_scatter_rows(inp, tp_group), async_op)


def _result(pending: collectives.Pending, async_op: bool) -> tuple[torch.Tensor, Any]:
    """Returns what a collective writes, with its handle if the caller is to wait."""
    if async_op:
        return pending.unfinished(), pending
    return pending.wait(), None


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Does nothing: apex_te's modules need no preparation for FSDP."""
