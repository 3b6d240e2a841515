"""apex's mixed precision by opt levels, over ``apex_te.amp``; torch functions are not patched."""

from ._amp_state import amp_state, master_params
from .amp import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss

__all__ = [
    "bfloat16_function", "disable_casts", "float_function", "half_function", "init", "initialize",
    "load_state_dict", "master_params", "promote_function", "register_bfloat16_function",
    "register_float_function", "register_half_function", "register_promote_function", "scale_loss",
    "state_dict",
]  # fmt: skip
_amp_state = amp_state  # as in apex, where the object hides the module of its name
