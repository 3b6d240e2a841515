"""State of amp that programs read and set: loss scalers, properties and verbosity."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from .... import amp
from ....amp.loss import state
from ....amp.scaler import LossScaler


class AmpState:
    """State of amp, in apex's object ``_amp_state``.

    Attributes:
        opt_properties: the chosen properties, with ``enabled`` and ``opt_level``.
        handle: what tells whether functions cast their arguments.
        verbosity: ``verbosity`` of the last ``initialize``.
        hard_override: kept, unused.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale.
        optimizers: the optimizers of the last ``initialize``.
    """

    def __init__(self) -> None:
        self.opt_properties: Any = SimpleNamespace(enabled=False)
        self.handle: Any = None
        self.verbosity = 1
        self.hard_override = False
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """List of the loss scalers, whose ``_loss_scale`` may be set; empty if amp is off."""
        return state.scalers or []

    def casts(self) -> bool:
        """Returns True if functions of apex's decorators and registrations cast arguments."""
        return self.handle is not None and self.handle.is_active()


amp_state = _amp_state = AmpState()


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer in a wrapper such as LARC, which has it as ``optim``."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    return getattr(optimizer, "optim", optimizer)


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that an optimizer updates, for example to clip gradients.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
    """
    return amp.master_params(inner_optimizer(optimizer))


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints a message unless the verbosity is 0; ``rank0`` prints on the first rank only."""
    distributed = torch.distributed
    known = distributed.is_available() and distributed.is_initialized()
    if amp_state.verbosity > 0 and not (rank0 and known and distributed.get_rank()):
        print(msg)


def warn_or_err(msg: str) -> None:
    """Raises RuntimeError; with ``hard_override`` prints the message as a warning instead."""
    if not amp_state.hard_override:
        raise RuntimeError(msg)
    maybe_print(f"Warning: {msg}")
