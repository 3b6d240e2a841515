"""Flax Linen modules of attention: its core, and its projections with a cache for decoding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..attention import MASK_TYPES, checked_kind, dot_product_attention
from ..context_parallel import context_parallel_attention, token_positions
from ..joined_columns import joined_columns
from ..layernorm_dense import norm_dense
from ..places import placed
from ..region import active_recipe
from ..rotary import rotary_pos_emb
from . import logical_axes as axes
from .module import (
    DenseGeneral,
    Initializer,
    LayerNormDenseGeneral,
    TransformerEngineBase,
    adapted_parameters,
    adapts,
    last_dimension_parts,
)

__all__ = ["DotProductAttention", "MultiHeadAttention"]

_zeros = nn.initializers.zeros
_LAYOUTS = ("bs3hd", "bshd_bs2hd", "bshd_bshd_bshd")


class DotProductAttention(TransformerEngineBase):
    """Core of attention, softmax(scale * query key^T + bias) value for each head.

    On GPUs cuDNN's fused kernels compute it if they support the arguments, never with dropout.

    Attributes:
        head_dim: size of a head.
        num_attention_heads: number of the queries' heads.
        num_gqa_groups: number of the keys' and values' heads, a divisor of
            ``num_attention_heads``; None means as many.
        attention_dropout: probability that an attention weight is dropped.
        attn_mask_type: "no_mask", "padding", "causal" or "padding_causal" ("causal_padding").
        attn_bias_type: "no_bias", "pre_scale_bias" or "post_scale_bias"; None is
            "post_scale_bias" in calls with a bias, else "no_bias".
        dtype: not used; the core computes in the dtype of its inputs.
        dropout_rng_name: name of Flax's random number stream for dropout.
        float32_logits: multiply queries and keys in float32; scores are float32 either way.
        qkv_layout: "bs3hd" (all in ``query``, [b, s, 3, h, d]), "bshd_bs2hd" (keys and values in
            ``key``, [b, s, 2, g, d]) or "bshd_bshd_bshd" (three arrays).
        scale_factor: multiplier of the scores; None means 1 / sqrt(head_dim).
        transpose_batch_sequence: inputs and results are [s, b, ...] instead of [b, s, ...].
        window_size: (left, right), numbers of keys before and after its own position that a query
            sees; -1 means no limit, None no limits.
        context_parallel_axis: mesh axis over which sequences are split, for context parallelism;
            "" splits none. ``init`` needs no mesh. Without dropout of attention weights.
        context_parallel_strategy, context_parallel_causal_load_balanced: as ``strategy`` and
            ``causal_load_balanced`` in ``context_parallel_attention``.
        softmax_type: as in ``apex_te.jax.attention.dot_product_attention``; "learnable" has the
            parameter ``softmax_offset``, float32 [1, heads, 1, 1], initially 0.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: Any = jnp.float32
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool = False
    window_size: tuple[int, int] | None = None
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_parallel_causal_load_balanced: bool = False
    softmax_type: str = "vanilla"

    @nn.compact
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        *,
        deterministic: bool = False,
        query_start: int | jax.Array = 0,
    ) -> jax.Array:
        """Computes attention; the result has the layout of the queries, [b, s, h, d] by default.

        Args:
            query, key, value: heads in the layout that ``qkv_layout`` and
                ``transpose_batch_sequence`` name; an array that it lacks is ignored.
            mask: bool or integer, True = masked out, 4 dimensions that broadcast to
                [b, h, sq, sk]; required with the padding types, ignored with the others.
            bias: added to the scores, 4 dimensions that broadcast to [b, h, sq, sk].
            deterministic: True turns dropout off.
            query_start: position of the first query, for calls with a cache of keys.
        """
        self._check_counts("head_dim", "num_attention_heads", "num_gqa_groups")
        q, k, v = (self._batch_first(x) for x in self._separate(query, key, value))
        for name, x, heads in (
            ("query", q, self.num_attention_heads),
            ("key", k, self.num_gqa_groups or self.num_attention_heads),
        ):
            if x.ndim == 4 and x.shape[2:] != (heads, self.head_dim):
                raise ValueError(
                    f"DotProductAttention: {name} must have {heads} heads of size"
                    f" {self.head_dim}, got {list(x.shape)}"
                )
        rate = 0.0 if deterministic else self.attention_dropout
        offset = None
        if self.softmax_type == "learnable":
            shape, names = (1, self.num_attention_heads, 1, 1), (None, axes.HEAD, None, None)
            offset = self._parameter("softmax_offset", _zeros, shape, names, jnp.float32)
        sink: dict[str, Any] = {"softmax_type": self.softmax_type, "softmax_offset": offset}
        attend: Any = functools.partial(dot_product_attention, **sink)
        if self.context_parallel_axis and self.softmax_type != "vanilla":
            raise NotImplementedError(
                'DotProductAttention: softmax_type must be "vanilla" with context_parallel_axis,'
                f" got {self.softmax_type!r}"
            )
        if self.context_parallel_axis and not self.is_initializing():
            attend = functools.partial(
                context_parallel_attention,
                axis_name=self.context_parallel_axis,
                strategy=self.context_parallel_strategy,
                causal_load_balanced=self.context_parallel_causal_load_balanced,
            )
        out = attend(
            q,
            k,
            v,
            mask,
            bias,
            attn_mask_type=self.attn_mask_type,
            attn_bias_type=self.attn_bias_type,
            scale=self.scale_factor,
            window_size=self.window_size,
            dropout_rate=rate,
            dropout_key=self.make_rng(self.dropout_rng_name) if rate > 0.0 else None,
            float32_logits=self.float32_logits,
            query_start=query_start,
        )
        return self._batch_first(out)

    def _separate(self, query: Any, key: Any, value: Any) -> tuple[jax.Array, ...]:
        """Returns queries, keys and values, which ``qkv_layout`` may have in one array."""
        if self.qkv_layout not in _LAYOUTS:
            raise NotImplementedError(
                "DotProductAttention: qkv_layout must be one of"
                f" {', '.join(_LAYOUTS)}, got {self.qkv_layout!r}"
            )
        packed = query if self.qkv_layout == "bs3hd" else key
        parts = {"bs3hd": 3, "bshd_bs2hd": 2}.get(self.qkv_layout, 0)
        if parts and (jnp.ndim(packed) != 5 or packed.shape[2] != parts):
            raise ValueError(
                f"DotProductAttention: {'query' if parts == 3 else 'key'} must have shape [b, s,"
                f" {parts}, heads, size] with qkv_layout {self.qkv_layout!r}, got"
                f" {list(jnp.shape(packed))}"
            )
        given = {3: (), 2: (query,), 0: (query, key, value)}[parts]
        found = (*given, *(packed[:, :, i] for i in range(parts)))
        return tuple(
            self._input(x, name) for name, x in zip(("query", "key", "value"), found, strict=True)
        )

    def _batch_first(self, x: jax.Array) -> jax.Array:
        """Swaps batch and sequence if inputs have the sequence first; its own inverse."""
        return x.swapaxes(0, 1) if self.transpose_batch_sequence else x


