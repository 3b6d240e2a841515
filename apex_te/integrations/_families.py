"""Layers that ``from_torch(fuse=True)`` joins, for each block of Hugging Face's that it knows."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from . import _matching as matching


class Projections(NamedTuple):
    """Linear layers with a common input, and the norm before them, that can become one layer.

    Names are dotted and relative to the block. ``path`` is the new layer's name; for a single
    linear layer its own. Weights are ``[in, out]`` if ``transposed``.
    """

    linears: tuple[str, ...]
    path: str
    norm: str | None = None
    transposed: bool = False


class MLPLayers(NamedTuple):
    """Norm, first linear layers, activation and second linear layer, to be one ``LayerNormMLP``.

    ``norm`` and ``path`` (the MLP's) are dotted names relative to the block, the others are
    relative to the MLP. If ``first`` has two layers, the first one is the gate. If ``gated``, one
    half of their output is multiplied by the activation of the other. ``dropout`` ends the MLP,
    ``inner_dropout`` follows the activation. Weights are ``[in, out]`` if ``transposed``.
    """

    norm: str
    path: str
    first: tuple[str, ...]
    second: str
    activation: str
    gated: bool = False
    dropout: str | None = None
    inner_dropout: str | None = None
    transposed: bool = False


class Apart(NamedTuple):
    """Layers of a block that cannot be joined, and the reason."""

    reason: str


Layers = Projections | MLPLayers | Apart

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = Projections(_QKV, "self_attn.qkv_proj", "input_layernorm")
_GATED = (("gate_proj", "up_proj"), "down_proj", "act_fn", True)
_LLAMA = (_ATTENTION, MLPLayers("post_attention_layernorm", "mlp", *_GATED))
_GEMMA2 = (_ATTENTION, MLPLayers("pre_feedforward_layernorm", "mlp", *_GATED))
_T5 = "DenseReluDense"

# By family and name of the block's class.
_BLOCKS: dict[tuple[str, str], tuple[Layers, ...]] = {
    **{(name.lower(), f"{name}DecoderLayer"): _LLAMA
       for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma")},
    ("qwen2_moe", "Qwen2MoeDecoderLayer"): _LLAMA,
    ("qwen3_moe", "Qwen3MoeDecoderLayer"): _LLAMA,
    ("gemma2", "Gemma2DecoderLayer"): _GEMMA2,
    ("gemma3", "Gemma3DecoderLayer"): _GEMMA2,
    ("phi3", "Phi3DecoderLayer"): (
        Projections(("self_attn.qkv_proj",), "self_attn.qkv_proj", "input_layernorm"),
        MLPLayers("post_attention_layernorm", "mlp", ("gate_up_proj",), "down_proj",
                  "activation_fn", True),
    ),
    ("gpt2", "GPT2Block"): (
        Projections(("attn.c_attn",), "attn.c_attn", "ln_1", True),
        MLPLayers("ln_2", "mlp", ("c_fc",), "c_proj", "act", dropout="dropout", transposed=True),
    ),
    ("gpt_neox", "GPTNeoXLayer"): (
        Projections(("attention.query_key_value",), "attention.query_key_value",
                    "input_layernorm"),
        MLPLayers("post_attention_layernorm", "mlp", ("dense_h_to_4h",), "dense_4h_to_h", "act"),
    ),
    ("bert", "BertLayer"): (
        Projections(tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
                    "attention.self.qkv"),
        Apart("intermediate and output: their input is a residual, too, so that its norm stays"),
    ),
    ("t5", "T5LayerSelfAttention"): (
        Projections(tuple(f"SelfAttention.{name}" for name in "qkv"), "SelfAttention.qkv",
                    "layer_norm"),
    ),
    ("t5", "T5LayerCrossAttention"): (
        Projections(("EncDecAttention.q",), "EncDecAttention.q", "layer_norm"),
        Projections(("EncDecAttention.k", "EncDecAttention.v"), "EncDecAttention.kv"),
    ),
    ("t5", "T5LayerFF"): (
        MLPLayers("layer_norm", _T5, ("wi",), "wo", "act", inner_dropout="dropout"),
    ),
}  # fmt: skip


def layers_to_join(block: Any) -> tuple[Layers, ...]:
    """Returns the groups of a block's layers that can each become one layer; () if unknown."""
    if not isinstance(block, nn.Module):
        return ()
    groups = _BLOCKS.get(matching.family_class(block), ())
    return tuple([_of_block(block, group) for group in groups])


def _of_block(block: Any, layers: Layers) -> Layers:
    """Returns ``layers`` as one block has them, which its family's configuration decides."""
    if not isinstance(layers, MLPLayers):
        return layers
    mlp = block.get_submodule(layers.path)
    if hasattr(mlp, "experts"):
        kind = type(mlp).__name__
        return Apart(f"{layers.path} is {kind}, whose router reads what the norm makes, too")
    if layers.path == _T5 and hasattr(mlp, "wi_0"):
        return layers._replace(first=("wi_0", "wi_1"), gated=True)
    return layers
