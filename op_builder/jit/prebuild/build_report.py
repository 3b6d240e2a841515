"""Report of a prebuild: the state of each library, as an object, table or JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..text import Column, size, table

_COLUMNS = (
    *(Column(title) for title in ("op", "device", "archs", "state")),
    *(Column(title, right=True) for title in ("seconds", "size")),
)
STATES = ("built", "present", "skipped", "failed")


class LibraryReport(NamedTuple):
    """One library of a prebuild: "built", "present" before, "skipped" or "failed"."""

    op: str
    device: str
    state: str
    archs: tuple[str, ...] = ()
    seconds: float = 0.0
    size: int = 0
    path: str = ""
    reason: str = ""


class BuildReport(NamedTuple):
    """Result of a prebuild, with one row per library; ``str()`` of it is a table."""

    libraries: tuple[LibraryReport, ...]
    seconds: float = 0.0
    jobs: int = 1

    def of_state(self, *states: str) -> list[LibraryReport]:
        """Returns the libraries whose state is one of ``states``."""
        return [library for library in self.libraries if library.state in states]

    @property
    def ok(self) -> bool:
        """True if no library failed."""
        return not self.of_state("failed")

    def failures(self) -> str:
        """Returns the number of failed libraries and the reason of each, as text for an error."""
        failed = self.of_state("failed")
        lines = [f"{len(failed)} of {len(self.of_state('built', 'present', 'failed'))} libraries"]
        lines[0] += " could not be built"
        for each in failed:
            name = f"{each.op} ({each.device}): "
            lines.append(name + each.reason.removeprefix(name))  # a build says its name, too
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict of plain types, for JSON."""
        libraries = [library._asdict() for library in self.libraries]
        return {"libraries": libraries, "seconds": round(self.seconds, 3), "jobs": self.jobs}

    def __str__(self) -> str:
        """Returns a table of the libraries, lines for those skipped, and a line with the totals."""
        shown = self.of_state("built", "present", "failed")
        lines = list(table(_COLUMNS, [_row(library) for library in shown], "  ")) if shown else []
        groups: dict[tuple[str, str], list[str]] = {}
        for library in self.of_state("skipped"):
            groups.setdefault((library.device, library.reason), []).append(library.op)
        for (device, reason), ops in groups.items():
            lines.append(f"skipped ({device}): {', '.join(ops)}: {reason}")
        counts = [f"{len(self.of_state(state))} {state}" for state in STATES]
        total = size(sum(library.size for library in shown))
        lines.append(
            f"{', '.join(counts)}; {total} in {self.seconds:.1f} s,"
            f" at most {self.jobs} compiler{'s' if self.jobs > 1 else ''} at once"
        )
        return "\n".join(lines)


def _row(library: LibraryReport) -> tuple[str, ...]:
    seconds = f"{library.seconds:.1f}" if library.state == "built" else ""
    archs, bytes_ = " ".join(library.archs) or "-", size(library.size) if library.size else ""
    return library.op, library.device, archs, library.state, seconds, bytes_
