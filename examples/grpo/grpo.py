#!/usr/bin/env python3
"""Trains a small decoder by GRPO on its own rollouts, whose log-probabilities are the training's.

    python examples/grpo/grpo.py
    python examples/grpo/grpo.py --fp8-recipe blockwise --steps 40

Rollouts are generated token by token with a KV cache, each with its log-probability. The training
forward takes whole sequences. Under ``apex_te.batch_invariant`` both give the same bits; the
program prints the KL divergence between them at the first step, under it and without.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

import apex_te

VOCABULARY, HIDDEN, HEADS, LAYERS = 32, 64, 2, 2
PROMPT, NEW = 6, 12  # tokens
CLIP = 0.2


class Policy(nn.Module):
    """Decoder that maps tokens, int64 [batch, length], to hidden states; its head is a weight."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, **place)
        self.layers = nn.ModuleList(
            apex_te.TransformerLayer(
                HIDDEN, 2 * HIDDEN, HEADS, attn_input_format="bshd", layer_number=number,
                normalization="RMSNorm", activation="swiglu", hidden_dropout=0.0,
                attention_dropout=0.0, device=device, params_dtype=dtype,
            )
            for number in range(1, LAYERS + 1)
        )  # fmt: skip
        self.norm = apex_te.RMSNorm(HIDDEN, **place)
        self.head = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, **place) * 0.05)
        angles = apex_te.RotaryPositionEmbedding(HIDDEN // HEADS)(PROMPT + NEW)
        self.register_buffer("angles", angles.to(device), persistent=False)

    def forward(
        self, ids: torch.Tensor, cache: apex_te.InferenceParams | None = None
    ) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, inference_params=cache)
        return self.norm(x)

    def log_probs(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities of tokens from the hidden states before them."""
        found = apex_te.linear_log_probs(hidden, self.head, tokens)
        assert isinstance(found, torch.Tensor)
        return found


class Rollout(NamedTuple):
    """Generated sequences, int64 [batch, PROMPT + NEW], and log-probabilities of the new tokens."""

    ids: torch.Tensor
    log_p: torch.Tensor


@torch.no_grad()
def generate(policy: Policy, prompts: torch.Tensor, generator: torch.Generator) -> Rollout:
    """Samples new tokens one after the other, each with its log-probability."""
    policy.eval()  # a cache is for evaluation
    cache = apex_te.InferenceParams(len(prompts), PROMPT + NEW)
    ids, new, log_p = prompts, prompts, []
    for _ in range(NEW):
        hidden = policy(new, cache)[:, -1]
        cache.sequence_len_offset += new.shape[1]
        chances = (hidden @ policy.head.t()).float().softmax(-1)
        new = torch.multinomial(chances, 1, generator=generator)
        log_p.append(policy.log_probs(hidden, new[:, 0]))
        ids = torch.cat((ids, new), 1)
    policy.train()
    return Rollout(ids, torch.stack(log_p, 1))


def log_probs(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities of the new tokens by one forward over whole sequences."""
    hidden = policy(ids[:, :-1])[:, PROMPT - 1 :]
    return policy.log_probs(hidden, ids[:, PROMPT:])


def divergence(old: torch.Tensor, new: torch.Tensor) -> float:
    """Estimates the KL divergence of two policies from the tokens of the first: never negative."""
    ratio = (new - old).double()
    return (torch.expm1(ratio) - ratio).mean().item()


def reward(ids: torch.Tensor) -> torch.Tensor:
    """Returns the share of even numbers among the new tokens, float32 [batch]."""
    return (ids[:, PROMPT:] % 2 == 0).float().mean(1)


def loss_of(log_p: torch.Tensor, rollout: Rollout, group: int) -> torch.Tensor:
    """Returns GRPO's loss: clipped ratios times each completion's advantage in its group."""
    rewards = reward(rollout.ids).view(-1, group)
    advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
    advantages = advantages.view(-1, 1)
    ratio = (log_p - rollout.log_p).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the example; returns both divergences at the first step and the rewards by step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=20)
    add("--groups", type=int, default=4, help="prompts per step")
    add("--group", type=int, default=8, help="completions per prompt")
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=1)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--fp8-recipe", choices=["blockwise"], help="train and generate in FP8")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    policy = Policy(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)
    generator = torch.Generator(device).manual_seed(args.seed)

    def region() -> AbstractContextManager[None]:
        return apex_te.fp8_autocast(args.fp8_recipe) if args.fp8_recipe else nullcontext()

    def prompts() -> torch.Tensor:
        shape = (args.groups, PROMPT)
        drawn = torch.randint(VOCABULARY, shape, generator=generator, device=device)
        return drawn.repeat_interleave(args.group, 0)

    result: dict[str, Any] = {"rewards": []}
    with region(), torch.no_grad():
        rollout = generate(policy, prompts(), generator)
        result["kl_without"] = divergence(rollout.log_p, log_probs(policy, rollout.ids))
    for step in range(args.steps):
        with apex_te.batch_invariant(), region():
            rollout = generate(policy, prompts(), generator)
            log_p = log_probs(policy, rollout.ids)
        if step == 0:
            result["kl"] = divergence(rollout.log_p, log_p.detach())
            print(f"KL at step 0: {result['kl']:.3g}; without: {result['kl_without']:.3g}")
        loss = loss_of(log_p, rollout, args.group)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        result["rewards"].append(reward(rollout.ids).mean().item())
        print(f"step {step}: reward {result['rewards'][-1]:.3f}", flush=True)
    return result


if __name__ == "__main__":
    main()
