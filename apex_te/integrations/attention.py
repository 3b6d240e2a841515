"""Attention "apex_te" for models of transformers, which ``batch_invariant`` reaches."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..module.attention.backends import attend
from ..module.attention.candidates import Options
from ..module.attention.choice import choose
from ..module.attention.masks import Visibility
from ..runtime import invariance

_NAME = "apex_te"
# Arguments that some models pass and PyTorch's kernels do not know.
_UNKNOWN = ("position_bias", "s_aux", "softcap")


def register_attention() -> None:
    """Registers the implementation with transformers if that is loaded and has a registry."""
    if "transformers.modeling_utils" not in sys.modules:  # importing it takes seconds
        return
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:  # before transformers 4.53
        return
    AttentionInterface.register(_NAME, attention_forward)
    AttentionMaskInterface.register(_NAME, sdpa_mask)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention as transformers' "sdpa"; under ``batch_invariant`` with independent rows.

    Args:
        query, key, value: [b, h, sq, d], [b, g, sk, d], [b, g, sk, dv].
        attention_mask: bool, True = visible, or a bias; broadcasts to [b, h, sq, sk].

    Returns:
        The result [b, sq, h, dv], and None for the weights.
    """
    found = invariance.current(vars(module).get("_independent_rows", False))
    if not torch.compiler.is_compiling():
        vars(module)["_independent_rows"] = found
    if not found:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    owner = type(module).__name__
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{owner}: {name} must be None under batch_invariant")
    if dropout > 0.0:
        raise NotImplementedError(
            f"{owner}: dropout must be 0 in training under batch_invariant, got {dropout}"
        )
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    queries = query.shape[2]
    seen, bias = Visibility(), None
    if attention_mask is None:
        if queries > 1 and is_causal:
            key, value = key[:, :, :queries], value[:, :, :queries]  # a cache may be longer
            seen = Visibility("upper_left")
    elif attention_mask.dtype is torch.bool:
        seen = Visibility(hidden=attention_mask.logical_not())
    else:
        bias = attention_mask.to(query.dtype)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    options = Options(scale, independent_rows=True)
    path = choose(query, key, value, seen, bias, options)
    out = attend(query, key, value, bias, path, seen, options)
    return out.transpose(1, 2).contiguous(), None
