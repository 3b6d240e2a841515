"""Code blocks of the documents that take longer than unit tests may."""

from __future__ import annotations

from pathlib import Path

import doc_blocks
import pytest


@pytest.mark.parametrize("run", doc_blocks.runs(slow=True), ids=str)
def test_slow_code_blocks_run(
    run: doc_blocks.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = run.missing()
    if missing:
        pytest.skip(f"not here: {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    doc_blocks.execute(run, tmp_path)
