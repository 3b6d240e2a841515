"""The nnx modules: dense layers, norms, MLP, experts, attention and Transformer layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ...recipe import DelayedScaling, Recipe
from .. import contraction, fp8_state
from ..flax import attention, module, moe, transformer
from ..flax.dot_general import multiply
from ..flax.transformer import TransformerLayerType
from ..region import checked_recipe
from .from_linen import FP8Holder, FromLinen, checked_width

__all__ = [
    "DotGeneral", "DotProductAttention", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear",
    "MoEBlock", "MultiHeadAttention", "TransformerLayer",
]  # fmt: skip


class Linear(FromLinen):
    """Linear layer over one or several dimensions: x @ kernel + bias.

    Attributes:
        kernel: [*in_features, *out_features].
        bias: [*out_features]; not with ``use_bias=False``.

    Args:
        in_features: extents of the input's last dimensions; an int for one.
        out_features: extents of the output's last dimensions; an int for one.
        rngs: random numbers, of the stream "params".
        options: other fields of ``apex_te.jax.flax.DenseGeneral``, such as ``use_bias`` and
            ``kernel_axes``.

    Raises:
        TypeError: an extent is not an int, ``rngs`` is not an ``nnx.Rngs``, or an option is not a
            field.
        ValueError: an extent is not positive.
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        given = tuple(in_features) if isinstance(in_features, Sequence) else (in_features,)
        inner = tuple(checked_width(self, "in_features", each) for each in given)
        fixed = {"features": out_features, "axis": tuple(range(-len(inner), 0))}
        super().__init__(module.DenseGeneral, fixed, options, rngs)
        self._make_parameters(rngs, inner)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the output [..., *out_features] of ``inputs`` [..., *in_features]."""
        return self._apply(inputs)


class LayerNorm(FromLinen):
    """Layer or RMS normalisation over the last dimension.

    Attributes:
        scale: [num_features].
        ln_bias: [num_features]; not with ``layernorm_type="rmsnorm"``.

    Args:
        num_features: extent of the last dimension.
        rngs: random numbers, of the stream "params".
        options: fields of ``apex_te.jax.flax.LayerNorm``, such as ``layernorm_type``.

    Raises:
        TypeError: ``num_features`` is not an int, ``rngs`` is not an ``nnx.Rngs``, or an option is
            not a field.
        ValueError: ``num_features`` is not positive, or an option has a wrong value.
    """

    def __init__(self, num_features: int, *, rngs: nnx.Rngs, **options: Any) -> None:
        super().__init__(module.LayerNorm, {}, options, rngs)
        self._make_parameters(rngs, (checked_width(self, "num_features", num_features),))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalised input."""
        return self._apply(x)


class LayerNormLinear(FromLinen):
    """Norm followed by a linear layer.

    Attributes:
        scale, ln_bias: as in ``LayerNorm``.
        kernel, bias: as in ``Linear``; without bias unless ``use_bias=True``.

    Args:
        in_features: extent of the input's last dimension.
        out_features: extents of the output's last dimensions; an int for one.
        rngs: random numbers, of the stream "params".
        options: other fields of ``apex_te.jax.flax.LayerNormDenseGeneral``.

    Raises:
        TypeError: an extent is not an int, ``rngs`` is not an ``nnx.Rngs``, or an option is not a
            field.
        ValueError: an extent is not positive, or an option has a wrong value.
    """

    def __init__(
        self, in_features: int, out_features: int | Sequence[int], *, rngs: nnx.Rngs, **options: Any
    ) -> None:
        super().__init__(module.LayerNormDenseGeneral, {"features": out_features}, options, rngs)
        self._make_parameters(rngs, (checked_width(self, "in_features", in_features),))

    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output, and the norm's output or None; ``inputs`` are [..., in]."""
        return self._apply(inputs)


