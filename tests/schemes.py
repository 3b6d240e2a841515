"""The recipes that tests run with, by name.

A recipe that registers itself under a name of its own is in ``SCHEMES``, and so in all tests whose
tables are made of it, without an edit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from apex_te.fp8.scheme.base import build_quantizers, layout_of, stored_recipe
from apex_te.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    MXFP8Scaling,
    Recipe,
    RowwiseScaling,
    recipe_kinds,
)

_BUILT_IN: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "tensorwise": CurrentScaling(),
    "hif8": CurrentScaling(fp8_format=Format.HIF8),
    "blockwise": BlockScaling(),
    "mxfp8": MXFP8Scaling(),
    "rowwise": RowwiseScaling(scales="pow2"),
}
ADDED = {name: kind() for name, kind in recipe_kinds().items() if name not in _BUILT_IN}
# One recipe of each scheme.
SCHEMES = _BUILT_IN | ADDED
# One region suffices for scales that fit.
FIRST_STEP = DelayedScaling(amax_history_len=4, first_step="current")
PLAIN_WGRAD = {"override_linear_precision": (False, False, True)}
STATELESS = [name for name, recipe in SCHEMES.items() if not recipe.keeps_state]


def chosen(*names: str, **changes: Any) -> dict[str, Recipe]:
    """Returns the recipes called ``names`` and all that were added, by name.

    ``changes`` are fields of delayed scaling, such as ``amax_history_len``.
    """
    found = {name: SCHEMES[name] for name in (*names, *ADDED)}
    if changes:
        found["delayed"] = dataclasses.replace(found["delayed"], **changes)  # type: ignore[type-var]
    return found


def formats() -> dict[str, Recipe]:
    """Returns a recipe for each scheme and format, delayed scaling with ``FIRST_STEP``.

    Named as the scheme, and ``scheme-format`` for a format that is not the scheme's first.
    """
    found: dict[str, Recipe] = {}
    for name, recipe in (SCHEMES | {"delayed": FIRST_STEP}).items():
        found[name] = recipe
        own: Any = recipe
        for other in type(recipe).formats:
            if other not in (own.fp8_format, Format.HIF8) and own.fp8_format is not Format.HIF8:
                found[f"{name}-{other.name.lower()}"] = dataclasses.replace(own, fp8_format=other)
    return found


def groups_on_device(recipe: Recipe) -> bool:
    """Returns True if the scheme quantizes groups of rows whose sizes only the device knows."""
    if recipe.keeps_state:
        return True
    quantizer = build_quantizers(recipe, None, 1, torch.device("cpu")).frozen[0].input
    return quantizer.grouped([quantizer]) is not None


def scales_blocks(recipe: Recipe) -> bool:
    """Returns True if a tensor has several scales, and its two copies may differ in value."""
    return layout_of(stored_recipe(recipe)).block_rows > 0
