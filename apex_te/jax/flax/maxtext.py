"""Provider of FP8 products in the form of MaxText's ``quantization`` objects."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn

from ...recipe import Recipe
from ..quantizer import quantizer_of
from ..region import checked_recipe
from .dot_general import make_dot_general_cls, make_einsum_cls

__all__ = ["FP8Quantization"]


@dataclasses.dataclass(frozen=True)
class FP8Quantization:
    """FP8 products for MaxText's layers, in place of its ``AqtQuantization``.

    Layers take it as their argument ``quant``. A whole model takes it if MaxText's function
    ``quantizations.configure_quantization`` returns it when the model is built. MaxText decides
    which layers are quantized.

    Args:
        recipe: as in ``make_dot_general_cls``, as are the errors; None means ``DelayedScaling()``.

    Attributes:
        quant_mode: "train", as parameters stay in bf16 or fp32.
    """

    recipe: Recipe | str | None = None
    quant_mode: ClassVar[str] = "train"

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", checked_recipe("FP8Quantization", self.recipe, "recipe"))

    def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()) -> type[nn.Module]:
        """Returns a class for ``dot_general_cls``; an FP8 state is the same on all devices."""
        return make_dot_general_cls(self.recipe)

    def einsum(self, dtype: Any = None, *, mesh_axes: tuple[str, ...] = ()) -> nn.Module:
        """Returns a module that computes an einsum of two arrays.

        Both arrays are converted to ``dtype``; None keeps the second one's.
        """
        return _Einsum(make_einsum_cls(self.recipe), dtype)

    def get_block_size(self) -> int:
        """Returns the number of adjacent elements that share a scale, 1 for tensor scaling."""
        return quantizer_of(checked_recipe("FP8Quantization", self.recipe, "recipe")).block


class _Einsum(nn.Module):
    """Einsum in a dtype; it keeps its FP8 state in a submodule."""

    einsum_cls: Any
    dtype: Any

    @nn.compact
    def __call__(self, spec: str, lhs: Any, rhs: Any, **options: Any) -> Any:
        dtype = rhs.dtype if self.dtype is None else self.dtype
        return self.einsum_cls()(spec, lhs.astype(dtype), rhs.astype(dtype), **options)
