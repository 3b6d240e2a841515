#!/usr/bin/env python3
"""Teaches an encoder and decoder in the style of T5 to copy sequences of random tokens.

    python examples/t5_copy/t5_copy.py --use-te --use-fp8
    python examples/t5_copy/t5_copy.py --use-fp8 --fp8-recipe tensorwise --fp8-format hif8

Source sequences have different lengths and are padded; the decoder reads them through cross
attention alone. Without switches only the baseline is trained: plain PyTorch, fp32 on a CPU, bf16
on a GPU. apex_te's model is made of ``TransformerLayer`` and starts with the same weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

sys.path.pop(0)  # where the folder jax would pass for the package

from apex_te import TransformerLayer

PAD, BEGIN, END = 0, 1, 2  # the tokens to copy are those after these
SPECIAL = 3
HELD_OUT = 256  # sequences


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh form, which apex_te's layers compute."""
    return F.gelu(x, approximate="tanh")


def plain_layer(kind: type[nn.Module], dim: int, heads: int) -> nn.Module:
    """PyTorch's own layer of the same form."""
    options: dict[str, Any] = {"activation": gelu, "batch_first": True, "norm_first": True}
    return kind(dim, heads, 4 * dim, 0.0, **options)


def te_layer(dim: int, heads: int, decoder: bool) -> TransformerLayer:
    """An encoder layer that hides padding, or a causal decoder layer with cross attention."""
    return TransformerLayer(
        dim,
        4 * dim,
        heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal" if decoder else "padding",
        layer_type="decoder" if decoder else "encoder",
        attn_input_format="bshd",
    )


class T5Copy(nn.Module):
    """Maps a source and the target so far, int64 [batch, length], to logits of the next token."""

    def __init__(self, vocabulary: int, length: int, args: argparse.Namespace, te: bool) -> None:
        super().__init__()
        dim, heads, count = args.dim, args.heads, args.layers
        self.te = te
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        plain = [plain_layer(nn.TransformerEncoderLayer, dim, heads) for _ in range(count)]
        plain += [plain_layer(nn.TransformerDecoderLayer, dim, heads) for _ in range(count)]
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)
        for parameter in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(parameter, std=dim**-0.5)
        layers = plain
        if te:
            layers = [
                converted(layer, te_layer(dim, heads, i >= count)) for i, layer in enumerate(plain)
            ]
        self.encoder, self.decoder = nn.ModuleList(layers[:count]), nn.ModuleList(layers[count:])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token and position, [batch, length, dim]."""
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]]

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, x = self.embed(source), self.embed(target)
        padding = source == PAD  # True: hidden
        if self.te:
            hidden, seen = padding[:, None, None], torch.zeros_like(target, dtype=torch.bool)
            for layer in self.encoder:
                memory = layer(memory, hidden)
            for layer in self.decoder:
                x = layer(x, encoder_output=memory, enc_dec_attn_mask=(seen[:, None, None], hidden))
        else:
            length = target.shape[1]
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            for layer in self.encoder:
                memory = layer(memory, src_key_padding_mask=padding)
            for layer in self.decoder:
                x = layer(x, memory, future, memory_key_padding_mask=padding, tgt_is_causal=True)
        return self.head(self.norm(x))


@torch.no_grad()
def converted(plain: Any, layer: Any) -> nn.Module:
    """``layer`` with the weights of PyTorch's ``plain``."""

    def copy(
        target: nn.Module, names: Sequence[str], weight: torch.Tensor, bias: torch.Tensor
    ) -> None:
        parts = zip(names, weight.chunk(len(names)), bias.chunk(len(names)), strict=True)
        for name, part, part_bias in parts:
            target.get_parameter(f"{name}weight").copy_(part)
            target.get_parameter(f"{name}bias").copy_(part_bias)

    def norm(target: nn.Module, source: Any) -> None:
        copy(target, ["layer_norm_"], source.weight, source.bias)

    attention, source = layer.self_attention, plain.self_attn
    norm(attention.layernorm_qkv, plain.norm1)
    names = ["query_", "key_", "value_"]
    copy(attention.layernorm_qkv, names, source.in_proj_weight, source.in_proj_bias)
    copy(attention.proj, [""], source.out_proj.weight, source.out_proj.bias)
    if layer.layer_type == "decoder":
        cross, source = layer.inter_attention, plain.multihead_attn
        rows = cross.layernorm_query.out_features
        weight, bias = source.in_proj_weight, source.in_proj_bias
        norm(cross.layernorm_query, plain.norm2)
        copy(cross.layernorm_query, ["query_"], weight[:rows], bias[:rows])
        copy(cross.key_value, names[1:], weight[rows:], bias[rows:])
        copy(cross.proj, [""], source.out_proj.weight, source.out_proj.bias)
    norm(layer.layernorm_mlp, plain.norm3 if layer.layer_type == "decoder" else plain.norm2)
    copy(layer.layernorm_mlp, ["fc1_"], plain.linear1.weight, plain.linear1.bias)
    copy(layer.layernorm_mlp, ["fc2_"], plain.linear2.weight, plain.linear2.bias)
    return layer


