"""Opened libraries of this process, each looked up or, under a lock, compiled, and their import."""

from __future__ import annotations

import contextlib
import copy
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from ...spec import OpSpec
from .. import env, errors
from ..backends import library
from ..backends.archs import (
    Arch,
    Capability,
    covered,
    initialised_capabilities,
    visible_capabilities,
)
from ..backends.pybind import installed_torch
from ..find import cache
from ..find.cache import OpenedLibrary, look_up, refused, wanted_archs
from ..find.inventory import why_missing
from ..find.key import key_of
from ..text import tell

if TYPE_CHECKING:
    from .publish import Request

_T = TypeVar("_T")


class _Turn:
    """State of the loading of one library, shared by the threads that ask for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.failures = 0
        self.error = errors.BuildError()
        self.asked: tuple[Capability | None, bool] = (None, False)


_Identity = tuple[str, str, str]
_opened: dict[_Identity, list[OpenedLibrary]] = {}
_built: set[tuple[int, int]] = set()  # files that this process has built or waited for
_turns: dict[_Identity, _Turn] = {}


def build(
    spec: OpSpec,
    device: str,
    capability: Capability | None = None,
    *,
    force: bool = False,
    verbose: bool = False,
    location: cache.Location | None = None,
    archs: tuple[Arch, ...] | None = None,
    jobs: int | None = None,
    started: float | None = None,
) -> OpenedLibrary:
    """Compiles and publishes a library, unless a cache holds it once the lock is taken.

    Raises instead a compile error stored up to 60 s before ``started``, in seconds since the epoch;
    with ``APEX_TE_JIT_RETRY`` only one stored later. ``force`` compiles in any case.
    """
    from .ninja import disk_errors
    from .publish import Request, Vanished

    if env.jit_disabled():
        command = f"python -m apex_te build --ops {spec.NAME} --device {device}"
        note = why_missing(spec)
        raise errors.JitDisabledError(
            f"{spec.NAME} ({device}): no library is prebuilt or cached, and APEX_TE_DISABLE_JIT"
            f" forbids building it; install with `{spec.BUILD_VAR}=1 pip install .`,"
            f" or fill the cache with `APEX_TE_DISABLE_JIT=0 {command}`{note and '; ' + note}"
        )
    started = time.time() if started is None else started
    archs = wanted_archs(spec, device, capability) if archs is None else archs
    compiler = library.compiler_version(spec, device, archs)
    verbose = verbose or env.jit_verbose()
    key = key_of(spec, device)
    request = Request(spec, device, key, archs, compiler, capability, force, verbose, jobs, started)
    inside = (cache.LOCKS, cache.TEMPORARY, request.folder)
    try:
        with disk_errors(request.what, (location or cache.user_cache()).path):
            if location is not None:
                cache.prepare(location, *inside)
            target = location or cache.writable_cache(*inside)
        try:
            return _build_in(target, request)
        except cache.Unsafe as problem:
            if location is not None or cache.named_cache():
                raise
            target = cache.fall_back(f"the default cache cannot be used: {problem}", *inside)
        except (Vanished, FileNotFoundError):  # by a clean-up, which does not come twice
            cache.prepare(target, *inside)
        return _build_in(target, request)
    except OSError as error:
        raise errors.BuildError(f"{request.what}: cannot be built: {error}") from error


def _build_in(target: cache.Location, request: Request) -> OpenedLibrary:
    """Compiles a library in one cache under its lock, if it is still missing or with ``force``."""
    from . import failure, lock, publish
    from .ninja import disk_errors

    tags = [str(arch) for arch in request.archs]
    failed = os.path.join(target.path, request.folder, f"failure-{request.tag}.json")
    retry = env.jit_retry() or request.force
    since = request.started - failure.KEPT_SECONDS

    def raise_stored(oldest: float | None) -> None:
        if error := failure.recall(failed, request.compiler, oldest):
            raise error

    def published(capability: Capability | None = None) -> OpenedLibrary | None:
        if request.force:
            return None
        return cache.find(target, request.library, request.key, capability, tags)

    if not retry:
        raise_stored(since)
    stamp = failure.stamp(failed)
    path = os.path.join(target.path, cache.LOCKS, request.folder)
    with (
        disk_errors(request.what, target.path),
        lock.held(path, request.what, env.lock_timeout()) as alone,
    ):
        found = published(request.capability)
        if found is not None:
            return found
        if not request.force:
            if failure.stamp(failed) != stamp:  # stored while this process waited
                raise_stored(None)
            raise_stored(request.started if retry else since)
        if note := why_missing(request.spec):
            tell(f"apex_te: {note}; compiling one, once")
        if alone:
            publish.remove_leftovers(target.path, request.folder)
        try:
            built = publish.build(request, target, published)
        except errors.CompileError as error:
            failure.store(failed, error, request.compiler)
            raise
        failure.forget(failed)
        return built


def _kept(identity: _Identity, capability: Capability | None) -> OpenedLibrary | None:
    for opened in _opened.get(identity, ()):
        serves = capability is None or not opened.archs or covered(opened.archs, capability)
        if serves and opened.is_open():
            return opened
    return None


def open_library(
    spec: OpSpec,
    device: str,
    capability: Capability | None = None,
    *,
    force: bool = False,
    verbose: bool = False,
) -> OpenedLibrary:
    """Returns the opened library for ``device``, looked up or compiled, once for all threads."""
    identity = (str(spec.root), spec.NAME, device)
    if not force and (kept := _kept(identity, capability)):
        return kept
    asked = (capability, force)
    turn = _turns.setdefault(identity, _Turn())
    me = threading.get_ident()
    if turn.owner == me:
        what = f"{spec.NAME} ({device})"
        raise errors.ReentrantLoadError(f"{what}: loading it asked for the same library again")
    failures = turn.failures
    with turn.lock:
        try:
            turn.owner = me
            if not force and (kept := _kept(identity, capability)):
                return kept
            if turn.failures != failures and turn.asked == asked:
                raise copy.copy(turn.error)
            with errors.build_errors(f"{spec.NAME} ({device})"):
                spec.check_device(device)
                if capability is None and spec.needs_archs(device):
                    devices = initialised_capabilities()
                    capability = devices[0] if devices else None
                opened_now = None if force else look_up(spec, device, capability)
                if opened_now is None:
                    opened_now = build(spec, device, capability, force=force, verbose=verbose)
                    _built.add(opened_now.file)
            _opened.setdefault(identity, []).insert(0, opened_now)
            return opened_now
        except errors.BuildError as error:
            # a copy: the original holds the frames of this thread
            turn.error, turn.asked = copy.copy(error), asked
            turn.failures += 1
            raise
        finally:
            turn.owner = None


def load_library(
    spec: OpSpec,
    device: str,
    capability: Capability | None,
    use: Callable[[OpenedLibrary], _T],
    *,
    force: bool = False,
    verbose: bool = False,
) -> _T:
    """Opens a library and returns what ``use``, which loads it, returns."""
    opened = open_library(spec, device, capability, force=force, verbose=verbose)
    try:
        return _used(spec, device, opened, use)
    except ImportError as problem:
        if opened.file not in refused:
            raise
        for known in _opened.values():
            known[:] = [each for each in known if each.file != opened.file]
        try:
            opened = open_library(spec, device, capability, verbose=verbose)
        except errors.BuildError as error:
            raise problem from error
    return _used(spec, device, opened, use)


def _used(
    spec: OpSpec, device: str, opened: OpenedLibrary, use: Callable[[OpenedLibrary], _T]
) -> _T:
    """Returns what ``use`` returns; adds a library to ``refused`` if another build may load."""
    try:
        with errors.build_errors(f"{spec.NAME} ({device})"):
            return use(opened)
    except ImportError as error:
        from . import hints  # here, because importing it takes a while

        if opened.file not in _built and hints.REBUILT.search(str(error)):
            refused[opened.file] = str(error)
        raise hints.load_error(spec.NAME, opened.path, error, spec.BINDING == "pybind11") from None


def import_module(name: str, opened: OpenedLibrary) -> ModuleType:
    """Imports an opened library as module ``name``; one already in ``sys.modules`` is returned."""
    loader = importlib.machinery.ExtensionFileLoader(name, opened.proc_path)
    found = importlib.util.spec_from_file_location(name, opened.proc_path, loader=loader)
    if found is None:
        raise ImportError(f"{name}: cannot be imported from {opened.path}", name=name)
    module = importlib.util.module_from_spec(found)
    loader.exec_module(module)
    return sys.modules.setdefault(name, module)


_import_lock = threading.RLock()
_extensions: dict[str, tuple[OpSpec, ModuleType]] = {}


def _refuse_taken(spec: OpSpec, name: str) -> None:
    module = sys.modules.get(name)
    found = None
    if module is None:
        # apex's builders name a module of apex, which need not be installed
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.util.find_spec(name)
    if module is not None or found is not None:
        where = getattr(module, "__file__", None) or getattr(found, "origin", None)
        raise ImportError(
            f"{spec.NAME}: {name} is another module already ({where}); give the op another NAME,"
            " or override absolute_name()",
            name=name,
        )


def load_extension(spec: OpSpec, force: bool = False, verbose: bool = False) -> ModuleType:
    """Returns a pybind11 op's module, imported once; ``force`` compiles and imports it anew."""
    name = spec.absolute_name()
    with _import_lock:
        known = _extensions.get(name)
        if known is not None and known[0].root != spec.root:
            raise errors.DuplicateOpError(
                f"{name}: extensions of {known[0].root} and of {spec.root} have the same name"
            )
        if known is not None and not force:
            return known[1]
        if known is None:
            _refuse_taken(spec, name)
        before: ModuleType | None = None

        def use(opened: OpenedLibrary) -> ModuleType:
            """Returns the opened library, imported; what had its name is out of the way."""
            nonlocal before
            before = sys.modules.pop(name, before)
            return import_module(name, opened)

        try:
            torch, devices = installed_torch(spec.NAME), []
            if spec.needs_archs("cpu") and (torch.version.cuda or torch.version.hip) is not None:
                devices = visible_capabilities()  # no tensor tells the device yet
            capability = devices[0] if devices else None
            module = load_library(spec, "cpu", capability, use, force=force, verbose=verbose)
        except ImportError as error:
            if before is not None:
                sys.modules[name] = before
            text = (
                f"{error} (the module cannot be imported: PYBIND11_MODULE must name"
                f" TORCH_EXTENSION_NAME or {spec.NAME}; libraries_args() adds libraries to link)"
            )
            raise ImportError(text, name=name, path=error.path) from error
        _extensions[name] = (spec, module)
        return module


def _forked() -> None:
    """Drops a forked child's locks, which other threads of the parent may have held."""
    global _import_lock
    _turns.clear()
    _import_lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
