"""Tests of which modules ``from_torch`` can replace: torch's by type, Hugging Face's by class name.

``transformers`` is not imported for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..fp8.parameter.parameter import FP8Parameter

__all__ = [
    "gelu_or_relu",
    "hooked",
    "is_class",
    "is_conv1d",
    "is_gpt2_block",
    "is_llama_block",
    "is_llama_norm",
    "is_plain",
    "is_silu",
    "norm_eps",
    "unsupported",
]

# Models whose blocks and norms are as Llama's (Qwen2 with biases, Qwen3 with norms of each head),
# by the module that defines them.
_LLAMA_LIKE = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}": name
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
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
    """Returns True if the class of ``module`` has a given name and defining Python module.

    Args:
        module: the object to test.
        path: dotted name of the Python module that must define the class.
        names: names that the class may have.
    """
    kind = type(module)
    return kind.__module__ == path and kind.__name__ in names


def is_conv1d(module: nn.Module) -> bool:
    """Returns True for Hugging Face's Conv1D, a linear layer whose weight is ``[in, out]``."""
    return is_class(module, _PYTORCH_UTILS, "Conv1D") and "forward" not in vars(module)


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Returns True if ``module`` has one of the classes ``kinds``, and no forward of the instance.

    An instance of a subclass does not count.
    """
    return type(module) in kinds and "forward" not in vars(module)


def hooked(module: nn.Module) -> bool:
    """Returns True if ``module`` has hooks or an instance forward, which joining would lose."""
    return any(getattr(module, name, None) for name in _HOOKS) or "forward" in vars(module)


def is_silu(module: object) -> bool:
    """Returns True if ``module`` is the activation ``x * sigmoid(x)``."""
    return type(module) is nn.SiLU or is_class(module, _ACTIVATIONS, "SiLUActivation")


def gelu_or_relu(module: object) -> str | None:
    """Returns the ``activation`` argument of ``LayerNormMLP`` that stands for a GELU or ReLU.

    Returns:
        ``"gelu"`` (the tanh approximation) or ``"relu"``; None for any other module, such as the
        exact GELU.
    """
    if type(module) is nn.ReLU:
        return "relu"
    if is_class(module, _ACTIVATIONS, "NewGELUActivation", "GELUTanh", "FastGELUActivation"):
        return "gelu"
    if type(module) is nn.GELU and module.approximate == "tanh":
        return "gelu"
    return None


def norm_eps(module: nn.Module) -> float:
    """Returns the eps of a norm of torch or Hugging Face.

    An eps of None, as ``nn.RMSNorm`` has it, stands for that of fp32, in which apex_te computes
    norms of all dtypes.
    """
    eps = getattr(module, "variance_epsilon" if is_llama_norm(module) else "eps")
    return torch.finfo(torch.float32).eps if eps is None else eps


def _is_llama_like(module: object, suffix: str) -> bool:
    """Returns True for a class of a Llama-like model that is named by family and ``suffix``."""
    kind = type(module)
    family = _LLAMA_LIKE.get(kind.__module__)
    return family is not None and kind.__name__ == family + suffix


def is_llama_norm(module: nn.Module) -> bool:
    """Returns True for the RMS norm of Hugging Face's Llama, Mistral, Qwen2 or Qwen3."""
    return _is_llama_like(module, "RMSNorm") and "forward" not in vars(module)


def is_llama_block(module: nn.Module) -> bool:
    """Returns True for a block of Hugging Face's Llama, Mistral, Qwen2 or Qwen3."""
    return _is_llama_like(module, "DecoderLayer")


def is_gpt2_block(module: nn.Module) -> bool:
    """Returns True for a block of Hugging Face's GPT-2."""
    return is_class(module, GPT2, "GPT2Block")


def unsupported(module: Any) -> str | None:
    """Returns the reason why a linear layer or norm cannot become one of apex_te's.

    Returns:
        The reason, for the warning of ``from_torch``; None if the layer can be converted.
    """
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
