"""Opened libraries of a process: looked up, or built under a lock."""

from __future__ import annotations

import copy
import os
import sys
import threading
import time

from ...spec import OpSpec
from .. import env
from ..backends import library
from ..backends.archs import Arch, Capability, covered, initialised_capabilities
from ..errors import BuildError, CompileError, JitDisabledError, ReentrantLoadError
from ..find import cache
from ..find.dispatchers import why_missing
from ..find.entry import OpenedLibrary
from ..find.key import key_of
from ..find.look_up import look_up, wanted_archs
from .request import Request


class _Turn:
    """The thread that loads a library now, and the error of the last one that failed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.failures = 0
        self.error = BuildError()
        self.asked: tuple[Capability | None, bool] = (None, False)


_Identity = tuple[str, str, str]
_opened: dict[_Identity, list[OpenedLibrary]] = {}
_turns: dict[_Identity, _Turn] = {}


def _serves(opened: OpenedLibrary, capability: Capability | None) -> bool:
    return capability is None or not opened.archs or covered(opened.archs, capability)


def _disabled(spec: OpSpec, device: str) -> JitDisabledError:
    command = f"python -m apex_te build --ops {spec.NAME} --device {device}"
    note = why_missing(spec)
    return JitDisabledError(
        f"{spec.NAME} ({device}): no library is prebuilt or cached, and APEX_TE_DISABLE_JIT"
        f" forbids building it; install with `{spec.BUILD_VAR}=1 pip install .`,"
        f" or fill the cache with `APEX_TE_DISABLE_JIT=0 {command}`{note and '; ' + note}"
    )


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
    """Builds under the lock, unless another process has just done so.

    Args:
        spec: the op.
        device: device of the library.
        capability: GPU that the library must serve.
        force: builds in any case.
        verbose: shows the compiler commands.
        location: cache to build in; by default the user's.
        archs: archs to build for, instead of the environment's and the GPUs'.
        jobs: compilers at once.
        started: seconds since the epoch at which the caller began to wait; it takes part in a
            failure stored since.
    """
    from .ninja import disk_errors
    from .publish import Vanished

    if env.jit_disabled():
        raise _disabled(spec, device)
    started = time.time() if started is None else started
    archs = wanted_archs(spec, device, capability) if archs is None else archs
    compiler = library.compiler_version(spec, device, archs)
    flags, verbose = library.key_flags(spec, device), verbose or env.jit_verbose()
    key = key_of(spec, device)
    request = Request(spec, device, key, archs, compiler, flags, verbose, jobs)
    name = cache.entry_folder(request.library, request.key)
    inside = (cache.LOCKS, cache.TEMPORARY, name)
    try:
        with disk_errors(request.what, (location or cache.user_cache()).path):
            if location is None:
                target = cache.writable_cache(*inside)
            else:
                target = location
                cache.prepare(target, *inside)
        try:
            return _build_in(target, request, name, capability, started, force)
        except cache.Unsafe as problem:
            if location is not None or cache.named_cache():
                raise
            target = cache.fall_back(f"the default cache cannot be used: {problem}", *inside)
        except (Vanished, FileNotFoundError):  # by a clean-up, which does not come twice
            cache.prepare(target, *inside)
        return _build_in(target, request, name, capability, started, force)
    except OSError as error:
        raise BuildError(f"{request.what}: cannot be built: {error}") from error


def _build_in(
    target: cache.Location,
    request: Request,
    name: str,
    capability: Capability | None,
    started: float,
    force: bool,
) -> OpenedLibrary:
    """Builds in the cache ``target`` under the lock ``name``; all folders are there."""
    from . import failure, lock, publish
    from .ninja import disk_errors

    tags = [str(arch) for arch in request.archs]
    failed = os.path.join(target.path, name, f"failure-{request.tag}.json")
    retry = env.jit_retry() or force
    since = started - failure.KEPT_SECONDS
    if not retry:
        _raise_recalled(failure.recall(failed, request.compiler, since))
    stamp = failure.stamp(failed)

    def published() -> OpenedLibrary | None:
        return cache.find(target, request.library, request.key, None, tags)

    path = os.path.join(target.path, cache.LOCKS, name)
    with (
        disk_errors(request.what, target.path),
        lock.held(path, request.what, env.lock_timeout()) as alone,
    ):
        if not force:
            found = cache.find(target, request.library, request.key, capability, tags)
            if found is not None:
                return found
            if failure.stamp(failed) != stamp:  # stored while this process waited
                _raise_recalled(failure.recall(failed, request.compiler, None))
            _raise_recalled(failure.recall(failed, request.compiler, started if retry else since))
        if note := why_missing(request.spec):
            print(f"apex_te: {note}; compiling one, once", file=sys.stderr, flush=True)
        if alone:
            publish.remove_leftovers(target.path, name)
        try:
            built = publish.build(request, target, name, (lambda: None) if force else published)
        except CompileError as error:
            failure.store(failed, error, request.compiler)
            raise
        failure.forget(failed)
        return built


def _raise_recalled(error: CompileError | None) -> None:
    if error is not None:
        raise error


def _kept(identity: _Identity, capability: Capability | None) -> OpenedLibrary | None:
    for opened in _opened.get(identity, ()):
        if _serves(opened, capability) and opened.is_open():
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
    """Returns the library for ``device``, looked up and built if need be; thread-safe.

    Threads that wait for the one that builds get its library, or its error.

    Raises:
        BuildError: the library cannot be found or built.
    """
    identity = (str(spec.root), spec.NAME, device)
    if not force and (kept := _kept(identity, capability)):
        return kept
    asked = (capability, force)
    turn = _turns.setdefault(identity, _Turn())
    me = threading.get_ident()
    if turn.owner == me:
        raise ReentrantLoadError(
            f"{spec.NAME} ({device}): loading it asked for the same library again"
        )
    failures = turn.failures
    with turn.lock:
        try:
            turn.owner = me
            if not force and (kept := _kept(identity, capability)):
                return kept
            if turn.failures != failures and turn.asked == asked:
                raise copy.copy(turn.error)
            spec.check_device(device)
            if capability is None and spec.needs_archs(device):
                devices = initialised_capabilities()
                capability = devices[0] if devices else None
            opened_now = None if force else look_up(spec, device, capability)
            if opened_now is None:
                opened_now = build(spec, device, capability, force=force, verbose=verbose)
            _opened.setdefault(identity, []).insert(0, opened_now)
            return opened_now
        except BuildError as error:
            # a copy: the original holds the frames of this thread
            turn.error, turn.asked = copy.copy(error), asked
            turn.failures += 1
            raise
        finally:
            turn.owner = None


def _forked() -> None:
    """Gives a child fresh locks: a fork may copy those that other threads held."""
    _turns.clear()


os.register_at_fork(after_in_child=_forked)
