"""Modules made of other modules, and checks of whether these must be called as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook as has_global_hook

from ...runtime.named_arguments import renamed
from .arguments import shown_name


class CompositeModule(torch.nn.Module):
    """Module that has parameters only in its child modules."""

    _get_name = shown_name

    def reset_parameters(self) -> None:
        """Sets the parameters of all child modules to new initial values, in place.

        Parameters on the meta device first get memory; see ``Linear.reset_parameters``.
        """
        self._call_children("reset_parameters")

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the ranks over which the child modules are split; call it before the first forward.

        Args:
            tp_group: a ``torch.distributed.ProcessGroup`` of ``tp_size`` ranks. None removes the
                group; forward then raises ValueError if it needs one.

        Raises:
            TypeError: ``tp_group`` is neither a process group nor None.
            ValueError: ``tp_group`` does not have ``tp_size`` ranks.
        """
        try:
            self._call_children("set_tensor_parallel_group", tp_group)
        except (TypeError, ValueError) as error:
            better = renamed(error, type(self).__name__, ("tp_group",), {})
            if better is None:
                raise
            raise better from error.__cause__

    def _call_children(self, method: str, *args: Any) -> None:
        """Calls the method named ``method`` on each child module that has one."""
        for child in self.children():
            call: Any = getattr(child, method, None)
            if call is not None:
                call(*args)


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
