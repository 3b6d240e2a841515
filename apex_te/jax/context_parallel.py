"""Attention to sequences whose tokens are split over a mesh axis, for context parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ._partition import axis_of, constrained, free_axes, gradient_like, vary_alike
from .attention import MASK_TYPES, checked_kind, checked_shapes, dot_product_attention
from .region import active_mesh_resource

__all__ = ["context_parallel_attention", "join_context_parallel", "split_for_context_parallel"]

_NAME = "context_parallel_attention"
# Each with the one that serves it.
_STRATEGIES = {"all_gather": "all_gather", "a2a": "a2a", "default": "all_gather",
               "ring": "all_gather"}  # fmt: skip
_Attend = Callable[..., jax.Array]


def context_parallel_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axis_name: str,
    strategy: str = "all_gather",
    causal_load_balanced: bool = False,
    attn_mask_type: str = "causal",
    window_size: tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    query_start: int | jax.Array = 0,
    **options: Any,
) -> jax.Array:
    """Computes ``dot_product_attention`` to sequences that are split over a mesh axis.

    Inside of a ``jax.shard_map`` over the axis the arrays are a device's tokens. Elsewhere, under
    ``jax.set_mesh``, they are all tokens, and each device attends for its own. Batch and heads are
    then split over the axes that the region's ``mesh_resource`` names for data and tensors.

    Args:
        query: [b, sq, h, d] float32, float16 or bfloat16.
        key, value: [b, sk, g, d] and [b, sk, g, dv] in query's dtype; g divides h.
        mask, bias: as in ``dot_product_attention``, for whole sequences in their order: 4
            dimensions that broadcast to [b, h, all queries, all keys].
        axis_name: name of the mesh axis.
        strategy: "all_gather": each device attends to the keys of all, whose gradients are summed
            in float32. "a2a": each device attends to whole sequences with its part of the heads.
            "default" and "ring" are served by "all_gather". Upper case means the same.
        causal_load_balanced: tokens are in the order of ``split_for_context_parallel``, which
            divides the work of a causal mask evenly. Otherwise they are in their own order.
        dropout_rate, query_start: must be 0.
        attn_mask_type, window_size, options: as in ``dot_product_attention``.

    Returns:
        [b, sq, h, dv] in query's dtype, in the order of ``query``.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: an argument has a wrong shape or value, no mesh has this axis, or its devices do
            not divide the tokens or heads.
        NotImplementedError: ``dropout_rate`` or ``query_start`` is not 0.

    Source: TransformerEngine's strategies of context parallelism.
    """
    size, is_manual = axis_of(_NAME, "axis_name", axis_name)
    found = _STRATEGIES.get(strategy.lower() if isinstance(strategy, str) else "")
    if found is None:
        raise ValueError(
            f"{_NAME}: strategy must be one of {', '.join(_STRATEGIES)}, got {strategy!r}"
        )
    if dropout_rate != 0.0:
        raise NotImplementedError(
            f"{_NAME}: dropout_rate must be 0, as devices may have equal random keys, got"
            f" {dropout_rate}"
        )
    if not (isinstance(query_start, int) and query_start == 0):
        raise NotImplementedError(f"{_NAME}: query_start must be 0, got {query_start}")
    checked_shapes(query, key, value)
    parts = (1 if is_manual else size) * (2 if causal_load_balanced else 1)
    for name, x in (("query", query), ("key", key)):
        if x.shape[1] % parts:
            raise ValueError(
                f"{_NAME}: {name} must have a multiple of {parts} tokens on an axis of {size}"
                f" devices, got {list(x.shape)}"
            )
    options |= {"attn_mask_type": attn_mask_type, "window_size": window_size}
    attend: _Attend = functools.partial(dot_product_attention, **options)
    whole = [
        jax.ShapeDtypeStruct((len(x), whole_tokens(axis_name, x.shape[1]), *x.shape[2:]), x.dtype)
        for x in (query, key, value)
    ]
    jax.eval_shape(lambda *heads: attend(*heads, mask, bias), *whole)  # checks the arguments
    split = _Split(
        axis_name, size, causal_load_balanced, *checked_kind(attn_mask_type, window_size)
    )
    if size == 1:
        return attend(query, key, value, mask, bias)
    mask = mask if MASK_TYPES[attn_mask_type][1] else None
    local = functools.partial(_a2a if found == "a2a" else _all_gather, attend, split)
    if not is_manual:
        resource = active_mesh_resource()
        batch = free_axes((resource.fsdp_resource, resource.dp_resource), len(query))
        heads = free_axes((resource.tp_resource,), query.shape[2], key.shape[2])
        tokens = PartitionSpec(batch, axis_name, heads)

        def spec(x: Any) -> PartitionSpec:
            sizes = zip(np.shape(x)[:2], (batch, heads), strict=False)
            return PartitionSpec(*(axes if extent > 1 else None for extent, axes in sizes))

        specs = (tokens, tokens, tokens, spec(mask), spec(bias))
        names = {axis_name, *batch, *heads}
        local = jax.shard_map(local, in_specs=specs, out_specs=tokens, axis_names=names)
        query, key, value, mask, bias = (
            x if x is None else constrained(x, to, lambda x: x)
            for x, to in zip((query, key, value, mask, bias), specs, strict=True)
        )
    return local(query, key, value, mask, bias)


def split_for_context_parallel(batch: Any, cp_size: int, dim: int = 1) -> Any:
    """Returns whole sequences in the order in which equal shards have equal work, zig-zag.

    Of n devices, device r gets chunks r and 2n - 1 - r of the 2n equal chunks of each sequence.
    Reorder with the same arguments what goes with tokens: ids, shifted labels, loss masks.

    Args:
        batch: array of jax or numpy with all tokens in dimension ``dim``, or a tree of such arrays.
        cp_size: number of devices n, over which ``dim`` is then split.
        dim: dimension of the tokens, not negative.

    Returns:
        Arrays of the same kinds, shapes and dtypes.

    Raises:
        ValueError: an array's tokens cannot be cut into 2n equal chunks.

    Source: TransformerEngine's and Megatron-LM's order of tokens under context parallelism.
    """
    return _reordered("split_for_context_parallel", batch, cp_size, dim, False)


def join_context_parallel(batch: Any, cp_size: int, dim: int = 1) -> Any:
    """Returns whole sequences in their own order: the inverse of ``split_for_context_parallel``.

    Args:
        batch, cp_size, dim: as in ``split_for_context_parallel``.

    Raises:
        ValueError: an array's tokens cannot be cut into 2n equal chunks.

    Source: as of ``split_for_context_parallel``.
    """
    return _reordered("join_context_parallel", batch, cp_size, dim, True)


def _reordered(owner: str, batch: Any, size: int, dim: int, is_joining: bool) -> Any:
    def reordered(x: Any) -> Any:
        shape = np.shape(x)
        if not 0 <= dim < len(shape) or size < 1 or shape[dim] % (2 * size):
            raise ValueError(
                f"{owner}: batch must have a multiple of {2 * size} tokens (2 x cp_size) in"
                f" dimension {dim}, got {list(shape)}"
            )
        xp = np if isinstance(x, np.ndarray) else jnp
        pair, chunks = ((size, 2), dim + 1) if is_joining else ((2, size), dim)
        first, last = xp.moveaxis(
            x.reshape(*shape[:dim], *pair, shape[dim] // (2 * size), *shape[dim + 1 :]), chunks, 0
        )
        last = xp.flip(last, dim)
        whole = (
            xp.concatenate([first, last], dim) if is_joining else xp.stack([first, last], dim + 1)
        )
        return whole.reshape(shape)

    return jax.tree.map(reordered, batch)


def whole_tokens(axis_name: str, tokens: int) -> int:
    """Returns the length of sequences, whose part in an array is ``tokens`` long."""
    size, is_manual = axis_of(_NAME, "axis_name", axis_name)
    return tokens * size if is_manual else tokens


def token_positions(axis_name: str, tokens: int, causal_load_balanced: bool) -> jax.Array:
    """Returns the positions of an array's tokens in their sequences, int32 [tokens]."""
    size, is_manual = axis_of(_NAME, "axis_name", axis_name)
    order = np.arange(whole_tokens(axis_name, tokens), dtype=np.int32)
    if causal_load_balanced:
        order = split_for_context_parallel(order, size, 0)
    places = jnp.asarray(order)
    if not is_manual:
        return places
    return jax.lax.dynamic_slice_in_dim(places, jax.lax.axis_index(axis_name) * tokens, tokens)


