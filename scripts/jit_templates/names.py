"""Checks of the names and sources that an op may have."""

from __future__ import annotations

import builtins
import importlib.util
import keyword
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from op_builder import builder_names, user_ops
from op_builder.builder import suite_names
from op_builder.builtin import OPS
from op_builder.jit.backends import pythons
from op_builder.jit.backends.pybind import Exports, read_exports
from op_builder.jit.prebuild import install
from op_builder.spec import INCLUDE_FLAGS, SUITE

from . import render

LONGEST = 26  # characters of a skeleton's name, so that the lines of its files stay in bounds
_LONGEST_EXTENSION = 64
_VARIABLES = {*INCLUDE_FLAGS, pythons.VARIABLE, install.MACHINE, install.LABEL}
_HEADERS = (".h", ".hpp", ".cuh")


class Refusal(Exception):
    """Error of a request that cannot be met; its text says why and what to do instead."""


def _python_module(name: str, root: Path) -> str:
    """The file of a Python module or package called ``name``, "" if there is none."""
    for path in (root / "apex_te" / name, root / "apex_te" / f"{name}.py"):
        if path.exists():
            return str(path)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return f"a module {name}"
    # a namespace package has no origin: any folder on the path looks like one
    return spec.origin or "" if spec is not None else ""


def check_name(name: str, root: Path, is_skeleton: bool) -> None:
    """Raise Refusal if no op can be called ``name``."""
    longest = LONGEST if is_skeleton else _LONGEST_EXTENSION
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise Refusal(f"name must be a letter, then letters, digits and _, got {name!r}")
    if len(name) > longest:
        raise Refusal(f"name must have at most {longest} characters, got {len(name)}: {name!r}")
    if keyword.iskeyword(name) or hasattr(builtins, name):
        raise Refusal(f"name must not be a word of Python, got {name!r}")
    ops = builder_names()
    if name in ops:
        where = "builtin" if name in OPS else name
        raise Refusal(f"there is an op {name!r} already: op_builder/{where}.py")
    for op in ops:
        if render.class_name(op) == render.class_name(name):
            raise Refusal(f"{name!r} and {op!r} would both be {render.class_name(op)}Builder")
        if op.upper() == name.upper():
            raise Refusal(f"{name!r} and {op!r} would both be APEX_BUILD_{op.upper()}")
    if f"APEX_BUILD_{name.upper()}" in _VARIABLES:
        raise Refusal(f"APEX_BUILD_{name.upper()} has a meaning already; choose another name")
    if name in suite_names() or any(
        path.exists()
        for path in (SUITE / "compatibility" / name, SUITE / f"compatibility/{name}.py")
    ):
        raise Refusal(f"apex_te.compatibility.{name} would not be the op's module; choose another")
    module = _python_module(name, root)
    if module:
        raise Refusal(f"{name!r} is a Python module already: {module}")
    if name in user_ops.names():
        raise Refusal(f"another installed package has an op {name!r}")
    if is_skeleton and name.endswith(("_cpu", "_cuda")):
        raise Refusal(f"name must not end in a device: both are files of one op, got {name!r}")
    if is_skeleton and name in render.identifiers():
        raise Refusal(f"{name!r} is a name that the generated files use; choose another")


def check_tests(files: Iterable[str], root: Path) -> None:
    """Raise Refusal if a test among ``files`` has the name of one that is there.

    pytest imports tests by the names of their files, in whichever folder they are.
    """
    for path in (Path(file) for file in files if file.startswith("tests/")):
        for there in sorted((root / "tests").rglob(path.name)):
            raise Refusal(f"there is a test {there.relative_to(root)} already; choose another name")


def check_targets(name: str, files: Sequence[str], root: Path) -> None:
    """Raise Refusal if a file or a folder of the op is there already."""
    folders = [f"csrc/{name}", f"op_builder/{name}", f"apex_te/ops/{name}"]
    there = [path for path in (*files, *folders) if (root / path).exists()]
    if there:
        raise Refusal(f"nothing is overwritten, and there is {', '.join(there)} in {root} already")
    check_tests(files, root)


def find_sources(texts: Sequence[str], root: Path) -> tuple[list[str], list[str]]:
    """Sources relative to the root, and the folders below csrc that they and their headers lie in.

    Each may be given relative to the root or to where the user is. Headers, which apex's lists of
    sources name, too, are checked and left out.
    """
    found: list[str] = []
    for text in texts:
        path = next((p for p in (root / text, Path.cwd() / text) if p.is_file()), None)
        if path is None:
            raise Refusal(f"source {text} is neither in {root} nor in {Path.cwd()}")
        path = path.resolve()
        if path.suffix not in (".cpp", ".cu", *_HEADERS):
            raise Refusal(f"a source must end in .cpp, .cu or .h, got {text}")
        if not path.is_relative_to(root / "csrc"):
            raise Refusal(
                f"a source must lie below {root / 'csrc'}, which is what an installation copies,"
                f" got {path}"
            )
        relative = str(path.relative_to(root))
        if relative in found:
            raise Refusal(f"source {relative} is given twice")
        found.append(relative)
    folders = sorted({str(Path(source).parent) for source in found} - {"csrc"})
    return [source for source in found if not source.endswith(_HEADERS)], folders


def check_includes(folders: Sequence[str], root: Path) -> None:
    """Raise Refusal if an include folder does not exist below the root."""
    for folder in folders:
        if not (root / folder).is_dir() or not (root / folder).resolve().is_relative_to(root):
            raise Refusal(f"include folder {folder} must be a folder in {root}")


def check_extension(name: str, sources: Sequence[str], exports: Sequence[str], root: Path) -> None:
    """Raise Refusal if the sources are not one extension called ``name`` with known exports."""
    texts = [(root / source).read_text(encoding="utf-8", errors="replace") for source in sources]
    each: list[Exports] = [read_exports([text]) for text in texts]
    modules = [found.module for found in each if found.module]
    if len(modules) != 1:
        raise Refusal(
            f"one of the sources must have a PYBIND11_MODULE, {len(modules)} have:"
            f" {', '.join(sources)} (without sources a skeleton is written)"
        )
    if modules[0] not in ("TORCH_EXTENSION_NAME", name):
        raise Refusal(
            f"PYBIND11_MODULE names the module {modules[0]}: call the op so, or write"
            " TORCH_EXTENSION_NAME there"
        )
    bad = [export for export in exports if not export.isidentifier()]
    if bad:
        raise Refusal(f"exports must be identifiers, got {', '.join(map(repr, bad))}")
    if not exports and not any(found.functions or found.values for found in each):
        raise Refusal('no exports can be read off the sources (m.def("name", ...)): give --exports')
