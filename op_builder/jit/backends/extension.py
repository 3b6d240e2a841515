"""Extension modules: the interpreter they are for, and importing one from a descriptor."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

from ..find.cache import OpenedLibrary


def soabi() -> str:
    """The interpreter's SOABI, read off the suffix of its extension modules."""
    return importlib.machinery.EXTENSION_SUFFIXES[0]


def import_module(name: str, opened: OpenedLibrary) -> ModuleType:
    """Import the opened library as module ``name`` and register it."""
    loader = importlib.machinery.ExtensionFileLoader(name, opened.proc_path)
    spec = importlib.util.spec_from_file_location(name, opened.proc_path, loader=loader)
    if spec is None:
        raise ImportError(f"{name}: cannot be imported from {opened.path}", name=name)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return sys.modules.setdefault(name, module)
