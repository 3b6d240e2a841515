"""What every FP8 module shares: its state, which quantizers a forward uses, saving and moving."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..autocast import graph_task_id, local
from ..state import FP8State
from ..state_io import NAMES, load_state, save_state

if TYPE_CHECKING:
    from ..quantizer import GemmQuantizers, QuantizerSets
    from ..recipe import DelayedScaling

__all__ = ["FP8Module"]

STATE_PREFIX = "fp8_state."


class Modes:
    """Per-module memory between forwards; slots, because nn.Module's setattr is slow.

    ``recompute`` and ``recompute_fp8`` describe the last recorded forward; ``weight_cache`` holds
    the FP8 weight of ``is_first_microbatch``.
    """

    __slots__ = ("recompute", "recompute_fp8", "weight_cache")

    def __init__(self) -> None:
        self.recompute: GemmQuantizers | None = None
        self.recompute_fp8 = False
        self.weight_cache: Any = None


class FP8Module(torch.nn.Module):
    """Mixin that owns one FP8 state (one GEMM)."""

    _fp8: FP8State
    _modes: Modes

    def _make_fp8_state(self) -> None:
        # Plain attributes, not buffers: DDP would broadcast buffers and half() would cast them.
        self._fp8 = FP8State()
        self._modes = Modes()

    def _state_device(self) -> torch.device:
        raise NotImplementedError

    def _init_fp8_state(self, recipe: DelayedScaling) -> None:
        if not self._fp8.allocated:
            self._fp8.adapt(recipe, self._state_device())

    def _select(self, weight: torch.Tensor) -> tuple[GemmQuantizers | None, bool, bool]:
        """Quantizers of this forward (None: none), whether it runs in FP8, and if it is recomputed.

        Quantizers without FP8 mean calibration: amaxes are staged, the maths stay as they are.
        """
        modes = self._modes
        if graph_task_id() != -1:
            return modes.recompute, modes.recompute_fp8, True
        region = local.region
        if region is None:
            modes.recompute = None
            modes.recompute_fp8 = False
            return None, False, False
        fp8 = region.enabled
        if not fp8 and not region.calibrating:
            if region.records:
                modes.recompute = None
                modes.recompute_fp8 = False
            return None, False, False
        sets: QuantizerSets = self._fp8.quantizers(region.recipe, weight)  # type: ignore[arg-type]
        if region.records:
            modes.recompute = sets.recompute
            modes.recompute_fp8 = fp8
            return sets.recording, fp8, False
        return (sets.frozen if fp8 else None), fp8, False

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._modes.weight_cache = None
        state = self._fp8
        if state.allocated:
            weight = self._parameters.get("weight")
            # Without a parameter the state itself tells where fn sends tensors; dtype never counts.
            state.move(fn(state.scale_fwd).device if weight is None else weight.device)
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the FP8 weight cache behind."""
        kept = self.__dict__.copy()
        kept.pop("_modes", None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._modes = Modes()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_state(self._fp8, destination, prefix + STATE_PREFIX)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._modes.weight_cache = None
        own = {prefix + STATE_PREFIX + name for name in NAMES}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in own]
        if not any(key.startswith(prefix) for key in state_dict):
            return  # this module is not part of what is being loaded
        load_state(
            self._fp8,
            state_dict,
            prefix + STATE_PREFIX,
            self._state_device(),
            missing_keys,
            error_msgs,
        )
