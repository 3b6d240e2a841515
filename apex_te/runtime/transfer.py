"""Copies of scalars between devices."""

from __future__ import annotations

import torch

__all__ = ["moved"]


def moved(x: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns ``x`` on ``device``, in ``dtype`` if given, without waiting where that is safe.

    A GPU orders the copy before what is launched next. The CPU does not: what torch copies to it
    with ``non_blocking=True`` may be read before it has arrived, so this waits for such a copy.
    """
    return x.to(device, dtype or x.dtype, non_blocking=device.type != "cpu")
