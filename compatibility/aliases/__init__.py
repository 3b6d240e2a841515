"""Packages of apex_te under other libraries' names: ``apex`` and ``transformer_engine``.

Programs look for the module and for the metadata of its distribution. Both are provided in one of
three ways: by a call and by an environment variable for one process, by files in an environment
(``python -m apex_te install-alias``) for all of its processes. Nothing here imports torch.
"""

from .conflicts import AliasError
from .metadata import claimed_version
from .names import ALIASES, APEX, TRANSFORMER_ENGINE, Alias
from .process import install, install_from_environment, serve, uninstall

__all__ = [
    "ALIASES", "APEX", "TRANSFORMER_ENGINE", "Alias", "AliasError", "claimed_version", "install",
    "install_from_environment", "serve", "uninstall",
]  # fmt: skip