class _Split(NamedTuple):
    """Sequences that are split over the devices of an axis, and what their queries see."""

    axis: str
    size: int
    is_balanced: bool
    is_causal: bool
    window: tuple[int, int] | None

    def in_order(self, x: jax.Array) -> jax.Array:
        """Returns tokens [b, s, ..] in their own order, from those by device."""
        return join_context_parallel(x, self.size) if self.is_balanced else x

    def by_device(self, x: jax.Array) -> jax.Array:
        """Returns tokens [b, s, ..] by device, from those in their own order."""
        return split_for_context_parallel(x, self.size) if self.is_balanced else x

    def queries_of(self, device: int, tokens: int) -> list[tuple[int, int]]:
        """Returns where a device's queries begin among all, and how many they are."""
        if not self.is_balanced:
            return [(device * tokens, tokens)]
        half = tokens // 2
        return [(device * half, half), ((2 * self.size - 1 - device) * half, half)]

    def keys_of(self, start: int, count: int, keys: int) -> slice:
        """Returns the keys, at least one, that some of ``count`` queries from ``start`` on see."""
        left, right = self.window or (-1, -1)
        right = 0 if self.is_causal else right
        first = max(min(start - left, keys - 1), 0) if left >= 0 else 0
        last = min(start + count + right, keys) if right >= 0 else keys
        return slice(first, max(last, first + 1))


