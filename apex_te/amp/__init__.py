"""Mixed precision by one call: ``amp.initialize``, ``amp.scale_loss``, as in apex.amp.

Levels, in apex's terms (``amp/levels.py`` has the table): O0 float32, O1 and O4 autocast, O2, O3
and O5 a 16-bit model, O6 and O7 a bfloat16 model whose layers compute in FP8. torch itself is
never patched: ``amp.initialize`` wraps the model's ``forward`` and the optimizer's ``zero_grad``
on the instance, and ``step`` of optimizers that read no skip flag on the device.
"""

from typing import TYPE_CHECKING

from ..runtime.imports import attach
from .initialize import initialize
from .loss import load_state_dict, master_params, scale_loss, state_dict
from .scaler import LossScaler

__all__ = [
    "LossScaler", "initialize", "load_state_dict", "master_params", "scale_loss", "state_dict",
]  # fmt: skip

if not TYPE_CHECKING:  # type checkers know the names above, and no others
    __getattr__, __dir__ = attach(__name__, {})
