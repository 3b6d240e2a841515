"""Checkpoints from which a run goes on bitwise.

A checkpoint is a folder ``step-<N>`` with the model, its FP8 state, the optimizer, the random
states and the step, which says where in the data the run is. It is written under another name and
renamed, so that a run that is killed at any time leaves only whole ones. One process writes one
file, several ranks write parts by torch.distributed.checkpoint, into a folder that all of them see.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks import Ranks
from user_error import UserError

import apex_te
from apex_te.parameter import FP8Parameter
from apex_te.recipe import Recipe

PARTIAL = ".partial"
CHANGEABLE = ("recipe", "seed")  # settings that a branch need not share with its run


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: the run's.
        keep: number of checkpoints that are kept.
        settings: what a run that goes on must have in common with the saved one.
        model, optimizer: what is saved and loaded.
        recipe: that of the run, or None.
        ranks: the ranks.
    """

    def __init__(
        self, folder: Path, keep: int, settings: dict[str, Any], model: torch.nn.Module,
        optimizer: Any, recipe: Recipe | None, ranks: Ranks,
    ) -> None:  # fmt: skip
        self.folder, self.keep, self.settings = folder, keep, settings
        self.model, self.optimizer, self.recipe, self.ranks = model, optimizer, recipe, ranks

    def steps(self) -> list[int]:
        """Returns the steps of whole checkpoints, oldest first."""
        return _steps(self.folder)

    def check_new(self) -> None:
        """Raises ValueError if a run that begins anew would save among another's checkpoints.

        The newest steps are kept and loaded, which may be the other run's.
        """
        if found := self.steps():
            raise UserError(
                f"--out must have no checkpoints of another run without --resume, got "
                f"{self._path(found[-1])}"
            )

    def save(self, step: int) -> None:
        """Writes the checkpoint of a step, and deletes the oldest beyond ``keep``."""
        apex_te.flush_fp8_state()  # the scales that the next step will use
        final = self._path(step)
        partial = final.with_name(final.name + PARTIAL)
        if self.ranks.rank == 0:
            for left in self.folder.glob(f"*{PARTIAL}"):  # by a run that was killed
                shutil.rmtree(left)
            partial.mkdir(parents=True)
        self.ranks.barrier()
        if self.ranks.mesh is None:
            torch.save(self._one_process(), partial / "state.pt")
        else:
            from torch.distributed import checkpoint

            checkpoint.save(self._all_ranks(), checkpoint_id=partial)
            torch.save(_random_states(), partial / f"random-{self.ranks.rank}.pt")
        self.ranks.barrier()
        if self.ranks.rank == 0:
            about = {"step": step, "ranks": self.ranks.size, "settings": self.settings}
            (partial / "about.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")
            for path in (*partial.iterdir(), partial):
                _flush(path)
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
            _flush(self.folder)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self._path(old))
        self.ranks.barrier()

    def load_newest(self) -> int:
        """Loads the newest checkpoint and returns the step that it was saved after; 0 if none.

        Raises:
            UserError: the checkpoint is of a run with other settings or numbers of ranks, or
                cannot be read.
        """
        found = self.steps()
        if not found:
            return 0
        return self._load_path(self._path(found[-1]), self.settings)

    def load_branch(self, folder: Path) -> int:
        """Loads the newest checkpoint of another run, whose recipe and seed may differ.

        Args:
            folder: the other run's.

        Returns:
            the step that the checkpoint was saved after.

        Raises:
            UserError: as ``load_newest`` does, or ``folder`` is this run's own or has none.
        """
        if folder.resolve() == self.folder.resolve():
            raise UserError(f"--branch-from must be another folder than --out, got {folder}")
        found = _steps(folder)
        if not found:
            raise UserError(f"--branch-from must be a folder with checkpoints, got {folder}")
        settings = {n: value for n, value in self.settings.items() if n not in CHANGEABLE}
        return self._load_path(_path(folder, found[-1]), settings)

    def _load_path(self, path: Path, settings: dict[str, Any]) -> int:
        """Loads a checkpoint, whose settings must be those given, and returns its step."""
        about = _read(path / "about.json", lambda file: json.loads(file.read_text("utf-8")))
        self._check(path, about, settings)
        if self.ranks.mesh is None:
            state = _read(path / "state.pt", _load)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            _restore_random_states(state["random"])
        else:
            self._load_all_ranks(path, about["settings"].get("recipe"))
        self._restore_fp8_parameters()
        return int(about["step"])

    def _path(self, step: int) -> Path:
        return _path(self.folder, step)

    def _check(self, path: Path, about: dict[str, Any], settings: dict[str, Any]) -> None:
        """Raises ValueError if this run cannot go on from the checkpoint at ``path``."""
        if about["ranks"] != self.ranks.size:
            raise UserError(
                f"checkpoint {path}: must be resumed on {about['ranks']} ranks, "
                f"got {self.ranks.size}"
            )
        for name, value in settings.items():
            saved = about["settings"].get(name, value)
            if saved != value:
                raise UserError(
                    f"checkpoint {path}: {name} must be {saved!r} as in the saved run, "
                    f"got {value!r}"
                )

    def _one_process(self) -> dict[str, Any]:
        """Returns all that a run of one process is made of."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": _random_states(),
        }

    def _all_ranks(self) -> dict[str, Any]:
        """Returns model and optimizer with each rank's parts at their place in the whole."""
        from apex_te.distributed import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _load_all_ranks(self, path: Path, recipe: str | None) -> None:
        """Loads each rank's parts of a checkpoint.

        Args:
            path: the checkpoint.
            recipe: that it was saved with; FP8 state of another recipe is not loaded.
        """
        from torch.distributed import checkpoint

        from apex_te.distributed import set_state_dict

        # Only what the model has already is loaded.
        if self.recipe is not None and recipe == self.settings["recipe"]:
            apex_te.init_fp8_state(self.model, self.recipe)
        state = self._all_ranks()
        checkpoint.load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )  # fmt: skip
        random = path / f"random-{self.ranks.rank}.pt"
        _restore_random_states(_read(random, _load))

    @torch.no_grad()
    def _restore_fp8_parameters(self) -> None:
        """Casts master weights to FP8 weights again, as each step does.

        State dicts hold an FP8 weight's values, which need not give the same scale.
        """
        for parameter in self.model.parameters():
            if isinstance(parameter, FP8Parameter):
                parameter.copy_(self.optimizer.state[parameter]["master_param"])


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _steps(folder: Path) -> list[int]:
    """Returns the steps of a folder's whole checkpoints, oldest first."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _read(file: Path, reader: Callable[[Path], Any]) -> Any:
    """Returns what ``reader`` reads from a checkpoint's file.

    Raises:
        UserError: the file is not there or damaged.
    """
    try:
        return reader(file)
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(
            f"checkpoint {file.parent}: {file.name} must be whole, got {type(error).__name__} when "
            "reading it; without this folder --resume goes on from the one before, if any"
        ) from error


def _random_states() -> dict[str, torch.Tensor]:
    """Returns the states of torch's generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Sets torch's generators to saved states."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _flush(path: Path) -> None:
    """Waits until a file or a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
