"""Quantizers: one scaling scheme per file; a recipe names its file in ``recipe.quantizer``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from ...recipe import Recipe
    from .base import Slots
    from .products import GemmBackend

__all__ = ["GemmQuantizers", "QuantizerSets", "build_quantizers"]


class GemmQuantizers(NamedTuple):
    """The quantizers of one GEMM and its gradients, and the products of what they make.

    ``weight_recast`` records nothing: it casts a weight whose amax was staged in the forward.
    """

    input: Any
    weight: Any
    weight_recast: Any
    grad_output: Any
    products: GemmBackend
    high_precision_wgrad: bool


class QuantizerSets(NamedTuple):
    """The ways in which a module may quantize; one entry for each of its GEMMs.

    ``recording`` stages every amax; ``recompute`` repeats a recorded forward, so that only its
    gradients are new; ``frozen`` stages nothing; ``previewed`` stages nothing either, and reads the
    scales that a pending update will give.
    """

    recording: tuple[GemmQuantizers, ...]
    recompute: tuple[GemmQuantizers, ...]
    frozen: tuple[GemmQuantizers, ...]
    previewed: tuple[GemmQuantizers, ...]


def build_quantizers(
    recipe: Recipe, slots: Slots | None, gemms: int, device: torch.device
) -> QuantizerSets:
    """Builds the quantizers of ``recipe`` for the ``gemms`` GEMMs of a module on ``device``.

    ``slots`` are views of the module's FP8 state; None for a recipe that keeps no state.
    """
    scheme = importlib.import_module(f"{__name__}.{recipe.quantizer}")
    return scheme.build_quantizers(recipe, slots, gemms, device)


def stateless_sets(quantizers: GemmQuantizers, gemms: int) -> QuantizerSets:
    """Sets of a scheme that records nothing: the same quantizers for every GEMM and use."""
    same = (quantizers,) * gemms
    return QuantizerSets(same, same, same, same)
