"""Which libraries an installation makes beforehand, and making them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from . import env
from .archs import named_arch_list, visible_capabilities
from .cache import Location, make_private
from .errors import BuildError

if TYPE_CHECKING:
    from ..builder import OpBuilder


def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, told by its files without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    library = os.path.join(os.path.dirname(spec.origin), "lib", "libtorch_cuda.so")
    return os.path.exists(library)


def cuda_expected() -> bool:
    """Whether a single op's CUDA library is wanted: an arch list, a GPU, or a CUDA torch."""
    return named_arch_list() is not None or bool(visible_capabilities()) or torch_has_cuda()


def select(builders: Mapping[str, OpBuilder]) -> list[tuple[str, str]]:
    """(op, device) of everything the environment asks for, without the dispatcher.

    APEX_BUILD_<OP> decides for one op; else APEX_BUILD_CUDA_OPS asks for both libraries of every op
    and APEX_BUILD_CPP_OPS for the CPU ones. Raises SettingError for a value that is no boolean.
    """
    cpp = env.boolean("APEX_BUILD_CPP_OPS", False)
    cuda = env.boolean("APEX_BUILD_CUDA_OPS", False)
    chosen: list[tuple[str, str]] = []
    expected: bool | None = None
    for name, builder in sorted(builders.items()):
        single = env.boolean(builder.BUILD_VAR, None)
        if single is False:
            continue
        if not (single or cpp or cuda):
            continue
        chosen.append((name, "cpu"))
        if "cuda" not in builder.DEVICES or builder.BINDING == "pybind11":
            continue
        with_cuda = cuda
        if single and not with_cuda:
            if expected is None:
                expected = cuda_expected()
            with_cuda = expected
        if with_cuda:
            chosen.append((name, "cuda"))
    return chosen


def prebuild(
    builders: Mapping[str, OpBuilder], chosen: Iterable[tuple[str, str]], target: str
) -> list[str]:
    """Build ``chosen`` into the folder ``target``; returns what was built. Raises BuildError."""
    from .service import build

    location = Location(target, True, "prebuilt")
    make_private(target)
    made = []
    for name, device in chosen:
        opened = build(builders[name], device, location=location)
        os.close(opened.fd)
        made.append(f"{name} ({device}{', ' if opened.archs else ''}{', '.join(opened.archs)})")
    for leftover in ("locks", "tmp"):
        shutil.rmtree(os.path.join(target, leftover), ignore_errors=True)
    _make_readable(target)
    return made


def _make_readable(target: str) -> None:
    """What is installed may be read by everybody."""
    for folder, _, files in os.walk(target):
        os.chmod(folder, 0o755)
        for name in files:
            os.chmod(os.path.join(folder, name), 0o644)


def unknown_variables(builders: Mapping[str, OpBuilder]) -> list[str]:
    """APEX_BUILD_* variables that no builder reads, such as a misspelt one."""
    known = {builder.BUILD_VAR for builder in builders.values()}
    known.update(("APEX_BUILD_CPP_OPS", "APEX_BUILD_CUDA_OPS"))
    return sorted(
        name for name in os.environ if name.startswith("APEX_BUILD_") and name not in known
    )


def check_install(builders: Mapping[str, OpBuilder]) -> list[tuple[str, str]]:
    """``select``, refused early where compiling is forbidden."""
    chosen = select(builders)
    for name in unknown_variables(builders):
        print(f"apex_te: {name} is set and belongs to no op; it is ignored", file=sys.stderr)
    if chosen and env.jit_disabled():
        raise BuildError("APEX_TE_DISABLE_JIT is set together with a request to build libraries")
    return chosen
