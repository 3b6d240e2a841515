"""Facts that the commands tell, gathered without a compiler, torch, GPU or writable folder."""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import stat
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...spec import DISPATCHER, JAX_HANDLERS, SUITE, JaxHandlersSpec, OpSpec
from .. import env
from ..backends import library
from ..backends.archs import Arch, Capability, named_arch_list, visible_capabilities
from ..backends.pythons import DispatcherSpec
from ..build import failure
from ..errors import BuildError, CacheError, CompileError, UnknownOpError, unknown_op
from ..find import cache, inventory
from ..find.inventory import Entry
from ..find.key import key_of
from ..platform import CUDA, gpu_platform, installed_torch
from ..prebuild.batch import Targets
from . import machine
from .machine import Facts


def add_ops(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds both forms of naming ops, ``OP ...`` and ``--ops OP ...``, with ``text`` as help."""
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"{text}; several: rope,rms_norm too")
    more: Any = {"nargs": "+", "dest": "more_ops", "default": [], "metavar": "OP"}
    parser.add_argument("--ops", **more, help="the same as OP")


def ops_of(args: argparse.Namespace) -> list[str]:
    """Returns the names in both forms, each once."""
    words = ",".join([*args.ops, *args.more_ops]).split(",")
    return list(dict.fromkeys(word.strip() for word in words if word.strip()))


def check_names(ops: Iterable[str], known: Iterable[str]) -> None:
    """Raises ``UnknownOpError`` for the first of ``ops`` that is not among the known names."""
    names = set(known)
    if (first := next((op for op in ops if op not in names), None)) is not None:
        raise unknown_op(first, sorted(names))


def all_libraries() -> dict[str, OpSpec]:
    """Returns the builders of all ops, the dispatcher and the handlers for JAX, by name."""
    from ... import all_builders, get_builder, user_builders

    others = {name: get_builder(name) for name in (DISPATCHER, JAX_HANDLERS)}
    return {**others, **all_builders(), **user_builders()}


class Current(NamedTuple):
    """First digits of up-to-date keys, and compilers, by library; only of installed ops."""

    keys: Mapping[str, set[str]]
    compilers: Mapping[str, str]
    machine: str
    dispatcher: DispatcherSpec | None = None  # whose entries for other Pythons are up to date, too

    def _other_python(self, entry: Entry) -> str:
        """Returns the version of the other Python that an up-to-date dispatcher is for, else ""."""
        if self.dispatcher is None or entry.library != self.dispatcher.NAME:
            return ""
        key, version = inventory.key_for(self.dispatcher, entry.manifest)
        return version if key and key.startswith(entry.digits) else ""

    def stale(self, entry: Entry) -> str:
        """Returns why an entry is damaged, of other sources or flags or another compiler, or "".

        Entries for other CPUs and of ops that are not installed are not stale.
        """
        keys = self.keys.get(entry.library)
        if entry.problem or keys is None:
            return entry.problem
        if entry.digits not in keys and not self._other_python(entry):
            machine = entry.manifest.get("machine", self.machine)
            return "" if machine != self.machine else "other sources or flags"
        mine, theirs = self.compilers.get(entry.library), entry.manifest.get("compiler")
        return f"built by {theirs}, the compiler now is {mine}" if mine and theirs != mine else ""

    def use(self, entry: Entry) -> str:
        """Returns whom an entry serves other than this process, such as "Python 3.12", or ""."""
        keys = self.keys.get(entry.library)
        if keys is None:
            return "an op that is not installed here"
        if entry.digits in keys:
            return ""
        if version := self._other_python(entry):
            return f"Python {version}"
        return "another machine" if not self.stale(entry) else ""


def current(specs: Iterable[OpSpec]) -> Current:
    """Returns keys and compilers of the up-to-date entries of ``specs``; runs the compilers."""
    keys: dict[str, set[str]] = {}
    compilers: dict[str, str] = {}
    dispatcher = None
    for spec in specs:
        dispatcher = spec if isinstance(spec, DispatcherSpec) else dispatcher
        for device in spec.built_devices():
            name = spec.library_name(device)
            known = keys.setdefault(name, set())
            with contextlib.suppress(OSError):
                known.add(key_of(spec, device)[:24])
            with contextlib.suppress(BuildError, OSError):
                compilers[name] = library.compiler_version(spec, device)
    return Current(keys, compilers, os.uname().machine, dispatcher)


class Here(NamedTuple):
    """GPUs and archs of this machine; if its arch list is bad, ``targets`` is None."""

    capabilities: tuple[Capability, ...]
    targets: Targets | None
    problem: str

    def archs(self, spec: OpSpec, device: str) -> tuple[Arch, ...]:
        """Returns the archs that a build of the library would be for, none without GPU code."""
        if not spec.needs_archs(device):
            return ()
        if self.targets is None:
            raise BuildError(self.problem)
        return self.targets.of(spec)


def here() -> Here:
    """Returns the GPUs and archs of this machine; asks the driver for the visible GPUs."""
    gpus: tuple[Capability, ...] = ()
    try:
        gpus = tuple(visible_capabilities())
        targets = Targets.find() if named_arch_list() is not None else Targets(None, gpus)
        return Here(gpus, targets, "")
    except BuildError as error:
        return Here(gpus, None, str(error))


def _loaded_entry(spec: OpSpec, device: str, gpus: Sequence[Capability | None]) -> Entry | None:
    """Returns the entry that a process here would load, None if a GPU has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the caches are reported apart
        found = cache.look_up_for_all(spec, device, gpus)
    if found is None:
        return None
    path = os.path.dirname(found.path)
    folder, key = os.path.split(os.path.dirname(path))
    places = [place for place in cache.locations(spec.prebuilt_folder) if place.path == folder]
    held = [entry for place in places for entry in inventory.entries(place, check=False, key=key)]
    return next((entry for entry in held if entry.path == path), None)


def recent_failure(spec: OpSpec, device: str, archs: Sequence[Arch]) -> CompileError | None:
    """Returns the stored compile error that a call would raise, None if there is none."""
    if env.jit_retry():
        return None
    folder = cache.entry_folder(spec.library_name(device), key_of(spec, device))
    name = f"failure-{cache.entry_tag(archs)}.json"
    path = os.path.join(cache.user_cache().path, folder, name)
    compiler = library.compiler_version(spec, device, archs)
    return failure.recall(path, compiler, time.time() - failure.KEPT_SECONDS)


def _row(op: str, device: str, **values: Any) -> Facts:
    """Returns the facts of a library, those that are not in ``values`` as for one not built."""
    empty: Facts = {"op": op, "device": device, "state": "", "reason": "", "key": "", "path": ""}
    empty.update(archs=[], seconds=None, size=None, built=None, compiler="", min_arch=None)
    return {**empty, **values}


def library_facts(spec: OpSpec, device: str, here: Here) -> Facts:
    """Returns the facts of one library as a dict for JSON, with its state and the reason for it."""
    facts, name = _row(spec.NAME, device), spec.library_name(device)
    gpus: Sequence[Capability | None] = [None]
    if spec.needs_archs(device):
        facts["min_arch"] = list(spec.min_arch)
        if here.capabilities:
            gpus = [gpu for gpu in here.capabilities if gpu >= spec.min_arch]
    try:
        facts["key"] = key_of(spec, device)
        if entry := _loaded_entry(spec, device, gpus):
            facts.update(state="prebuilt" if entry.location.kind == "prebuilt" else "cached")
            facts.update(path=os.path.join(entry.path, f"{name}.so"), archs=list(entry.archs))
            facts.update(seconds=entry.seconds(), built=entry.built())
            facts.update((key, entry.manifest.get(key, facts[key])) for key in ("size", "compiler"))
            return facts
        archs = here.archs(spec, device)
        facts["archs"] = [str(arch) for arch in archs]
        place, tag = cache.user_cache(), cache.entry_tag(archs)
        facts["seconds"] = inventory.last_seconds(place, name, tag)
        # what a build would end with before its first command
        spec.check_device(device)
        if env.jit_disabled():
            raise BuildError("APEX_TE_DISABLE_JIT forbids compiling")
        library.check(spec, device, archs)
        if cache.named_cache() and not cache.is_writable(place.path):
            raise CacheError(f"APEX_TE_CACHE_DIR={cache.named_cache()} is not writable")
        failed = recent_failure(spec, device, archs)
        facts.update(state="failed" if failed else "can build")
        facts.update(reason=failed.first_error if failed else "")
    except (BuildError, OSError) as error:
        facts.update(state="cannot", reason=str(error))
    except Exception as error:  # of a method that another package's builder overrides
        facts.update(state="cannot", reason=f"{type(error).__name__}: {error}")
    return facts


def _rows(spec: OpSpec, here: Here) -> list[Facts]:
    try:
        return [library_facts(spec, device, here) for device in spec.built_devices()]
    except Exception as error:
        return [_row(spec.NAME, "-", state="cannot", reason=f"{type(error).__name__}: {error}")]


def _origin(location: cache.Location) -> str:
    if location.kind == "prebuilt":
        return "the installed package"
    if location.kind == "extra":
        return "APEX_TE_CACHE_PATH"
    if location.path != cache.user_cache().path:
        return "XDG_RUNTIME_DIR, where the default fails"
    if cache.named_cache():
        return "APEX_TE_CACHE_DIR"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return "XDG_CACHE_HOME" if os.path.isabs(xdg) else "the default"


def cache_folder(location: cache.Location) -> Facts:
    """Returns owner, mode, contents and problem of one cache folder, as a dict for JSON."""
    facts: Facts = {"kind": location.kind, "path": location.path, "from": _origin(location)}
    facts.update(exists=False, owner=None, mode=None, problem="", entries=0, bytes=0)
    facts["writable"] = location.private and cache.is_writable(location.path)
    if location.private and not cache.named_cache():
        problem = cache.parent_problem(location.path)
        facts["problem"] = f"nothing is built in it: {problem}" if problem else ""
    unusable = location.private and not facts["writable"]
    try:
        status = os.stat(location.path, follow_symlinks=False)
    except FileNotFoundError:
        if unusable and not facts["problem"]:
            facts["problem"] = "it does not exist and cannot be made"
        return facts
    except OSError as error:
        return {**facts, "problem": str(error.strerror)}
    facts.update(exists=True, owner=str(status.st_uid), mode=f"{stat.S_IMODE(status.st_mode):04o}")
    with contextlib.suppress(KeyError):
        facts["owner"] = pwd.getpwuid(status.st_uid).pw_name
    try:
        facts["entries"] = len(inventory.entries(location, check=False))
        facts["bytes"] = inventory.tree_bytes(location.path)
    except (CacheError, OSError) as error:
        facts["problem"] = str(error)
    if unusable and not facts["problem"]:
        facts["problem"] = "it is not writable: what it holds is used, and nothing can be added"
    with contextlib.suppress(OSError):
        if location.private:
            disk = os.statvfs(location.path)
            facts["free"] = disk.f_bavail * disk.f_frsize
    return facts


def collect(builders: Iterable[OpSpec], problems: Mapping[str, str] | None = None) -> Facts:
    """Returns the whole report for JSON; ``problems`` maps ops whose builders fail to reasons."""
    core, now = DispatcherSpec(), here()
    visible = [str(Arch(*gpu)) for gpu in now.capabilities]
    named = now.targets.named if now.targets is not None else None
    chosen = named[1].split(";") if named else visible
    rows = [row for spec in (core, JaxHandlersSpec(), *builders) for row in _rows(spec, now)]
    for name, reason in (problems or {}).items():
        rows.append(_row(name, "-", state="cannot", reason=reason))
    return {
        "apex_te": {"version": machine.suite_version(), "path": str(SUITE)},
        "machine": machine.machine(),
        "python": machine.python(),
        "torch": installed_torch()._asdict(),
        "gpus": machine.gpus(visible),
        "archs": {
            "archs": chosen,
            "from": named[0] if named else ("the visible GPUs" if chosen else None),
            "problem": now.problem,
            "example": CUDA.example if now.problem else gpu_platform().example,
        },
        "tools": machine.tools(),
        "caches": [cache_folder(place) for place in cache.locations(core.prebuilt_folder)],
        "settings": machine.settings(),
        "libraries": rows,
    }


def of_all_ops() -> Facts:
    """Returns the report on apex_te's ops and those of other packages, as ``collect`` does."""
    from ... import builder_names, get_builder, user_ops

    suite, problems = {}, {}
    for name in builder_names():
        try:
            suite[name] = get_builder(name)
        except UnknownOpError as error:
            problems[name] = str(error)
    others, more_problems = user_ops.builders_and_problems()
    return collect([*suite.values(), *others.values()], {**problems, **more_problems})
