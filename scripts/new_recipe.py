"""Writes the files of a new FP8 recipe, or removes them again.

    python scripts/new_recipe.py per_row             # writes a recipe that works
    python scripts/new_recipe.py per_row --remove

A recipe, its scheme and a test, to be changed into what they are to be; no file is edited.
docs/new_recipe.md goes through them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # op_builder, which jit_templates needs; no torch is needed here

from jit_templates import render  # noqa: E402
from jit_templates.names import Refusal  # noqa: E402
from jit_templates.tree import Template  # noqa: E402


def check_name(name: str, root: Path) -> None:
    """Checks that no recipe and no scheme of the package has the name or its class.

    Raises:
        Refusal: one has.
    """
    if (root / f"apex_te/fp8/scheme/{name}.py").exists():
        raise Refusal(f"there is a scheme {name!r} already: apex_te/fp8/scheme/{name}.py")
    kind = f"{render.class_name(name)}Scaling"
    for path in sorted((root / "apex_te/recipe").glob("*.py")):
        text, where = path.read_text(encoding="utf-8"), path.relative_to(root)
        if f'name="{name}"' in text:
            raise Refusal(f"there is a recipe {name!r} already: {where}")
        if re.search(rf"\b{kind}\b", text):
            raise Refusal(f"{where} has a {kind} already")
    package = "apex_te/recipe/__init__.py"
    if re.search(rf"\b{name}\b", (root / package).read_text(encoding="utf-8")):
        raise Refusal(f"{package} uses the name {name!r}, which a file would take; choose another")


TEMPLATE = Template(
    "recipe", Path(__file__).resolve().parent / "jit_templates" / "recipe", check_name
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the status of the process: 0 done, 1 refused."""
    return TEMPLATE.main(__doc__ or "", ROOT, arguments)


if __name__ == "__main__":
    sys.exit(main())
