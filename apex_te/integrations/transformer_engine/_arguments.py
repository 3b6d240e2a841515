"""Constructors and arguments of Transformer Engine over those of apex_te's classes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from ._device import default_device
from ._names import neutral

_FLAGS = (
    "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad "
    "ub_tp_comm_overlap return_layernorm_output_gathered"
)
# Arguments that apex_te's classes do not have: annotation, default and allowed values.
_NEUTRAL: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    **dict.fromkeys(_FLAGS.split(), ("bool", False, (False,))),
    "symmetric_ar_type": ("str | None", None, (None,)),
    "use_grouped_tensor": ("bool | None", None, (None, False)),
}


def constructor(
    owner: str,
    native: Any,
    parameters: str,
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> Any:
    """Returns an ``__init__`` that calls the one of ``native`` with reordered arguments.

    ``parameters`` are Transformer Engine's, ``name`` or ``name: annotation = default``, with ``*``
    before keywords. A bare name has annotation and default of ``native``, or else of ``_NEUTRAL``,
    by which its value is checked. ``prepare`` changes the dict of arguments before ``native`` gets
    those that it has. ``_constructed`` of the new object is called at the end.
    """
    known = inspect.signature(native.__init__).parameters
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [known["self"]]
    unserved = []
    for text in parameters.split(", "):
        if text == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        declared, _, default = text.partition(" = ")
        name, _, annotation = declared.partition(": ")
        if default:
            value: Any = ast.literal_eval(default)
        elif name in known:
            annotation, value = known[name].annotation, known[name].default
        else:
            annotation, value, _ = _NEUTRAL[name]
            unserved.append(name)
        found.append(inspect.Parameter(name, kind, default=value, annotation=annotation))
    signature = inspect.Signature(found, return_annotation="None")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{owner}.__init__() {error}") from None
        bound.apply_defaults()
        values = bound.arguments
        neutral(owner, **{name: (values[name], _NEUTRAL[name][2]) for name in unserved})
        for name, convert in (("device", default_device), ("parameters_split", stripped_names)):
            if name in values:
                values[name] = convert(values[name])
        if prepare is not None:
            prepare(values)
        own = {name: value for name, value in values.items() if name in known and name != "self"}
        native.__init__(self, **own)
        self._constructed(values)

    __init__.__qualname__ = f"{owner}.__init__"
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def checked_forward(owner: str, fp8_output: Any = False, fp8_grad: Any = False) -> None:
    """Raises NotImplementedError if a forward is asked for outputs or gradients in FP8."""
    neutral(f"{owner}.forward", fp8_output=(fp8_output, False), fp8_grad=(fp8_grad, False))


def stripped_names(parameters_split: Any) -> Any:
    """Returns ``parameters_split`` without the underscores at the ends of its names."""
    if isinstance(parameters_split, dict):
        return {_stripped(name): rows for name, rows in parameters_split.items()}
    if isinstance(parameters_split, (list, tuple)):
        return [_stripped(name) for name in parameters_split]
    return parameters_split


def _stripped(name: Any) -> Any:
    return name.rstrip("_") if isinstance(name, str) else name
