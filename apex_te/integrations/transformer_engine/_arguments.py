"""Arguments of Transformer Engine's constructors that several alias modules take."""

from __future__ import annotations

from typing import Any

from ._names import neutral

__all__ = ["check_overlap", "checked_forward", "stripped_names"]


def check_overlap(owner: str, symmetric_ar_type: Any = None, **userbuffers: Any) -> None:
    """Checks that no collective is asked to overlap with products or to use symmetric memory.

    Args:
        owner: name of the class, for the error.
        symmetric_ar_type: the argument of that name.
        userbuffers: the arguments ``ub_*`` but ``ub_name``.

    Raises:
        NotImplementedError: an argument is not at its default; the error names it.
    """
    neutral(owner, symmetric_ar_type=(symmetric_ar_type, None))
    neutral(owner, **{name: (value, False) for name, value in userbuffers.items()})


def checked_forward(owner: str, fp8_output: Any = False, fp8_grad: Any = False) -> None:
    """Checks that a forward is asked for outputs and gradients in bf16 or fp32.

    Raises:
        NotImplementedError: an argument is not False.
    """
    neutral(f"{owner}.forward", fp8_output=(fp8_output, False), fp8_grad=(fp8_grad, False))


def stripped_names(parameters_split: Any) -> Any:
    """Returns ``parameters_split`` with names as Transformer Engine makes parameters of them.

    There ``"query_"`` and ``"query"`` both give ``query_weight``.

    Args:
        parameters_split: names of the parts, a dict of name to rows, or anything else, which is
            returned.
    """
    if isinstance(parameters_split, dict):
        return {_stripped(name): rows for name, rows in parameters_split.items()}
    if isinstance(parameters_split, (list, tuple)):
        return [_stripped(name) for name in parameters_split]
    return parameters_split


def _stripped(name: Any) -> Any:
    return name.rstrip("_") if isinstance(name, str) else name
