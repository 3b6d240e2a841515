"""Compile and link commands as steps of a build graph."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from ...spec import OpSpec


class Step(NamedTuple):
    """One command of a build graph, run by ninja after the steps that make its inputs."""

    output: str
    inputs: tuple[str, ...]
    command: tuple[str, ...]
    label: str


def include_flags(spec: OpSpec, system_folders: Sequence[str]) -> list[str]:
    """Returns ``-I`` flags for the op's include folders, ``-isystem`` ones for the others."""
    own = [f"-I{path}" for path in spec.include_folders()]
    # -isystem: warnings in other people's headers are not ours
    return [*own, *(flag for path in system_folders for flag in ("-isystem", path))]


def compile_step(command: Sequence[str], name: str, path: str, folder: str) -> Step:
    """Returns the step that compiles one source to an object file in ``folder``."""
    made = os.path.join(folder, re.sub(r"[^\w.]", "_", name) + ".o")
    line = (*command, "-c", path, "-o", made)
    return Step(made, (path,), line, f"compiling {os.path.basename(name)}")


def link_step(
    command: Sequence[str], compiled: Sequence[Step], output: str, flags: list[str]
) -> Step:
    """Returns the step that links the outputs of ``compiled`` into the library ``output``."""
    objects = tuple(step.output for step in compiled)
    line = (*command, "-shared", "-o", output, *objects, *flags)
    return Step(output, objects, line, f"linking {os.path.basename(output)}")
