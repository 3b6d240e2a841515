"""The reference has public names alone, each with an example that runs when pasted."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import doc_blocks
import pytest
import torch

PAGES = sorted((doc_blocks.ROOT / "docs" / "reference").glob("*.md"))
EXAMPLES = [
    block
    for page in PAGES
    for block in doc_blocks.blocks(page)
    if block.language == "python" and not block.hidden
]
_ENTRY = re.compile(r"^::: (\S+)\n(?:    options:\n((?:      .*\n)+))?", re.MULTILINE)
# Names that are seen only where their package is installed.
_PACKAGES = {
    "jax": ("jax", "flax", "optax"),
    "torchtitan": ("torchtitan",),
    "megatron.experts": ("megatron",),
}


def _entries(page: Path) -> list[tuple[str, str, str]]:
    """Returns name, options and the section's text before each entry of a page."""
    text = page.read_text() + "\n"
    return [
        (entry[1], entry[2] or "", text[: entry.start()].rpartition("\n## ")[2])
        for entry in _ENTRY.finditer(text)
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda block: block.place)
def test_an_example_runs_in_an_empty_namespace(
    example: doc_blocks.Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = doc_blocks.Run(example.page, example.needs, False).missing()
    if missing:
        pytest.skip(f"not here: {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    registered = importlib.import_module("op_builder.builder").registered
    monkeypatch.setattr("op_builder.builder.registered", dict(registered))
    code = compile("\n" * (example.line - 1) + example.text, str(example.page), "exec")
    try:
        exec(code, {"__name__": "__main__"})
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _words(text: str) -> set[str]:
    return {word.replace("_", "").lower() for word in re.findall(r"\w+", text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_entry_stands_below_an_example_of_it(page: Path) -> None:
    without = []
    for name, options, before in _entries(page):
        heading = re.search(r'heading: "(.*)"', options)
        shown = (heading[1] if heading else name).replace(":", ".").split(".")[-1]
        examples = "\n".join(re.findall(r"```python\n(.*?)```", before, re.DOTALL))
        if not _words(shown) <= _words(examples):
            without.append(name)
    assert without == []


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_entry_says_which_members_it_shows_and_has_them(page: Path) -> None:
    for name, options, _ in _entries(page):
        needed = [_PACKAGES[part] for part in _PACKAGES if f".{part}." in f".{name}."]
        if any(importlib.util.find_spec(package) is None for part in needed for package in part):
            continue
        entry = _resolved(name)
        listed = re.search(r"members: \[(.*)\]", options)
        if listed is None:  # a class would show all of its methods
            assert not inspect.isclass(entry), f"{name}: give it members"
            continue
        members = [member for member in listed[1].split(", ") if member]
        wrong = [m for m in members if m.startswith("_") or not hasattr(entry, m)]
        assert wrong == [], name
