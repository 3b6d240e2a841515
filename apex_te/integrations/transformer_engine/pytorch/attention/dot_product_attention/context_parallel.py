"""Packed sequences padded for context parallelism, the part that apex_te supports."""

from __future__ import annotations

import torch

__all__ = ["pad_thd_sequences_for_cp"]


def pad_thd_sequences_for_cp(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads each packed sequence to a multiple of a number of tokens.

    Args:
        input_ids, labels: tokens and labels of all sequences, [t] or [1, t].
        cu_seqlens: where sequences begin and end, [n + 1].
        divisibility_factor: the number that divides the new lengths.
        padding_token_id, padding_label_id: token and label after each sequence.

    Returns:
        ``(input_ids, labels, cu_seqlens)`` of the padded sequences, the first two of shape [t'].

    Raises:
        ValueError: ``divisibility_factor`` is below 1, or a tensor has another shape.
    """
    owner = "pad_thd_sequences_for_cp"
    if divisibility_factor < 1:
        raise ValueError(f"{owner}: divisibility_factor must be above 0, got {divisibility_factor}")
    tokens, marks = input_ids.reshape(-1), labels.reshape(-1)
    if tokens.shape != marks.shape or cu_seqlens.dim() != 1:
        raise ValueError(
            f"{owner}: labels must have as many elements as input_ids, and cu_seqlens one "
            f"dimension, got {list(labels.shape)}, {list(input_ids.shape)} and "
            f"{list(cu_seqlens.shape)}"
        )
    lengths = cu_seqlens.diff()
    rooms = (lengths + divisibility_factor - 1) // divisibility_factor * divisibility_factor
    padded = torch.cat((cu_seqlens.new_zeros(1), rooms.cumsum(0).to(cu_seqlens.dtype)))
    total = int(padded[-1])
    place = torch.arange(total, device=cu_seqlens.device)
    own = torch.searchsorted(padded, place, right=True) - 1
    offset = place - padded[own]
    is_token = (offset < lengths[own]).to(tokens.device)
    source = (cu_seqlens[own] + offset)[is_token.to(own.device)].to(tokens.device).long()
    out = []
    for values, filler in ((tokens, padding_token_id), (marks, padding_label_id)):
        wide = values.new_full((total,), filler)
        wide[is_token] = values[source]
        out.append(wide)
    return out[0], out[1], padded
