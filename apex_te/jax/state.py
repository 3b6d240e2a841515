"""FP8 state of delayed scaling as a pytree of fp32 arrays, the Flax collection "fp8_metas".

A module's part has the six tensors of PyTorch's FP8 state under their names, and ``uses``. The
gradient with respect to the collection is the next state: backward returns it with the amaxes of
the step staged in row 0 of the histories.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..recipe import DelayedScaling
from . import first_step
from ._partition import maximum_over
from .first_step import FIRST_DUE, SLOTS
from .ops.amax_scale_update import amax_scale_update
from .region import get_delayed_scaling
from .torch_names import Leaf, parts

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
_PREFIX = "fp8_state."
_HEADER_BYTES, _HEADER_BYTES_PER_SLOT = 512, 6


def initial(recipe: DelayedScaling, gemms: int = 1) -> dict[str, jax.Array]:
    """Returns the state of a module before its first step: scales 1, histories 0.

    Args:
        recipe: the recipe, for the length of the histories.
        gemms: number of the module's products with a weight.
    """
    state = {}
    for way, slots in SLOTS.items():
        count = slots * gemms
        state[f"scale_{way}"] = jnp.ones(count, jnp.float32)
        state[f"scale_inv_{way}"] = jnp.ones(count, jnp.float32)
        state[f"amax_history_{way}"] = jnp.zeros((recipe.amax_history_len, count), jnp.float32)
    return {**state, **first_step.initial(recipe, gemms), "uses": jnp.ones(gemms, jnp.float32)}


def _of_one_use(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state whose scales were summed over several uses of a module in one loss.

    JAX adds the cotangents of all uses. Scales, their inverses and old amaxes are equal in all, so
    that the sum is divided by the number of uses; staged amaxes keep their sum, an upper bound.
    Without any use all is zero, and the state begins anew unless ``update_collections`` kept it.
    """
    uses = jnp.maximum(state["uses"], 1.0)
    found = {}
    for way, slots in SLOTS.items():
        each = jnp.repeat(uses, slots)
        for name in (f"scale_{way}", f"scale_inv_{way}", f"amax_history_{way}"):
            found[name] = state[name] / each
        found[name] = found[name].at[0].set(state[name][0])
        is_used = jnp.repeat(state["uses"] > 0, slots)
        for name in (f"scale_{way}", f"scale_inv_{way}"):
            found[name] = jnp.where(is_used, found[name], 1.0)
    if FIRST_DUE in state:
        is_used = first_step.of_slots(state["uses"] > 0)
        found[FIRST_DUE] = jnp.where(is_used, jnp.minimum(state[FIRST_DUE], 1.0), 1.0)
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
        for way, each in zip(SLOTS, pair, strict=True)
    }
    return {**state, **moved}


def of_gemm(state: Mapping[str, Any], gemm: int) -> dict[str, Any]:
    """Returns the part of a module's state that belongs to one of its products."""
    found = {"uses": state["uses"][gemm : gemm + 1]}
    for way, slots in SLOTS.items():
        part = slice(slots * gemm, slots * (gemm + 1))
        for name in (f"scale_{way}", f"scale_inv_{way}", f"amax_history_{way}"):
            found[name] = state[name][..., part]
    if FIRST_DUE in state:
        places = jnp.array(first_step.numbers_of_gemm(state[FIRST_DUE], gemm))
        found[FIRST_DUE] = state[FIRST_DUE][..., places]
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


def update_fp8_metas(state: Any, axis_names: str | Iterable[str] = ()) -> Any:
    """Returns a dict with the collection "fp8_metas", whose scales are moved; others are untouched.

    Layers move their scales themselves when they are next used, so a loop may leave this call out;
    moving them twice changes nothing.

    Args:
        state: the collection itself, or a dict of collections or modules that holds it.
        axis_names: in a ``jax.shard_map``, mesh axes along which staged amaxes differ between
            devices; the scales are those of the largest.
    """
    recipe = get_delayed_scaling()
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    if _is_state(state):
        if names:
            state = _like(state, {**state, **_largest_staged(state, names)})
        return _like(state, entered(state, recipe))
    if not isinstance(state, Mapping):
        return state
    return _like(state, {name: update_fp8_metas(value, names) for name, value in state.items()})


