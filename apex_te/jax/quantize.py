"""Sets of quantizers, which give functions a recipe and FP8 state, as in Transformer Engine."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..recipe import CurrentScaling, DelayedScaling, Format, MXFP8Scaling, Recipe
from ..runtime.named_arguments import check_count
from . import fp8_state
from .fp8_state import FP8_COLLECTION_NAME as NVTE_FP8_COLLECTION_NAME
from .fp8_state import update_collections as update_collections
from .region import active_recipe, checked_recipe
from .region import autocast as autocast
from .region import fp8_autocast as fp8_autocast
from .region import is_fp8_available as is_fp8_available

__all__ = [
    "NVTE_FP8_COLLECTION_NAME", "QuantizerFactory", "QuantizerSet", "ScalingMode", "autocast",
    "fp8_autocast", "is_fp8_available", "noop_quantizer_set", "update_collections",
]  # fmt: skip


class ScalingMode(enum.Enum):
    """Kinds of scaling; ``create_set`` refuses those of FP4."""

    NO_SCALING = "no scaling"
    DELAYED_TENSOR_SCALING = "delayed"
    CURRENT_TENSOR_SCALING = "tensorwise"
    MXFP8_1D_SCALING = "mxfp8"
    NVFP4_1D_SCALING = "nvfp4"
    NVFP4_2D_SCALING = "nvfp4, two dimensions"


_KINDS: dict[ScalingMode, Any] = {
    ScalingMode.DELAYED_TENSOR_SCALING: DelayedScaling,
    ScalingMode.CURRENT_TENSOR_SCALING: CurrentScaling,
    ScalingMode.MXFP8_1D_SCALING: MXFP8Scaling,
}


@jax.tree_util.register_pytree_node_class
class QuantizerSet:
    """Quantizers of one GEMM's input, kernel and gradient, as a pytree of its FP8 state.

    The gradient with respect to a set is the set after the step, also a ``QuantizerSet``.

    Attributes:
        recipe: the recipe; None multiplies in the operands' dtype.
        state: FP8 state of delayed scaling, empty for other recipes.
    """

    def __init__(self, recipe: Recipe | None, state: Mapping[str, jax.Array] | None = None) -> None:
        self.recipe = recipe
        self.state: Any = dict(state or {})

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Returns the children of the pytree's node and its static data."""
        return (self.state,), self.recipe

    @classmethod
    def tree_unflatten(cls, recipe: Any, children: tuple[Any, ...]) -> QuantizerSet:
        """Returns the set with these children; of sets without FP8 there is only one."""
        if recipe is None:
            return noop_quantizer_set
        made = cls(recipe)
        (made.state,) = children  # not always a dict: JAX fills trees with other objects, too
        return made

    def __repr__(self) -> str:
        return f"QuantizerSet(recipe={self.recipe!r})"


noop_quantizer_set = QuantizerSet(None)


