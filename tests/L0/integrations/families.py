"""Small models of Hugging Face's families, from configurations, with random weights."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.arange(24).view(2, 12) % 37 + 2
VOCABULARY = 40
TOKENS = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
LLAMA = TOKENS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
OLDER = TOKENS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = TOKENS | {
    "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
T5 = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
}  # fmt: skip

# By name: class of the configuration and of the model, and the configuration.
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", LLAMA),
    "mistral": ("MistralConfig", "MistralForCausalLM", LLAMA | {"sliding_window": 8}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", LLAMA | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", LLAMA | EXPERTS | {
        "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", LLAMA | EXPERTS),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", LLAMA | {"query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", LLAMA | {"query_pre_attn_scalar": 8}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", LLAMA | {"head_dim": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", OLDER),
    "gpt_neox_fast": ("GPTNeoXConfig", "GPTNeoXForCausalLM", OLDER | {
        "hidden_act": "gelu_fast", "use_parallel_residual": False}),
    "bert": ("BertConfig", "BertForSequenceClassification", OLDER | {
        "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "t5_gated": ("T5Config", "T5ForConditionalGeneration", T5 | {
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "opt": ("OPTConfig", "OPTForCausalLM", OLDER | {
        "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
}  # fmt: skip
# What the summary says that fuse=True leaves apart, by a regular expression.
APART = {
    "mixtral": "post_attention_layernorm, as MixtralSparseMoeBlock reads its output, too",
    "qwen2_moe": "post_attention_layernorm, as Qwen2MoeSparseMoeBlock reads its output, too",
    "qwen3_moe": "post_attention_layernorm, as Qwen3MoeSparseMoeBlock reads its output, too",
    "gemma2": "post_(attention|feedforward)_layernorm, as Gemma2DecoderLayer reads its output, too",
    "gemma3": "post_(attention|feedforward)_layernorm, as Gemma3DecoderLayer reads its output, too",
}


def class_of(name):
    """The model's class."""
    return getattr(transformers, FAMILIES[name][1])


def build(name, dtype=torch.float32, **options):
    """A model in evaluation, whose norms and biases have values that tell them apart."""
    config, _, values = FAMILIES[name]
    torch.manual_seed(len(name))
    model = class_of(name)(getattr(transformers, config)(**{**values, **options}))
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            one = float(("norm" in key or "ln_" in key or "Norm" in key) and key.endswith("weight"))
            one *= not name.startswith("gemma")
            torch.nn.init.normal_(parameter, one, 0.1)
        elif "experts" in key or "gate.weight" in key:
            torch.nn.init.normal_(parameter, 0, 0.1)
    return model.to(dtype).eval()


def inputs(name, ids=IDS):
    """Arguments of a call of the model for ``ids``."""
    given = {"input_ids": ids}
    if name.startswith("t5"):
        given["decoder_input_ids"] = ids.flip(1)
    return given


def logits(model, name, ids=IDS):
    """The model's logits, with autograd as the caller has it."""
    return model(**inputs(name, ids)).logits


def load(name, folder):
    """A new plain model from ``folder``; nothing in the files may be missing or too much."""
    model, info = class_of(name).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model
