"""Saving and restoring a run so that the resumed run continues bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import apex_te


def save(
    path: Path,
    *,
    step: int,
    settings: dict[str, object],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    """Writes everything that step ``step`` depends on; the old file stays until the new is whole.

    ``flush_fp8_state`` applies the scale update that the next FP8 region would otherwise apply, so
    that the saved scales are the ones the next step uses.
    """
    apex_te.flush_fp8_state()
    state = {
        "step": step,
        "settings": settings,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "batches": generator.get_state(),
        "cpu_rng": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state_all()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load(
    path: Path,
    *,
    settings: dict[str, object],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> int:
    """Restores what ``save`` wrote and returns the step to continue from.

    ValueError when the run was saved with other settings, since it could not continue as it was.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in settings.items():
        if state["settings"].get(name) != value:
            raise ValueError(
                f"checkpoint {path}: {name} must be {state['settings'].get(name)!r} "
                f"as in the saved run, got {value!r}"
            )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    generator.set_state(state["batches"])
    torch.set_rng_state(state["cpu_rng"])
    if "cuda_rng" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    return int(state["step"])
