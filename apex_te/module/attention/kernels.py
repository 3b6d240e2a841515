"""PyTorch's fused attention kernels with the log-sum-exp of the scores, forward and backward.

Backward takes any output and log-sum-exp of the same scores, also of more keys than the call's:
weights are ``exp(score - lse)``, so that results of parts of the keys can be joined, and sinks
added (see ``sinks``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...ops.attention_sink import attention_sink_bwd, attention_sink_fwd
from ...ops.binding import OpFunction, once_differentiable

_aten = torch.ops.aten
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Call(NamedTuple):
    """Options of a kernel's call for q [b, h, sq, d], k and v [b, g, sk, d].

    Attributes:
        causal: query i sees keys up to i.
        window: (left, right) around key i + sk - sq, -1 = no limit; kernel "flash" alone has it.
        longest: lengths of the longest sequences of packed queries and keys.
        is_full: each packed token is known to belong to a sequence.
    """

    scale: float
    causal: bool = False
    dropout: float = 0.0
    window: tuple[int, int] = (-1, -1)
    longest: tuple[int, int] = (0, 0)
    is_full: bool = False


class Extra(NamedTuple):
    """Tensors of a kernel's call besides q, k and v, with no gradient.

    Attributes:
        mask: added to the scores, of their dtype, broadcasts to them; "cpu" and "efficient" have
            it.
        starts, key_starts: where packed sequences begin and end, int32 [n + 1]; "flash" has them,
            for one batch of all tokens. Keys without own ones have those of the queries.
    """

    mask: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None


class Result(NamedTuple):
    """Output [b, h, sq, dv], its log-sum-exp, float32 [b, h, sq], and what backward needs besides.

    The state has tensors (or None) and ints.
    A query that sees no key has an output of 0 and a log-sum-exp of -inf.
    """

    out: torch.Tensor
    lse: torch.Tensor
    state: tuple[Any, ...] = ()


class Kernel(NamedTuple):
    """Forward, of ``(q, k, v, extra, call)``, and backward of a kernel.

    Backward takes ``(grad, q, k, v, out, lse, state, extra, call)``, with ``grad`` in the layout of
    ``out``, and returns the gradients of q, k and v.
    """

    forward: Callable[..., Result]
    backward: Callable[..., _Gradients]


def like(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns ``grad`` in the layout of ``out``, as the backward kernels want it."""
    if grad.stride() == out.stride():
        return grad
    apart = zip(out.shape, grad.stride(), out.stride(), strict=True)
    if all(n == 1 or ours == theirs for n, ours, theirs in apart):
        return grad.as_strided(out.shape, out.stride())
    return torch.empty_like(out).copy_(grad)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: Extra, call: Call) -> Result:
    found = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, call.dropout, call.causal, False, scale=call.scale
    )
    lse = found[1]  # [b, h, sq] or [b, h, sq, 1], by the release
    return Result(found[0], lse.view(q.shape[:3]), (found[6], found[7], lse.dim()))


def _cudnn_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, state: tuple[Any, ...], extra: Extra, call: Call,
) -> _Gradients:  # fmt: skip
    seed, offset, dims = state
    found: Any = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.view(*q.shape[:3], *(1,) * (dims - 3)), seed, offset, None, None,
        None, q.shape[2], k.shape[2], call.dropout, call.causal, scale=call.scale,
    )  # fmt: skip
    return found


