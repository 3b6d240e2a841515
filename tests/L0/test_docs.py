"""The documents name files, headings and variables that exist, and README's examples run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from op_builder import builder_names

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
PARTS = ("apex_te", "benchmarks", "compatibility", "csrc", "docs", "examples", "op_builder",
         "scripts", "tests")  # fmt: skip
# Commands that make files with the name that follows, and placeholders in names.
_MAKES = re.compile(r"scripts/\w+\.py (\w+)")
_PLACEHOLDER = re.compile(r"my_|<")

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HIDDEN = re.compile(r"^<!-- test\n.*?^-->", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _anchors(path: Path) -> set[str]:
    """Names by which links reach a document's headings."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def _missing(document: Path, text: str) -> Iterator[str]:
    """Yields the links and paths in ``text`` that lead nowhere."""
    for link in _LINK.findall(_HIDDEN.sub("", text)):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            yield link
    made = set(_MAKES.findall(text))
    for code in _CODE.findall(_FENCE.sub("", text)):
        found = re.fullmatch(rf"((?:{'|'.join(PARTS)})/[\w./*{{}},-]*)(?::\w+)?", code)
        if found is None or _PLACEHOLDER.search(code) or any(name in code for name in made):
            continue
        for pattern in _expanded(found[1]):
            if not any(ROOT.glob(pattern.rstrip("/"))):
                yield pattern


def _expanded(pattern: str) -> list[str]:
    """The paths of ``a/{b,c}``."""
    before, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    inner, _, after = rest.partition("}")
    return [path for item in inner.split(",") for path in _expanded(before + item + after)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_what_a_document_names_exists(document: Path) -> None:
    assert list(_missing(document, document.read_text())) == []


def test_a_path_that_is_gone_is_seen() -> None:
    text = (
        "[a](gone.md) [b](#no-heading) [c](docs/map.md) `apex_te/gone.py` "
        "`apex_te/{permutation,no}.py` `csrc/gone_*/` `csrc/common/` `apex_te/ops/made.py`\n"
        "```\npython scripts/new_op.py made\napex_te/gone_2.py\n```\n"
    )
    assert list(_missing(ROOT / "README.md", text)) == [
        "gone.md", "#no-heading", "apex_te/gone.py", "apex_te/no.py", "csrc/gone_*/",
    ]  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_documents_use_the_words_of_the_glossary(document: Path) -> None:
    linter = _loaded(ROOT / "scripts" / "check_docstrings.py")
    prose = _CODE.sub("", _FENCE.sub("", document.read_text()))
    if document.name == "glossary.md":  # whose last column has the others
        assert "'transposed copy': the glossary says 'columnwise copy'" in list(
            linter.refused_words(prose, linter.glossary())
        )
    else:
        assert list(linter.refused_words(prose, linter.glossary())) == []
        assert list(linter.idioms(prose)) == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 900


_EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("example", _EXAMPLES, ids=["huggingface", "plain"])
def test_examples_of_the_readme_run(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "transformers" in example:
        pytest.importorskip("transformers", reason="transformers is not installed")
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["loss"].isfinite()
    weights = dict(names["model"].named_parameters())
    assert weights
    assert all(weight.isfinite().all() for weight in weights.values())
    if "conversion_summary" in example:
        assert "19 converted, 2 kept" in capsys.readouterr().out


def _loaded(path: Path) -> Any:
    """Returns the module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_show_the_results_that_are_there() -> None:
    summary = _loaded(ROOT / "benchmarks" / "summary.py")
    documents = summary.documents()
    assert ROOT / "README.md" in documents
    for path, text in documents.items():
        assert path.read_text() == text, f"{_name(path)}: run benchmarks/summary.py"


_NAME = re.compile(r"apex_te(?:\.\w+)+")
# An op that works on the layers' own buffers of peer memory.
_WITHOUT_CALLERS = {"peer_exchange"}
# For the project's own parts.
_NOT_IN_THE_REFERENCE = {"__version__", "chosen_recipe", "pack_recipe", "unpack_recipe"}


def _resolved(name: str) -> Any:
    """Returns what a dotted name stands for; raises AttributeError where it is nothing."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


OPTIONAL = (
    "apex_te.jax",
    "apex_te.integrations.torchtitan",
    "apex_te.integrations.megatron.experts",
)
# The guides of new ops, recipes and modules name what they make.
_OF_THE_PACKAGE = [path for path in DOCUMENTS if not path.stem.startswith("new_")]


@pytest.mark.parametrize("document", _OF_THE_PACKAGE, ids=_name)
def test_names_of_the_package_in_a_document_exist(document: Path) -> None:
    prose = _FENCE.sub("", document.read_text())
    for name in {name for code in _CODE.findall(prose) if _NAME.fullmatch(name := code)}:
        if name.startswith(OPTIONAL):
            continue  # which import what may not be here
        _resolved(name)


def test_the_reference_has_every_public_name() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    entries = [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
    headings = [
        name for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r'heading: "([\w.]+)"', page.read_text())
    ]  # fmt: skip
    documented = {id(_resolved(name)) for name in entries if not name.startswith(OPTIONAL)}
    packages = ("apex_te", "apex_te.recipe", "apex_te.state", "apex_te.parameter",
                "apex_te.optimizers", "apex_te.amp", "apex_te.integrations", "apex_te.distributed",
                "apex_te.permutation")  # fmt: skip
    absent = [
        f"{package}.{name}"
        for package in packages
        for name in _resolved(package).__all__
        if name not in _NOT_IN_THE_REFERENCE
        and not isinstance(value := getattr(_resolved(package), name), ModuleType)
        and id(value) not in documented
        and f"{package}.{name}" not in headings
    ]
    assert absent == []
    ops = {*builder_names()} & {path.stem for path in (ROOT / "apex_te" / "ops").glob("*.py")}
    in_reference = {name.removeprefix("apex_te.ops.") for name in entries if ".ops." in name}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "docs" / "ops.md").read_text(), re.M)
    in_guide = {name for row in rows for name in re.findall(r"\w+", row)}
    assert in_reference == in_guide - _WITHOUT_CALLERS
    assert in_guide >= ops


def test_every_environment_variable_is_documented() -> None:
    read = set()
    for folder in ("apex_te", "op_builder", "compatibility", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "APEX_TE_" in text else ():
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.update(re.findall(r"^(APEX_TE_[A-Z_]+[A-Z])$", node.value))
    for path in (ROOT / "csrc").rglob("*.*"):
        read.update(re.findall(r'getenv\("(APEX_TE_[A-Z_]+)"\)', path.read_text()))
    table = re.findall(r"^\|([^|]*)\|", (ROOT / "docs" / "environment.md").read_text(), re.M)
    documented = {name for cell in table for name in re.findall(r"APEX_TE_[A-Z_]+[A-Z]", cell)}
    macros = {"APEX_TE_FUNCTION", "APEX_TE_LAUNCH_BOUNDS"}  # of C++
    assert read - macros == documented


def test_the_architecture_lists_the_layers_that_are_checked() -> None:
    layers = _loaded(Path(__file__).parent / "test_layout.py").LAYERS
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    documented = {part: set(re.findall(r"`([\w.]+)`", cell)) for part, cell in rows}
    builder = {"op_builder"}
    assert documented == {
        part: allowed - builder for part, allowed in layers.items() if part != "op_builder"
    }
