"""Compilation for NVIDIA GPUs: flags, headers and commands of a library that nvcc makes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...spec import OpSpec
from . import toolchain
from .archs import Arch, own_arch
from .steps import Step, compile_step, include_flags

BASE_ARGS = [
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-Xfatbin=-compress-all",
    "-cudart=static",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall",
]
# the static CUDA runtime stays private: several libraries, each with its own, share a process
BASE_LIBRARIES = ["-Xlinker=--exclude-libs=ALL", "-ldl"]


class Cuda:
    """Backend that compiles ``.cu`` files with nvcc, with the same methods as ``Hip``."""

    link_flags = BASE_LIBRARIES

    def compile_flags(self, spec: OpSpec) -> list[str]:
        """Returns nvcc's base flags and those of the op."""
        return [*BASE_ARGS, *spec.nvcc_args()]

    def key_extras(self) -> list[str]:
        """Returns further texts for the cache key of a library with GPU code; none for CUDA."""
        return []

    def compiler_version(self, archs: Sequence[Arch]) -> str:
        """Returns the version text of nvcc and of the C++ compiler, separated by a comma."""
        toolchain.check_archs(toolchain.find_nvcc(), [arch.number for arch in archs])
        return f"{toolchain.nvcc_version()}, {toolchain.cxx_version()}"

    def blas_include(self) -> list[str]:
        """Returns the include folder of cuBLASLt's header, none if nvcc finds the header itself."""
        return toolchain.find_header("cublasLt.h", "cublas", toolchain.find_nvcc())

    def steps(
        self,
        spec: OpSpec,
        names: Sequence[str],
        flags: Sequence[str],
        system_folders: Sequence[str],
        archs: Sequence[Arch],
        folder: str,
    ) -> tuple[list[Step], list[str]]:
        """Returns the commands that compile an op's ``.cu`` sources, without running them."""
        nvcc = [toolchain.find_nvcc().path, *toolchain.nvcc_host_flags()]
        includes = include_flags(spec, system_folders)
        steps = []
        for name in names:
            command = [*nvcc, *flags, *_gencodes(name, archs), *includes]
            steps.append(compile_step(command, name, os.path.join(spec.root, name), folder))
        return steps, [*nvcc, "-cudart=static"]


def _gencodes(source: str, archs: Sequence[Arch]) -> list[str]:
    """Returns nvcc's arch flags for one source; a source for one arch is compiled for it alone."""
    own = own_arch(source)
    if own is not None:  # its launchers are referred to whatever the archs are
        return own.gencode()
    plain = {(arch.major, arch.minor) for arch in archs if arch.suffix == "a"}
    flags = []
    for arch in archs:
        if arch.ptx and not arch.suffix and (arch.major, arch.minor) in plain:
            # the device itself is served by the "a" code, only the PTX is missing
            flags.append(f"-gencode=arch=compute_{arch.number},code=compute_{arch.number}")
        else:
            flags.extend(arch.gencode())
    return flags
