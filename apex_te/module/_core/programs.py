"""Programs of a module's forwards and backwards, which are made when these run again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ...ops import gemm_tuning
from ...runtime.tracing import is_traced
from .context import without_autocast
from .program import Program
from .recorder import Recorder, Unrecordable

if TYPE_CHECKING:
    from ...fp8.scheme import GemmQuantizers

__all__ = ["Programs", "programs_of", "repeatable", "set_enabled"]

MAX_PROGRAMS = 128  # of one module; more shapes than that do not return soon
MAX_MISSES = 4  # programs made anew for one key, because tensors had another form

_enabled = True


def set_enabled(enabled: bool) -> bool:
    """Lets modules use programs, as they do by default, or not; returns what held before."""
    global _enabled
    before, _enabled = _enabled, enabled
    return before


class _Known:
    """Record of the runs of one function with one key.

    Attributes:
        program: repeats them; None as long as there is none.
        runs: number of runs, up to the one that is recorded.
        misses: number of times that the program did not fit.
    """

    __slots__ = ("attributes", "backwards", "count", "misses", "program", "runs")

    def __init__(self, runs: int = 0) -> None:
        self.program: Program | None = None
        self.runs = runs
        self.misses = 0
        # Of a forward: its number of outputs, the attributes that it left in autograd's context,
        # and the backwards by which gradients they got.
        self.count = 0
        self.attributes: dict[str, Any] = {}
        self.backwards: dict[tuple[bool, ...], _Known] = {}

    def is_next_recorded(self) -> bool:
        """Counts a run; returns True if it is to be recorded, which is so for the second one."""
        self.runs += 1
        return self.runs == 2

    def missed(self) -> None:
        """Drops the program, which did not fit, for one of the tensors that come now."""
        self.program = None
        self.misses += 1
        if self.misses < MAX_MISSES:
            self.runs = 1


class Programs:
    """Programs of one module with one set of quantizers.

    Args:
        quantizers: those of the module's GEMMs.

    Attributes:
        calls: the settings of calls that may use programs, by the dtype to compute in, or by it and
            True where they keep columnwise copies of weights.
        is_possible: False if the quantizers' casts cannot be repeated.
        state: the tensors of the FP8 state that casts read or write.
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
        """Returns True if a run now would do what earlier ones did."""
        if not _enabled or gemm_tuning.is_active or is_traced():
            return False
        if forward_ad._current_level >= 0:
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
        """Returns ``function(ctx, *tensors, *rest)``, run by a program where there is one.

        Args:
            ctx: autograd's context.
            function: the forward, which runs ops on the tensors only.
            tensors: its first arguments.
            rest: its other arguments.
            key: all that decides, besides forms of tensors, which ops it runs.
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
                return _returned(ctx, self, known, outputs)
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


def _returned(ctx: Any, programs: Programs, known: _Known, outputs: list[Any]) -> Any:
    """Prepares autograd's context for the backward; returns what the forward returns."""
    count = known.count
    ctx.programs, ctx.device_type = (programs, known), outputs[0].device.type
    if count == 0:
        ctx.save_for_backward(*outputs[1:])
        return outputs[0]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*outputs[count:])
    return tuple(outputs[:count])


def repeatable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorates a backward, so that a program may run it after a forward that a program has run.

    ``torch.autocast`` is off while it runs.

    Args:
        backward: takes autograd's context, with ``programs`` None or what ``Programs.forward`` has
            set, and gradients. It runs ops only on these and on the tensors from ``take_saved``.
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
    """Returns ``backward(ctx, *grads)``, run by a program where there is one."""
    programs, forward = ctx.programs
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
    return program.run(tensors)


def _made(recorder: Recorder, outputs: Sequence[torch.Tensor | None]) -> Program | None:
    """Returns the program of what was recorded; None if it cannot be repeated."""
    if recorder.problem is not None:
        return None
    try:
        return Program(recorder, outputs)
    except Unrecordable:
        return None


def programs_of(
    cache: dict[int, Programs], quantizers: tuple[GemmQuantizers, ...]
) -> Programs | None:
    """Returns a module's programs for a set of quantizers, if a call may use them now.

    Args:
        cache: the module's ``Programs`` by the id of the quantizers, which they hold.
        quantizers: those of the call.
    """
    found = cache.get(id(quantizers))
    if found is None:
        if len(cache) >= 4:  # of the kinds of forward; those of a former state are dropped
            cache.clear()
        found = cache[id(quantizers)] = Programs(quantizers)
    return found if found.is_possible and found.is_usable() else None
