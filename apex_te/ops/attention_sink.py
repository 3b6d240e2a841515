"""Joins parts of an attention's softmax by log-sum-exps: with sinks, or of several keys."""

from __future__ import annotations

import torch

from .binding import bind, checked, note_written

_TILE = 64  # queries of one sum of the workspace

_fwd = bind("attention_sink", "attention_sink_fwd")
_bwd = bind("attention_sink", "attention_sink_bwd")
_join = bind("attention_sink", "attention_join")


@checked
def attention_sink_fwd(
    values: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a sink to attention: one more logit per head in the softmax, without a value.

    ``total = log(exp(lse) + exp(sink))`` and ``out = values * exp(lse - total)``, in float32 and
    rounded once. Where ``lse`` is -Inf, because the query sees no keys, ``out`` is 0.

    Args:
        values: output of attention without sinks, [b, h, s, d] float32, float16 or bfloat16, with
            any strides; made contiguous if its last dimension is not.
        lse: log-sum-exp of each query's scores, float32 [b, h, s]; made contiguous if it is not.
        sink: float32 [h]; None is a logit of 0.
        out: tensor in the shape and dtype of ``values``, with a contiguous last dimension, to write
            instead of a new one; may be ``values``.

    Returns:
        (out, total): ``out`` or a new tensor in the layout of ``values``, and float32 [b, h, s].

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or the last dimension of ``out`` is not contiguous.
    """
    lse = lse.contiguous()
    values = _with_rows(values)
    y = torch.empty_like(values) if out is None else out
    total = torch.empty_like(lse)
    _fwd(values, lse, None if sink is None else sink.contiguous(), y, total)
    note_written(out)
    return y, total


@checked
def attention_sink_bwd(
    dout: torch.Tensor, out: torch.Tensor, total: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """Computes the gradient of the sinks, ``-sum(exp(sink - total) * sum(dout * out))`` per head.

    For the gradients of queries, keys and values, pass ``out`` and ``total`` to the backward of
    attention without sinks.

    Args:
        dout: gradient of ``out``, in its shape and dtype, with any strides.
        out: from ``attention_sink_fwd``, [b, h, s, d] float32, float16 or bfloat16.
        total: from ``attention_sink_fwd``, float32 [b, h, s].
        sink: float32 [h], as passed to ``attention_sink_fwd``.

    Returns:
        float32 [h], summed in a fixed order.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match.
    """
    dout, out = _with_rows(dout), _with_rows(out)
    dsink = torch.empty_like(sink)
    tiles = -(-out.shape[2] // _TILE)
    workspace = total.new_empty((*total.shape[:2], tiles))
    _bwd(dout, out, total.contiguous(), sink.contiguous(), dsink, workspace)
    return dsink


@checked
def attention_join(
    values: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    part2: torch.Tensor | None = None,
    part2_lse: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins attentions of the same queries to other keys each into that to all of the keys.

    ``total = log(sum of exp(lse))`` and ``out = sum of values * exp(lse - total)`` over the parts,
    in float32, in their order, and rounded once. Where a log-sum-exp is -Inf, because the query
    sees no keys, its values are not used.

    Args:
        values: output of attention, [b, h, s, d] float32, float16 or bfloat16, with any strides;
            made contiguous if its last dimension is not.
        lse: log-sum-exp of each query's scores, float32 [b, h, s]; made contiguous if it is not.
        part, part2: outputs of the last queries for other keys, [b, h, n, d] with n <= s, in the
            dtype of ``values``.
        part_lse, part2_lse: float32 [b, h, n].
        out: tensor in the shape and dtype of ``values``, with a contiguous last dimension, to write
            instead of a new one; may be ``values``.

    Returns:
        (out, total): ``out`` or a new tensor in the layout of ``values``, and float32 [b, h, s].

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or the last dimension of ``out`` is not contiguous.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
    """
    values, lse = _with_rows(values), lse.contiguous()
    y = torch.empty_like(values) if out is None else out
    total = torch.empty_like(lse)
    more = None if part2 is None else _with_rows(part2)
    more_lse = None if part2_lse is None else part2_lse.contiguous()
    _join(values, lse, _with_rows(part), part_lse.contiguous(), more, more_lse, y, total)
    note_written(out)
    return y, total


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x``, contiguous if its last dimension is not."""
    return x if x.dim() > 0 and x.stride(-1) == 1 else x.contiguous()


def reference(
    values: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``attention_sink_fwd`` in plain PyTorch, in the dtype of ``lse``.

    ``values`` is [b, h, s, d], ``lse`` [b, h, s] and ``sink`` [h]; None stands for zeros. Returns
    (out, total) in the shapes of ``values`` and ``lse``.
    """
    logit = torch.zeros_like(lse) if sink is None else sink[:, None].expand_as(lse)
    total = torch.logaddexp(lse, logit)
    unseen = lse == -torch.inf
    factor = (lse - total).exp()[..., None]
    out = (values * factor).masked_fill(unseen[..., None], 0.0)
    return out.to(values.dtype), total.where(~unseen, logit)


def reference_join(
    *parts: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``attention_join`` of (values, lse) in plain PyTorch, in the dtype of ``lse``."""
    (values, lse), *_ = parts
    missing = [lse.shape[2] - each.shape[2] for _, each in parts]
    columns = [
        torch.nn.functional.pad(each, (count, 0), value=-torch.inf)
        for (_, each), count in zip(parts, missing, strict=True)
    ]
    total = torch.stack(columns).logsumexp(0)
    out = torch.zeros_like(values, dtype=lse.dtype)
    for (each, _), column, count in zip(parts, columns, missing, strict=True):
        seen = (column > -torch.inf)[..., None]
        wide = torch.nn.functional.pad(each.to(lse.dtype), (0, 0, count, 0))
        out = out + torch.where(seen, wide * (column - total).exp()[..., None], 0.0)
    return out.to(values.dtype), total
