"""Caller of operations on lists of tensors, as Transformer Engine and apex have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class MultiTensorApply:
    """Callable that calls an operation on lists of tensors with its chunk size."""

    available = True
    warned = False
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        *args: Any,
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
