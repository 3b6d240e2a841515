"""The files of a new op: the skeleton folder with another name, or an extension's few files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

SKELETON = Path(__file__).resolve().parent / "skeleton"
STEM, CLASS = "jit_op", "JitOp"  # what the skeleton's own op is called
_LINE = 100


def class_name(name: str) -> str:
    """``my_op`` as ``MyOp``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _choose(text: str, kind: str) -> str:
    """Drop the parts between ``# if <another kind>`` and ``# end``, and the markers themselves."""
    lines, keep = [], True
    for line in text.splitlines():
        marker = re.fullmatch(r"\s*# (if (\w+)|end)", line)
        if marker is None:
            if keep:
                lines.append(line)
        else:
            keep = marker[2] in (None, kind)
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines).rstrip() + "\n")


def sort_includes(text: str) -> str:
    """Quoted includes in the formatter's order, which depends on the op's name."""
    return re.sub(
        r'(?:^#include "[^"]+"\n)+',
        lambda block: "\n".join(sorted(block[0].splitlines())) + "\n",
        text,
        flags=re.MULTILINE,
    )


def skeleton(name: str, cuda: bool) -> dict[str, str]:
    """Files of an op through the suite's own binding, path below the root -> text."""
    files = {}
    for path in sorted(SKELETON.rglob("*")):
        if not path.is_file() or path.suffix == ".pyc" or (path.suffix == ".cu" and not cuda):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = _choose(text, "cuda" if cuda else "cpu")
        if not cuda:
            text = text.replace("CUDAOpBuilder", "CPUOpBuilder")
        text = text.replace(STEM, name).replace(CLASS, class_name(name))
        where = str(path.relative_to(SKELETON)).replace(STEM, name)
        files[where] = sort_includes(text) if path.suffix in (".h", ".cpp", ".cu") else text
    return files


def identifiers() -> frozenset[str]:
    """Names that the skeleton's Python op uses: an op of this name would hide what it needs."""
    tree = ast.parse((SKELETON / "apex_te" / "ops" / f"{STEM}.py").read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
    return frozenset(name for name in found if not name.startswith((STEM, f"_{CLASS}")))


def _items(before: str, items: Sequence[str], after: str, indent: int, one: str = "") -> str:
    """A bracketed list of strings as the formatter writes it, on one line if that is not too long.

    ``one`` follows a single item on one line: a tuple's comma.
    """
    quoted = [f'"{item}"' for item in items]
    pad = " " * indent
    line = f"{pad}{before}{', '.join(quoted)}{one if len(items) == 1 else ''}{after}"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"{pad}{before}", *(f"{pad}    {item}," for item in quoted), f"{pad}{after}"])


_BUILDER = '''"""Builder of {name}, an extension that binds itself with pybind11."""

from .builder import {base}


class {cls}Builder({base}):
    """Built from its sources as they are, for the torch at hand."""

    NAME = "{name}"
    BINDING = "pybind11"
{exports}
    def sources(self) -> list[str]:
{sources}
{includes}'''

_TEST = '''"""{name}: the extension builds, and defines what its module says."""

{imports}


{marks}def test_every_export_is_there():
    module = get_builder("{name}").load()
    assert {name}.__all__
    for export in {name}.__all__:
        assert hasattr(module, export), export
'''


def extension(
    name: str,
    sources: Sequence[str],
    cuda: bool,
    exports: Sequence[str] = (),
    includes: Iterable[str] = (),
) -> dict[str, str]:
    """Returns the builder and the test of an extension whose sources stay as they are."""
    folders = list(includes)
    builder = _BUILDER.format(
        name=name,
        cls=class_name(name),
        base="CUDAOpBuilder" if cuda else "CPUOpBuilder",
        exports=_items("EXPORTS = (", exports, ")", 4, ",") + "\n" if exports else "",
        sources=_items("return [", sources, "]", 8),
        includes=(
            "\n    def include_paths(self) -> list[str]:\n" + _items("return [", folders, "]", 8)
            if folders
            else ""
        ),
    )
    own = [
        f"from apex_te.compatibility import {name}",
        "from apex_te.op_builder import get_builder",
    ]
    imports, marks = own, ""
    if cuda:
        imports = ["import pytest", *own, "from checks import needs_cuda"]
        marks = "@pytest.mark.cuda\n@needs_cuda\n"
    test = _TEST.format(name=name, imports="\n".join(imports), marks=marks)
    return {
        f"op_builder/{name}.py": builder.rstrip() + "\n",
        f"tests/L0/ops/test_{name}.py": test,
    }
