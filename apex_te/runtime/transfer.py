"""Copies of tensors between devices without needless waiting."""

from __future__ import annotations

import torch


def moved(x: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns ``x`` on ``device``, in ``dtype`` if given, waiting only for copies to the CPU.

    A GPU runs the copy before the kernels that are launched next, so the host need not wait. A copy
    to the CPU with ``non_blocking=True`` might be read before it has arrived, so that one is waited
    for.
    """
    return x.to(device, dtype or x.dtype, non_blocking=device.type != "cpu")
