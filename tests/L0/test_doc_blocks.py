"""Every code block of the documents runs when pasted alone, here or in the test it names."""

from __future__ import annotations

from pathlib import Path

import doc_blocks
import pytest
import torch

LONG = ("docs/parallelism.md", "docs/guides/long_context.md")  # start ranks, for ten seconds each


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=pytest.mark.long if str(run).startswith(LONG) else ())
        for run in doc_blocks.runs(slow=False)
    ],
    ids=str,
)
def test_code_blocks_run(
    run: doc_blocks.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = run.missing()
    if missing:
        pytest.skip(f"not here: {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    try:
        doc_blocks.execute(run, tmp_path)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", doc_blocks.DOCUMENTS, ids=lambda page: page.name)
def test_every_code_block_runs_somewhere(page: Path) -> None:
    for block in doc_blocks.blocks(page):
        assert block.language, f"{block.place}: give the block a language (text, if it is none)"
        if block.elsewhere:
            assert (doc_blocks.ROOT / block.elsewhere).is_file(), f"{block.place}: no such test"
        elif not block.shown and block.language in doc_blocks.WRITTEN:
            assert block.file, (
                f"{block.place}: begin the block with its file's name, or say who runs it"
            )


@pytest.mark.parametrize("page", doc_blocks.DOCUMENTS, ids=lambda page: page.name)
def test_a_block_that_needs_a_gpu_says_so(page: Path) -> None:
    for block in doc_blocks.blocks(page):
        if "cuda" in block.needs and not block.hidden:
            assert "GPU" in block.text, f"{block.place}: say in a comment that it needs a GPU"


def test_few_blocks_are_shown_only() -> None:
    shown = [b for page in doc_blocks.DOCUMENTS for b in doc_blocks.blocks(page) if b.shown]
    assert len(shown) <= 12, [block.place for block in shown]


def test_a_page_is_read_with_its_comments(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- test\nx = 1\n-->\n```python\ny = x\n```\n"
        "<!-- test: needs nothing_of_this_name; slow -->\n\n```python\nz = y\n```\n"
        "<!-- test\nassert z\n-->\n"
        "- in a list:\n\n  ```bash\n  true\n  ```\n"
        "```c\n// add.c\nint a;\n```\n"
        "<!-- test: elsewhere tests/L0/test_docs.py -->\n```python\nno\n```\n"
        "```text\nshown\n```\n"
    )
    found = doc_blocks.blocks(page)
    assert [block.language for block in found] == [
        "python", "python", "python", "python", "bash", "c", "python", "text",
    ]  # fmt: skip
    assert [block.hidden for block in found[:4]] == [True, False, False, True]
    assert [block.slow for block in found[:5]] == [False, False, True, True, False]
    assert found[2].needs == found[3].needs == {"nothing_of_this_name"}
    assert found[4].text == "true\n"
    assert found[5].file == "add.c"
    assert [block.runs for block in found[4:]] == [True, True, False, False]
    assert found[2].line == 10


def test_a_block_begins_with_no_names_of_others(tmp_path: Path) -> None:
    pages = {
        "hidden": "<!-- test\nx = 1\n-->\n```python\ny = x\n```\n",
        "visible": "```python\nx = 1\n```\n```python\ny = x\n```\n",
    }
    for name, text in pages.items():
        page = tmp_path / f"{name}.md"
        page.write_text(text)
        with pytest.raises(NameError, match="'x' is not defined"):
            doc_blocks.execute(doc_blocks.Run(page, frozenset(), False), tmp_path)


def test_hidden_checks_run_after_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```python\norder = [1]\n```\n"
        "<!-- test\nassert order == [1] and 'later' not in globals()\nfirst = order\n"
        "open('checked', 'w').close()\n-->\n"
        "```python\nimport os\norder, later = [2], os.path.exists('checked')\n```\n"
        "<!-- test\nassert order == [2] and first == [1] and not later\n-->\n"
    )
    monkeypatch.chdir(tmp_path)
    doc_blocks.execute(doc_blocks.Run(page, frozenset(), False), tmp_path)


@pytest.mark.long
def test_a_block_runs_by_the_command_in_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# torchrun --nproc-per-node 2 ranks.py\nimport os\n"
        "open('rank' + os.environ['RANK'], 'w').close()\n```\n"
        "<!-- test\nimport os\nassert os.path.exists('rank0') and os.path.exists('rank1')\n-->\n"
    )
    monkeypatch.chdir(tmp_path)
    doc_blocks.execute(doc_blocks.Run(page, frozenset(), False), tmp_path)


def test_programs_of_other_libraries_run_on_their_replacements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# apex\nfrom apex.normalization import FusedRMSNorm\n```\n"
        "```python\n# Transformer Engine\nimport transformer_engine.pytorch as te\n```\n"
        "<!-- test\nassert FusedRMSNorm.__module__.startswith('apex_te.')\n"
        "assert te.__name__.startswith('apex_te.')\n-->\n"
    )
    doc_blocks.execute(doc_blocks.Run(page, frozenset(), False), tmp_path)


def test_a_block_that_fails_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    failures = {
        "```python\n1 / 0\n```\n": ZeroDivisionError,
        "```bash\nfalse\n```\n": AssertionError,
        "```python\nx = 1\n```\n<!-- test\nassert x == 2\n-->\n": AssertionError,
    }
    for number, (text, error) in enumerate(failures.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        page = folder / "page.md"
        page.write_text(text)
        with pytest.raises(error):
            doc_blocks.execute(doc_blocks.Run(page, frozenset(), False), folder)
