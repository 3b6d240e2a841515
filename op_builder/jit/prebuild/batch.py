"""Compilation of many libraries at once: which ones, for which archs, and how many compilers.

Each library is a ninja graph of its own, and the compilers of all graphs that run stay within a
limit: the lock, the stored failure and the publication of a library are those of a build on first
use, and what is finished stays finished when a later one fails or the process is killed.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...spec import JaxHandlersSpec, OpSpec
from ..backends import pythons
from ..backends.archs import (
    Arch,
    Capability,
    choose,
    named_arch_list,
    parse_arch_list,
    visible_capabilities,
)
from ..backends.pythons import DispatcherSpec
from ..errors import ArchError, BuildError
from ..find import cache
from ..find.cache import Location
from ..platform import soabi
from ..sources import closure
from .build_report import BuildReport, LibraryReport

DEVICES = ("cpu", "cuda")
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
        archs = tuple(map(str, self.archs))
        return LibraryReport(self.op, self.device, state, archs)._replace(**values)


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


class Choice(NamedTuple):
    """Decision about one library of a prebuild; if ``insisted``, it is an error if no arch fits."""

    op: str
    device: str
    wanted: bool
    insisted: bool = False
    reason: str = ""


class Targets(NamedTuple):
    """Archs that a prebuild compiles for: those ``named``, as ``(source, list)``, or the GPUs'."""

    named: tuple[str, str] | None
    capabilities: tuple[Capability, ...] = ()

    @classmethod
    def find(cls, text: str | None = None) -> Targets:
        """Returns the archs of ``text``, else of the environment's list, else of the GPUs."""
        named = ("arch", text) if text is not None else named_arch_list()
        if named is None:
            return cls(None, tuple(visible_capabilities()))
        archs = parse_arch_list(named[1], visible_capabilities)
        if not archs:
            raise ArchError(f"{named[0]} names no CUDA arch, got {named[1]!r}")
        return cls((named[0], ";".join(str(arch) for arch in archs)))

    @property
    def known(self) -> bool:
        """True if there is a list or a visible GPU."""
        return self.named is not None or bool(self.capabilities)

    def of(self, spec: OpSpec) -> tuple[Arch, ...]:
        """Returns the archs to compile the op ``spec`` for."""
        named = self.named
        if named is None and self.capabilities:
            named = ("the visible GPUs", ";".join(str(Arch(*c)) for c in self.capabilities))
        return choose(spec.NAME, spec.min_arch, spec.specific_archs(), None, named)


def plan(
    builders: Mapping[str, OpSpec], choices: Iterable[Choice], targets: Targets
) -> tuple[list[Wanted], list[LibraryReport]]:
    """Turns decisions into libraries to compile and rows of those skipped."""
    wanted: list[Wanted] = []
    rows: list[LibraryReport] = []
    for choice in choices:
        spec, device = builders[choice.op], choice.device
        if not choice.wanted:
            rows.append(LibraryReport(choice.op, device, "skipped", reason=choice.reason))
            continue
        archs: tuple[Arch, ...] = ()
        if spec.needs_archs(device):
            try:
                archs = targets.of(spec)
            except ArchError as error:
                # a group takes what there is for these archs; but without any, nothing is right
                if choice.insisted or not targets.known:
                    raise
                rows.append(LibraryReport(choice.op, device, "skipped", reason=str(error)))
                continue
        wanted.append(Wanted(spec, device, archs))
    return wanted, rows


def dispatchers(named: Sequence[pythons.Python | None]) -> list[Wanted]:
    """Returns one dispatcher to compile for each Python; None is the running one."""
    wanted = []
    for python in named:
        version = pythons.name_of(python.suffix if python else soabi())
        wanted.append(Wanted(DispatcherSpec(python=python), "cpu", label=f"dispatcher {version}"))
    return wanted


def jax_handlers() -> list[Wanted]:
    """Returns the library of handlers for JAX, one for all Pythons."""
    return [Wanted(JaxHandlersSpec(), "cpu")]


def _build_one(
    wanted: Wanted, location: Location | None, jobs: int, started: float, verbose: bool
) -> LibraryReport:
    """Compiles one library and returns its row, "built" or "failed"; raises no ``Exception``."""
    from ..build.service import build

    try:
        opened = build(
            wanted.spec, wanted.device, verbose=verbose, location=location, archs=wanted.archs,
            jobs=jobs, started=started,
        )  # fmt: skip
        os.close(opened.fd)
        return manifest_report(wanted, "built", opened.path)
    except BuildError as error:
        return wanted.report("failed", reason=str(error))
    except Exception as error:  # a thread must answer; anything else here is an error of its own
        return wanted.report("failed", reason=f"{type(error).__name__}: {error}")


def _stop(threads: Sequence[threading.Thread]) -> None:
    """Stops the compilers that the threads of ``build_all`` have started."""
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
    """Compiles libraries with ``jobs`` compilers, long builds first; a failure stops no other."""
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
    """Removes from ``pending`` the libraries whose builds can start now."""
    while pending and free:
        item = pending.pop(0)
        sources = len(item.spec.device_sources(item.device))
        share = max(1, min(sources, free - len(pending)))
        free -= share
        yield item, share
