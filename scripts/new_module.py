"""Writes the files of a new FP8 module, or removes them again.

    python scripts/new_module.py gelu_linear             # writes a module that works
    python scripts/new_module.py gelu_linear --remove

A module that computes in FP8 and its test, to be changed into what they are to be; no file is
edited. docs/new_module.md goes through them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # op_builder, which jit_templates needs; no torch is needed here

from jit_templates import render  # noqa: E402
from jit_templates.names import Refusal  # noqa: E402
from jit_templates.tree import Template  # noqa: E402


def check_name(name: str, root: Path) -> None:
    """Checks that no module of the package has the name or its class.

    Raises:
        Refusal: one has.
    """
    if (root / "apex_te" / "module" / name).exists():
        raise Refusal(f"there is a folder apex_te/module/{name} already")
    for path in sorted((root / "apex_te" / "module").rglob("*.py")):
        if f"class {render.class_name(name)}(" in path.read_text(encoding="utf-8"):
            where = path.relative_to(root)
            raise Refusal(f"{where} has a class {render.class_name(name)} already")


TEMPLATE = Template(
    "module",
    Path(__file__).resolve().parent / "jit_templates" / "module",
    check_name,
    "apex_te/module/__init__.py",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the status of the process: 0 done, 1 refused."""
    return TEMPLATE.main(__doc__ or "", ROOT, arguments)


if __name__ == "__main__":
    sys.exit(main())
