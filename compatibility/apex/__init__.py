"""apex's extension modules, with apex's names and signatures, computed by apex_te's ops.

``from apex_te.compatibility.apex import amp_C`` always works; ``import amp_C`` works after
``install()`` or, with ``APEX_TE_TOPLEVEL_COMPAT=1``, once ``apex_te`` is imported, and so does
``import apex``, which gives the package ``apex_te.integrations.apex``. Importing a module,
``dir`` and ``hasattr`` compile nothing: an op is built by the first call that needs it.
docs/apex.md lists the functions that are served and their differences from apex's.
"""

from apex_te.runtime.imports import attach

from ._finder import NAMES, install, install_from_environment, serve, uninstall

__all__ = ["NAMES", "install", "install_from_environment", "serve", "uninstall"]
__getattr__, __dir__ = attach(__name__, dict.fromkeys(NAMES, ""))
