"""amp_C's LAMB: the step by apex_te's op, and the step in two stages, partly by PyTorch."""

from __future__ import annotations

import torch

from apex_te.ops import multi_tensor_optim

from . import _multi_tensor
from ._multi_tensor import Tensors, take_lists, take_mode


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor,
    max_grad_norm: float,
    use_nvlamb_python: bool | None = None,
) -> None:
    """Steps LAMB (arXiv 1904.00962) in place.

    See ``apex_te.ops.multi_tensor_optim.lamb`` for the formula.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: not read.
        tensor_lists: [g, p, m, v]: gradients, which are not written, parameters and two moments.
        lr, beta1, beta2, epsilon, weight_decay: numbers.
        step: number of this update, from 1.
        bias_correction, grad_averaging: 0 or 1.
        mode: 0 for L2 weight decay, 1 for decoupled weight decay.
        global_grad_norm: L2 norm of all gradients, one float32 element.
        max_grad_norm: largest norm, to which gradients are clipped; 0 does not clip.
        use_nvlamb_python: True to apply the trust ratio without weight decay, too.

    Raises:
        TypeError: a tensor has a dtype other than float32, float16 and bfloat16.
        ValueError: another number of lists, a shape or device does not match, or an option is out
            of range.
    """
    adamw = take_mode("multi_tensor_lamb", mode)
    grads, params, m, v = take_lists("multi_tensor_lamb", chunk_size, tensor_lists, "g p m v")
    m32, v32 = _multi_tensor.float32(m), _multi_tensor.float32(v)
    multi_tensor_optim.lamb(
        params, grads, m32, v32, step=step, lr=float(lr), betas=(float(beta1), float(beta2)),
        eps=float(epsilon), weight_decay=float(weight_decay), adamw=adamw,
        bias_correction=bool(bias_correction), grad_averaging=bool(grad_averaging),
        nvlamb=bool(use_nvlamb_python), max_grad_norm=float(max_grad_norm),
        grad_norm=global_grad_norm,
    )  # fmt: skip
    _multi_tensor.write_back(m, m32)
    _multi_tensor.write_back(v, v32)


def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor,
    max_grad_norm: torch.Tensor,
    use_nvlamb_python: bool | None,
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    """Steps LAMB in place with scalars on the device.

    The arguments and errors are those of ``multi_tensor_lamb``, except for:

    Args:
        noop_flag: a value other than 0 skips the step.
        tensor_lists: [g, p, m, v], or [g, p, m, v, low-precision copies of p, which are written].
        lr: one float32 element.
        step: one float32 or int32 element.
        global_grad_norm: L2 norm of all gradients before they are multiplied by inv_scale.
        max_grad_norm: largest norm of the gradients before they are multiplied by inv_scale, one
            element; 0 makes all gradients 0.
        found_inf: not read; apex's caller copies found_inf to noop_flag.
        inv_scale: factor for the gradients, one float32 element.
    """
    adamw = take_mode("multi_tensor_lamb_mp", mode)
    lists = take_lists(
        "multi_tensor_lamb_mp", chunk_size, tensor_lists, "g p m v", "the model's copy of p"
    )
    grads, params, m, v = lists[:4]
    copies = lists[4] if len(lists) > 4 else None
    m32, v32 = _multi_tensor.float32(m), _multi_tensor.float32(v)
    clip = _multi_tensor.clip_factor(global_grad_norm.reshape(1), max_grad_norm.reshape(1))
    multi_tensor_optim.lamb(
        params if copies is None else copies, grads, m32, v32, step=step, lr=lr,
        betas=(float(beta1), float(beta2)), eps=float(epsilon), weight_decay=float(weight_decay),
        adamw=adamw, bias_correction=bool(bias_correction), grad_averaging=bool(grad_averaging),
        nvlamb=bool(use_nvlamb_python), masters=None if copies is None else params,
        inv_scale=inv_scale.reshape(1) * clip, found_inf=noop_flag,
    )  # fmt: skip
    _multi_tensor.write_back(m, m32)
    _multi_tensor.write_back(v, v32)


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    per_tensor_decay: torch.Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: torch.Tensor,
    max_global_grad_norm: float,
) -> None:
    """Computes LAMB's moments and its update without the trust ratio.

    Lists are gradients g, parameters p, moments m and v, and update; m, v and update are written.
    ``step`` counts from 0. apex_te's Adam step on parameters of zeros gives the update's direction,
    to which PyTorch adds the weight decay.

    Raises:
        ValueError: another number of lists, or a bad chunk_size.
    """
    grads, params, m, v, updates = take_lists(
        "multi_tensor_lamb_stage1_cuda", chunk_size, tensor_lists, "g p m v update"
    )
    if not params:
        return
    norm = global_grad_norm.reshape(1).to(params[0].device, torch.float32)
    m32, v32 = _multi_tensor.float32(m), _multi_tensor.float32(v)
    negated = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    multi_tensor_optim.adam(
        negated, grads, m32, v32, step=step + 1, lr=1.0, betas=(float(beta1), float(beta2)),
        eps=float(epsilon), inv_scale=_multi_tensor.clip_factor(norm, float(max_global_grad_norm)),
    )  # fmt: skip
    _multi_tensor.write_back(m, m32)
    _multi_tensor.write_back(v, v32)
    for update, p, direction, decay in zip(
        updates, params, negated, per_tensor_decay.unbind(), strict=True
    ):
        update.copy_(p.float() * decay - direction)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    per_tensor_param_norm: torch.Tensor,
    per_tensor_update_norm: torch.Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb_python: bool | None = None,
) -> None:
    """Computes p -= lr * ratio * update in PyTorch; lists are p and update.

    The ratio is each parameter's norm over its update's norm, both given as [number of tensors].
    The ratio is 1 if one of the norms is 0, or without both weight decay and ``use_nvlamb_python``.

    Raises:
        ValueError: another number of lists, or a bad chunk_size.
    """
    params, updates = take_lists(
        "multi_tensor_lamb_stage2_cuda", chunk_size, tensor_lists, "p update"
    )
    rates = torch.full_like(per_tensor_param_norm, float(lr))
    if use_nvlamb_python or weight_decay != 0:
        has_ratio = (per_tensor_param_norm != 0) & (per_tensor_update_norm != 0)
        ratios = rates * (per_tensor_param_norm / per_tensor_update_norm)
        rates = torch.where(has_ratio, ratios, rates)
    for p, update, rate in zip(params, updates, rates.unbind(), strict=True):
        p.copy_(p.float() - rate * update.float())
