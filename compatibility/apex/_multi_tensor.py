"""Checks, float32 copies and device scalars of apex's functions over lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from apex_te.ops import multi_tensor

Tensors = list[torch.Tensor]
_LOW = frozenset((torch.float16, torch.bfloat16))


def take_lists(
    op: str, chunk_size: int, tensor_lists: Sequence[Tensors], names: str, optional: str = ""
) -> list[Tensors]:
    """Returns the lists, one for each of ``names``, of which ``optional`` ones may be missing.

    ``chunk_size`` is apex's work split, which the suite's kernels choose themselves.

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
    return lists


def take_mode(op: str, mode: int) -> bool:
    """Returns True if weight decay is decoupled (mode 1), False if it is L2 (mode 0)."""
    if mode not in (0, 1):
        raise ValueError(f"{op}: mode must be 0 (L2) or 1 (decoupled weight decay), got {mode}")
    return mode == 1


def float32(tensors: Tensors) -> Tensors:
    """Returns the list with float32 copies of its 16-bit tensors, or itself if it has none."""
    low = [t for t in tensors if _is_low(t)]
    if not low:
        return tensors
    copies = [torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in low]
    multi_tensor.scale(low, copies, 1.0)
    made = iter(copies)
    return [next(made) if _is_low(t) else t for t in tensors]


def write_back(tensors: Tensors, copies: Tensors) -> None:
    """Rounds copies that ``float32`` made into the tensors they came from."""
    if copies is not tensors:
        pairs = [(c, t) for c, t in zip(copies, tensors, strict=True) if c is not t]
        multi_tensor.scale([c for c, _ in pairs], [t for _, t in pairs], 1.0)


def _is_low(tensor: object) -> bool:
    # What is no tensor passes, for the op to refuse by name.
    return isinstance(tensor, torch.Tensor) and tensor.dtype in _LOW


def unless_noop(noop_flag: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Returns the device scalar ``factor`` [1], or 1 where ``noop_flag`` is set; nothing waits."""
    return factor.reshape(1).masked_fill(noop_flag.reshape(1) != 0, 1.0)


def clip_factor(norm: torch.Tensor, max_norm: float | torch.Tensor) -> torch.Tensor:
    """Returns LAMB's factor for gradients of global norm ``norm``: max_norm / norm, at most 1."""
    return torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))


def scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """Returns ``value`` as one float32 element on the device of ``like``."""
    return torch.full((1,), value, dtype=torch.float32, device=like.device)


def not_served(function: str, reason: str) -> Any:
    """Returns a function of apex's name that raises NotImplementedError with the reason."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{function}: not served by apex_te: {reason}; see docs/apex.md")

    call.__name__ = call.__qualname__ = function.rpartition(".")[2]
    call.__doc__ = f"Raises NotImplementedError: {reason}."
    return call
