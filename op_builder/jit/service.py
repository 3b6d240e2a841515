"""From a builder to an opened library: the look-up order, the lock and the build."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from . import cache, env
from .archs import Arch, Capability, choose, covered, initialised_capabilities, named_arch_list
from .cache import OpenedLibrary
from .errors import BuildError, CompileError, JitDisabledError, ReentrantLoadError

if TYPE_CHECKING:
    from ..builder import OpBuilder
    from .ninja_build import Step

_guard = threading.Lock()
_opened: dict[tuple[str, str, str], list[OpenedLibrary]] = {}
_busy: dict[tuple[str, str, str], tuple[threading.Lock, list[int]]] = {}


class Request(NamedTuple):
    """One library to build."""

    builder: OpBuilder
    op: str
    device: str
    library: str
    key: str
    archs: tuple[Arch, ...]
    compiler: str
    flags: list[str]
    verbose: bool

    @property
    def what(self) -> str:
        """Op and device as messages name them."""
        return f"{self.op} ({self.device})"

    @property
    def tag(self) -> str:
        """Name of the entry's folder."""
        return "_".join(str(arch) for arch in self.archs) or cache.CPU_ENTRY

    def steps(self, folder: str, output: str) -> list[Step]:
        """The commands that make ``output`` in ``folder``."""
        return self.builder.build_steps(self.device, self.archs, folder, output)


def _serves(opened: OpenedLibrary, capability: Capability | None) -> bool:
    return capability is None or not opened.archs or covered(opened.archs, capability)


def _wanted(builder: OpBuilder, device: str, capability: Capability | None) -> tuple[Arch, ...]:
    if not builder.needs_archs(device):
        return ()
    return choose(builder.NAME, builder.min_arch, builder.specific_archs(), capability)


def look_up(
    builder: OpBuilder, device: str, capability: Capability | None = None
) -> OpenedLibrary | None:
    """The library if it need not be built, else None. Runs no compiler."""
    key = builder.key(device)
    library = builder.library_name(device)
    wanted: Sequence[str] = ()
    if builder.needs_archs(device) and capability is None:
        # without a device and a list any arch will do: opening is possible everywhere
        named = named_arch_list() is not None
        wanted = [str(arch) for arch in _wanted(builder, device, None)] if named else ()
    return cache.look_up(builder.prebuilt_folder, library, key, capability, wanted)


def _disabled(builder: OpBuilder, device: str) -> JitDisabledError:
    code = f"from apex_te.op_builder import get_builder as b; b('{builder.NAME}').open('{device}')"
    return JitDisabledError(
        f"{builder.NAME} ({device}): no library is prebuilt or cached, and APEX_TE_DISABLE_JIT"
        f" forbids building it; install with `{builder.BUILD_VAR}=1 pip install .`,"
        f' or fill the cache with `APEX_TE_DISABLE_JIT=0 python -c "{code}"`'
    )


def build(
    builder: OpBuilder,
    device: str,
    capability: Capability | None = None,
    *,
    force: bool = False,
    verbose: bool = False,
    location: cache.Location | None = None,
) -> OpenedLibrary:
    """Build under the lock, unless another process has just done so (``force``: in any case)."""
    from . import failure, lock, publish

    if env.jit_disabled():
        raise _disabled(builder, device)
    started = time.time()
    archs = _wanted(builder, device, capability)
    compiler = builder.compiler_version(device, archs)
    request = Request(
        builder,
        builder.NAME,
        device,
        builder.library_name(device),
        builder.key(device),
        archs,
        compiler,
        builder.key_flags(device),
        verbose or env.jit_verbose(),
    )
    target = location if location is not None else cache.writable_cache()
    tags = [str(arch) for arch in archs]
    name = cache.entry_folder(request.library, request.key)
    folder = os.path.join(target.path, name)
    failed = os.path.join(folder, f"failure-{request.tag}.json")
    retry = env.jit_retry() or force
    if not retry:
        _raise_recalled(failure.recall(failed, compiler, started - failure.KEPT_SECONDS))
    from .ninja_build import disk_errors

    locks = os.path.join(target.path, "locks")
    with disk_errors(request.what, target.path):
        cache.make_private(locks)
        with lock.held(os.path.join(locks, name), request.what, env.lock_timeout()):
            found = None
            if not force:
                found = cache.find(target, request.library, request.key, capability, tags)
            if found is None:
                since = started - (0.0 if retry else failure.KEPT_SECONDS)
                if not force:
                    _raise_recalled(failure.recall(failed, compiler, since))
                publish.remove_leftovers(target.path)
                try:
                    publish.build(request, target.path, name)
                except CompileError as error:
                    failure.store(failed, error, compiler)
                    raise
                failure.forget(failed)
                found = cache.find(target, request.library, request.key, capability, tags)
    if found is None:
        raise BuildError(f"{request.what}: the library was built in {folder} and is gone again")
    return found


def _raise_recalled(error: CompileError | None) -> None:
    if error is not None:
        raise error


def open_library(
    builder: OpBuilder,
    device: str,
    capability: Capability | None = None,
    *,
    force: bool = False,
    verbose: bool = False,
) -> OpenedLibrary:
    """The library of ``builder`` for ``device``, looked up and built if need be; thread-safe."""
    identity = (str(builder.root), builder.NAME, device)
    if not force:
        for opened in _opened.get(identity, ()):
            if _serves(opened, capability):
                return opened
    with _guard:
        thread_lock, owner = _busy.setdefault(identity, (threading.Lock(), []))
    me = threading.get_ident()
    if owner and owner[0] == me:
        raise ReentrantLoadError(
            f"{builder.NAME} ({device}): loading it asked for the same library again"
        )
    with thread_lock:
        owner.append(me)
        try:
            if not force:
                for opened in _opened.get(identity, ()):
                    if _serves(opened, capability):
                        return opened
            builder.check_device(device)
            if capability is None and builder.needs_archs(device):
                devices = initialised_capabilities()
                capability = devices[0] if devices else None
            opened_now = None if force else look_up(builder, device, capability)
            if opened_now is None:
                opened_now = build(builder, device, capability, force=force, verbose=verbose)
            _opened.setdefault(identity, []).insert(0, opened_now)
            return opened_now
        finally:
            owner.clear()


def _forked() -> None:
    """A fork may copy locks that other threads held; the child starts with fresh ones."""
    global _guard
    _guard = threading.Lock()
    _busy.clear()


os.register_at_fork(after_in_child=_forked)
