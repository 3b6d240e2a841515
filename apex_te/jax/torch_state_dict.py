"""State dicts of the PyTorch modules, to and from variables of Flax's layers.

Parameters and FP8 state keep every bit.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..recipe import DelayedScaling
from .boxes import rebox, unbox
from .first_step import FIRST_DUE, SLOTS
from .fp8_state import FP8_COLLECTION_NAME, TENSORS, is_state, like_mapping
from .region import get_delayed_scaling
from .stacked_layers import node_at
from .torch_names import Leaf, parts

__all__ = ["from_torch", "to_torch"]

_PREFIX = "fp8_state."
_HEADER_BYTES, _HEADER_BYTES_PER_SLOT = 512, 6
_LONGEST_HEADER = 65536
_APART = "(te.state.unstack_layers takes stacked layers apart)"


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
    """Converts variables of Flax layers to a PyTorch state dict of numpy arrays.

    Kernels [in, out] become weights [out, in]. Attention has the form of PyTorch layers with
    ``fuse_qkv_params=False``. FP8 state gets a header that names the region's recipe; its recorded
    amax values stay pending for the next update.

    Args:
        variables: dict with "params" and optionally "fp8_metas", as ``init`` returns it.
        prefix: prefix of all keys.

    Raises:
        ValueError: layers are stacked, as by ``nn.scan``; call ``unstack_layers`` first.
    """
    recipe = get_delayed_scaling()
    found: dict[str, np.ndarray] = {}
    plain = unbox(variables["params"])
    for part in parts(plain, prefix):
        node, state = _nodes("to_torch", plain, variables, part.path)
        for leaf in part.leaves:
            for key, array in _split(leaf, np.asarray(node[leaf.name])):
                found[part.prefix + key] = array
        if is_state(state):
            for name in TENSORS:
                found[part.prefix + _PREFIX + name] = np.asarray(state[name])
            found[f"{part.prefix}{_PREFIX}header"] = _header(state, recipe)
    return found


def _nodes(owner: str, params: Any, variables: Any, path: tuple[str, ...]) -> tuple[Any, Any]:
    """Returns a module's parameters and state, empty where there are none, after checks that they
    are of one layer, as far as shapes tell.
    """
    node = node_at(params, path) or {}
    state = node_at(variables.get(FP8_COLLECTION_NAME, {}), path) or {}
    if is_state(state) and jnp.ndim(state["scale_fwd"]) != 1:
        raise ValueError(
            f"{owner}: scale_fwd must have 1 dimension {_APART}, got"
            f" {list(jnp.shape(state['scale_fwd']))}"
        )
    if "kernel" not in node or "bias" not in node:
        return node, state
    kernel, bias = jnp.shape(node["kernel"]), jnp.shape(node["bias"])
    if len(bias) >= len(kernel) or kernel[len(kernel) - len(bias) :] != bias:
        raise ValueError(
            f"{owner}: bias must have the kernel's last dimensions {_APART}, got {list(bias)} with"
            f" a kernel {list(kernel)}"
        )
    return node, state


def _split(leaf: Leaf, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Returns the tensors of PyTorch that a parameter is made of, by name."""
    if leaf.inputs is None:
        yield leaf.keys[0], array
        return
    several = len(leaf.keys) > 1
    wanted = leaf.inputs + 1 + (several or leaf.is_stack or leaf.name.startswith("wi_"))
    if leaf.name == "softmax_offset":  # [1, heads, 1, 1]
        wanted = 4
    if (several or leaf.name not in ("kernel", "bias")) and array.ndim != wanted:
        raise ValueError(
            f"to_torch: {leaf.name} must have {wanted} dimensions {_APART}, got {list(array.shape)}"
        )
    if leaf.is_stack:
        yield leaf.keys[0], np.ascontiguousarray(array.swapaxes(1, -1))
        return
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
    """Returns a copy of ``variables`` with the values of a PyTorch state dict.

    Args:
        state_dict: tensors or arrays by key. Keys of modules that ``variables`` lacks are ignored.
        variables: variables of the model, from ``init``, which give names, shapes and dtypes.
        prefix: prefix of all keys.

    Raises:
        KeyError: a key is missing.
        ValueError: a value has another shape, queries, keys and values are fused in one parameter
            of the state dict, or ``variables`` have stacked layers: pass the result of
            ``unstack_layers`` and call ``stack_layers`` afterwards.
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
    plain = unbox(variables["params"])
    for part in parts(plain, prefix):
        node, state = _nodes("from_torch", plain, variables, part.path)
        for leaf in part.leaves:
            _check_separate(state_dict, part.prefix, leaf.keys[0])
            like = node[leaf.name]
            array = _joined(leaf, np.shape(like), part.prefix, read)
            path = (*part.path, leaf.name)
            params[path] = jnp.asarray(array, jnp.asarray(like).dtype)
        if is_state(state):
            for name in TENSORS:
                array = read(f"{part.prefix}{_PREFIX}{name}", np.shape(state[name]))
                path = (*part.path, name)
                states[path] = jnp.asarray(array, jnp.float32)
            if FIRST_DUE in state:
                path = (*part.path, FIRST_DUE)
                key = f"{part.prefix}{_PREFIX}header"
                states[path] = _first_due(key, state_dict.get(key), np.shape(state[FIRST_DUE]))
            path = (*part.path, "uses")
            states[path] = jnp.ones_like(state["uses"])
    found = {**variables, "params": _replaced(variables["params"], params)}
    if FP8_COLLECTION_NAME in variables:
        found[FP8_COLLECTION_NAME] = _replaced(variables[FP8_COLLECTION_NAME], states)
    return like_mapping(variables, found)


def _first_due(key: str, header: Any, shape: tuple[int, ...]) -> Any:
    """Returns the entry ``FIRST_DUE`` of a header, JSON text in a uint8 array, as fp32."""
    text, due = np.asarray(header), None
    if text.dtype == np.uint8 and text.size <= _LONGEST_HEADER:
        with contextlib.suppress(KeyError, RecursionError, TypeError, ValueError):
            due = json.loads(text.tobytes())[FIRST_DUE]
    if not isinstance(due, list) or not all(isinstance(each, bool) for each in due):
        due = []
    if len(due) != shape[0]:
        raise ValueError(f"from_torch: {key} must be JSON text with {shape[0]} bools {FIRST_DUE}")
    return jnp.array(due, jnp.float32)


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
    """Returns a parameter of ``shape`` from the tensors of PyTorch that it is made of."""
    if leaf.inputs is None:
        return read(prefix + leaf.keys[0], shape)
    if leaf.is_stack:
        count, *rest = shape
        return read(prefix + leaf.keys[0], (count, *rest[::-1])).swapaxes(1, -1)
    several = len(leaf.keys) > 1
    inputs, features = shape[: leaf.inputs], shape[leaf.inputs + several :]
    wanted = (math.prod(features), *((math.prod(inputs),) if inputs else ()))
    pieces = [read(prefix + key, wanted).T.reshape(*inputs, *features) for key in leaf.keys]
    return np.stack(pieces, axis=leaf.inputs) if several else pieces[0]


def _replaced(tree: Mapping[str, Any], leaves: Mapping[tuple[str, ...], Any]) -> Any:
    """Returns a tree with other values at the paths of ``leaves``."""

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(node, Mapping):
            return rebox(node, lambda array: leaves.get(path, array), lambda names: names)
        return like_mapping(
            node, {name: walk(value, (*path, name)) for name, value in node.items()}
        )

    return walk(tree, ())