class LayerNormMLP(FromLinen):
    """Norm, linear layer, activation, dropout and linear layer; the output has the input's width.

    Attributes:
        scale, ln_bias: as in ``LayerNorm``.
        wi_kernel: [in, activations, intermediate_dim].
        wo_kernel: [intermediate_dim, in].
        wi_bias, wo_bias: biases, with ``use_bias=True``.

    Args:
        in_features: extent of the input's last dimension.
        intermediate_dim: width between the linear layers.
        rngs: random numbers, of the stream "params" and of the dropout's.
        options: other fields of ``apex_te.jax.flax.LayerNormMLP``, such as ``activations``.

    Raises:
        TypeError, ValueError: as ``LayerNormLinear``.
    """

    def __init__(
        self, in_features: int, intermediate_dim: int, *, rngs: nnx.Rngs, **options: Any
    ) -> None:
        fixed = {"intermediate_dim": intermediate_dim}
        super().__init__(module.LayerNormMLP, fixed, options, rngs)
        self._make_parameters(rngs, (checked_width(self, "in_features", in_features),))

    def __call__(
        self, inputs: jax.Array, deterministic: bool | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output, and the norm's output or None.

        Args:
            inputs: [..., in].
            deterministic: True turns dropout off; None: as ``eval()`` and ``train()`` say.
        """
        return self._apply(inputs, deterministic=deterministic)


class MoEBlock(FromLinen):
    """Mixture of experts: each token through the gated MLPs that a router chooses.

    Attributes:
        gate_kernel: [in, num_experts].
        wi: [num_experts, in, 2 * intermediate_size], with the gates first.
        wo: [num_experts, intermediate_size, in].
        wi_bias, wo_bias: biases, with ``use_ffn_bias=True``.
        expert_bias, tokens_per_expert: [num_experts], with ``use_expert_routing_bias=True``: the
            router's bias, whose gradient is 0, and the experts' numbers of tokens in the last
            call. ``te.update_expert_bias`` computes the next bias from both.

    Args:
        in_features: extent of the input's last dimension.
        num_experts: number of experts.
        intermediate_size: features between the two GEMMs of an expert.
        rngs: random numbers, of the stream "params".
        options: other fields of ``apex_te.jax.flax.MoEBlock``, such as ``num_experts_per_tok``.

    Raises:
        TypeError, ValueError: as ``LayerNormLinear``.
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        intermediate_size: int,
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        fixed = {"num_experts": num_experts, "intermediate_size": intermediate_size}
        super().__init__(moe.MoEBlock, fixed, options, rngs)
        self._make_parameters(rngs, (checked_width(self, "in_features", in_features),))
        if self.linen.use_expert_routing_bias:
            self.tokens_per_expert = nnx.BatchStat(jnp.zeros(num_experts, jnp.int32))

    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output, and the sum of the losses that are asked for, or None.

        Args:
            inputs: [..., in].
        """
        made, sown = self._apply(inputs, mutable=["intermediates"])
        if self.linen.use_expert_routing_bias:
            (tokens,) = sown["intermediates"]["tokens_per_expert"]
            self.tokens_per_expert.set_value(tokens)
        return made


class DotProductAttention(FromLinen):
    """Core of attention, softmax(scale * query key^T + bias) value for each head.

    Args:
        head_dim: size of a head.
        num_attention_heads: number of the queries' heads.
        rngs: random numbers for dropout; None without dropout.
        options: other fields of ``apex_te.jax.flax.DotProductAttention``.

    Raises:
        TypeError: ``rngs`` is not an ``nnx.Rngs``, or an option is not a field.
    """

    def __init__(
        self, head_dim: int, num_attention_heads: int, *, rngs: nnx.Rngs | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        fixed = {"head_dim": head_dim, "num_attention_heads": num_attention_heads}
        super().__init__(attention.DotProductAttention, fixed, options, rngs)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        *,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Returns attention, with the arguments of ``apex_te.jax.flax.DotProductAttention``."""
        return self._apply(query, key, value, mask, bias, deterministic=deterministic)


class MultiHeadAttention(FromLinen):
    """Norm, projections to heads, attention and output projection.

    Submodules have the parameters: "out", and "qkv" or those of
    ``apex_te.jax.flax.MultiHeadAttention``.

    Args:
        in_features: extent of the last dimension of ``inputs_q``, and of the output.
        head_dim: size of a head.
        num_attention_heads: number of the queries' heads.
        kv_features: extent of the last dimension of ``inputs_kv``, for cross attention; None for
            self attention.
        rngs: random numbers, of the stream "params" and of the dropout's.
        options: other fields of ``apex_te.jax.flax.MultiHeadAttention``.

    Raises:
        TypeError, ValueError: as ``LayerNormLinear``.
    """

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_attention_heads: int,
        *,
        kv_features: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        fixed = {"head_dim": head_dim, "num_attention_heads": num_attention_heads}
        super().__init__(attention.MultiHeadAttention, fixed, options, rngs)
        widths = [checked_width(self, "in_features", in_features)]
        if kv_features is not None:
            widths.append(checked_width(self, "kv_features", kv_features))
        self._make_parameters(rngs, *((w,) for w in widths), mask=self._any_mask())

    def init_cache(self, shape: Sequence[int], dtype: Any = jnp.float32) -> None:
        """Makes the empty cache that calls with ``decode=True`` need.

        Args:
            shape: shape of inputs of the maximum length.
            dtype: dtype of the inputs.
        """
        self._make_cache(shape, dtype=dtype)

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_kv: jax.Array | None = None,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        *,
        decode: bool = False,
        deterministic: bool | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output, and the norm's output or None.

        Args:
            inputs_q, inputs_kv, mask, bias: as in ``apex_te.jax.flax.MultiHeadAttention``.
            decode: append keys and values to the cache, and attend to all of them.
            deterministic: True turns dropout off; None: as ``eval()`` and ``train()`` say.
        """
        return self._apply(
            inputs_q, inputs_kv, mask, bias, decode=decode, deterministic=deterministic
        )


class TransformerLayer(FromLinen):
    """One layer of a Transformer: attention, cross attention in a decoder, and MLP.

    Submodules have the parameters, as in ``apex_te.jax.flax.TransformerLayer``.

    Args:
        hidden_size: width of all heads together, and of the inputs.
        mlp_hidden_size: width of the MLP between its linear layers.
        num_attention_heads: number of the queries' heads.
        encoded_features: extent of the last dimension of a decoder's ``encoded``; None:
            ``hidden_size``.
        rngs: random numbers, of the stream "params" and of the dropout's.
        options: other fields of ``apex_te.jax.flax.TransformerLayer``.

    Raises:
        TypeError, ValueError: as ``LayerNormLinear``.
    """

    def __init__(
        self,
        hidden_size: int,
        mlp_hidden_size: int,
        num_attention_heads: int,
        *,
        encoded_features: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        fixed = {
            "hidden_size": hidden_size, "mlp_hidden_size": mlp_hidden_size,
            "num_attention_heads": num_attention_heads,
        }  # fmt: skip
        super().__init__(transformer.TransformerLayer, fixed, options, rngs)
        widths = [checked_width(self, "hidden_size", hidden_size)]
        if self.linen.layer_type is TransformerLayerType.DECODER:
            width = hidden_size if encoded_features is None else encoded_features
            widths.append(checked_width(self, "encoded_features", width))
        self._make_parameters(rngs, *((w,) for w in widths), attention_mask=self._any_mask())

    def init_cache(
        self, shape: Sequence[int], encoded_shape: Sequence[int], dtype: Any = jnp.float32
    ) -> None:
        """Makes the empty cache that a decoder's calls with ``decode=True`` need.

        Args:
            shape: shape of inputs of the maximum length.
            encoded_shape: shape of ``encoded``.
            dtype: dtype of both.
        """
        self._make_cache(shape, encoded_shape, dtype=dtype)

    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        deterministic: bool | None = None,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> jax.Array:
        """Applies the layer; returns an array of the shape of ``inputs``.

        Args:
            inputs, encoded, attention_mask, encoder_decoder_mask, max_decode_length: as in
                ``apex_te.jax.flax.TransformerLayer``.
            deterministic: True turns dropout off; None: as ``eval()`` and ``train()`` say.
            decode: append keys and values of self attention to the cache, and attend to all of
                them.
        """
        return self._apply(
            inputs, encoded, attention_mask, encoder_decoder_mask, deterministic=deterministic,
            decode=decode, max_decode_length=max_decode_length,
        )  # fmt: skip


class DotGeneral(FP8Holder):
    """GEMM of an array and a kernel in FP8, the ``dot_general`` of an ``nnx.Linear``.

    Args:
        recipe: as in ``apex_te.jax.flax.make_dot_general_cls``, as are the errors; the object has
            the FP8 state of ``DelayedScaling``.
    """

    def __init__(self, recipe: Recipe | str | None = None) -> None:
        self.recipe = checked_recipe("DotGeneral", recipe, "recipe")
        if isinstance(self.recipe, DelayedScaling):
            self._assign({fp8_state.FP8_COLLECTION_NAME: fp8_state.initial(self.recipe)})

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Returns ``jax.lax.dot_general`` of an array and a kernel.

        Args:
            out_sharding: None, or a ``PartitionSpec`` or ``NamedSharding`` of the result.
        """
        state = self._values({"kernel": rhs}).get(fp8_state.FP8_COLLECTION_NAME)
        return multiply(
            "DotGeneral", self.recipe, state, contraction.dot_general, lhs, rhs,
            dimension_numbers, preferred_element_type, out_sharding,
        )  # fmt: skip
