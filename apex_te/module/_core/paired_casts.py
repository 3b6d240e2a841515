"""Casts of a program's steps in pairs: one launch casts two small matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import runtime
from .recorder import Part, PythonStep, Slot, Step

_casts = runtime.ops("cast_transpose")
_OPERANDS = 6  # arguments of cast_transpose up to scale_inv


def with_paired_casts(steps: Sequence[Step | PythonStep]) -> list[Step | PythonStep]:
    """Returns equivalent steps in which each pair of casts is one step.

    A cast is paired with an earlier one if it casts an input of the program that no step between
    them uses, and sums no columns. No cast moves past a Python step that writes to its arguments.
    """
    found: list[Step | PythonStep] = []
    waiting: int | None = None  # place in `found` of a cast without a partner
    for step in steps:
        if not _is_cast(step):
            if isinstance(step, PythonStep) and step.result is None:
                waiting = None
            found.append(step)
        elif waiting is not None and _can_move(step, found[waiting + 1 :]):
            first = found[waiting].args
            function = _casts.cast_transpose_pair
            found[waiting] = Step(function, (*first[:-1], *step.args[:_OPERANDS]), 0)
            waiting = None
        else:
            waiting = len(found)
            found.append(step)
    return found


def _is_cast(step: Step | PythonStep) -> bool:
    """Returns True if a step is a cast that a flag on the device cannot switch off."""
    if not isinstance(step, Step) or step.function is not _casts.cast_transpose:
        return False
    return step.args[-1] is None


def _can_move(cast: Step | PythonStep, between: Sequence[Step | PythonStep]) -> bool:
    """Returns True if a cast may run before the steps ``between``, as the second of a pair."""
    source = _slot(cast.args[0])
    if source is None or any(arg is not None for arg in cast.args[_OPERANDS:]):
        return False
    return all(_slot(arg) != source for step in between for arg in step.args)


def _slot(arg: Any) -> Slot | None:
    """Returns the stand-in of the input that has an argument's memory; None if no input has."""
    base = arg.base if isinstance(arg, Part) else arg
    return base if isinstance(base, Slot) else None
