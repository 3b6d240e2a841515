"""Importing of ``apex_te.integrations.transformer_engine`` by the name ``transformer_engine``.

Frameworks look for that module and for the metadata of a distribution ``transformer-engine``. Both
are provided in one of three ways: ``install`` and ``APEX_TE_TRANSFORMER_ENGINE=1`` for one process,
files in an environment (``python -m apex_te install-alias``) for all of its processes. Nothing here
imports torch.
"""

from .conflicts import AliasError
from .metadata import claimed_version
from .process import install, install_from_environment, serve, uninstall

__all__ = [
    "AliasError", "claimed_version", "install", "install_from_environment", "serve", "uninstall",
]  # fmt: skip
