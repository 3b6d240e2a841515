"""AMD GPUs: whether GPU code is for them, and how hipcc makes a library of translated copies."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import BuildError, HeaderNotFoundError, SettingError

if TYPE_CHECKING:
    from ...builder import OpBuilder
    from ..build.ninja import Step
    from .archs import Arch

# Numbers as nvcc's flags give them: no contraction, division and square root rounded correctly.
# hipcc leaves its runtime's header to the source, nvcc includes it. A loop that is unrolled as far
# as the compiler can is no concern, nor is a pragma for nvcc.
BASE_ARGS = [
    "-xhip",
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fhip-fp32-correctly-rounded-divide-sqrt",
    "-include",
    "hip/hip_runtime.h",
    "-Wall",
    "-Wno-pass-failed",
    "-Wno-unknown-pragmas",
    "-Wno-logical-op-parentheses",
]
BASE_LIBRARIES = ["-Wl,--exclude-libs,ALL", "-ldl"]
_PLATFORMS = ("cuda", "hip")


@functools.cache
def _installed_version() -> str | None:
    """``torch.version.hip`` of the installed torch, read without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as f:
            match = re.search(r"""^hip\b[^=\n]*=\s*['"]([^'"]+)['"]""", f.read(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _torch_version() -> str | None:
    """The HIP version torch was built for, None for another torch or none."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "version"):
        return getattr(torch.version, "hip", None)
    return _installed_version()


def is_active() -> bool:
    """Whether GPU code is for AMD: APEX_TE_GPU_PLATFORM ("hip" or "cuda"), else torch's platform.

    Raises SettingError for another value.
    """
    named = os.environ.get("APEX_TE_GPU_PLATFORM", "").strip().lower()
    if not named:
        return _torch_version() is not None
    if named not in _PLATFORMS:
        raise SettingError(f'APEX_TE_GPU_PLATFORM must be "cuda" or "hip", got {named!r}')
    return named == "hip"


def runtime_major() -> str:
    """Major version of HIP's runtime, which a library links: torch's, else that of the headers."""
    from . import toolchain

    version = _torch_version()
    if version is None:
        try:
            header = os.path.join(toolchain.find_hipcc().home, "include", "hip", "hip_version.h")
            with open(header, encoding="utf-8") as file:
                match = re.search(r"#define\s+HIP_VERSION_MAJOR\s+(\d+)", file.read())
        except (BuildError, OSError):
            match = None
        return match[1] if match else "unknown"
    return version.partition(".")[0]


def key_extras() -> list[str]:
    """What a HIP library depends on beside its sources and flags."""
    from . import hipify

    return ["hip", f"runtime {runtime_major()}", f"hipify {hipify.digest()}"]


def find_header(header: str) -> list[str]:
    """Include folders for ``header``: none, because hipcc looks in its own ROCm.

    Raises HeaderNotFoundError where that lacks it.
    """
    from . import toolchain

    home = toolchain.find_hipcc().home
    if os.path.isfile(os.path.join(home, "include", header)):
        return []
    raise HeaderNotFoundError(f"{header} is not in {home}/include: install hipblaslt-dev of ROCm")


def library(
    builder: OpBuilder, device: str, archs: Sequence[Arch], folder: str, output: str
) -> list[Step]:
    """Steps for the HIP library of an op, from copies written under ``folder``."""
    from . import hipify, steps, toolchain

    if builder.BINDING == "pybind11":
        raise BuildError(
            f'{builder.NAME}: an op with BINDING = "pybind11" and .cu files cannot be built for AMD'
            " GPUs: its sources include torch's headers, which the translation to HIP does not know"
        )
    place = os.path.join(folder, "hip")
    paths = {name: os.path.join(builder.root, name) for name in builder.device_sources(device)}
    folders = builder.include_folders()
    hipify.copies(paths.values(), folders, place)
    # where CUDA is installed as well, hipcc would take its compiler
    hipcc = ["env", "HIP_PLATFORM=amd", toolchain.find_hipcc().path]
    targets = [f"--offload-arch={arch.number}" for arch in archs]  # without, it looks for a GPU
    flags = [*builder.compile_flags("cuda"), *targets]
    flags.extend(f"-I{hipify.copied(path, place)}" for path in folders)
    for path in builder.system_folders(device):
        flags.extend(("-isystem", path))
    made: list[Step] = []
    objects = []
    for name, path in paths.items():
        source, target = hipify.copied(path, place), steps.object_path(folder, name)
        line = (*hipcc, *flags, "-c", source, "-o", target)
        made.append(steps.Step(target, (source,), line, f"compiling {os.path.basename(name)}"))
        objects.append(target)
    made.append(steps.link([*hipcc, *targets], objects, output, builder.link_flags("cuda")))
    return made
