"""MultiheadAttention: projections around DotProductAttention, for self and cross attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ...fp8.delayed.ranks import number_layer
from ...ops.rms_norm import rms_norm
from ...ops.rope import rope
from ...runtime.named_arguments import did_you_mean, named_arguments
from .._core.arguments import VAGUE, check_count, checked_eps, checked_groups, explain_attention
from .._core.norm_parameters import check_normalization
from .._core.parallel import (
    CompositeModule,
    checked_tp_size,
    divided,
    is_observed,
    tag,
    takes_residual,
)
from ..layer_norm import LayerNorm
from ..layer_norm_linear import LayerNormLinear
from ..linear import Linear
from ..rms_norm import RMSNorm
from .alibi import standard_slopes
from .dot_product import DotProductAttention
from .inference_params import InferenceParams, extended, without_gradient
from .masks import Mask
from .qkv_heads import HeadLayout, Rotation, rotation_of, split_heads
from .rotary import one_sequence, own_rotation

__all__ = ["MultiheadAttention"]

_NAME = "MultiheadAttention"
_Init = Callable[[torch.Tensor], Any] | None


class _L2Normalization(torch.nn.Module):
    """L2 normalisation ``x / sqrt(sum(x ** 2) + eps)`` over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps / size
        self.factor = size**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, None, self.eps) * self.factor


def _checked_head_size(hidden_size: Any, heads: int, kv_channels: Any) -> int:
    """Returns the size of a head: ``kv_channels``, else ``hidden_size / heads``."""
    check_count(_NAME, "hidden_size", hidden_size)
    if kv_channels is not None:
        check_count(_NAME, "kv_channels", kv_channels)
        return kv_channels
    if hidden_size % heads:
        raise ValueError(
            f"{_NAME}: num_attention_heads must divide hidden_size={hidden_size}, got {heads}"
        )
    return hidden_size // heads


