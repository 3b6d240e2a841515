"""``fuse_lora``, which has PEFT's LoRA layers compute base and adapter together."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import nn

from ..runtime.model_argument import check_model
from ..runtime.named_arguments import named_arguments

__all__ = ["fuse_lora"]

_Model = TypeVar("_Model", bound=nn.Module)


@named_arguments()
def fuse_lora(model: _Model) -> _Model:
    """Has PEFT's LoRA layers over ``apex_te.Linear`` add the adapter inside the base's FP8 product.

    Each such layer gets a subclass of its class, whose forward calls ``Linear.forward_low_rank``:
    inside FP8 regions the base's GEMMs add the adapter's, in forward and backward, and layers
    with the same input share its cast if the recipe keeps no state. Results are those of the
    model before, with fewer roundings. Parameters, state dicts, saving, merging and adding adapters
    stay PEFT's.

    A layer computes as before in code that torch.compile traces, and while it is merged or
    disabled, or has several active adapters, a variant such as DoRA, a bias of the adapter, or
    hooks on its base or adapter. So it does without ``torch.autocast`` if the adapter is in another
    dtype than the base: ``get_peft_model(autocast_adapter_dtype=False)`` makes it in the base's.

    Args:
        model: a model after ``get_peft_model``, changed in place. Call again after adding adapters
            to further layers.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no such layer.
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
