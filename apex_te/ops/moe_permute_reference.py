"""Token permutation in plain PyTorch, differentiable: the specification of ``moe_permute``.

Each token has ``width`` places for copies of it: one for each expert of a mask, or k for expert
indices. ``rows``, which ``rows_of`` returns and the other functions take, is int64 [tokens, width]:
for each place the copy's row in the permuted matrix, or -1 if there is no copy.
"""

from __future__ import annotations

import torch


def rows_of(
    routing_map: torch.Tensor,
    *,
    map_type: str = "mask",
    align_size: int = 1,
    num_rows: int | None = None,
) -> torch.Tensor:
    """Returns for each copy of a token its row, int64 [tokens, width], or -1 without a copy.

    ``routing_map`` and other arguments are those of ``moe_permute.make_map``; width is the number
    of experts for a mask and k for indices. Copies beyond ``num_rows`` are dropped.
    """
    if map_type == "mask":
        routed = routing_map != 0
        counts = routed.sum(0)
        numbers = routed.cumsum(0) - 1
    else:
        routed = routing_map >= 0
        experts = routing_map.clamp(min=0).long()
        num_experts = int(experts.max()) + 1 if experts.numel() else 1
        taken = torch.nn.functional.one_hot(experts, num_experts) * routed.unsqueeze(-1)
        numbers = taken.flatten(0, 1).cumsum(0).view_as(taken) - 1
        numbers = numbers.gather(2, experts.unsqueeze(-1)).squeeze(-1)
        counts = taken.sum((0, 1))
    padded = (counts + align_size - 1) // align_size * align_size
    starts = padded.cumsum(0) - padded
    rows = numbers + (starts if map_type == "mask" else starts[experts])
    if num_rows is not None:
        routed = routed & (rows < num_rows)
    return rows.masked_fill(~routed, -1)


def permute(
    inp: torch.Tensor, rows: torch.Tensor, num_rows: int, probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies tokens, and their probs if given, to the rows of the permuted matrix.

    Args:
        inp: [tokens, hidden].
        rows: int64 [tokens, width] from ``rows_of``, -1 without a copy.
        num_rows: number of rows of the result; rows without a copy are zeros.
        probs: [tokens, width].

    Returns:
        (permuted rows [num_rows, hidden], permuted probs [num_rows] or None without probs).
    """
    tokens, slots = (rows >= 0).nonzero(as_tuple=True)
    target = rows[tokens, slots]
    out = inp.new_zeros(num_rows, inp.shape[1]).index_put((target,), inp[tokens])
    if probs is None:
        return out, None
    return out, probs.new_zeros(num_rows).index_put((target,), probs[tokens, slots])


def unpermute(
    inp: torch.Tensor, rows: torch.Tensor, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums each token's copies, times their probs, in the dtype of ``inp``.

    Args:
        inp: [num_rows, hidden].
        rows: int64 [tokens, width] from ``rows_of``, -1 without a copy.
        probs: [tokens, width], factors of the copies; None stands for ones.

    Returns:
        [tokens, hidden] in the dtype of ``inp``; zeros for a token without copies.
    """
    tokens, slots = (rows >= 0).nonzero(as_tuple=True)
    copies = inp[rows[tokens, slots]]
    if probs is not None:
        copies = copies * probs[tokens, slots].to(inp.dtype).unsqueeze(-1)
    return inp.new_zeros(rows.shape[0], inp.shape[1]).index_add(0, tokens, copies)


def sort_chunks(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """Reorders chunks of rows: chunk i of the result is chunk ``sorted_index[i]`` of ``inp``.

    ``inp`` is [rows, hidden]; ``split_sizes``, the number of rows of each chunk, and
    ``sorted_index`` are integers [chunks]. Rows after the last chunk are zeros.
    """
    sizes, order = split_sizes.long(), sorted_index.long()
    chunks = torch.arange(int(sizes.sum()), device=inp.device).split(sizes.tolist())
    sources = torch.cat([sizes.new_empty(0), *(chunks[i] for i in order.tolist())])
    targets = torch.arange(sources.numel(), device=inp.device)
    return torch.zeros_like(inp).index_put((targets,), inp[sources])
