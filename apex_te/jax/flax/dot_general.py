"""FP8 GEMMs for Flax models that exist: classes for ``dot_general_cls`` and for einsum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...recipe import DelayedScaling, Recipe
from .. import contraction, fp8_state
from .._partition import constrained
from ..region import checked_recipe, fp8_autocast

__all__ = ["make_dot_general_cls", "make_einsum_cls"]

# Flax's TrainState replaces what is in this collection by its gradient.
_COLLECTION = "_overwrite_with_gradient"


def multiply(
    owner: str, recipe: Recipe, state: Mapping[str, jax.Array] | None,
    function: Callable[..., jax.Array], x: Any, kernel: Any, how: Any, result: Any,
    out_sharding: Any,
) -> jax.Array:  # fmt: skip
    """Returns ``function`` of two arrays, a description, and FP8 state, in dtype ``result``."""
    spec = getattr(out_sharding, "spec", out_sharding)
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{owner}: out_sharding must be None, a PartitionSpec or a NamedSharding, got"
            f" {type(out_sharding).__name__}"
        )
    x = jnp.asarray(x)
    with fp8_autocast(True, recipe):
        y = function(x, jnp.asarray(kernel).astype(x.dtype), how, state)
    if result is not None:
        y = y.astype(result)
    if spec is None:
        return y
    return constrained(y, spec, lambda y: jax.lax.with_sharding_constraint(y, out_sharding))


class _Contraction(nn.Module):
    """Base of modules that multiply two arrays with a recipe, and keep its state."""

    _recipe: ClassVar[Recipe]

    def _computed(self, *given: Any) -> jax.Array:
        """Returns ``multiply`` of its other arguments with the recipe and the state."""
        recipe, state, owner = self._recipe, None, type(self).__name__
        if isinstance(recipe, DelayedScaling):
            if self.scope is None:
                raise NotImplementedError(
                    f"{owner}: recipe must keep no state (such as CurrentScaling)"
                    " outside of Linen modules (flax.nnx: apex_te.jax.nnx.DotGeneral), got"
                    " DelayedScaling"
                )
            state = self._fp8_state(recipe)
        return multiply(owner, recipe, state, *given)

    @nn.compact
    def _fp8_state(self, recipe: DelayedScaling) -> dict[str, jax.Array]:
        """Returns the FP8 state."""
        made, name = fp8_state.initial(recipe), type(self).__name__
        known = self.has_variable(_COLLECTION, "uses")
        if not known and not self.is_mutable_collection(_COLLECTION):
            raise ValueError(
                f'{name}: the collection "{_COLLECTION}" must have the FP8 state of'
                f" {'/'.join(self.path)}, as init returns it (nn.scan and nn.vmap must list it in"
                " variable_axes), got none"
            )
        state = {
            name: self.variable(_COLLECTION, name, lambda value=value: value).value
            for name, value in made.items()
        }
        return fp8_state.checked(name, state, made)


def make_dot_general_cls(recipe: Recipe | str | None = None) -> type[nn.Module]:
    """Returns a class for ``dot_general_cls`` of ``nn.Dense`` and other layers of Flax.

    Its GEMMs are those of ``DenseGeneral``; batch dimensions are as in ``apex_te.jax.einsum``. With
    ``DelayedScaling`` it keeps FP8 state in Flax's collection "_overwrite_with_gradient", which
    ``TrainState`` replaces by its gradient, the next state. With other recipes, an instance can
    also be the ``dot_general`` of an ``nnx.Linear``.

    Args:
        recipe: the recipe, or its name. It is used in any ``fp8_autocast`` region and outside of
            them. None means ``DelayedScaling()``.

    Raises:
        TypeError: ``recipe`` is not a recipe.
        ValueError: no recipe has this name.
        NotImplementedError: the recipe has an option that is not available in JAX.
    """

    class DotGeneral(_Contraction):
        """``jax.lax.dot_general`` of two arrays in FP8."""

        _recipe = checked_recipe("make_dot_general_cls", recipe, "recipe")

        def __call__(
            self,
            lhs: jax.Array,
            rhs: jax.Array,
            dimension_numbers: Any,
            precision: Any = None,
            preferred_element_type: Any = None,
            out_sharding: Any = None,
        ) -> jax.Array:
            """Returns ``jax.lax.dot_general`` of an array and a kernel.

            Args:
                precision: is ignored.
                out_sharding: None, or a ``PartitionSpec`` or ``NamedSharding`` of the result.
            """
            return self._computed(
                contraction.dot_general, lhs, rhs, dimension_numbers, preferred_element_type,
                out_sharding,
            )  # fmt: skip

    return DotGeneral


def make_einsum_cls(recipe: Recipe | str | None = None) -> type[nn.Module]:
    """Returns a class whose instances are an ``einsum`` of two arrays in FP8.

    It keeps state as ``make_dot_general_cls``'s does; with recipes without state, an instance can
    also be the ``einsum_op`` of an ``nnx.Einsum``.

    Args:
        recipe: as in ``make_dot_general_cls``, as are the errors.
    """

    class Einsum(_Contraction):
        """``apex_te.jax.einsum`` with a recipe."""

        _recipe = checked_recipe("make_einsum_cls", recipe, "recipe")

        def __call__(
            self,
            spec: str,
            lhs: jax.Array,
            rhs: jax.Array,
            precision: Any = None,
            preferred_element_type: Any = None,
            out_sharding: Any = None,
        ) -> jax.Array:
            """Returns ``jnp.einsum`` of an array and a kernel.

            Args:
                precision: is ignored.
                out_sharding: None, or a ``PartitionSpec`` or ``NamedSharding`` of the result.
            """

            def product(x: Any, kernel: Any, spec: str, state: Any) -> jax.Array:
                return contraction.einsum(spec, x, kernel, state)

            return self._computed(product, lhs, rhs, spec, preferred_element_type, out_sharding)

    return Einsum
