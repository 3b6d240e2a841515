"""Transformer Engine's modules and names over apex_te, for frameworks that select it.

With ``install()``, ``APEX_TE_TRANSFORMER_ENGINE=1`` or the files of ``python -m apex_te
install-alias`` the module ``transformer_engine`` is this one (docs/transformer_engine.md).
"""

from typing import TYPE_CHECKING

from ...runtime.imports import attach
from ..te_alias import AliasError, claimed_version, install, uninstall

if TYPE_CHECKING:
    from . import common as common

__all__ = ["AliasError", "__version__", "common", "install", "pytorch", "uninstall"]
__apex_te_alias__ = True
__version__ = claimed_version()
__getattr__, __dir__ = attach(__name__, {"common": "", "pytorch": ""})
