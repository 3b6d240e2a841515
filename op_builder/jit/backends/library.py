"""Flags, cache-key texts, compiler versions and build commands of any op's library."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from ...spec import DISPATCHER, OpSpec
from .. import env, platform
from ..errors import BuildError, CompilerNotFoundError, HeaderNotFoundError
from . import hipify, pybind, toolchain
from .archs import Arch, own_arch


class Step(NamedTuple):
    """One command of a build graph, run by ninja after the steps that make its inputs."""

    output: str
    inputs: tuple[str, ...]
    command: tuple[str, ...]
    label: str


def include_flags(spec: OpSpec, system_folders: Sequence[str]) -> list[str]:
    """Returns ``-I`` flags for the op's include folders, ``-isystem`` ones for the others."""
    # -isystem: warnings in other people's headers are not ours
    return [*(f"-I{path}" for path in spec.include_folders()), *_system_flags(system_folders)]


def _system_flags(folders: Sequence[str]) -> list[str]:
    return [flag for path in folders for flag in ("-isystem", path)]


def compile_step(command: Sequence[str], name: str, path: str, folder: str) -> Step:
    """Returns the step that compiles one source to an object file in ``folder``."""
    made = os.path.join(folder, re.sub(r"[^\w.]", "_", name) + ".o")
    line = (*command, "-c", path, "-o", made)
    return Step(made, (path,), line, f"compiling {os.path.basename(name)}")


# Numbers must not depend on the machine: no contraction, no fast-math, no -march=native. Floating
# point flags and errno are nobody's business here, and keeping them stops vectorization.
# No -fopenmp: kernels reach the OpenMP runtime that torch has loaded through weak symbols.
BASE_CXX_ARGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-trapping-math", "-fno-math-errno", "-Wall", "-Wextra",
]  # fmt: skip
NVCC_ARGS = [
    "-std=c++17", "-O3", "-fmad=false", "-Xfatbin=-compress-all", "-cudart=static",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall",
]  # fmt: skip
# the static CUDA runtime stays private: several libraries, each with its own, share a process
NVCC_LIBRARIES = ["-Xlinker=--exclude-libs=ALL", "-ldl"]
# Numbers as nvcc's flags give them: no contraction, division and square root rounded correctly.
# Unlike nvcc, hipcc does not include its runtime's header by itself. Warnings about partly unrolled
# loops and about pragmas for nvcc are off.
HIPCC_ARGS = [
    "-xhip", "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fhip-fp32-correctly-rounded-divide-sqrt", "-include", "hip/hip_runtime.h", "-Wall",
    "-Wno-pass-failed", "-Wno-unknown-pragmas", "-Wno-logical-op-parentheses",
]  # fmt: skip
HIPCC_LIBRARIES = ["-Wl,--exclude-libs,ALL", "-ldl"]


def compile_flags(spec: OpSpec, kind: str) -> list[str]:
    """Returns the suite's base flags and the op's own for compiling one kind of source."""
    if spec.BINDING == "pybind11":
        own = spec.nvcc_args() if kind == "cuda" else [*spec.cxx_args(), *env.sanitizers()]
        return [*pybind.compile_flags(spec, kind), *pybind.accepted(own)]
    if kind != "cuda":
        return [*BASE_CXX_ARGS, *spec.cxx_args(), *env.sanitizers()]
    if platform.is_hip():
        return [*HIPCC_ARGS, *spec.hipcc_args()]
    return [*NVCC_ARGS, *spec.nvcc_args()]


def link_flags(spec: OpSpec, kind: str) -> list[str]:
    """Returns the op's own linker flags and then the suite's base ones."""
    own = pybind.link_flags(spec) if spec.BINDING == "pybind11" else spec.libraries_args()
    if kind != "cuda":
        return [*own, "-ldl", *env.sanitizers()]
    return [*own, *(HIPCC_LIBRARIES if platform.is_hip() else NVCC_LIBRARIES)]


def key_flags(spec: OpSpec, device: str) -> list[str]:
    """Returns the flags of the cache key, without archs and folders outside the project."""
    kinds = spec.source_kinds(device) or ["cpu"]
    flags = [flag for kind in kinds for flag in compile_flags(spec, kind)]
    includes = [f"-I{path}" for path in spec.project_includes()]
    return [*flags, *includes, *link_flags(spec, kinds[-1])]


def runtime_major() -> str:
    """Returns the HIP runtime's major version: torch's, else the headers', else "unknown"."""
    if version := platform.torch_hip_version():
        return version.partition(".")[0]
    try:
        header = os.path.join(toolchain.find_hipcc().home, "include", "hip", "hip_version.h")
    except BuildError:
        return "unknown"
    match = re.search(r"#define\s+HIP_VERSION_MAJOR\s+(\d+)", platform.text_of(header))
    return match[1] if match else "unknown"


def key_extras(spec: OpSpec, device: str) -> list[str]:
    """Returns the texts beside sources and flags that take part in the library's cache key."""
    extras = pybind.key_extras(spec) if spec.BINDING == "pybind11" else []
    extras += spec.key_extras()
    if spec.needs_archs(device) and platform.is_hip():
        extras += ["hip", f"runtime {runtime_major()}", f"hipify {hipify.digest()}"]
    return extras


def system_folders(spec: OpSpec, device: str) -> list[str]:
    """Returns the include folders outside of the project that the library for ``device`` needs."""
    binding = pybind.include_paths(spec) if spec.BINDING == "pybind11" else []
    return [*spec.system_include_paths(device), *binding]