def _largest_staged(state: Mapping[str, Any], axis_names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the histories with the maximum of all devices' staged amaxes."""
    histories = {name: state[name] for name in state if name.startswith("amax_history")}
    return {
        name: history.at[0].set(maximum_over(history[0], axis_names))
        for name, history in histories.items()
    }


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Any:
    """Returns a dict of collections: those of ``new``, and those of ``original`` that it lacks.

    A layer that the loss did not use keeps its FP8 state, whose gradient is zero.

    Args:
        new: collections to take, such as the gradient's FP8 state.
        original: the collections so far; a FrozenDict gives a FrozenDict.
    """
    kept = {name: _with_unused(new[name], original.get(name)) for name in new}
    return _like(original, {**original, **kept})


def _with_unused(new: Any, original: Any) -> Any:
    """Returns a tree of states with the original ones of products that were not used."""
    if not isinstance(new, Mapping) or not isinstance(original, Mapping):
        return new
    if not _is_state(new) or any(np.shape(new[n]) != np.shape(original.get(n, ())) for n in new):
        return _like(new, {name: _with_unused(new[name], original.get(name)) for name in new})
    is_used = new["uses"] > 0
    found = {}
    for name, leaf in new.items():
        each = is_used
        if name == FIRST_DUE:
            each = first_step.of_slots(is_used)
        elif name != "uses":
            each = jnp.repeat(is_used, SLOTS[name[-3:]], axis=-1)
        if "history" in name:
            each = each[..., None, :]
        found[name] = jnp.where(each, leaf, original[name])
    return _like(new, found)


def _header(state: Mapping[str, Any], recipe: DelayedScaling) -> np.ndarray:
    """Returns the header that PyTorch's state dict has beside the tensors, JSON text as uint8."""
    slots = sum(np.shape(state[f"scale_{way}"])[0] for way in SLOTS)
    names = (
        "margin", "amax_compute_algo", "scaling_factor_compute_algo", "reduce_amax", "first_step"
    )  # fmt: skip
    entries = {
        "version": 1,
        "history": int(np.shape(state["amax_history_fwd"])[0]),
        "pending": 1,
        "scope": 0,
        "equal": None,
        "first_due": [bool(due) for due in np.asarray(state.get(FIRST_DUE, np.zeros(slots)))],
        "format": recipe.fp8_format.name,
        "recipe": {name: getattr(recipe, name) for name in names},
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return np.frombuffer(text.ljust(_HEADER_BYTES + _HEADER_BYTES_PER_SLOT * slots), np.uint8)


def to_torch(variables: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Returns a state dict for PyTorch, as numpy arrays, of a tree of Flax's layers.

    Kernels [in, out] become weights [out, in]. FP8 state goes along, with a header that names the
    region's recipe; its staged amaxes are an update that is still to come. Attention becomes that
    of PyTorch's layers with ``fuse_qkv_params=False``.

    Args:
        variables: "params" and perhaps "fp8_metas", as ``init`` returns them.
        prefix: prefix of all keys.

    Raises:
        ValueError: parameters of several layers are stacked, as ``nn.scan`` does.
    """
    recipe = get_delayed_scaling()
    found: dict[str, np.ndarray] = {}
    for part in parts(variables["params"], prefix):
        node = _at(variables["params"], part.path)
        for leaf in part.leaves:
            for key, array in _split(leaf, np.asarray(node[leaf.name])):
                found[part.prefix + key] = array
        state = _at(variables.get(FP8_COLLECTION_NAME, {}), part.path)
        if _is_state(state):
            if jnp.ndim(state["scale_fwd"]) != 1:
                raise ValueError(
                    "to_torch: scale_fwd must have 1 dimensions (take each layer's slice of stacked"
                    f" variables), got {list(jnp.shape(state['scale_fwd']))}"
                )
            for name in TENSORS:
                found[part.prefix + _PREFIX + name] = np.asarray(state[name])
            found[f"{part.prefix}{_PREFIX}header"] = _header(state, recipe)
    return found


def _at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Returns the node of a tree at ``path``; an empty one where there is none."""
    for name in path:
        tree = tree.get(name, {})
    return tree


def _split(leaf: Leaf, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Returns the tensors of PyTorch that a parameter is made of, by name."""
    if leaf.inputs is None:
        yield leaf.keys[0], array
        return
    several = len(leaf.keys) > 1
    wanted = leaf.inputs + 1 + (several or leaf.name.startswith("wi_"))
    if (several or leaf.name not in ("kernel", "bias")) and array.ndim != wanted:
        raise ValueError(
            f"to_torch: {leaf.name} must have {wanted} dimensions (take each layer's slice of"
            f" stacked variables), got {list(array.shape)}"
        )
    pieces = [array]
    if several:
        pieces = [array.take(i, axis=leaf.inputs) for i in range(len(leaf.keys))]
    for key, piece in zip(leaf.keys, pieces, strict=True):
        if leaf.inputs:
            piece = piece.reshape(math.prod(piece.shape[: leaf.inputs]), -1).T
        yield key, np.ascontiguousarray(piece if leaf.inputs else piece.reshape(-1))


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
        ValueError: a value has another shape, or one parameter is fused of queries, keys and
            values.
    """

    def read(key: str, shape: tuple[int, ...]) -> np.ndarray:
        array = np.asarray(state_dict[key])
        if array.shape != shape:
            raise ValueError(
                f"from_torch: {key} must have shape {list(shape)}, got {list(array.shape)}"
            )
        return array

    params: dict[tuple[str, ...], Any] = {}
    states: dict[tuple[str, ...], Any] = {}
    for part in parts(variables["params"], prefix):
        node = _at(variables["params"], part.path)
        for leaf in part.leaves:
            _check_separate(state_dict, part.prefix, leaf.keys[0])
            like = node[leaf.name]
            array = _joined(leaf, np.shape(like), part.prefix, read)
            path = (*part.path, leaf.name)
            params[path] = jnp.asarray(array, jnp.asarray(like).dtype)
        state = _at(variables.get(FP8_COLLECTION_NAME, {}), part.path)
        if _is_state(state):
            for name in TENSORS:
                array = read(f"{part.prefix}{_PREFIX}{name}", np.shape(state[name]))
                path = (*part.path, name)
                states[path] = jnp.asarray(array, jnp.float32)
            if FIRST_DUE in state:
                header = np.asarray(state_dict[f"{part.prefix}{_PREFIX}header"]).tobytes()
                path = (*part.path, FIRST_DUE)
                states[path] = jnp.array(json.loads(header)[FIRST_DUE], jnp.float32)
            path = (*part.path, "uses")
            states[path] = jnp.ones_like(state["uses"])
    found = {**variables, "params": _replaced(variables["params"], params)}
    if FP8_COLLECTION_NAME in variables:
        found[FP8_COLLECTION_NAME] = _replaced(variables[FP8_COLLECTION_NAME], states)
    return _like(variables, found)


def _check_separate(state_dict: Mapping[str, Any], prefix: str, key: str) -> None:
    """Checks that queries, keys and values have parameters of their own in the state dict."""
    row, _, word = key.rpartition("_")
    if row not in ("query", "key", "value") or prefix + key in state_dict:
        return
    if prefix + word in state_dict:
        raise ValueError(
            f"from_torch: {prefix}{key} must be separate (fuse_qkv_params=False), got"
            f" {prefix}{word} of all projections"
        )


def _joined(leaf: Leaf, shape: tuple[int, ...], prefix: str, read: Any) -> np.ndarray:
    """Returns a parameter of ``shape`` from the tensors of PyTorch that it is made of.

    Args:
        leaf: the parameter's names.
        shape: its shape.
        prefix: prefix of the tensors' keys.
        read: function that returns the tensor of a key and shape.
    """
    if leaf.inputs is None:
        return read(prefix + leaf.keys[0], shape)
    several = len(leaf.keys) > 1
    inputs, features = shape[: leaf.inputs], shape[leaf.inputs + several :]
    wanted = (math.prod(features), *((math.prod(inputs),) if inputs else ()))
    pieces = [read(prefix + key, wanted).T.reshape(*inputs, *features) for key in leaf.keys]
    return np.stack(pieces, axis=leaf.inputs) if several else pieces[0]


def _replaced(tree: Mapping[str, Any], leaves: Mapping[tuple[str, ...], Any]) -> Any:
    """Returns a tree with other values at the paths of ``leaves``."""

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(node, Mapping):
            return leaves.get(path, node)
        return _like(node, {name: walk(value, (*path, name)) for name, value in node.items()})

    return walk(tree, ())