class QuantizerFactory:
    """Makes sets of quantizers."""

    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1, scaling_mode: ScalingMode | None = None, fwd_dtype: Any = None,
        bwd_dtype: Any = None, is_2x2x: bool | None = None, n_groups: int | None = None,
        checkpoint_name: None = None, fp8_recipe: Recipe | str | None = None,
    ) -> Any:  # fmt: skip
        """Returns a ``QuantizerSet``, or a tuple of ``n_quantizer_sets`` of them if more than one.

        Args:
            scaling_mode: kind of scaling, with its recipe's defaults.
            fwd_dtype, bwd_dtype: FP8 dtypes of a ``scaling_mode``; None: those of its recipe.
            is_2x2x: not used; the gradients that are wanted decide which copies are made.
            n_groups: number of groups of a ``grouped_dense``, each with scales of its own.
            checkpoint_name: must be None; the name of casts is that of
                ``checkpoint_policies.FP8_CAST_NAME``.
            fp8_recipe: a recipe or its name, instead of ``scaling_mode``. Without either, the
                region's recipe; outside of regions no FP8.

        Raises:
            TypeError: an argument has a wrong type, or both a recipe and ``scaling_mode`` are
                given.
            ValueError: no recipe has this name, or no format these dtypes.
            NotImplementedError: the scaling is one of FP4, the recipe is not available in JAX, or
                ``checkpoint_name`` is not None.
        """
        name = "create_set"
        check_count(name, "n_quantizer_sets", n_quantizer_sets)
        if n_groups is not None:
            check_count(name, "n_groups", n_groups)
        refuse(name, checkpoint_name=checkpoint_name)
        if scaling_mode is not None and fp8_recipe is not None:
            raise TypeError(f"{name}: scaling_mode must be None beside fp8_recipe, got a mode")
        recipe = active_recipe()
        if fp8_recipe is not None:
            recipe = checked_recipe(name, fp8_recipe)
        elif scaling_mode is not None:
            recipe = _recipe_of(name, scaling_mode, fwd_dtype, bwd_dtype)
        made = noop_quantizer_set
        if recipe is not None:
            state = None
            if isinstance(recipe, DelayedScaling):
                state = fp8_state.initial(recipe, n_groups or 1)
            made = QuantizerSet(recipe, state)
        return made if n_quantizer_sets == 1 else (made,) * n_quantizer_sets


def _recipe_of(name: str, mode: Any, forward: Any, backward: Any) -> Recipe | None:
    """Returns the recipe of a kind of scaling with the given FP8 dtypes, None for no scaling."""
    if not isinstance(mode, ScalingMode):
        raise TypeError(f"{name}: scaling_mode must be a ScalingMode, got {type(mode).__name__}")
    if mode is ScalingMode.NO_SCALING:
        return None
    if mode not in _KINDS:
        raise NotImplementedError(f"{name}: scaling_mode must not be one of FP4, got {mode.name}")
    kind = _KINDS[mode]
    before = kind().fp8_format.value.dtype_names
    wanted = tuple(
        old if new is None else jnp.dtype(new).name
        for new, old in zip((forward, backward), before, strict=True)
    )
    for each in Format:
        if each.value.dtype_names == wanted:
            return checked_recipe(name, kind(fp8_format=each))
    raise ValueError(
        f"{name}: fwd_dtype and bwd_dtype must be those of a format of apex_te.recipe, got"
        f" {' and '.join(wanted)}"
    )


@contextlib.contextmanager
def entered(owner: str, *sets: Any, groups: int = 1) -> Iterator[dict[str, jax.Array]]:
    """Enters the region that the sets of a function's GEMMs ask for; yields their FP8 state.

    None for all sets keeps the region that there is. The state is empty for recipes without.
    """
    argument = "quantizer_set" if len(sets) == 1 else "quantizer_sets"
    for each in sets:
        if each is not None and not isinstance(each, QuantizerSet):
            raise TypeError(
                f"{owner}: {argument} must be None or of QuantizerSet, got {type(each).__name__}"
            )
    recipes = {None if each is None else (each.recipe,) for each in sets}
    if len(recipes) > 1:
        raise ValueError(f"{owner}: {argument} must all have one recipe, got {recipes}")
    (given,) = recipes
    region: Any = contextlib.nullcontext()
    if given is not None:
        region = fp8_autocast(given[0] is not None, given[0])
    with region:
        recipe = active_recipe()
        if not isinstance(recipe, DelayedScaling):
            yield {}
            return
        if given is None:
            raise ValueError(f"{owner}: {argument} must be given with DelayedScaling, got None")
        like = fp8_state.initial(recipe, groups)
        for each in sets:
            if set(each.state) != set(like):
                raise ValueError(
                    f"{owner}: {argument} must have the FP8 state that create_set makes, got the"
                    f" names {sorted(each.state)}"
                )
        yield fp8_state.joined([fp8_state.checked(owner, each.state, like) for each in sets])


def refuse(owner: str, **arguments: Any) -> None:
    """Checks that arguments for which there is nothing in JAX are None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{owner}: {name} must be None, got {type(value).__name__}")
