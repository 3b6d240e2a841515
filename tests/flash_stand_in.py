"""PyTorch's flash kernel written out for CPUs, so that its paths can be tested without a GPU.

It follows the CUDA kernel where that differs from plain maths: windows are aligned at the last key,
the log-sum-exp of a query that sees no key is +inf, and tokens of no sequence are not written.
"""

import contextlib

import torch

from apex_te.module.attention import candidates


def _sequences(q, k, cu_q, cu_k):
    """Yields the slices of queries and keys of each sequence."""
    if cu_q is None:
        for i in range(q.shape[0]):
            yield (i,), (i,)
        return
    for i in range(cu_q.shape[0] - 1):
        yield slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])


def _weights(q, k, scale, causal, window, keep):
    """Probabilities [h, sq, sk] of q [sq, h, d], with dropout, and the log-sum-exp [h, sq]."""
    q, k = (x.double().transpose(0, 1) for x in (q, k))
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    apart = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - k.shape[1] + q.shape[1]
    left, right = window
    right = 0 if causal else right
    hidden = torch.zeros_like(apart, dtype=torch.bool)
    hidden |= (apart < -left) if left >= 0 else False
    hidden |= (apart > right) if right >= 0 else False
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1) if k.shape[1] else scores.new_full(q.shape[:2], -torch.inf)
    return scores, lse.masked_fill(lse == -torch.inf, torch.inf)


def _dropped(state, shape, p):
    random = torch.Generator().manual_seed(int(state[0]))
    return (torch.rand(shape, generator=random) >= p) / (1 - p)


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None,
            window_size_left=None, window_size_right=None, **more):  # fmt: skip
    assert q.shape[-1] == v.shape[-1], "heads of one size"
    assert q.shape[-1] % 8 == 0
    assert q.dtype in (torch.float16, torch.bfloat16)
    window = tuple(-1 if x is None else x for x in (window_size_left, window_size_right))
    state = torch.stack((torch.randint(2**31, ()), torch.tensor(0))).to(torch.uint64)
    out = torch.full_like(q, torch.nan)
    heads = q.shape[-2]
    shape = (q.shape[0], heads, q.shape[1]) if cu_q is None else (heads, q.shape[0])
    lse = torch.full(shape, torch.nan)
    for mine, other in _sequences(q, k, cu_q, cu_k):
        scores, sums = _weights(q[mine], k[other], scale, causal, window, None)
        weights = (scores - sums[..., None]).exp()
        weights = weights * _dropped(state, weights.shape, dropout)
        values = v[other].double().transpose(0, 1)
        values = values.repeat_interleave(heads // values.shape[0], 0)
        out[mine] = (weights @ values).transpose(0, 1).to(q.dtype)
        lse[mine if cu_q is None else (slice(None), mine)] = sums.float()
    return out, lse, state, torch.empty(()).to(torch.uint64), torch.empty(0)


def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, state, unused, *,
             scale=None, window_size_left=None, window_size_right=None):  # fmt: skip
    window = tuple(-1 if x is None else x for x in (window_size_left, window_size_right))
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    heads, groups = q.shape[-2], k.shape[-2]
    for mine, other in _sequences(q, k, cu_q, cu_k):
        sums = lse[mine if cu_q is None else (slice(None), mine)].double()
        scores, _ = _weights(q[mine], k[other], scale, causal, window, None)
        weights = (scores - sums[..., None]).exp()
        drop = _dropped(state, weights.shape, dropout)
        grads, outs, queries = (x[mine].double().transpose(0, 1) for x in (grad, out, q))
        keys, values = (
            x[other].double().transpose(0, 1).repeat_interleave(heads // groups, 0) for x in (k, v)
        )
        delta = (grads * outs).sum(-1, keepdim=True)
        dscores = weights * (grads @ values.mT * drop - delta) * scale
        dq[mine] = (dscores @ keys).transpose(0, 1).to(q.dtype)
        for x, each in ((dk, dscores.mT @ queries), (dv, (weights * drop).mT @ grads)):
            x[other] = each.unflatten(0, (groups, -1)).sum(1).transpose(0, 1).to(q.dtype)
    return dq, dk, dv


@contextlib.contextmanager
def as_on_a_gpu(monkeypatch):
    """Chooses on the CPU as on a GPU before Hopper, and gives it the flash kernel."""
    monkeypatch.setattr(candidates.Problem, "is_cuda", property(lambda self: True))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield
