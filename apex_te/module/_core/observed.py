"""Checks for parts that a module must call as modules, because others observe or wrap the calls."""

from __future__ import annotations

import torch
from torch.nn.modules.module import _has_any_global_hook as has_global_hook


def is_observed(module: torch.nn.Module) -> bool:
    """Returns True if the module has a hook or a replaced ``forward`` that must see its calls."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or has_global_hook()
    )


def takes_residual(module: torch.nn.Module) -> bool:
    """Returns True if ``module.forward_with_residual`` may be called instead of the module.

    Wrappers (for checkpointing, sharding, compiling) pass this method through, and a call of it
    would bypass them.
    """
    return hasattr(type(module), "forward_with_residual") and not is_observed(module)
