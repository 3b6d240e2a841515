"""Checks the arguments of DotProductAttention and chooses the path of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...runtime import invariance
from ...runtime.named_arguments import did_you_mean
from ...runtime.tracing import is_traced
from .._core.arguments import autocast_dtype
from . import masks as _masks
from .alibi import Alibi, checked_slopes, standard_slopes
from .backends import attend
from .candidates import Options, Path
from .choice import choose, choose_with_alibi, packs, path_settings
from .context_parallel.plan import Request
from .context_parallel.plan import plan as context_plan
from .context_parallel.ranks import ContextRanks
from .masks import broadcasts
from .max_logit import max_logit
from .packed import attend_packed, choose_packed, gaps_of, packing

_NAME = "DotProductAttention"
_BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
# To [b, h, s, d]; each is its own inverse or has it beside.
_TO_HEADS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_FROM_HEADS = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}
_MAX_PLANS = 1024
# Functions that attend, by all that the choice of a path depends on; they hold no tensor.
_usual_plans: dict[tuple[Any, ...], Callable[..., Any]] = {}


def checked_format(name: str) -> str:
    """Returns a ``qkv_format`` after checking it."""
    formats = ("sbhd", "bshd", "thd")
    if name not in formats:
        raise ValueError(
            f"{_NAME}: qkv_format must be 'sbhd', 'bshd' or 'thd', got {name!r}"
            + did_you_mean(name, formats)
        )
    return name


class Planner:
    """The part of ``DotProductAttention`` that makes a plan of each call."""

    training: bool
    softmax_offset: torch.nn.Parameter | None
    num_attention_heads: int
    num_gqa_groups: int
    key_channels: int
    value_channels: int
    tp_size: int
    tp_group: Any
    qkv_format: str
    attention_type: str
    mask_type: _masks.MaskType
    window_size: tuple[int, int] | None
    softmax_scale: float
    return_max_logit: bool = False
    _training: Options
    _evaluation: Options
    _context = ContextRanks(_NAME)  # one rank

    def _options(self) -> Options:
        """Returns the options of this call, with the mode ``batch_invariant``."""
        options = self._training if self.training else self._evaluation
        # Modules pickled before the mode was added lack the attribute.
        found = invariance.current(self.__dict__.get("_independent_rows", False))
        if not torch.compiler.is_compiling():
            self.__dict__["_independent_rows"] = found
        if not found:
            return options
        if options.dropout > 0.0:
            raise NotImplementedError(
                f"{_NAME}: attention_dropout must be 0 in training under batch_invariant, "
                f"got {options.dropout}"
            )
        return options._replace(independent_rows=True)

    def _usual_plan(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...] | None]:
        """Returns what ``_plan`` returns, but the path, for a call of ``forward`` without options.

        Calls with tensors of the same shapes and dtypes share one plan if no mask is read.
        """
        layout, kind = self.qkv_format, self.mask_type
        if (
            kind.padding
            or kind.arbitrary
            # Then the window may be a mask of the scores, a tensor.
            or (self.window_size is not None and q.shape[:2] != k.shape[:2])
            or self.return_max_logit
            or torch.compiler.is_compiling()
            or is_traced()
            or torch._C._is_any_autocast_enabled()
        ):
            return self._plan(q, k, v)[1:]
        key = (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, layout, kind,
            self.window_size, self._options(), self.num_attention_heads, self.num_gqa_groups,
            self.key_channels, self.value_channels, choose, *path_settings(),
        )  # fmt: skip
        run = _usual_plans.get(key)
        if run is None:
            _, run, inputs, order = self._plan(q, k, v)
            if len(_usual_plans) >= _MAX_PLANS:
                _usual_plans.clear()
            _usual_plans[key] = run
            return run, inputs, order
        if layout == "bshd":
            inputs = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, self._sink())
        else:
            inputs = (*(x.permute(_TO_HEADS[layout]) for x in (q, k, v)), None, self._sink())
        return run, inputs, _FROM_HEADS[layout]

    def _plan(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: _masks.Mask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
    ) -> tuple[Path, Callable[..., Any], tuple[Any, ...], tuple[int, ...] | None]:
        """Checks the arguments of ``forward`` and returns ``(path, run, inputs, order)``.

        ``inputs`` are the arguments of ``run``; ``order`` permutes its result to the queries'
        layout.
        """
        layout = self.qkv_format if qkv_format is None else checked_format(qkv_format)
        kind = self.mask_type
        if attn_mask_type is not None:
            kind = _masks.mask_type(_NAME, attn_mask_type)
        size = self.window_size if window_size is None else _masks.window(_NAME, window_size)
        q, k, v, bias = self._checked(
            q, k, v, layout, core_attention_bias_type, core_attention_bias
        )
        if alibi_slopes is not None and core_attention_bias_type != "alibi":
            raise ValueError(
                f"{_NAME}: alibi_slopes must be None unless core_attention_bias_type is 'alibi', "
                f"got slopes and {core_attention_bias_type!r}"
            )
        request = Request(
            layout, kind, size, attention_mask, (cu_seqlens_q, cu_seqlens_kv),
            (max_seqlen_q, max_seqlen_kv), core_attention_bias_type == "alibi",
            (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        )  # fmt: skip
        if request.has_alibi:
            batch = q.shape[layout.find("b")]
            if layout == "thd" and cu_seqlens_q is not None:
                batch = cu_seqlens_q.shape[0] - 1
            bias = self._slopes(alibi_slopes, batch, q.device)
        if self._context.size == 1:
            return self._route(q, k, v, bias, request)
        options = self._options()
        is_self = self.attention_type == "self"
        given = (q, k, v, bias, request)
        found = context_plan(
            _NAME, self._context, *given, options, is_self, self._route, self._see,
            self.return_max_logit,
        )  # fmt: skip
        order = None if layout == "thd" else (0, 1, 2, 3)
        return found.path, found.run, (*given[:4], self._sink()), order

    def _route(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        request: Request,
    ) -> tuple[Path, Callable[..., Any], tuple[Any, ...], tuple[int, ...] | None]:
        """Returns what ``_plan`` returns, for checked tensors of whole sequences.

        ``bias`` may be the slopes of ALiBi. The values of tensors are not read.
        """
        layout, kind, size, attention_mask, cu, longest, has_alibi, starts = request
        options = self._options()
        order, with_max = None, self.return_max_logit
        if layout == "thd":
            if attention_mask is not None and not kind.padding:
                raise ValueError(
                    f"{_NAME}: attention_mask must be None with qkv_format 'thd', whose sequences "
                    f"cu_seqlens_q and cu_seqlens_kv are, and attn_mask_type {kind.name!r} (one "
                    "with 'padding' hides tokens of them, too), got a mask"
                )
            if kind.arbitrary:
                raise ValueError(
                    f"{_NAME}: attn_mask_type must not be 'arbitrary' with qkv_format 'thd'"
                )
            where = packing(_NAME, *cu, *longest)
            gaps = gaps_of(_NAME, "q", where.queries, starts[0], q.shape[0])
            key_gaps, padded = gaps, starts[1]
            if not where.is_self or not (padded is None or padded is starts[0]):
                key_gaps = gaps_of(_NAME, "kv", where.keys, padded, k.shape[0])
            masked = attention_mask is not None
            path = choose_packed(q, k, v, where, kind, bias, masked, options, size)
            cross = self.attention_type == "cross"

            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, sink: Any) -> Any:
                return attend_packed(
                    q, k, v, bias, path, _NAME, where, kind, size, options, attention_mask, cross,
                    has_alibi, (gaps, key_gaps), sink, with_max,
                )  # fmt: skip

        else:
            if any(each is not None for each in starts):
                raise ValueError(
                    f"{_NAME}: cu_seqlens_q_padded and cu_seqlens_kv_padded must be None with "
                    f"qkv_format {layout!r}, got a tensor"
                )
            order = _FROM_HEADS[layout]
            q, k, v = (x.permute(_TO_HEADS[layout]) for x in (q, k, v))
            seen_by = functools.partial(self._see, q, k, bias, request)
            may_pack = kind.padding and kind.bottom_right and not has_alibi and bias is None
            seen, mask = seen_by(may_pack and packs(q, k, v, options))
            seen_padded = seen if seen.packed is None or not with_max else seen_by(False)[0]
            alibi = Alibi(kind, mask) if has_alibi else None
            path = (
                choose(q, k, v, seen, bias, options)
                if alibi is None or bias is None
                else (choose_with_alibi(q, k, v, seen, bias, alibi, options))
            )

            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, sink: Any) -> Any:
                out = attend(q, k, v, bias, path, seen, options, alibi, sink)
                if not with_max:
                    return out
                added = bias if alibi is None else alibi.bias(bias, q, k)
                return out, max_logit(q, k, added, seen_padded, options.scale)

        return path, run, (q, k, v, bias, self._sink()), order

    def _sink(self) -> torch.Tensor | None:
        """Returns the sinks to compute with, float32 [h]; None if all are 0, or there are none."""
        # Modules pickled before sinks were added lack the attribute.
        if not self._evaluation.has_sink or self.softmax_offset is None:
            return None
        return self.softmax_offset.float()

    def _see(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        bias: torch.Tensor | None,
        request: Request,
        may_pack: bool = False,
    ) -> tuple[_masks.Visibility, _masks.Mask]:
        """Checks the masks; returns the keys that queries [b, h, sq, d] see, and the mask.

        The mask is the request's, joined with the padding that its ``cu`` gives if it has tensors.
        """
        _, kind, size, mask, cu, _, has_alibi, _ = request
        batch, heads, queries, _ = q.shape
        keys = k.shape[2]
        cross = self.attention_type == "cross"
        scores, by_length = (batch, heads, queries, keys), None
        if cu[0] is not None or cu[1] is not None:
            if not kind.padding:
                raise ValueError(
                    f"{_NAME}: cu_seqlens_q and cu_seqlens_kv must be None with attn_mask_type "
                    f"{kind.name!r} and qkv_format {self.qkv_format!r} (types with 'padding' read "
                    "them), got a tensor"
                )
            where = packing(_NAME, *cu, queries, keys)
            padded = _masks.lengths_mask(where.queries.diff(), queries)
            by_length = (padded, padded)
            if queries != keys or not where.is_self:
                by_length = (padded, _masks.lengths_mask(where.keys.diff(), keys))
        if bias is not None and not has_alibi and not broadcasts(bias, scores):
            raise ValueError(
                f"{_NAME}: core_attention_bias must broadcast to {list(scores)}, "
                f"got {list(bias.shape)}"
            )
        return _masks.visibility(
            _NAME, kind, mask, size, cross, scores, q.device, by_length, may_pack
        )

    def _slopes(
        self, slopes: torch.Tensor | None, batch: int, device: torch.device
    ) -> torch.Tensor:
        """Returns the slopes of ALiBi, float32 [h] or [batch, h], by default the standard ones."""
        heads = self.num_attention_heads
        if slopes is None:
            return standard_slopes(_NAME, heads, self.tp_size, self.tp_group, device)
        return checked_slopes(_NAME, slopes, heads, batch)

    def _checked(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: str,
        bias_type: str,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns q, k, v and bias to compute with; ``"pre_scale_bias"`` is scaled."""
        dims = 3 if layout == "thd" else 4
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        for what, x, tail in (
            ("query_layer", q, (heads, self.key_channels)),
            ("key_layer", k, (groups, self.key_channels)),
            ("value_layer", v, (groups, self.value_channels)),
        ):
            if x.dim() != dims or x.shape[-2] != tail[0] or x.shape[-1] != tail[1]:
                raise ValueError(
                    f"{_NAME}: {what} must have shape [{', '.join(layout[: dims - 2])}, {tail[0]}, "
                    f"{tail[1]}] with qkv_format {layout!r}, got {list(x.shape)}"
                )
        batch = layout.find("b")
        if (
            k.shape[0] != v.shape[0]
            or k.shape[1] != v.shape[1]
            or (batch >= 0 and q.shape[batch] != k.shape[batch])
        ):
            raise ValueError(
                f"{_NAME}: key_layer and value_layer must have the same tokens and query_layer's "
                f"batch, got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
            )
        if bias_type not in _BIAS_TYPES:
            raise ValueError(
                f"{_NAME}: core_attention_bias_type must be one of {', '.join(_BIAS_TYPES)}, "
                f"got {bias_type!r}{did_you_mean(bias_type, _BIAS_TYPES)}"
            )
        if (bias is None) != (bias_type in ("no_bias", "alibi")):
            raise ValueError(
                f"{_NAME}: core_attention_bias must be given unless core_attention_bias_type is "
                f"'no_bias' or 'alibi', got {bias_type!r} and "
                f"{'no bias' if bias is None else 'a bias'}"
            )
        dtype, autocast = q.dtype, autocast_dtype(_NAME, "query_layer", q)
        if autocast is not None:
            dtype = autocast
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        elif k.dtype is not dtype or v.dtype is not dtype:
            raise TypeError(
                f"{_NAME}: query_layer, key_layer and value_layer must have one dtype, "
                f"got {dtype}, {k.dtype}, {v.dtype}"
            )
        if bias is not None:
            if bias_type == "pre_scale_bias":
                bias = bias * self.softmax_scale
            bias = bias.to(dtype)
        return q, k, v, bias
