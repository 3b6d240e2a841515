"""Checks, float32 copies and device scalars of apex's functions over lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex_te.ops import multi_tensor
from apex_te.optimizers._bucket import dense_order

Tensors = list[torch.Tensor]
_READ = frozenset(
    ("g", "in", "x", "y", "tensors", "read")
)  # names of lists that no function writes
_LOW = frozenset((torch.float16, torch.bfloat16))


def take_lists(
    op: str, chunk_size: int, tensor_lists: Sequence[Tensors], names: str, optional: str = ""
) -> list[Tensors]:
    """Checks the arguments that apex's functions have in common, and returns the lists.

    Tensors that are dense in another order of dimensions, such as channels_last, become views in
    the order of their memory, together with those that belong to them.

    Args:
        op: the function's name, for errors.
        chunk_size: apex's number of elements for a block; apex_te's kernels choose their own.
        tensor_lists: the lists of tensors.
        names: the names of the lists, with spaces between.
        optional: name of one more list that may be given, for errors; "" if there is none.

    Returns:
        The lists.

    Raises:
        ValueError: another number of lists, or a chunk size that is not positive.
    """
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size must be at least 1, got {chunk_size}")
    lists = list(tensor_lists)
    wanted = names.split()
    if len(lists) != len(wanted) and not (optional and len(lists) == len(wanted) + 1):
        more = f" or {len(wanted) + 1} with {optional}" if optional else ""
        raise ValueError(
            f"{op}: tensor_lists must be {len(wanted)} lists ({', '.join(wanted)}){more}, "
            f"got {len(lists)}"
        )
    written = next((i for i, name in enumerate(wanted) if name not in _READ), 0)
    return _in_memory_order(lists, written)


def _in_memory_order(lists: list[Tensors], written: int) -> list[Tensors]:
    """Permutes tensors so that those of the list number ``written`` are contiguous if they can."""
    tensors = [t for t in lists[written] if isinstance(t, torch.Tensor)]
    if all(t.is_contiguous() for t in tensors) or len(set(map(len, lists))) > 1:
        return lists
    rows = list(zip(*lists, strict=True))
    for i, row in enumerate(rows):
        order = dense_order(row[written])
        if order is not None and all(t.shape == row[written].shape for t in row):
            rows[i] = tuple(t.permute(order) for t in row)
    return [list(tensors) for tensors in zip(*rows, strict=True)]


def take_mode(op: str, mode: int) -> bool:
    """Returns True if weight decay is decoupled (mode 1), False if weight decay is L2 (mode 0).

    Args:
        op: the function's name, for errors.
        mode: apex's number.

    Raises:
        ValueError: the mode is neither 0 nor 1.
    """
    if mode not in (0, 1):
        raise ValueError(f"{op}: mode must be 0 (L2) or 1 (decoupled weight decay), got {mode}")
    return mode == 1


def float32(tensors: Tensors) -> Tensors:
    """Returns the list with float32 copies in place of its 16-bit tensors.

    A list without 16-bit tensors is returned itself.
    """
    low = [t for t in tensors if _is_low(t)]
    if not low:
        return tensors
    copies = [torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in low]
    multi_tensor.scale(low, copies, 1.0)
    made = iter(copies)
    return [next(made) if _is_low(t) else t for t in tensors]


def write_back(tensors: Tensors, copies: Tensors) -> None:
    """Writes float32 copies back to the 16-bit tensors that they were made from, rounded.

    Args:
        tensors: the list that was passed to ``float32``.
        copies: the list that ``float32`` returned.
    """
    if copies is not tensors:
        pairs = [(c, t) for c, t in zip(copies, tensors, strict=True) if c is not t]
        multi_tensor.scale([c for c, _ in pairs], [t for _, t in pairs], 1.0)


def _is_low(tensor: object) -> bool:
    # False for an object that is not a tensor, which the op refuses by name.
    return isinstance(tensor, torch.Tensor) and tensor.dtype in _LOW


def unless_noop(noop_flag: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Returns ``factor`` as a tensor [1], or 1 if ``noop_flag`` is not 0, without a host sync."""
    return factor.reshape(1).masked_fill(noop_flag.reshape(1) != 0, 1.0)


def clip_factor(norm: torch.Tensor, max_norm: float | torch.Tensor) -> torch.Tensor:
    """Returns LAMB's factor for gradients of global norm ``norm``: max_norm / norm, at most 1."""
    return torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))


def scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """Returns a float32 tensor ``[1]`` that holds ``value``, on the device of ``like``."""
    return torch.full((1,), value, dtype=torch.float32, device=like.device)
