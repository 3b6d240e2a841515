"""Loss scale that lives on the device and moves there, without the host waiting."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import moved

__all__ = ["LossScaler"]

_INIT_SCALE = 2.0**16
_FACTOR = 2.0
# A scale that went to 0 would make every gradient 0 / 0.
_LOWEST = 2.0**-24


class LossScaler:
    """Scales a loss and moves the scale as its gradients were finite or not.

    Args:
        loss_scale: "dynamic", starting at 2**16, or a number that stays.
        scale_window: clean updates in a row after which the scale doubles.
        min_loss_scale: the scale never falls below; None is 2**-24.
        max_loss_scale: the scale never rises above.
        hysteresis: non-finite updates in a row from which on the scale is halved; a clean one
            starts the count anew.

    The algorithm is apex.amp's, with the hysteresis of its ``update_scale_hysteresis``. The state
    is float32 scalars on the device of the first loss: the scale, clean updates since the scale
    moved (``unskipped``), non-finite updates to come before the scale is halved (``hysteresis``)
    and all non-finite updates (``skipped``). ``loss_scale()``, ``skipped()`` and ``state_dict()``
    read them, which waits for the device; no other method waits.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        *,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        if not self.dynamic and (isinstance(loss_scale, str) or not loss_scale > 0.0):
            raise ValueError(
                f'LossScaler: loss_scale must be "dynamic" or above 0, got {loss_scale!r}'
            )
        for name, count in (("scale_window", scale_window), ("hysteresis", hysteresis)):
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"LossScaler: {name} must be an int, got {type(count).__name__}")
            if count < 1:
                raise ValueError(f"LossScaler: {name} must be at least 1, got {count}")
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
        self._unskipped = torch.tensor(0.0)
        self._remaining = torch.tensor(float(hysteresis))
        self._skipped = torch.tensor(0.0)
        self._held: torch.Tensor | None = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns ``loss`` in float32, times the scale; the state moves to the loss's device."""
        if self.is_one:
            return loss.float()
        if self._scale.device != loss.device:
            for name in ("_scale", "_unskipped", "_remaining", "_skipped"):
                value = getattr(self, name)
                setattr(self, name, moved(value, loss.device))
        return loss.float() * self._scale

    def inv_scale(self) -> torch.Tensor:
        """Returns ``1 / scale``, a float32 scalar on the device."""
        return self._scale.reciprocal()

    def hold(self, found_inf: torch.Tensor) -> None:
        """Keeps a flag for the next ``update``."""
        self._held = found_inf if self._held is None else torch.maximum(self._held, found_inf)

    @torch.no_grad()
    def update(self, found_inf: torch.Tensor) -> None:
        """Moves a dynamic scale by a step's flag, which is not 0 if a gradient was not finite."""
        if not self.dynamic:
            return
        if self._held is not None:
            self.hold(found_inf)
            found_inf, self._held = self._held, None
        found = moved(found_inf, self._scale.device).reshape(()) != 0
        clean = ~found
        self._remaining.copy_(torch.where(found, self._remaining - 1, float(self.hysteresis)))
        self._unskipped.add_(1).mul_(clean)
        halve = found & (self._remaining <= 0)
        double = self._unskipped >= self.scale_window
        lower = (self._scale / _FACTOR).clamp_(min=self.min_loss_scale)
        higher = (self._scale * _FACTOR).clamp_(max=self.max_loss_scale)
        kept = torch.where(double, higher, self._scale)
        self._scale.copy_(torch.where(halve, lower, kept))
        self._unskipped.mul_(~double)
        self._skipped.add_(found)

    def loss_scale(self) -> float:
        """Returns the present scale; waits for the device."""
        return self._scale.item()

    def skipped(self) -> int:
        """Returns the number of updates with a non-finite gradient; waits for the device."""
        return int(self._skipped.item())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as numbers; waits for the device."""
        return {
            "loss_scale": self.loss_scale(),
            "unskipped": int(self._unskipped.item()),
            "hysteresis": int(self._remaining.item()),
            "skipped": self.skipped(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict, in place; apex.amp's, which has two keys only, loads too.

        After an error the scaler is as it was.

        Raises:
            RuntimeError: the state dict has other keys.
            TypeError: a value is no number.
            ValueError: a scale or count is out of range.
        """
        self.take(self.checked(state_dict))

    def checked(self, state_dict: dict[str, Any]) -> dict[str, float]:
        """Returns the numbers of a state dict, checked as for ``load_state_dict``."""
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
            # What is left of the hysteresis falls below 0 while non-finite updates go on.
            least = -(2.0**53) if name == "hysteresis" else 0.0
            if not least <= found[name] <= 2.0**53:
                raise ValueError(f"LossScaler: {name} must be a count, got {found[name]}")
        return found

    def take(self, values: dict[str, float]) -> None:
        """Sets the state to numbers that were checked."""
        self._scale.fill_(values["loss_scale"])
        self._unskipped.fill_(values["unskipped"])
        self._remaining.fill_(min(values["hysteresis"], self.hysteresis))
        self._skipped.fill_(values["skipped"])
        self.is_one = not self.dynamic and values["loss_scale"] == 1.0
