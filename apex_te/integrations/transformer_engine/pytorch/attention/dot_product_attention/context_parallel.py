"""Packed sequences padded and split for context parallelism."""

from __future__ import annotations

from typing import Any

import torch

from ......module.attention.context_parallel.split import split_for_context_parallel

__all__ = [
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "pad_thd_sequences_for_cp",
]


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


def generate_positional_ids_for_cp(
    cu_seqlens: torch.Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """Returns the positions of tokens in sequences as ``pad_thd_sequences_for_cp`` pads them, [t'].

    Args:
        cu_seqlens: where sequences begin and end before they are padded, [n + 1].
        divisibility_factor: the number that divides the padded lengths.
        dtype: dtype of the positions.

    Raises:
        ValueError: ``divisibility_factor`` is below 1.
    """
    total = int(cu_seqlens[-1])
    ids = torch.empty(total, dtype=torch.uint8, device=cu_seqlens.device)
    *_, padded = pad_thd_sequences_for_cp(ids, ids, cu_seqlens, divisibility_factor, 0, 0)
    place = torch.arange(int(padded[-1]), device=cu_seqlens.device)
    own = torch.searchsorted(padded, place, right=True) - 1
    return (place - padded[own]).to(dtype)


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: torch.Tensor,
    input_ids_padded: torch.Tensor,
    labels_padded: torch.Tensor,
    position_ids_padded: torch.Tensor | None = None,
    cp_group: Any = None,
    qvk_format: str = "thd",
) -> tuple[torch.Tensor | None, ...]:
    """Returns this rank's input ids, labels and position ids of packed sequences.

    Args:
        cu_seqlens_padded: where whole sequences begin and end, padding included, [n + 1].
        input_ids_padded, labels_padded, position_ids_padded: of all tokens, [t] or [1, t]; None
            stays None.
        cp_group: group of the ranks; None leaves the batch as it is.
        qvk_format: must be ``"thd"``.

    Raises:
        NotImplementedError: ``qvk_format`` is another.
        ValueError: a sequence cannot be cut into two chunks for each rank.
    """
    if qvk_format != "thd":
        raise NotImplementedError(
            f"get_batch_on_this_cp_rank: qvk_format must be 'thd', got {qvk_format!r}"
        )
    cu = cu_seqlens_padded.to(torch.int32)
    tensors = (input_ids_padded, labels_padded, position_ids_padded)
    return tuple(
        x if x is None else split_for_context_parallel(x, cp_group, x.dim() - 1, cu)
        for x in tensors
    )
