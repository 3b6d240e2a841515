"""Import of libraries that are extension modules of the running Python."""

from __future__ import annotations

import contextlib
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
from ..find.cache import OpenedLibrary


def import_module(name: str, opened: OpenedLibrary) -> ModuleType:
    """Imports an opened library as module ``name``; one already in ``sys.modules`` is returned."""
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
    """Checks that the import name of an extension is not that of another module."""
    module = sys.modules.get(name)
    found = None
    if module is None:
        # apex's builders name a module of apex, which need not be installed
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.util.find_spec(name)
    if module is not None or found is not None:
        where = getattr(module, "__file__", None) or getattr(found, "origin", None)
        raise ImportError(
            f"{spec.NAME}: {name} is another module already ({where}); give the op another NAME,"
            " or override absolute_name()",
            name=name,
        )


def _capability(spec: OpSpec) -> Capability | None:
    """Returns a visible GPU's capability for an extension: no tensor tells the device yet."""
    torch = installed_torch(spec.NAME)
    if not spec.needs_archs("cpu") or (torch.version.cuda or torch.version.hip) is None:
        return None
    devices = visible_capabilities()
    return devices[0] if devices else None


def load(spec: OpSpec, force: bool = False, verbose: bool = False) -> ModuleType:
    """Returns a pybind11 op's module, imported once; ``force`` compiles and imports it anew."""
    from ..build.service import load_library

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
        before: ModuleType | None = None

        def use(opened: OpenedLibrary) -> ModuleType:
            """Returns the opened library, imported; what had its name is out of the way."""
            nonlocal before
            before = sys.modules.pop(name, before)
            return import_module(name, opened)

        try:
            capability = _capability(spec)
            module = load_library(spec, "cpu", capability, use, force=force, verbose=verbose)
        except ImportError as error:
            if before is not None:
                sys.modules[name] = before
            raise ImportError(
                f"{error} (the module cannot be imported: PYBIND11_MODULE must name"
                f" TORCH_EXTENSION_NAME or {spec.NAME}; libraries_args() adds libraries to link)",
                name=name,
                path=error.path,
            ) from error
        _modules[name] = (spec, module)
        return module


def _forked() -> None:
    """Gives a forked child an unlocked lock: another thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
