"""Programs of a module's forwards and backwards, each recorded when that function runs again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ...ops import gemm_tuning
from ...runtime.tracing import dispatch_modes, jit_tracing, transforms_active
from .context import without_autocast
from .program import Program
from .recorder import Recorder, Unrecordable

if TYPE_CHECKING:
    from ...fp8.scheme import GemmQuantizers

MAX_PROGRAMS = 128  # of one module; more shapes than that do not return soon
MAX_MISSES = 4  # programs made anew for one key, because tensors had another form

_enabled = True
_ONE_GIVEN: tuple[bool, ...] = (False,)  # the key of a backward that gets one gradient


def set_enabled(enabled: bool) -> bool:
    """Turns the use of programs by all modules on (the default) or off."""
    global _enabled
    before, _enabled = _enabled, enabled
    return before


class _Known:
    """Program of one forward or backward for calls with one key, and how often it has run.

    Attributes:
        program: None until one is recorded, or if the ops cannot be repeated.
        misses: number of times that a tensor did not fit the program.
        count: of a forward that returns a tuple, its length; else 0.
        backwards: ``_Known`` of the backward, by a tuple that says which gradients are None.
    """

    __slots__ = ("attributes", "backwards", "count", "misses", "program", "runs")

    def __init__(self, runs: int = 0) -> None:
        self.program: Program | None = None
        self.runs = runs
        self.misses = 0
        self.count = 0
        self.attributes: dict[str, Any] = {}
        self.backwards: dict[tuple[bool, ...], _Known] = {}

    def is_next_recorded(self) -> bool:
        """Counts a run of the function; returns True if it is the second run, which is recorded."""
        self.runs += 1
        return self.runs == 2

    def missed(self) -> None:
        """Drops the program; the next run is recorded unless ``MAX_MISSES`` calls did so."""
        self.program = None
        self.misses += 1
        if self.misses < MAX_MISSES:
            self.runs = 1


class Programs:
    """Programs of one module's forwards and backwards with one set of quantizers.

    Attributes:
        calls: ``FP8Call`` by the dtype to compute in, or ``(dtype, keep_columnwise,
            save_original)`` if one of these is True.
        is_possible: False if the scheme's casts or GEMMs cannot run in a program.
    """

    __slots__ = ("_due", "_known", "calls", "is_possible", "quantizers", "state")

    def __init__(self, quantizers: tuple[GemmQuantizers, ...]) -> None:
        self.quantizers = quantizers
        self.calls: dict[Any, Any] = {}
        self._known: dict[Any, _Known] = {}
        self._due: list[tuple[list[bool], int]] = []
        self.state: list[torch.Tensor] = []
        self.is_possible = True
        for gemm in quantizers:
            casts = (gemm.input, gemm.weight, gemm.weight_recast, gemm.grad_output)
            found = [cast.repeatable() for cast in casts]
            native = getattr(gemm.backend, "native", False)
            if None in found or gemm.high_precision_wgrad or not native:
                self.is_possible = False
                return
            for one in found:
                self.state += one.tensors
                if one.due is not None:
                    self._due.append(one.due)

    def is_usable(self) -> bool:
        """Returns True if programs may run or be recorded now.

        They may not while GEMMs are tuned, ops are traced, forward-mode differentiation is active,
        or a slot has no first scale yet.
        """
        if (
            not _enabled
            or gemm_tuning.is_active
            or dispatch_modes()
            or transforms_active()
            or jit_tracing()
            or torch.compiler.is_compiling()
            or forward_ad._current_level >= 0
        ):
            return False
        return not self._due or not any(due[index] for due, index in self._due)

    def forward(
        self,
        ctx: Any,
        function: Callable[..., Any],
        tensors: tuple[torch.Tensor | None, ...],
        rest: tuple[Any, ...],
        key: Any,
    ) -> Any:
        """Returns ``function(ctx, *tensors, *rest)``, run by a program if there is one.

        The second call with a key is recorded; the key must differ for calls with other ops, shapes
        or dtypes. The ops may read only ``tensors`` and the FP8 state. Sets ``ctx.programs``.
        """
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_PROGRAMS:
                self._known.clear()
            known = self._known[key] = _Known()
        program = known.program
        if program is not None:
            outputs = program.run(tensors)
            if outputs is not None:
                ctx.programs = (self, known)
                if known.count == 0:
                    ctx.save_for_backward(*outputs[1:])
                    return outputs[0]
                ctx.set_materialize_grads(False)
                ctx.save_for_backward(*outputs[known.count :])
                return tuple(outputs[: known.count])
            known.missed()
        if not known.is_next_recorded():
            return function(ctx, *tensors, *rest)
        before = set(vars(ctx))
        recorder = Recorder(tensors, self.state)
        with recorder:
            result = function(ctx, *tensors, *rest)
        outputs = [*(result if isinstance(result, tuple) else (result,))]
        known.count = len(outputs) if isinstance(result, tuple) else 0
        outputs += ctx.to_save
        known.program = _made(recorder, outputs)
        known.attributes = {
            name: value for name, value in vars(ctx).items()
            if name not in before and name not in ("to_save", "programs")
        }  # fmt: skip
        known.backwards.clear()
        if known.program is not None:
            ctx.programs = (self, known)
        return result


def repeatable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorates a backward so that a program may run it, if one recorded or ran the forward.

    The ops read only ``grads``, tensors from ``take_saved`` and the FP8 state; ``torch.autocast``
    is off. ``ctx.programs`` is None, or set by ``Programs.forward``.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        if ctx.programs is None:
            return without_autocast(backward, ctx, *grads)
        return _repeated_backward(ctx, backward, grads)

    return run


def _repeated_backward(
    ctx: Any, backward: Callable[..., tuple], grads: tuple[torch.Tensor | None, ...]
) -> tuple:
    """Returns ``backward(ctx, *grads)``, run by a program if there is one; see ``repeatable``."""
    programs, forward = ctx.programs
    key = _ONE_GIVEN
    if len(grads) > 1 or grads[0] is None:
        key = tuple([grad is None for grad in grads])
    known = forward.backwards.get(key)
    if known is None:  # recorded at once: the forward has returned, and so will this
        known = forward.backwards[key] = _Known(runs=1)
    saved = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()  # as ``take_saved`` does
    program, usable = known.program, programs.is_usable()
    if usable and program is not None:
        if program.is_native:
            outputs = program.run((*saved, *grads))
        else:
            ctx.device_type = forward.attributes["device_type"]
            outputs = without_autocast(_run, ctx, program, (*saved, *grads))
        if outputs is not None:
            return tuple(outputs)
        known.missed()
    for name, value in forward.attributes.items():
        setattr(ctx, name, value)
    ctx.taken = saved
    if not usable or not known.is_next_recorded():
        del saved
        return without_autocast(backward, ctx, *grads)
    recorder = Recorder((*saved, *grads), programs.state)
    with recorder:
        result = without_autocast(backward, ctx, *grads)
    known.program = _made(recorder, result)
    return result


def _run(_: Any, program: Program, tensors: tuple[torch.Tensor | None, ...]) -> Any:
    """Returns ``program.run(tensors)``, in the signature that ``without_autocast`` calls."""
    return program.run(tensors)


def _made(recorder: Recorder, outputs: Sequence[torch.Tensor | None]) -> Program | None:
    """Returns the program of a recorded run; None if the run cannot be repeated."""
    if recorder.problem is not None:
        return None
    try:
        return Program(recorder, outputs)
    except Unrecordable:
        return None


def programs_of(
    cache: dict[int, Programs], quantizers: tuple[GemmQuantizers, ...]
) -> Programs | None:
    """Returns a module's ``Programs`` for some quantizers, made in ``cache`` if missing.

    Returns None if programs may not be used now, or not with this scheme.
    """
    found = cache.get(id(quantizers))
    if found is None:
        if len(cache) >= 4:  # of the kinds of forward; those of a former state are dropped
            cache.clear()
        found = cache[id(quantizers)] = Programs(quantizers)
    return found if found.is_possible and found.is_usable() else None
