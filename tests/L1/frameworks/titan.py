"""Imports torchtitan, also where there is no triton, as beside a torch for CPUs.

Skips the test module that imports this where torchtitan is missing.
"""

import importlib
import importlib.util
import sys
import types

import pytest

for _name in ("_inductor.compile_fx", "_functorch.partitioners"):
    importlib.import_module(f"torch.{_name}")  # looks for a real triton as it is imported
pytest.importorskip("torchtitan", reason="torchtitan is not installed")


class _Anything:
    def __init__(self, *args, **kwargs):
        pass


class _Missing(types.ModuleType):
    """Module in the place of triton, whose kernels are defined but never run here."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("jit", "autotune", "heuristics"):
            return lambda *args, **kwargs: args[0] if args and callable(args[0]) else lambda f: f
        return _Anything


_names = [] if importlib.util.find_spec("triton") else ["triton", "triton.language"]
for _name in _names:
    sys.modules[_name] = _Missing(_name)
if _names:
    sys.modules["triton"].language = sys.modules["triton.language"]
try:
    import torchtitan.models.llama3  # noqa: F401
finally:
    for _name in _names:
        del sys.modules[_name]
