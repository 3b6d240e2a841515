"""Frozen Llama layers with LoRA adapters on every projection, with bases of several precisions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import apex_te
from apex_te import from_torch, recipe


class Shape(NamedTuple):
    """Sizes of a Llama layer; ``heads`` of queries, ``groups`` of keys and values."""

    hidden: int
    ffn: int
    heads: int
    groups: int


SHAPES = {"Llama-3-8B": Shape(4096, 14336, 32, 8), "tiny": Shape(64, 192, 4, 2)}


class LoRALinear(nn.Module):
    """A frozen linear layer plus a low-rank product, which with ``fused`` the base adds itself."""

    def __init__(self, base: Any, rank: int, alpha: float, fused: bool = False) -> None:
        super().__init__()
        self.base = base
        self.fused = fused
        options = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Parameter(torch.empty(rank, base.in_features, **options))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **options))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)
        self.scaling = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return self.base.forward_low_rank(x, self.down, self.up, self.scaling)
        low = F.linear(F.linear(x, self.down), self.up)
        return self.base(x) + low * self.scaling


class Layer(nn.Module):
    """Llama's layer of torch's own modules."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, ffn, heads, groups = shape
        self.size = hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden, 1e-5), nn.RMSNorm(hidden, 1e-5)
        for name, inner, outer in (
            ("q_proj", hidden, hidden),
            ("k_proj", hidden, groups * self.size),
            ("v_proj", hidden, groups * self.size),
            ("o_proj", hidden, hidden),
            ("gate_proj", hidden, ffn),
            ("up_proj", hidden, ffn),
            ("down_proj", ffn, hidden),
        ):
            setattr(self, name, nn.Linear(inner, outer, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        parts = (self.q_proj(normed), self.k_proj(normed), self.v_proj(normed))
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(out.transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


def make_stack(
    shape: Shape,
    layers: int,
    kind: str,
    scaling: recipe.Recipe | None,
    rank: int,
    device: str,
    dtype: torch.dtype,
    fused: bool = False,
) -> nn.Sequential:
    """Makes frozen layers of equal random weights with adapters, held in FP8 with ``scaling``.

    ``kind`` is "torch", or "apex_te" for the same layers after ``from_torch``.
    """
    torch.manual_seed(0)
    made = []
    for _ in range(layers):  # one at a time: never all in high precision
        with torch.device(device):
            layer = nn.Sequential(Layer(shape).to(dtype))
        if kind == "apex_te":
            with apex_te.fp8_model_init(enabled=scaling is not None, recipe=scaling):
                from_torch(layer, include="*")
        layer.requires_grad_(False)
        made.append(layer[0])
    for layer in made:
        for name, module in list(layer.named_children()):
            if name.endswith("_proj"):
                setattr(layer, name, LoRALinear(module, rank, 2.0 * rank, fused))
    return nn.Sequential(*made)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns a tensor, or those that a tensor subclass holds."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in plain_tensors(getattr(tensor, name))]


def tensor_bytes(tensor: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in plain_tensors(tensor))
