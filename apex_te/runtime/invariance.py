"""The mode in which a row's results do not depend on the other rows of a batch, for each thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..op_builder.jit import env
from .named_arguments import check_flags
from .tracing import is_compiling

__all__ = ["batch_invariant", "current", "is_batch_invariant"]

_F = TypeVar("_F", bound=Callable[..., Any])
_DEFAULT = env.boolean("APEX_TE_BATCH_INVARIANT", False)


class _Local(threading.local):
    """Holds a thread's state: the mode, and the states around the innermost ``with`` block."""

    def __init__(self) -> None:
        self.enabled = _DEFAULT
        self.outer: Any = None


local = _Local()


class batch_invariant:
    """Context manager and decorator in which a row's output does not depend on the batch.

    A token's output is then bitwise the same for any number and values of other rows, and as one
    query with a KV cache or within the whole sequence, so that a rollout and the training forward
    over its tokens have equal log-probabilities. The mode applies to the calling thread, and the
    mode of a forward also applies to its recompute in backward. Gradients are computed as without
    it. ``APEX_TE_BATCH_INVARIANT=1`` in the environment turns it on globally.

    It covers the linear layers, norms, attention, ``TransformerLayer`` and ``linear_log_probs``, in
    bf16, fp16, fp32 and with ``BlockScaling`` and ``RowwiseScaling``. Anything else that cannot be
    invariant raises NotImplementedError: other recipes, experts, layers split over ranks, dropout.

    Args:
        enabled: False turns the mode off inside.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """

    def __init__(self, enabled: bool = True) -> None:
        check_flags("batch_invariant", enabled=enabled)
        self.enabled = enabled

    def __enter__(self) -> None:
        local.outer = (local.enabled, local.outer)
        local.enabled = self.enabled

    def __exit__(self, *exc: object) -> None:
        local.enabled, local.outer = local.outer

    def __call__(self, function: _F) -> _F:
        """Decorates ``function`` so that each call runs in the mode."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with batch_invariant(self.enabled):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


def is_batch_invariant() -> bool:
    """Returns True if the mode ``batch_invariant`` is on in this thread."""
    return local.enabled


def current(previous: bool) -> bool:
    """Returns the mode of a module's forward; of a recompute, in backward, it is ``previous``."""
    if not is_compiling() and torch._C._current_graph_task_id() != -1:
        return previous
    return local.enabled
