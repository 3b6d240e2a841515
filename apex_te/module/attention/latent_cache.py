"""Latent attention of new tokens to cached latents, whose keys and values are not computed.

With up-projections K and V of a head, ``q . (K c) = (K^T q) . c`` and ``sum_i w_i V c_i = V sum_i
w_i c_i``: the queries take K, the result V, and all heads attend to one key and value, the latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...fp8.parameter.parameter import FP8Parameter
from .inference_params import Cached, InferenceParams, Step, extended


def extended_latents(
    owner: str,
    params: InferenceParams,
    layer: int | None,
    latent: torch.Tensor,
    pe: torch.Tensor,
    form: str,
    training: bool,
) -> tuple[Cached, bool]:
    """Caches normalised latents [..., c] and rotated parts [..., 1, p] of new tokens.

    Returns all tokens' [..., 1, c + p] as the keys of ``Cached``, whose values are empty, and True
    if no sequence had earlier tokens.
    """
    joined = torch.cat((latent.unsqueeze(-2), pe), -1)
    # One tensor holds the keys; its first columns are the values.
    cached = extended(owner, params, layer, joined, joined[..., :0], form, training)
    if cached.step is None:
        return cached, params.sequence_len_offset == 0
    # A CUDA graph may be replayed for later tokens.
    return cached, isinstance(cached.step, Step) and not any(cached.step.before)


def step_options(owner: str, cached: Cached, mask_type: str) -> dict[str, Any]:
    """Returns the arguments of attention that follow from the cache, for ``mask_type``."""
    options: dict[str, Any] = {"attn_mask_type": cached.mask_type(owner, mask_type)}
    if cached.step is not None:
        q, kv, longest_q, longest_kv = cached.lengths()
        options |= {
            "attention_mask": None, "cu_seqlens_q": q, "cu_seqlens_kv": kv,
            "max_seqlen_q": longest_q, "max_seqlen_kv": longest_kv, "cu_seqlens_q_padded": None,
            "cu_seqlens_kv_padded": cached.key_starts,
        }  # fmt: skip
    return options


def is_absorbing_faster(tokens: int, latent: int, heads: int) -> bool:
    """Returns True if so many new tokens of a sequence take less work with latents as keys.

    Scores and sums then have ``latent`` elements, not those of a key and a value, ``heads`` in sum;
    but no cached token needs its ``latent * heads`` products for each head.
    """
    return tokens * (2 * latent - heads) < latent * heads


def plain_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a weight in ``dtype``, decoded if it is held in FP8."""
    return weight.dequantize(dtype) if isinstance(weight, FP8Parameter) else weight.to(dtype)


def attend_to_latents(
    attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    q: torch.Tensor,
    weight: torch.Tensor,
    rotary: int,
) -> torch.Tensor:
    """Returns attention's result [..., h * v] of queries whose keys are latents.

    Args:
        attend: attention of queries in two parts, for latents [..., h, c] and for rotated parts
            [..., h, p], to sums of latents [..., h, c].
        q: rotated queries [..., h, n + p].
        weight: up-projection [h * (n + v), c].
        rotary: p.
    """
    heads, n = q.shape[-2], q.shape[-1] - rotary
    weight = plain_weight(weight, q.dtype).view(heads, -1, weight.shape[1])
    out = attend(_by_head(q[..., :n], weight[:, :n]), q[..., n:])
    return _by_head(out, weight[:, n:].transpose(1, 2)).flatten(-2)


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` [..., h, a] times ``weight`` [h, a, b], [..., h, b]."""
    rows = x.flatten(0, -3).transpose(0, 1)
    return torch.bmm(rows, weight).transpose(0, 1).view(*x.shape[:-1], weight.shape[2])
