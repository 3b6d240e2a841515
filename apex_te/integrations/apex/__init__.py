"""apex's Python packages over apex_te: what ``import apex`` gives once the alias is installed.

``apex_te.compatibility.apex.install()``, ``APEX_TE_APEX=1`` or ``python -m apex_te install-alias
apex`` install it (docs/apex.md). All modules of apex can be imported; what is not supported raises
NotImplementedError when it is used.
"""

from ...compatibility.aliases import APEX, claimed_version
from ...runtime.imports import attach
from ._unserved import find_unserved

__all__ = [
    "RNN", "amp", "contrib", "fp16_utils", "fused_dense", "mlp", "multi_tensor_apply",
    "normalization", "optimizers", "parallel", "transformer",
]  # fmt: skip
__apex_te_alias__ = True
__version__ = claimed_version(APEX)
__getattr__, __dir__ = attach(__name__, dict.fromkeys(__all__, ""))
find_unserved()
