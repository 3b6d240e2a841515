"""``scale_loss``, ``disable_casts``, and the handle that says whether functions cast."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from .... import amp
from ....amp._model import AmpForward
from ._amp_state import amp_state, inner_optimizer
from .opt import OptimWrapper

# (module, name, decorator) of each function to replace once amp casts.
registered: list[tuple[Any, str, Any]] = []


class AmpHandle:
    """State of the casts of one ``initialize``: on until ``deactivate``, and where not disabled."""

    def __init__(self, models: list[torch.nn.Module], verbose: bool = False) -> None:
        self._active = True
        self._verbose = verbose
        forwards = [model.__dict__.get("forward") for model in models]
        self._forwards = [each for each in forwards if isinstance(each, AmpForward)]
        self._replaced = []
        for module, name, decorate in registered:
            original = getattr(module, name)
            function = decorate(original)
            setattr(module, name, function)
            self._replaced.append((module, name, original, function))
        registered.clear()

    def is_active(self) -> bool:
        """Returns True if functions cast their arguments."""
        return self._active

    @property
    def verbose(self) -> bool:
        """True if ``amp.init`` was asked to be verbose."""
        return self._verbose

    def deactivate(self) -> None:
        """Ends the casts and puts registered functions back."""
        self._active = False
        for module, name, original, function in reversed(self._replaced):
            if getattr(module, name, None) is function:
                setattr(module, name, original)
        self._replaced.clear()

    @contextlib.contextmanager
    def disable_casts(self) -> Iterator[None]:
        """Context manager without casts, in decorated functions and prepared models."""
        active, casts = self._active, [forward.casts for forward in self._forwards]
        self._active = False
        for forward in self._forwards:
            forward.casts = dataclasses.replace(forward.casts, autocast=None)
        try:
            with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
                yield
        finally:
            self._active = active
            for forward, before in zip(self._forwards, casts, strict=True):
                forward.casts = before

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Returns a wrapper of an optimizer, of apex's first interface."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Any, optimizer: Any) -> Any:
        """Raises RuntimeError, as in apex: ``amp.scale_loss`` replaces it."""
        raise RuntimeError(
            "amp: handle.scale_loss is not supported; call amp.initialize and amp.scale_loss"
        )


class NoOpHandle:
    """Handle while nothing casts."""

    verbose = False

    def is_active(self) -> bool:
        """Returns False: nothing casts."""
        return False

    def deactivate(self) -> None:
        """Does nothing."""

    def disable_casts(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that does nothing."""
        return contextlib.nullcontext()

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Returns a wrapper of an optimizer, of apex's first interface."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Any, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager that gives the loss as it is."""
        return contextlib.nullcontext(loss)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Context manager in which neither decorated functions nor prepared models cast."""
    with (amp_state.handle or NoOpHandle()).disable_casts():
        yield


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Context manager of ``apex_te.amp.scale_loss``, whose arguments and errors it has.

    ``optimizers`` may also be wrappers such as LARC.
    """
    many = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    inner = [inner_optimizer(optimizer) for optimizer in many]
    with amp.scale_loss(loss, inner, loss_id, model, delay_unscale, delay_overflow_check) as scaled:
        yield scaled
