"""Log of a run: a line of JSON for each event, a line on the terminal, TensorBoard, wandb."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from user_error import make_folder, needs

FILE = "log.jsonl"


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a log; a last line that a killed run has cut off is left out."""
    events = []
    for line in path.read_text("utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events


class RunLog:
    """Writes the events of a run.

    Args:
        folder: the run's.
        after: the step that the run goes on from; events of later steps, which a killed run has
            left, are dropped.
        tensorboard: also log there, if it is installed.
        wandb: name of a project to log to, too, or None.
        settings: the run's, for wandb.
    """

    def __init__(
        self, folder: Path, after: int, tensorboard: bool, wandb: str | None,
        settings: dict[str, Any],
    ) -> None:  # fmt: skip
        make_folder("--out", folder)
        path = folder / FILE
        kept = []
        if after > 0 and path.exists():
            kept = [event for event in read_log(path) if event.get("step", 0) <= after]
            kept = [event for event in kept if event["kind"] != "end"]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(map(_line, kept)), "utf-8")
        os.replace(partial, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._board = _tensorboard(folder, after) if tensorboard else None
        self._wandb: Any = None
        if wandb is not None:
            self._wandb = needs("wandb", "--wandb").init(
                project=wandb, dir=folder, config=settings, resume="allow"
            )

    def write(self, kind: str, **figures: Any) -> None:
        """Writes an event; ``step`` among its figures places it."""
        self._file.write(_line({"kind": kind, **figures}))
        step = figures.get("step")
        numbers = {
            f"{kind}/{name}": value for name, value in figures.items()
            if isinstance(value, (int, float)) and name != "step"
        }  # fmt: skip
        if step is None or not numbers:
            return
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def flush(self) -> None:
        """Hands what was written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Ends the log."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class NoLog:
    """Log of the ranks that write none."""

    def write(self, kind: str, **figures: Any) -> None:
        """Does nothing."""

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + "\n"


def _tensorboard(folder: Path, after: int) -> Any:
    """Returns a writer of TensorBoard; None if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)
