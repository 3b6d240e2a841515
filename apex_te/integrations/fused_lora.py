"""``fuse_lora``, which has PEFT's LoRA layers compute base and adapter together."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import nn

from ..runtime.named_arguments import check_model, named_arguments

_Model = TypeVar("_Model", bound=nn.Module)


@named_arguments()
def fuse_lora(model: _Model) -> _Model:
    """Makes PEFT's LoRA layers over ``apex_te.Linear`` add the adapter inside the base FP8 GEMM.

    Each of these layers becomes an instance of a subclass whose forward calls
    ``Linear.forward_low_rank``. In FP8 regions the base GEMMs then add the adapter's result, in
    forward and backward, and layers with the same input share its cast if the recipe keeps no
    state. Results are as before, with fewer roundings. PEFT still handles parameters, state dicts,
    saving, merging and adding adapters.

    A layer computes as before under ``torch.compile``, while it is merged or disabled, with several
    active adapters, a variant such as DoRA, or an adapter bias, and with hooks on its base or
    adapter. The same holds without ``torch.autocast`` if the adapter's dtype differs from the
    base's; ``get_peft_model(autocast_adapter_dtype=False)`` gives both the same dtype.

    Args:
        model: a model after ``get_peft_model``, changed in place. Call again after adding adapters
            to further layers.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no LoRA layer over an ``apex_te.Linear``.
    """
    check_model("fuse_lora", model)
    found = 0
    if "peft" in sys.modules:  # else nothing in the model is PEFT's
        from ._fused_lora_layer import FusedLoraLinear, is_fusable

        for module in model.modules():
            if is_fusable(module):
                of: Any = module
                of.__class__ = FusedLoraLinear
            found += isinstance(module, FusedLoraLinear)
    if not found:
        raise ValueError(
            "fuse_lora: model must have LoRA layers of PEFT over apex_te.Linear, got none"
        )
    return model
