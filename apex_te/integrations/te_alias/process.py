"""The alias in this process: installing and removing its finders, and serving a stub package."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from importlib.machinery import PathFinder

from ..._version import __version__
from .conflicts import AliasError, alias_made_for, find_real, is_bare_folder, real_distributions
from .finder import EXTENSION, NAME, SHIMS, PackageFinder, SubmoduleFinder, share

VARIABLE = "APEX_TE_TRANSFORMER_ENGINE"
_lock = threading.RLock()
_ways: list[str] = []


def warn_of_real() -> None:
    """Warns if a real Transformer Engine was installed beside the alias."""
    real = next(real_distributions(), None)
    if real is not None:
        warnings.warn(
            f"{NAME} is apex_te's alias, but {real}; python -m apex_te remove-alias removes the "
            "alias, after which the real one is to be installed again",
            stacklevel=2,
        )


_package = PackageFinder(warn_of_real)
_submodules = SubmoduleFinder()


def install(*, missing_ok: bool = False) -> bool:
    """Makes ``import transformer_engine`` give apex_te's modules, in this process.

    To be called before a framework is imported, since some look for Transformer Engine only once.
    Frameworks that find it may change their defaults. Calling it again changes nothing; where the
    files of ``python -m apex_te install-alias`` are present these serve.

    Args:
        missing_ok: True to return False instead of raising an error beside a real Transformer
            Engine.

    Returns:
        True if the alias is installed.

    Raises:
        AliasError: a real Transformer Engine is installed or imported, or the files of the alias
            were made for another version of apex_te.
    """
    return _install("install()", missing_ok)


def _install(way: str, missing_ok: bool) -> bool:
    """Does what ``install`` says, and notes that ``way`` asked for it."""
    with _lock:
        real = find_real()
        if real is not None:
            if missing_ok:
                return False
            raise AliasError(
                f"{way}: there must be no real Transformer Engine beside apex_te's alias, got: "
                f"{real}"
            )
        spec = PathFinder.find_spec(NAME)  # the files of the alias, as there is no real one
        made_for = None if spec is None else alias_made_for(spec.origin)
        if made_for not in (None, __version__):
            raise AliasError(f"{way}: {_outdated(str(made_for))}")
        if made_for is None:
            # Python prefers a package to a bare folder of its name, which only files find.
            _add(_package, 0 if is_bare_folder(spec) else len(sys.meta_path))
            _add(_submodules, 0)
        if way not in _ways:
            _ways.append(way)
        return True


def install_from_environment() -> None:
    """Installs the alias in this process if ``APEX_TE_TRANSFORMER_ENGINE`` is true."""
    from ...op_builder.jit import env

    if env.boolean(VARIABLE, False):
        _install(f"{VARIABLE}=1", missing_ok=False)


def uninstall() -> None:
    """Undoes ``install``, and removes the alias's modules from ``sys.modules``.

    References that a program holds stay valid. Modules of a real Transformer Engine, and the files
    that ``python -m apex_te install-alias`` wrote, are not touched.
    """
    with _lock:
        for finder in (_package, _submodules):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for name in list(sys.modules):
            if name in (NAME, EXTENSION) or name.startswith(f"{NAME}."):
                real = getattr(sys.modules[name], "__name__", "")
                if real == SHIMS or real.startswith(f"{SHIMS}."):
                    del sys.modules[name]
        _ways.clear()


def serve(made_for: str, version: str) -> None:
    """Puts the shims in the place of the stub package, whose code calls this function."""
    if made_for != __version__:
        raise ImportError(f"{NAME}: {_outdated(made_for)}", name=NAME)
    with _lock:
        shims = importlib.import_module(SHIMS)
        vars(shims)["__version__"] = version
        sys.modules[NAME] = shims
        _add(_submodules, 0)
        share()
    warn_of_real()


def ways() -> list[str]:
    """Returns which of ``"install()"`` and the environment variable are active in this process."""
    return list(_ways)


def _outdated(made_for: str) -> str:
    """Returns the sentence about files that another version of apex_te wrote."""
    return (
        f"the alias was written by apex_te {made_for}, and apex_te is {__version__} now; "
        "python -m apex_te install-alias renews it, remove-alias removes it"
    )


def _add(finder: PackageFinder | SubmoduleFinder, index: int) -> None:
    if finder not in sys.meta_path:
        sys.meta_path.insert(index, finder)
