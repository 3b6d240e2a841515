"""The notebooks run, and show what they print."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def _runner():
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _kinds(notebook):
    """Kinds of the outputs of each cell."""
    return [[o["output_type"] for o in cell.get("outputs", [])] for cell in notebook["cells"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_has_the_outputs_of_a_run(path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    runner = _runner()
    saved = runner.json.loads(path.read_text())
    found = runner.run(path)
    assert _kinds(found) == _kinds(saved), "run scripts/notebooks.py"
    text = "".join(
        o["text"][0] for c in found["cells"] for o in c.get("outputs", []) if "text" in o
    )
    assert "nan" not in text.lower().replace("nan/inf", "")


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2
