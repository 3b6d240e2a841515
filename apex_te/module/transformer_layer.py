"""TransformerLayer: self attention, in decoders cross attention, and an MLP, with residuals."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch.nn import functional

from ..fp8.delayed.ranks import number_layer
from ..ops.bias_dropout_add import bias_dropout_add
from ..runtime.invariance import is_batch_invariant
from ..runtime.named_arguments import did_you_mean, named_arguments
from ._core.arguments import (
    VAGUE,
    autocast_dtype,
    checked_eps,
    checked_groups,
    checked_number,
    explain_attention,
    has_passed,
)
from ._core.parallel import CompositeModule, checked_tp_size, takes_residual
from .attention.inference_params import InferenceParams
from .attention.latent import MultiLatentAttention
from .attention.masks import Mask, mask_type, window
from .attention.multihead import MultiheadAttention, residual_of
from .layer_norm import LayerNorm
from .layer_norm_mlp import LayerNormMLP
from .rms_norm import RMSNorm

__all__ = ["TransformerLayer"]

_NAME = "TransformerLayer"
# Arguments of MultiheadAttention.forward after hidden_states, in order.
_ATTENTION = tuple(inspect.signature(MultiheadAttention.forward).parameters)[2:]
_Init = Callable[[torch.Tensor], Any] | None


def _check_kind(layer_type: str, parallel_attention_mlp: bool, post_norm: bool) -> None:
    """Checks that ``layer_type`` is known, and that parallel branches are possible with it."""
    if layer_type not in ("encoder", "decoder"):
        raise ValueError(
            f"{_NAME}: layer_type must be 'encoder' or 'decoder', got {layer_type!r}"
            + did_you_mean(layer_type, ("encoder", "decoder"))
        )
    if parallel_attention_mlp and (post_norm or layer_type == "decoder"):
        raise ValueError(
            f"{_NAME}: parallel_attention_mlp must be False with layer_type 'decoder' or "
            "apply_residual_connection_post_layernorm=True, got True"
        )


def _check_attention(module: Any, wanted: dict[str, Any]) -> None:
    """Checks that a module given as ``self_attention`` has what the layer has by these names."""
    if not isinstance(module, (MultiheadAttention, MultiLatentAttention)):
        raise TypeError(
            f"{_NAME}: self_attention must be a MultiLatentAttention, a MultiheadAttention or "
            f"None, got {type(module).__name__}"
        )
    for key, value in wanted.items():
        actual = getattr(module, key, False)
        if actual != value:
            raise ValueError(
                f"{_NAME}: self_attention must have {key} {value!r} with the layer's options, "
                f"got {actual!r}"
            )


class TransformerLayer(CompositeModule):
    """One layer of a Transformer, in FP8 inside an enabled ``fp8_autocast`` region.

    The defaults make a GPT layer. For BERT set ``apply_residual_connection_post_layernorm`` and
    ``output_layernorm``: attention then reads the layer's input without a norm, that input is its
    residual, the MLP's residual is the output of the MLP's norm, and a norm ends the layer. For T5
    use GPT layers with ``self_attn_mask_type="padding"`` as encoders, and ``layer_type="decoder"``
    for decoders.

    Submodules (prefixes of the state dict): ``self_attention``, ``inter_attention`` (decoders),
    ``layernorm_mlp``, ``layernorm`` (with ``output_layernorm``).

    Args:
        hidden_size, num_attention_heads, kv_channels, num_gqa_groups: as in ``MultiheadAttention``.
        ffn_hidden_size: as in ``LayerNormMLP``.
        layernorm_epsilon, normalization, zero_centered_gamma: options of every norm, as in
            ``LayerNormLinear``.
        hidden_dropout: probability that an element of attention's or the MLP's result is dropped
            before it is added to the residual.
        attention_dropout: dropout probability of attention weights.
        init_method, output_layer_init_method: initialise the weights of QKV and FC1, and of PROJ
            and FC2; default N(0, 0.023^2).
        layer_number: position in the model, from 1; names the layer in ``inference_params``.
        self_attn_mask_type, window_size: as in ``DotProductAttention``.
        enc_dec_attn_mask_type, enc_dec_window_size: mask type and window of a decoder's cross
            attention. Type None means ``"padding"`` in calls with ``enc_dec_attn_mask`` or
            ``cu_seqlens_kv``, else ``"no_mask"``.
        softmax_type: as in ``DotProductAttention``, for self and cross attention.
        return_max_logit: forward also returns the largest logit of each of this rank's heads.
        apply_query_key_layer_scaling: as in ``DotProductAttention``; changes only rounding.
        attention_softmax_in_fp32: no effect; the softmax is always computed in fp32.
        seq_length, micro_batch_size: no effect.
        apply_residual_connection_post_layernorm: use the norms' outputs instead of their inputs as
            residuals.
        output_layernorm: normalise the layer's output instead of attention's input.
        parallel_attention_mlp: attention and MLP both read the layer's input.
        layer_type: ``"encoder"`` or ``"decoder"``, which has cross attention.
        drop_path_rate: probability that a sample skips a branch (attention, cross attention, MLP)
            while training; results of other samples are divided by 1 - rate.
        fuse_qkv_params, qkv_weight_interleaved, qk_norm_type, qk_norm_eps, qk_norm_before_rope,
            rotary_pos_interleaved: as in ``MultiheadAttention``.
        bias: linear layers have biases.
        activation, activation_params: as in ``LayerNormMLP``.
        attn_input_format: layout of the hidden states, ``"sbhd"``: [s, b, h], ``"bshd"``: [b, s,
            h], ``"thd"``: [t, h], packed sequences.
        fuse_wgrad_accumulation, params_dtype, device: as in ``Linear``.
        get_rng_state_tracker: function that returns a tracker of random states; attention dropout
            draws inside its ``fork()``.
        self_attention: a ``MultiLatentAttention`` or ``MultiheadAttention`` to use, whose options
            override those above; None makes the latter. Its ``qkv_format`` must equal
            ``attn_input_format``, its ``input_layernorm`` must be ``not output_layernorm``, and its
            ``return_max_logit`` must be that of the layer.
        name: name of the module in reports.
        set_parallel_mode: split heads and ``ffn_hidden_size`` over the ranks of ``tp_group``.
        sequence_parallel, tp_group, tp_size: as in ``Linear``. With sequence_parallel the hidden
            states are this rank's slice of dimension 0, and hidden dropout also draws from the
            tracker of ``get_rng_state_tracker``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number of heads or ranks does not divide what it splits, an option is unknown
            or out of range, or options exclude each other: ``fuse_wgrad_accumulation`` needs
            ``fuse_qkv_params``, ``parallel_attention_mlp`` an encoder layer without
            ``apply_residual_connection_post_layernorm``, and the options ``enc_dec_*`` a decoder.

    Interface, defaults and the order of arguments follow TransformerEngine's TransformerLayer.
    """

    # The classes of the submodules, for subclasses to replace.
    _classes: ClassVar[dict[str, type[Any]]] = {
        "attention": MultiheadAttention,
        "mlp": LayerNormMLP,
        "LayerNorm": LayerNorm,
        "RMSNorm": RMSNorm,
    }

    @named_arguments(qkv_format="attn_input_format", attn_mask_type="self_attn_mask_type")
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: _Init = None,
        output_layer_init_method: _Init = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        *,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Sequence[int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        apply_query_key_layer_scaling: bool = True,
        attention_softmax_in_fp32: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        parallel_attention_mlp: bool = False,
        attn_input_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        rotary_pos_interleaved: bool = False,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        device: torch.device | str | int | None = None,
        activation_params: dict[str, float] | None = None,
        self_attention: torch.nn.Module | None = None,
    ) -> None:
        is_decoder = layer_type == "decoder"
        post_norm = apply_residual_connection_post_layernorm
        _check_kind(layer_type, parallel_attention_mlp, post_norm)
        if not is_decoder and not (enc_dec_attn_mask_type is enc_dec_window_size is None):
            raise ValueError(
                f"{_NAME}: enc_dec_attn_mask_type and enc_dec_window_size must be None with "
                f"layer_type 'encoder', got {enc_dec_attn_mask_type!r} and {enc_dec_window_size!r}"
            )
        if enc_dec_attn_mask_type is not None:
            mask_type(_NAME, enc_dec_attn_mask_type, "enc_dec_attn_mask_type")
        window(_NAME, enc_dec_window_size, "enc_dec_window_size")
        for key, value in (("hidden_dropout", hidden_dropout), ("drop_path_rate", drop_path_rate)):
            if not 0.0 <= checked_number(_NAME, key, value) <= 1.0:
                raise ValueError(f"{_NAME}: {key} must be from 0 to 1, got {value}")
        super().__init__()
        self.layer_type = layer_type
        self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.hidden_dropout = hidden_dropout
        self.drop_path_rate = drop_path_rate
        self.parallel_attention_mlp = parallel_attention_mlp
        self.output_layernorm = output_layernorm
        self.apply_residual_connection_post_layernorm = post_norm
        self.attn_input_format = attn_input_format
        ranks = checked_tp_size(_NAME, tp_group, tp_size) if set_parallel_mode else 1
        self.sequence_parallel = sequence_parallel and ranks > 1
        self.get_rng_state_tracker = get_rng_state_tracker
        # Without a dropout between, the GEMM adds its bias and a norm's kernel the residual.
        drops = hidden_dropout > 0.0 or drop_path_rate > 0.0
        shared: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params_dtype": params_dtype,
            "zero_centered_gamma": zero_centered_gamma,
            "normalization": normalization,
            "bias": bias,
            "return_bias": drops and not parallel_attention_mlp,
            "return_layernorm_output": post_norm,
            "get_rng_state_tracker": get_rng_state_tracker,
            "set_parallel_mode": set_parallel_mode,
            "sequence_parallel": sequence_parallel,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "device": device,
        }
        eps = checked_eps(_NAME, "layernorm_epsilon", layernorm_epsilon)

        def named(key: str) -> dict[str, str]:
            return {"name": f"{name}.{key}" if name else key}

        attention: dict[str, Any] = {
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": eps,
            "layer_number": layer_number,
            "num_gqa_groups": checked_groups(_NAME, num_attention_heads, num_gqa_groups),
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "qkv_format": attn_input_format,
            "apply_query_key_layer_scaling": apply_query_key_layer_scaling,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "softmax_type": softmax_type,
            "return_max_logit": return_max_logit,
            **shared,
        }
        if self_attention is None:
            self_attention = self._classes["attention"](
                hidden_size,
                num_attention_heads,
                attn_mask_type=self_attn_mask_type,
                window_size=window_size,
                input_layernorm=not output_layernorm,
                **named("self_attention"),
                **attention,
            )
        else:
            wanted = {"qkv_format": attn_input_format, "input_layernorm": not output_layernorm}
            wanted["return_layernorm_output"] = post_norm and not output_layernorm
            wanted["return_max_logit"] = bool(return_max_logit)
            _check_attention(self_attention, wanted)
        self.self_attention: Any = self_attention
        if is_decoder:
            self.inter_attention = self._classes["attention"](
                hidden_size,
                num_attention_heads,
                attn_mask_type=enc_dec_attn_mask_type or "padding",
                window_size=enc_dec_window_size,
                input_layernorm=True,
                attention_type="cross",
                **named("inter_attention"),
                **attention,
            )
        self.layernorm_mlp = self._classes["mlp"](
            hidden_size,
            ffn_hidden_size,
            eps,
            activation=activation,
            activation_params=activation_params,
            **named("layernorm_mlp"),
            **shared,
        )
        if output_layernorm:
            self.layernorm = self._classes[normalization](
                hidden_size,
                eps,
                sequence_parallel=self.sequence_parallel,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )
        number_layer(self, layer_number)

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
                ``DotProductAttention.set_context_parallel_group``, for self and cross attention.

        Raises:
            TypeError: ``cp_group`` has an unsupported type.
            ValueError: ``cp_comm_type`` is unknown, or does not match the number of groups.

        Source: TransformerEngine's method of this name.
        """
        self._call_children(
            "set_context_parallel_group", cp_group, cp_global_ranks, cp_stream, cp_comm_type
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        self_attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Mask = None,
        *,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Sequence[int] | None = None,
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
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Applies the layer; returns a tensor in the shape of ``hidden_states``.

        With ``return_max_logit`` it returns a tuple of that, the largest logits of self attention,
        [h], and in a decoder those of cross attention.

        Args:
            hidden_states: [s, b, h], [b, s, h] or [t, h], depending on ``attn_input_format``, in
                the parameters' dtype. Under ``torch.autocast`` any floating-point dtype is allowed,
                and the result has autocast's dtype.
            attention_mask: bool, True = masked out; only for padding mask types and
                ``"arbitrary"``. See ``DotProductAttention.forward``.
            encoder_output: hidden states that a decoder's cross attention reads, in the same
                layout. Decoders only, as are the arguments that begin with ``enc_dec``.
            enc_dec_attn_mask: bool, True = masked out: a tuple of padding masks (decoder tokens [b,
                1, 1, sq], encoder tokens [b, 1, 1, sk]), or one mask of the scores, [b, 1, sq, sk].
                None masks nothing.
            enc_dec_attn_mask_type, enc_dec_window_size: override the module's own in this call.
            is_first_microbatch: True caches the FP8 weights, False reuses them, None casts them in
                each call.
            rotary_pos_emb, core_attention_bias_type, core_attention_bias, alibi_slopes: options of
                self attention, as in ``MultiheadAttention.forward``.
            cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, cu_seqlens_q_padded,
                cu_seqlens_kv_padded: as in ``DotProductAttention.forward``. In a decoder, those of
                kv describe the encoder's tokens.
            checkpoint_core_attention: recompute attention in backward, as in
                ``DotProductAttention.forward``.
            inference_params: cache of keys and values, as in ``MultiheadAttention.forward``.
            self_attn_mask_type, window_size: override the module's own in this call.

        Raises:
            TypeError: a tensor has another dtype than those above.
            ValueError: a shape, mask or option does not match.
        """
        try:
            decoder = self.layer_type == "decoder"
            if not decoder and not (
                encoder_output
                is enc_dec_attn_mask
                is enc_dec_attn_mask_type
                is enc_dec_window_size
                is None
            ):
                raise ValueError(
                    f"{_NAME}: encoder_output and what begins with enc_dec must be None with "
                    "layer_type 'encoder', got another value"
                )
            # Else the residuals would stay in the dtype of the input, and so would the result.
            autocast = autocast_dtype(_NAME, "hidden_states", hidden_states)
            if autocast is not None:
                hidden_states = hidden_states.to(autocast)
            keys = (cu_seqlens_kv, max_seqlen_kv, cu_seqlens_kv_padded)
            own_keys = (None, None, None) if decoder else keys
            samples = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            post_norm = self.apply_residual_connection_post_layernorm
            attention, mlp = self.self_attention, self.layernorm_mlp
            out: Any
            residual: Any
            largest: list[torch.Tensor] = []
            out, residual = _attended(
                largest,
                attention,
                (
                    hidden_states, attention_mask, None, self_attn_mask_type, window_size,
                    is_first_microbatch, checkpoint_core_attention, inference_params,
                    rotary_pos_emb, core_attention_bias_type, core_attention_bias, alibi_slopes,
                    cu_seqlens_q, own_keys[0], max_seqlen_q, own_keys[1], cu_seqlens_q_padded,
                    own_keys[2],
                ),
                not (post_norm and attention.input_layernorm),
                self._adds(attention.return_bias, attention.proj.use_bias),
            )  # fmt: skip
            if self.parallel_attention_mlp:
                out = out + mlp(hidden_states, is_first_microbatch)
                return self._finish(self._add(out, None, residual, samples), largest)
            x, bias, norm = _unpacked(out, attention)
            if norm is not None:
                residual = norm
            if decoder:
                hidden_states = x
                if residual is not None:
                    hidden_states = self._add(x, bias, residual, samples)
                cross = self.inter_attention
                kind = enc_dec_attn_mask_type or self.enc_dec_attn_mask_type
                if kind is None and enc_dec_attn_mask is None and cu_seqlens_kv is None:
                    kind = "no_mask"
                out, residual = _attended(
                    largest,
                    cross,
                    (
                        hidden_states, enc_dec_attn_mask, encoder_output, kind, enc_dec_window_size,
                        is_first_microbatch, checkpoint_core_attention, None, None, "no_bias", None,
                        None, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv,
                        cu_seqlens_q_padded, cu_seqlens_kv_padded,
                    ),
                    not post_norm,
                    self._adds(cross.return_bias, cross.proj.use_bias),
                )  # fmt: skip
                x, bias, norm = _unpacked(out, cross)
                if norm is not None:
                    residual = norm
            adds = self._adds(mlp.return_bias, mlp.use_bias)
            if not takes_residual(mlp):
                hidden_states = x if residual is None else self._add(x, bias, residual, samples)
                out, residual = mlp(hidden_states, is_first_microbatch), hidden_states
            elif residual is None or (
                bias is None and x.dtype is residual.dtype and not self._drops()
            ):
                out, residual = mlp.forward_with_residual(
                    x, residual, is_first_microbatch, not post_norm, adds
                )
            else:
                hidden_states = self._add(x, bias, residual, samples)
                out, total = mlp.forward_with_residual(
                    hidden_states, None, is_first_microbatch, not post_norm, adds
                )
                residual = total if adds and total is None else residual_of(hidden_states, total)
            x, bias, norm = _unpacked(out, mlp)
            if norm is not None:
                residual = norm
            x = x if residual is None else self._add(x, bias, residual, samples)
            return self._finish(x, largest)
        except VAGUE as error:
            call = {
                "hidden_states": hidden_states, "encoder_output": encoder_output,
                "attention_mask": attention_mask, "rotary_pos_emb": rotary_pos_emb,
                "core_attention_bias": core_attention_bias, "inference_params": inference_params,
            }  # fmt: skip
            self._explain(error, call)
            raise

    def _explain(self, error: Exception, call: dict[str, Any]) -> None:
        """Raises a better error for a failed call, as ``explain_attention`` does; else returns."""
        names = {"qkv_format": "attn_input_format", "attn_mask_type": "self_attn_mask_type"}
        if self.layer_type == "decoder" and has_passed(error, self.inter_attention):
            names["attn_mask_type"] = "enc_dec_attn_mask_type"
            names["attention_mask"] = "enc_dec_attn_mask"
            names["window_size"] = "enc_dec_window_size"
        layout = ("attn_input_format", self.attn_input_format)
        explain_attention(self, error, layout, call, **names)

    def _adds(self, returns_bias: bool, has_bias: bool) -> bool:
        """Returns True if the last GEMM of attention or of the MLP may add the residual.

        Its result must go into the sum as it is (no bias, dropout or drop path), and the layer have
        neither parallel branches nor norms' results as residuals.
        """
        between = self.parallel_attention_mlp or self.apply_residual_connection_post_layernorm
        return not between and not (returns_bias and has_bias) and not self._drops()

    def _drops(self) -> bool:
        """Returns True if dropout or drop path now acts on the results of attention and MLP."""
        return self.training and (self.hidden_dropout > 0.0 or self.drop_path_rate > 0.0)

    def _finish(self, out: torch.Tensor, largest: list[torch.Tensor]) -> Any:
        """Returns what ``forward`` returns: ``out``, normalised with ``output_layernorm``."""
        out = self.layernorm(out) if self.output_layernorm else out
        return (out, *largest) if largest else out

    def _add(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns ``residual + drop_path(dropout(x + bias))``; drop path skips samples of thd."""
        p = self.hidden_dropout if self.training else 0.0
        if self._drops() and is_batch_invariant():
            raise NotImplementedError(
                f"{_NAME}: hidden_dropout and drop_path_rate must be 0 in training under "
                f"batch_invariant, got {self.hidden_dropout} and {self.drop_path_rate}"
            )
        if self.training and self.drop_path_rate > 0.0:
            x = x if bias is None else x + bias
            if p > 0.0:
                with self._own_draws():
                    x = functional.dropout(x, p)
            return residual + x * self._kept_samples(x, cu_seqlens)
        if p == 0.0 and bias is None:
            return residual + x
        if p == 0.0:
            return bias_dropout_add(x, bias, residual, p)
        with self._own_draws():
            return bias_dropout_add(x, bias, residual, p)

    def _own_draws(self) -> AbstractContextManager[Any]:
        """Returns the context for dropout's draws: the tracker's if ranks have other rows."""
        if not self.sequence_parallel or self.get_rng_state_tracker is None:
            return nullcontext()
        return self.get_rng_state_tracker().fork()

    def _kept_samples(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """Draws a factor for samples: 0 if they skip the branch, else 1 / (1 - rate).

        For thd ``cu_seqlens`` has the starts of the samples.
        """
        ranks = self.self_attention.core_attention.context_ranks.size
        if ranks > 1:
            raise NotImplementedError(
                f"{_NAME}: drop_path_rate must be 0 while training with a cp_group of {ranks} "
                f"ranks, which draw on their own, got {self.drop_path_rate}"
            )
        keep = 1.0 - self.drop_path_rate
        layout = self.attn_input_format
        if layout == "thd":
            assert cu_seqlens is not None  # attention has asked for it
            samples = cu_seqlens.shape[0] - 1
        else:
            samples = x.shape[layout.index("b")]
        kept = (torch.rand(samples, device=x.device) < keep).to(x.dtype)
        kept = kept / keep if keep > 0.0 else kept
        if layout != "thd":
            return kept[:, None] if layout == "sbhd" else kept[:, None, None]
        token = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)  # type: ignore
        sample = torch.searchsorted(cu_seqlens, token, right=True) - 1  # type: ignore
        return kept[sample.clamp(0, samples - 1)][:, None]


def _attended(
    largest: list[torch.Tensor],
    attention: Any,
    arguments: tuple[Any, ...],
    return_residual: bool,
    add_residual: bool,
) -> tuple[Any, torch.Tensor | None]:
    """Calls ``forward_with_residual`` of an attention module, or the module if that must see it.

    Appends the largest logits that it returns to ``largest``.
    """
    if takes_residual(attention):
        out, residual = attention.forward_with_residual(
            *arguments, return_residual=return_residual, add_residual=add_residual
        )
    else:
        hidden_states, *rest = arguments
        # By name, since subclasses have further arguments between these.
        given = {n: v for n, v in zip(_ATTENTION, rest, strict=True) if v is not None}
        out, residual = attention(hidden_states, **given), hidden_states
    if getattr(attention, "return_max_logit", False):
        *found, most = out
        largest.append(most)
        out = found[0] if len(found) == 1 else tuple(found)
    return out, residual


def _unpacked(
    out: Any, module: MultiheadAttention | LayerNormMLP
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns ``(result, bias, norm)`` of a module; a bias is still to be added."""
    if isinstance(out, torch.Tensor):
        return out, None, None
    bias = out[1] if module.return_bias else None
    if bias is not None and not bias.numel():
        bias = None
    has_norm = len(out) > 1 + module.return_bias
    return out[0], bias, out[-1] if has_norm else None
