"""Building of op libraries before they are first used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
        arch: CUDA archs, e.g. "9.0a" or "8.0;9.0a", or names of generations, e.g. "hopper" or
            ["ampere", "hopper"]; default APEX_TE_CUDA_ARCH_LIST, else
            TORCH_CUDA_ARCH_LIST, else those of the visible GPUs.
        device: "cpu", "cuda", or None for the CPU and, if there is an arch for it, CUDA.
        jobs: number of compilers to run at once; default: what CPUs, memory and MAX_JOBS allow.
        verbose: show the compilers' commands.

    Returns:
        A report: ``str()`` is a table; ``libraries`` has op, device, state ("built", "present" or
        "skipped"), archs, seconds, size, path and reason of each library.

    Raises:
        TypeError: ``ops`` or ``arch`` is neither a name nor names, ``jobs`` is not an int, or
            ``verbose`` is not a bool.
        PrebuildError: some libraries could not be built; its ``report`` says which.
        UnknownOpError: a name in ``ops`` is not that of an op.
        ArchError: ``arch`` names an arch that does not exist.
        SettingError: another argument, or an environment variable, has a wrong value.
        JitDisabledError: APEX_TE_DISABLE_JIT is set and a library is missing.
    """
    ops, arch = _listed(ops), _listed(arch)
    _check_names("ops", "a name", ops)
    _check_names("arch", "a text such as '9.0a' or 'hopper'", arch)
    if jobs is not None and type(jobs) is not int:
        raise TypeError(f"prebuild: jobs must be an int, got {type(jobs).__name__}")
    if not isinstance(verbose, bool):
        raise TypeError(f"prebuild: verbose must be a bool, got {verbose!r}")
    from ..op_builder import all_builders, user_builders
    from ..op_builder.jit.errors import ArchError, SettingError, UnknownOpError
    from ..op_builder.jit.prebuild.batch import Targets, choose_ops, into_cache

    builders = {**all_builders(), **user_builders()}
    archs = arch if arch is None or isinstance(arch, str) else ";".join(arch)
    try:
        targets = Targets(None) if device == "cpu" else Targets.find(archs)
        choices = choose_ops(builders, ops, device, targets)
        return into_cache(builders, choices, targets, jobs=jobs, verbose=verbose)
    except (ArchError, SettingError, UnknownOpError) as error:  # of an argument or a variable
        raise type(error)(f"prebuild: {error}").with_traceback(error.__traceback__) from None


def _check_names(argument: str, kind: str, value: object) -> None:
    """Raises TypeError unless an argument is None, a text or a list of texts."""
    if value is None or isinstance(value, str):
        return
    got = type(value).__name__ if argument == "ops" else repr(value)
    if isinstance(value, list):
        others = [part for part in value if not isinstance(part, str)]
        if not others:
            return
        got = f"{others[0]!r} in it"
    what = "a list of names" if argument == "ops" else "a list of them"
    raise TypeError(f"prebuild: {argument} must be {kind} or {what}, got {got}")


def _listed(value: Any) -> Any:
    """Returns the list of an iterable, which may be read once only; anything else as it is."""
    is_text = isinstance(value, (str, bytes))
    return list(value) if isinstance(value, Iterable) and not is_text else value
