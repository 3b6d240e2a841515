"""A small GPT of plain PyTorch blocks or of ``TransformerLayer``, with the same start."""

from __future__ import annotations

import math

import parallel
import torch
from torch import nn
from torch.nn import functional as F

from apex_te.module.transformer_layer import TransformerLayer

LINEARS_PER_BLOCK = 4  # QKV, projection, and the MLP's two
ENDS_BRANCH = ("proj.weight", "fc2.weight", "fc2_weight")


class Block(nn.Module):
    """Pre-norm Transformer block with causal self-attention; [batch, context, dim] in and out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, dim = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, dim / heads]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, context, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.mlp_norm(x)), approximate="tanh"))


def te_block(dim: int, heads: int, layout: parallel.Layout) -> TransformerLayer:
    """Returns the block as one module, with parameters of the same shapes in the same order.

    With tensor parallelism it is this rank's part; with sequence parallelism it takes and gives
    [context / ranks, batch, dim].
    """
    split = layout.tp > 1
    return TransformerLayer(
        dim,
        4 * dim,
        heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        attn_input_format="sbhd" if layout.split_rows else "bshd",
        set_parallel_mode=split,
        tp_group=layout.tp_group if split else None,
        sequence_parallel=layout.split_rows,
    )


class CharGPT(nn.Module):
    """Maps ids, int64 [batch, context], to logits [batch, context, vocabulary].

    ``te``: blocks are ``TransformerLayer``, which computes in FP8 under ``fp8_autocast``;
    embeddings, last norm and head stay PyTorch's own and in high precision. ``layout``: how blocks
    are split over ranks, which needs ``te``; the rest is whole on each.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        dim: int,
        heads: int,
        te: bool,
        layout: parallel.Layout | None = None,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"CharGPT: dim must be a multiple of heads ({heads}), got {dim}")
        self.layout = layout = parallel.Layout() if layout is None else layout
        if layout.tp > 1 and not te:
            raise ValueError("CharGPT: te must be True with tensor parallelism, got False")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(
            te_block(dim, heads, layout) if te else Block(dim, heads) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights of deviation 0.02; the two layers that end a residual branch smaller.

        The numbers come from torch's seed alone, whatever the blocks drew for themselves; of a
        split weight all are drawn and this rank's are kept.
        """
        generator = torch.Generator().manual_seed(torch.initial_seed())
        residual = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = residual if name.endswith(ENDS_BRANCH) else 0.02
                whole = torch.empty(self.layout.whole_shape(parameter))
                nn.init.normal_(whole, std=std, generator=generator)
                parameter.copy_(self.layout.cut(name, whole, parameter))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def linears(self) -> int:
        """Returns the number of linear layers in blocks, which compute in FP8 if it is on."""
        return LINEARS_PER_BLOCK * len(self.blocks)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        if self.layout.split_rows:
            x = parallel.own_rows(x.transpose(0, 1), self.layout.tp_group)
        for block in self.blocks:
            x = block(x)
        if self.layout.split_rows:
            x = parallel.all_rows(x, self.layout.tp_group).transpose(0, 1)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
        """Appends ``length`` sampled ids to ``ids`` [1, n]; ``generator`` is a CPU generator."""
        for _ in range(length):
            logits = self(ids[:, -self.context :])[:, -1].float().cpu() / 0.8
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, chosen.to(ids.device)], dim=1)
        return ids