def _all_gather(
    attend: _Attend, split: _Split, query: Any, key: Any, value: Any, mask: Any, bias: Any
) -> jax.Array:
    """Attends to the keys of all devices; backward gathers and attends again."""
    axis, size = split.axis, split.size
    rows = any(x is not None and x.shape[2] > 1 for x in (mask, bias))
    programs = [attend]
    if rows or split.is_causal or split.window is not None:
        programs = [
            functools.partial(_in_chunks, attend, split, split.queries_of(device, query.shape[1]))
            for device in range(size)
        ]

    def gathered(query: Any, key: Any, value: Any, mask: Any, bias: Any) -> Any:
        key, value = (
            split.in_order(jax.lax.all_gather(x, axis, axis=1, tiled=True)) for x in (key, value)
        )
        # Casts inside of a branch would sum its gradients over devices that take other branches.
        leaves, tree = jax.tree.flatten((query, key, value, mask, bias))
        return tree.unflatten(vary_alike(leaves))

    def own(grad: jax.Array) -> jax.Array:
        parts = split.by_device(grad)
        parts = parts.reshape(len(grad), size, -1, *grad.shape[2:])
        parts = jax.lax.all_to_all(parts, axis, 1, 1)
        return parts.sum(1, dtype=jnp.float32).astype(grad.dtype)

    @jax.custom_vjp
    def run(*given: Any) -> jax.Array:
        return jax.lax.switch(jax.lax.axis_index(axis), programs, *gathered(*given))

    def fwd(*given: Any) -> tuple[jax.Array, Any]:
        return run(*given), given

    def bwd(given: Any, grad: jax.Array) -> tuple[Any, ...]:
        pulls = [functools.partial(_pulled, program, grad) for program in programs]
        index = jax.lax.axis_index(axis)
        query, key, value, bias = jax.lax.switch(index, pulls, *gathered(*given))
        grads = query, own(key), own(value), None, bias
        return tuple(map(gradient_like, given, grads))

    run.defvjp(fwd, bwd)
    return run(query, key, value, mask, bias)


def _pulled(
    program: _Attend, grad: jax.Array, query: Any, key: Any, value: Any, mask: Any, bias: Any
) -> Any:
    """Returns the gradients of queries, keys, values and bias."""

    def of(query: Any, key: Any, value: Any, bias: Any) -> jax.Array:
        return program(query, key, value, mask, bias)

    return jax.vjp(of, query, key, value, bias)[1](grad)


def _in_chunks(
    attend: _Attend,
    split: _Split,
    chunks: list[tuple[int, int]],
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
) -> jax.Array:
    """Attends with each chunk of a device's queries to those of all keys that it sees."""
    found, at = [], 0
    for start, count in chunks:
        keys = split.keys_of(start, count, key.shape[1])
        of_scores = [
            x if x is None else x[
                :, :, slice(start, start + count) if x.shape[2] > 1 else slice(None),
                keys if x.shape[3] > 1 else slice(None),
            ]
            for x in (mask, bias)
        ]  # fmt: skip
        found.append(
            attend(query[:, at : at + count], key[:, keys], value[:, keys], *of_scores,
                   query_start=start - keys.start)
        )  # fmt: skip
        at += count
    return jnp.concatenate(found, 1)


def _a2a(
    attend: _Attend, split: _Split, query: Any, key: Any, value: Any, mask: Any, bias: Any
) -> jax.Array:
    """Attends to whole sequences with a device's part of the heads."""
    axis, size = split.axis, split.size
    heads, groups = query.shape[2], key.shape[2]
    if heads % size or (groups % size and size % groups):
        raise ValueError(
            f"{_NAME}: query's heads must be a multiple of the {size} devices of axis_name with"
            f" strategy 'a2a', and key's a multiple or a divisor, got {heads} and {groups}"
        )
    if groups % size:
        key, value = (jnp.repeat(x, size // groups, axis=2) for x in (key, value))
    query, key, value = (
        split.in_order(jax.lax.all_to_all(x, axis, 2, 1, tiled=True)) for x in (query, key, value)
    )
    mask, bias = (
        x
        if x is None or x.shape[1] == 1
        else jax.lax.dynamic_slice_in_dim(
            x, jax.lax.axis_index(axis) * (heads // size), heads // size, 1
        )
        for x in (mask, bias)
    )
    out = split.by_device(attend(query, key, value, mask, bias))
    return jax.lax.all_to_all(out, axis, 1, 2, tiled=True)