class _Projected(NamedTuple):
    """Projected heads, [b, s, heads, size] each, and the norm's result or None."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    normed: jax.Array | None


class _Kernel(DenseGeneral):
    """Parameters of a ``DenseGeneral``, for a GEMM that another layer computes."""

    @nn.compact
    def __call__(self, width: Any) -> Any:
        """Returns the kernel [width, columns], the bias or None, and what adapts it or None."""
        return adapted_parameters(self, width)


class _Projection(LayerNormDenseGeneral):
    """Norm and projection to heads, with one GEMM, cast and scale for all heads of one input."""

    @nn.compact
    def __call__(
        self, inputs: jax.Array, beside: Sequence[Any] = ()
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """Returns each kernel's GEMM [..., width], and the norm's output.

        That is ``inputs`` [..., in] without a norm, and None if it is only made in FP8. ``beside``
        are a kernel, [in, width] or [in, kernels, width], its bias or None, and what adapts it or
        None.
        """
        state = self._fp8_state() or {}
        x, norm, kernel, bias, adapter = self._operands(inputs)
        kernels = [kernel, *(each for each, _, _ in beside)]
        parts = last_dimension_parts(kernel, self.kernel_axes)
        columns = joined_columns(kernels, parts, active_recipe())
        if bias is not None:
            bias = columns.join([bias, *(each for _, each, _ in beside)], 0)
        products, normed = norm_dense(
            x, norm, columns.join(kernels, 1), bias, state, self.dot_input_axes, columns,
            self._returns_norm or adapter is not None,
        )  # fmt: skip
        if adapter is not None:
            added = []
            for one, adapts in zip(kernels, [adapter, *(a for _, _, a in beside)], strict=True):
                more = adapts(normed)
                added += [more] if one.ndim == 2 else list(jnp.moveaxis(more, -2, 0))
            products = [y + more for y, more in zip(products, added, strict=True)]
        return products, normed


class MultiHeadAttention(TransformerEngineBase):
    """Norm, projections to heads, attention and output projection.

    The parameters belong to submodules: "out", and "qkv" in self attention. "query" and "kv"
    replace "qkv" in cross attention and with fewer ``num_gqa_groups`` than heads; "query", "key"
    and "value" replace it without ``fuse_qkv_params``. One GEMM computes all heads that have the
    same input; the first of its submodules has its FP8 state.

    Attributes:
        head_dim, num_attention_heads, num_gqa_groups, attention_dropout, attn_mask_type,
        attn_bias_type, dropout_rng_name, float32_logits, window_size, context_parallel_axis,
        context_parallel_strategy, context_parallel_causal_load_balanced, softmax_type: as in
            ``DotProductAttention``. Masks and biases are those of whole sequences.
        input_layernorm: normalise ``inputs_q``, which in self attention is the only input.
        layernorm_type, zero_centered_gamma: as in ``LayerNorm``.
        layernorm_epsilon: added to the variance.
        return_layernorm_output: also return the norm's output.
        kernel_init: initializer of the kernels; None: variance_scaling(1.0, fan_in, normal).
        use_bias: add biases.
        bias_init: initializer of the biases.
        enable_rotary_pos_emb: rotate queries and keys by their positions.
        rotary_pos_emb_windows: time scales (min, max): pair i of n rotates by
            position / (min * (max / min) ** (i / n)).
        rotary_pos_emb_group_method: "consecutive" for pairs (2 i, 2 i + 1), "alternate" for
            (i, i + head_dim / 2).
        low_rank_adaptation_scope: which linear layers get low-rank adapters: "none", "all",
            "qkv_proj", "output_proj", "exclude_qkv_proj" or "exclude_output_proj"; "mlp" and
            "exclude_mlp" are for a ``TransformerLayer``.
        low_rank_adaptation_dim, low_rank_adaptation_alpha: as in ``DenseGeneral``.
        dtype: dtype of the parameters; the layer computes in that of its inputs.
        fuse_qkv_params: one kernel for queries, keys and values, or for keys and values.
        transpose_batch_sequence: inputs and results are [s, b, ...] instead of [b, s, ...].
        enable_sequence_parallel: shard the sequence dimension of the norm's input over the logical
            axis of tensor parallelism.
        scale_attn_logits: divide the scores by sqrt(head_dim).
        scaled_query_init: divide the queries' kernel by sqrt(head_dim) at initialization.
        num_heads, dropout_rate, fuse_qkv: old names of ``num_attention_heads``,
            ``attention_dropout`` and ``fuse_qkv_params``. They take precedence unless None.
    """

    head_dim: int
    num_attention_heads: int | None = None
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Initializer | None = None
    use_bias: bool = False
    bias_init: Initializer = _zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    float32_logits: bool = False
    window_size: tuple[int, int] | None = None
    num_heads: int | None = None
    dropout_rate: float | None = None
    fuse_qkv: bool | None = None
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_parallel_causal_load_balanced: bool = False
    softmax_type: str = "vanilla"

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_kv: jax.Array | None = None,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output in the layout of ``inputs_q``, and the norm's output or None.

        Args:
            inputs_q: [b, s, embed], or [s, b, embed] with ``transpose_batch_sequence``.
            inputs_kv: None or ``inputs_q`` itself for self attention, another array of its dtype
                for cross attention. Inside of ``jax.jit`` or ``jax.checkpoint`` an array that was
                passed to them twice counts as two.
            mask, bias: as in ``DotProductAttention``.
            decode: append keys and values to the collection "cache", and attend to all of them;
                only in self attention. ``init`` with ``decode=True`` and inputs of the maximum
                length makes the cache. sk is then that length, and a bias has rows for all
                positions or for these queries. Tokens beyond the cache give NaN.
            deterministic: True turns dropout off.
        """
        heads = self._heads
        inputs_q, inputs_kv = self._inputs(inputs_q, inputs_kv)
        if decode and inputs_q is not inputs_kv:
            raise ValueError(
                "MultiHeadAttention: decode must be False in cross attention, got True"
            )
        if self.context_parallel_axis and (decode or self.enable_sequence_parallel):
            raise NotImplementedError(
                "MultiHeadAttention: decode and enable_sequence_parallel must be False with"
                f" context_parallel_axis {self.context_parallel_axis!r}, got {decode} and"
                f" {self.enable_sequence_parallel}"
            )
        q, k, v, normed = self._projected(inputs_q, inputs_kv)
        start: int | jax.Array = 0
        index = self._index() if decode else None
        if index is not None and not self.is_initializing():
            start = index.value
        if self.enable_rotary_pos_emb:
            rotate = functools.partial(
                rotary_pos_emb,
                windows=self.rotary_pos_emb_windows,
                group_method=self.rotary_pos_emb_group_method,
                start=start,
            )
            q, k = (rotate(x, positions=self._positions(x)) for x in (q, k))
        kind = self.attn_mask_type
        if index is not None:
            k, v, mask, kind = self._cached(k, v, mask, index)
            if bias is not None and bias.shape[2] not in (1, q.shape[1]):
                bias = jax.lax.dynamic_slice_in_dim(bias, start, q.shape[1], axis=2)
        dropout = self.attention_dropout if self.dropout_rate is None else self.dropout_rate
        fields = self._shared(MultiHeadAttention, DotProductAttention) | {
            "num_attention_heads": heads,
            "attention_dropout": dropout,
            "attn_mask_type": kind,
            "scale_factor": self.head_dim**-0.5 if self.scale_attn_logits else 1.0,
            "transpose_batch_sequence": False,
        }
        core = self._kind(DotProductAttention)(**fields)
        x = core(q, k, v, mask, bias, deterministic=deterministic, query_start=start)
        if index is not None and not self.is_initializing():
            x = jnp.where(start + jnp.arange(x.shape[1])[:, None, None] < k.shape[1], x, jnp.nan)
        x = checkpoint_name(self._sequence_first(x), "context")
        x = x.reshape(*x.shape[:2], heads * self.head_dim)
        x = placed(x, (*axes.leading(self, False), axes.HIDDEN_TP))
        out = self._kind(DenseGeneral)(
            features=inputs_q.shape[-1],
            kernel_init=self._kernel_init,
            kernel_axes=(axes.W_TP, axes.W_FSDP),
            bias_axes=(axes.W_NO_SHARD,),
            name="out",
            **self._linear_options("output_proj"),
        )(x)
        return checkpoint_name(out, "out_proj"), normed

    def _inputs(self, inputs_q: Any, inputs_kv: Any) -> tuple[jax.Array, jax.Array]:
        """Returns both inputs, one array in self attention; each must be [b, s, embed]."""
        made = self._input(inputs_q, "inputs_q")
        other = made
        if inputs_kv is not None and inputs_kv is not inputs_q:
            other = self._input(inputs_kv, "inputs_kv")
        for name, x in (("inputs_q", made), ("inputs_kv", other)):
            if x.ndim != 3:
                raise ValueError(
                    f"MultiHeadAttention: {name} must be [b, s, embed], got {list(x.shape)}"
                )
        if other.dtype != made.dtype:
            raise TypeError(
                f"MultiHeadAttention: inputs_kv must have inputs_q's dtype {made.dtype}, got"
                f" {other.dtype}"
            )
        return made, other

    @property
    def _heads(self) -> int:
        """Checks what is not offered, and returns the number of heads."""
        self._check_counts("head_dim", "num_attention_heads", "num_heads", "num_gqa_groups")
        heads = self.num_attention_heads if self.num_heads is None else self.num_heads
        if heads is None:
            raise TypeError("MultiHeadAttention: num_attention_heads must be an int, got None")
        if heads % (self.num_gqa_groups or heads):
            raise ValueError(
                f"MultiHeadAttention: num_gqa_groups must divide num_attention_heads={heads}, got"
                f" {self.num_gqa_groups}"
            )
        checked_kind(self.attn_mask_type, None, "MultiHeadAttention")
        return heads

    def _linear_options(self, part: str) -> dict[str, Any]:
        """Returns the fields that all linear layers have, and those of a part's adapter."""
        return {
            "use_bias": self.use_bias,
            "bias_init": self.bias_init,
            "dtype": self.dtype,
            "enable_low_rank_adaptation": adapts(self, part),
            "low_rank_adaptation_dim": self.low_rank_adaptation_dim,
            "low_rank_adaptation_alpha": self.low_rank_adaptation_alpha,
        }

    def _positions(self, x: jax.Array) -> jax.Array | None:
        """Returns the positions of tokens [b, s, ..] of split sequences, None for others."""
        if not self.context_parallel_axis or self.is_initializing():
            return None
        return token_positions(
            self.context_parallel_axis, x.shape[1], self.context_parallel_causal_load_balanced
        )

    @property
    def _kernel_init(self) -> Initializer:
        return self.kernel_init or nn.initializers.variance_scaling(1.0, "fan_in", "normal")

    def _parts_init(self, names: Sequence[str]) -> Initializer:
        """Returns an initializer of kernels side by side, of queries ("q") and others."""

        def init(key: Any, shape: tuple[int, int], dtype: Any) -> jax.Array:
            part = shape[0], shape[1] // len(names)
            kernels = []
            for name, one in zip(names, jax.random.split(key, len(names)), strict=True):
                kernel = self._kernel_init(one, part, dtype)
                scaled = name == "q" and self.scaled_query_init
                kernels.append(kernel / self.head_dim**0.5 if scaled else kernel)
            return jnp.concatenate(kernels, axis=1)

        return init

    def _sequence_first(self, x: jax.Array) -> jax.Array:
        """Swaps batch and sequence if inputs have the sequence first; its own inverse."""
        return x.swapaxes(0, 1) if self.transpose_batch_sequence else x

    def _options(self, name: str, features: Any, parts: str) -> dict[str, Any]:
        """Returns fields that all projections have; ``parts``: whose kernels lie side by side."""
        joined = (axes.W_JOINED,) if len(parts) > 1 else ()
        return {
            "features": features,
            "kernel_init": self._parts_init(parts),
            "kernel_axes": (axes.W_FSDP, *joined, axes.W_TP),
            "bias_axes": (*joined, axes.W_TP),
            "name": name,
            **self._linear_options("qkv_proj"),
        }

    def _projected(self, inputs_q: jax.Array, inputs_kv: jax.Array) -> _Projected:
        """Projects the inputs to heads, [b, s, heads, size]."""
        is_self = inputs_q is inputs_kv
        heads = self._heads
        groups = self.num_gqa_groups or heads
        q, kv = heads * self.head_dim, groups * self.head_dim
        fuse = self.fuse_qkv_params if self.fuse_qkv is None else self.fuse_qkv
        first = self._options("query", q, "q")
        others = [self._options("key", kv, "k"), self._options("value", kv, "v")]
        if fuse:
            others = [self._options("kv", (2, kv), "kv")]
        if fuse and is_self and groups == heads:
            first, others = self._options("qkv", (3, q), "qkv"), []
        projected = [first, *others] if is_self else others
        beside = [self._kind(_Kernel)(**options)(inputs_kv.shape[-1]) for options in projected[1:]]
        products, normed = self._kind(_Projection)(
            enable_layernorm=self.input_layernorm,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            return_layernorm_output=self.return_layernorm_output,
            scale_axes=(axes.W_NO_SHARD,),
            ln_bias_axes=(axes.W_NO_SHARD,),
            layernorm_input_axes=(*axes.leading(self), axes.HIDDEN),
            dot_input_axes=(*axes.leading(self, False), axes.HIDDEN),
            **first,
        )(inputs_q, beside if is_self else ())
        if not is_self:
            other = self._kind(_Projection)(enable_layernorm=False, **others[0])
            products += other(inputs_kv, beside)[0]
        query, key, value = products
        has_norm = self.input_layernorm and self.return_layernorm_output
        return _Projected(
            self._split_heads("query", query, heads),
            self._split_heads("key", key, groups),
            self._split_heads("value", value, groups),
            normed if has_norm else None,
        )

    def _split_heads(self, name: str, x: jax.Array, heads: int) -> jax.Array:
        """Returns a projection's columns ("query", "key" or "value") as [b, s, heads, size]."""
        lead = axes.leading(self, False)
        head: str | None = axes.HEAD
        if heads % last_dimension_parts(x, (*lead, axes.HEAD)):
            # Devices would have parts of heads: all get all of them.
            x, head = placed(x, (*lead, None)), None
        x = checkpoint_name(x.reshape(*x.shape[:-1], heads, self.head_dim), f"{name}_proj")
        return self._sequence_first(placed(x, (*lead, head, axes.HIDDEN)))

    def _index(self) -> Any:
        """Returns the variable with the number of tokens in the cache."""
        needed = (
            'the collection "cache" with decode=True (call init with decode=True and inputs of the'
            " largest length)"
        )
        self._check_made("cache", "cache_index", needed)
        return self.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))

    def _cached(
        self, key: jax.Array, value: jax.Array, mask: jax.Array | None, index: Any
    ) -> tuple[Any, Any, Any, str]:
        """Writes keys and values into the cache."""
        made = [
            self.variable("cache", name, lambda x=x: jnp.zeros_like(self._sequence_first(x)))
            for name, x in (("cached_key", key), ("cached_value", value))
        ]
        is_causal, reads_mask = MASK_TYPES[self.attn_mask_type]
        if self.is_initializing():
            return key, value, mask, self.attn_mask_type
        axis = 0 if self.transpose_batch_sequence else 1
        start, tokens = index.value, key.shape[1]
        whole = []
        for variable, x in zip(made, (key, value), strict=True):
            x = self._sequence_first(x).astype(variable.value.dtype)
            held = variable.value
            rest = [n for i, n in enumerate(x.shape) if i != axis]
            if rest != [n for i, n in enumerate(held.shape) if i != axis] or (
                tokens > held.shape[axis]
            ):
                raise ValueError(
                    "MultiHeadAttention: inputs must fit the cache's shape"
                    f" {list(held.shape)}, got {list(x.shape)}"
                )
            variable.value = jax.lax.dynamic_update_slice_in_dim(held, x, start, axis)
            whole.append(self._sequence_first(variable.value))
        index.value = start + tokens
        later = (jnp.arange(whole[0].shape[1]) >= start + tokens)[None, None, None]
        if reads_mask and mask is not None:
            later = later | jnp.asarray(mask).astype(bool)
        return (whole[0], whole[1], later, "padding_causal" if is_causal else "padding")
