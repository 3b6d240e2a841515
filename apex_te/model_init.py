"""fp8_model_init: modules made inside hold the weights of their GEMMs in low precision only."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from .recipe import DelayedScaling, Recipe

__all__ = ["fp8_model_init", "settings"]


class Settings(NamedTuple):
    """How weights made now are kept."""

    enabled: bool
    recipe: Recipe
    preserve_high_precision_init_val: bool


class _Local(threading.local):
    settings: Settings | None = None


_local = _Local()


class fp8_model_init:
    """Modules constructed inside hold the weights of their GEMMs in low precision only.

    Such a weight is an ``apex_te.parameter.FP8Parameter``: a ``torch.nn.Parameter`` of the module's
    ``params_dtype`` that takes one byte an element. Inside ``fp8_autocast`` GEMMs read its codes;
    elsewhere, and with a recipe of another scheme, they read its values. State dicts hold the
    values in ``params_dtype``; loading one quantizes.

    Args:
        enabled: False inside an enabled one switches it off.
        recipe: how weights are quantized, when they are made and whenever they are written to;
            default ``DelayedScaling()``. Delayed scaling scales them by their own amax.
        preserve_high_precision_init_val: keep the values before quantization on the CPU, for an
            optimizer's master copy: ``weight.get_high_precision_init_val()``, and
            ``weight.clear_high_precision_init_val()`` to free them.

    A context manager, nestable, per thread. Errors: TypeError for an argument of a wrong type.
    """

    __slots__ = ("_outer", "_settings")

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        flags = {
            "enabled": enabled,
            "preserve_high_precision_init_val": preserve_high_precision_init_val,
        }
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(
                    f"fp8_model_init: {name} must be a bool, got {type(value).__name__}"
                )
        recipe = DelayedScaling() if recipe is None else recipe
        if not isinstance(recipe, Recipe):
            raise TypeError(
                "fp8_model_init: recipe must be a recipe from apex_te.recipe, "
                f"got {type(recipe).__name__}"
            )
        self._settings = Settings(enabled, recipe, preserve_high_precision_init_val)
        self._outer: list[Settings | None] = []

    def __enter__(self) -> None:
        self._outer.append(_local.settings)
        _local.settings = self._settings

    def __exit__(self, *exc: Any) -> None:
        _local.settings = self._outer.pop()


def settings() -> Settings | None:
    """How a GEMM's weight made now is to be kept; None: in high precision."""
    found = _local.settings
    return found if found is not None and found.enabled else None
