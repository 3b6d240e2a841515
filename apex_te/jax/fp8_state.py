"""FP8 state of delayed scaling as a pytree of fp32 arrays, the Flax collection "fp8_metas".

A module's part has the six tensors of PyTorch's FP8 state under their names, and ``uses``. The
gradient with respect to the collection is the next state: backward returns it with the amax values
of the step staged in row 0 of the histories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..recipe import DelayedScaling
from . import first_step
from ._partition import maximum_over, same_on_all
from .first_step import FIRST_DUE, SLOTS
from .ops.amax_scale_update import amax_scale_update
from .region import get_delayed_scaling

FP8_COLLECTION_NAME = "fp8_metas"
TENSORS = (
    "scale_fwd", "scale_inv_fwd", "amax_history_fwd", "scale_bwd", "scale_inv_bwd",
    "amax_history_bwd",
)  # fmt: skip


def initial(recipe: DelayedScaling, gemms: int = 1) -> dict[str, jax.Array]:
    """Returns the FP8 state of ``gemms`` GEMMs before the first step, by name.

    Scales are ones and amax histories zeros.
    """
    state = {}
    for way, slots in SLOTS.items():
        count = slots * gemms
        state[f"scale_{way}"] = jnp.ones(count, jnp.float32)
        state[f"scale_inv_{way}"] = jnp.ones(count, jnp.float32)
        state[f"amax_history_{way}"] = jnp.zeros((recipe.amax_history_len, count), jnp.float32)
    return {**state, **first_step.initial(recipe, gemms), "uses": jnp.ones(gemms, jnp.float32)}


def _first_row(history: jax.Array) -> jax.Array:
    """Returns what marks row 0 for ``where``, which XLA fuses; a scatter is a kernel of its own."""
    return jnp.arange(history.shape[0])[:, None] == 0


def with_staged(history: jax.Array, *amaxes: jax.Array) -> jax.Array:
    """Returns a GEMM's history with the amax values of its first slots, [1] each, in row 0."""
    slots = jnp.arange(history.shape[1])
    for slot, amax in enumerate(amaxes):
        here = _first_row(history) & (slots == slot)
        history = jnp.where(here, same_on_all(history, amax), history)
    return history


