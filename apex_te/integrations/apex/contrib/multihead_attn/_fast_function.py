"""Base of the autograd functions over ``fast_multihead_attn``."""

from __future__ import annotations

from typing import Any

import torch


class FastFunction(torch.autograd.Function):
    """Function whose tensors ``apply`` casts to autocast's dtype, if autocast is enabled."""

    @classmethod
    def apply(cls, *args: Any) -> torch.Tensor:
        """Calls the function with the arguments of its ``forward``."""
        device = next(a.device.type for a in args if isinstance(a, torch.Tensor))
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            args = tuple(a.to(dtype) if _is_float(a) else a for a in args)
        return super().apply(*args)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
