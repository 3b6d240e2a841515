"""Softmax sinks: a logit of each head in the denominator of its softmax, which weighs no value.

With the log-sum-exp ``l`` of a query's scores and the sink ``a``, ``L = logaddexp(l, a)`` is the
one of both, and the output is that without the sink times ``exp(l - L)``. A kernel's backward with
that output and ``L`` gives the gradients of q, k and v; that of ``a`` is the sum of ``-exp(a - L)
rowsum(grad * output)``.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ...ops.scaled_softmax import scaled_softmax


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
