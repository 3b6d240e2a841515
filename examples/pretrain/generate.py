"""Continues a prompt, one token at a time, with keys and values of earlier tokens cached."""

from __future__ import annotations

from typing import Any

import torch

import apex_te


@torch.no_grad()
def generate(
    model: Any,
    ids: list[int],
    length: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    use_cache: bool = True,
) -> list[int]:
    """Returns up to ``length`` tokens that the model continues ``ids`` with.

    Ends where the model's context does. All ranks of a model that is split must call it alike.

    Args:
        model: a ``model.Llama``, in the precision of the region around the call.
        ids: the prompt, at least one token.
        length: most tokens to return.
        temperature: divides the logits before a token is drawn; 0 takes the likeliest.
        seed: of the draws.
        use_cache: False computes all tokens again for each new one, which plain layers need.
    """
    device = model.tokens.weight.device
    length = min(length, model.context - len(ids))
    generator = torch.Generator().manual_seed(seed)
    cache = apex_te.InferenceParams(1, model.context) if use_cache else None
    new, found = list(ids), []
    was_training = model.training
    model.eval()
    for _ in range(length):
        tokens = torch.tensor([new], device=device)
        cu_seqlens = None
        if cache is not None:
            cache.pre_step({0: len(new)})
        elif model.packed:
            cu_seqlens = torch.tensor([0, len(new)], dtype=torch.int32, device=device)
        logits = model(tokens, cu_seqlens=cu_seqlens, cache=cache)[0].float().cpu()
        if temperature > 0:
            shares = (logits / temperature).softmax(-1)
            chosen = int(torch.multinomial(shares, 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        found.append(chosen)
        new = [chosen] if cache is not None else [*new, chosen]
    model.train(was_training)
    return found
