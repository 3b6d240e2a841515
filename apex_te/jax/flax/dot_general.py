"""FP8 GEMMs for Flax models that exist: a class for ``nn.Dense(dot_general_cls=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...recipe import DelayedScaling, Recipe
from .. import fp8_state
from .._partition import constrained
from ..dense import dense_with_state
from ..region import checked_recipe, fp8_autocast

__all__ = ["make_dot_general_cls"]

# Flax's TrainState replaces what is in this collection by its gradient.
_COLLECTION = "_overwrite_with_gradient"


def make_dot_general_cls(recipe: Recipe | str | None = None) -> type[nn.Module]:
    """Returns a class for ``dot_general_cls`` of ``nn.Dense`` and other layers of Flax.

    Its GEMMs are those of ``DenseGeneral``. With ``DelayedScaling`` it keeps FP8 state in Flax's
    collection "_overwrite_with_gradient", which ``TrainState`` replaces by its gradient, the next
    state. With other recipes, an instance can also be the ``dot_general`` of an ``nnx.Linear``.

    Args:
        recipe: the recipe, or its name. It is used in any ``fp8_autocast`` region and outside of
            them. None means ``DelayedScaling()``.

    Raises:
        TypeError: ``recipe`` is not a recipe.
        ValueError: no recipe has this name.
        NotImplementedError: the recipe has an option that is not available in JAX.
    """
    chosen = checked_recipe("make_dot_general_cls", recipe, "recipe")

    class DotGeneral(nn.Module):
        """GEMM of an array and a kernel in FP8."""

        def __call__(
            self,
            lhs: jax.Array,
            rhs: jax.Array,
            dimension_numbers: Any,
            precision: Any = None,
            preferred_element_type: Any = None,
            out_sharding: Any = None,
        ) -> jax.Array:
            """Returns ``jax.lax.dot_general`` of an array and a kernel, without batch dimensions.

            Args:
                out_sharding: None, or a ``PartitionSpec`` or ``NamedSharding`` of the result.
            """
            state = None
            if isinstance(chosen, DelayedScaling):
                if self.scope is None:
                    raise NotImplementedError(
                        "DotGeneral: recipe must keep no state (such as CurrentScaling) outside of"
                        " Linen modules (flax.nnx: apex_te.jax.nnx.DotGeneral), got DelayedScaling"
                    )
                state = self._fp8_state(chosen)
            return fp8_dot_general(chosen, state, lhs, rhs, dimension_numbers, out_sharding)

        @nn.compact
        def _fp8_state(self, recipe: DelayedScaling) -> dict[str, jax.Array]:
            """Returns the FP8 state."""
            made = fp8_state.initial(recipe)
            state = {
                name: self.variable(_COLLECTION, name, lambda value=value: value).value
                for name, value in made.items()
            }
            return fp8_state.checked("DotGeneral", state, made)

    return DotGeneral


def fp8_dot_general(
    recipe: Recipe, state: Mapping[str, jax.Array] | None, lhs: Any, rhs: Any,
    dimension_numbers: Any, out_sharding: Any,
) -> jax.Array:  # fmt: skip
    """Returns ``jax.lax.dot_general`` of an array and a kernel with a recipe and its FP8 state."""
    (left, right), (batch_left, batch_right) = dimension_numbers
    if batch_left or batch_right:
        raise NotImplementedError(
            f"DotGeneral: dimension_numbers must have no batch dimensions, got {dimension_numbers}"
        )
    spec = getattr(out_sharding, "spec", out_sharding)
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise TypeError(
            "DotGeneral: out_sharding must be None, a PartitionSpec or a NamedSharding, got"
            f" {type(out_sharding).__name__}"
        )
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    rest = [i for i in range(lhs.ndim) if i not in left]
    features = [i for i in range(rhs.ndim) if i not in right]
    x = lhs.transpose(*rest, *left)
    kernel = rhs.transpose(*right, *features)
    with fp8_autocast(True, recipe):
        y = dense_with_state(x, kernel.astype(x.dtype), None, state, inner=len(right))
    if spec is None:
        return y
    return constrained(y, spec, lambda y: jax.lax.with_sharding_constraint(y, out_sharding))
