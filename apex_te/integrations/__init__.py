"""What connects apex_te to other libraries: their models, checkpoints and layers' names.

``integrations.megatron`` has Megatron's and MindSpeed's layers.
"""

from .from_torch import from_torch
from .fusion import KeyMap, key_map
from .optimizer_order import reorder_grouped_linear_state
from .te_state import load_te_extra_state, read_te_extra_state

__all__ = [
    "KeyMap",
    "from_torch",
    "key_map",
    "load_te_extra_state",
    "read_te_extra_state",
    "reorder_grouped_linear_state",
]
