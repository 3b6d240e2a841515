"""Saving and restoring a run so that the resumed run continues bit for bit.

One process writes a file. Several ranks write a folder by torch.distributed.checkpoint, which all
of them must see; another number of ranks can read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from parallel import Layout
from torch import distributed

import apex_te
from apex_te.recipe import Recipe

LATEST = "latest.json"  # in a folder: which step is whole, and the settings


class Store(Protocol):
    """Place where a run is kept."""

    def exists(self) -> bool:
        """Returns True if there is a saved run.

        Raises:
            ValueError: only another kind of run can read it.
        """

    def save(
        self,
        *,
        step: int,
        settings: dict[str, object],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
    ) -> None:
        """Writes everything that step ``step`` depends on; the old one stays until then."""

    def load(
        self,
        *,
        settings: dict[str, object],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        recipe: Recipe | None,
    ) -> int:
        """Restores what ``save`` wrote and returns the step to continue from.

        Raises:
            ValueError: the run was saved with other settings, or cannot be read; names the file.
        """


def store(path: Path, layout: Layout) -> Store:
    """Returns the run at ``path``, <name>.pt, or of several ranks in the folder <name>."""
    return Folder(path.with_suffix(""), layout) if layout.started else File(path)


def others(path: Path) -> list[str]:
    """Returns the names of the runs beside the one at ``path``."""
    if not path.parent.is_dir():
        return []
    beside = path.parent.iterdir()
    names = {p.stem for p in beside if p.suffix == ".pt" or (p / LATEST).exists()}
    return sorted(names - {path.stem})


def _check(where: Path, saved: dict[str, object], settings: dict[str, object]) -> None:
    for name, value in settings.items():
        if saved.get(name, value) != value:
            raise ValueError(
                f"checkpoint {where}: {name} must be {saved.get(name)!r} "
                f"as in the saved run, got {value!r}"
            )


@contextlib.contextmanager
def _reading(where: Path) -> Iterator[None]:
    """Names the file in the message of any error inside."""
    try:
        yield
    except BaseException as error:  # as what torch.distributed.checkpoint raises is
        exits = isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))
        if exits or str(error).startswith("checkpoint "):
            raise
        raise ValueError(
            f"checkpoint {where}: must be a whole run of this model, "
            f"got {type(error).__name__}: {error}"
        ) from error


class File:
    """A run of one process, in one file.

    ``flush_fp8_state`` applies the scale update that the next FP8 region would otherwise apply, so
    that the saved scales are the ones the next step uses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        folder = self.path.with_suffix("")
        if not self.path.exists() and (folder / LATEST).exists():
            raise ValueError(f"checkpoint {folder}: was saved under torchrun, resume it there")
        return self.path.exists()

    def save(
        self,
        *,
        step: int,
        settings: dict[str, object],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
    ) -> None:
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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)

    def load(
        self,
        *,
        settings: dict[str, object],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        recipe: Recipe | None,
    ) -> int:
        with _reading(self.path):
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            _check(self.path, state["settings"], settings)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            generator.set_state(state["batches"])
            torch.set_rng_state(state["cpu_rng"])
            if "cuda_rng" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(state["cuda_rng"])
            return int(state["step"])


class Folder:
    """A run of several ranks: <folder>/<step>, and a file that names the last step.

    Parts of split weights are saved at their place in the whole, so that ranks may split them
    otherwise when they resume. The only random state is that of the batches; nothing else here
    draws after the start.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.layout = layout

    def exists(self) -> bool:
        file = self.path.with_suffix(".pt")
        if not (self.path / LATEST).exists() and file.exists():
            raise ValueError(f"checkpoint {file}: was saved by one process, resume it as one")
        found = torch.tensor([(self.path / LATEST).exists()], dtype=torch.int32)
        found = found.to(self.layout.mesh.device_type)
        distributed.all_reduce(found)
        if found.item() not in (0, self.layout.ranks):
            raise ValueError(
                f"checkpoint {self.path}: must be in a folder that all {self.layout.ranks} ranks "
                f"see, {found.item()} of them do"
            )
        return bool(found.item())

    def save(
        self,
        *,
        step: int,
        settings: dict[str, object],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
    ) -> None:
        from torch.distributed import checkpoint

        apex_te.flush_fp8_state()
        state = _state(model, optimizer, generator)
        checkpoint.save(state, checkpoint_id=self.path / str(step))
        if self.layout.rank == 0:
            latest = {"step": step, "settings": settings}
            partial = self.path / "partial.json"
            partial.write_text(json.dumps(latest, indent=1) + "\n", encoding="utf-8")
            os.replace(partial, self.path / LATEST)
            for old in self.path.iterdir():
                if old.is_dir() and old.name != str(step):
                    shutil.rmtree(old)

    def load(
        self,
        *,
        settings: dict[str, object],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        recipe: Recipe | None,
    ) -> int:
        from torch.distributed import checkpoint

        from apex_te.distributed import set_state_dict

        with _reading(self.path):
            latest = json.loads((self.path / LATEST).read_text(encoding="utf-8"))
            _check(self.path, latest["settings"], settings)
            if recipe is not None:  # only what the model has already is loaded
                apex_te.init_fp8_state(model, recipe)
            state = _state(model, optimizer, generator)
            checkpoint.load(state, checkpoint_id=self.path / str(latest["step"]))
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            generator.set_state(state["batches"])
            return int(latest["step"])


def _state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> dict[str, Any]:
    from apex_te.distributed import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "batches": generator.get_state()}
