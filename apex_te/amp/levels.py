"""Opt levels, their properties, and what a caller may override.

| level | cast_model_type | patch_torch_functions | keep_batchnorm_fp32 | master_weights | loss_scale | FP8 recipe |
|---|---|---|---|---|---|---|
| O0 | float32 | False | None | False | 1.0 | none |
| O1 | None | True (float16) | None | None | "dynamic" | none |
| O2 | float16 | False | True | True | "dynamic" | none |
| O3 | float16 | False | False | False | 1.0 | none |
| O4 | None | True (bfloat16) | None | None | 1.0 | none |
| O5 | bfloat16 | False | True | True | 1.0 | none |
| O6 | bfloat16 | False | True | True | 1.0 | DelayedScaling, HYBRID |
| O7 | bfloat16 | False | True | True | 1.0 | CurrentScaling, HYBRID |

O0 to O5 are apex's (O4 and O5 ROCm apex's). ``patch_torch_functions`` keeps apex's name; it runs
the forward under ``torch.autocast`` of the type in brackets.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .. import recipe
from ..runtime.named_arguments import did_you_mean

_CAST_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_BOOLS = {"True": True, "False": False}


@dataclasses.dataclass(frozen=True)
class Properties:
    """Properties of an opt level, some of them perhaps replaced by arguments of ``amp.initialize``.

    A dtype of None leaves tensors as they are; ``loss_scale`` is "dynamic" or a number.
    """

    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    autocast_type: torch.dtype | None = None
    make_recipe: Callable[[], recipe.Recipe] | None = None
    cast_model_outputs: torch.dtype | None = None


def _delayed() -> recipe.Recipe:
    return recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID)


def _current() -> recipe.Recipe:
    return recipe.CurrentScaling(fp8_format=recipe.Format.HYBRID)


_O5 = Properties(torch.bfloat16, False, True, True, 1.0)
LEVELS = {
    "O0": Properties(torch.float32, False, None, False, 1.0),
    "O1": Properties(None, True, None, None, "dynamic", autocast_type=torch.float16),
    "O2": Properties(torch.float16, False, True, True, "dynamic"),
    "O3": Properties(torch.float16, False, False, False, 1.0),
    "O4": Properties(None, True, None, None, 1.0, autocast_type=torch.bfloat16),
    "O5": _O5,
    "O6": dataclasses.replace(_O5, make_recipe=_delayed),
    "O7": dataclasses.replace(_O5, make_recipe=_current),
}


def choose(opt_level: str, overrides: dict[str, Any]) -> Properties:
    """Returns the properties of a level; ``overrides`` that are not None replace the level's."""
    if not isinstance(opt_level, str):
        raise TypeError(
            f"amp.initialize: opt_level must be a string, got {type(opt_level).__name__}"
        )
    if opt_level not in LEVELS:
        raise ValueError(
            f"amp.initialize: opt_level must be one of {', '.join(LEVELS)} (with the letter O), "
            f"got {opt_level!r}{did_you_mean(opt_level, LEVELS)}"
        )
    level = LEVELS[opt_level]
    given = {name: _CHECKS[name](name, v) for name, v in overrides.items() if v is not None}
    if given.get("patch_torch_functions") and not level.patch_torch_functions:
        raise ValueError(
            "amp.initialize: patch_torch_functions must be False or None with opt_level "
            f"{opt_level} (O1 and O4 set it), got True"
        )
    if level.patch_torch_functions:
        for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
            if name in given:
                raise ValueError(
                    f"amp.initialize: {name} must be None with opt_level {opt_level}, whose model "
                    f"stays in float32, got {given[name]}"
                )
    if level.make_recipe is not None and given.get("cast_model_type") is torch.float16:
        raise ValueError(
            "amp.initialize: cast_model_type must be torch.bfloat16 or torch.float32 with "
            f"opt_level {opt_level}, got torch.float16"
        )
    chosen = dataclasses.replace(level, **given)
    if chosen.cast_model_type is not None and chosen.cast_model_outputs is None:
        chosen = dataclasses.replace(chosen, cast_model_outputs=torch.float32)
    return chosen


def describe(opt_level: str, chosen: Properties) -> str:
    """Returns a printable table with the level's properties beside those after overrides."""
    level = LEVELS[opt_level]
    rows = [("property", f"{opt_level} has", "chosen")]
    for name in (*_CHECKS, "autocast_type"):
        rows.append((name, str(getattr(level, name)), str(getattr(chosen, name))))
    recipes = [p.make_recipe() if p.make_recipe else None for p in (level, chosen)]
    names = [f"{type(r).__name__} {r.fp8_format.name}" if r else "None" for r in recipes]  # type: ignore[attr-defined]
    rows.append(("fp8_recipe", names[0], names[1]))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows
    ]
    return "\n".join([f"apex_te.amp: opt_level {opt_level}", *lines])


def _dtype(name: str, value: Any) -> torch.dtype:
    """Returns ``value`` if it is a dtype that models can be cast to, else raises TypeError."""
    if value not in _CAST_TYPES:
        raise TypeError(
            f"amp.initialize: {name} must be torch.float32, torch.float16 or torch.bfloat16, "
            f"got {value!r}"
        )
    return value


def _bool(name: str, value: Any) -> bool:
    """Returns a bool or the strings "True" and "False" as a bool; others raise TypeError."""
    if isinstance(value, str) and value in _BOOLS:  # as argparse leaves it
        return _BOOLS[value]
    if not isinstance(value, bool):
        raise TypeError(f"amp.initialize: {name} must be a bool, got {value!r}")
    return value


def _loss_scale(name: str, value: Any) -> float | str:
    """Returns "dynamic" or a number, which may be a string; others raise ValueError."""
    if value == "dynamic":
        return "dynamic"
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0.0 < number < float("inf"):
        raise ValueError(f'amp.initialize: {name} must be "dynamic" or above 0, got {value!r}')
    return number


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "cast_model_type": _dtype,
    "patch_torch_functions": _bool,
    "keep_batchnorm_fp32": _bool,
    "master_weights": _bool,
    "loss_scale": _loss_scale,
    "cast_model_outputs": _dtype,
}
