"""Importing libraries that are extension modules of this interpreter."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import threading
from types import ModuleType

from ...spec import OpSpec
from ..backends.archs import Capability, visible_capabilities
from ..backends.pybind import installed_torch
from ..errors import DuplicateOpError
from ..find.entry import OpenedLibrary


def import_module(name: str, opened: OpenedLibrary) -> ModuleType:
    """Imports the opened library as module ``name`` and registers it."""
    loader = importlib.machinery.ExtensionFileLoader(name, opened.proc_path)
    found = importlib.util.spec_from_file_location(name, opened.proc_path, loader=loader)
    if found is None:
        raise ImportError(f"{name}: cannot be imported from {opened.path}", name=name)
    module = importlib.util.module_from_spec(found)
    loader.exec_module(module)
    return sys.modules.setdefault(name, module)


_lock = threading.RLock()
_modules: dict[str, tuple[OpSpec, ModuleType]] = {}


def _refuse_taken(spec: OpSpec, name: str) -> None:
    """Raises ``ImportError`` if ``name`` is a module already, which the extension would replace."""
    module = sys.modules.get(name)
    found = None if module is not None else importlib.util.find_spec(name)
    if module is not None or found is not None:
        where = getattr(module, "__file__", None) or getattr(found, "origin", None)
        raise ImportError(
            f"{spec.NAME}: {name} is another module already ({where}); give the op another NAME,"
            " or override absolute_name()",
            name=name,
        )


def _capability(spec: OpSpec) -> Capability | None:
    """Returns a visible GPU, on which the code must run: at import no tensor tells the device."""
    torch = installed_torch(spec.NAME)
    if not spec.needs_archs("cpu") or (torch.version.cuda or torch.version.hip) is None:
        return None
    devices = visible_capabilities()
    return devices[0] if devices else None


def load(spec: OpSpec, force: bool = False, verbose: bool = False) -> ModuleType:
    """Returns the extension, found or built and imported once.

    Args:
        spec: the op.
        force: builds and imports it again.
        verbose: shows the compiler commands.

    Raises:
        BuildError: it cannot be found or built.
        ImportError: it does not import.
        DuplicateOpError: another op's extension has its name.
    """
    from ..build.service import open_library

    name = spec.absolute_name()
    with _lock:
        known = _modules.get(name)
        if known is not None and known[0].root != spec.root:
            raise DuplicateOpError(
                f"{name}: extensions of {known[0].root} and of {spec.root} have the same name"
            )
        if known is not None and not force:
            return known[1]
        if known is None:
            _refuse_taken(spec, name)
        opened = open_library(spec, "cpu", _capability(spec), force=force, verbose=verbose)
        before = sys.modules.pop(name, None)
        try:
            module = import_module(name, opened)
        except ImportError as error:
            if before is not None:
                sys.modules[name] = before
            raise ImportError(
                f"{spec.NAME}: {opened.path} was built and cannot be imported: {error}"
                " (PYBIND11_MODULE must name TORCH_EXTENSION_NAME or"
                f" {spec.NAME}; libraries_args() adds libraries to link)",
                name=name,
                path=opened.path,
            ) from error
        _modules[name] = (spec, module)
        return module


def _forked() -> None:
    """Gives a child a fresh lock: a fork may copy one that another thread held."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
