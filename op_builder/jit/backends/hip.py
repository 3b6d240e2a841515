"""Compilation for AMD GPUs: hipcc's flags and commands for sources translated from CUDA to HIP."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ...spec import OpSpec
from .. import platform
from ..errors import BuildError, HeaderNotFoundError
from . import hipify, toolchain
from .archs import Arch
from .steps import Step, compile_step

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


def runtime_major() -> str:
    """Returns the HIP runtime's major version: torch's, else the headers', else "unknown"."""
    version = platform.torch_hip_version()
    if version is not None:
        return version.partition(".")[0]
    try:
        header = os.path.join(toolchain.find_hipcc().home, "include", "hip", "hip_version.h")
        with open(header, encoding="utf-8") as file:
            match = re.search(r"#define\s+HIP_VERSION_MAJOR\s+(\d+)", file.read())
    except (BuildError, OSError):
        match = None
    return match[1] if match else "unknown"


class Hip:
    """Backend that compiles ``.cu`` files with hipcc, with the same methods as ``Cuda``."""

    link_flags = BASE_LIBRARIES

    def compile_flags(self, spec: OpSpec) -> list[str]:
        """Returns hipcc's base flags and those of the op."""
        return [*BASE_ARGS, *spec.hipcc_args()]

    def key_extras(self) -> list[str]:
        """Returns further texts for the cache key: HIP's major version, a digest of ``hipify``."""
        return ["hip", f"runtime {runtime_major()}", f"hipify {hipify.digest()}"]

    def compiler_version(self, archs: Sequence[Arch]) -> str:
        """Returns the version text of hipcc and its clang, whatever the archs."""
        return toolchain.hipcc_version()

    def blas_include(self) -> list[str]:
        """Returns no folder for hipBLASLt's header, which hipcc finds in its own ROCm."""
        home, header = toolchain.find_hipcc().home, "hipblaslt/hipblaslt.h"
        if os.path.isfile(os.path.join(home, "include", header)):
            return []
        raise HeaderNotFoundError(
            f"{header} is not in {home}/include: install hipblaslt-dev of ROCm"
        )

    def steps(
        self,
        spec: OpSpec,
        names: Sequence[str],
        flags: Sequence[str],
        system_folders: Sequence[str],
        archs: Sequence[Arch],
        folder: str,
    ) -> tuple[list[Step], list[str]]:
        """Translates the ``.cu`` sources into ``folder``; returns the commands to compile them."""
        if spec.BINDING == "pybind11":
            raise BuildError(
                f'{spec.NAME}: an op with BINDING = "pybind11" and .cu files cannot be built for'
                " AMD GPUs: its sources include torch's headers, which the translation to HIP does"
                " not know"
            )
        place = os.path.join(folder, "hip")
        paths = {name: os.path.join(spec.root, name) for name in names}
        folders = spec.include_folders()
        hipify.copies(paths.values(), folders, place)
        # where CUDA is installed as well, hipcc would take its compiler
        hipcc = ["env", "HIP_PLATFORM=amd", toolchain.find_hipcc().path]
        targets = [f"--offload-arch={arch.number}" for arch in archs]  # without, it seeks a GPU
        command = [*hipcc, *flags, *targets]
        command += [f"-I{hipify.copied(path, place)}" for path in folders]
        command += [flag for path in system_folders for flag in ("-isystem", path)]
        steps = [
            compile_step(command, name, hipify.copied(path, place), folder)
            for name, path in paths.items()
        ]
        return steps, [*hipcc, *targets]
