"""apex's contrib fused_adam_cuda: Adam with float32 weights, a low-precision copy, a grad scale.

Its formula folds the bias correction into the step size, and epsilon and decay stand inside:
p -= lr sqrt(1 - beta2^t) / (1 - beta1^t) * (m / (sqrt(v) + eps) + decay * p).
"""

from __future__ import annotations

import math

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops import multi_tensor_optim

from ._multi_tensor import Tensors, not_served, scalar, take_lists

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
        mode: 1, for epsilon added outside the square root.

    Raises:
        ValueError: a tensor has another size than p, or mode, grad_scale or step is bad.
        NotImplementedError: mode is 0, apex's epsilon inside the square root.
    """
    for name, t in (("p_copy", p_copy), ("m", m), ("v", v), ("g", g)):
        if t.numel() != p.numel() and not (name == "p_copy" and t.numel() == 0):
            raise ValueError(
                f"fused_adam_cuda.adam: {name} must have {p.numel()} elements, got {t.numel()}"
            )
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
        NotImplementedError: mode is 0.
    """
    lists = take_lists("fused_adam_cuda.adam_mt", chunk_size, tensor_lists, "p m v g", "p_copy")
    _step(
        "fused_adam_cuda.adam_mt", lists, lr, beta1, beta2, eps, grad_scale, step, mode,
        bias_correction, decay,
    )  # fmt: skip


def _step(op, lists, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay):
    """Steps Adam for function ``op``; lists are p, m, v, g and, if wanted, p_copy."""
    if mode == 0:
        raise NotImplementedError(
            f"{op}: mode 0, epsilon inside the square root, is not served by apex_te: its Adam "
            "adds epsilon outside, as mode 1 does; see docs/apex.md"
        )
    if mode != 1:
        raise ValueError(f"{op}: mode must be 1, got {mode!r}")
    if grad_scale == 0:
        raise ValueError(f"{op}: grad_scale must not be 0")
    p, m, v, g = lists[:4]
    copies = lists[4] if len(lists) > 4 else None
    if not p:
        return
    lr, beta1, beta2, grad_scale = float(lr), float(beta1), float(beta2), float(grad_scale)
    # The op divides sqrt(v) by root2 and m by correction1, and decays by lr alone.
    root2 = correction1 = 1.0
    if bias_correction:
        if step < 1:
            raise ValueError(f"{op}: step must be at least 1, got {step}")
        root2, correction1 = math.sqrt(1 - beta2**step), 1 - beta1**step
    multi_tensor_optim.adam(
        p if copies is None else copies, g, m, v, step=step, lr=lr, betas=(beta1, beta2),
        eps=float(eps) / root2, weight_decay=float(decay) * root2 / correction1, adamw=True,
        bias_correction=bool(bias_correction), masters=None if copies is None else p,
        inv_scale=None if grad_scale == 1.0 else scalar(1.0 / grad_scale, p[0]),
    )  # fmt: skip


_UNDO = "it belongs to optimizers that undo steps or hold E5M2 weights, which the suite has not"
maybe_adam_undo = not_served("fused_adam_cuda.maybe_adam_undo", _UNDO)
maybe_cast = not_served("fused_adam_cuda.maybe_cast", _UNDO)
maybe_cast_mt = not_served("fused_adam_cuda.maybe_cast_mt", _UNDO)
reversible_adam = not_served("fused_adam_cuda.reversible_adam", _UNDO)
strided_check_finite = not_served("fused_adam_cuda.strided_check_finite", _UNDO)
