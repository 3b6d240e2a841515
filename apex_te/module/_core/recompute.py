"""Recompute of an FP8 module's forward in backward, instead of the tensors that forward would save.

The recompute uses the FP8 recipe and scales of the forward and stages no amax, so that results are
those of a module that saves its tensors, with several microbatches in flight, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
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
    if repeated.shape is not None:
        with _restored(module, repeated):
            return function(*args, repeated)
    repeated.parameters = dict(module._parameters)
    out = function(*args, repeated)
    _note(module, repeated)
    repeated.shape = (out[0] if isinstance(out[0], torch.Tensor) else out[0][0]).shape
    return out


class Recomputed:
    """Results of a function that backward computes again, instead of keeping them for a consumer.

    The consumer runs inside ``saving()``. Autograd then saves, for each tensor that shares memory
    with a result, its place in the result. The function's own backward is that of its first run.

    Attributes:
        results: tensors of the first run, None once ``saving()`` is left.
    """

    def __init__(
        self, modules: Sequence[FP8Module], function: Callable[[], tuple[torch.Tensor, ...]]
    ) -> None:
        self._function = function
        self._records = [(module, Repeated()) for module in modules]
        for module, repeated in self._records:
            repeated.parameters = dict(module._parameters)
        self.results: tuple[torch.Tensor, ...] | None = function()
        for module, repeated in self._records:
            _note(module, repeated)
        kind = self.results[0].device.type
        dtype = torch.get_autocast_dtype(kind)
        self._autocast = (kind, dtype, torch.is_autocast_enabled(kind))
        self._places: dict[int, int] = {}
        self._saved = self._left = 0
        self._again: tuple[torch.Tensor, ...] = ()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager around the consumer's forward, which on exit drops ``results``."""
        assert self.results is not None
        self._places = {_address(one): i for i, one in enumerate(self.results)}
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self.results, self._places = None, {}

    def _pack(self, x: torch.Tensor) -> Any:
        place = self._places.get(_address(x)) if type(x) is torch.Tensor else None
        assert self.results is not None
        if place is None or x.dtype is not self.results[place].dtype or not x.numel():
            return x
        self._saved += 1
        return place, x.shape, x.stride(), x.storage_offset()

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if not self._left:
            kind, dtype, enabled = self._autocast
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch.autocast(kind, dtype, enabled))
                for module, repeated in self._records:
                    stack.enter_context(_restored(module, repeated))
                self._again = self._function()
            self._left = self._saved
        place, *strided = saved
        found = self._again[place].as_strided(*strided)
        self._left -= 1
        if not self._left:  # all were fetched; another backward computes them anew
            self._again = ()
        return found


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _note(module: FP8Module, repeated: Repeated) -> None:
    """Notes the conditions under which the module has just run."""
    modes, state = module._modes, module.fp8_state
    repeated.modes = (modes.recompute, modes.recompute_fp8, modes.recompute_saves)
    if modes.recompute_fp8 and state.allocated:  # after the run, which may have allocated them
        repeated.scales = ScaleSnapshot([state.scale_fwd, state.scale_inv_fwd])


@contextmanager
def _restored(module: FP8Module, repeated: Repeated) -> Iterator[None]:
    """Restores the noted conditions inside the ``with`` block."""
    modes = module._modes
    present = (modes.recompute, modes.recompute_fp8, modes.recompute_saves)
    modes.recompute, modes.recompute_fp8, modes.recompute_saves = repeated.modes
    try:
        with (
            nullcontext() if repeated.scales is None else repeated.scales.restored(),
            _parameters_restored(module, repeated.parameters),
        ):
            yield
    finally:
        modes.recompute, modes.recompute_fp8, modes.recompute_saves = present


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
