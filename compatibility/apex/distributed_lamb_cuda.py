"""apex's contrib distributed_lamb_cuda: LAMB in two parts, with options for each tensor."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops import multi_tensor, multi_tensor_optim

from ._e5m2 import cast, is_off
from ._multi_tensor import Tensors, float32, take_lists, take_mode, write_back

__all__ = ["multi_tensor_lamb_compute_update_term", "multi_tensor_lamb_update_weights"]


@torch.no_grad()
def multi_tensor_lamb_compute_update_term(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    per_tensor_beta1: torch.Tensor,
    per_tensor_beta2: torch.Tensor,
    per_tensor_beta3: torch.Tensor,
    per_tensor_bias_correction: torch.Tensor,
    step: torch.Tensor,
    per_tensor_epsilon: torch.Tensor,
    mode: int,
    per_tensor_decay: torch.Tensor,
    global_scale: torch.Tensor,
    global_grad_norm: torch.Tensor,
    max_grad_norm: float,
) -> None:
    """Computes LAMB's moments and its updates before the trust ratio.

    Lists are g, p, m, v and u, the updates; m, v and u are written. A noop_flag that is not 0 skips
    the call.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: one int32 element.
        tensor_lists: [g, p, m, v, u].
        per_tensor_beta1, per_tensor_beta2, per_tensor_epsilon, per_tensor_decay: options, [number
            of tensors].
        per_tensor_beta3: not read, as in apex; gradients have the weight 1 - beta1.
        per_tensor_bias_correction: int32 [number of tensors].
        step: one int32 element.
        mode: 0 for L2 weight decay, 1 for decoupled weight decay.
        global_scale: one element; gradients are divided by it.
        global_grad_norm: one element, the L2 norm of all gradients as given.
        max_grad_norm: largest norm of the gradients after the division; 0 does not clip.

    Raises:
        ValueError: another number of lists, or a bad mode or chunk_size.
    """
    op = "multi_tensor_lamb_compute_update_term"
    adamw = take_mode(op, mode)
    g, p, m, v, updates = take_lists(op, chunk_size, tensor_lists, "g p m v u")
    if not p:
        return
    factor = global_scale.reshape(1).float().reciprocal()
    if max_grad_norm > 0:
        norm = global_grad_norm.reshape(1).float() * factor
        factor = factor * (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    multi_tensor_optim.lamb_update(
        p, multi_tensor.dense(g), m, v, updates, beta1s=per_tensor_beta1.float(),
        beta2s=per_tensor_beta2.float(), eps=per_tensor_epsilon.float(),
        weight_decays=per_tensor_decay.float(), bias_corrections=per_tensor_bias_correction,
        step=step.reshape(1), factor=factor, adamw=adamw, found_inf=noop_flag,
    )  # fmt: skip


@torch.no_grad()
def multi_tensor_lamb_update_weights(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    per_tensor_param_norm: torch.Tensor,
    per_tensor_update_norm: torch.Tensor,
    update_norm_offset: torch.Tensor,
    learning_rate: torch.Tensor,
    per_tensor_decay: torch.Tensor,
    global_grad_norm: torch.Tensor,
    use_nvlamb: bool,
) -> None:
    """Computes p -= lr * ratio * u; lists are u, p and p_copy, which receives the new p.

    The ratio is a parameter's norm over its update's. It is 1 if one of the norms is 0, or without
    both weight decay and ``use_nvlamb``. ``p_copy`` may be uint8, for E5M2. A noop_flag that is not
    0 skips the call.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: one int32 element.
        tensor_lists: [u, p, p_copy].
        per_tensor_param_norm: [number of tensors].
        per_tensor_update_norm: norms, from which ``update_norm_offset`` takes one for each tensor.
        update_norm_offset: int64 [number of tensors].
        learning_rate: one element.
        per_tensor_decay: [number of tensors].
        global_grad_norm: not read.
        use_nvlamb: True to apply the ratio without weight decay, too.

    Raises:
        ValueError: another number of lists, or a bad chunk_size.
    """
    updates, p, copies = take_lists(
        "multi_tensor_lamb_update_weights", chunk_size, tensor_lists, "g p p_copy"
    )
    if not p:
        return
    param_norm = per_tensor_param_norm.float()
    update_norm = per_tensor_update_norm.float()[update_norm_offset]
    lr = learning_rate.reshape(1).float()
    has_ratio = (param_norm != 0) & (update_norm != 0)
    if not use_nvlamb:
        has_ratio &= per_tensor_decay != 0
    rates = torch.where(has_ratio, lr * (param_norm / update_norm), lr)
    p32 = float32(p)
    bytes_ = copies[0].dtype is torch.uint8
    multi_tensor_optim.descend(
        p32 if bytes_ else copies, multi_tensor.dense(updates), rates,
        masters=None if bytes_ else p32, found_inf=noop_flag,
    )  # fmt: skip
    write_back(p, p32)
    if bytes_:
        for source, target in zip(p, copies, strict=True):
            made = torch.empty_like(target)
            cast(source, made)
            target.copy_(torch.where(is_off(noop_flag), made, target))