def blas_include() -> list[str]:
    """Returns the include folder of cuBLASLt's header, none if the compiler finds it itself."""
    if not platform.is_hip():
        return toolchain.find_header("cublasLt.h", "cublas", toolchain.find_nvcc())
    # hipcc finds hipBLASLt's in its own ROCm or not at all
    home, header = toolchain.find_hipcc().home, "hipblaslt/hipblaslt.h"
    if not os.path.isfile(os.path.join(home, "include", header)):
        raise HeaderNotFoundError(
            f"{header} is not in {home}/include: install hipblaslt-dev of ROCm"
        )
    return []


def compiler_version(spec: OpSpec, device: str, archs: Sequence[Arch] = ()) -> str:
    """Returns the compilers' version text, for manifests and stored failures but not for keys."""
    if spec.needs_archs(device):
        if platform.is_hip():
            return toolchain.hipcc_version()
        toolchain.check_archs(toolchain.find_nvcc(), [arch.number for arch in archs])
        return f"{toolchain.nvcc_version()}, {toolchain.cxx_version()}"
    if spec.NAME == DISPATCHER:
        return f"{toolchain.cxx_version()}, pybind11 {toolchain.pybind11_version()}"
    return toolchain.cxx_version()


def cpu_features(spec: OpSpec) -> list[str]:
    """Returns the CPU features beyond the baseline that the op's C++ sources are compiled for."""
    try:
        compiler = toolchain.find_cxx()
    except CompilerNotFoundError:
        return []
    return platform.compiled_for([*compiler, *compile_flags(spec, "cpu")])


def check(spec: OpSpec, device: str, archs: Sequence[Arch]) -> None:
    """Raises the error of a build that lacks a compiler, header, arch or ninja; builds nothing."""
    compiler_version(spec, device, archs)
    system_folders(spec, device)
    toolchain.find_ninja()


def _gencodes(source: str, archs: Sequence[Arch]) -> list[str]:
    """Returns nvcc's arch flags for one source; a source for one arch is compiled for it alone."""
    own = own_arch(source)
    if own is not None:  # its launchers are referred to whatever the archs are
        return own.gencode()
    plain = {(arch.major, arch.minor) for arch in archs if arch.suffix == "a"}
    flags = []
    for arch in archs:
        # the device itself is served by the "a" code, only the PTX is missing
        only_ptx = arch.ptx and not arch.suffix and (arch.major, arch.minor) in plain
        flags += arch.gencode()[only_ptx:]
    return flags


def _nvcc_steps(
    spec: OpSpec, names: Sequence[str], system: Sequence[str], archs: Sequence[Arch], folder: str
) -> tuple[list[Step], list[str]]:
    nvcc = [toolchain.find_nvcc().path, *toolchain.nvcc_host_flags()]
    flags, includes = compile_flags(spec, "cuda"), include_flags(spec, system)
    steps = []
    for name in names:
        command = [*nvcc, *flags, *_gencodes(name, archs), *includes]
        steps.append(compile_step(command, name, os.path.join(spec.root, name), folder))
    return steps, [*nvcc, "-cudart=static"]


def _hipcc_steps(
    spec: OpSpec, names: Sequence[str], system: Sequence[str], archs: Sequence[Arch], folder: str
) -> tuple[list[Step], list[str]]:
    """Translates ``.cu`` sources into ``folder``; returns the commands of hipcc and the linker."""
    if spec.BINDING == "pybind11":
        raise BuildError(
            f'{spec.NAME}: an op with BINDING = "pybind11" and .cu files cannot be built for'
            " AMD GPUs: its sources include torch's headers, which the translation to HIP does"
            " not know"
        )
    place = os.path.join(folder, "hip")
    paths = {name: os.path.join(spec.root, name) for name in names}
    hipify.copies(paths.values(), spec.include_folders(), place)
    # where CUDA is installed as well, hipcc would take its compiler
    hipcc = ["env", "HIP_PLATFORM=amd", toolchain.find_hipcc().path]
    targets = [f"--offload-arch={arch.number}" for arch in archs]  # without, it seeks a GPU
    includes = [f"-I{hipify.copied(path, place)}" for path in spec.include_folders()]
    flags = [*compile_flags(spec, "cuda"), *targets, *includes, *_system_flags(system)]
    steps = [
        compile_step([*hipcc, *flags], name, hipify.copied(path, place), folder)
        for name, path in paths.items()
    ]
    return steps, [*hipcc, *targets]


def build_steps(
    spec: OpSpec, device: str, archs: Sequence[Arch], folder: str, output: str
) -> list[Step]:
    """Returns the commands that compile the library and link it, without running them."""
    names = spec.device_sources(device)
    on_gpu = [name for name in names if name.endswith(".cu")]
    others = [name for name in names if not name.endswith(".cu")]
    folders = system_folders(spec, device)
    steps: list[Step] = []
    if others or not on_gpu:
        linker = toolchain.find_cxx()
        command = [*linker, *compile_flags(spec, "cpu"), *include_flags(spec, folders)]
        for name in others:
            steps.append(compile_step(command, name, os.path.join(spec.root, name), folder))
    if on_gpu:
        gpu_steps = _hipcc_steps if platform.is_hip() else _nvcc_steps
        made, linker = gpu_steps(spec, on_gpu, folders, archs, folder)
        steps += made
    objects = tuple(step.output for step in steps)
    flags = link_flags(spec, "cuda" if on_gpu else "cpu")
    line = (*linker, "-shared", "-o", output, *objects, *flags)
    return [*steps, Step(output, objects, line, f"linking {os.path.basename(output)}")]
