"""Callables in place of a model's ``forward`` that stay with copies and pickles of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import nn


class WrappedForward:
    """Callable that replaces a model's ``forward`` and runs it in ``_run`` of a subclass.

    A copy or pickle of the model contains an object that runs the copy.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.active = True
        self.inner: Any = vars(model).get("forward")
        vars(model)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):
            return self._rebound(args[0])(*args[1:], **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with what is around it."""
        raise NotImplementedError

    def _rebound(self, model: nn.Module) -> WrappedForward:
        """Puts this, or one like it for a copy of the model, in the place of a method made of it.

        ``Accelerator.unwrap_model(keep_fp32_wrapper=False)`` binds what it finds to the model, like
        a function.
        """
        own = self
        if model is not self.model:
            own = copy.copy(self)
            own.model = model
            if isinstance(self.inner, WrappedForward):
                own.inner = self.inner._rebound(model)
        vars(model)["forward"] = own
        return own

    @property
    def __wrapped__(self) -> Any:
        """Returns the forward that runs inside, from which tools read names of arguments."""
        if self.inner is not None:
            return self.inner
        return MethodType(type(self.model).forward, self.model)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that runs inside, which no bound method holds: Dynamo makes none."""
        if self.inner is None:
            return type(self.model).forward(self.model, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def is_in_use(self, model: nn.Module) -> bool:
        """Returns True if calls of ``model`` run this object, even through wrappers around it."""
        return self.active and any(forward is self for forward in wrapped_forwards(model))

    def remove(self) -> None:
        """Removes this object, or makes it do nothing if another library wrapped the forward."""
        self.active = False
        own = vars(self.model)
        if own.get("forward") is self:
            if self.inner is None:
                del own["forward"]
            else:
                own["forward"] = self.inner


def wrapped_forwards(model: nn.Module) -> Iterator[Any]:
    """Yields the ``forward`` set on the instance ``model``, then each one that it wraps."""
    forward = vars(model).get("forward")
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)
