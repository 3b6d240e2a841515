"""apex's loss scaler: the scale of ``apex_te.amp``, with the attributes that programs use."""

from __future__ import annotations

import torch

from ....amp import scaler
from ._amp_state import amp_state


class LossScaler(scaler.LossScaler):
    """Loss scaler of ``apex_te.amp`` with apex's arguments and attributes.

    Reading ``_loss_scale``, ``_unskipped`` or ``_has_overflow`` waits for the device.

    Args:
        loss_scale: "dynamic" or a number.
        init_scale: where a dynamic scale starts, at most.
        scale_factor: must be 2.
        scale_window: number of clean updates after which the scale is doubled.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale.

    Raises:
        NotImplementedError: ``scale_factor`` is not 2.
        ValueError: a value is out of range.
    """

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        if scale_factor != 2.0:
            raise NotImplementedError(
                "apex.amp.LossScaler: scale_factor must be 2, which apex_te.amp and apex.amp use, "
                f"got {scale_factor}"
            )
        super().__init__(
            loss_scale,
            scale_window=scale_window,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
        )
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)
        if self.dynamic and init_scale != 2.0**16:
            self._loss_scale = min(init_scale, max_loss_scale)

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.load_state_dict({**self.state_dict(), "loss_scale": float(value)})

    @property
    def _unskipped(self) -> int:
        return self.state_dict()["unskipped"]

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.load_state_dict({**self.state_dict(), "unskipped": int(value)})

    @property
    def _has_overflow(self) -> bool:
        return bool(self._overflow_buf.item())

    def clear_overflow_state(self) -> None:
        """Forgets the overflow of gradients since the last update."""
        self._overflow_buf = torch.zeros_like(self._overflow_buf)
        self._held = None

    def hold(self, found_inf: torch.Tensor) -> None:
        """Keeps a flag for the next update, also in ``_overflow_buf``."""
        super().hold(found_inf)
        self._overflow_buf = found_inf.reshape(1).int()

    def update(self, found_inf: torch.Tensor) -> None:
        """Halves, doubles or keeps a dynamic scale, and keeps the flag in ``_overflow_buf``."""
        super().update(found_inf)
        self._overflow_buf = found_inf.reshape(1).int()

    def update_scale(self) -> bool:
        """Updates the scale by ``_overflow_buf``; returns True if the step is to be skipped.

        The caller decides on the step: flags that ``scale_loss`` left to optimizers are removed.
        """
        if not self.dynamic:
            return False
        found = self._overflow_buf.reshape(()).float()
        if self._held is not None:
            found = torch.maximum(found, self._held.to(found.device))
        self.update(found)
        for reference in amp_state.optimizers:
            optimizer = reference()
            if optimizer is not None:
                optimizer.__dict__.pop("found_inf", None)
        return bool(found.item())
