"""Finds modules that ``from_torch`` can replace: torch's by type, Hugging Face's by class name.

``transformers`` is not imported for that.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..fp8.parameter.parameter import FP8Parameter
from ..runtime.op_options import ClampedSwiglu

# Families of Hugging Face whose RMS norm multiplies by its weight, and those that multiply by
# 1 + weight: the name of their Python module, and the prefix of their classes' names.
RMS_NORM_FAMILIES = {
    "llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "phi3": "Phi3",
    "qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
ZERO_CENTERED_FAMILIES = {"gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3"}
_PYTORCH_UTILS = "transformers.pytorch_utils"
# Defines the standard gate of experts, which a model's experts may replace.
EXPERTS = "transformers.integrations.moe"
_ACTIVATIONS = "transformers.activations"
# Experts whose gate is clamped SwiGLU, by family and class: the attributes that have limit and
# alpha, None for an alpha of 1, and the offset.
_CLAMPED = {
    ("deepseek_v4", "DeepseekV4Experts"): ("limit", None, 0.0),
    ("glm5_next", "Glm5NextTextExperts"): ("swiglu_limit", None, 0.0),
    ("gpt_oss", "GptOssExperts"): ("limit", "alpha", 1.0),
    ("minimax_m3_vl", "MiniMaxM3VLExperts"): ("swiglu_limit", "swiglu_alpha", 1.0),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"): ("limit", "alpha", 1.0),
}
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


def hooked(module: nn.Module) -> bool:
    """Returns True if ``module`` has hooks or its own forward, which joining would lose."""
    return any(getattr(module, name, None) for name in _HOOKS) or "forward" in vars(module)


def activation_name(module: object, gated: bool) -> str | None:
    """Returns the ``activation`` of ``LayerNormMLP`` that is equivalent to ``module``, or None."""
    if type(module) is nn.SiLU or is_class(module, _ACTIVATIONS, "SiLUActivation"):
        return "swiglu" if gated else "silu"
    if type(module) is nn.ReLU:
        return "reglu" if gated else "relu"
    tanh = is_class(module, _ACTIVATIONS, "NewGELUActivation", "GELUTanh", "FastGELUActivation")
    if tanh or (type(module) is nn.GELU and module.approximate == "tanh"):
        return "geglu" if gated else "gelu"
    return None


def experts_gate(experts: Any) -> Any:
    """Returns the activation of experts as ``run_experts`` takes it, else their own function."""
    gate = experts._apply_gate
    path = getattr(gate, "__module__", "") or ""
    if path == EXPERTS:
        return activation_name(experts.act_fn, gated=True) or gate
    owner = getattr(gate, "__qualname__", "").rpartition(".")[0]
    clamp = _CLAMPED.get((path.rpartition(".modeling_")[2], owner))
    act = getattr(experts, "act_fn", None)
    if clamp is None or (act is not None and activation_name(act, gated=True) != "swiglu"):
        return gate
    limit = getattr(experts, clamp[0])
    alpha = 1.0 if clamp[1] is None else getattr(experts, clamp[1])
    return gate if limit is None else ClampedSwiglu(float(limit), float(alpha), clamp[2])


def norm_eps(module: nn.Module) -> float:
    """Returns the eps of a norm; None means fp32's, because apex_te computes all norms in fp32."""
    eps = getattr(module, "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps")
    return torch.finfo(torch.float32).eps if eps is None else eps


def family_class(module: object) -> tuple[str, str]:
    """Returns Hugging Face's family ("" for none) and the class name of ``module``."""
    kind = type(module)
    found = re.fullmatch(r"transformers\.models\.(\w+)\.modeling_(\w+)", kind.__module__)
    return (found[1] if found and found[1] == found[2] else "", kind.__name__)


def is_rms_norm(module: nn.Module) -> bool:
    """Returns True for an RMS norm of a Hugging Face family that apex_te can compute."""
    if "forward" in vars(module):
        return False
    family, name = family_class(module)
    prefix = RMS_NORM_FAMILIES.get(family) or ZERO_CENTERED_FAMILIES.get(family)
    return (prefix is not None and name == f"{prefix}RMSNorm") or is_t5_norm(module)


def is_zero_centered(module: nn.Module) -> bool:
    """Returns True for an RMS norm of Gemma, which multiplies by ``1 + weight``."""
    family, name = family_class(module)
    return name == f"{ZERO_CENTERED_FAMILIES.get(family)}RMSNorm"


def is_t5_norm(module: nn.Module) -> bool:
    """Returns True for T5's RMS norm, whose input may have another dtype than its weight."""
    return family_class(module) == ("t5", "T5LayerNorm")


def resembles_norm(module: nn.Module) -> bool:
    """Returns True if a class of transformers is named like a norm or experts."""
    named = re.search("Norm|Experts", type(module).__name__) is not None
    return named and type(module).__module__.startswith("transformers.")


def is_experts(module: Any) -> bool:
    """Returns True for experts of Hugging Face that have their weights in two stacked Parameters.

    These are ``gate_up_proj`` ``[experts, 2 ffn, hidden]`` and ``down_proj``
    ``[experts, hidden, ffn]``, or transposed, for transformers' own grouped GEMMs, and
    ``gate_up_proj_bias`` and ``down_proj_bias``, or no biases.
    """
    named = type(module).__module__.startswith("transformers.models.")
    if not named or not hasattr(type(module), "_apply_gate") or "forward" in vars(module):
        return False
    own, weights = module._parameters, {"gate_up_proj", "down_proj"}
    biases = {f"{name}_bias" for name in weights} if module.has_bias else set()
    return (
        own.keys() == weights | biases
        and all(p is not None and p.dim() == 2 + (name in weights) for name, p in own.items())
        and module.has_gate
        and (module.is_concatenated or not callable(experts_gate(module)))
        and not _has_post_expert_norm(module)
    )


def _has_post_expert_norm(module: Any) -> bool:
    """Returns True for experts that norm their outputs; older transformers have none."""
    return bool(getattr(module, "has_post_expert_norm", False))


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
