"""Report on this installation: machine, compilers, GPUs, caches, and the state of every library.

It needs no compiler, GPU or writable folder, and changes nothing: no folder is made, torch is not
imported, CUDA is not initialised in this process.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...spec import SUITE, JaxHandlersSpec, OpSpec
from .. import env
from ..backends import library
from ..backends.archs import (
    Arch,
    Capability,
    named_arch_list,
    visible_capabilities,
)
from ..backends.pythons import DispatcherSpec
from ..build import failure
from ..errors import BuildError, CacheError, CompileError, UnknownOpError
from ..find import cache, inventory
from ..find.cache import look_up, parent_problem
from ..find.key import key_of
from ..platform import CUDA, gpu_platform
from ..prebuild.batch import Targets
from . import machine

Facts = dict[str, Any]


class Here(NamedTuple):
    """GPUs and archs of this machine; if its arch list is bad, ``targets`` is None."""

    capabilities: tuple[Capability, ...]
    targets: Targets | None
    problem: str


def here() -> Here:
    """Returns the GPUs and archs of this machine; asks the driver for the visible GPUs."""
    capabilities: tuple[Capability, ...] = ()
    try:
        capabilities = tuple(visible_capabilities())
        named = named_arch_list()
        targets = Targets.find() if named is not None else Targets(None, capabilities)
    except BuildError as error:
        return Here(capabilities, None, str(error))
    return Here(capabilities, targets, "")


def found_entry(
    spec: OpSpec, device: str, capabilities: Sequence[Capability]
) -> tuple[str, str] | None:
    """Returns kind of cache folder, and path, of the entry that a process here would load.

    None if there is none, or if a GPU that is new enough for the op has no library.
    """
    gpus: Sequence[Capability | None] = [None]
    if spec.needs_archs(device) and capabilities:
        gpus = [gpu for gpu in capabilities if gpu >= spec.min_arch]
    found = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the caches are reported apart
        for gpu in gpus:
            opened = look_up(spec, device, gpu)
            if opened is None:
                return None
            os.close(opened.fd)
            found = opened.kind, os.path.dirname(opened.path)
    return found


def archs_to_build(spec: OpSpec, device: str, here: Here) -> tuple[Arch, ...]:
    """Returns the archs that a build of the library would be for, none without GPU code."""
    if not spec.needs_archs(device):
        return ()
    if here.targets is None:
        raise BuildError(here.problem)
    return here.targets.of(spec)


def check_build(spec: OpSpec, device: str, archs: Sequence[Arch]) -> None:
    """Raises the error that a build would end with before its first command; changes nothing."""
    spec.check_device(device)
    if env.jit_disabled():
        raise BuildError("APEX_TE_DISABLE_JIT forbids compiling")
    library.check(spec, device, archs)
    path = cache.user_cache().path
    if cache.named_cache() and not cache.is_writable(path):
        raise CacheError(f"APEX_TE_CACHE_DIR={cache.named_cache()} is not writable")


def recent_failure(
    spec: OpSpec, device: str, archs: Sequence[Arch]
) -> tuple[CompileError, float] | None:
    """Returns the stored compile error that a call would raise, and its age in seconds, or None."""
    if env.jit_retry():
        return None
    folder = cache.entry_folder(spec.library_name(device), key_of(spec, device))
    tag = cache.entry_tag(archs)
    path = os.path.join(cache.user_cache().path, folder, f"failure-{tag}.json")
    compiler = library.compiler_version(spec, device, archs)
    error = failure.recall(path, compiler, time.time() - failure.KEPT_SECONDS)
    return None if error is None else (error, time.time() - os.stat(path).st_mtime)


def library_facts(spec: OpSpec, device: str, here: Here) -> Facts:
    """Returns the facts of one library as a dict for JSON, with its state and the reason for it."""
    facts: Facts = {"op": spec.NAME, "device": device, "state": "", "reason": ""}
    facts.update(key="", path="", archs=[], seconds=None, size=None, built=None, compiler="")
    facts["min_arch"] = list(spec.min_arch) if spec.needs_archs(device) else None
    name = spec.library_name(device)
    try:
        facts["key"] = key_of(spec, device)
        found = found_entry(spec, device, here.capabilities)
        if found is not None:
            facts["state"] = "prebuilt" if found[0] == "prebuilt" else "cached"
            facts["path"] = os.path.join(found[1], f"{name}.so")
            facts.update(_entry_facts(spec, name, found[1]))
            return facts
        archs = archs_to_build(spec, device, here)
        facts["archs"] = [str(arch) for arch in archs]
        tag = cache.entry_tag(archs)
        facts["seconds"] = inventory.last_seconds(cache.user_cache(), name, tag)
        check_build(spec, device, archs)
        failed = recent_failure(spec, device, archs)
        if failed is not None:
            facts.update(state="failed", reason=failed[0].first_error)
        else:
            facts["state"] = "can build"
    except (BuildError, OSError) as error:
        facts.update(state="cannot", reason=str(error))
    except Exception as error:  # of a method that another package's builder overrides
        facts.update(state="cannot", reason=f"{type(error).__name__}: {error}")
    return facts


def _rows(spec: OpSpec, here: Here) -> list[Facts]:
    """Returns the facts of each library of an op; one row with the reason if it names none."""
    try:
        devices = spec.built_devices()
    except Exception as error:
        return [broken_builder(spec.NAME, f"{type(error).__name__}: {error}")]
    return [library_facts(spec, device, here) for device in devices]


def broken_builder(name: str, reason: str) -> Facts:
    """Returns the facts of an op whose builder does not load, with the keys of a library's."""
    facts: Facts = {"op": name, "device": "-", "state": "cannot", "reason": reason}
    facts.update(key="", path="", archs=[], seconds=None, size=None, built=None, compiler="")
    facts["min_arch"] = None
    return facts


