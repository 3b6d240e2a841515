"""Small models of all classes of transformers that generate text, from configurations."""

import copy
import inspect
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

VOCABULARY = 64
# Attributes of configurations, by what they are, as far as a class has them.
_SIZES = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embed_dim": 32, "emb_dim": 32,
    "n_embed": 32, "embedding_size": 32, "word_embed_proj_dim": 32, "hidden_dim": 32,
    "true_hidden_size": 32, "width": 32, "attention_hidden_size": 32, "d_embed": 32,
    "decoder_hidden_size": 32, "embedding_dim": 32, "hidden_size_per_layer_input": 16,
    "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "n_inner": 48, "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "inner_dim": 48, "d_inner": 48,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32, "intermediate_size_mlp": 32,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "decoder_layers": 2,
    "encoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "n_head_kv": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_kv": 8, "kv_channels": 8,
    "global_head_dim": 8, "attention_head_dim": 8, "attention_head_size": 8, "swa_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "qk_head_dim": 16, "v_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1,
    "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1, "first_k_dense_replace": 1,
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_n_groups": 1,
    "n_groups": 1, "mamba_expand": 2, "mamba_d_ssm": 64, "time_step_rank": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "lru_width": 32, "num_memory_blocks": 1, "chunk_size": 8,
    "mamba_chunk_size": 8, "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_sequence_length": 64,
    "max_seq_len": 64, "sliding_window": 8, "type_vocab_size": 2,
    "relative_attention_num_buckets": 8,
    "query_pre_attn_scalar": 8, "attention_window": 8, "num_nextn_predict_layers": 0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_kv_shared_layers": 0,
    "decoder_start_token_id": 1, "rotary_dim": 8, "image_size": 16, "patch_size": 8, "depth": 2,
    "projection_dim": 32, "out_hidden_size": 32, "mlp_dim": 48, "num_channels": 3,
}  # fmt: skip
_FROM_NONE = ("pad_token_id", "n_inner", "vocab_size", "head_dim", "num_key_value_heads")
_LARGEST = 6_000_000
_RATES = ("dropout", "drop_rate", "pdrop", "dropout_rate", "layerdrop", "dropout_prob", "drop")


# What the general values do not fit, by configuration.
_SPECIAL = {
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Mamba2Config": {"num_heads": 8},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)


def classes():
    """Names of all classes of causal, sequence-to-sequence and image-text models, each once."""
    auto = transformers.models.auto.modeling_auto
    named = [name for mapping in _MAPPINGS for name in getattr(auto, mapping).values()]
    several = [name if isinstance(name, (tuple, list)) else (name,) for name in named]
    return sorted({one for names in several for one in names})


def tiny(kind):
    """A small configuration of a class, from its defaults; so are the ones in it."""
    config = kind()
    inner = {
        key: tiny(type(value)) for key, value in vars(config).items()
        if isinstance(value, transformers.PreTrainedConfig)
    }  # fmt: skip
    return kind(**_values(config), **inner)


def _values(config):
    """Small values for attributes that a configuration has."""
    accepted = set(inspect.signature(type(config).__init__).parameters) | set(vars(config))
    values = {}
    for name in sorted(accepted):
        try:
            current = getattr(config, name, None)
        except Exception:  # it varies by layer
            continue
        if name in _SIZES and not isinstance(current, (list, tuple, dict)):
            if current is not None or name in _FROM_NONE:
                values[name] = _SIZES[name]
        elif isinstance(current, float) and name.endswith(_RATES):
            values[name] = 0.0
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return values | _SPECIAL.get(type(config).__name__, {})


def build(name):
    """The model in evaluation, whose vectors have values that tell them apart."""
    kind = getattr(transformers, name)
    config = tiny(kind.config_class)
    torch.manual_seed(len(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
        if size > _LARGEST:
            raise ValueError(f"{size:,} parameters")
        model = kind(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
