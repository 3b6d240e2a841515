"""``fp8_model_init``, under which modules are constructed with GEMM weights held in FP8 only."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from ..recipe import Recipe, chosen_recipe
from ..runtime.named_arguments import check_flags, named_arguments
from .autocast import Entered, leave

__all__ = ["fp8_model_init", "quantized_model_init", "settings"]


class Settings(NamedTuple):
    """Named tuple of the arguments of one ``fp8_model_init``."""

    enabled: bool
    recipe: Recipe
    preserve_high_precision_init_val: bool


class _Region(Entered):
    """One entered ``fp8_model_init`` block, with its ``settings``."""

    __slots__ = ("settings",)

    def __init__(self, settings: Settings, outer: _Region | None, holder: dict[str, Any]) -> None:
        self.settings = settings
        self.outer = outer
        self.holder = holder


class _Local(threading.local):
    """Holds a thread's innermost ``_Region``, or None."""

    region: _Region | None = None


_local = _Local()


class fp8_model_init:
    """Context manager that constructs modules with the weights of their GEMMs in FP8 only.

    Such a weight is an ``apex_te.parameter.FP8Parameter``: a ``torch.nn.Parameter`` with the
    module's ``params_dtype`` that takes one byte per element. Inside ``fp8_autocast`` GEMMs read
    its FP8 data; elsewhere, and in regions with another scheme than the weight's recipe, they read
    its values. State dicts contain the values in ``params_dtype``; loading quantizes them. With
    ``BlockScaling(pow2=False)``, whose scales cannot be restored from the values, they contain the
    FP8 data and scales. The context applies to one thread; blocks may be nested, and left in any
    order and by any thread.

    Args:
        enabled: False turns off an enabled ``fp8_model_init`` around this one.
        recipe: recipe, or its name, with which weights are quantized when they are created and
            whenever they are written to. The default ``DelayedScaling()`` computes the scale of a
            weight from its current amax here.
        preserve_high_precision_init_val: keep the values before quantization on the CPU, for an
            optimizer's master weight: ``weight.get_high_precision_init_val()`` returns them, and
            ``weight.clear_high_precision_init_val()`` frees them.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a recipe's name is unknown.
    """

    __slots__ = ("_entered", "_settings")

    @named_arguments()
    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | str | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        owner, keeps = type(self).__name__, preserve_high_precision_init_val
        check_flags(owner, enabled=enabled, preserve_high_precision_init_val=keeps)
        recipe = chosen_recipe(owner, "recipe", recipe)
        self._settings = Settings(enabled, recipe, preserve_high_precision_init_val)
        self._entered: list[_Region] = []

    def __enter__(self) -> None:
        region = _Region(self._settings, _local.region, _local.__dict__)
        _local.region = region
        self._entered.append(region)

    def __exit__(self, *exc: Any) -> None:
        leave(self._entered, _local.__dict__, "region")


class quantized_model_init(fp8_model_init):
    """``fp8_model_init`` under Transformer Engine's newer name, with the same arguments."""

    __slots__ = ()


def settings() -> Settings | None:
    """Returns the thread's ``fp8_model_init`` settings; None if weights are high-precision."""
    region = _local.region
    return region.settings if region is not None and region.settings.enabled else None
