"""Questions of ``from_torch`` about a module: its kind, hooks and quantized weights.

``transformers`` is not imported for that.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..fp8.parameter.parameter import FP8Parameter

_PYTORCH_UTILS = "transformers.pytorch_utils"
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def is_class(module: object, path: str, *names: str) -> bool:
    """Returns True if the Python module ``path`` defines the class under one of ``names``."""
    kind = type(module)
    return kind.__module__ == path and kind.__name__ in names


def is_conv1d(module: nn.Module) -> bool:
    """Returns True for Hugging Face's Conv1D, a linear layer whose weight is ``[in, out]``."""
    return is_class(module, _PYTORCH_UTILS, "Conv1D") and "forward" not in vars(module)


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Returns True if ``type(module)`` is in ``kinds`` and the instance has no own forward."""
    return type(module) in kinds and "forward" not in vars(module)


def is_linear(module: nn.Module) -> bool:
    """Returns True for torch's ``Linear`` itself and for Hugging Face's Conv1D."""
    return is_plain(module, nn.Linear) or is_conv1d(module)


def linear_sizes(module: Any) -> tuple[int, int]:
    """Returns input and output features of such a layer."""
    out, into = module.weight.shape
    return (out, into) if is_conv1d(module) else (into, out)


def is_huggingface(module: nn.Module) -> bool:
    """Returns True if transformers defines the class, or a model's own code for it does."""
    return type(module).__module__.startswith(("transformers.models.", "transformers_modules."))


def hooked(module: nn.Module) -> bool:
    """Returns True if ``module`` has hooks or its own forward, which joining would lose."""
    return any(getattr(module, name, None) for name in _HOOKS) or "forward" in vars(module)


def resembles_norm(module: nn.Module) -> bool:
    """Returns True if a class of transformers is named like a norm or experts."""
    named = re.search("Norm|Experts", type(module).__name__) is not None
    return named and type(module).__module__.startswith("transformers.")


def pretrained_models(model: nn.Module) -> list[Any]:
    """Returns the modules in ``model`` that are Hugging Face's ``PreTrainedModel``."""
    return [
        module
        for module in model.modules()
        if any(kind.__module__ == "transformers.modeling_utils" for kind in type(module).__mro__)
    ]


def unsupported(module: Any) -> str | None:
    """Returns the reason why a linear layer or norm cannot become an apex_te layer, or None."""
    own = vars(module)
    if "_hf_hook" in own:
        return (
            f"accelerate's {type(own['_hf_hook']).__name__} replaced its forward; convert before "
            "the model is dispatched"
        )
    if parametrize.is_parametrized(module):
        made = ", ".join(module.parametrizations)
        return f"torch.nn.utils.parametrize makes its {made}"
    weight = module._parameters.get("weight")
    if weight is not None and not _is_plain_weight(weight):
        return f"a quantized layer: its weight is a {_described(weight)}"
    if "forward" in own:
        return "its forward was replaced"
    return None


def _is_plain_weight(weight: torch.Tensor) -> bool:
    """Returns False if ``weight`` is quantized by another library, judged by class and dtype."""
    kind = type(weight)
    named = kind in (nn.Parameter, torch.Tensor, FP8Parameter) or kind.__name__ in (
        "DTensor", "FakeTensor", "FunctionalTensor"
    )  # fmt: skip
    return named and weight.is_floating_point() and weight.element_size() > 1


def _described(weight: torch.Tensor) -> str:
    """Returns class and dtype of ``weight``, for messages."""
    kind = type(weight).__name__
    return f"{kind} of {weight.dtype}" if kind != "Parameter" else f"tensor of {weight.dtype}"
