"""DotProductAttention: softmax(q k^T) v in every layout, mask type and head grouping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...comm.shards import note_group
from ...runtime.named_arguments import did_you_mean, named_arguments
from .._core import arguments as _arguments
from .._core.arguments import VAGUE, explain, initialize, is_vague, materialize, parameter
from .._core.parallel import GroupHolder, checked_tp_size, divided, tag
from . import masks as _masks
from .candidates import Options
from .context_parallel.ranks import ContextRanks
from .plan import Planner, checked_format

__all__ = ["DotProductAttention"]

_NAME = "DotProductAttention"
_SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(Planner, torch.nn.Module):
    """``softmax(scale * q k^T + bias) v`` for each head; its only parameters are learnable sinks.

    It runs one of PyTorch's fused kernels if one supports the call, else GEMMs around the fused
    ``scaled_softmax``; ``explain`` says which and why. On a GPU, gradients of PyTorch's kernels are
    not bitwise reproducible unless ``torch.use_deterministic_algorithms(True)`` is set, which the
    module respects.

    Args:
        num_attention_heads: heads ``h`` of the queries.
        kv_channels: size of a head, or (size of a key head, size of a value head).
        num_gqa_groups: heads ``g`` of keys and values, a divisor of ``h``; None is ``h``.
        attention_dropout: dropout probability of attention weights while training.
        qkv_format: ``"sbhd"``, ``"bshd"`` or ``"thd"`` (packed sequences, ``t`` tokens).
        attn_mask_type: ``"no_mask"``, ``"padding"``, ``"causal"``, ``"padding_causal"``,
            ``"causal_bottom_right"``, ``"padding_causal_bottom_right"`` or ``"arbitrary"``. A
            causal mask aligns the first query with the first key: query i sees keys up to i. The
            bottom_right types align the last query and key that are not padded.
        window_size: (left, right): number of keys that a query sees before and after its own
            position; -1 = no limit, None = (-1, -1). right is 0 with causal types. Positions are
            aligned as in the bottom_right types, except with ``"causal"`` and ``"padding_causal"``.
        attention_type: ``"self"``, or ``"cross"``, where queries and keys have separate padding
            masks.
        layer_number: position in the model, from 1; see ``apply_query_key_layer_scaling``.
        softmax_scale: multiplier of ``q k^T``; None is ``1 / sqrt(size of a key head)``.
        softmax_type: ``"vanilla"``, or with a sink ``a``, a logit of each head beside the scores
            ``s``: weights are ``exp(s) / (exp(a) + sum(exp(s)))``. ``a`` is 0 with
            ``"off-by-one"``, and with ``"learnable"`` the parameter ``softmax_offset``, float32
            [heads of this rank], initially 0.
        return_max_logit: forward returns a pair; the second is the largest logit ``scale * q k^T +
            bias`` of each of this rank's heads among visible keys, without sinks and gradients, [h]
            in the dtype of the queries. It costs one pass over queries and keys. With a
            ``cp_group`` it covers whole sequences; packed ones need ``"a2a"``.
        apply_query_key_layer_scaling: with a ``layer_number`` L, divide scores by L until the
            softmax, so that fp16 does not overflow. This changes only rounding, and nothing in the
            fused kernels, whose scores are fp32.
        get_rng_state_tracker: function that returns a tracker of random states; dropout draws
            inside its ``fork()``. To checkpoint the module, use ``apex_te.checkpoint`` with this
            argument, which also restores the tracker's states; with ``torch.utils.checkpoint`` the
            recompute would draw another dropout mask.
        tp_group, tp_size: process group, or number, of the ranks over which heads and groups are
            split. The inputs of forward have this rank's heads.
        sequence_parallel: no effect; attention sees whole sequences.
        device: device of ``softmax_offset``; None uses PyTorch's default device.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: as in ``set_context_parallel_group``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``num_gqa_groups`` does not divide the heads, the ranks do not divide heads or
            groups, a number is out of range, or an option is unknown.

    Interface and the order of arguments follow TransformerEngine's DotProductAttention.
    """

    softmax_offset: torch.nn.Parameter | None

    @named_arguments()
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        *,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        apply_query_key_layer_scaling: bool = False,
        device: torch.device | str | int | None = None,
        cp_group: Any = None,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        super().__init__()
        if cp_group is not None or cp_comm_type != "p2p":
            self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        ranks = checked_tp_size(_NAME, tp_group, tp_size)
        groups = _arguments.checked_groups(_NAME, num_attention_heads, num_gqa_groups)
        if attention_type not in ("self", "cross"):
            raise ValueError(
                f"{_NAME}: attention_type must be 'self' or 'cross', got {attention_type!r}"
                + did_you_mean(attention_type, ("self", "cross"))
            )
        if layer_number is not None:
            _arguments.check_count(_NAME, "layer_number", layer_number)
        sizes: Any = (kv_channels, kv_channels)
        if isinstance(kv_channels, (tuple, list)):
            sizes = tuple(kv_channels)
        if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
            raise ValueError(
                f"{_NAME}: kv_channels must be one or two sizes above 0, got {kv_channels!r}"
            )
        self.tp_size, self._tp_group = ranks, GroupHolder(tp_group)
        self.sequence_parallel = sequence_parallel
        self.num_attention_heads = divided(_NAME, "num_attention_heads", num_attention_heads, ranks)
        self.num_gqa_groups = divided(_NAME, "num_gqa_groups", groups, ranks)
        self.key_channels, self.value_channels = sizes
        self.qkv_format = checked_format(qkv_format)
        self.mask_type = _masks.mask_type(_NAME, attn_mask_type)
        self.window_size = _masks.window(_NAME, window_size)
        self.attention_type = attention_type
        self.layer_number = layer_number
        scale = 1.0 / math.sqrt(sizes[0])
        if softmax_scale is not None:
            scale = _checked_scale(softmax_scale)
        self.get_rng_state_tracker = get_rng_state_tracker
        layer_scale = 1.0
        if apply_query_key_layer_scaling and layer_number is not None:
            layer_scale = float(layer_number)
        if softmax_type not in _SOFTMAX_TYPES:
            raise ValueError(
                f"{_NAME}: softmax_type must be one of {', '.join(_SOFTMAX_TYPES)}, "
                f"got {softmax_type!r}{did_you_mean(softmax_type, _SOFTMAX_TYPES)}"
            )
        self.softmax_type = softmax_type
        self.return_max_logit = bool(return_max_logit)
        offset = None
        if softmax_type == "learnable":
            offset = parameter((self.num_attention_heads,), torch.float32, device)
            tag(offset, 0 if ranks > 1 else None, False, tp_group)
        self.register_parameter("softmax_offset", offset)
        self._evaluation = Options(scale, 0.0, layer_scale, softmax_type != "vanilla")
        self._training = self._evaluation
        self.attention_dropout = attention_dropout
        initialize(self)

    def reset_parameters(self) -> None:
        """Sets ``softmax_offset``, if there is one, to 0.

        On the meta device it gets memory first; see ``Linear.reset_parameters``.
        """
        materialize(self)
        if self.softmax_offset is not None:
            torch.nn.init.zeros_(self.softmax_offset)

    @property
    def tp_group(self) -> Any:
        """Process group of the ranks over which heads are split; None if it is not known."""
        holder = self.__dict__.get("_tp_group")
        return None if holder is None else holder.group

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the ranks that the heads are split over: a group of ``tp_size`` ranks, or None.

        Raises:
            TypeError: ``tp_group`` is neither a process group nor None.
            ValueError: ``tp_group`` does not have ``tp_size`` ranks.
        """
        ranks = self.tp_size if tp_group is None else checked_tp_size(_NAME, tp_group, 1)
        if ranks != self.tp_size:
            raise ValueError(
                f"{_NAME}: tp_group must have the {self.tp_size} ranks of tp_size, got {ranks}"
            )
        self._tp_group = GroupHolder(tp_group)
        offset = self._parameters.get("softmax_offset")
        if self.tp_size > 1 and offset is not None:
            note_group(offset, tp_group)

    @property
    def context_ranks(self) -> ContextRanks:
        """Ranks that share each sequence: those of ``cp_group``, or one rank without it."""
        return self._context

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Sets the ranks over which sequences are split; can be called at any time.

        With n ranks, forward takes this rank's tokens: of the 2n equal chunks of each sequence,
        also of each packed one, rank r has chunks r and 2n - 1 - r, as
        ``split_for_context_parallel`` splits them. Masks, biases, ``cu_seqlens`` and maximum
        lengths remain those of whole sequences. A gradient of a parameter or bias is this rank's
        term of a sum over the ranks, as in data parallelism.

        Args:
            cp_group: process group, or ``DeviceMesh`` with one dimension; None for one rank. For
                ``"a2a+p2p"`` also a list of two groups, the first of neighbouring ranks.
            cp_global_ranks, cp_stream: no effect.
            cp_comm_type: ``"all_gather"``: each rank attends to keys and values of all ranks.
                ``"a2a"``: exchanges tokens for heads; results are bitwise those of one rank where
                its kernel computes heads independently. ``"p2p"`` runs as ``"a2a"`` if the ranks
                divide all heads, without a window and packed sequences, where that exchanges fewer
                bytes or a mask or bias hides keys; otherwise it and ``"a2a+p2p"`` run as
                ``"all_gather"``.

        Raises:
            TypeError: ``cp_group`` has another type than those above.
            ValueError: ``cp_comm_type`` is unknown, or does not match the number of groups.

        Source: TransformerEngine's method of this name.
        """
        self._context = ContextRanks(_NAME, cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    # What forward reads is made of these once: without setters, setting them would do nothing.

    @property
    def attention_dropout(self) -> float:
        """Probability that an attention weight is dropped in training; can be set at any time."""
        return self._training.dropout

    @attention_dropout.setter
    def attention_dropout(self, value: float) -> None:
        value = _arguments.checked_number(_NAME, "attention_dropout", value)
        if not 0.0 <= value < 1.0:
            raise ValueError(
                f"{_NAME}: attention_dropout must be at least 0 and below 1, got {value}"
            )
        self._training = self._training._replace(dropout=value)

    @property
    def softmax_scale(self) -> float:
        """Multiplier of ``q k^T``; can be set at any time."""
        return self._training.scale

    @softmax_scale.setter
    def softmax_scale(self, value: float) -> None:
        value = _checked_scale(value)
        self._training = self._training._replace(scale=value)
        self._evaluation = self._evaluation._replace(scale=value)

    @property
    def attn_mask_type(self) -> str:
        """Name of the mask type; can be set at any time."""
        return self.mask_type.name

    @attn_mask_type.setter
    def attn_mask_type(self, name: str) -> None:
        self.mask_type = _masks.mask_type(_NAME, name)

    def extra_repr(self) -> str:
        text = f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}"
        text += f", channels={(self.key_channels, self.value_channels)}"
        text += f", qkv_format={self.qkv_format!r}, attn_mask_type={self.attn_mask_type!r}"
        if self.window_size is not None:
            text += f", window_size={self.window_size}"
        if self._evaluation.has_sink:
            text += f", softmax_type={self.softmax_type!r}"
        return text + (f", dropout={self.attention_dropout}" if self.attention_dropout else "")

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: _masks.Mask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        checkpoint_core_attention: bool = False,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes attention; returns [..., h * dv] in the layout of the queries.

        With ``return_max_logit`` it returns that and the largest logits.

        Args:
            query_layer, key_layer, value_layer: [s, b, h, d], [b, s, h, d] or [t, h, d], all in one
                floating-point dtype, which is also that of the result; ``torch.autocast`` casts
                them. Keys and values have g heads; values may have another head size, dv. The last
                dimension must be contiguous.
            attention_mask: bool, True = masked out. For padding types: [b, 1, 1, s], or a tuple of
                two, for queries and keys. In cross attention it must be such a tuple, or one mask
                of the scores, [b, 1, sq or 1, sk]. The output is 0 for padded queries, and for
                queries that see no keys. For ``"arbitrary"``: broadcasts to [b, h, sq, sk]. For
                other types: None. With thd, b is the number of sequences, and s at least the length
                of the longest one. A mask then makes the call pad the sequences, which is slower
                than ``cu_seqlens_q`` alone.
            cu_seqlens_q, cu_seqlens_kv: int32 [n + 1], where the n sequences begin and end; kv
                defaults to q. Required for thd. With padding types in the other formats they may
                replace or complement a mask.
            max_seqlen_q, max_seqlen_kv: upper bounds of the sequence lengths, for thd; None reads
                the lengths from the device.
            qkv_format, attn_mask_type, window_size: override the module's own in this call.
            core_attention_bias_type: ``"no_bias"``, ``"pre_scale_bias"`` (added before the scores
                are scaled), ``"post_scale_bias"`` or ``"alibi"``, which adds ``-slope * |i - j|``
                to the score of query i and key j, with positions aligned as for ``window_size``.
            core_attention_bias: floating-point, broadcasts to [b, h, sq, sk]; cast to the dtype of
                the queries; differentiable.
            alibi_slopes: floating-point [h] or [b, h] for ``"alibi"``; None uses the slopes of the
                ALiBi paper.
            checkpoint_core_attention: save only the inputs, and recompute attention in backward
                with the same dropout mask, even if ``get_rng_state_tracker`` is set.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: for thd with padding tokens between the
                sequences, int32 [n + 1]: sequence i begins at ``cu_seqlens_q_padded[i]`` and has
                ``cu_seqlens_q[i + 1] - cu_seqlens_q[i]`` tokens. Outputs of padding tokens are 0.

        Raises:
            TypeError: a tensor has another dtype than those above.
            ValueError: a shape, mask or option does not match.
        """
        try:
            is_usual = core_attention_bias_type == "no_bias" and (
                attention_mask
                is qkv_format
                is cu_seqlens_q
                is cu_seqlens_kv
                is attn_mask_type
                is window_size
                is core_attention_bias
                is alibi_slopes
                is cu_seqlens_q_padded
                is cu_seqlens_kv_padded
                is None
            )
            if is_usual and self.qkv_format != "thd" and self._context.size == 1:
                attended, inputs, order = self._usual_plan(query_layer, key_layer, value_layer)
            else:
                _, attended, inputs, order = self._plan(
                    query_layer, key_layer, value_layer, attention_mask, qkv_format, cu_seqlens_q,
                    cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size,
                    core_attention_bias_type, core_attention_bias, alibi_slopes,
                    cu_seqlens_q_padded, cu_seqlens_kv_padded,
                )  # fmt: skip
            run = attended
            if checkpoint_core_attention:

                def run(*inputs: Any) -> Any:
                    return checkpoint(attended, *inputs, use_reentrant=False)

            if (
                self.training
                and self._training.dropout > 0.0
                and self.get_rng_state_tracker is not None
            ):
                # Outside of the checkpoint, which saves the state that it finds and so repeats the
                # tracked draws without a second step of the tracker.
                with self.get_rng_state_tracker().fork():
                    out = run(*inputs)
            else:
                out = run(*inputs)
        except VAGUE as error:
            given = {
                "query_layer": query_layer, "key_layer": key_layer, "value_layer": value_layer
            }  # fmt: skip
            optional = {"core_attention_bias": core_attention_bias, "alibi_slopes": alibi_slopes}
            lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
            self._explain(error, given, optional, attention_mask, lengths)
            raise
        largest = None
        if self.return_max_logit:
            out, largest = out
        out = out.flatten(1) if order is None else out.permute(order).flatten(2)
        return out if largest is None else (out, largest)

    def _explain(
        self, error: Exception, inputs: dict[str, Any], optional: dict[str, Any], mask: Any,
        lengths: dict[str, Any],
    ) -> None:  # fmt: skip
        """Raises a better error for a failed call if an argument is wrong; else returns."""
        if isinstance(mask, torch.Tensor):
            optional["attention_mask"] = mask
        elif isinstance(mask, tuple):
            optional |= {f"attention_mask[{i}]": each for i, each in enumerate(mask)}
        explain(self, error, inputs, optional)
        if not is_vague(self, error):
            return
        dtype = inputs["query_layer"].dtype
        if not dtype.is_floating_point:
            raise TypeError(
                f"{_NAME}: query_layer must have a floating-point dtype, got {dtype}"
            ) from error
        for name, value in lengths.items():
            if value is not None and not isinstance(value, int):
                raise TypeError(
                    f"{_NAME}: {name} must be an int, got {type(value).__name__}"
                ) from error

    def explain(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> str:
        """Returns the path that ``forward`` would take with these arguments, as ``"path: reason"``.

        For example ``"sdpa: PyTorch's flash kernel"``. All arguments and errors are those of
        ``forward``; nothing is computed.
        """
        kwargs.pop("checkpoint_core_attention", None)
        path = self._plan(query_layer, key_layer, value_layer, *args, **kwargs)[0]
        return f"{path.name}: {path.reason}"


def _checked_scale(value: Any) -> float:
    scale = _arguments.checked_number(_NAME, "softmax_scale", value)
    if not math.isfinite(scale) or scale == 0:
        raise ValueError(f"{_NAME}: softmax_scale must be finite and not 0, got {value}")
    return scale