def _flash_arguments(
    q: torch.Tensor, k: torch.Tensor, extra: Extra, call: Call
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    longest = call.longest if extra.starts is not None else (q.shape[2], k.shape[2])
    key_starts = extra.starts if extra.key_starts is None else extra.key_starts
    fixed = (extra.starts, key_starts, *longest, call.dropout, call.causal)
    keywords: dict[str, Any] = {"scale": call.scale}
    if call.window != (-1, -1):
        keywords["window_size_left"], keywords["window_size_right"] = call.window
    return fixed, keywords


def _tokens(x: torch.Tensor, extra: Extra) -> torch.Tensor:
    """Returns x [b, h, s, d] as [b, s, h, d], or as [t, h, d] if sequences are packed."""
    x = x.transpose(1, 2)
    return x if extra.starts is None else x[0]


def _heads(x: torch.Tensor, extra: Extra) -> torch.Tensor:
    return (x if extra.starts is None else x[None]).transpose(1, 2)


def _has_blind_queries(q: torch.Tensor, k: torch.Tensor, extra: Extra) -> bool:
    """Returns True if some queries may see no key; a window holds a query's own position."""
    return extra.starts is not None or bool(q.shape[2] > k.shape[2])


def _outside(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Returns bool [t, 1, 1], True for tokens of ``x`` [t, h, d] behind the last sequence."""
    return (torch.arange(x.shape[0], device=x.device) >= starts[-1])[:, None, None]


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: Extra, call: Call) -> Result:
    fixed, keywords = _flash_arguments(q, k, extra, call)
    rows = (_tokens(x, extra) for x in (q, k, v))
    out, lse, *state, _ = _aten._flash_attention_forward(*rows, *fixed, False, **keywords)
    if _has_blind_queries(q, k, extra):
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    if extra.starts is not None:
        if not call.is_full:  # the kernel leaves the others unwritten
            outside = _outside(out, extra.starts)
            out.masked_fill_(outside, 0.0)
            lse = lse.masked_fill_(outside.flatten(), -torch.inf)
        lse = lse[None]
    return Result(_heads(out, extra), lse, tuple(state))


def _flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, state: tuple[Any, ...], extra: Extra, call: Call,
) -> _Gradients:  # fmt: skip
    fixed, keywords = _flash_arguments(q, k, extra, call)
    rows = (_tokens(x, extra) for x in (grad, q, k, v, out))
    if _has_blind_queries(q, k, extra):
        lse = _for_backward(lse)
    lse = lse if extra.starts is None else lse[0]
    found = _aten._flash_attention_backward(*rows, lse, *fixed, *state, **keywords)
    if extra.starts is not None and not call.is_full:
        key_starts = fixed[1]
        for x, starts in zip(found, (extra.starts, key_starts, key_starts), strict=True):
            x.masked_fill_(_outside(x, starts), 0.0)
    dq, dk, dv = (_heads(x, extra) for x in found)
    return dq, dk, dv


def _for_backward(lse: torch.Tensor) -> torch.Tensor:
    """Returns what makes weights of 0 where a query sees no key, which -inf does not."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _aligned(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Returns the mask [b, h, sq, sk] with rows that begin at multiples of 16 elements."""
    if mask is None:
        return None
    keys = k.shape[2]
    mask = mask.expand(*mask.shape[:3], keys).contiguous()
    if keys % 16:
        mask = functional.pad(mask, (0, -keys % 16))[..., :keys]
    return mask.expand(*q.shape[:3], keys)


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: Extra, call: Call
) -> Result:
    out, lse, *state = _aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(extra.mask, q, k), True, call.dropout, call.causal, scale=call.scale
    )
    lse = lse[..., : q.shape[2]]
    return Result(out, lse.masked_fill(lse == torch.inf, -torch.inf), tuple(state))


def _efficient_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, state: tuple[Any, ...], extra: Extra, call: Call,
) -> _Gradients:  # fmt: skip
    if extra.mask is not None:
        lse = _for_backward(lse)
    lse = functional.pad(lse, (0, -q.shape[2] % 32), value=torch.inf)  # as forward made it
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _aligned(extra.mask, q, k), out, lse, *state, call.dropout,
        [True, True, True, False], call.causal, scale=call.scale,
    )  # fmt: skip
    return dq, dk, dv


def _cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: Extra, call: Call) -> Result:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, call.causal, attn_mask=extra.mask, scale=call.scale
    )
    if extra.mask is not None:
        # The kernel writes 0 for a query that sees no key.
        lse = lse.masked_fill(extra.mask.amax(-1) == -torch.inf, -torch.inf)
    return Result(out, lse)


def _cpu_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, state: tuple[Any, ...], extra: Extra, call: Call,
) -> _Gradients:  # fmt: skip
    found: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, call.causal, attn_mask=extra.mask, scale=call.scale
    )
    return found


KERNELS = {
    "cudnn": Kernel(_cudnn, _cudnn_backward),
    "flash": Kernel(_flash, _flash_backward),
    "efficient": Kernel(_efficient, _efficient_backward),
    "cpu": Kernel(_cpu, _cpu_backward),
}


def attend_by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kernel: str,
    extra: Extra,
    call: Call,
    has_sink: bool = False,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention [b, h, sq, dv] by a kernel of ``KERNELS``, with gradients.

    Args:
        has_sink: the softmax has a sink.
        sink: the sinks, float32 [h]; None is 0 for all heads.
    """
    out: torch.Tensor = _Attention.apply(q, k, v, sink, *extra, kernel, call, has_sink)
    return out


class _Attention(OpFunction):
    LABEL = "DotProductAttention"

    @staticmethod
    def forward(ctx, q, k, v, sink, mask, starts, key_starts, kernel, call, has_sink):
        extra = Extra(mask, starts, key_starts)
        out, lse, state = KERNELS[kernel].forward(q, k, v, extra, call)
        if has_sink:
            out, lse = attention_sink_fwd(out, lse, sink, out=out)
        tensors = [x for x in state if not isinstance(x, int)]
        ctx.save_for_backward(q, k, v, sink, *extra, out, lse, *tensors)
        ctx.numbers = [x if isinstance(x, int) else None for x in state]
        ctx.kernel, ctx.call = kernel, call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, sink, mask, starts, key_starts, out, lse, *tensors = ctx.saved_tensors
        kept = iter(tensors)
        state = tuple(next(kept) if x is None else x for x in ctx.numbers)
        grad = like(grad, out)
        dsink = None
        if ctx.needs_input_grad[3]:
            dsink = attention_sink_bwd(grad, out, lse, sink)
        extra = Extra(mask, starts, key_starts)
        found = KERNELS[ctx.kernel].backward(grad, q, k, v, out, lse, state, extra, ctx.call)
        return *found, dsink, None, None, None, None, None, None
