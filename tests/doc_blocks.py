"""Code blocks of the documents: what they are, and running them page by page.

Each visible ``python`` block of a page runs by itself, in a namespace that holds nothing, as it
would when pasted; ``bash`` blocks run in a shell. All of them run in one folder for the page. The
first line of a block can say how to run it:

``# train.py``, ``// axpy.c``: the block is written to that file, for the page's later blocks.
``# torchrun --nproc-per-node 2 train.py``: it is written to that file and run by that command,
without GPUs.
``# Transformer Engine``, ``# apex``: it is a program for that library, and runs on apex_te's
replacement of it (``PEERS``).

HTML comments, which readers do not see, say more:

``<!-- test`` *newline, Python code* ``-->``: code that checks results. It runs after all visible
blocks, with the names of those before it, so it cannot prepare anything for them.
``<!-- test: needs NAME -->`` before a block: only where the package, or a GPU (``cuda``), is there.
``<!-- test: slow -->`` before a block: in tests/L1, with all that stand before it on the page.
``<!-- test: elsewhere FILE -->`` before a block: that file of tests runs it.
``<!-- test: shown REASON -->`` before a block: nothing runs it, and why.

With ``page`` after the colon (``<!-- test: page slow -->``) a comment holds for the whole page.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
# Languages whose blocks are commands or programs. Others are shown only: text, diff, toml.
RUN = ("python", "bash")
WRITTEN = ("c", "cpp")
# Of the README, whose words are counted and which so does without comments.
README = {
    "python": "elsewhere tests/L0/test_docs.py",
    "bash": "shown installs into the environment, or takes minutes",
}

_ITEM = re.compile(
    r"^<!-- test\n(?P<code>.*?)^-->|"
    r"^<!-- test: (?P<said>[^\n]*?) -->|"
    r"^(?P<indent> *)```(?P<language>[\w+]*)\n(?P<block>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"(?:#|//) (?P<command>torchrun (?:[\w-]+ )*)?(?P<file>[\w./-]+\.\w+)\n")


@dataclass
class Block:
    """A code block, or hidden code, with what a page says of it."""

    page: Path
    line: int
    language: str
    text: str
    hidden: bool = False
    needs: frozenset[str] = frozenset()
    slow: bool = False
    elsewhere: str = ""
    shown: str = ""

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def file(self) -> str:
        """Name of the file that the block is written to, if any."""
        found = _FILE.match(self.text)
        return found["file"] if found else ""

    @property
    def command(self) -> str:
        """Shell command that the block itself says it is run by, if any."""
        found = _FILE.match(self.text)
        return f"{found['command']}{found['file']}" if found and found["command"] else ""

    @property
    def peer(self) -> str:
        """Library of ``PEERS`` that the block is a program for, if any."""
        first = self.text.partition("\n")[0].removeprefix("# ")
        return first if first in PEERS else ""

    @property
    def runs(self) -> bool:
        """Returns True if running the page runs or writes this block."""
        if self.elsewhere or self.shown:
            return False
        return self.language in RUN or bool(self.file)


@dataclass
class _Said:
    needs: set[str] = field(default_factory=set)
    slow: bool = False
    elsewhere: str = ""
    shown: str = ""

    def add(self, text: str, place: str) -> None:
        """Takes in what a comment says."""
        for part in text.split("; "):
            word, _, rest = part.partition(" ")
            if word == "needs" and rest:
                self.needs.update(rest.split())
            elif part == "slow":
                self.slow = True
            elif word == "elsewhere" and rest:
                self.elsewhere = rest
            elif word == "shown" and rest:
                self.shown = rest
            else:
                raise ValueError(f"{place}: no such comment for tests: {part!r}")


def blocks(page: Path) -> list[Block]:
    """Returns a page's code blocks and hidden code, in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    whole, following = _Said(), _Said()
    for item in _ITEM.finditer(text):
        line = text.count("\n", 0, item.start()) + 1
        place = f"{page.name}:{line}"
        said = item["said"]
        if said is not None:
            is_whole = said.startswith("page ")
            (whole if is_whole else following).add(said.removeprefix("page "), place)
            continue
        if item["code"] is not None:
            # Hidden code has the needs of the block it follows.
            before = found[-1] if found else None
            needs = before.needs if before else frozenset(whole.needs)
            slow = before.slow if before else whole.slow
            found.append(Block(page, line + 1, "python", item["code"], True, needs, slow))
            continue
        indent = len(item["indent"])
        code = "".join(row[indent:] for row in item["block"].splitlines(keepends=True))
        language = item["language"]
        if page == ROOT / "README.md" and language in README:
            following.add(README[language], place)
        found.append(
            Block(
                page,
                line + 1,
                language,
                code,
                needs=frozenset(whole.needs | following.needs),
                slow=whole.slow or following.slow,
                elsewhere=following.elsewhere or whole.elsewhere,
                shown=following.shown or whole.shown,
            )
        )
        following = _Said()
    return found


