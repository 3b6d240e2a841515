"""MultiLatentAttention: queries, keys and values from low-rank latents, as in DeepSeek-V3."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...fp8.delayed.ranks import number_layer
from ...runtime.invariance import is_batch_invariant
from ...runtime.named_arguments import check_count, named_arguments
from ...runtime.tracing import is_traced
from .._core.arguments import VAGUE, checked_eps, checked_number, explain_attention
from .._core.norm_parameters import check_normalization
from .._core.parallel import CompositeModule, checked_tp_size, divided, tag
from .._core.recompute import Recomputed
from ..layer_norm import LayerNorm
from ..layer_norm_linear import LayerNormLinear
from ..linear import Linear
from ..rms_norm import RMSNorm
from .dot_product import DotProductAttention
from .inference_params import InferenceParams, without_gradient
from .latent_cache import (
    attend_to_latents,
    extended_latents,
    is_absorbing_faster,
    plain_weight,
    step_options,
)
from .latent_heads import Turn, latent_heads, rotated_queries, shared_rows
from .latent_names import rename
from .masks import Mask
from .multihead import MultiheadAttention
from .qkv_heads import Rotation
from .rotary_yarn import yarn_factor

__all__ = ["MultiLatentAttention"]

_NAME = "MultiLatentAttention"
_Init = Callable[[torch.Tensor], Any] | None


class MultiLatentAttention(CompositeModule):
    """Multi-head latent attention (MLA), as in DeepSeek-V2 and V3.

    A down projection computes the latents of queries and of keys and values, and a rotary part of
    the keys that all heads share. Up projections compute the heads from the latents. Each head of a
    query or key has ``qk_head_dim`` elements from its latent and ``qk_pos_emb_head_dim`` rotated
    elements. During generation the cache holds the latents and the rotary part, to which the
    queries attend; see ``forward``.

    Submodules (prefixes of the state dict): ``linear_qkv_down_proj``, whose rows are the latents of
    queries, then of keys and values, then the rotary part; ``linear_q_up_proj`` and
    ``linear_kv_up_proj`` with their norms; ``linear_proj``. Without ``q_lora_rank``,
    ``linear_q_proj`` and ``linear_kv_down_proj`` replace the first two, and ``input_layernorm`` is
    a separate ``norm``. State dicts of Megatron-Core (with separate ``linear_q_down_proj`` and
    ``linear_kv_down_proj``) and of Hugging Face's DeepSeek-V3 can be loaded, too.

    Args:
        hidden_size: features of the input and of the output.
        num_attention_heads: number of heads, over all ranks.
        q_lora_rank: size of the queries' latent; None projects queries from the input.
        kv_lora_rank: size of the latent of keys and values.
        qk_head_dim, qk_pos_emb_head_dim: elements of a query or key head without and with rotation.
        v_head_dim: elements of a value head.
        attention_dropout, attn_mask_type, window_size, layer_number, qkv_format,
            get_rng_state_tracker: as in ``DotProductAttention``; layer_number also names the layer
            in ``inference_params``.
        softmax_scale: multiplier of the scores; None is ``1 / sqrt(qk_head_dim +
            qk_pos_emb_head_dim)``, times the square of YaRN's factor for ``mscale_all_dim``.
        rotary_scaling_factor, mscale, mscale_all_dim: YaRN parameters, as in DeepSeek's
            configurations. The factor for m is ``0.1 * m * ln(rotary_scaling_factor) + 1``, at
            least 1. Rotated parts are multiplied by the factor for ``mscale`` divided by that for
            ``mscale_all_dim``.
        rotary_pos_interleaved: rotate pairs of elements (2i, 2i + 1), as DeepSeek's weights expect;
            else pairs (i, i + qk_pos_emb_head_dim / 2).
        input_layernorm: normalise the input first.
        normalization, layernorm_epsilon, zero_centered_gamma: options of all norms, as in
            ``LayerNormLinear``.
        bias: down projections and the output projection have biases.
        return_max_logit: also return the largest logit of each of this rank's heads.
        recompute_up_proj: recompute queries, keys and values from the latents in backward, instead
            of saving them; not supported with padding masks.
        init_method, output_layer_init_method: initialise the weights of the projections, and of the
            output projection; default N(0, 0.023^2).
        fuse_wgrad_accumulation, params_dtype, device: as in ``Linear``.
        name: name of the module in reports.
        set_parallel_mode: split the heads over the ranks of ``tp_group``; down projections are
            replicated.
        sequence_parallel, tp_group, tp_size: as in ``Linear``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a size is below 1, ``qk_pos_emb_head_dim`` is odd, or an option is unknown.

    Names follow Megatron-Core's ``MLATransformerConfig`` and ``MLASelfAttention``.
    """

    return_bias = False
    linear_qkv_down_proj: Linear | LayerNormLinear
    linear_q_up_proj: LayerNormLinear
    linear_q_proj: Linear
    linear_kv_down_proj: Linear
    linear_kv_up_proj: LayerNormLinear
    linear_proj: Linear
    norm: LayerNorm | RMSNorm | None

    @named_arguments()
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = 512,
        qk_head_dim: int = 128,
        qk_pos_emb_head_dim: int = 64,
        v_head_dim: int = 128,
        attention_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        init_method: _Init = None,
        output_layer_init_method: _Init = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        *,
        softmax_scale: float | None = None,
        rotary_scaling_factor: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        rotary_pos_interleaved: bool = True,
        input_layernorm: bool = False,
        normalization: str = "RMSNorm",
        zero_centered_gamma: bool = False,
        bias: bool = False,
        qkv_format: str = "sbhd",
        return_max_logit: bool = False,
        recompute_up_proj: bool = False,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        set_parallel_mode: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        name: str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        for key, size in (
            ("hidden_size", hidden_size),
            ("num_attention_heads", num_attention_heads),
            ("q_lora_rank", 1 if q_lora_rank is None else q_lora_rank),
            ("kv_lora_rank", kv_lora_rank),
            ("qk_head_dim", qk_head_dim),
            ("qk_pos_emb_head_dim", qk_pos_emb_head_dim),
            ("v_head_dim", v_head_dim),
        ):
            check_count(_NAME, key, size)
        if qk_pos_emb_head_dim % 2:
            raise ValueError(
                f"{_NAME}: qk_pos_emb_head_dim must be even, got {qk_pos_emb_head_dim}"
            )
        check_normalization(_NAME, normalization)
        ranks = checked_tp_size(_NAME, tp_group, tp_size) if set_parallel_mode else 1
        own_heads = divided(_NAME, "num_attention_heads", num_attention_heads, ranks)
        factor = checked_number(_NAME, "rotary_scaling_factor", rotary_scaling_factor)
        of_angles = yarn_factor(factor, checked_number(_NAME, "mscale", mscale))
        of_scores = yarn_factor(factor, checked_number(_NAME, "mscale_all_dim", mscale_all_dim))
        super().__init__()
        self.qkv_format = qkv_format
        self.layer_number = layer_number
        self.input_layernorm = input_layernorm
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.recompute_up_proj = recompute_up_proj
        self.sequence_parallel = sequence_parallel and ranks > 1
        self.tp_size, self.name = ranks, name
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.qk_head_dim, self.v_head_dim = qk_head_dim, v_head_dim
        self.qk_pos_emb_head_dim = qk_pos_emb_head_dim
        self._rotary_factor = of_angles / of_scores
        head = qk_head_dim + qk_pos_emb_head_dim
        if softmax_scale is None:
            softmax_scale = of_scores * of_scores / math.sqrt(head)
        core: dict[str, Any] = {
            "attention_dropout": attention_dropout,
            "qkv_format": qkv_format,
            "attn_mask_type": attn_mask_type,
            "window_size": window_size,
            "softmax_scale": softmax_scale,
            "get_rng_state_tracker": get_rng_state_tracker,
            "layer_number": layer_number,
            "return_max_logit": return_max_logit,
        }
        self.core_attention = DotProductAttention(own_heads, (head, v_head_dim), **core)
        # Of one key and value, the latent, for all heads.
        self.latent_attention = DotProductAttention(
            own_heads, (kv_lora_rank + qk_pos_emb_head_dim, kv_lora_rank), 1, **core
        )
        norm: dict[str, Any] = {
            "eps": checked_eps(_NAME, "layernorm_epsilon", layernorm_epsilon),
            "zero_centered_gamma": zero_centered_gamma,
        }
        shared: dict[str, Any] = {
            "init_method": init_method,
            "params_dtype": params_dtype,
            "device": device,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }
        split: dict[str, Any] = {
            "get_rng_state_tracker": get_rng_state_tracker,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "sequence_parallel": sequence_parallel,
        }

        def add(key: str, inner: int, outer: int, mode: str | None, kind: Any, **more: Any) -> None:
            """Adds the linear layer called ``key``."""
            parallel = {"parallel_mode": mode, **split} if set_parallel_mode and mode else {}
            normed = {"normalization": normalization, **norm} if kind is LayerNormLinear else {}
            options = {"bias": False, **shared, **normed, **parallel, **more}
            layer = kind(inner, outer, name=f"{name}.{key}" if name else key, **options)
            self.add_module(key, layer)

        down, rows = kv_lora_rank + qk_pos_emb_head_dim, num_attention_heads * head
        own_norm = None
        if q_lora_rank is not None:
            kind = LayerNormLinear if input_layernorm else Linear
            rank = q_lora_rank
            add("linear_qkv_down_proj", hidden_size, rank + down, None, kind, bias=bias)
            add("linear_q_up_proj", rank, rows, "column", LayerNormLinear)
        else:
            if input_layernorm:
                norms: dict[str, Any] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
                own_norm = norms[normalization](
                    hidden_size, **norm, params_dtype=params_dtype, device=device
                )
            add("linear_q_proj", hidden_size, rows, "column", Linear)
            add("linear_kv_down_proj", hidden_size, down, None, Linear, bias=bias)
        self.register_module("norm", own_norm)
        kv_rows = num_attention_heads * (qk_head_dim + v_head_dim)
        add("linear_kv_up_proj", kv_lora_rank, kv_rows, "column", LayerNormLinear)
        add(
            "linear_proj", num_attention_heads * v_head_dim, hidden_size, "row", Linear, bias=bias,
            init_method=output_layer_init_method, save_original_input=True,
        )  # fmt: skip
        for module in self._replicated():
            for parameter in module.parameters():
                tag(parameter, None, self.sequence_parallel)
        number_layer(self, layer_number)

    @property
    def proj(self) -> Any:
        """Returns the output projection under the name that ``TransformerLayer`` reads."""
        return self.linear_proj

    def _replicated(self) -> list[torch.nn.Module]:
        """Returns the modules that are the same on all tensor-parallel ranks."""
        names = ("norm", "linear_qkv_down_proj", "linear_kv_down_proj")
        return [m for name in names if (m := self._modules.get(name)) is not None]

    def _call_children(self, method: str, *args: Any) -> None:
        cores = [self.core_attention, self.latent_attention]
        apart = [] if method == "reset_parameters" else [*self._replicated(), *cores]
        for child in self.children():
            call: Any = getattr(child, method, None)
            if call is not None and not any(child is one for one in apart):
                call(*args)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        rename(state_dict, prefix, self.q_lora_rank is not None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        *,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Applies the module; returns [..., hidden_size] in the layout of ``hidden_states``.

        With ``return_max_logit`` it returns that and the largest logits, [h].

        Args:
            hidden_states: [s, b, hidden_size], [b, s, hidden_size] or [t, hidden_size], depending
                on ``qkv_format``, in the dtype of the parameters: fp32, fp16 or bf16.
            rotary_pos_emb: angles [max_seq, 1, 1, qk_pos_emb_head_dim] in fp32, fp16 or bf16, such
                as from ``RotaryPositionEmbedding``; None does not rotate.
            inference_params: cache of earlier tokens, as in ``MultiheadAttention.forward``, with
                ``kv_lora_rank + qk_pos_emb_head_dim`` elements per token. A few new tokens attend
                to the cached latents directly: the up projection of keys is applied to the queries,
                and that of values to the result. For more tokens, keys and values are computed from
                the latents. Both run in bf16 or fp32.
            is_first_microbatch: True caches the FP8 weights, False reuses them, None casts them in
                each call.
            attention_mask, attn_mask_type, window_size, checkpoint_core_attention,
                core_attention_bias_type, core_attention_bias, cu_seqlens_q, cu_seqlens_kv,
                max_seqlen_q, max_seqlen_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded: as in
                ``DotProductAttention.forward``.

        Raises:
            TypeError: a tensor has another dtype than those above.
            ValueError: a shape, mask or option does not match.
            NotImplementedError: ``inference_params`` is given under ``batch_invariant``, or with
                context-parallel ranks.
        """
        options: dict[str, Any] = {
            "attention_mask": attention_mask, "attn_mask_type": attn_mask_type,
            "window_size": window_size, "checkpoint_core_attention": checkpoint_core_attention,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias, "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv, "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv, "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        }  # fmt: skip
        ranks = self.core_attention.context_ranks.size
        if inference_params is not None and ranks > 1:
            raise NotImplementedError(
                f"{_NAME}: inference_params must be None with a cp_group of {ranks} ranks, got some"
            )
        try:
            starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            turn = self._turn(rotary_pos_emb, inference_params, starts, hidden_states)
            q, latent, pe = self._down(hidden_states, is_first_microbatch)
            args = (q, latent, pe, turn, is_first_microbatch, options)
            if inference_params is None:
                context = self._attend(*args)
            else:
                context = self._attend_cached(inference_params, *args)
            largest = None
            if self.return_max_logit:
                context, largest = context
            out: torch.Tensor = self.linear_proj(context, is_first_microbatch=is_first_microbatch)
            return out if largest is None else (out, largest)
        except VAGUE as error:
            call = {
                "hidden_states": hidden_states, "encoder_output": None,
                "attention_mask": attention_mask, "rotary_pos_emb": rotary_pos_emb,
                "core_attention_bias": core_attention_bias, "inference_params": inference_params,
            }  # fmt: skip
            explain_attention(self, error, ("qkv_format", self.qkv_format), call)
            raise

    # Positions of a call's tokens are counted as there, and context-parallel ranks set.
    return_max_logit: Any = MultiheadAttention.return_max_logit
    _rotation: Any = MultiheadAttention._rotation
    _own_rotation: Any = MultiheadAttention._own_rotation
    set_context_parallel_group: Any = MultiheadAttention.set_context_parallel_group

    def _turn(
        self,
        rotary_pos_emb: Any,
        params: InferenceParams | None,
        starts: torch.Tensor | None,
        hidden_states: torch.Tensor,
    ) -> Turn | None:
        """Returns the rotation of the tokens of a call."""
        if rotary_pos_emb is None:
            return None
        found: Rotation = self._rotation(rotary_pos_emb, params, starts, hidden_states)
        if self.core_attention.context_ranks.size > 1:
            found, _ = self._own_rotation(found, (hidden_states,) * 2, (starts, starts))
        angles, size = found.queries, self.qk_pos_emb_head_dim
        if found.keys is not angles or angles.shape[-1] not in (size, size // 2):
            raise ValueError(
                f"{_NAME}: rotary_pos_emb must be one tensor of angles with {size} columns, got "
                f"{angles.shape[-1]} in {1 if found.keys is angles else 2} tensors"
            )
        rest = (found.interleaved, found.start, found.starts, found.cu_seqlens)
        if self._rotary_factor == 1.0:
            return Turn(angles, None, None, *rest)
        factor = self._rotary_factor
        return Turn(None, angles.cos() * factor, angles.sin() * factor, *rest)

    def _down(
        self, x: torch.Tensor, is_first_microbatch: bool | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what the queries are projected from, the latent, and the rotary part of keys."""
        sizes = [self.kv_lora_rank, self.qk_pos_emb_head_dim]
        if self.q_lora_rank is not None:
            down = self.linear_qkv_down_proj(x, is_first_microbatch=is_first_microbatch)
            q, latent, pe = down.split([self.q_lora_rank, *sizes], -1)
        else:
            q = x if self.norm is None else self.norm(x)
            down = self.linear_kv_down_proj(q, is_first_microbatch=is_first_microbatch)
            latent, pe = down.split(sizes, -1)
        return q, latent, self.whole(pe)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all tensor-parallel ranks, for this rank's heads."""
        group, split = self.linear_proj.tp_group, self.sequence_parallel
        return x if self.tp_size == 1 else shared_rows(x, group, split)

    def _query_layer(self) -> Linear | LayerNormLinear:
        return self.linear_q_proj if self.q_lora_rank is None else self.linear_q_up_proj

    def queries(self, q: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        """Returns query heads [..., h, qk_head_dim + qk_pos_emb_head_dim], not rotated.

        Args:
            q: as in ``heads``.
            is_first_microbatch: as in ``forward``.
        """
        out: torch.Tensor = self._query_layer()(q, is_first_microbatch=is_first_microbatch)
        return out.unflatten(-1, (-1, self.qk_head_dim + self.qk_pos_emb_head_dim))

    def heads(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        pe: torch.Tensor,
        turn: Turn | None,
        is_first_microbatch: bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values [..., h, size] from the results of the down projections.

        Args:
            q: what the query layer takes, [..., q_lora_rank], or [..., hidden_size] without it.
            latent: [..., kv_lora_rank].
            pe: rotary part of the keys of all heads, [..., qk_pos_emb_head_dim], not yet rotated.
            turn: rotation of the rotary parts; None does not rotate.
            is_first_microbatch: as in ``forward``.
        """
        kv = self.linear_kv_up_proj(latent, is_first_microbatch=is_first_microbatch)
        kv = kv.unflatten(-1, (-1, self.qk_head_dim + self.v_head_dim))
        return latent_heads(self.queries(q, is_first_microbatch), kv, pe, self.qkv_format, turn)

    def _attend(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        pe: torch.Tensor,
        turn: Turn | None,
        is_first_microbatch: bool | None,
        options: dict[str, Any],
    ) -> Any:
        """Returns what ``core_attention`` returns for the tokens of a call."""

        def heads() -> tuple[torch.Tensor, ...]:
            return self.heads(q, latent, pe, turn, is_first_microbatch)

        if not (self.recompute_up_proj and torch.is_grad_enabled()) or q.is_meta:
            return self.core_attention(*heads(), **options)
        if torch.compiler.is_compiling() or is_traced():
            # A graph repeats whatever it does not save, here the attention, too.
            return checkpoint(lambda: self.core_attention(*heads(), **options), use_reentrant=False)
        recomputed = Recomputed((self._query_layer(), self.linear_kv_up_proj), heads)
        with recomputed.saving():
            assert recomputed.results is not None
            return self.core_attention(*recomputed.results, **options)

    def _attend_cached(
        self,
        params: InferenceParams,
        q: torch.Tensor,
        latent: torch.Tensor,
        pe: torch.Tensor,
        turn: Turn | None,
        is_first_microbatch: bool | None,
        options: dict[str, Any],
    ) -> Any:
        """Does what ``_attend`` does, and the tokens also attend to the cached ones."""
        if is_batch_invariant():
            raise NotImplementedError(
                f"{_NAME}: inference_params must be None under batch_invariant, because tokens "
                "that attend to latents are summed in another order, got some"
            )
        form, norm = self.qkv_format, self.whole(self.linear_kv_up_proj.norm_of(latent))
        part = pe.unsqueeze(-2) if turn is None else turn.of(pe.unsqueeze(-2), form)
        cached, is_first = extended_latents(
            _NAME, params, self.layer_number, norm, part, form, self.training
        )
        mask_type = options["attn_mask_type"] or self.core_attention.attn_mask_type
        options = options | step_options(_NAME, cached, mask_type)
        if is_first:
            query, keys, values = self.heads(q, latent, pe, turn, is_first_microbatch)
            query = without_gradient(_NAME, query, self.training)
            return self.core_attention(query, keys, values, **options)
        query = without_gradient(_NAME, self.queries(q, is_first_microbatch), self.training)
        query = rotated_queries(query, self.qk_head_dim, form, turn)
        weight: Any = self.linear_kv_up_proj.weight
        keys, size, inner = cached.keys, self.kv_lora_rank, self.qk_head_dim + self.v_head_dim
        tokens = cached.step.longest_new if cached.step else q.shape[form.index("s")]
        if not is_absorbing_faster(tokens, size, inner):
            kv = functional.linear(keys[..., 0, :size], plain_weight(weight, keys.dtype))
            kv, pe = kv.unflatten(-1, (-1, inner)), keys[..., 0, size:]
            return self.core_attention(*latent_heads(query, kv, pe, form, None), **options)
        largest: list[torch.Tensor] = []

        def attend(absorbed: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
            joined = torch.cat((absorbed, rotated), -1)
            found: Any = self.latent_attention(joined, keys, keys[..., :size], **options)
            if self.return_max_logit:
                found, *largest[:] = found
            return found.view(absorbed.shape)

        out = attend_to_latents(attend, query, weight, self.qk_pos_emb_head_dim)
        return (out, *largest) if largest else out
