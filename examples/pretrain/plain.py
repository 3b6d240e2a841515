"""Block and loss of plain PyTorch with the same parameters, and torchao's, to compare with."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from config import Shape
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from user_error import needs


class PlainBlock(nn.Module):
    """Pre-norm block with the parameters of ``model.te_block``, in the same order.

    Args:
        shape: sizes of the model.
        eps: of the norms.
        dtype, device: of the parameters.
    """

    def __init__(self, shape: Shape, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        own: dict[str, Any] = {"dtype": dtype, "device": device}
        self.size = shape.dim // shape.heads
        self.parts = (shape.dim, shape.groups * self.size, shape.groups * self.size)
        self.grouped = shape.heads != shape.groups
        self.attention_norm = nn.RMSNorm(shape.dim, eps, **own)
        self.qkv = nn.Linear(shape.dim, sum(self.parts), bias=False, **own)
        self.proj = nn.Linear(shape.dim, shape.dim, bias=False, **own)
        self.mlp_norm = nn.RMSNorm(shape.dim, eps, **own)
        self.fc1 = nn.Linear(shape.dim, 2 * shape.ffn, bias=False, **own)
        self.fc2 = nn.Linear(shape.ffn, shape.dim, bias=False, **own)

    def forward(self, x: torch.Tensor, rotary_pos_emb: torch.Tensor) -> torch.Tensor:
        """Applies the block to ``[sequences, context, dim]``; angles as ``TransformerLayer``."""
        angles = rotary_pos_emb[: x.shape[1], 0, 0]
        parts = self.qkv(self.attention_norm(x)).split(self.parts, -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q, k = rotated(q, angles), rotated(k, angles)
        # The kernel that DotProductAttention chooses on Hopper.
        kernel = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if x.is_cuda else nullcontext()
        with kernel:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.proj(out.transpose(1, 2).flatten(-2))
        gate, up = self.fc1(self.mlp_norm(x)).chunk(2, -1)
        return x + self.fc2(F.silu(gate) * up)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates heads [.., context, size] by angles [context, size], computing in float32."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * angles.cos() + turned * angles.sin()).to(x.dtype)


def plain_loss(
    hidden: torch.Tensor, norm: nn.Module, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Returns the loss summed over targets, through all logits."""
    logits = F.linear(norm(hidden), weight).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def to_torchao(model: nn.Module) -> None:
    """Has torchao's tensorwise float8 training replace the linear layers of the blocks.

    Raises:
        UserError: torchao is not installed.
    """
    needs("torchao.float8", "--layers torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    blocks: Any = model.blocks
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    for block in blocks:
        convert_to_float8_training(block, config=config)
