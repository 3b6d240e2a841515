"""Code blocks of the documents that take longer than unit tests may."""

import doc_blocks
import pytest


@pytest.mark.parametrize("run", doc_blocks.runs(slow=True), ids=str)
def test_slow_code_blocks_run(run, tmp_path, monkeypatch):
    missing = run.missing()
    if missing:
        pytest.skip(f"not here: {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    doc_blocks.execute(run, tmp_path)
