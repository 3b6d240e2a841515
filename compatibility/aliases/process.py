"""Aliases in this process: installing and removing their finders, and serving a stub package."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from importlib.machinery import PathFinder

from apex_te._version import __version__

from .conflicts import AliasError, alias_made_for, find_real, is_bare_folder, real_distributions
from .finder import PackageFinder, SubmoduleFinder, share
from .names import ALIASES, Alias

_lock = threading.RLock()
_ways: dict[str, list[str]] = {name: [] for name in ALIASES}


def warn_of_real(alias: Alias) -> None:
    """Warns if the real library was installed beside the alias."""
    real = next(real_distributions(alias), None)
    if real is not None:
        warnings.warn(
            f"{alias.name} is apex_te's alias, but {real}; python -m apex_te remove-alias "
            f"{alias.name} removes the alias, after which the real one is to be installed again",
            stacklevel=2,
        )


_packages = {name: PackageFinder(alias, warn_of_real) for name, alias in ALIASES.items()}
_submodules = {name: SubmoduleFinder(alias) for name, alias in ALIASES.items()}


def install(alias: Alias, way: str = "install()", missing_ok: bool = False) -> bool:
    """Makes importing an alias's name give apex_te's modules, in this process.

    Returns True if the alias is installed; ``way`` is what asked for it. Beside the real library
    it raises AliasError, or with ``missing_ok`` returns False. Where the alias's files are present
    these serve.
    """
    with _lock:
        real = find_real(alias)
        if real is not None:
            if missing_ok:
                return False
            raise AliasError(
                f"{way}: there must be no real {alias.title} beside apex_te's alias, got: {real}"
            )
        spec = PathFinder.find_spec(alias.name)  # the alias's files, as there is no real one
        made_for = None if spec is None else alias_made_for(spec.origin)
        if made_for not in (None, __version__):
            raise AliasError(f"{way}: {_outdated(alias, str(made_for))}")
        if made_for is None:
            # Python prefers a package to a bare folder of its name, which only files find.
            _add(_packages[alias.name], 0 if is_bare_folder(spec) else len(sys.meta_path))
            _add(_submodules[alias.name], 0)
        if way not in _ways[alias.name]:
            _ways[alias.name].append(way)
        return True


def install_from_environment(alias: Alias) -> bool:
    """Installs an alias in this process if its variable is true; returns True if it is."""
    from apex_te.op_builder.jit import env

    wanted = env.boolean(alias.variable, False)
    return wanted and install(alias, f"{alias.variable}=1")


def uninstall(alias: Alias) -> None:
    """Undoes ``install``, and removes the alias's modules from ``sys.modules``."""
    with _lock:
        for finder in (_packages[alias.name], _submodules[alias.name]):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for name in list(sys.modules):
            real = getattr(sys.modules[name], "__name__", "")
            is_second = name in alias.extensions or alias.served_by(name) is not None
            if is_second and alias.second_name(real) is not None:
                del sys.modules[name]
        _ways[alias.name].clear()


def serve(alias: Alias, made_for: str, version: str) -> None:
    """Puts the package in the place of the stub package, whose code calls this function."""
    if made_for != __version__:
        raise ImportError(f"{alias.name}: {_outdated(alias, made_for)}", name=alias.name)
    with _lock:
        package = importlib.import_module(alias.target)
        vars(package)["__version__"] = version
        sys.modules[alias.name] = package
        _add(_submodules[alias.name], 0)
        share(alias)
    warn_of_real(alias)


def ways(alias: Alias) -> list[str]:
    """Returns which of ``"install()"`` and the environment variable are active in this process."""
    return list(_ways[alias.name])


def _outdated(alias: Alias, made_for: str) -> str:
    """Returns the sentence about files that another version of apex_te wrote."""
    return (
        f"the alias was written by apex_te {made_for}, and apex_te is {__version__} now; "
        f"python -m apex_te install-alias {alias.name} renews it, remove-alias removes it"
    )


def _add(finder: PackageFinder | SubmoduleFinder, index: int) -> None:
    if finder not in sys.meta_path:
        sys.meta_path.insert(index, finder)