def _of_one_use(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a module's state as of one use, from one summed over several uses in one loss.

    JAX adds the cotangents of all uses. Scales, their inverses and old amax values are equal in
    all, so their sums are divided by the number of uses; staged amax values keep their sum, an
    upper bound. An unused state is zero and begins anew unless ``update_collections`` kept it.
    """
    uses = jnp.maximum(state["uses"], 1.0)
    found = {}
    for way, slots in SLOTS.items():
        each = jnp.repeat(uses, slots)
        for name in (f"scale_{way}", f"scale_inv_{way}", f"amax_history_{way}"):
            found[name] = state[name] / each
        found[name] = jnp.where(_first_row(state[name]), state[name], found[name])
        is_used = jnp.repeat(state["uses"] > 0, slots)
        for name in (f"scale_{way}", f"scale_inv_{way}"):
            found[name] = jnp.where(is_used, found[name], 1.0)
    if FIRST_DUE in state:
        is_used = first_step.of_slots(state["uses"] > 0)
        found[FIRST_DUE] = jnp.where(is_used, jnp.minimum(state[FIRST_DUE], 1.0), 1.0)
    return {**found, "uses": jnp.ones_like(uses)}


def checked(owner: str, state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``state`` as a dict; ValueError if a shape, but for a history's length, is not
    ``like``'s.
    """
    for name, leaf in state.items():
        found, wanted = list(jnp.shape(leaf)), list(jnp.shape(like[name]))
        if len(found) == len(wanted) == 2:
            wanted[0] = found[0]
        if found != wanted:
            raise ValueError(
                f"{owner}: {name} of the FP8 state must have shape {wanted} (te.state has"
                f" unstack_layers for stacked layers), got {found}"
            )
    return dict(state)


def entered(state: Mapping[str, Any], recipe: DelayedScaling) -> dict[str, Any]:
    """Returns a state whose scales are updated from the recorded amax values, if there are any.

    Raises ValueError if the histories do not have the length that ``recipe`` asks for.
    """
    state = _of_one_use(state)
    limits = recipe.fp8_format.value
    length = state["amax_history_fwd"].shape[0]
    if length != recipe.amax_history_len:
        raise ValueError(
            f"FP8 state: amax_history_len must be {length}, that of the state, got"
            f" {recipe.amax_history_len}"
        )
    made = amax_scale_update(
        [state["amax_history_fwd"], state["amax_history_bwd"]],
        [state["scale_fwd"], state["scale_bwd"]], [state["scale_inv_fwd"], state["scale_inv_bwd"]],
        [limits.max_fwd, limits.max_bwd], margin=recipe.margin, algo=str(recipe.amax_compute_algo),
        pow2=recipe.scaling_factor_compute_algo == "pow2",
    )  # fmt: skip
    names = ("amax_history", "scale", "scale_inv")
    moved = {
        f"{name}_{way}": each
        for name, pair in zip(names, made, strict=True)
        for way, each in zip(SLOTS, pair, strict=True)
    }
    return {**state, **moved}


def of_gemm(state: Mapping[str, Any], gemm: int) -> dict[str, Any]:
    """Returns the part of a module's state that belongs to its GEMM with the number ``gemm``."""
    found = {"uses": state["uses"][gemm : gemm + 1]}
    for way, slots in SLOTS.items():
        part = slice(slots * gemm, slots * (gemm + 1))
        for name in (f"scale_{way}", f"scale_inv_{way}", f"amax_history_{way}"):
            found[name] = state[name][..., part]
    if FIRST_DUE in state:
        places = jnp.array(first_step.numbers_of_gemm(state[FIRST_DUE], gemm))
        found[FIRST_DUE] = state[FIRST_DUE][..., places]
    return found


def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the states of several modules with one recipe as that of one module."""
    if len(states) == 1:
        return dict(states[0])
    found = {}
    for name in states[0]:
        leaves = [state[name] for state in states]
        if name == FIRST_DUE:  # has forward's slots of all GEMMs first
            cuts = [SLOTS["fwd"] * (leaf.shape[-1] // sum(SLOTS.values())) for leaf in leaves]
            leaves = [leaf[:cut] for leaf, cut in zip(leaves, cuts, strict=True)] + [
                leaf[cut:] for leaf, cut in zip(leaves, cuts, strict=True)
            ]
        found[name] = jnp.concatenate(leaves, axis=-1)
    return found


def as_floats(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state in float32, also if ``max_over_uses`` has changed its dtype."""
    return {
        name: leaf if leaf.dtype == jnp.float32 else jax.lax.convert_element_type(leaf, jnp.float32)
        for name, leaf in state.items()
    }


def cotangent(part: Mapping[str, Any], gemm: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the gradient with respect to a module's state, as its GEMM ``gemm`` contributes it.

    The slots of this GEMM have their next state ``part``, in the form of ``of_gemm``. The other
    slots are zero, or -inf if ``max_over_uses`` has given the state ``like`` the dtype whose
    gradients are combined by maximum.
    """
    found = {}
    for name, leaf in like.items():
        is_sum = leaf.dtype == jnp.float32
        nothing = jnp.float32(0.0 if is_sum else -jnp.inf)
        if name == FIRST_DUE:
            places = jnp.array(first_step.numbers_of_gemm(leaf, gemm))
            whole = jnp.full(leaf.shape, nothing).at[..., places].set(part[name])
        else:
            # No scatter, which over a whole leaf crashes the compiler of jaxlib 0.11 in shard_map.
            slots = 1 if name == "uses" else SLOTS[name[-3:]]
            before = slots * gemm
            after = leaf.shape[-1] - before - slots
            edges = [(0, 0, 0)] * (leaf.ndim - 1) + [(before, after, 0)]
            whole = jax.lax.pad(part[name].astype(jnp.float32), nothing, edges)
        found[name] = whole if is_sum else jax.lax.convert_element_type(whole, leaf.dtype)
    return found


def whole_cotangent(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the gradient with respect to the state ``like`` of a module whose GEMMs run as one.

    It is their next ``state``, or empty for a module without one.
    """
    return {
        name: jax.lax.convert_element_type(leaf, like[name].dtype) for name, leaf in state.items()
    }


def differentiated(state: Mapping[str, Any], parameters: Iterable[Any]) -> dict[str, Any]:
    """Returns the arrays of a state, given as a custom_vjp with symbolic zeros receives it.

    Raises ValueError if a parameter is differentiated and the state is not, so that it would never
    be updated.
    """
    wanted = any(p is not None and p.perturbed for p in parameters)
    if wanted and not all(leaf.perturbed for leaf in state.values()):
        raise ValueError(
            "FP8 state: its collection must be differentiated together with the parameters, as"
            " the gradient is the next state, got a constant (flax.nnx differentiates nnx.Param"
            " alone: there, use value_and_grad of apex_te.jax.nnx, or its modules after use_refs)"
        )
    return {name: leaf.value for name, leaf in state.items()}


def max_over_uses(state: Any) -> Any:
    """Returns variables whose amax values are combined by maximum if a loss uses a module twice.

    JAX adds the gradients of all uses. Without this function the recorded amax is thus the sum of
    the uses' amax values, an upper bound; scales are the same either way. The returned FP8 state
    has a dtype of Flax whose gradients are combined by maximum. Call the function inside of the
    function that is differentiated, on the variables that are passed to ``apply``. All of this
    must run inside of ``jax.jit``.

    Args:
        state: the collection "fp8_metas" itself, or a dict of collections or modules that holds it.
    """
    if is_state(state):
        from flax.linen import fp8_ops  # here, as all else does without Flax

        dtype = fp8_ops.fp32_max_grad
        made = {n: jax.lax.convert_element_type(leaf, dtype) for n, leaf in state.items()}
        return like_mapping(state, made)
    if not isinstance(state, Mapping):
        return state
    return like_mapping(state, {name: max_over_uses(value) for name, value in state.items()})


def is_state(value: Any) -> bool:
    """Returns True if a node of a tree is a module's FP8 state."""
    return isinstance(value, Mapping) and all(name in value for name in TENSORS)


def like_mapping(original: Any, made: dict[str, Any]) -> Any:
    """Returns a dict converted to the mapping type of ``original``, such as Flax's FrozenDict."""
    return made if isinstance(original, dict) else type(original)(made)


def update_fp8_metas(state: Any, axis_names: str | Iterable[str] = ()) -> Any:
    """Returns ``state`` with the scales of its FP8 state updated; other collections are unchanged.

    Calling it is optional, since layers update their scales when they are next used. A second
    update changes nothing.

    Args:
        state: the collection "fp8_metas" itself, or a dict of collections or modules that holds it.
            Layers that ``nn.scan`` or ``nn.vmap`` stacks must be stacked in the first dimension.
        axis_names: inside of ``jax.shard_map``, mesh axes along which the devices' recorded amax
            values differ. The scales come from their maximum.

    Raises:
        ValueError: a history does not have the length that the region's recipe asks for, or layers
            are stacked along another dimension than the first.
    """
    recipe = get_delayed_scaling()
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    if is_state(state):
        return like_mapping(state, _moved(state, recipe, names))
    if not isinstance(state, Mapping):
        return state
    found = {name: update_fp8_metas(value, names) for name, value in state.items()}
    return like_mapping(state, found)


def _moved(
    state: Mapping[str, Any], recipe: DelayedScaling, axis_names: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the state of a module, or of layers that are stacked, with its scales moved."""

    def move(state: dict[str, Any]) -> dict[str, Any]:
        if axis_names:
            state = {**state, **_largest_staged(state, axis_names)}
        return entered(state, recipe)

    stacked = jnp.shape(state["scale_fwd"])[:-1]
    for name, leaf in state.items():
        own = 2 if name.startswith("amax_history") else 1
        if jnp.shape(leaf)[: max(jnp.ndim(leaf) - own, 0)] != stacked:
            raise ValueError(
                f"update_fp8_metas: {name} must have the layers {list(stacked)} in its first"
                f" dimensions and {own} more, got shape {list(jnp.shape(leaf))}"
            )
    for _ in stacked:
        move = jax.vmap(move)
    return move(dict(state))


def _largest_staged(state: Mapping[str, Any], axis_names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the histories with the maximum of all devices' staged amax values."""
    histories = {name: state[name] for name in state if name.startswith("amax_history")}
    return {
        name: jnp.where(_first_row(history), maximum_over(history[0], axis_names), history)
        for name, history in histories.items()
    }


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Any:
    """Returns ``original`` with its collections replaced by those of ``new``.

    GEMMs that the loss did not use keep the FP8 state of ``original``, since their gradient is
    zero.

    Args:
        new: collections to take, such as the gradient with respect to "fp8_metas".
        original: the collections so far; the result has its mapping type.
    """
    kept = {name: _with_unused(new[name], original.get(name)) for name in new}
    return like_mapping(original, {**original, **kept})


def _with_unused(new: Any, original: Any) -> Any:
    """Returns a tree of states with the original ones of GEMMs that were not used."""
    if not isinstance(new, Mapping) or not isinstance(original, Mapping):
        return new
    if not is_state(new) or any(np.shape(new[n]) != np.shape(original.get(n, ())) for n in new):
        return like_mapping(
            new, {name: _with_unused(new[name], original.get(name)) for name in new}
        )
    return like_mapping(new, where_gemms(new["uses"] > 0, new, original))


def where_gemms(
    is_new: jax.Array, new: Mapping[str, Any], original: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a module's state: ``new`` for GEMMs where ``is_new`` is True, else ``original``."""
    found = {}
    for name, leaf in new.items():
        each = is_new
        if name == FIRST_DUE:
            each = first_step.of_slots(is_new)
        elif name != "uses":
            each = jnp.repeat(is_new, SLOTS[name[-3:]], axis=-1)
        if "history" in name:
            each = each[..., None, :]
        found[name] = jnp.where(each, leaf, original[name])
    return found
