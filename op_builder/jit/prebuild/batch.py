"""Compilation of many libraries at once, with a limit on the compilers that run together.

Each library is a ninja graph of its own, and the compilers of all graphs that run stay within the
limit: the lock, the stored failure and the publication of a library are those of a build on first
use, and what is finished stays finished when a later one fails or the process is killed.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...spec import OpSpec
from ..backends.archs import Arch
from ..errors import BuildError
from ..find import cache
from ..find.cache import Location
from ..find.key import closure
from .build_report import BuildReport, LibraryReport

_STOP_PAUSE = 0.1  # seconds


class Wanted(NamedTuple):
    """One library to compile; ``label``, set for dispatchers alone, replaces its op in reports."""

    spec: OpSpec
    device: str
    archs: tuple[Arch, ...] = ()
    label: str = ""

    @property
    def op(self) -> str:
        """Name of the library in reports."""
        return self.label or self.spec.NAME

    def cost(self) -> tuple[bool, int, int]:
        """Returns a sort key of the build's length: is a dispatcher, compilations, source bytes."""
        spec = self.spec
        sources = [os.path.join(spec.root, name) for name in spec.device_sources(self.device)]
        read = sum(os.path.getsize(path) for path in closure(sources, spec.include_folders()))
        return bool(self.label), len(self.archs) * len(sources), read

    def report(self, state: str, **values: Any) -> LibraryReport:
        """Returns the row of this library in a build's report."""
        archs = tuple(str(arch) for arch in self.archs)
        row = LibraryReport(self.op, self.device, state, archs)
        return row._replace(**values)


def manifest_report(wanted: Wanted, state: str, path: str) -> LibraryReport:
    """Returns the row of a library in a build's report, with the facts of its manifest."""
    with open(os.path.join(os.path.dirname(path), cache.MANIFEST), encoding="utf-8") as file:
        manifest = json.load(file)
    return wanted.report(
        state,
        archs=tuple(manifest["archs"]),
        seconds=manifest["seconds"],
        size=manifest["size"],
        path=path,
    )


def _build_one(
    wanted: Wanted, location: Location | None, jobs: int, started: float, verbose: bool
) -> LibraryReport:
    """Compiles one library and returns its row, "built" or "failed"; raises no ``Exception``."""
    from ..build.service import build

    try:
        opened = build(
            wanted.spec,
            wanted.device,
            verbose=verbose,
            location=location,
            archs=wanted.archs,
            jobs=jobs,
            started=started,
        )
        os.close(opened.fd)
        return manifest_report(wanted, "built", opened.path)
    except BuildError as error:
        return wanted.report("failed", reason=str(error))
    except Exception as error:  # a thread must answer; anything else here is an error of its own
        return wanted.report("failed", reason=f"{type(error).__name__}: {error}")


def _stop(threads: Sequence[threading.Thread]) -> None:
    """Stops the compilers that the threads of ``build_all`` have started.

    A thread that waits for another process's lock is left to die with this process.
    """
    from ..build import ninja

    quiet = 0
    while quiet < 5 and any(thread.is_alive() for thread in threads):
        quiet = 0 if ninja.stop_all() else quiet + 1
        time.sleep(_STOP_PAUSE)


def build_all(
    wanted: Sequence[Wanted],
    location: Location | None,
    jobs: int,
    *,
    started: float | None = None,
    verbose: bool = False,
) -> BuildReport:
    """Compiles all libraries, those with long builds first; a build that fails stops no other.

    All builds share ``jobs`` compilers. The report's rows are in the order of ``wanted``.
    """
    since = time.time() if started is None else started
    begin = time.monotonic()
    pending = sorted(wanted, key=Wanted.cost, reverse=True)
    finished: queue.SimpleQueue[tuple[int, Wanted, LibraryReport]] = queue.SimpleQueue()
    threads: list[threading.Thread] = []
    reports: dict[Wanted, LibraryReport] = {}
    free = jobs

    def work(item: Wanted, share: int) -> None:
        """Compiles one library in a thread and puts its row into ``finished``."""
        finished.put((share, item, _build_one(item, location, share, since, verbose)))

    try:
        while len(reports) < len(wanted):
            for item, share in _fitting(pending, free):
                thread = threading.Thread(target=work, args=(item, share), daemon=True)
                thread.start()
                threads.append(thread)
                free -= share
            share, item, report = finished.get()
            free += share
            reports[item] = report
    except BaseException:  # Ctrl-C: no compiler is left behind
        _stop(threads)
        raise
    rows = tuple(reports[item] for item in wanted)
    return BuildReport(rows, time.monotonic() - begin, jobs)


def _fitting(pending: list[Wanted], free: int) -> Iterator[tuple[Wanted, int]]:
    """Removes from ``pending`` the libraries whose builds can start now.

    One gets one compiler while others wait: its sources differ in length, and more would idle.
    """
    while pending and free:
        item = pending.pop(0)
        sources = len(item.spec.device_sources(item.device))
        share = max(1, min(sources, free - len(pending)))
        free -= share
        yield item, share
