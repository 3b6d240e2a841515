"""Writing generated files, and removing them again: a record with hashes says what was written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from .names import Refusal

FOLDER = "scripts/jit_generated"
_VERSION = 1


def _path(name: str, root: Path) -> Path:
    return root / FOLDER / f"{name}.json"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _make_folders(path: Path, made: list[Path]) -> None:
    """Create the parents of ``path``, noting those that did not exist, innermost last."""
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir()
        made.append(folder)


def write(name: str, files: Mapping[str, str], root: Path) -> None:
    """Write all files and the record, or, whatever goes wrong, none of them."""
    written: list[Path] = []
    made: list[Path] = []
    try:
        for where, text in files.items():
            _make_folders(root / where, made)
            with open(root / where, "x", encoding="utf-8") as file:  # x: never overwrites
                written.append(root / where)
                file.write(text)
        record = {
            "version": _VERSION,
            "files": {where: _digest(text.encode()) for where, text in sorted(files.items())},
            "folders": [str(folder.relative_to(root)) for folder in made],
        }
        _make_folders(_path(name, root), made)
        with open(_path(name, root), "x", encoding="utf-8") as file:
            written.append(_path(name, root))
            file.write(json.dumps(record, indent=1) + "\n")
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        for folder in reversed(made):
            folder.rmdir()
        raise


def generated(root: Path) -> list[str]:
    """Names of the ops whose files were generated and are still there."""
    return sorted(path.stem for path in (root / FOLDER).glob("*.json"))


def _read(name: str, root: Path) -> tuple[dict[str, str], list[str]]:
    if name not in generated(root):
        there = ", ".join(generated(root)) or "none"
        raise Refusal(f"no op {name!r} was generated in {root}; generated: {there}")
    try:
        record = json.loads(_path(name, root).read_text(encoding="utf-8"))
        if record["version"] != _VERSION:
            raise ValueError(f"version {record['version']}")
        files, folders = dict(record["files"]), list(record["folders"])
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{_path(name, root)} cannot be read: {error}") from None
    for where in (*files, *folders):  # a record comes with the checkout: it must not lead outside
        if not Path(os.path.normpath(root / where)).is_relative_to(root):
            raise Refusal(f"{_path(name, root)} names {where}, which is outside of {root}")
    return files, folders


def check_removal(name: str, root: Path, force: bool) -> list[str]:
    """Returns the files that a removal deletes.

    Raises:
        Refusal: a file was changed, and ``force`` is False.
    """
    files, _ = _read(name, root)
    there = [where for where in files if (root / where).is_file()]
    changed = [where for where in there if _digest((root / where).read_bytes()) != files[where]]
    if changed and not force:
        raise Refusal(
            f"changed since it was generated: {', '.join(changed)}; --force removes it all the same"
        )
    return there


def remove(name: str, root: Path, force: bool) -> list[str]:
    """Delete what was generated and the folders made for it; returns folders left with content."""
    _, folders = _read(name, root)
    for where in check_removal(name, root, force):
        (root / where).unlink()
    _path(name, root).unlink()
    left = []
    for folder in [*reversed(folders), FOLDER]:
        try:
            (root / folder).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            if folder != FOLDER:
                left.append(folder)
    return left
