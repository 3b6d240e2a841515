"""Libraries compiled into the user's cache after the installation and before their first use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence

from ...spec import DISPATCHER, OpSpec
from .. import env
from ..backends.archs import Capability
from ..build import lock, resources
from ..build.ninja import disk_errors
from ..errors import JitDisabledError, PrebuildError, SettingError, unknown_op
from ..find import cache
from .batch import (
    DEVICES,
    Choice,
    Targets,
    Wanted,
    build_all,
    dispatchers,
    jax_handlers,
    manifest_report,
    plan,
)
from .build_report import BuildReport, LibraryReport

_LOCK = "prebuild"  # beside those of the libraries, whose names end in a key


def check_ops(ops: str | Iterable[str] | None, builders: Mapping[str, OpSpec]) -> list[str]:
    """Returns the ops asked for, each once, all for None; drops the dispatcher, always built."""
    if ops is None:
        return sorted(builders)
    names = [ops] if isinstance(ops, str) else list(ops)
    for name in names:
        if name not in builders and name != DISPATCHER:
            raise unknown_op(name, sorted(builders))
    return [name for name in dict.fromkeys(names) if name in builders]


def choose_ops(
    builders: Mapping[str, OpSpec],
    ops: str | Iterable[str] | None,
    device: str | None,
    targets: Targets,
) -> list[Choice]:
    """Returns a decision for each library of ``ops`` on ``device``; None stands for all of them."""
    if device is not None and device not in DEVICES:
        raise SettingError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    choices = []
    for name in check_ops(ops, builders):
        for each in builders[name].DEVICES if device is None else [device]:
            reason = ""
            if each not in builders[name].DEVICES:
                reason = f"the op has no {each} library"
            elif builders[name].needs_archs(each) and device is None and not targets.known:
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
        raise SettingError(f"jobs must be an integer >= 1, got {jobs}")
    wanted, skipped = plan(builders, choices, targets)
    wanted = [*dispatchers([None]), *(jax_handlers() if jax else ()), *wanted]
    rows: dict[Wanted, LibraryReport] = {}
    missing = _missing(wanted, targets, rows)
    limit = jobs or resources.jobs()
    if missing:
        if env.jit_disabled():
            raise JitDisabledError(
                f"{', '.join(f'{item.op} ({item.device})' for item in missing)}: neither prebuilt"
                " nor cached, and APEX_TE_DISABLE_JIT forbids building"
            )
        folder = cache.writable_cache(cache.LOCKS).path
        path = os.path.join(folder, cache.LOCKS, _LOCK)
        what = f"a prebuild of {len(missing)} libraries"
        with disk_errors(what, folder), lock.held(path, what, env.lock_timeout()):
            missing = _missing(missing, targets, rows)
            report = build_all(missing, None, limit, started=started, verbose=verbose)
        rows.update(zip(missing, report.libraries, strict=True))
    libraries = (*(rows[item] for item in wanted), *skipped)
    report = BuildReport(libraries, time.monotonic() - begin, limit)
    if not report.ok:
        raise PrebuildError(report.failures(), report)
    return report
