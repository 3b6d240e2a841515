"""Libraries compiled at install time, as ``APEX_BUILD_*`` variables ask for them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence

from ...apex_names import EXTENSIONS, served_by
from ...spec import CPU_OPS, INCLUDE_FLAGS, OpSpec
from .. import env
from ..backends import library, pythons, toolchain
from ..backends.archs import named_arch_list, visible_capabilities
from ..build import resources
from ..errors import BuildError, PrebuildError, SettingError
from ..find import cache
from ..find.cache import Location, make_private
from ..platform import compile_for, installed_torch, machine
from ..text import nearest
from .batch import BuildReport, Choice, Targets, Wanted, build_all, dispatchers, jax_handlers, plan

MACHINE, LABEL = "APEX_BUILD_MACHINE", "APEX_BUILD_LABEL"
_MACHINES = ("x86_64", "aarch64")
CPP_OPS, CUDA_OPS = INCLUDE_FLAGS
# what apex's setup.py takes -> what says it here
_APEX_OPTIONS = {"--cpp_ext": CPP_OPS, "--cuda_ext": CUDA_OPS}
_EXTENSIONS = {f"APEX_BUILD_{each.variable}": each.module for each in EXTENSIONS}
# variables of apex's setup.py that are not applicable here, and what to use
_NOT_APPLICABLE = {
    "APEX_BUILD_STRING": "no git version is recorded",
    "APEX_COMMIT": f"the version does not name the commit; {LABEL} adds a label",
    "BUILD_VERSION": f"the version is the package's; {LABEL} adds a label",
    "DESIRED_CUDA": f"{LABEL}=cu130 adds it to the version",
    "USE_ROCM_AITER_ROPE_BACKEND": "rotary embeddings run on the op rope on every GPU",
}


def torch_has_cuda() -> bool:
    """Returns True if the installed torch is a CUDA or ROCm build; does not import it."""
    folder = installed_torch().path
    libraries = [f"{folder}/lib/libtorch_{kind}.so" for kind in ("cuda", "hip")]
    return folder is not None and any(map(os.path.exists, libraries))


def cuda_expected() -> bool:
    """Returns True given an arch list in the environment, a visible GPU, or a torch with CUDA."""
    return named_arch_list() is not None or bool(visible_capabilities()) or torch_has_cuda()


def _apex_variables(builders: Mapping[str, OpSpec]) -> dict[str, str]:
    """Returns apex's variables that are true, with their modules, unless an op has the variable."""
    own = {spec.BUILD_VAR for spec in builders.values()}
    return {
        name: module
        for name, module in _EXTENSIONS.items()
        if name not in own and env.boolean(name, False)
    }


def select(builders: Mapping[str, OpSpec]) -> list[Choice]:
    """Returns a decision for each library of the ops, from ``APEX_BUILD_*`` variables."""
    asked: set[str] = set()  # by variables of apex
    for variable, module in _apex_variables(builders).items():
        if (ops := served_by(module)) is None:
            raise SettingError(
                f"{variable} asks for {module}, an extension of apex that apex_te does not serve;"
                " docs/apex.md lists the ops that serve the others"
            )
        asked.update(ops)
    cpp = env.boolean(CPP_OPS, None)
    cpp = env.boolean(CPU_OPS, False) if cpp is None else cpp
    cuda = env.boolean(CUDA_OPS, False)
    choices: list[Choice] = []
    expected: bool | None = None
    for name, spec in sorted(builders.items()):
        single = env.boolean(spec.BUILD_VAR, None)
        in_group = spec.INCLUDE_FLAG not in INCLUDE_FLAGS and env.boolean(spec.INCLUDE_FLAG, False)
        if single is None and (name in asked or in_group):
            single = True
        if single and not cuda and expected is None:
            expected = cuda_expected()
        for device in spec.DEVICES:
            reason = ""
            if single is False:
                reason = f"{spec.BUILD_VAR}={os.environ[spec.BUILD_VAR]}"
            elif not (single or cpp or cuda):
                reason = "not asked for"
            elif device == "cuda" and not (cuda or single):
                reason = f"{CPP_OPS} asks for CPU libraries"
            elif device == "cuda" and not (cuda or expected):
                reason = "no arch list is set, no GPU is visible and torch is no CUDA build"
            choices.append(Choice(name, device, not reason, bool(single), reason))
    return choices


def notes(builders: Mapping[str, OpSpec]) -> list[str]:
    """Returns a line for each variable of apex that is set and builds nothing."""
    lines = []
    for variable, module in _apex_variables(builders).items():
        if not served_by(module):
            lines.append(f"{variable}: {module} runs on PyTorch and needs no library")
    for variable, text in _NOT_APPLICABLE.items():
        if os.environ.get(variable):
            lines.append(f"{variable} is not applicable: {text}")
    return lines


