"""Compilation of many libraries at once: which ones, for which archs, and how many compilers."""

# Each is a build of its own, as on first use: what is finished stays so if a later one fails.

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...spec import DISPATCHER, JaxHandlersSpec, OpSpec
from .. import env, errors
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
from ..build import lock, ninja, resources
from ..find import cache
from ..find.cache import Location
from ..platform import soabi
from ..sources import closure
from .build_report import BuildReport, LibraryReport

DEVICES = ("cpu", "cuda")
_LOCK = "prebuild"  # beside those of the libraries, whose names end in a key
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
    known = {key: manifest[key] for key in ("seconds", "size")}
    return wanted.report(state, archs=tuple(manifest["archs"]), path=path, **known)


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
            raise errors.ArchError(f"{named[0]} names no CUDA arch, got {named[1]!r}")
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
        spec, device, reason = builders[choice.op], choice.device, choice.reason
        archs: tuple[Arch, ...] = ()
        if choice.wanted and spec.needs_archs(device):
            try:
                archs = targets.of(spec)
            except errors.ArchError as error:
                # a group takes what there is for these archs; but without any, nothing is right
                if choice.insisted or not targets.known:
                    raise
                reason = str(error)
        if reason or not choice.wanted:
            rows.append(LibraryReport(choice.op, device, "skipped", reason=reason))
        else:
            wanted.append(Wanted(spec, device, archs))
    return wanted, rows


def dispatchers(named: Sequence[pythons.Python | None]) -> list[Wanted]:
    """Returns one dispatcher to compile for each Python; None is the running one."""
    labels = [f"dispatcher {pythons.name_of(p.suffix if p else soabi())}" for p in named]
    specs = [DispatcherSpec(python=python) for python in named]
    return [Wanted(spec, "cpu", label=text) for spec, text in zip(specs, labels, strict=True)]


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
    except Exception as error:  # a thread must answer
        name = "" if isinstance(error, errors.BuildError) else f"{type(error).__name__}: "
        return wanted.report("failed", reason=f"{name}{error}")


def _stop(threads: Sequence[threading.Thread]) -> None:
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
    while pending and free:
        item = pending.pop(0)
        sources = len(item.spec.device_sources(item.device))
        share = max(1, min(sources, free - len(pending)))
        free -= share
        yield item, share


def choose_ops(
    builders: Mapping[str, OpSpec],
    ops: str | Iterable[str] | None,
    device: str | None,
    targets: Targets,
) -> list[Choice]:
    """Returns a decision for each library of ``ops`` on ``device``; None stands for all of them."""
    if device is not None and device not in DEVICES:
        raise errors.SettingError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    names = sorted(builders) if ops is None else [ops] if isinstance(ops, str) else list(ops)
    for name in names:
        if name not in builders and name != DISPATCHER:
            raise errors.unknown_op(name, sorted(builders))
    choices = []
    for name in dict.fromkeys(names):
        if (spec := builders.get(name)) is None:
            continue  # the dispatcher is always built
        for each in spec.DEVICES if device is None else [device]:
            reason = ""
            if each not in spec.DEVICES:
                reason = f"the op has no {each} library"
            elif spec.needs_archs(each) and device is None and not targets.known:
                reason = "no GPU is visible and no arch list is set"
            choices.append(Choice(name, each, not reason, ops is not None, reason))
    return choices


def _missing(
    wanted: Iterable[Wanted], targets: Targets, rows: dict[Wanted, LibraryReport]
) -> list[Wanted]:
    """Returns the libraries that the caches do not hold and adds the rows of others to ``rows``."""
    missing = []
    for item in wanted:
        gpus: Sequence[Capability | None] = [None]
        if item.archs and targets.named is None:
            gpus = targets.capabilities  # as on first use: whatever covers the GPU will do
        tags = [str(arch) for arch in item.archs]
        found = cache.look_up_for_all(item.spec, item.device, gpus, tags)
        if found is None:
            missing.append(item)
        else:
            rows[item] = manifest_report(item, "present", found.path)
    return missing


def into_cache(
    builders: Mapping[str, OpSpec],
    choices: Sequence[Choice],
    targets: Targets,
    *,
    jobs: int | None = None,
    verbose: bool = False,
    jax: bool = False,
) -> BuildReport:
    """Compiles what no cache holds of the wanted libraries and the dispatcher into the user's."""
    started, begin = time.time(), time.monotonic()
    if jobs is not None and jobs < 1:
        raise errors.SettingError(f"jobs must be an integer >= 1, got {jobs}")
    wanted, skipped = plan(builders, choices, targets)
    wanted = [*dispatchers([None]), *(jax_handlers() if jax else ()), *wanted]
    rows: dict[Wanted, LibraryReport] = {}
    missing = _missing(wanted, targets, rows)
    limit = jobs or resources.jobs()
    if missing:
        if env.jit_disabled():
            raise errors.JitDisabledError(
                f"{', '.join(f'{item.op} ({item.device})' for item in missing)}: neither prebuilt"
                " nor cached, and APEX_TE_DISABLE_JIT forbids building"
            )
        folder = cache.writable_cache(cache.LOCKS).path
        path = os.path.join(folder, cache.LOCKS, _LOCK)
        what = f"a prebuild of {len(missing)} libraries"
        with ninja.disk_errors(what, folder), lock.held(path, what, env.lock_timeout()):
            missing = _missing(missing, targets, rows)
            report = build_all(missing, None, limit, started=started, verbose=verbose)
        rows.update(zip(missing, report.libraries, strict=True))
    libraries = (*(rows[item] for item in wanted), *skipped)
    report = BuildReport(libraries, time.monotonic() - begin, limit)
    if not report.ok:
        raise errors.PrebuildError(report.failures(), report)
    return report
