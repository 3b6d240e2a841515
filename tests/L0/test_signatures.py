"""Public classes and functions have the signatures for which users have written their calls.

``python tests/L0/test_signatures.py`` writes them to ``signatures.json`` after a change on purpose.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SAVED = Path(__file__).with_name("signatures.json")
_ENTRY = re.compile(
    r"^::: (apex_te\.\S+)\n(?:    options:\n)?(?:      members: \[(.*)\]\n)?", re.MULTILINE
)
# Pages whose names need packages that may be missing; tests of ops have those of the ops.
_OTHERS = ("jax", "integrations", "building", "ops")


def _resolved(name: str) -> Any:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def _is_own(constructor: Any) -> bool:
    """True for a constructor of the package's, also one that a dataclass has made."""
    return getattr(constructor, "__module__", "builtins").startswith("apex_te")


def signatures() -> dict[str, str]:
    """Returns the signature of each function, class and method that the reference shows."""
    found = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        if page.stem in _OTHERS:
            continue
        for name, members in _ENTRY.findall(page.read_text() + "\n"):
            entry = _resolved(name)
            if not inspect.isclass(entry) or _is_own(entry.__init__):
                found[name] = str(inspect.signature(entry))
            for member in filter(None, members.split(", ")):
                value = getattr(entry, member)
                if inspect.isroutine(value):
                    found[f"{name}.{member}"] = str(inspect.signature(value))
    return found


def test_every_name_of_the_reference_has_its_signature() -> None:
    saved = json.loads(SAVED.read_text())
    assert signatures() == saved


if __name__ == "__main__":
    rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(signatures().items())]
    SAVED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
