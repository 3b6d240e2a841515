"""Loads the programs of examples/ as modules."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def load(name):
    """The program ``examples/<name>/<name>.py``."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def common():
    """``examples/common.py``."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("common")
    finally:
        sys.path.remove(str(EXAMPLES))  # the folder jax in it would pass for the package


def parts(name, *modules):
    """Loads modules of ``examples/<name>`` that import each other, and returns them by name.

    Examples have modules of the same names, such as ``train``: none of them stays importable.
    """
    folder = EXAMPLES / name
    own = {path.stem for path in folder.glob("*.py")}
    others = {key: sys.modules.pop(key) for key in own if key in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        return SimpleNamespace(**{key: importlib.import_module(key) for key in modules})
    finally:
        sys.path.remove(str(folder))
        for key in own:
            sys.modules.pop(key, None)
        sys.modules.update(others)
