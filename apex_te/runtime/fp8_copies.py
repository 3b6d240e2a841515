"""Parameters whose FP8 copies are kept between steps, for optimizers that can write the copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Casts(NamedTuple):
    """Tensors into which an optimizer casts a parameter ``[rows, cols]`` that it has updated.

    Attributes:
        rowwise, columnwise: E4M3 ``[rows, cols]`` and ``[cols, rows]``.
        scale_inv, columnwise_scale_inv: their ``scale_inv``; the latter is None with one scale.
        scale, amax: fp32 ``[1]``: the scale to cast with, and the amax to be written; None in
            blocks of 128x128.
        block_rule: ``eps`` and the number of ``op_options.BLOCK_SCALES``; None with one scale.
    """

    rowwise: torch.Tensor
    columnwise: torch.Tensor
    scale_inv: torch.Tensor
    columnwise_scale_inv: torch.Tensor | None
    scale: torch.Tensor | None
    amax: torch.Tensor | None
    block_rule: tuple[float, int] | None


class Keeper(Protocol):
    """Protocol of the owner of one parameter's FP8 copies."""

    def begin(self) -> Casts | None:
        """Returns where to cast the parameter that is about to change; None if nobody reads it."""

    def end(self, is_certain: bool) -> None:
        """Records a write to the copies, which unless ``is_certain`` may have changed nothing."""

    def release(self) -> None:
        """Ends the use of copies, because the parameter will change unseen by the host."""


_keepers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of weak references
preparations: list[Callable[[], None]] = []  # called before the first ``begin`` of a step


def set_keeper(param: torch.Tensor, keeper: Keeper) -> None:
    """Makes an object, held weakly, the owner of the copies of ``param``."""
    _keepers[param] = weakref.ref(keeper)


def keepers_of(params: Sequence[torch.Tensor]) -> list[tuple[int, Keeper]]:
    """Returns ``(index, keeper)`` for each parameter that has one."""
    if not _keepers:
        return []
    found = [(i, _keepers.get(param)) for i, param in enumerate(params)]
    kept = [(i, reference()) for i, reference in found if reference is not None]
    return [(i, keeper) for i, keeper in kept if keeper is not None]