@dataclass(frozen=True)
class Run:
    """A page with what has to be there for its blocks."""

    page: Path
    needs: frozenset[str]
    slow: bool

    def __str__(self) -> str:
        return "+".join([self.page.relative_to(ROOT).as_posix(), *sorted(self.needs)])

    def missing(self) -> list[str]:
        """Returns what is needed and not there."""
        return [name for name in sorted(self.needs) if not _is_there(name)]

    def blocks(self) -> list[Block]:
        """Returns what runs, in order."""
        return [
            block
            for block in blocks(self.page)
            if block.runs and block.needs <= self.needs and block.slow <= self.slow
        ]


def runs(slow: bool) -> list[Run]:
    """Returns the runs that pages need: one for each set of needs, with slow blocks or without."""
    found = []
    for page in DOCUMENTS:
        shown = [block for block in blocks(page) if block.runs and not block.hidden]
        needs = {block.needs for block in shown if block.slow == slow}
        found += [Run(page, each, slow) for each in sorted(needs, key=sorted)]
    return found


def _is_there(name: str) -> bool:
    if name == "cuda":
        import torch

        return torch.cuda.is_available()
    return importlib.util.find_spec(name) is not None


def execute(run: Run, folder: Path) -> None:
    """Runs a page's blocks in a folder, and then its hidden checks.

    Raises:
        AssertionError: a command failed.
    """
    for name in ("benchmarks", "csrc", "examples"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    # Names of the blocks so far, for each hidden check.
    names: dict[str, object] = {}
    checks: list[tuple[Block, dict[str, object]]] = []
    for block in run.blocks():
        if block.hidden:
            checks.append((block, dict(names)))
        elif block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            if block.command:
                _shell(block, f"export CUDA_VISIBLE_DEVICES=\n{block.command}", folder)
        elif block.language == "bash":
            _shell(block, block.text, folder)
        else:
            own: dict[str, object] = {"__name__": "__main__"}
            with PEERS[block.peer]() if block.peer else contextlib.nullcontext():
                _python(block, own)
            names |= own
    kept: dict[str, object] = {}  # what earlier checks have defined
    for block, seen in checks:
        before = {**seen, **kept}
        after = dict(before)
        _python(block, after)
        kept |= {k: v for k, v in after.items() if k not in before or before[k] is not v}


def _python(block: Block, names: dict[str, object]) -> None:
    # Lines of a traceback are those of the page.
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)


@contextlib.contextmanager
def _transformer_engine() -> Iterator[None]:
    from unittest import mock

    from apex_te.integrations import transformer_engine

    # Transformer Engine makes its layers on the GPU where there is one; blocks have CPU tensors.
    with mock.patch("torch.cuda.is_available", return_value=False):
        transformer_engine.install()
        try:
            yield
        finally:
            transformer_engine.uninstall()


@contextlib.contextmanager
def _apex() -> Iterator[None]:
    from apex_te.compatibility import apex

    apex.install()
    try:
        yield
    finally:
        apex.uninstall()


# What stands in for a library, by the first line of the blocks that are written for it.
PEERS = {"Transformer Engine": _transformer_engine, "apex": _apex}


def _shell(block: Block, text: str, folder: Path) -> None:
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}",
    }
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=500
    )
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{block.place}: {text}\n{said}"
