"""Which modules can be replaced: torch's own by type, Hugging Face's by the name of their class.

Nothing of ``transformers`` is imported: a module of its models brings its class along.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = [
    "GPT2",
    "LLAMA",
    "gelu_or_relu",
    "hooked",
    "is_class",
    "is_conv1d",
    "is_llama_norm",
    "is_plain",
    "is_silu",
    "norm_eps",
]

LLAMA = "transformers.models.llama.modeling_llama"
GPT2 = "transformers.models.gpt2.modeling_gpt2"
_PYTORCH_UTILS = "transformers.pytorch_utils"
_ACTIVATIONS = "transformers.activations"
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def is_class(module: object, path: str, *names: str) -> bool:
    """Whether the class of ``module`` itself, no subclass, is one of ``names`` in ``path``."""
    kind = type(module)
    return kind.__module__ == path and kind.__name__ in names


def is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's Conv1D, a linear layer whose weight is [in, out]."""
    return is_class(module, _PYTORCH_UTILS, "Conv1D") and "forward" not in vars(module)


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether ``module`` is one of ``kinds`` itself, no subclass, with the forward of its class."""
    return type(module) in kinds and "forward" not in vars(module)


def hooked(module: nn.Module) -> bool:
    """Whether anything waits on ``module`` that its replacement could not call."""
    return any(getattr(module, name, None) for name in _HOOKS) or "forward" in vars(module)


def is_silu(module: object) -> bool:
    """x * sigmoid(x)."""
    return type(module) is nn.SiLU or is_class(module, _ACTIVATIONS, "SiLUActivation")


def gelu_or_relu(module: object) -> str | None:
    """apex_te's name of a plain activation, None where it has none (the exact GELU)."""
    if type(module) is nn.ReLU:
        return "relu"
    if is_class(module, _ACTIVATIONS, "NewGELUActivation", "GELUTanh", "FastGELUActivation"):
        return "gelu"
    if type(module) is nn.GELU and module.approximate == "tanh":
        return "gelu"
    return None


def norm_eps(module: nn.Module) -> float:
    """The eps of a norm: nn.RMSNorm's None is that of fp32, in which every dtype is computed."""
    eps = getattr(module, "variance_epsilon" if is_llama_norm(module) else "eps")
    return torch.finfo(torch.float32).eps if eps is None else eps


def is_llama_norm(module: nn.Module) -> bool:
    """Hugging Face's RMS norm of Llama."""
    return is_class(module, LLAMA, "LlamaRMSNorm") and "forward" not in vars(module)
