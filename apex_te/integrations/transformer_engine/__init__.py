"""Transformer Engine's modules and names over apex_te, for frameworks that select it.

``pytorch`` and ``common`` are here; ``jax`` is ``apex_te.jax``, and needs no torch.

With ``install()``, ``APEX_TE_TRANSFORMER_ENGINE=1`` or the files of ``python -m apex_te
install-alias`` the module ``transformer_engine`` is this one (docs/transformer_engine.md).
"""

import importlib
from typing import TYPE_CHECKING, Any

from ...runtime.imports import attach
from ..te_alias import AliasError, claimed_version, install, uninstall

if TYPE_CHECKING:
    from . import common as common

__all__ = ["AliasError", "__version__", "common", "install", "pytorch", "uninstall"]
__apex_te_alias__ = True
__version__ = claimed_version()
_get, __dir__ = attach(__name__, {"common": "", "pytorch": ""})


def __getattr__(name: str) -> Any:
    """Returns a subpackage, which is imported now; ``jax`` only where JAX is installed."""
    if name != "jax":
        return _get(name)
    try:
        return importlib.import_module("apex_te.jax")
    except ModuleNotFoundError as error:
        raise AttributeError(f"module {__name__!r} has no attribute 'jax': {error}") from error
