"""Registry of schemes: the base class of a scheme, and what a recipe's scheme gives."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .gemm_backend import GemmBackend
from .quantizer import Quantizer
from .quantizer_sets import GemmQuantizers, QuantizerSets
from .slots import Slots
from .stored_layout import Layout

if TYPE_CHECKING:
    from ...recipe import Recipe


class Scheme:
    """Base class of a scheme, which makes the quantizers of a recipe.

    A subclass registers itself by its ``name``, which is also the recipes' ``quantizer`` and the
    name of its file. It defines ``gemm_quantizers`` if it has no state, else ``build``.

    Attributes:
        layout: form of weights stored in FP8 only; None if ``stored_recipe`` returns a recipe of
            another scheme, or such weights are not supported.
        row_alignment: multiple to which ``Fp8Padding`` fills the rows of a group by default.
    """

    name: ClassVar[str]
    backend: ClassVar[type[GemmBackend]]
    layout: ClassVar[Layout | None] = None
    row_alignment: ClassVar[int] = 16  # rows that cuBLASLt reads at a time

    def __init_subclass__(cls) -> None:
        _schemes[cls.name] = cls()

    def build(
        self, recipe: Any, slots: Slots | None, gemms: int, device: torch.device
    ) -> QuantizerSets:
        """Builds a module's quantizers; here all GEMMs and kinds of forward share them."""
        inp, weight, grad_output = self.gemm_quantizers(recipe, device)
        backend = self.backend(recipe.use_split_accumulator, device)
        override = recipe.override_linear_precision[2]
        same = (GemmQuantizers(inp, weight, weight, grad_output, backend, override),) * gemms
        return QuantizerSets(same, same, same, same)

    def gemm_quantizers(
        self, recipe: Any, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        """Makes the quantizers of a GEMM, for a scheme without state."""
        raise NotImplementedError

    def stored_recipe(self, recipe: Any) -> Recipe:
        """Returns the recipe that quantizes weights held in FP8 only, given a region's recipe."""
        return recipe


_schemes: dict[str, Scheme] = {}


def scheme_of(recipe: Recipe) -> Scheme:
    """Returns the scheme of ``recipe``; imports the scheme's file if that was not imported yet."""
    name = recipe.quantizer
    if name not in _schemes:
        where = f"{__package__}.{name}"
        try:
            importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name != where:
                raise
        if name not in _schemes:
            raise ValueError(
                f"{type(recipe).__name__}: quantizer must be the name of a scheme, one of "
                f"{', '.join(sorted(_schemes))} or a file of {__package__}, got {name!r}"
            )
    return _schemes[name]


def build_quantizers(
    recipe: Recipe, slots: Slots | None, gemms: int, device: torch.device
) -> QuantizerSets:
    """Builds a module's quantizers; ``slots`` is None for a recipe without state."""
    return scheme_of(recipe).build(recipe, slots, gemms, device)


def stored_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe with which writes quantize a weight that is stored in FP8 only.

    Delayed scaling becomes current scaling, because such a weight is written once per step, from
    its master weight. Block scaling gets power-of-two scales.
    """
    return scheme_of(recipe).stored_recipe(recipe)


def layout_of(recipe: Recipe) -> Layout:
    """Returns the form in which weights quantized with ``recipe`` are stored."""
    layout = scheme_of(recipe).layout
    if layout is None:
        raise NotImplementedError(
            "FP8Parameter: recipe must have a stored form for weights that are held in FP8 only, "
            f"got {type(recipe).__name__}"
        )
    return layout
