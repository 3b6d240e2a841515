"""Flags, cache-key texts, compiler versions and build commands of any op's library."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...spec import DISPATCHER, OpSpec
from .. import env, platform
from ..cpu_features import compiled_for
from ..errors import CompilerNotFoundError
from . import pybind, toolchain
from .archs import Arch
from .cuda import Cuda
from .hip import Hip
from .steps import Step, compile_step, include_flags, link_step

# Numbers must not depend on the machine: no contraction, no fast-math, no -march=native. Floating
# point flags and errno are nobody's business here, and keeping them stops vectorization.
# No -fopenmp: kernels reach the OpenMP runtime that torch has loaded through weak symbols.
BASE_CXX_ARGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
]
_CUDA, _HIP = Cuda(), Hip()


def gpu_backend() -> Cuda | Hip:
    """Returns the backend that compiles ``.cu`` files, for the platform of ``platform.is_hip``."""
    return _HIP if platform.is_hip() else _CUDA


def compile_flags(spec: OpSpec, kind: str) -> list[str]:
    """Returns the suite's base flags and the op's own for compiling one kind of source."""
    if spec.BINDING == "pybind11":
        own = spec.nvcc_args() if kind == "cuda" else [*spec.cxx_args(), *env.sanitizers()]
        return [*pybind.compile_flags(spec, kind), *own]
    if kind == "cuda":
        return gpu_backend().compile_flags(spec)
    return [*BASE_CXX_ARGS, *spec.cxx_args(), *env.sanitizers()]


def link_flags(spec: OpSpec, kind: str) -> list[str]:
    """Returns the op's own linker flags and then the suite's base ones."""
    binding = pybind.link_flags(spec) if spec.BINDING == "pybind11" else []
    base = gpu_backend().link_flags if kind == "cuda" else ["-ldl", *env.sanitizers()]
    return [*spec.libraries_args(), *binding, *base]


def key_flags(spec: OpSpec, device: str) -> list[str]:
    """Returns the flags of the cache key, without archs and folders outside the project."""
    kinds = spec.source_kinds(device) or ["cpu"]
    flags = [flag for kind in kinds for flag in compile_flags(spec, kind)]
    includes = [f"-I{path}" for path in spec.project_includes()]
    return [*flags, *includes, *link_flags(spec, kinds[-1])]


def key_extras(spec: OpSpec, device: str) -> list[str]:
    """Returns the texts beside sources and flags that take part in the library's cache key."""
    binding = pybind.key_extras(spec) if spec.BINDING == "pybind11" else []
    gpu = gpu_backend().key_extras() if spec.needs_archs(device) else []
    return [*binding, *spec.key_extras(), *gpu]


def system_folders(spec: OpSpec, device: str) -> list[str]:
    """Returns the include folders outside of the project that the library for ``device`` needs."""
    binding = pybind.include_paths(spec) if spec.BINDING == "pybind11" else []
    return [*spec.system_include_paths(device), *binding]


def compiler_version(spec: OpSpec, device: str, archs: Sequence[Arch] = ()) -> str:
    """Returns the compilers' version text, for manifests and stored failures but not for keys."""
    if spec.needs_archs(device):
        return gpu_backend().compiler_version(archs)
    if spec.NAME == DISPATCHER:
        return f"{toolchain.cxx_version()}, pybind11 {toolchain.pybind11_version()}"
    return toolchain.cxx_version()


def cpu_features(spec: OpSpec) -> list[str]:
    """Returns the CPU features beyond the baseline that the op's C++ sources are compiled for."""
    try:
        compiler = toolchain.find_cxx()
    except CompilerNotFoundError:
        return []
    return compiled_for([*compiler, *compile_flags(spec, "cpu")])


def check(spec: OpSpec, device: str, archs: Sequence[Arch]) -> None:
    """Raises the error of a build that lacks a compiler, header, arch or ninja; builds nothing."""
    compiler_version(spec, device, archs)
    system_folders(spec, device)
    toolchain.find_ninja()


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
        paths = {name: os.path.join(spec.root, name) for name in others}
        steps += [compile_step(command, name, path, folder) for name, path in paths.items()]
    if on_gpu:
        flags = compile_flags(spec, "cuda")
        made, linker = gpu_backend().steps(spec, on_gpu, flags, folders, archs, folder)
        steps += made
    return [*steps, link_step(linker, steps, output, link_flags(spec, "cuda" if on_gpu else "cpu"))]
