#!/usr/bin/env python3
"""Teaches a GPT of minGPT's size to sort digits: it reads a sequence and then writes it sorted.

    python examples/sort/sort.py --use-te --use-fp8
    python examples/sort/sort.py --use-te --ln-mlp --use-fp8 --fp8-recipe blockwise

Without switches only the baseline is trained: plain PyTorch, fp32 on a CPU, bf16 on a GPU.
``--ln-mlp`` makes norm and MLP of a block one ``apex_te.LayerNormMLP``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import apex_te

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

sys.path.pop(0)  # where the folder jax would pass for the package

HELD_OUT = 512  # sequences
# A sequence is held out if its digits, weighted by these odd numbers, sum to a multiple of 4.
WEIGHTS = (3, 5, 7, 11, 13, 17, 19, 23)


class Block(nn.Module):
    """Pre-norm Transformer block with causal self-attention; [batch, length, dim] in and out."""

    def __init__(self, dim: int, heads: int, te: bool, ln_mlp: bool) -> None:
        super().__init__()
        linear = apex_te.Linear if te else nn.Linear
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = linear(dim, 3 * dim)
        self.proj = linear(dim, dim)
        self.mlp: nn.Module
        if te and ln_mlp:
            self.mlp = apex_te.LayerNormMLP(dim, 4 * dim)
        else:
            self.mlp = nn.Sequential(
                nn.LayerNorm(dim),
                linear(dim, 4 * dim),
                nn.GELU(approximate="tanh"),
                linear(4 * dim, dim),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, dim / heads]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(x)


class SortGPT(nn.Module):
    """Maps digits, int64 [batch, length], to logits of the next digit."""

    def __init__(self, digits: int, length: int, args: argparse.Namespace, te: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(digits, args.dim)
        self.positions = nn.Embedding(length, args.dim)
        self.blocks = nn.ModuleList(
            Block(args.dim, args.heads, te, args.ln_mlp) for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, digits)
        # The same numbers for every kind of block: their own initialisations draw different ones.
        generator = torch.Generator().manual_seed(torch.initial_seed())
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Sort:
    """Sequences of random digits, and the same digits sorted."""

    measure = "held-out sequences sorted"

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        generator = torch.Generator().manual_seed(0)
        drawn = self.draw(8 * HELD_OUT, generator)
        self.held_out = drawn[is_held_out(drawn)][:HELD_OUT].to(args.device)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Random digits, int64 [count, length]."""
        return torch.randint(self.args.digits, (count, self.args.length), generator=generator)

    def model(self, te: bool) -> nn.Module:
        """A GPT of plain PyTorch modules, or with apex_te's linear layers."""
        return SortGPT(self.args.digits, 2 * self.args.length - 1, self.args, te)

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Sequences that are not held out."""
        digits = self.draw(self.args.batch, generator)
        last = digits[:, -1]
        other = torch.where(last == 0, last + 1, last - 1)  # changes the sum by an odd number
        digits[:, -1] = torch.where(is_held_out(digits), other, last)
        return (digits.to(self.args.device),)

    def predicted(self, model: nn.Module, digits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits [batch, length, digits] and targets of the sorted half."""
        target = digits.sort(-1).values
        logits = model(torch.cat([digits, target[:, :-1]], 1))
        return logits[:, self.args.length - 1 :].float(), target

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Mean cross-entropy in nats per sorted digit."""
        logits, target = self.predicted(model, batch[0])
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    def evaluate(self, model: nn.Module) -> float:
        """Share of the held-out sequences that greedy decoding sorts without an error.

        Every digit being right after the right ones is what makes a decoded sequence right.
        """
        logits, target = self.predicted(model, self.held_out)
        return (logits.argmax(-1) == target).all(-1).float().mean().item()


def is_held_out(digits: torch.Tensor) -> torch.Tensor:
    """Returns True, in a bool [count], for each sequence of the test set."""
    weights = torch.tensor(WEIGHTS)[torch.arange(digits.shape[1]) % len(WEIGHTS)]
    return (digits * weights).sum(-1) % 4 == 0


def main(argv: Sequence[str] | None = None) -> list[common.Result]:
    """Runs the example and returns one result per run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_arguments(parser, steps=400, lr=4e-3, name="sort")
    add = parser.add_argument
    add("--ln-mlp", action="store_true", help="one LayerNormMLP instead of four layers")
    add("--batch", type=int, default=64, help="sequences per step")
    add("--length", type=int, default=6, help="digits of a sequence")
    add("--digits", type=int, default=10, help="digits there are")
    # minGPT's gpt-nano.
    add("--layers", type=int, default=3)
    add("--dim", type=int, default=48)
    add("--heads", type=int, default=3)
    args = common.parse(parser, argv)
    if args.ln_mlp and not any(run.te for run in args.runs):
        parser.error("--ln-mlp needs --use-te or --use-fp8")
    if args.dim % args.heads:
        parser.error(f"--dim must be a multiple of --heads ({args.heads}), got {args.dim}")
    return common.compare(Sort(args), args)


if __name__ == "__main__":
    main()