class MultiheadAttention(CompositeModule):
    """Multi-head attention with its query, key, value and output projections.

    Submodules (prefixes of the state dict): ``layernorm_qkv`` (with ``input_layernorm``) or
    ``qkv``; in cross attention ``layernorm_query`` or ``query_layer``, and ``key_value``; ``proj``;
    ``q_norm`` and ``k_norm`` if they have parameters; ``core_attention`` with learnable sinks.

    Args:
        hidden_size: features of the input and of the output.
        num_attention_heads: number of query heads, over all ranks.
        kv_channels: size of a head; None is ``hidden_size / num_attention_heads``.
        num_gqa_groups: number of key and value heads; None is ``num_attention_heads``.
        attention_dropout, attn_mask_type, window_size, layer_number, softmax_scale, softmax_type,
            get_rng_state_tracker, apply_query_key_layer_scaling, qkv_format: as in
            ``DotProductAttention``; layer_number also names the layer in ``inference_params``.
        attention_type: ``"self"``, or ``"cross"``, where keys and values come from
            ``encoder_output``.
        input_layernorm: normalise the input first.
        normalization, layernorm_epsilon, zero_centered_gamma: options of the input norm, as in
            ``LayerNormLinear``.
        return_layernorm_output: also return the output of the input norm.
        return_bias: also return the output projection's bias, which is then not added.
        return_max_logit: also return the largest logit of each of this rank's heads.
        bias: projections have biases.
        fuse_qkv_params: use one parameter for all projections of an input, instead of one each
            (``query_weight``, ``key_weight``, ``value_weight``, and ``query_bias`` etc.).
        qkv_weight_interleaved: order the rows of a fused parameter group by group, [g, h / g + 2,
            d] for h heads of size d in g groups; else all queries, then all keys, then all values.
        qk_norm_type: norm of each query and key head, ``"RMSNorm"``, ``"LayerNorm"`` or
            ``"L2Normalization"``, with ``qk_norm_eps``; None does not normalise. The norm follows
            the rotation, or precedes it with ``qk_norm_before_rope``.
        rotary_pos_interleaved: rotate pairs of elements (2i, 2i + 1) of a head; else pairs (i, i +
            c / 2), for c rotated elements.
        init_method, output_layer_init_method: initialise the weights of the QKV projections, and of
            the output projection; default N(0, 0.023^2).
        fuse_wgrad_accumulation, params_dtype, device: as in ``Linear``.
        name: name of the module in reports.
        set_parallel_mode: split the heads over the ranks of ``tp_group``.
        sequence_parallel, tp_group, tp_size: as in ``Linear``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number of heads or ranks does not divide what it splits, an option is unknown
            or out of range, or ``fuse_wgrad_accumulation`` is given without ``fuse_qkv_params``.

    Interface and the order of arguments follow TransformerEngine's MultiheadAttention.
    """

    # The classes of the submodules, for subclasses to replace.
    _linear: type[Any] = Linear
    _layer_norm_linear: type[Any] = LayerNormLinear
    _core_attention: type[Any] = DotProductAttention
    _norms: ClassVar[dict[str, type[Any]]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}

    @named_arguments()
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: _Init = None,
        output_layer_init_method: _Init = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        *,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        normalization: str = "LayerNorm",
        qkv_format: str = "sbhd",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        apply_query_key_layer_scaling: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        rotary_pos_interleaved: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        set_parallel_mode: bool = False,
        name: str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                f"{_NAME}: fuse_qkv_params must be True with fuse_wgrad_accumulation=True"
            )
        check_normalization(_NAME, normalization)
        ranks = checked_tp_size(_NAME, tp_group, tp_size) if set_parallel_mode else 1
        groups = checked_groups(_NAME, num_attention_heads, num_gqa_groups)
        size = _checked_head_size(hidden_size, num_attention_heads, kv_channels)
        norm = {
            "eps": checked_eps(_NAME, "layernorm_epsilon", layernorm_epsilon),
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }
        shared: dict[str, Any] = {
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "sequence_parallel": sequence_parallel,
        }

        def project(key: str, parts: dict[str, int], has_norm: bool = False) -> None:
            """Adds the linear layer called ``key`` from inputs to heads, by rows of its parts."""
            make = self._layer_norm_linear if has_norm else self._linear
            layer = make(
                hidden_size,
                sum(parts.values()),
                init_method=init_method,
                parameters_split=None if fuse_qkv_params else parts,
                name=f"{name}.{key}" if name else key,
                parallel_mode="column" if set_parallel_mode else None,
                **(norm if has_norm else {}),
                **shared,
            )
            self.add_module(key, layer)

        super().__init__()
        self.set_parallel_mode = set_parallel_mode
        self.core_attention = self._core_attention(
            num_attention_heads,
            size,
            groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            get_rng_state_tracker=get_rng_state_tracker,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=softmax_type,
            return_max_logit=return_max_logit,
            apply_query_key_layer_scaling=apply_query_key_layer_scaling,
            tp_group=tp_group if set_parallel_mode else None,
            tp_size=ranks,
            device=device,
        )
        self.attention_type = attention_type
        self.qkv_format = qkv_format
        self.layer_number = layer_number
        self.input_layernorm = input_layernorm
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qk_norm_before_rope = qk_norm_before_rope
        self.name = name
        own_groups = divided(_NAME, "num_gqa_groups", groups, ranks)
        rows, kv_rows = num_attention_heads * size, groups * size
        query, keys_values = {"query": rows}, {"key": kv_rows, "value": kv_rows}
        if attention_type == "self":
            key = "layernorm_qkv" if input_layernorm else "qkv"
            project(key, query | keys_values, input_layernorm)
        else:
            key = "layernorm_query" if input_layernorm else "query_layer"
            project(key, query, input_layernorm)
            project("key_value", keys_values)
        repeats = num_attention_heads // ranks // own_groups if attention_type == "self" else 0
        interleaved = qkv_weight_interleaved and fuse_qkv_params
        self._heads = HeadLayout(qkv_format, repeats, own_groups, size, interleaved)
        q_norm, k_norm = self._qk_norms(
            qk_norm_type, size, qk_norm_eps, params_dtype, device, ranks > 1
        )
        self.register_module("q_norm", q_norm)
        self.register_module("k_norm", k_norm)
        self.proj = self._linear(
            rows,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            save_original_input=True,  # attention saves its output anyway
            name=f"{name}.proj" if name else "proj",
            parallel_mode="row" if set_parallel_mode else None,
            **shared,
        )
        number_layer(self, layer_number)

    def _qk_norms(
        self, kind: str | None, size: int, eps: float, params_dtype: Any, device: Any, split: bool
    ) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
        """Makes the norms of query and key heads; L2 normalisation is one module for both."""
        eps = checked_eps(_NAME, "qk_norm_eps", eps)
        if kind is None:
            return None, None
        if kind == "L2Normalization":
            shared = _L2Normalization(size, eps)
            return shared, shared
        norms = self._norms
        if kind not in tuple(norms):
            raise ValueError(
                f"{_NAME}: qk_norm_type must be None, 'RMSNorm', 'LayerNorm' or 'L2Normalization', "
                f"got {kind!r}{did_you_mean(kind, (*norms, 'L2Normalization'))}"
            )
        q_norm, k_norm = (
            norms[kind](size, eps, params_dtype=params_dtype, device=device) for _ in range(2)
        )
        if split:
            for parameter in (*q_norm.parameters(), *k_norm.parameters()):
                tag(parameter, None, True)
        return q_norm, k_norm

    @property
    def return_max_logit(self) -> bool:
        """Forward also returns the largest logit of each head."""
        return bool(self.core_attention.return_max_logit)

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Sets the ranks over which sequences are split; can be called at any time.

        ``rotary_pos_emb`` still has the angles of whole sequences.

        Args:
            cp_group, cp_global_ranks, cp_stream, cp_comm_type: as in
                ``DotProductAttention.set_context_parallel_group``.

        Raises:
            TypeError: ``cp_group`` has an unsupported type.
            ValueError: ``cp_comm_type`` is unknown, or does not match the number of groups.

        Source: TransformerEngine's method of this name.
        """
        self.core_attention.set_context_parallel_group(
            cp_group, cp_global_ranks, cp_stream, cp_comm_type
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        *,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
    ) -> Any:
        """Applies the module; returns [..., hidden_size] in the layout of ``hidden_states``.

        Args:
            hidden_states: [s, b, hidden_size], [b, s, hidden_size] or [t, hidden_size], depending
                on ``qkv_format``, in the dtype of the parameters: fp32, fp16 or bf16.
            encoder_output: hidden states for keys and values, in the same layout and dtype; only in
                cross attention.
            rotary_pos_emb: angles [max_seq, 1, 1, c] in fp32, fp16 or bf16, or a tuple of two such
                tensors, for queries and keys; None does not rotate. Rotation runs in fp32.
            inference_params: cache of the keys and values of earlier calls, to which the queries
                also attend; only for self attention, in evaluation mode or with gradients disabled.
                Causal types then align the last query with the last key. After ``pre_step``, masks
                and ``cu_seqlens`` are ignored.
            is_first_microbatch: True caches the FP8 weights, False reuses them, None casts them in
                each call.
            attention_mask, attn_mask_type, window_size, checkpoint_core_attention,
                core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q,
                cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, cu_seqlens_q_padded,
                cu_seqlens_kv_padded: as in ``DotProductAttention.forward``.

        Returns:
            ``out``, or a tuple of it and, in this order: the bias with ``return_bias``; the norm's
            output with ``return_layernorm_output`` and ``input_layernorm``; the largest logits, [h]
            in the dtype of the queries, with ``return_max_logit``.

        Raises:
            TypeError: a tensor has another dtype than those above.
            ValueError: a shape, mask or option does not match.
        """
        try:
            return self.forward_with_residual(
                hidden_states, attention_mask, encoder_output, attn_mask_type, window_size,
                is_first_microbatch, checkpoint_core_attention, inference_params, rotary_pos_emb,
                core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q,
                cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, cu_seqlens_q_padded,
                cu_seqlens_kv_padded, return_residual=False,
            )[0]  # fmt: skip
        except VAGUE as error:
            call = {
                "hidden_states": hidden_states, "encoder_output": encoder_output,
                "attention_mask": attention_mask, "rotary_pos_emb": rotary_pos_emb,
                "core_attention_bias": core_attention_bias, "inference_params": inference_params,
            }  # fmt: skip
            explain_attention(self, error, ("qkv_format", self.qkv_format), call)
            raise

    def forward_with_residual(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        return_residual: bool = True,
        add_residual: bool = False,
    ) -> tuple[Any, torch.Tensor | None]:
        """Applies the module, and also returns the residual for the caller to add.

        Arguments that are not listed are those of ``forward``.

        Args:
            hidden_states: [s, b, hidden_size], [b, s, hidden_size] or [t, hidden_size], depending
                on ``qkv_format``, in fp32, fp16 or bf16.
            return_residual: True if the caller adds the residual. With ``input_layernorm``, the
                residual is then an output of the norm's autograd node, whose backward kernel
                accumulates the residual's gradient.
            add_residual: let the last GEMM add the residual to the result where possible, which is
                then rounded once. Requires that neither a bias nor a norm's output is returned.

        Returns:
            ``(result, residual)``: what ``forward`` returns, and a tensor equal to
            ``hidden_states``, or None if the last GEMM has added it to the result.

        Raises:
            TypeError: a tensor has another dtype than those above.
            ValueError: a shape, mask or option does not match.
        """
        if (encoder_output is None) != (self.attention_type == "self"):
            raise ValueError(
                f"{_NAME}: encoder_output must be given in cross attention and only there, "
                f"got {type(encoder_output).__name__} with attention_type {self.attention_type!r}"
            )
        if encoder_output is not None and not isinstance(encoder_output, torch.Tensor):
            raise TypeError(
                f"{_NAME}: encoder_output must be a tensor, got {type(encoder_output).__name__}"
            )
        if inference_params is not None and self.core_attention.context_ranks.size > 1:
            raise NotImplementedError(
                f"{_NAME}: inference_params must be None with a cp_group of "
                f"{self.core_attention.context_ranks.size} ranks, got some"
            )
        if inference_params is not None and self.attention_type == "cross":
            raise ValueError(
                f"{_NAME}: inference_params must be None in cross attention, whose keys are those "
                "of encoder_output in each call, got some"
            )
        rotation = None
        key_starts = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
        if rotary_pos_emb is not None:
            starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            rotation = self._rotation(rotary_pos_emb, inference_params, starts, hidden_states)
            if self.core_attention.context_ranks.size > 1:
                both = (hidden_states, hidden_states if encoder_output is None else encoder_output)
                rotation, key_starts = self._own_rotation(rotation, both, (starts, key_starts))
        q, k, v, norm, residual = self._to_heads(
            hidden_states, encoder_output, is_first_microbatch, rotation, key_starts,
            return_residual,
        )  # fmt: skip
        core = self.core_attention
        if inference_params is not None:
            cached = extended(
                _NAME, inference_params, self.layer_number, k, v, self.qkv_format, self.training
            )
            q, k, v = without_gradient(_NAME, q, self.training), cached.keys, cached.values
            attn_mask_type = cached.mask_type(
                _NAME, core.attn_mask_type if attn_mask_type is None else attn_mask_type
            )
            if cached.step is not None:
                attention_mask = cu_seqlens_q_padded = None
                cu_seqlens_kv_padded = cached.key_starts
                cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = cached.lengths()
        if core_attention_bias_type == "alibi" and alibi_slopes is None and core.tp_size > 1:
            alibi_slopes = standard_slopes(
                _NAME, core.num_attention_heads, core.tp_size, self.proj.tp_group,
                hidden_states.device,
            )  # fmt: skip
        context = core(
            q, k, v, attention_mask, None, cu_seqlens_q, cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=attn_mask_type, window_size=window_size,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            checkpoint_core_attention=checkpoint_core_attention,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        )  # fmt: skip
        more: list[Any] = []
        if self.return_max_logit:
            context, *more = context
        proj: Any = self.proj
        if add_residual and type(proj) is self._linear and not is_observed(proj):
            projected, residual = proj.forward_adding(context, residual, is_first_microbatch)
        else:
            projected = proj(context, is_first_microbatch=is_first_microbatch)
        if self.return_layernorm_output and self.input_layernorm:
            more.insert(0, norm)
        if more:
            projected = (*projected, *more) if self.return_bias else (projected, *more)
        return projected, residual

    def _to_heads(
        self,
        hidden_states: torch.Tensor,
        encoder_output: torch.Tensor | None,
        is_first_microbatch: bool | None,
        rotation: Rotation | None,
        cu_seqlens_kv: torch.Tensor | None,
        return_residual: bool,
    ) -> tuple[Any, ...]:
        """Projects the inputs to heads, and normalises and rotates queries and keys.

        Returns ``(q, k, v, norm, residual)``: heads [..., heads, size]; the norm's result or None;
        ``hidden_states``, or the same values as an output of the norm's autograd node.
        """
        modules, layout = self._modules, self._heads
        q_norm: Any = modules["q_norm"]
        k_norm: Any = modules["k_norm"]
        late = rotation if q_norm is not None and self.qk_norm_before_rope else None
        early = None if late is not None else rotation
        # The projection splits its output itself unless a rotation copies it anyway.
        wanted = None if early is not None or torch.compiler.is_compiling() else layout
        norm, residual = None, hidden_states
        if self.input_layernorm:
            first: Any = modules["layernorm_qkv" if encoder_output is None else "layernorm_query"]
            options: dict[str, Any] = {}
            if wanted is not None and encoder_output is None and isinstance(first, LayerNormLinear):
                options["heads"] = wanted
            if takes_residual(first):
                x, total = first.forward_with_residual(
                    hidden_states, None, is_first_microbatch, return_residual, **options
                )
                residual = residual_of(hidden_states, total)
            else:
                x = first(hidden_states, is_first_microbatch=is_first_microbatch)
            if self.return_layernorm_output:
                x, norm = x
        else:
            first = modules["qkv" if encoder_output is None else "query_layer"]
            own = wanted if encoder_output is None else None
            x = self._projected(first, hidden_states, own, is_first_microbatch)
        if encoder_output is None:
            q, k, v = x if isinstance(x, tuple) else split_heads(x, layout, early)
        else:
            y = self._projected(modules["key_value"], encoder_output, wanted, is_first_microbatch)
            other = early
            if early is not None:
                other = early._replace(cu_seqlens=_key_starts(early, cu_seqlens_kv))
            k, v = y if isinstance(y, tuple) else split_heads(y, layout, other)
            q = x.unflatten(-1, (-1, layout.size))
            if early is not None:
                q = rope(q, early.queries, **early.options(layout.qkv_format))
        if q_norm is not None:
            q, k = q_norm(q), k_norm(k)
            if late is not None:
                options = late.options(layout.qkv_format)
                q = rope(q, late.queries, **options)
                if encoder_output is not None:
                    options["cu_seqlens"] = _key_starts(late, cu_seqlens_kv)
                k = rope(k, late.keys, **options)
        return q, k, v, norm, residual

    def _rotation(
        self,
        rotary_pos_emb: Any,
        params: InferenceParams | None,
        cu_seqlens: torch.Tensor | None,
        hidden_states: torch.Tensor,
    ) -> Rotation | None:
        """Returns the rotation of the tokens of a call."""
        packed = cu_seqlens if self.qkv_format == "thd" else None
        interleaved = self.rotary_pos_interleaved
        if params is None:
            return rotation_of(_NAME, rotary_pos_emb, interleaved, 0, packed)
        step = params.step_of(_NAME, "hidden_states", hidden_states, self.qkv_format)
        if step is None:
            start = params.sequence_len_offset
            return rotation_of(_NAME, rotary_pos_emb, interleaved, start, packed)
        start = step.before[0] if step.is_even else 0
        rotation = rotation_of(_NAME, rotary_pos_emb, interleaved, start, None)
        if rotation is None:
            return None
        device, angles = rotation.queries.device, min(len(rotation.queries), len(rotation.keys))
        announced: Any = params.step_lengths
        if announced.longest > angles:
            raise ValueError(
                f"{_NAME}: rotary_pos_emb must have angles for {announced.longest} positions, "
                f"got {angles}"
            )
        params.note_room(longest=angles)
        return rotation._replace(
            starts=None if step.is_even else step.starts(device),
            cu_seqlens=step.cu_new(device) if self.qkv_format == "thd" else None,
        )

    def _own_rotation(
        self,
        rotation: Rotation | None,
        inputs: tuple[torch.Tensor, torch.Tensor],
        starts: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> tuple[Rotation | None, torch.Tensor | None]:
        """Returns the rotation of this rank's tokens, and ``cu_seqlens`` to rotate keys with.

        ``starts`` are the ``cu_seqlens`` of whole queries and keys.
        """
        if rotation is None:
            return None, starts[1]
        ranks, packed = self.core_attention.context_ranks, self.qkv_format == "thd"
        proj: Any = self.proj
        parts = proj.tp_size if proj.sequence_parallel else 1  # of dimension 0
        where = self.qkv_format.find("s")
        queries, keys = (x.shape[max(where, 0)] * (1 if where > 0 else parts) for x in inputs)
        if not packed:
            starts = (None, None)
        elif starts[1] is None:
            starts = (starts[0], starts[0])
        own = own_rotation(_NAME, rotation, (queries, keys), starts, ranks.size, ranks.rank)
        return own, one_sequence(keys, inputs[1].device) if packed else None

    def _projected(
        self,
        module: Any,
        x: torch.Tensor,
        heads: HeadLayout | None,
        is_first_microbatch: bool | None,
    ) -> Any:
        """Calls a projection to heads; it splits its output if no hook is to see the output."""
        if heads is not None and type(module) is self._linear and not is_observed(module):
            return module.forward_to_heads(x, heads, is_first_microbatch)
        return module(x, is_first_microbatch=is_first_microbatch)


def residual_of(hidden_states: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    """Returns ``total`` if it has the dtype of ``hidden_states``, else ``hidden_states``."""
    if total is None or total.dtype is not hidden_states.dtype:
        return hidden_states
    return total


def _key_starts(rotation: Rotation, cu_seqlens_kv: torch.Tensor | None) -> torch.Tensor | None:
    """Returns ``cu_seqlens`` for rotating the keys of cross attention; None but for thd."""
    if rotation.cu_seqlens is None or cu_seqlens_kv is None:
        return rotation.cu_seqlens
    return cu_seqlens_kv
