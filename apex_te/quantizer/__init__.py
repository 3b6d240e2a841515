"""Quantizers: one scaling scheme per file; a recipe names its file in ``recipe.quantizer``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..recipe import Recipe
    from ..state import FP8State

__all__ = ["GemmQuantizers", "QuantizerSets", "build_quantizers"]


class GemmQuantizers(NamedTuple):
    """The quantizers of one GEMM and its gradients.

    ``weight_again`` records nothing: it casts a weight whose amax was staged in the forward.
    """

    input: Any
    weight: Any
    weight_again: Any
    grad_output: Any
    high_precision_wgrad: bool


class QuantizerSets(NamedTuple):
    """The three ways in which a module may quantize.

    ``recording`` stages every amax; ``recompute`` repeats a recorded forward, so that only its
    gradients are new; ``frozen`` stages nothing.
    """

    recording: GemmQuantizers
    recompute: GemmQuantizers
    frozen: GemmQuantizers


def build_quantizers(recipe: Recipe, state: FP8State) -> QuantizerSets:
    """Quantizers of ``recipe`` over the tensors of ``state``."""
    scheme = importlib.import_module(f"{__name__}.{recipe.quantizer}")
    return scheme.build_quantizers(recipe, state)
