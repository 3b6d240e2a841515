"""Histories of amaxes that change their length."""

from __future__ import annotations

import warnings

import torch

__all__ = ["resized_history", "warn_resized"]

_resized: set[tuple[int, int]] = set()


def warn_resized(old: int, new: int) -> None:
    """Say once per pair of lengths that histories change their length."""
    if (old, new) not in _resized:
        _resized.add((old, new))
        what = "trimmed" if new < old else "padded"
        warnings.warn(f"FP8State: amax history {what} from length {old} to {new}", stacklevel=3)


def resized_history(history: torch.Tensor, length: int) -> torch.Tensor:
    """A copy of ``history`` [old, slots] with ``length`` rows: staging row and newest rows kept."""
    new = history.new_zeros(length, history.shape[1])
    new[0] = history[0]
    kept = min(history.shape[0], length) - 1
    if kept:
        new[-kept:] = history[-kept:]
    return new
