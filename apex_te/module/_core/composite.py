"""Base class of modules that are made of other modules, and hand calls on to these."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CompositeModule"]


class CompositeModule(torch.nn.Module):
    """Module without parameters of its own, whose child modules have them."""

    def reset_parameters(self) -> None:
        """Gives all parameters new values; those on the meta device are made first.

        See ``Linear.reset_parameters``.
        """
        self._call_children("reset_parameters")

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the ranks over which the module is split; see ``Linear.set_tensor_parallel_group``.

        Args:
            tp_group: a ``torch.distributed.ProcessGroup`` of ``tp_size`` ranks, or None.
        """
        self._call_children("set_tensor_parallel_group", tp_group)

    def _call_children(self, method: str, *args: Any) -> None:
        """Calls ``method`` of each child module that has it."""
        for child in self.children():
            call: Any = getattr(child, method, None)
            if call is not None:
                call(*args)
