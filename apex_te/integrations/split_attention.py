"""Models of transformers with sequences split over ranks: ``set_context_parallel_group``."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..module.attention.context_parallel.ranks import ContextRanks
from ..module.attention.dot_product import DotProductAttention
from .attention import register_attention

__all__ = ["set_context_parallel_group"]

_OWNER = "set_context_parallel_group"
_NAME = "apex_te_context_parallel"
_RANKS, _CORES = "_apex_te_context_ranks", "_apex_te_context_cores"
# Arguments by which models change scores, or say that rows hold several documents.
_UNKNOWN = ("position_bias", "s_aux", "softcap", "cu_seq_lens_q", "cu_seq_lens_k")
_Model = TypeVar("_Model", bound=torch.nn.Module)


def set_context_parallel_group(
    model: _Model, cp_group: Any, cp_comm_type: str = "all_gather"
) -> _Model:
    """Makes the attention of a transformers model expect sequences that are split over ranks.

    The model then takes this rank's tokens, position ids and shifted labels, as split by
    ``split_for_context_parallel``, without an attention mask. Gradients of parameters are this
    rank's terms of a sum over the ranks. Causal and bidirectional attention, grouped queries and
    sliding windows are supported; padding, packed documents, caches, attention dropout while
    training, and models that modify scores are not.

    Args:
        model: a transformers model, also after ``from_torch``; changed in place.
        cp_group: process group of the ranks; None for one rank, which takes whole sequences.
        cp_comm_type: ``"all_gather"``, ``"a2a"``, ``"p2p"`` or ``"a2a+p2p"``, as in
            ``DotProductAttention.set_context_parallel_group``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a transformers model with selectable attention, or ``cp_group``
            is not a process group.
        ValueError: ``cp_comm_type`` is unknown, or the model uses chunked attention.
    """
    layers = [layer for layer in model.modules() if isinstance(vars(layer).get("is_causal"), bool)]
    if not hasattr(model, "set_attn_implementation") or not layers:
        raise TypeError(
            f"{_OWNER}: model must be one of transformers with selectable attention, got "
            f"{type(model).__name__}"
        )
    ranks = ContextRanks(_OWNER, cp_group, comm_type=cp_comm_type)
    chunk = getattr(model.config, "attention_chunk_size", None)
    if ranks.size > 1 and chunk is not None:
        raise ValueError(f"{_OWNER}: model must not attend within chunks, got chunks of {chunk}")
    register_attention()
    _register()
    for layer in layers:
        vars(layer)[_RANKS], vars(layer)[_CORES] = ranks, {}
    chosen: Any = model
    chosen.set_attn_implementation(_NAME if ranks.size > 1 else "apex_te")
    return model


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention_forward)
    AttentionMaskInterface.register(_NAME, _no_mask)


def _no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Returns no mask: a rank's rows are not those of whole sequences, whose mask is known."""
    if attention_mask is not None:
        raise NotImplementedError(
            f"{_OWNER}: attention_mask must be None with split sequences, got "
            f"{list(attention_mask.shape)}; leave it out, with labels of -100 for padding"
        )


def _attention_forward(
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
    """Computes attention of this rank's tokens [b, h, s, d] as transformers' "sdpa" of all."""
    owner = type(module).__name__
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{owner}: {name} must be None with split sequences")
    if attention_mask is not None or key.shape[2] != query.shape[2]:
        got = "a mask" if attention_mask is not None else f"{key.shape[2]} keys, as of a cache"
        raise ValueError(
            f"{owner}: attention must be that of {query.shape[2]} tokens to themselves, without a "
            f"mask, with split sequences, got {got}"
        )
    window = kwargs.get("sliding_window")
    causal = module.is_causal if is_causal is None else is_causal
    heads, groups = query.shape[1], key.shape[1]
    sizes = query.shape[3], value.shape[3]
    asked = (heads, groups, sizes, causal, window, scaling, dropout)
    core = vars(module)[_CORES].get(asked)
    if core is None:
        ranks = vars(module)[_RANKS]
        core = DotProductAttention(
            heads, sizes, groups, dropout, "bshd", "causal" if causal else "no_mask",
            None if window is None else (window - 1, 0 if causal else window - 1),
            softmax_scale=scaling, cp_group=ranks.group, cp_comm_type=ranks.comm_type,
        )  # fmt: skip
        vars(module)[_CORES][asked] = core
    core.train(module.training)
    out = core(*(x.transpose(1, 2) for x in (query, key, value)))
    return out.unflatten(-1, (heads, -1)), None
