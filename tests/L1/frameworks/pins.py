"""Versions of the frameworks, which pyproject.toml has."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def pin(name):
    """Returns the pinned version of a framework, for ``pytest.importorskip``.

    Args:
        name: name of the distribution.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"^frameworks(?:-alone)? = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r'"([\w-]+)==([\w.]+)"', "".join(extras)))[name]
