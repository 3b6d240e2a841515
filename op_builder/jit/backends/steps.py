"""The compile and link commands of one library."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..build.ninja import Step
from . import hip, toolchain
from .archs import Arch, own_arch

if TYPE_CHECKING:
    from ...builder import OpBuilder


def object_path(folder: str, source: str) -> str:
    return os.path.join(folder, re.sub(r"[^\w.]", "_", source) + ".o")


def _includes(builder: OpBuilder, device: str) -> list[str]:
    own = [f"-I{path}" for path in builder.include_folders()]
    # -isystem: warnings in other people's headers are not ours
    system = [flag for path in builder.system_folders(device) for flag in ("-isystem", path)]
    return [*own, *system]


def link(command: list[str], objects: list[str], output: str, flags: list[str]) -> Step:
    line = (*command, "-shared", "-o", output, *objects, *flags)
    return Step(output, tuple(objects), line, f"linking {os.path.basename(output)}")


def check(builder: OpBuilder, device: str, archs: Sequence[Arch]) -> None:
    """Raise what a build would raise for want of a program, a header or an arch; runs no build."""
    builder.compiler_version(device, archs)
    builder.system_folders(device)
    toolchain.find_ninja()


def _gencodes(source: str, archs: Sequence[Arch]) -> list[str]:
    own = own_arch(source)
    if (
        own is not None
    ):  # its launchers are referred to whatever the archs are, so it is always compiled
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


def library(
    builder: OpBuilder, device: str, archs: Sequence[Arch], folder: str, output: str
) -> list[Step]:
    """Steps for an op's library of one device; translation units compile in parallel."""
    root = str(builder.root)
    kinds = builder.source_kinds(device)
    if builder.needs_hip(device):
        return hip.library(builder, device, archs, folder, output)
    includes = _includes(builder, device)
    cxx = toolchain.find_cxx()
    steps, objects = [], []
    if "cuda" in kinds:
        nvcc = [toolchain.find_nvcc().path]
        if os.environ.get("CXX"):
            nvcc.append(f"-ccbin={cxx[0]}")
    for source in builder.device_sources(device):
        path, made = os.path.join(root, source), object_path(folder, source)
        if source.endswith(".cu"):
            command = [*nvcc, *builder.compile_flags("cuda"), *_gencodes(source, archs), *includes]
        else:
            command = [*cxx, *builder.compile_flags("cpu"), *includes]
        line = (*command, "-c", path, "-o", made)
        steps.append(Step(made, (path,), line, f"compiling {os.path.basename(source)}"))
        objects.append(made)
    linker = [*nvcc, "-cudart=static"] if "cuda" in kinds else cxx
    steps.append(link(linker, objects, output, builder.link_flags(kinds[-1])))
    return steps
