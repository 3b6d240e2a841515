"""FP8 state of delayed scaling as a pytree of fp32 arrays, the Flax collection "fp8_metas".

A module's part has the six tensors of PyTorch's FP8 state under their names, and ``uses``. The
gradient with respect to the collection is the next state: backward returns it with the amaxes of
the step staged in row 0 of the histories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..recipe import DelayedScaling
from .ops.amax_scale_update import amax_scale_update
from .region import get_delayed_scaling

__all__ = [
    "FP8_COLLECTION_NAME",
    "TENSORS",
    "as_floats",
    "cotangent",
    "entered",
    "from_torch",
    "initial",
    "max_over_uses",
    "of_gemm",
    "to_torch",
    "update_collections",
    "update_fp8_metas",
]

FP8_COLLECTION_NAME = "fp8_metas"
TENSORS = (
    "scale_fwd",
    "scale_inv_fwd",
    "amax_history_fwd",
    "scale_bwd",
    "scale_inv_bwd",
    "amax_history_bwd",
)
# Slots of each product's three tensors in forward and two in backward, as on PyTorch's side.
_SLOTS = {"fwd": 3, "bwd": 2}
_PREFIX = "fp8_state."
_HEADER_BYTES, _HEADER_BYTES_PER_SLOT = 512, 6


def initial(recipe: DelayedScaling, gemms: int = 1) -> dict[str, jax.Array]:
    """Returns the state of a module before its first step: scales 1, histories 0.

    Args:
        recipe: the recipe, for the length of the histories.
        gemms: number of the module's products with a weight.
    """
    state = {}
    for way, slots in _SLOTS.items():
        count = slots * gemms
        state[f"scale_{way}"] = jnp.ones(count, jnp.float32)
        state[f"scale_inv_{way}"] = jnp.ones(count, jnp.float32)
        state[f"amax_history_{way}"] = jnp.zeros((recipe.amax_history_len, count), jnp.float32)
    return {**state, "uses": jnp.ones(gemms, jnp.float32)}


def _of_one_use(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state whose scales were summed over several uses of a module in one loss.

    JAX adds the cotangents of all uses. Scales, their inverses and old amaxes are equal in all, so
    that the sum is divided by the number of uses; staged amaxes keep their sum, an upper bound.
    """
    uses = jnp.maximum(state["uses"], 1.0)
    found = {}
    for way, slots in _SLOTS.items():
        each = jnp.repeat(uses, slots)
        for name in (f"scale_{way}", f"scale_inv_{way}", f"amax_history_{way}"):
            found[name] = state[name] / each
        found[name] = found[name].at[0].set(state[name][0])
    return {**found, "uses": jnp.ones_like(uses)}


def entered(state: Mapping[str, Any], recipe: DelayedScaling) -> dict[str, Any]:
    """Returns a state with its scales moved by the amaxes that are staged; without any, the same.

    Args:
        state: a module's state.
        recipe: recipe of the region.
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
        [state["scale_fwd"], state["scale_bwd"]],
        [state["scale_inv_fwd"], state["scale_inv_bwd"]],
        [limits.max_fwd, limits.max_bwd],
        margin=recipe.margin,
        algo=str(recipe.amax_compute_algo),
        pow2=recipe.scaling_factor_compute_algo == "pow2",
    )
    names = ("amax_history", "scale", "scale_inv")
    moved = {
        f"{name}_{way}": each
        for name, pair in zip(names, made, strict=True)
        for way, each in zip(_SLOTS, pair, strict=True)
    }
    return {**moved, "uses": state["uses"]}


def of_gemm(state: Mapping[str, Any], gemm: int) -> dict[str, Any]:
    """Returns the part of a module's state that belongs to one of its products."""
    found = {"uses": state["uses"][gemm : gemm + 1]}
    for way, slots in _SLOTS.items():
        part = slice(slots * gemm, slots * (gemm + 1))
        for name in (f"scale_{way}", f"scale_inv_{way}", f"amax_history_{way}"):
            found[name] = state[name][..., part]
    return found


