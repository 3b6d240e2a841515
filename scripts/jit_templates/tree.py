"""A template that is a folder of files: written under a new name, and removed again."""

from __future__ import annotations

import argparse
import builtins
import keyword
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from . import record, render
from .names import LONGEST, Refusal, check_tests

__all__ = ["Template"]


class Template(NamedTuple):
    """A folder whose files, paths included, name ``jit_<noun>`` and ``Jit<Noun>``.

    Attributes:
        noun: what is written: ``module``, ``recipe``.
        folder: the template; its paths are those below the checkout's root.
        check: raises Refusal for a name that is taken, in the checkout that it is given.
        table: file in which users enter the name; below the checkout's root, empty for none.
    """

    noun: str
    folder: Path
    check: Callable[[str, Path], None]
    table: str = ""

    def files(self, name: str) -> dict[str, str]:
        """Returns the files under a name: path below the root -> text."""
        stem, found = f"jit_{self.noun}", {}
        for path in sorted(self.folder.rglob("*.py")):
            where = str(path.relative_to(self.folder)).replace(stem, name)
            text = path.read_text(encoding="utf-8").replace(stem, name)
            found[where] = text.replace(render.class_name(stem), render.class_name(name))
        return found

    def create(self, name: str, root: Path, dry_run: bool) -> None:
        """Writes the files, or says which they would be."""
        _check_word(name)
        self.check(name, root)
        files = self.files(name)
        there = [where for where in files if (root / where).exists()]
        if there:
            raise Refusal(
                f"nothing is overwritten, and there is {', '.join(there)} in {root} already"
            )
        check_tests(files, root)
        if not dry_run:
            record.write(self._record(name), files, root)
        print(f"{'would write' if dry_run else 'wrote'}, in {root}:", *files, sep="\n  ")
        if not dry_run:
            print("\nnext:")
            print(*(f"  python -m pytest {where}" for where in files if "test" in where), sep="\n")
            print(f"  python scripts/new_{self.noun}.py {name} --remove    # undoes this")

    def remove(self, name: str, root: Path, force: bool, dry_run: bool) -> None:
        """Removes the files that were generated, or says which they are."""
        key = self._record(name)
        if key not in record.generated(root):
            raise Refusal(f"no {self.noun} {name!r} was generated in {root}")
        if self.table and re.search(rf"\b{name}\b", (root / self.table).read_text("utf-8")):
            raise Refusal(f"{self.table} names {name}: take it out there first")
        files = record.check_removal(key, root, force)
        print(f"{'would remove' if dry_run else 'removed'}, in {root}:", *files, sep="\n  ")
        for folder in () if dry_run else record.remove(key, root, force):
            print(f"left: {folder}, which holds files that were not generated")

    def _record(self, name: str) -> str:
        """Returns the name of the record, which no op's record has."""
        return f"{self.noun}-{name}"

    def main(self, description: str, root: Path, arguments: Sequence[str] | None = None) -> int:
        """Returns 0 when all was done, 1 when it was refused; a wrong command line exits with 2."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("name", help=f"name of the {self.noun}, in snake_case")
        options = parsed(parser, arguments)
        try:
            if options.remove:
                self.remove(options.name, root, options.force, options.dry_run)
            else:
                self.create(options.name, root, options.dry_run)
        except (Refusal, OSError) as error:
            print(f"new_{self.noun}: {error}", file=sys.stderr)
            return 1
        return 0


def _check_word(name: str) -> None:
    """Checks that ``name`` can name a Python module and, in capitals, a class."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise Refusal(
            f"name must be a small letter, then small letters, digits and _, got {name!r}"
        )
    if len(name) > LONGEST:
        raise Refusal(f"name must have at most {LONGEST} characters, got {len(name)}: {name!r}")
    if keyword.iskeyword(name) or hasattr(builtins, name):
        raise Refusal(f"name must not be a word of Python, got {name!r}")


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a generator: those of ``parser``, --dry-run, --remove and --force."""
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--remove", action="store_true", help="remove what was generated")
    parser.add_argument("--force", action="store_true", help="remove files changed since, too")
    options = parser.parse_args(arguments)
    if options.force and not options.remove:
        parser.error("--force goes with --remove: what exists is never overwritten")
    return options
