"""Search for the real library of a name, beside which the alias is refused."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from .finder import AliasLoader
from .metadata import is_ours
from .names import MARK, Alias


class AliasError(RuntimeError):
    """Error that an alias cannot be installed, or not be removed."""


def find_real(alias: Alias, folder: str | None = None) -> str | None:
    """Looks for the real library of an alias, installed or imported."""
    importlib.invalidate_caches()  # something may have been installed while this process ran
    folders = () if folder is None else (folder,)
    found = next(real_distributions(alias, folders), None)
    if found is not None:
        return found
    for name in (alias.name, *alias.extensions):
        found = _imported(name) or _importable(name, folders)
        if found is not None:
            return found
    return None


def real_distributions(alias: Alias, folders: Sequence[str] = ()) -> Iterator[str]:
    """Yields a sentence for each distribution that belongs to the real library of an alias."""
    for name in alias.distributions:
        # Editable and broken ones, too: their folders are found by their names.
        searches: list[dict[str, Any]] = [{"name": name}]
        searches += [{"name": name, "path": [folder]} for folder in folders]
        for search in searches:
            for distribution in distributions(**search):
                if not is_ours(distribution):
                    yield (
                        f"{name}{_version(distribution)} is installed in "
                        f"{distribution.locate_file('')}; pip uninstall {name} removes it"
                    )


def _version(distribution: Distribution) -> str:
    """Returns a blank and the version of a distribution; nothing if its files are broken."""
    try:
        version = distribution.version
    except Exception:  # of a parser, or a KeyError, by the version of Python
        version = None
    return f" {version}" if version else ""


def _imported(name: str) -> str | None:
    """Returns a sentence about a real module that is imported already; None if there is none."""
    module = sys.modules.get(name)
    if module is None or hasattr(module, MARK):
        return None
    where = getattr(module, "__file__", None)
    return f"{name} is imported already{f' from {where}' if where else ''}; start a new process"


def _importable(name: str, folders: Sequence[str]) -> str | None:
    """Returns a sentence about a real module that could be imported; None if there is none."""
    if name in sys.modules:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    for found in (spec, *(PathFinder.find_spec(name, [folder]) for folder in folders)):
        if found is None or _is_alias(found):
            continue
        if is_bare_folder(found):
            continue
        where = (found.origin or "an unknown place").removesuffix("__init__.py").rstrip("/")
        return f"a module {name} is in {where}; remove it, or its folder from sys.path"
    return None


def is_bare_folder(spec: ModuleSpec | None) -> bool:
    """Returns True if a spec is that of folders without an ``__init__.py``, a namespace package."""
    return spec is not None and spec.origin is None and spec.submodule_search_locations is not None


def _is_alias(spec: ModuleSpec) -> bool:
    if isinstance(spec.loader, AliasLoader):
        return True
    return alias_made_for(spec.origin) is not None


def alias_made_for(file: str | None) -> str | None:
    """Returns the version of apex_te for which a stub package was written."""
    try:
        lines = Path(file or "").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    values = [line.partition("=")[2] for line in lines if line.startswith(f"{MARK} = ")]
    return values[0].strip().strip('"') if values else None
