"""Libraries compiled at install time, as ``APEX_BUILD_*`` variables ask for them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence

from ...spec import INCLUDE_FLAGS, OpSpec
from .. import env
from ..backends import library, pythons, toolchain
from ..backends.archs import named_arch_list, visible_capabilities
from ..build import resources
from ..errors import BuildError, PrebuildError, SettingError
from ..find import cache
from ..find.cache import Location, make_private
from ..platform import compile_for, installed_torch, machine
from ..text import nearest
from .batch import Choice, Targets, Wanted, build_all, dispatchers, jax_handlers, plan
from .build_report import BuildReport

MACHINE, LABEL = "APEX_BUILD_MACHINE", "APEX_BUILD_LABEL"
_MACHINES = ("x86_64", "aarch64")
CPP_OPS, CUDA_OPS = INCLUDE_FLAGS
# what apex's setup.py takes -> what says it here
_APEX_OPTIONS = {"--cpp_ext": CPP_OPS, "--cuda_ext": CUDA_OPS}
# apex's extensions, as its variables APEX_BUILD_<extension> name them, and the ops that serve them;
# some are served without a library
_SOFTMAX = ("scaled_softmax",)
_APEX_SERVED = {
    "AMP_C": ("multi_tensor",),
    "DISTRIBUTED_ADAM": ("multi_tensor",),
    "DISTRIBUTED_LAMB": ("multi_tensor",),
    "FUSED_ADAM": ("multi_tensor",),
    "FUSED_BIAS_SWIGLU": ("swiglu",),
    "FUSED_DENSE": ("activation", "bias_gelu"),
    "FUSED_LAMB": ("multi_tensor",),
    "FUSED_LAYER_NORM": ("layer_norm", "rms_norm"),
    "FUSED_ROPE": ("rope",),
    "FUSED_WEIGHT_GRADIENT_MLP": (),
    "GENERIC_SCALED_MASKED_SOFTMAX_CUDA": _SOFTMAX,
    "MLP": (),
    "SCALED_MASKED_SOFTMAX_CUDA": _SOFTMAX,
    "SCALED_SOFTMAX_CUDA": _SOFTMAX,
    "SCALED_UPPER_TRIANG_MASKED_SOFTMAX_CUDA": _SOFTMAX,
    "XENTROPY": ("cross_entropy",),
}
_APEX_UNSERVED = frozenset(
    (
        "APEX_C", "BNP", "FAST_MULTIHEAD_ATTN",
        "FOCAL_LOSS", "FUSED_CONV_BIAS_RELU", "FUSED_INDEX_MUL_2D", "NCCL_ALLOCATOR", "NCCL_P2P",
        "PEER_MEMORY", "SYNCBN", "TRANSDUCER_JOINT", "TRANSDUCER_LOSS",
    )
)  # fmt: skip


def torch_has_cuda() -> bool:
    """Returns True if the installed torch is a CUDA or ROCm build; does not import it."""
    folder = installed_torch().path
    libraries = [f"{folder}/lib/libtorch_{kind}.so" for kind in ("cuda", "hip")]
    return folder is not None and any(map(os.path.exists, libraries))


def cuda_expected() -> bool:
    """Returns True given an arch list in the environment, a visible GPU, or a torch with CUDA."""
    return named_arch_list() is not None or bool(visible_capabilities()) or torch_has_cuda()


def _asked_by_apex(builders: Mapping[str, OpSpec]) -> dict[str, str]:
    """Returns the variables of apex that ask for ops, by op, unless an op has that variable."""
    own = {spec.BUILD_VAR for spec in builders.values()}
    asked = {}
    for extension in (*_APEX_SERVED, *sorted(_APEX_UNSERVED)):
        variable = f"APEX_BUILD_{extension}"
        if variable in own or not env.boolean(variable, False):
            continue
        if extension in _APEX_UNSERVED:
            raise SettingError(
                f"{variable} asks for an extension of apex that apex_te does not serve;"
                " docs/apex.md lists the ops that serve the others"
            )
        asked.update(dict.fromkeys(_APEX_SERVED[extension], variable))
    return asked


def select(builders: Mapping[str, OpSpec]) -> list[Choice]:
    """Returns a decision for each library of the ops, from ``APEX_BUILD_*`` variables."""
    asked = _asked_by_apex(builders)
    cpp, cuda = env.boolean(CPP_OPS, False), env.boolean(CUDA_OPS, False)
    choices: list[Choice] = []
    expected: bool | None = None
    for name, spec in sorted(builders.items()):
        single = env.boolean(spec.BUILD_VAR, None)
        if single is None and name in asked:
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


def _check_variables(builders: Mapping[str, OpSpec]) -> None:
    """Refuses an ``APEX_BUILD_*`` variable that nothing reads."""
    own = [*INCLUDE_FLAGS, pythons.VARIABLE, MACHINE, LABEL]
    own += [spec.BUILD_VAR for spec in builders.values()]
    read = {*own, *(f"APEX_BUILD_{name}" for name in (*_APEX_SERVED, *_APEX_UNSERVED))}
    for name in sorted(os.environ):
        if name.startswith("APEX_BUILD_") and name not in read:
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
    _make_readable(target)
    report = report._replace(libraries=(*report.libraries, *rows))
    if not report.ok:
        raise PrebuildError(report.failures(), report)
    return report


def _check_portable(wanted: Wanted) -> None:
    """Checks that the flags of a library are for other machines' CPUs, too."""
    for flag in library.key_flags(wanted.spec, wanted.device):
        if toolchain.is_for_this_machine(flag):
            raise SettingError(
                f"{wanted.op} ({wanted.device}): {flag} makes a library for this machine's CPU"
                " alone; what is installed must run on others"
            )
    features = [] if wanted.spec.needs_archs(wanted.device) else library.cpu_features(wanted.spec)
    if features:
        raise SettingError(
            f"{wanted.op} ({wanted.device}): the compiler must make code for every {machine()} CPU,"
            f" got one that uses {' '.join(features)} (name another in CXX)"
        )


def _make_readable(target: str) -> None:
    """Gives all users the right to read the files and folders below ``target``."""
    for folder, _, files in os.walk(target):
        os.chmod(folder, 0o755)
        for name in files:
            os.chmod(os.path.join(folder, name), 0o644)
