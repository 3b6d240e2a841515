"""Applies attention sinks to an attention output, given the log-sum-exp of its scores."""

from __future__ import annotations

import torch

from .binding import bind, checked, note_written

_TILE = 64  # queries of one sum of the workspace

_fwd = bind("attention_sink", "attention_sink_fwd")
_bwd = bind("attention_sink", "attention_sink_bwd")


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


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x``, contiguous if its last dimension is not."""
    return x if x.dim() > 0 and x.stride(-1) == 1 else x.contiguous()


def reference(
    values: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``attention_sink_fwd`` in plain PyTorch, in the dtype of ``lse``."""
    logit = torch.zeros_like(lse) if sink is None else sink[:, None].expand_as(lse)
    total = torch.logaddexp(lse, logit)
    unseen = lse == -torch.inf
    factor = (lse - total).exp()[..., None]
    out = (values * factor).masked_fill(unseen[..., None], 0.0)
    return out.to(values.dtype), total.where(~unseen, logit)
