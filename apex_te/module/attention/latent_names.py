"""Names of latent attention's parameters in other libraries' state dicts."""

from __future__ import annotations

from typing import Any

import torch

# Names in Hugging Face's files and in Megatron-Core's without fused norms, and beginnings here.
_OTHER_NAMES = (
    ("q_proj", "linear_q_proj."), ("q_a_proj", "linear_q_down_proj."),
    ("kv_a_proj_with_mqa", "linear_kv_down_proj."), ("q_b_proj", "linear_q_up_proj."),
    ("kv_b_proj", "linear_kv_up_proj."), ("o_proj", "linear_proj."),
    ("q_a_layernorm", "linear_q_up_proj.layer_norm_"),
    ("kv_a_layernorm", "linear_kv_up_proj.layer_norm_"),
    ("q_layernorm", "linear_q_up_proj.layer_norm_"),
    ("kv_layernorm", "linear_kv_up_proj.layer_norm_"),
)  # fmt: skip


def rename(state_dict: dict[str, Any], prefix: str, is_joined: bool) -> None:
    """Renames what is found to ``MultiLatentAttention``'s names, in place.

    Args:
        is_joined: the module has one down projection, of queries and of keys and values.
    """
    for other, own in _OTHER_NAMES:
        for kind in ("weight", "bias"):
            key = f"{prefix}{other}.{kind}"
            if key in state_dict:
                state_dict[f"{prefix}{own}{kind}"] = state_dict.pop(key)
    for kind in ("weight", "bias"):
        keys = [f"{prefix}linear_{part}_down_proj.{kind}" for part in ("q", "kv")]
        if is_joined and all(key in state_dict for key in keys):
            parts = [state_dict.pop(key) for key in keys]
            state_dict[f"{prefix}linear_qkv_down_proj.{kind}"] = torch.cat(parts)
