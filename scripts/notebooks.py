"""Runs the notebooks of docs and saves their outputs in them.

    python scripts/notebooks.py                 # all of docs/notebooks
    python scripts/notebooks.py FILE.ipynb ...

Cells run one after the other in this process, without Jupyter: what they print, the value of a last
line that is an expression, and the figures that ``plt.show()`` shows become outputs.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "docs" / "notebooks"


def _evaluated(source: str, names: dict[str, Any], name: str) -> Any:
    """Runs a cell; returns the value of its last line if that is an expression, else None."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), name, "eval"), names)
    return None


def _figures() -> list[dict[str, Any]]:
    """Returns the open figures of matplotlib as outputs, and closes them."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    found = []
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=80, metadata={"Software": None})
        image = base64.b64encode(file.getvalue()).decode()
        data = {"image/png": image, "text/plain": ["<Figure>"]}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    pyplot.close("all")
    return found


def run(path: Path) -> dict[str, Any]:
    """Runs a notebook in a temporary folder.

    Args:
        path: the file.

    Returns:
        Its content with new outputs.
    """
    import matplotlib

    matplotlib.use("Agg")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    folder = os.getcwd()
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        try:
            count = 0
            for number, cell in enumerate(notebook["cells"]):
                if cell["cell_type"] != "code":
                    continue
                printed, count = io.StringIO(), count + 1
                with contextlib.redirect_stdout(printed):
                    value = _evaluated("".join(cell["source"]), names, f"{path.name}:{number}")
                    if value is not None:
                        print(value)
                text = printed.getvalue().splitlines(keepends=True)
                stream = {"output_type": "stream", "name": "stdout", "text": text}
                cell["outputs"] = ([stream] if text else []) + _figures()
                cell["execution_count"] = count
        finally:
            os.chdir(folder)
    return notebook


def main() -> None:
    """Runs the notebooks that the command line names, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = run(path)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {sum(c['cell_type'] == 'code' for c in notebook['cells'])} cells")


if __name__ == "__main__":
    main()
