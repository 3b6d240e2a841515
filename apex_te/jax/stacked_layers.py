"""Variables of layers that ``nn.scan`` stacks, taken apart into one module for each and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .boxes import is_box, rebox, unbox
from .fp8_state import like_mapping

__all__ = ["stack_layers", "unstack_layers"]


def unstack_layers(variables: Mapping[str, Any], stack: str, layers: str | None = None) -> Any:
    """Returns variables in which a module of stacked layers is replaced by a module per layer.

    Args:
        variables: collections whose arrays in the module have the layers in the first dimension,
            such as "params" and "fp8_metas" of an ``nn.scan`` with
            ``variable_axes={"params": 0, "fp8_metas": 0}``.
        stack: the module's name, or its path such as "decoder/layers".
        layers: format string that makes a layer's name from its number; None means "layers_{}" for
            a module "layers", as Flax names modules of a list. For a state dict of a
            ``torch.nn.ModuleList`` use "layers.{}".

    Raises:
        KeyError: no collection has the module.
        TypeError: a leaf of the module is not an array.
        ValueError: the arrays differ in the number of layers, a module already has the name of a
            layer, or ``stack`` or ``layers`` is malformed.
    """
    path, name = _place("unstack_layers", stack, layers)
    found = dict(variables)
    have = [key for key in variables if node_at(variables[key], path) is not None]
    if not have:
        raise KeyError(f"unstack_layers: stack must be a module of the variables, got {stack!r}")
    counts: dict[str, int] = {}
    for key in have:
        node = unbox(node_at(variables[key], path))
        for each, leaf in jax.tree_util.tree_leaves_with_path(node):
            counts[f"{key}/{stack}{jax.tree_util.keystr(each)}"] = _count(key, stack, leaf)
    number = max(counts.values(), default=0)
    for where, count in counts.items():
        if count != number:
            raise ValueError(
                f"unstack_layers: {where} must have {number} layers in its first dimension, as"
                f" others have, got {count}"
            )
    for key in have:
        node = node_at(variables[key], path)
        apart = {name.format(i): _layer(node, i) for i in range(number)}
        found[key] = _exchanged("unstack_layers", variables[key], path, [path[-1]], apart)
    return like_mapping(variables, found)


def _layer(node: Any, number: int) -> Any:
    """Returns one layer of a stack; boxes lose the first of their axes' names."""

    def one(leaf: Any) -> Any:
        return rebox(leaf, lambda array: array[number], lambda names: names[1:])

    return jax.tree.map(one, node, is_leaf=is_box)


def stack_layers(
    variables: Mapping[str, Any],
    stack: str,
    layers: str | None = None,
    partition_name: str | None = None,
) -> Any:
    """Returns variables in which a module per layer is replaced by a module of stacked layers.

    It is the inverse of ``unstack_layers``.

    Args:
        variables: collections such as "params" and "fp8_metas".
        stack, layers: as in ``unstack_layers``.
        partition_name: name of the layers' logical axis in Flax's boxes, which ``nn.scan`` reads
            from ``metadata_params[nn.PARTITION_NAME]``.

    Raises:
        KeyError: no collection has a layer 0.
        ValueError: layers differ in their parameters, shapes or dtypes, collections differ in the
            number of layers, or a module already has the name of the stack.
    """
    path, name = _place("stack_layers", stack, layers)
    found, number = dict(variables), 0
    for key, collection in variables.items():
        parent = node_at(collection, path[:-1])
        names: list[str] = []
        while parent is not None and name.format(len(names)) in parent:
            names.append(name.format(len(names)))
        if not names:
            continue
        if number and len(names) != number:
            raise ValueError(
                f"stack_layers: {key} must have {number} layers, as others have, got {len(names)}"
            )
        number = len(names)
        assert parent is not None
        joined = _joined([parent[each] for each in names], f"{key}/{stack}", partition_name)
        found[key] = _exchanged("stack_layers", collection, path, names, {path[-1]: joined})
    if not number:
        raise KeyError(
            f"stack_layers: layers must be names of modules of the variables, got"
            f" {name.format(0)!r}"
        )
    return like_mapping(variables, found)


def _place(owner: str, stack: str, layers: str | None) -> tuple[tuple[str, ...], str]:
    """Returns the path of a stack, and the format of its layers' names."""
    path = tuple(stack.split("/"))
    name = f"{path[-1]}_{{}}" if layers is None else layers
    if not all(path) or name.format(0) == name.format(1):
        raise ValueError(
            f"{owner}: stack must be names joined by '/', and layers have one {{}}, got {stack!r}"
            f" and {layers!r}"
        )
    return path, name


def node_at(tree: Any, path: Sequence[str]) -> Any:
    """Returns the node of a tree at a path; None where there is none."""
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def _count(collection: str, stack: str, leaf: Any) -> int:
    """Returns the first extent of a stacked array."""
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        raise TypeError(
            f"unstack_layers: {collection} must have arrays in {stack!r} (leave other collections"
            f" out), got {type(leaf).__name__}"
        )
    return leaf.shape[0] if leaf.ndim else 0


def _joined(nodes: list[Any], where: str, partition_name: str | None) -> Any:
    """Returns a tree with the leaves of several trees stacked."""
    first = jax.tree.structure(nodes[0])
    for node in nodes[1:]:
        if jax.tree.structure(node) != first:
            raise ValueError(f"stack_layers: {where} must have layers with the same parameters")

    def stacked(path: Any, *boxes: Any) -> Any:
        leaves = [unbox(box) for box in boxes]
        kinds = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves]
        for kind in kinds:
            if kind != kinds[0]:
                raise ValueError(
                    f"stack_layers: {where}{jax.tree_util.keystr(path)} must be {kinds[0]} in all"
                    f" layers, got {kind}"
                )
        on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
        array = (np if on_host else jnp).stack(leaves)
        return rebox(boxes[0], lambda _: array, lambda names: (partition_name, *names))

    return jax.tree_util.tree_map_with_path(stacked, *nodes, is_leaf=is_box)


def _exchanged(
    owner: str, tree: Any, path: tuple[str, ...], old: Sequence[str], new: Mapping[str, Any]
) -> Any:
    """Returns a tree whose node above the end of ``path`` has other children."""
    if len(path) > 1:
        below = _exchanged(owner, tree[path[0]], path[1:], old, new)
        return like_mapping(tree, {**tree, path[0]: below})
    kept = {name: value for name, value in tree.items() if name not in old}
    for name in new:
        if name in kept:
            raise ValueError(f"{owner}: variables must have no module {name!r}, got one")
    return like_mapping(tree, {**kept, **new})
