"""Building of op libraries before they are first used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .named_arguments import named_arguments

if TYPE_CHECKING:
    from ..op_builder.jit.prebuild.build_report import BuildReport

__all__ = ["prebuild"]


@named_arguments()
def prebuild(
    ops: str | Iterable[str] | None = None,
    arch: str | Iterable[str] | None = None,
    device: str | None = None,
    *,
    jobs: int | None = None,
    verbose: bool = False,
) -> BuildReport:
    """Builds op libraries into the user's cache, except those that are prebuilt or cached.

    Call it before ranks start, or in every rank: one process builds, the others wait for it. It
    opens no CUDA context.

    Args:
        ops: names of ops, e.g. "rms_norm" or ["rms_norm", "fp8_gemm"]; None means all. The
            dispatcher is always built, too.
        arch: CUDA archs, e.g. "9.0a" or "8.0;9.0a"; default APEX_TE_CUDA_ARCH_LIST, else
            TORCH_CUDA_ARCH_LIST, else those of the visible GPUs.
        device: "cpu", "cuda", or None for the CPU and, if there is an arch for it, CUDA.
        jobs: number of compilers to run at once; default: what CPUs, memory and MAX_JOBS allow.
        verbose: show the compilers' commands.

    Returns:
        A report: ``str()`` is a table; ``libraries`` has op, device, state ("built", "present" or
        "skipped"), archs, seconds, size, path and reason of each library.

    Raises:
        TypeError: ``ops`` or ``arch`` is neither a name nor names, or ``jobs`` is not an int.
        PrebuildError: some libraries could not be built; its ``report`` says which.
        UnknownOpError: ``ops`` names no op.
        ArchError: ``arch`` names an arch that does not exist.
        SettingError: another argument, or an environment variable, has a wrong value.
        JitDisabledError: APEX_TE_DISABLE_JIT is set and a library is missing.
    """
    if ops is not None and not isinstance(ops, Iterable):
        raise TypeError(
            f"prebuild: ops must be a name or a list of names, got {type(ops).__name__}"
        )
    if arch is not None and not isinstance(arch, Iterable):
        raise TypeError(
            f"prebuild: arch must be a text such as '9.0a' or a list of them, got {arch!r}"
        )
    if jobs is not None and not isinstance(jobs, int):
        raise TypeError(f"prebuild: jobs must be an int, got {type(jobs).__name__}")
    from ..op_builder import all_builders, user_builders
    from ..op_builder.jit.prebuild.targets import Targets
    from ..op_builder.jit.prebuild.user_cache import choose_ops, into_cache

    builders = {**all_builders(), **user_builders()}
    archs = arch if arch is None or isinstance(arch, str) else ";".join(arch)
    targets = Targets(None) if device == "cpu" else Targets.find(archs)
    choices = choose_ops(builders, ops, device, targets)
    return into_cache(builders, choices, targets, jobs=jobs, verbose=verbose)