def _entry_facts(spec: OpSpec, name: str, folder: str) -> Facts:
    """Returns what the manifest of an entry says, as a dict for JSON."""
    for location in cache.locations(spec.prebuilt_folder):
        if os.path.dirname(os.path.dirname(folder)) != location.path:
            continue
        for entry in inventory.entries(location, name, check=False):
            if entry.path == folder:
                return {
                    "archs": list(entry.archs),
                    "seconds": entry.seconds(),
                    "size": entry.manifest.get("size"),
                    "built": entry.built(),
                    "compiler": entry.manifest.get("compiler", ""),
                }
    return {}


def _origin(location: cache.Location) -> str:
    """Returns the variable or rule that makes look-ups search a cache folder, as text."""
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
        problem = parent_problem(location.path)
        facts["problem"] = f"nothing is built in it: {problem}" if problem else ""
    try:
        status = os.stat(location.path, follow_symlinks=False)
    except FileNotFoundError:
        if location.private and not facts["writable"] and not facts["problem"]:
            facts["problem"] = "it does not exist and cannot be made"
        return facts
    except OSError as error:
        return {**facts, "problem": str(error.strerror)}
    facts["exists"] = True
    try:
        facts["owner"] = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        facts["owner"] = str(status.st_uid)
    facts["mode"] = f"{stat.S_IMODE(status.st_mode):04o}"
    try:
        found = inventory.entries(location, check=False)
        facts["entries"] = len(found)
        facts["bytes"] = inventory.tree_bytes(location.path)
    except (CacheError, OSError) as error:
        facts["problem"] = str(error)
    if location.private and not facts["problem"] and not facts["writable"]:
        facts["problem"] = "it is not writable: what it holds is used, and nothing can be added"
    if facts["exists"] and location.private:
        with contextlib.suppress(OSError):
            disk = os.statvfs(location.path)
            facts["free"] = disk.f_bavail * disk.f_frsize
    return facts


def collect(builders: Iterable[OpSpec], problems: Mapping[str, str] | None = None) -> Facts:
    """Returns the whole report for JSON; ``problems`` maps ops whose builders fail to reasons."""
    core = DispatcherSpec()
    now = here()
    builders = [core, JaxHandlersSpec(), *builders]
    named = now.targets.named if now.targets is not None else None
    chosen = named[1].split(";") if named else [str(Arch(*gpu)) for gpu in now.capabilities]
    origin = named[0] if named else ("the visible GPUs" if chosen else None)
    return {
        "apex_te": {"version": machine.suite_version(), "path": str(SUITE)},
        "machine": machine.machine(),
        "python": machine.python(),
        "torch": machine.torch(),
        "gpus": machine.gpus([str(Arch(*gpu)) for gpu in now.capabilities]),
        "archs": {
            "archs": chosen,
            "from": origin,
            "problem": now.problem,
            "example": CUDA.example if now.problem else gpu_platform().example,
        },
        "tools": machine.tools(),
        "caches": [cache_folder(place) for place in cache.locations(core.prebuilt_folder)],
        "settings": machine.settings(),
        "libraries": [
            *(row for spec in builders for row in _rows(spec, now)),
            *(broken_builder(name, reason) for name, reason in (problems or {}).items()),
        ],
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
