"""apex's apex_C: lists of tensors as one flat tensor, and views of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from apex_te._version import __version__ as __version__

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the elements of dense tensors of one dtype, one after the other, in a new tensor."""
    _check("flatten", tensors)
    return _flatten_dense_tensors(tensors)


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of ``flat`` in the shapes of ``tensors``."""
    _check("unflatten", tensors)
    count = sum(t.numel() for t in tensors)
    if flat.shape != (count,):
        raise ValueError(
            f"apex_C.unflatten: flat must have shape [{count}], got {list(flat.shape)}"
        )
    return list(_unflatten_dense_tensors(flat, tensors))


def _check(op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Checks that tensors are some, dense and, to be flattened, of one dtype."""
    if not tensors:
        raise ValueError(f"apex_C.{op}: tensors must have a tensor at least, got none")
    for i, t in enumerate(tensors):
        if t.layout is not torch.strided:
            raise TypeError(f"apex_C.{op}: tensors[{i}] must be dense, got {t.layout}")
        if op == "flatten" and t.dtype is not tensors[0].dtype:
            raise TypeError(
                f"apex_C.{op}: tensors[{i}] must have dtype {tensors[0].dtype}, got {t.dtype}"
            )
