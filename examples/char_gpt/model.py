"""A small GPT whose four linear layers per block are ``apex_te.Linear``."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

import apex_te


class Block(nn.Module):
    """Pre-norm Transformer block with causal self-attention; [batch, context, dim] in and out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = apex_te.Linear(dim, 3 * dim)
        self.proj = apex_te.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.fc1 = apex_te.Linear(dim, 4 * dim)
        self.fc2 = apex_te.Linear(4 * dim, dim)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, dim = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, dim / heads]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, context, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.mlp_norm(x)), approximate="tanh"))


class CharGPT(nn.Module):
    """Maps ids, int64 [batch, context], to logits [batch, context, vocabulary]."""

    def __init__(self, vocabulary: int, context: int, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"CharGPT: dim must be a multiple of heads ({heads}), got {dim}")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.empty(context, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of deviation 0.02; the two layers that end a residual branch smaller."""
        residual = 0.02 / math.sqrt(2 * len(self.blocks))
        nn.init.normal_(self.positions, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear | apex_te.Linear):
                ends_branch = name.endswith((".proj", ".fc2"))
                nn.init.normal_(module.weight, std=residual if ends_branch else 0.02)
                nn.init.zeros_(module.bias)

    def linears(self) -> list[apex_te.Linear]:
        """The layers that compute in FP8 under ``fp8_autocast``."""
        return [m for m in self.modules() if isinstance(m, apex_te.Linear)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
        """Appends ``length`` sampled ids to ``ids`` [1, n]; ``generator`` is a CPU generator."""
        for _ in range(length):
            logits = self(ids[:, -self.context :])[:, -1].float().cpu() / 0.8
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, chosen.to(ids.device)], dim=1)
        return ids
