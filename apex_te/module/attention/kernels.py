"""PyTorch's fused attention kernels with the log-sum-exp of the scores, forward and backward.

Backward takes any output and log-sum-exp of the same scores, also of more keys than the call's:
weights are ``exp(score - lse)``, so that results of parts of the keys can be joined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

_aten = torch.ops.aten
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Call(NamedTuple):
    """Options of a kernel's call for q [b, h, sq, d], k and v [b, g, sk, d].

    Attributes:
        causal: query i sees keys up to i.
        window: (left, right) around key i + sk - sq, -1 = no limit; kernel "flash" alone has it.
        longest: lengths of the longest sequences of packed queries and keys.
    """

    scale: float
    causal: bool = False
    dropout: float = 0.0
    window: tuple[int, int] = (-1, -1)
    longest: tuple[int, int] = (0, 0)


class Extra(NamedTuple):
    """Tensors of a kernel's call besides q, k and v, with no gradient.

    Attributes:
        mask: added to the scores, of their dtype, broadcasts to them; "cpu" and "efficient" have
            it.
        starts, key_starts: where packed sequences begin and end, int32 [n + 1]; "flash" has them,
            for one batch of all tokens.
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
    fixed = (extra.starts, extra.key_starts, *longest, call.dropout, call.causal)
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


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: Extra, call: Call) -> Result:
    fixed, keywords = _flash_arguments(q, k, extra, call)
    rows = (_tokens(x, extra) for x in (q, k, v))
    out, lse, *state, _ = _aten._flash_attention_forward(*rows, *fixed, False, **keywords)
    out = _heads(out, extra)
    if extra.starts is not None or call.window != (-1, -1):
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # of queries that see no key
    if extra.starts is not None:
        outside = torch.arange(q.shape[2], device=q.device) >= extra.starts[-1]
        out.masked_fill_(outside[:, None], 0.0)  # left unwritten
        lse = lse.masked_fill_(outside, -torch.inf)[None]
    return Result(out, lse, tuple(state))


def _flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, state: tuple[Any, ...], extra: Extra, call: Call,
) -> _Gradients:  # fmt: skip
    fixed, keywords = _flash_arguments(q, k, extra, call)
    rows = (_tokens(x, extra) for x in (grad, q, k, v, out))
    lse = lse if extra.starts is None else lse[0]
    found = _aten._flash_attention_backward(*rows, lse, *fixed, *state, **keywords)
    dq, dk, dv = (_heads(x, extra) for x in found)
    return dq, dk, dv


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
