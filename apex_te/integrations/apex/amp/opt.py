"""Wrapper of an optimizer, of apex's first interface."""

from __future__ import annotations

from typing import Any


class OptimWrapper:
    """Wrapper that passes everything to an optimizer except ``scale_loss``, which the handle does.

    Args:
        optimizer: the optimizer.
        amp_handle: the handle of ``amp.init``.
        num_loss: accepted, unused.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int = 1) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss

    def scale_loss(self, loss: Any) -> Any:
        """Does what the handle's ``scale_loss`` does."""
        return self._amp_handle.scale_loss(loss, self._optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)
