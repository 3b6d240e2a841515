"""apex's contrib fused_adam_cuda: Adam with float32 weights, a low-precision copy, a grad scale.

Its formula folds the bias correction into the step size, and epsilon and decay stand inside:
p -= lr sqrt(1 - beta2^t) / (1 - beta1^t) * (m / (sqrt(v) + eps) + decay * p), with sqrt(v + eps) in
mode 0.
"""

from __future__ import annotations

import math

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops import multi_tensor_optim

from ._e5m2 import cast, is_off
from ._multi_tensor import Tensors, scalar, take_lists

__all__ = [
    "adam",
    "adam_mt",
    "maybe_adam_undo",
    "maybe_cast",
    "maybe_cast_mt",
    "reversible_adam",
    "strided_check_finite",
]


def adam(
    p: torch.Tensor,
    p_copy: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Steps Adam in place for one parameter.

    Args:
        p: parameter, float32.
        p_copy: receives the new p, in the dtype of ``p_copy``; an empty tensor asks for no copy.
        m: first moment, float32.
        v: second moment, float32.
        g: gradient, which is divided by grad_scale.
        mode: 0 for epsilon added inside the square root, 1 for outside.

    Raises:
        ValueError: a tensor has another size than p, or mode, grad_scale or step is bad.
    """
    _check_sizes("fused_adam_cuda.adam", p, p_copy=p_copy, m=m, v=v, g=g)
    lists = [[t.view(-1)] for t in ([p, m, v, g, p_copy] if p_copy.numel() else [p, m, v, g])]
    _step(
        "fused_adam_cuda.adam", lists, lr, beta1, beta2, eps, grad_scale, step, mode,
        bias_correction, decay,
    )  # fmt: skip


def adam_mt(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Steps Adam in place for lists of tensors, as ``adam`` does for one parameter.

    Lists are p, m, v, g and, if wanted, p_copy. noop_flag is not read.

    Raises:
        ValueError: another number of lists, or mode, grad_scale, step or chunk_size is bad.
    """
    lists = take_lists("fused_adam_cuda.adam_mt", chunk_size, tensor_lists, "p m v g", "p_copy")
    _step(
        "fused_adam_cuda.adam_mt", lists, lr, beta1, beta2, eps, grad_scale, step, mode,
        bias_correction, decay,
    )  # fmt: skip


def _check_sizes(op: str, p: torch.Tensor, **others: torch.Tensor) -> None:
    """Raises ValueError unless all tensors have the size of ``p``, or ``p_copy`` none."""
    for name, t in others.items():
        if t.numel() != p.numel() and not (name == "p_copy" and t.numel() == 0):
            raise ValueError(f"{op}: {name} must have {p.numel()} elements, got {t.numel()}")


def _check_options(op, mode, grad_scale, step, beta1, beta2, bias_correction):
    """Returns the root of the second bias correction and the first one, both 1 without them."""
    if mode not in (0, 1):
        raise ValueError(f"{op}: mode must be 0 or 1, got {mode!r}")
    if grad_scale == 0:
        raise ValueError(f"{op}: grad_scale must not be 0")
    if not bias_correction:
        return 1.0, 1.0
    if step < 1:
        raise ValueError(f"{op}: step must be at least 1, got {step}")
    return math.sqrt(1 - beta2**step), 1 - beta1**step


def _step(op, lists, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay):
    """Steps Adam for function ``op``; lists are p, m, v, g and, if wanted, p_copy."""
    lr, beta1, beta2, grad_scale = float(lr), float(beta1), float(beta2), float(grad_scale)
    root2, correction1 = _check_options(op, mode, grad_scale, step, beta1, beta2, bias_correction)
    p, m, v, g = lists[:4]
    copies = lists[4] if len(lists) > 4 else None
    if not p:
        return
    # The op divides sqrt(v) by root2 and m by correction1, and decays by lr alone.
    multi_tensor_optim.adam(
        p if copies is None else copies, g, m, v, step=step, lr=lr, betas=(beta1, beta2),
        eps=float(eps) / (root2 if mode else 1.0), eps_inside_sqrt=not mode,
        weight_decay=float(decay) * root2 / correction1, adamw=True,
        bias_correction=bool(bias_correction), masters=None if copies is None else p,
        inv_scale=None if grad_scale == 1.0 else scalar(1.0 / grad_scale, p[0]),
    )  # fmt: skip


def _moved(m: torch.Tensor, v: torch.Tensor, eps: float, mode: int) -> torch.Tensor:
    """Returns m over the root of v, with ``eps`` where ``mode`` has it."""
    return m / ((v + eps).sqrt() if mode == 0 else v.sqrt() + eps)


@torch.no_grad()
def reversible_adam(
    p: torch.Tensor,
    p_copy: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Steps Adam as ``adam`` does, but leaves elements whose gradient is not finite unchanged.

    ``p_copy`` may also be uint8, for E5M2. With a gradient that is not finite its first element
    becomes infinity.

    Raises:
        ValueError: a tensor has another size than p, or mode, grad_scale or step is bad.
    """
    _check_sizes("fused_adam_cuda.reversible_adam", p, p_copy=p_copy, m=m, v=v, g=g)
    lists = [t.reshape(-1).float() for t in (p, m, v)]
    stepped = [[t.clone()] for t in lists]
    bad = ~(g.reshape(-1).float() / grad_scale).isfinite()
    _step(
        "fused_adam_cuda.reversible_adam", [*stepped, [g.reshape(-1)]], lr, beta1, beta2, eps,
        grad_scale, step, mode, bias_correction, decay,
    )  # fmt: skip
    for kept, old, (new,) in zip((p, m, v), lists, stepped, strict=True):
        kept.copy_(torch.where(bad, old, new).view(kept.shape))
    if p_copy.numel():
        cast(p, p_copy.view(p.shape))
        infinity = 0x7C if p_copy.dtype is torch.uint8 else math.inf
        first = p_copy.view(-1)[:1]
        first.copy_(torch.where(bad.any(), torch.full_like(first, infinity), first))


@torch.no_grad()
def maybe_adam_undo(
    overflow_flag: torch.Tensor,
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Undoes a step of ``reversible_adam`` in place, by PyTorch, unless ``overflow_flag`` is 0.

    An ``overflow_flag`` without an element undoes it, too. Every element is restored, but for
    rounding; apex restores one of four. The host does not wait for the flag.

    Raises:
        ValueError: a tensor has another size than p, or mode, grad_scale or step is bad.
    """
    op = "fused_adam_cuda.maybe_adam_undo"
    _check_sizes(op, p, m=m, v=v, g=g)
    root2, correction1 = _check_options(op, mode, grad_scale, step, beta1, beta2, bias_correction)
    scaled = g.view(p.shape).float() / grad_scale
    undoes = scaled.isfinite()
    if overflow_flag.numel():
        undoes = undoes & ~is_off(overflow_flag)
    rate = lr * root2 / correction1
    new_m, new_v = m.view(p.shape), v.view(p.shape)
    old_p = (p + rate * _moved(new_m, new_v, eps, mode)) / (1 - rate * decay)
    old_m = (new_m - (1 - beta1) * scaled) / beta1
    old_v = ((new_v - (1 - beta2) * scaled * scaled) / beta2).clamp_min(0)
    for kept, old in ((p, old_p), (new_m, old_m), (new_v, old_v)):
        kept.copy_(torch.where(undoes, old, kept))


@torch.no_grad()
def maybe_cast(overflow_flag: torch.Tensor, p_in: torch.Tensor, p_out: torch.Tensor) -> None:
    """Copies ``p_in`` to ``p_out``, of other dtypes; uint8 is E5M2.

    Nothing is written if ``overflow_flag`` has an element that is not 0; the host does not wait.
    """
    maybe_cast_mt(1, overflow_flag, [[p_in], [p_out]])


@torch.no_grad()
def maybe_cast_mt(
    chunk_size: int, overflow_flag: torch.Tensor, tensor_lists: list[Tensors]
) -> None:
    """Copies lists of tensors as ``maybe_cast`` does one; lists are in and out.

    Raises:
        ValueError: another number of lists, or a bad chunk_size.
    """
    inputs, outputs = take_lists(
        "fused_adam_cuda.maybe_cast_mt", chunk_size, tensor_lists, "in out"
    )
    for p_in, p_out in zip(inputs, outputs, strict=True):
        if not overflow_flag.numel():
            cast(p_in, p_out)
            continue
        made = torch.empty_like(p_out)
        cast(p_in, made)
        p_out.copy_(torch.where(is_off(overflow_flag), made, p_out))


@torch.no_grad()
def strided_check_finite(
    overflow_flag: torch.Tensor, p_copy: torch.Tensor, stride: int, clear_overflow_first: int
) -> None:
    """Sets ``overflow_flag`` to 1 if an element at a multiple of ``stride`` is not finite.

    ``clear_overflow_first`` sets the flag to 0 before. uint8 is E5M2.

    Raises:
        ValueError: ``stride`` is not positive.
    """
    if stride < 1:
        raise ValueError(
            f"fused_adam_cuda.strided_check_finite: stride must be at least 1, got {stride}"
        )
    if clear_overflow_first:
        overflow_flag.zero_()
    looked_at = p_copy.view(-1)[::stride]
    if looked_at.dtype is torch.uint8:
        is_bad = ((looked_at & 0x7C) == 0x7C).any()
    else:
        is_bad = ~looked_at.isfinite().all()
    overflow_flag.masked_fill_(is_bad, 1)