def _check_variables(builders: Mapping[str, OpSpec]) -> None:
    own = [*INCLUDE_FLAGS, pythons.VARIABLE, MACHINE, LABEL]
    own += [spec.BUILD_VAR for spec in builders.values()]
    groups = {spec.INCLUDE_FLAG for spec in builders.values()}
    read = {*own, CPU_OPS, *groups, *_EXTENSIONS, *_NOT_APPLICABLE}
    for name in sorted({each for each in os.environ if each.startswith("APEX_BUILD_")} - read):
        near = nearest(name, own)
        hint = f"did you mean {near}?" if near else f"there are: {', '.join(own)}"
        # ascii: a character that cannot be seen is a way to misspell, too
        raise SettingError(f"{ascii(name)[1:-1]} is set and belongs to no op; {hint}")


def check_install(builders: Mapping[str, OpSpec], arguments: Iterable[str] = ()) -> list[Choice]:
    """Returns which libraries an installation compiles, after checking its settings."""
    choices = select(builders)
    _check_variables(builders)
    for option in arguments:
        if option in _APEX_OPTIONS:
            raise SettingError(f"{option} is apex's option; set {_APEX_OPTIONS[option]}=1 instead")
    if any(choice.wanted for choice in choices) and env.jit_disabled():
        raise SettingError("APEX_TE_DISABLE_JIT is set together with a request to build libraries")
    name = named_machine()
    if name != machine() and any(each.wanted and each.device == "cuda" for each in choices):
        raise SettingError(
            f"{MACHINE}={name}: CUDA libraries for {name} must be built on {name}; only CPU"
            f" libraries are compiled for another machine, got a request for both on {machine()}"
        )
    return choices


def named_machine() -> str:
    """Returns the CPU architecture that ``APEX_BUILD_MACHINE`` names, else this machine's."""
    name = os.environ.get(MACHINE, "").strip() or machine()
    if name not in _MACHINES and name != machine():
        raise SettingError(f"{MACHINE} must be one of {', '.join(_MACHINES)}, got {name!r}")
    return name


def version_label() -> str:
    """Returns what ``APEX_BUILD_LABEL`` adds to the version: "+cpu" for "cpu", "" if unset."""
    label = os.environ.get(LABEL, "").strip()
    if label and re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", label) is None:
        raise SettingError(
            f"{LABEL} must be lower-case letters and digits, separated by dots, got {label!r}"
        )
    return f"+{label}" if label else ""


def into_package(
    builders: Mapping[str, OpSpec], choices: Sequence[Choice], target: str
) -> BuildReport:
    """Compiles the wanted libraries, dispatchers and handlers into a folder of a package."""
    with compile_for(named_machine()):
        wanted, rows = plan(builders, choices, Targets.find())
        wanted = [*dispatchers(pythons.named()), *jax_handlers(), *wanted]
        unable = []
        for item in wanted:
            _check_portable(item)
            try:
                library.check(item.spec, item.device, item.archs)
            except BuildError as error:  # told now, not after a minute of compiling the others
                unable.append(item.report("failed", reason=str(error)))
        if unable:
            report = BuildReport((*unable, *rows))
            raise PrebuildError(report.failures(), report)
        make_private(target)
        report = build_all(wanted, Location(target, True, "prebuilt"), resources.jobs())
    for leftover in (cache.LOCKS, cache.TEMPORARY):
        shutil.rmtree(os.path.join(target, leftover), ignore_errors=True)
    for folder, _, files in os.walk(target):  # all users may read them
        os.chmod(folder, 0o755)
        for name in files:
            os.chmod(os.path.join(folder, name), 0o644)
    report = report._replace(libraries=(*report.libraries, *rows))
    if not report.ok:
        raise PrebuildError(report.failures(), report)
    return report


def _check_portable(wanted: Wanted) -> None:
    spec, what = wanted.spec, f"{wanted.op} ({wanted.device})"
    for flag in filter(toolchain.is_for_this_machine, library.key_flags(spec, wanted.device)):
        raise SettingError(
            f"{what}: {flag} makes a library for this machine's CPU alone; what is installed must"
            " run on others"
        )
    if features := [] if spec.needs_archs(wanted.device) else library.cpu_features(spec):
        raise SettingError(
            f"{what}: the compiler must make code for every {machine()} CPU, got one that uses"
            f" {' '.join(features)} (name another in CXX)"
        )