def as_floats(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state in float32, whatever dtype ``max_over_uses`` has given it."""
    return {
        name: leaf if leaf.dtype == jnp.float32 else jax.lax.convert_element_type(leaf, jnp.float32)
        for name, leaf in state.items()
    }


def cotangent(part: Mapping[str, Any], gemm: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the gradient with respect to a state: the next one of a product, nothing elsewhere.

    Args:
        part: next state of the product.
        gemm: its number.
        like: the whole state. Where ``max_over_uses`` has given it the dtype whose gradients are
            combined by maximum, nothing is -inf.
    """
    found = {}
    for name, leaf in like.items():
        is_sum = leaf.dtype == jnp.float32
        slots = 1 if name == "uses" else _SLOTS[name[-3:]]
        places = slice(slots * gemm, slots * (gemm + 1))
        whole = jnp.full(leaf.shape, 0.0 if is_sum else -jnp.inf, jnp.float32)
        whole = whole.at[..., places].set(part[name])
        found[name] = whole if is_sum else jax.lax.convert_element_type(whole, leaf.dtype)
    return found


def max_over_uses(state: Any) -> Any:
    """Returns variables whose FP8 state is right for modules that one loss uses several times.

    JAX adds the gradients of all uses. The returned collection has Flax's dtype whose gradients are
    combined by maximum instead, which staged amaxes need. Call it inside of the function that is
    differentiated, on the variables that are passed to ``apply``, and that inside of ``jax.jit``.
    Without it the scales are right, too, but the staged amax is the sum over the uses.

    Args:
        state: the collection "fp8_metas" itself, or a dict of collections or modules that holds it.
    """
    if _is_state(state):
        from flax.linen import fp8_ops  # here, as all else does without Flax

        dtype = fp8_ops.fp32_max_grad
        made = {n: jax.lax.convert_element_type(leaf, dtype) for n, leaf in state.items()}
        return _like(state, made)
    if not isinstance(state, Mapping):
        return state
    return _like(state, {name: max_over_uses(value) for name, value in state.items()})


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and all(name in value for name in TENSORS)


def _like(original: Any, made: dict[str, Any]) -> Any:
    """Returns a dict as the mapping type of ``original``, such as Flax's FrozenDict."""
    return made if isinstance(original, dict) else type(original)(made)


def update_fp8_metas(state: Any) -> Any:
    """Returns a dict with the collection "fp8_metas", whose scales are moved; others are untouched.

    Layers move their scales themselves when they are next used, so a loop may leave this call out;
    moving them twice changes nothing.

    Args:
        state: the collection itself, or a dict of collections or modules that holds it.
    """
    recipe = get_delayed_scaling()
    if _is_state(state):
        return _like(state, entered(state, recipe))
    if not isinstance(state, Mapping):
        return state
    return _like(state, {name: update_fp8_metas(value) for name, value in state.items()})


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Any:
    """Returns a dict of collections: those of ``new``, and those of ``original`` that it lacks.

    Args:
        new: collections to take, such as the gradient's FP8 state.
        original: the collections so far; a FrozenDict gives a FrozenDict.
    """
    return _like(original, {**original, **new})


def _header(state: Mapping[str, Any], recipe: DelayedScaling) -> np.ndarray:
    """Returns the header that PyTorch's state dict has beside the tensors, JSON text as uint8."""
    slots = sum(np.shape(state[f"scale_{way}"])[0] for way in _SLOTS)
    names = (
        "margin", "amax_compute_algo", "scaling_factor_compute_algo", "reduce_amax", "first_step"
    )  # fmt: skip
    entries = {
        "version": 1,
        "history": int(np.shape(state["amax_history_fwd"])[0]),
        "pending": 1,
        "scope": 0,
        "equal": None,
        "first_due": [False] * slots,
        "format": recipe.fp8_format.name,
        "recipe": {name: getattr(recipe, name) for name in names},
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return np.frombuffer(text.ljust(_HEADER_BYTES + _HEADER_BYTES_PER_SLOT * slots), np.uint8)


_NAMES = {"kernel": "weight", "scale": "weight", "ln_bias": "bias"}


def to_torch(variables: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Returns a state dict for PyTorch, as numpy arrays, of a tree of dense layers and norms.

    Kernels [in, out] become weights [out, in]. FP8 state goes along, with a header that names the
    region's recipe; its staged amaxes are an update that is still to come.

    Args:
        variables: "params" and perhaps "fp8_metas", as ``init`` returns them.
        prefix: prefix of all keys.
    """
    recipe = get_delayed_scaling()
    found: dict[str, np.ndarray] = {}

    def walk(params: Mapping[str, Any], states: Mapping[str, Any], prefix: str) -> None:
        for name, value in params.items():
            if isinstance(value, Mapping):
                walk(value, states.get(name, {}), f"{prefix}{name}.")
                continue
            array = np.asarray(value)
            array = array.T if name == "kernel" else array
            found[prefix + _NAMES.get(name, name)] = np.ascontiguousarray(array)
        if _is_state(states):
            for name in TENSORS:
                found[prefix + _PREFIX + name] = np.asarray(states[name])
            found[f"{prefix}{_PREFIX}header"] = _header(states, recipe)

    walk(variables["params"], variables.get(FP8_COLLECTION_NAME, {}), prefix)
    return found


def from_torch(
    state_dict: Mapping[str, Any], variables: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Returns variables with the values of a state dict of PyTorch.

    Args:
        state_dict: tensors or arrays by key; those of modules that ``variables`` has are read.
        variables: variables of the model, from ``init``, for names, shapes and dtypes.
        prefix: prefix of all keys.

    Raises:
        KeyError: a key is missing.
        ValueError: a value has another shape.
    """

    def read(key: str, like: Any, turn: bool = False) -> jax.Array:
        array = np.asarray(state_dict[key])
        array = array.T if turn else array
        if array.shape != np.shape(like):
            raise ValueError(
                f"from_torch: {key} must have shape {list(np.shape(like))}, got {list(array.shape)}"
            )
        return jnp.asarray(array, jnp.asarray(like).dtype)

    def params(values: Mapping[str, Any], prefix: str) -> Any:
        return _like(values, {
            name: params(value, f"{prefix}{name}.") if isinstance(value, Mapping)
            else read(prefix + _NAMES.get(name, name), value, name == "kernel")
            for name, value in values.items()
        })  # fmt: skip

    def states(values: Mapping[str, Any], prefix: str) -> Any:
        if _is_state(values):
            made = {name: read(prefix + _PREFIX + name, values[name]) for name in TENSORS}
            return _like(values, {**made, "uses": jnp.ones_like(values["uses"])})
        made = {name: states(value, f"{prefix}{name}.") for name, value in values.items()}
        return _like(values, made)

    found = dict(variables)
    found["params"] = params(variables["params"], prefix)
    if FP8_COLLECTION_NAME in variables:
        found[FP8_COLLECTION_NAME] = states(variables[FP8_COLLECTION_NAME], prefix)
    return _like(variables, found)
