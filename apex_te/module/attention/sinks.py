"""Softmax sinks: a logit of each head in the denominator of its softmax, which weighs no value.

With the log-sum-exp ``l`` of a query's scores and the sink ``a``, ``L = logaddexp(l, a)`` is the
one of both, and the output is that without the sink times ``exp(l - L)``. A kernel's backward with
that output and ``L`` gives the gradients of q, k and v; that of ``a`` is the sum of ``-exp(a - L)
rowsum(grad * output)``.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ...ops.attention_sink import attention_sink_bwd, attention_sink_fwd
from ...ops.binding import OpFunction, once_differentiable
from ...ops.scaled_softmax import scaled_softmax
from .kernels import KERNELS, Call, Extra, like


def attend_with_sink(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    kernel: str,
    extra: Extra,
    call: Call,
) -> torch.Tensor:
    """Computes attention [b, h, sq, dv] by a kernel of ``KERNELS``, with sinks.

    Args:
        sink: float32 [h]; None is 0 for all heads.
    """
    out: torch.Tensor = _Sinks.apply(q, k, v, sink, *extra, kernel, call)
    return out


class _Sinks(OpFunction):
    LABEL = "DotProductAttention"

    @staticmethod
    def forward(ctx, q, k, v, sink, mask, starts, key_starts, kernel, call):
        extra = Extra(mask, starts, key_starts)
        out, lse, state = KERNELS[kernel].forward(q, k, v, extra, call)
        out, total = attention_sink_fwd(out, lse, sink, out=out)
        tensors = [x for x in state if not isinstance(x, int)]
        ctx.save_for_backward(q, k, v, sink, *extra, out, total, *tensors)
        ctx.numbers = [x if isinstance(x, int) else None for x in state]
        ctx.kernel, ctx.call = kernel, call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, sink, mask, starts, key_starts, out, total, *tensors = ctx.saved_tensors
        kept = iter(tensors)
        state = tuple(next(kept) if x is None else x for x in ctx.numbers)
        grad = like(grad, out)
        dsink = None
        if ctx.needs_input_grad[3]:
            dsink = attention_sink_bwd(grad, out, total, sink)
        extra = Extra(mask, starts, key_starts)
        found = KERNELS[ctx.kernel].backward(grad, q, k, v, out, total, state, extra, ctx.call)
        return *found, dsink, None, None, None, None, None


def weights_beside_sink(
    scores: torch.Tensor, scale: float, hidden: torch.Tensor | None, sink: torch.Tensor | None
) -> torch.Tensor:
    """Returns the softmax [b, h, sq, sk] of scores beside which the sink is one more column."""
    if sink is None:
        column = scores.new_zeros(1, 1, 1, 1)
    else:
        column = (sink / scale).to(scores.dtype)[:, None, None]
    scores = torch.cat((scores, column.expand(*scores.shape[:3], 1)), -1)
    if hidden is not None:
        hidden = functional.pad(hidden.expand(*hidden.shape[:3], scores.shape[3] - 1), (0, 1))
    if scores.dtype is torch.float64:  # which scaled_softmax does not take
        scores = scores * scale
        scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1)
    else:
        weights = scaled_softmax(scores, scale, hidden)
    return weights[..., :-1].contiguous()
