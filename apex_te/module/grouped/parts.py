"""One call of layers in several parts of its rows: weights cast once, gradients summed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class SharedCasts:
    """FP8 copies of one layer's weights that the parts of a call share, each of them cast once.

    The rowwise copy lives until the last part's forward has run, the columnwise one from the first
    part's backward to the last one's.
    """

    __slots__ = ("_columnwise", "_left", "_rowwise", "_users")

    def __init__(self) -> None:
        self._rowwise: Any = None
        self._columnwise: tuple[torch.Tensor, torch.Tensor] | None = None
        self._users = self._left = 0

    def forward(self, cast: Callable[[], Any], need_input: bool) -> Any:
        """Returns what ``cast`` returned to the first part; ``need_input``: backward needs it."""
        if self._rowwise is None:
            self._rowwise = cast()
        if need_input:
            self._users += 1
            self._left += 1
        return self._rowwise

    def backward(
        self, cast: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what ``cast`` returned to the first part that runs backward."""
        found = self._columnwise
        if found is None:
            found = self._columnwise = cast()
        self._left -= 1
        if not self._left:
            self._columnwise, self._left = None, self._users
        return found

    def end_forward(self) -> None:
        """Drops the rowwise copy."""
        self._rowwise = None


class Part(NamedTuple):
    """Settings of a layer for the part of a call that it computes.

    Attributes:
        casts: copies that the parts share, None if the weight cache has them.
        accumulate: overrides ``GemmOptions.accumulate``, if that is not None.
    """

    casts: SharedCasts | None
    accumulate: bool


@contextmanager
def in_parts(
    layers: tuple[Any, ...], parts: int, is_first_microbatch: bool | None
) -> Iterator[Callable[[int], bool | None]]:
    """Context in which ``layers`` compute one call in ``parts``, whose backward runs last to first.

    It yields a function that begins a part and returns the ``is_first_microbatch`` to call the
    layers with. The part whose backward is first overwrites ``main_grad`` if the call is to.
    """
    shared = [None if is_first_microbatch is not None else SharedCasts() for _ in layers]

    def begin(part: int) -> bool | None:
        overwrites = is_first_microbatch is True and part == parts - 1
        for layer, casts in zip(layers, shared, strict=True):
            layer._modes.part = Part(casts, not overwrites)
        return is_first_microbatch if part == 0 or is_first_microbatch is None else False

    try:
        yield begin
    finally:
        for layer, casts in zip(layers, shared, strict=True):
            layer._modes.part = None
            if casts is not None:
                casts.end_forward()
