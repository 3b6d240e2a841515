"""A Llama for transformers whose blocks are Transformer Engine's layers, as NVIDIA's recipes are.

Packed inputs (thd) come from padded batches, whose tokens are taken out on the way in and put back
on the way out; generation announces each sequence's tokens to Transformer Engine's KV cache.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

import apex_te.integrations.transformer_engine.pytorch.module as te
from apex_te.integrations.transformer_engine.pytorch.attention import (
    InferenceParams,
    RotaryPositionEmbedding,
)
from apex_te.integrations.transformer_engine.pytorch.transformer import TransformerLayer


class TELlamaConfig(LlamaConfig):
    model_type = "te_llama"
    attn_input_format = "bshd"
    self_attn_mask_type = "padding_causal"


class TEPreTrainedModel(PreTrainedModel):
    config_class = TELlamaConfig
    base_model_prefix = "model"
    _no_split_modules = ("TransformerLayer",)

    def _init_weights(self, module: torch.nn.Module) -> None:
        if not type(module).__module__.startswith("transformer_engine.pytorch"):
            super()._init_weights(module)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {key: value for key, value in state.items() if not key.endswith("_extra_state")}


class TELlamaModel(TEPreTrainedModel):
    def __init__(self, config: TELlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(
            TransformerLayer(
                hidden_size=config.hidden_size,
                ffn_hidden_size=config.intermediate_size,
                num_attention_heads=config.num_attention_heads,
                num_gqa_groups=config.num_key_value_heads,
                bias=False,
                layernorm_epsilon=config.rms_norm_eps,
                hidden_dropout=0,
                attention_dropout=0,
                fuse_qkv_params=True,
                qkv_weight_interleaved=True,
                normalization="RMSNorm",
                activation="swiglu",
                attn_input_format=config.attn_input_format,
                self_attn_mask_type=config.self_attn_mask_type,
                layer_number=number + 1,
                params_dtype=config.dtype,
            )
            for number in range(config.num_hidden_layers)
        )
        self.norm = te.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=config.dtype)
        size = config.hidden_size // config.num_attention_heads
        self.rotary_emb = RotaryPositionEmbedding(size)
        self.post_init()

    def forward(
        self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, **kwargs
    ):
        x, given = self.embed_tokens(input_ids), {}
        is_packed = self.config.attn_input_format == "thd"
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        # The mask of a step with a cache is that of all tokens so far.
        own = attention_mask[:, -input_ids.shape[1] :].bool()
        lengths = own.sum(1)
        if is_packed:
            x = x[own]
            starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
            given |= {"max_seqlen_q": own.shape[1], "max_seqlen_kv": own.shape[1]}
        else:
            given["attention_mask"] = ~own[:, None, None]
        if past_key_values is not None:
            past_key_values.pre_step(OrderedDict(enumerate(lengths.tolist())))
        angles = self.rotary_emb(self.config.max_position_embeddings)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles, inference_params=past_key_values, **given)
        x = self.norm(x)
        if is_packed:
            padded = x.new_zeros(*own.shape, x.shape[-1])
            padded[own] = x
            x = padded
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)


class TELlamaForCausalLM(TEPreTrainedModel, GenerationMixin):
    def __init__(self, config: TELlamaConfig) -> None:
        super().__init__(config)
        self.model = TELlamaModel(config)
        self.lm_head = te.Linear(
            config.hidden_size, config.vocab_size, bias=False, params_dtype=config.dtype
        )
        self.post_init()

    def forward(self, input_ids, attention_mask=None, past_key_values=None, labels=None, **kwargs):
        out = self.model(input_ids, attention_mask, past_key_values)
        logits, loss = self.lm_head(out.last_hidden_state), None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=out.past_key_values)

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, **kwargs):
        if past_key_values is not None and past_key_values.get_seq_length():
            input_ids = input_ids[:, -1:]
        return {
            "input_ids": input_ids, "past_key_values": past_key_values,
            "attention_mask": kwargs.get("attention_mask"),
        }  # fmt: skip


class Cache(InferenceParams):
    """Transformer Engine's KV cache with what transformers asks of a cache."""

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.sequences.values(), default=0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        held = self.cache_manager.cache
        for layer, kept in list(held.items()):
            rows = torch.arange(self.max_batch_size)
            rows[: len(beam_idx)] = beam_idx
            held[layer] = tuple(memory.index_select(0, rows) for memory in kept)


def cache_for(config: TELlamaConfig, batch: int, length: int, allocate: bool = True) -> Cache:
    size = config.hidden_size // config.num_attention_heads
    cache = Cache(
        max_batch_size=batch, max_sequence_length=length, num_heads_kv=config.num_key_value_heads,
        head_dim_k=size, dtype=torch.float32, qkv_format=config.attn_input_format,
        max_ctx_len=length,
    )  # fmt: skip
    for number in range(1, config.num_hidden_layers + 1):
        if allocate:
            cache.allocate_memory(number)
    return cache


def converted(state: dict[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """State dict of ``TELlamaForCausalLM`` from that of transformers' LlamaForCausalLM."""
    groups, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    found = {}
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        found[name] = state[name]
    for i in range(config.num_hidden_layers):
        old, new = f"model.layers.{i}.", f"model.layers.{i}."
        heads = [state[f"{old}self_attn.{k}_proj.weight"].view(groups, -1, size, config.hidden_size)
                 for k in "qkv"]  # fmt: skip
        qkv = new + "self_attention.layernorm_qkv."
        found[qkv + "weight"] = torch.cat(heads, 1).reshape(-1, config.hidden_size)
        found[qkv + "layer_norm_weight"] = state[old + "input_layernorm.weight"]
        found[new + "self_attention.proj.weight"] = state[old + "self_attn.o_proj.weight"]
        mlp = new + "layernorm_mlp."
        found[mlp + "layer_norm_weight"] = state[old + "post_attention_layernorm.weight"]
        gates = [state[f"{old}mlp.{k}_proj.weight"] for k in ("gate", "up")]
        found[mlp + "fc1_weight"] = torch.cat(gates)
        found[mlp + "fc2_weight"] = state[old + "mlp.down_proj.weight"]
    return found
