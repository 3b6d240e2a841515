"""Recompute of an FP8 module's forward in backward, instead of the tensors that forward would save.

The recompute uses the FP8 recipe and scales of the forward and stages no amax, so that results are
those of a module that saves its tensors, with several microbatches in flight, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...fp8.delayed.state import ScaleSnapshot
from .fp8_module import FP8Module


class Repeated:
    """Record of the first run of a forward, for the runs that repeat it in backward.

    ``shape`` is that of the result; a recompute may skip the result's values. None in the first
    run.
    """

    def __init__(self) -> None:
        self.shape: torch.Size | None = None
        self.modes: tuple[Any, ...] = ()
        self.scales: ScaleSnapshot | None = None
        self.parameters: dict[str, Any] = {}


_FIRST = Repeated()


def run_repeatable(
    module: FP8Module, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Returns ``function(*args, repeated)`` and saves only the arguments for backward."""
    if torch.compiler.is_compiling():  # the compiler repeats a region by itself

        def call(*args: Any) -> Any:
            return function(*args, _FIRST)

    else:
        repeated = Repeated()

        def call(*args: Any) -> Any:
            return _call(module, function, args, repeated)

    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)


def _call(
    module: FP8Module, function: Callable[..., Any], args: tuple[Any, ...], repeated: Repeated
) -> tuple[Any, Any]:
    """Runs ``function`` for the first time, or again under the conditions of the first time."""
    modes = module._modes
    present = (modes.recompute, modes.recompute_fp8, modes.recompute_keeps)
    if repeated.shape is not None:
        modes.recompute, modes.recompute_fp8, modes.recompute_keeps = repeated.modes
        try:
            with (
                nullcontext() if repeated.scales is None else repeated.scales.restored(),
                _parameters_restored(module, repeated.parameters),
            ):
                return function(*args, repeated)
        finally:
            modes.recompute, modes.recompute_fp8, modes.recompute_keeps = present
    repeated.parameters = dict(module._parameters)
    out = function(*args, repeated)
    repeated.modes = (modes.recompute, modes.recompute_fp8, modes.recompute_keeps)
    state = module.fp8_state
    if modes.recompute_fp8 and state.allocated:  # after the run, which may have allocated them
        repeated.scales = ScaleSnapshot([state.scale_fwd, state.scale_inv_fwd])
    repeated.shape = (out[0] if isinstance(out[0], torch.Tensor) else out[0][0]).shape
    return out


@contextmanager
def _parameters_restored(module: FP8Module, before: dict[str, Any]) -> Iterator[None]:
    """Gives the module its parameters of the first run, which functional_call has taken away.

    Sharded parameters stay: whatever gathers them does so for each run.
    """
    own = module._parameters
    present = dict(own)
    is_sharded = module.__dict__.get("_is_fsdp_managed_module", False) or any(
        hasattr(p, "_local_tensor") for p in present.values()
    )
    if is_sharded or all(present.get(name) is p for name, p in before.items()):
        yield
        return
    own.update(before)
    try:
        yield
    finally:
        own.update(present)
