"""Formulas of MLPs and of experts' gates, found by what copies of them compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ..runtime.op_options import ClampedSwiglu
from . import _matching as matching
from ._probe import agree, numbers, probed, random, stand_in

# Activations of LayerNormMLP, by name: those of a gate, and those that are not gated.
_OF_GATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": functional.silu,
    "geglu": lambda x: functional.gelu(x, approximate="tanh"),
    "reglu": functional.relu,
    "glu": torch.sigmoid,
    "qgeglu": lambda x: x * torch.sigmoid(1.702 * x),
    "sreglu": lambda x: functional.relu(x).square(),
}
_PLAIN = {
    name: _OF_GATE[gated]
    for name, gated in (
        ("silu", "swiglu"), ("gelu", "geglu"), ("relu", "reglu"), ("qgelu", "qgeglu"),
        ("srelu", "sreglu"),
    )
}  # fmt: skip
_HIDDEN, _FFN = 8, 16
_SHIFT = 0.5


class MLPFormula(NamedTuple):
    """``second(act(first))``, or ``second(act(gate) * up)`` with the rows of the gate first."""

    first: tuple[str, ...]
    second: str
    activation: str
    dropout: str | None


class _Shift(nn.Module):
    """Stands for a dropout, to see where it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _SHIFT


def mlp_formula(mlp: nn.Module) -> MLPFormula | None:
    """Returns the formula of a module of linear layers without other parameters; None if other."""
    inner = dict(mlp.named_modules())
    linears = [name for name, m in inner.items() if matching.is_linear(m)]
    others = [m for name, m in inner.items() if name not in linears]
    if len(linears) not in (2, 3) or any(map(matching.hooked, inner.values())):
        return None
    if any(m._parameters or m._buffers for m in others):
        return None
    found: MLPFormula | None = probed(mlp, _find_mlp)
    return found


def _find_mlp(mlp: nn.Module) -> MLPFormula | None:
    """Returns the first formula with which the MLP agrees."""
    inner = dict(mlp.named_modules())
    shapes = {n: matching.linear_sizes(m) for n, m in inner.items() if matching.is_linear(m)}
    dropouts = [name for name, m in inner.items() if type(m) is nn.Dropout]
    for *first, second in itertools.permutations(shapes):
        (hidden, outer), (ffn, out) = shapes[first[0]], shapes[second]
        if any(shapes[name] != (hidden, outer) for name in first) or out != hidden:
            continue
        halves = len(first) == 1 and outer == 2 * ffn
        if not halves and outer != ffn:
            continue
        sizes = dict.fromkeys(first, (_HIDDEN, 2 * _FFN if halves else _FFN))
        new: dict[str, nn.Module] = {
            name: _linear(inner[name], *sizes.get(name, (_FFN, _HIDDEN))) for name in shapes
        }
        for last in (None, *dropouts):
            if any(name != last and inner[name].p for name in dropouts):
                continue
            for name in dropouts:
                new[name] = _Shift() if name == last else nn.Identity()
            copied = _copy(mlp, "", new)
            gated = halves or len(first) == 2
            for name in _OF_GATE if gated else _PLAIN:
                if _holds(copied, new, tuple(first), second, name, last):
                    # One that never drops now may get another probability later.
                    last = last or _last_dropout(mlp, new, dropouts, tuple(first), second, name)
                    return MLPFormula(tuple(first), second, name, last)
    return None


def _last_dropout(
    mlp: nn.Module, new: dict[str, nn.Module], dropouts: list[str], first: tuple[str, ...],
    second: str, activation: str,
) -> str | None:  # fmt: skip
    """Returns the dropout that ends an MLP whose dropouts have probability 0; None if none does."""
    for last in dropouts:
        copied = _copy(mlp, "", {**new, last: _Shift()})
        if _holds(copied, new, first, second, activation, last):
            return last
    return None


def _linear(like: Any, inner: int, outer: int) -> Any:
    """Returns a small layer of the class of ``like``, with or without a bias as that."""
    shape = (inner, outer) if matching.is_conv1d(like) else (outer, inner)
    bias = None if like.bias is None else nn.Parameter(random(outer))
    new = stand_in(like, {"weight": nn.Parameter(random(*shape)), "bias": bias})
    vars(new).update({"nf": outer} if matching.is_conv1d(like) else
                     {"in_features": inner, "out_features": outer})  # fmt: skip
    return new


def _copy(module: nn.Module, name: str, new: dict[str, nn.Module]) -> Any:
    """Returns a copy of a tree of modules in which some are others, by dotted name."""
    if name in new:
        return new[name]
    children = {
        key: None if child is None else _copy(child, f"{name}.{key}" if name else key, new)
        for key, child in module._modules.items()
    }
    return stand_in(module, {}, children)


def _holds(
    copied: Any, layers: dict[str, Any], first: tuple[str, ...], second: str, activation: str,
    last: str | None,
) -> bool:  # fmt: skip
    """Returns True if a copy computes the formula of its layers, in training or not."""
    x = random(6, _HIDDEN)
    x[2:4] *= 0.1
    x[4:] *= 1e4  # so that a clamp shows
    hidden = torch.cat([_applied(layers[name], x.double()) for name in first], -1)
    expected = _applied(layers[second], _activated(activation, hidden))
    if last is not None:
        expected = expected + _SHIFT
    for training in (False, True):
        copied.train(training)
        for shape in ((6, -1), (2, 3, -1)):
            out = copied(x.view(shape).clone())
            if not agree(out, expected.view(*out.shape[:-1], -1), 1e-5) or out.dim() != len(shape):
                return False
    return True


def _applied(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns the output of a linear layer in float64."""
    weight = layer.weight.double()
    out = x @ (weight if matching.is_conv1d(layer) else weight.t())
    return out if layer.bias is None else out + layer.bias.double()


def _activated(activation: str, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the activation of ``[rows, ffn]``, or of ``[rows, 2 ffn]`` if it is gated."""
    if activation in _PLAIN:
        return _PLAIN[activation](hidden)
    gate, up = hidden.chunk(2, -1)
    return _OF_GATE[activation](gate) * up


def gate_formula(experts: Any) -> str | ClampedSwiglu | None:
    """Returns what the gate of experts of Hugging Face computes; None if nothing that is known."""
    found: str | ClampedSwiglu | None = probed(experts, _find_gate)
    return found


def _find_gate(experts: Any) -> str | ClampedSwiglu | None:
    """Returns the first formula with which the gate agrees."""
    copied = stand_in(experts, {}, experts._modules)
    x = random(8, 2 * _FFN)
    x[:3] *= 10
    x[3:5] *= 1e4
    ordered = x if experts.is_concatenated else torch.cat([x[:, 0::2], x[:, 1::2]], 1)
    out, ordered = copied._apply_gate(x.clone()), ordered.double()
    for name in _OF_GATE:
        if agree(out, _activated(name, ordered), 1e-5):
            return name
    gate, up = ordered.chunk(2, 1)
    given = numbers(experts)
    for limit, alpha, offset in itertools.product(given, (1.0, *given), (0.0, 1.0)):
        low, mid = gate.clamp(max=limit), up.clamp(-limit, limit)
        if agree(out, low * torch.sigmoid(alpha * low) * (mid + offset), 1e-5):
            return ClampedSwiglu(limit, alpha, offset)
    return None
