"""Layer of a Transformer as a Flax Linen module: attention, cross attention, MLP, residuals."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..activation import Function, Params
from ..context_parallel import whole_tokens
from ..places import placed
from . import logical_axes as axes
from .attention import MultiHeadAttention
from .module import Initializer, LayerNorm, LayerNormMLP, TransformerEngineBase, adapts
from .relative_position import RelativePositionBiases

__all__ = ["TransformerLayer", "TransformerLayerType"]

_zeros = nn.initializers.zeros


class TransformerLayerType(enum.Enum):
    """Kind of a ``TransformerLayer``: only a DECODER has cross attention."""

    ENCODER = "encoder"
    DECODER = "decoder"


class TransformerLayer(TransformerEngineBase):
    """One layer of a Transformer, in FP8 inside of ``fp8_autocast``.

    Submodules: "attention" ("self_attention" in decoders), "encoder_decoder_attention" (decoders),
    "mlp", "relpos_bias" with ``enable_relative_embedding``, "output_layernorm".

    Attributes:
        hidden_size: width of all heads together, a multiple of ``num_attention_heads``. The
            width of the output is the input's.
        mlp_hidden_size: width of the MLP between its linear layers.
        num_attention_heads, num_gqa_groups, attention_dropout, dropout_rng_name: as in
            ``DotProductAttention``.
        layernorm_type, zero_centered_gamma: as in ``LayerNorm``, for every norm.
        layernorm_epsilon: added to the variance.
        hidden_dropout: probability that an element of attention's or the MLP's output is dropped
            before it is added to the residual.
        hidden_dropout_dims: dimensions along which its mask is broadcast.
        intermediate_dropout: probability that an element after the activation is dropped.
        intermediate_dropout_dims: dimensions along which its mask is broadcast.
        mha_kernel_init: initializer of attention's kernels; None: variance_scaling(1.0, fan_in,
            normal).
        mlp_kernel_init: initializer of the MLP's kernels; None: variance_scaling(1.0, fan_in,
            truncated_normal).
        mlp_activations, mlp_activation_params: as ``activations`` and ``activation_params`` in
            ``LayerNormMLP``.
        use_bias: add biases in all linear layers.
        bias_init: initializer of the biases.
        apply_residual_connection_post_layernorm: add the norm's output, instead of its input, as
            the residual.
        output_layernorm: normalise the layer's output instead of self attention's input.
        float32_attention_logits: as ``float32_logits`` in ``DotProductAttention``.
        layer_type: ``TransformerLayerType``.
        self_attn_mask_type, self_attn_bias_type: as in ``DotProductAttention``.
        enable_relative_embedding: add relative position biases to the scores of self attention.
        relative_embedding: the module that computes them; None: ``RelativePositionBiases`` with 32
            buckets up to the distance 128.
        low_rank_adaptation_scope: which linear layers get low-rank adapters: "none", "all",
            "qkv_proj", "output_proj", "mlp", or one of the latter after "exclude_".
        low_rank_adaptation_dim, low_rank_adaptation_alpha: as in ``DenseGeneral``.
        enable_rotary_pos_emb, rotary_pos_emb_windows, rotary_pos_emb_group_method, softmax_type,
        fuse_qkv_params, enable_sequence_parallel, scale_attn_logits, scaled_query_init,
        context_parallel_axis, context_parallel_strategy, context_parallel_causal_load_balanced: as
            in ``MultiHeadAttention``, for self and cross attention.
        dtype: dtype of the parameters; the layer computes in that of its inputs.
        drop_path: probability that a sample skips a branch (attention, cross attention, MLP).
        transpose_batch_sequence: inputs and results are [s, b, h] instead of [b, s, h].
        window_size: as in ``DotProductAttention``, for self and cross attention.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Initializer | None = None
    mlp_kernel_init: Initializer | None = None
    mlp_activations: Sequence[str | Function] = ("gelu",)
    mlp_activation_params: Params = None
    use_bias: bool = False
    bias_init: Initializer = _zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: nn.Module | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_parallel_causal_load_balanced: bool = False
    softmax_type: str = "vanilla"

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> jax.Array:
        """Applies the layer; returns an array of the shape of ``inputs``.

        Args:
            inputs: [b, s, h], or [s, b, h] with ``transpose_batch_sequence``.
            encoded: hidden states that a decoder's cross attention reads, in the same layout.
            attention_mask: bool or integer, True = masked out, 4 dimensions that broadcast to
                [b, heads, s, s]; required with the padding types, ignored with the others.
            encoder_decoder_mask: likewise for cross attention, [b, heads, s, length of
                ``encoded``]; None masks nothing.
            deterministic: True turns dropout off.
            decode: keep keys and values of self attention in the collection "cache"; see
                ``MultiHeadAttention``. Only for decoders.
            max_decode_length: length of the cache, which relative position biases need with
                ``decode``.
        """
        x = self._input(inputs)
        self._check(x, encoded, encoder_decoder_mask, decode)
        if self.context_parallel_axis and self.drop_path > 0.0 and not deterministic:
            raise NotImplementedError(
                "TransformerLayer: drop_path must be 0 with context_parallel_axis"
                f" {self.context_parallel_axis!r}, as devices may drop different samples, got"
                f" {self.drop_path}"
            )
        is_decoder = self.layer_type is TransformerLayerType.DECODER
        x = self._constrained(x)
        bias = self._relative_biases(x, is_decoder, max_decode_length if decode else None)
        y, normed = self._attention(
            "self_attention" if is_decoder else "attention",
            input_layernorm=not self.output_layernorm,
            attn_mask_type=self.self_attn_mask_type,
            attn_bias_type=self.self_attn_bias_type,
        )(x, x, attention_mask, bias, deterministic=deterministic, decode=decode)
        x = self._add(y, x, normed, deterministic)
        if is_decoder:
            y, normed = self._attention(
                "encoder_decoder_attention",
                input_layernorm=True,
                attn_mask_type="no_mask" if encoder_decoder_mask is None else "padding",
                attn_bias_type="no_bias",
            )(x, self._input(encoded, "encoded"), encoder_decoder_mask, deterministic=deterministic)
            x = self._add(y, x, normed, deterministic)
        y, normed = self._mlp()(x, deterministic=deterministic)
        x = self._add(y, x, normed, deterministic)
        if not self.output_layernorm:
            return x
        return self._kind(LayerNorm)(
            layernorm_type=self.layernorm_type,
            zero_centered_gamma=self.zero_centered_gamma,
            epsilon=self.layernorm_epsilon,
            scale_axes=(axes.W_NO_SHARD,),
            bias_axes=(axes.W_NO_SHARD,),
            dtype=self.dtype,
            name="output_layernorm",
        )(x)

    def _check(self, inputs: Any, encoded: Any, encoder_decoder_mask: Any, decode: bool) -> None:
        """Checks the options and what a call is given."""
        name = "TransformerLayer"
        if not isinstance(self.layer_type, TransformerLayerType):
            raise TypeError(
                f"{name}: layer_type must be a TransformerLayerType, got {self.layer_type!r}"
            )
        self._check_counts("hidden_size", "num_attention_heads", "num_gqa_groups")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"{name}: num_attention_heads must divide hidden_size={self.hidden_size}, got"
                f" {self.num_attention_heads}"
            )
        if inputs.ndim != 3 or (self._is_v1 and inputs.shape[-1] != self.hidden_size):
            width = self.hidden_size if self._is_v1 else "embed"
            raise ValueError(
                f"{name}: inputs must have shape [b, s, {width}], got {list(inputs.shape)}"
            )
        for field in ("hidden_dropout", "attention_dropout", "intermediate_dropout", "drop_path"):
            if not 0.0 <= getattr(self, field) <= 1.0:
                raise ValueError(f"{name}: {field} must be from 0 to 1, got {getattr(self, field)}")
        if self.layer_type is TransformerLayerType.DECODER:
            if encoded is None:
                raise ValueError(f"{name}: encoded must be given to a decoder, got None")
        elif decode or encoded is not None or encoder_decoder_mask is not None:
            raise ValueError(
                f"{name}: encoded and encoder_decoder_mask must be None and decode False with"
                " TransformerLayerType.ENCODER, got another value"
            )

    def _constrained(self, x: jax.Array) -> jax.Array:
        return placed(x, (*axes.leading(self), axes.HIDDEN))

    def _relative_biases(
        self, x: jax.Array, is_decoder: bool, max_decode_length: int | None
    ) -> jax.Array | None:
        """Returns the relative position biases of self attention, or None."""
        if not self.enable_relative_embedding:
            return None
        module: Any = self.relative_embedding
        if module is None:
            module = self._kind(RelativePositionBiases)(
                num_buckets=32,
                max_distance=128,
                num_attention_heads=self.num_attention_heads,
                embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
                dtype=self.dtype,
                name="relpos_bias",
            )
        length = max_decode_length or x.shape[0 if self.transpose_batch_sequence else 1]
        if self.context_parallel_axis and not self.is_initializing():
            length = whole_tokens(self.context_parallel_axis, length)
        return module(length, length, not is_decoder)

    def _attention(self, name: str, **options: Any) -> MultiHeadAttention:
        """Makes a self or cross attention."""
        fields = self._shared(TransformerLayer, MultiHeadAttention) | {
            "head_dim": self.hidden_size // self.num_attention_heads,
            "return_layernorm_output": self.apply_residual_connection_post_layernorm,
            "kernel_init": self.mha_kernel_init,
            "float32_logits": self.float32_attention_logits,
        }
        return self._kind(MultiHeadAttention)(**fields, name=name, **options)

    def _mlp(self) -> LayerNormMLP:
        """Makes the MLP with its norm."""
        return self._kind(LayerNormMLP)(
            intermediate_dim=self.mlp_hidden_size,
            epsilon=self.layernorm_epsilon,
            scale_axes=(axes.W_NO_SHARD,),
            ln_bias_axes=(axes.W_NO_SHARD,),
            kernel_init=self.mlp_kernel_init,
            kernel_axes_1=(axes.W_FSDP, axes.W_JOINED, axes.W_TP),
            kernel_axes_2=(axes.W_TP, axes.W_FSDP),
            bias_axes_1=(axes.W_JOINED, axes.W_TP),
            bias_axes_2=(axes.W_NO_SHARD,),
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            activations=self.mlp_activations,
            activation_params=self.mlp_activation_params,
            enable_low_rank_adaptation=adapts(self, "mlp"),
            intermediate_dropout_rng_name=self.dropout_rng_name,
            intermediate_dropout_rate=self.intermediate_dropout,
            intermediate_hidden_dropout_dims=self.intermediate_dropout_dims,
            layernorm_input_axes=(*axes.leading(self), axes.HIDDEN),
            dot_1_input_axes=(*axes.leading(self, False), axes.HIDDEN),
            dot_2_input_axes=(*axes.leading(self, False), axes.HIDDEN_TP),
            name="mlp",
            **self._shared(TransformerLayer, LayerNormMLP),
        )

    def _add(
        self, x: jax.Array, residual: jax.Array, normed: jax.Array | None, deterministic: bool
    ) -> jax.Array:
        """Returns residual + drop_path(dropout(x)), where ``normed``, if given, is the residual."""
        x = self._dropout(self.hidden_dropout, tuple(self.hidden_dropout_dims), x, deterministic)
        batch = 1 if self.transpose_batch_sequence else 0
        others = tuple(i for i in range(x.ndim) if i != batch)
        x = self._dropout(self.drop_path, others, x, deterministic)
        return self._constrained((residual if normed is None else normed) + x)

    def _dropout(
        self, rate: float, dims: tuple[int, ...], x: jax.Array, deterministic: bool
    ) -> jax.Array:
        """Drops elements, with one mask for the dimensions ``dims``."""
        drop = nn.Dropout(rate, broadcast_dims=dims, rng_collection=self.dropout_rng_name)
        return drop(x, deterministic=deterministic)
