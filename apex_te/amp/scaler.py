"""Loss scaler whose scale is kept and updated on the device, without the host waiting."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from ..runtime import moved
from ..runtime.named_arguments import check_ints, did_you_mean, named_arguments

__all__ = ["LossScaler"]

_INIT_SCALE = 2.0**16
_FACTOR = 2.0
# With a scale of 0 every gradient would be 0 / 0.
_LOWEST = 2.0**-24


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class LossScaler:
    """Loss scaler: halves its scale after non-finite gradients, doubles it after many finite ones.

    An update is clean if all gradients were finite. The algorithm is apex.amp's, with the
    hysteresis of its ``update_scale_hysteresis``. The state consists of float32 scalars on the
    device of the last loss: the scale; ``unskipped``, the number of clean updates since the scale
    was last doubled or an update was not clean; ``hysteresis``, the number of further successive
    unclean updates until the scale is halved (0 or less: the next one halves it); and ``skipped``,
    the number of all unclean updates. ``loss_scale()``, ``skipped()`` and ``state_dict()`` read
    them and wait for the device; no other method waits.

    Args:
        loss_scale: "dynamic" for a scale that starts at 2**16, or a number that stays fixed.
        scale_window: number of successive clean updates after which the scale is doubled.
        min_loss_scale: lower bound of a dynamic scale; None is 2**-24.
        max_loss_scale: upper bound of a dynamic scale.
        hysteresis: number of successive unclean updates from which on each one halves the scale; a
            clean update restarts the count.

    Attributes:
        dynamic: True if the scale can change.
        is_one: True if the scale is always 1, so that nothing needs unscaling.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a value is out of range.
    """

    @named_arguments()
    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        *,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        self.dynamic = isinstance(loss_scale, str) and loss_scale == "dynamic"
        if not self.dynamic and not (_is_number(loss_scale) and loss_scale > 0.0):
            raise ValueError(
                f'LossScaler: loss_scale must be "dynamic" or above 0, got {loss_scale!r}'
                + did_you_mean(loss_scale, ("dynamic",))
            )
        check_ints("LossScaler", scale_window=scale_window, hysteresis=hysteresis)
        bounds: tuple[tuple[str, Any], ...] = (
            ("min_loss_scale", _LOWEST if min_loss_scale is None else min_loss_scale),
            ("max_loss_scale", max_loss_scale),
        )
        for name, bound in bounds:
            if not _is_number(bound):
                raise TypeError(f"LossScaler: {name} must be a float, got {type(bound).__name__}")
        lowest = _LOWEST if min_loss_scale is None else float(min_loss_scale)
        if not 0.0 < lowest <= max_loss_scale:
            raise ValueError(
                f"LossScaler: min_loss_scale must be above 0 and at most max_loss_scale "
                f"{max_loss_scale}, got {min_loss_scale}"
            )
        self.scale_window = scale_window
        self.min_loss_scale = lowest
        self.max_loss_scale = float(max_loss_scale)
        self.hysteresis = hysteresis
        start = _INIT_SCALE if self.dynamic else float(loss_scale)
        if self.dynamic:
            start = min(max(start, lowest), self.max_loss_scale)
        self.is_one = not self.dynamic and start == 1.0
        self._scale = torch.tensor(start)
        self._clean = torch.tensor(0.0)
        self._remaining = torch.tensor(float(hysteresis))
        self._skipped = torch.tensor(0.0)
        self._held: torch.Tensor | None = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns ``loss.float() * scale``; moves the scaler's state to the device of ``loss``."""
        if self.is_one:
            return loss.float()
        if self._scale.device != loss.device:
            for name in ("_scale", "_clean", "_remaining", "_skipped"):
                value = getattr(self, name)
                setattr(self, name, moved(value, loss.device))
        return loss.float() * self._scale

    def inv_scale(self) -> torch.Tensor:
        """Returns ``1 / scale``, a float32 scalar on the device of the last loss."""
        return self._scale.reciprocal()

    def hold(self, found_inf: torch.Tensor) -> None:
        """Keeps a step's ``found_inf`` for the next ``update``, which counts both as one update."""
        self._held = found_inf if self._held is None else torch.maximum(self._held, found_inf)

    @torch.no_grad()
    def update(self, found_inf: torch.Tensor) -> None:
        """Updates a dynamic scale after a step; a fixed scale does not change.

        Args:
            found_inf: tensor of one element, nonzero if a gradient was not finite.
        """
        if not self.dynamic:
            return
        if self._held is not None:
            self.hold(found_inf)
            found_inf, self._held = self._held, None
        found = moved(found_inf, self._scale.device).reshape(()) != 0
        clean = ~found
        self._remaining.copy_(torch.where(found, self._remaining - 1, float(self.hysteresis)))
        self._clean.add_(1).mul_(clean)
        halve = found & (self._remaining <= 0)
        double = self._clean >= self.scale_window
        lower = (self._scale / _FACTOR).clamp_(min=self.min_loss_scale)
        higher = (self._scale * _FACTOR).clamp_(max=self.max_loss_scale)
        kept = torch.where(double, higher, self._scale)
        self._scale.copy_(torch.where(halve, lower, kept))
        self._clean.mul_(~double)
        self._skipped.add_(found)

    def loss_scale(self) -> float:
        """Returns the scale; waits for the device."""
        return self._scale.item()

    def skipped(self) -> int:
        """Returns the number of updates with a non-finite gradient; waits for the device."""
        return int(self._skipped.item())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as numbers; waits for the device.

        Returns:
            ``loss_scale``, ``unskipped``, ``hysteresis`` and ``skipped`` by name; see the class.
        """
        return {
            "loss_scale": self.loss_scale(),
            "unskipped": int(self._clean.item()),
            "hysteresis": int(self._remaining.item()),
            "skipped": self.skipped(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the state from a state dict; after an error the scaler is unchanged.

        Args:
            state_dict: result of ``state_dict()``, or that of apex.amp, which has only
                ``loss_scale`` and ``unskipped``.

        Raises:
            RuntimeError: a key is missing or unknown.
            TypeError: ``state_dict`` is not a dict, or a value is not a number.
            ValueError: a scale or count is out of range.
        """
        self.take(self.checked(state_dict))

    def checked(self, state_dict: dict[str, Any]) -> dict[str, float]:
        """Returns the numbers of a state dict by name, missing ones with defaults, for ``take``.

        Args:
            state_dict: has ``loss_scale`` and ``unskipped``; ``hysteresis`` (default: the scaler's
                own) and ``skipped`` (default 0) may be missing. Values are numbers or one-element
                tensors.

        Raises:
            TypeError: ``state_dict`` is not a dict, or a value is not a number.
            RuntimeError: a required name is missing, or another name is present.
            ValueError: the scale is not above 0 and finite in float32, or a count is out of range.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"LossScaler: state_dict must be a dict, got {type(state_dict).__name__}"
            )
        names = {"loss_scale", "unskipped", "hysteresis", "skipped"}
        if not {"loss_scale", "unskipped"} <= state_dict.keys() <= names:
            raise RuntimeError(
                "LossScaler: state_dict must have loss_scale and unskipped, and may have "
                f"hysteresis and skipped, got {', '.join(map(str, state_dict))}"
            )
        found = {"hysteresis": self.hysteresis, "skipped": 0, **state_dict}
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = found[name] = value.item()
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"LossScaler: {name} must be a number, got {type(value).__name__}")
        scale = found["loss_scale"]
        if not 0.0 < scale <= torch.finfo(torch.float32).max:
            raise ValueError(f"LossScaler: loss_scale must be above 0 and finite, got {scale}")
        for name in ("unskipped", "hysteresis", "skipped"):
            # The rest of the hysteresis falls below 0 while updates go on not being clean.
            least = -(2.0**53) if name == "hysteresis" else 0.0
            if not least <= found[name] <= 2.0**53:
                raise ValueError(f"LossScaler: {name} must be a count, got {found[name]}")
        return found

    def take(self, values: dict[str, float]) -> None:
        """Sets the state to the numbers that ``checked`` returned."""
        self._scale.fill_(values["loss_scale"])
        self._clean.fill_(values["unskipped"])
        self._remaining.fill_(min(values["hysteresis"], self.hysteresis))
        self._skipped.fill_(values["skipped"])
        self.is_one = not self.dynamic and values["loss_scale"] == 1.0
