"""Writes the files of a new FP8 recipe, or removes them again.

    python scripts/new_recipe.py per_row             # writes a recipe that works
    python scripts/new_recipe.py per_row --remove

A recipe, its scaling scheme and a test, to be changed into what they are to be; no file is edited.
docs/new_recipe.md goes through it.
"""

from __future__ import annotations

import argparse
import builtins
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # op_builder, which jit_templates needs; no torch is needed here

from jit_templates import record, render  # noqa: E402
from jit_templates.names import LONGEST, Refusal  # noqa: E402

TEMPLATE = Path(__file__).resolve().parent / "jit_templates" / "recipe"
STEM, CLASS = "jit_recipe", "JitRecipe"  # the template's own recipe


def record_name(name: str) -> str:
    """Returns the name of a recipe's record, which no op's record has."""
    return f"recipe-{name}"


def check_name(name: str, root: Path) -> None:
    """Checks that a new recipe can be called ``name``.

    Raises:
        Refusal: it cannot.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise Refusal(
            f"name must be a small letter, then small letters, digits and _, got {name!r}"
        )
    if len(name) > LONGEST:
        raise Refusal(f"name must have at most {LONGEST} characters, got {len(name)}: {name!r}")
    if keyword.iskeyword(name) or hasattr(builtins, name):
        raise Refusal(f"name must not be a word of Python, got {name!r}")
    if (root / f"apex_te/fp8/scheme/{name}.py").exists():
        raise Refusal(f"there is a scheme {name!r} already: apex_te/fp8/scheme/{name}.py")
    for path in sorted((root / "apex_te/recipe").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if f'name="{name}"' in text:
            raise Refusal(f"there is a recipe {name!r} already: {path.relative_to(root)}")
        if re.search(rf"\b{render.class_name(name)}Scaling\b", text):
            raise Refusal(
                f"{path.relative_to(root)} has a {render.class_name(name)}Scaling already"
            )


def files_of(name: str) -> dict[str, str]:
    """Returns the files of a new recipe: path below the root -> text."""
    files = {}
    for path in sorted(TEMPLATE.rglob("*.py")):
        where = str(path.relative_to(TEMPLATE)).replace(STEM, name)
        text = path.read_text(encoding="utf-8")
        files[where] = text.replace(STEM, name).replace(CLASS, render.class_name(name))
    return files


def create(options: argparse.Namespace) -> None:
    """Writes the files of a new recipe, or says which they would be."""
    check_name(options.name, ROOT)
    files = files_of(options.name)
    there = [where for where in files if (ROOT / where).exists()]
    if there:
        raise Refusal(f"nothing is overwritten, and there is {', '.join(there)} in {ROOT} already")
    if not options.dry_run:
        record.write(record_name(options.name), files, ROOT)
    print(f"{'would write' if options.dry_run else 'wrote'}, in {ROOT}:", *files, sep="\n  ")
    if not options.dry_run:
        print("\nnext:")
        print(*(f"  python -m pytest {where}" for where in files if "test" in where), sep="\n")
        print(f"  python scripts/new_recipe.py {options.name} --remove    # undoes this")


def remove(options: argparse.Namespace) -> None:
    """Removes the files of a generated recipe, or says which they are."""
    name = record_name(options.name)
    if name not in record.generated(ROOT):
        raise Refusal(f"no recipe {options.name!r} was generated in {ROOT}")
    files = record.check_removal(name, ROOT, options.force)
    print(f"{'would remove' if options.dry_run else 'removed'}, in {ROOT}:", *files, sep="\n  ")
    if options.dry_run:
        return
    for folder in record.remove(name, ROOT, options.force):
        print(f"left: {folder}, which holds files that were not generated")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when all was done, 1 when it was refused; a wrong command line exits with 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="name of the recipe, in snake_case")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--remove", action="store_true", help="remove what was generated")
    parser.add_argument("--force", action="store_true", help="remove files changed since, too")
    options = parser.parse_args(arguments)
    if options.force and not options.remove:
        parser.error("--force goes with --remove: what exists is never overwritten")
    try:
        (remove if options.remove else create)(options)
    except (Refusal, OSError) as error:
        print(f"new_recipe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
