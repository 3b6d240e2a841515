"""Names of parameters in PyTorch's state dicts, for variables of Flax's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

# Children of a Transformer layer.
_LAYER = {
    "attention": "self_attention",
    "self_attention": "self_attention",
    "encoder_decoder_attention": "inter_attention",
    "mlp": "layernorm_mlp",
    "output_layernorm": "layernorm",
}
# Children of attention, and whose rows they are.
_PROJECTIONS = {
    "qkv": ("query", "key", "value"),
    "query": ("query",),
    "kv": ("key", "value"),
    "key": ("key",),
    "value": ("value",),
}
_MLP = {"wi_kernel": "fc1_weight", "wi_bias": "fc1_bias"} | {
    "wo_kernel": "fc2_weight",
    "wo_bias": "fc2_bias",
}


# Parameters of a mixture of experts with the number of dimensions that a GEMM contracts.
_MOE = {
    "gate_kernel": ("router.weight", 1),
    "wi": ("fc1.weight", 1),
    "wi_bias": ("fc1.bias", 0),
    "wo": ("fc2.weight", 1),
    "wo_bias": ("fc2.bias", 0),
    "expert_bias": ("router.expert_bias", None),
}


class Leaf(NamedTuple):
    """One parameter of a Flax module.

    Attributes:
        name: its name.
        keys: names of its tensors in the PyTorch module; several tensors are stacked in the
            parameter's first dimension of features.
        inputs: number of its leading dimensions that a GEMM contracts; PyTorch has them as the last
            dimension. 0 for a vector; None for a parameter that PyTorch has in the same form.
        is_stack: True if its first dimension are experts, in PyTorch, too.
    """

    name: str
    keys: tuple[str, ...]
    inputs: int | None
    is_stack: bool = False


class Part(NamedTuple):
    """Flax module at a path in a tree of variables, with its parameters.

    Several Flax modules may share the prefix of one PyTorch module's keys.
    """

    path: tuple[str, ...]
    prefix: str
    leaves: tuple[Leaf, ...]


def parts(params: Mapping[str, Any], prefix: str = "") -> Iterator[Part]:
    """Yields each module of the collection "params"; ``prefix`` is that of all keys."""
    return _walk(params, (), prefix, ())


def _walk(
    params: Mapping[str, Any], path: tuple[str, ...], prefix: str, rows: tuple[str, ...]
) -> Iterator[Part]:
    """Returns a module and those below it; ``rows``: whose rows its GEMM computes."""
    yield Part(path, prefix, tuple(_leaves(params, rows)))
    if "gate_kernel" in params:  # the FP8 state of experts is that of PyTorch's submodules
        for name in ("fc1", "fc2"):
            yield Part((*path, name), f"{prefix}{name}.", ())
    children = {name: value for name, value in params.items() if isinstance(value, Mapping)}
    is_attention = "out" in children and ("qkv" in children or "query" in children)
    is_layer = "mlp" in children and ("attention" in children or "self_attention" in children)
    for name, value in children.items():
        child = name
        below: tuple[str, ...] = ()
        if is_attention:
            is_cross = path[-1:] == ("encoder_decoder_attention",)
            child, below = _projection(name, children, is_cross)
        elif is_layer:
            child = _LAYER.get(name, name)
        yield from _walk(value, (*path, name), f"{prefix}{child}.", below)


def _projection(
    name: str, children: Mapping[str, Any], is_cross: bool
) -> tuple[str, tuple[str, ...]]:
    """Returns the name of a child of attention, and whose rows its GEMM computes."""
    if name not in _PROJECTIONS:
        return {"out": "proj", "DotProductAttention_0": "core_attention"}.get(name, name), ()
    first = "qkv" if "qkv" in children else "query"
    if is_cross and name != first:
        return "key_value", _PROJECTIONS[name]
    has_norm = "scale" in children[first]
    plain = "query_layer" if is_cross else "qkv"
    return f"layernorm_{'query' if is_cross else 'qkv'}" if has_norm else plain, _PROJECTIONS[name]


def _leaves(params: Mapping[str, Any], rows: tuple[str, ...]) -> Iterator[Leaf]:
    """Returns the parameters of one module."""
    norm = "layer_norm_" if "kernel" in params or "wi_kernel" in params else ""
    for name, value in params.items():
        if isinstance(value, Mapping):
            continue
        if name == "softmax_offset":
            yield Leaf(name, (name,), 0)
        elif name in ("scale", "ln_bias"):
            yield Leaf(name, (f"{norm}{'weight' if name == 'scale' else 'bias'}",), 0)
        elif "gate_kernel" in params and name in _MOE:
            key, inputs = _MOE[name]
            yield Leaf(name, (key,), inputs, name.startswith("w"))
        elif name in _MLP:
            yield Leaf(name, (_MLP[name],), 1 if name.endswith("kernel") else 0)
        elif name in ("kernel", "bias"):
            inputs = 0
            if name == "kernel":
                bias = params.get("bias")
                inputs = 1 if bias is None else np.ndim(value) - np.ndim(bias)
            word = "weight" if name == "kernel" else "bias"
            yield Leaf(name, tuple(f"{row}_{word}" for row in rows) or (word,), inputs)
        else:
            yield Leaf(name, (name,), None)