class Copy:
    """Random token sequences of random lengths."""

    measure = "held-out sequences copied"

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        generator = torch.Generator().manual_seed(0)
        # No sequence of training is likely to be among so few of so many possible ones.
        self.held_out = self.draw(HELD_OUT, generator)

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Sources [count, length] and targets [count, length + 1], which end with END, padded."""
        args = self.args
        shape = (count, args.length)
        source = torch.randint(SPECIAL, SPECIAL + args.tokens, shape, generator=generator)
        lengths = torch.randint(args.length // 2, args.length + 1, (count, 1), generator=generator)
        position = torch.arange(args.length + 1)
        source = source.where(position[:-1] < lengths, PAD)
        target = F.pad(source, (0, 1), value=PAD).where(position != lengths, END)
        return source.to(args.device), target.to(args.device)

    def model(self, te: bool) -> nn.Module:
        """Encoder and decoder of PyTorch's layers or of apex_te's, with the same weights."""
        return T5Copy(SPECIAL + self.args.tokens, self.args.length + 1, self.args, te)

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """The next sources and targets."""
        return self.draw(self.args.batch, generator)

    def logits(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """fp32 [batch, length + 1, vocabulary], of each token of the target after those before."""
        source, target = batch
        begun = F.pad(target[:, :-1], (1, 0), value=BEGIN)
        return model(source, begun).float()

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Mean cross-entropy in nats per token."""
        logits = self.logits(model, batch)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=PAD)

    def evaluate(self, model: nn.Module) -> float:
        """Share of the held-out sequences that greedy decoding copies without an error.

        Every token being right after the right ones is what makes a decoded sequence right.
        """
        target = self.held_out[1]
        right = self.logits(model, self.held_out).argmax(-1) == target
        return (right | (target == PAD)).all(-1).float().mean().item()


def main(argv: Sequence[str] | None = None) -> list[common.Result]:
    """Runs the example and returns one result per run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_arguments(parser, steps=250, lr=2e-3, name="t5_copy")
    add = parser.add_argument
    add("--batch", type=int, default=64, help="sequences per step")
    add("--length", type=int, default=12, help="tokens of the longest sequence; half: the shortest")
    add("--tokens", type=int, default=29, help="different tokens")
    add("--layers", type=int, default=2, help="of the encoder, and of the decoder")
    add("--dim", type=int, default=64)
    add("--heads", type=int, default=4)
    args = common.parse(parser, argv)
    if args.dim % args.heads:
        parser.error(f"--dim must be a multiple of --heads ({args.heads}), got {args.dim}")
    return common.compare(Copy(args), args)


if __name__ == "__main__":
    main()
