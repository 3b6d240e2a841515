"""apex's contrib distributed_adam_cuda: Adam over lists whose new parameters go to another list."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops import multi_tensor_optim

from ._multi_tensor import Tensors, float32, take_lists, take_mode, write_back

__all__ = [
    "multi_tensor_fused_adam",
    "multi_tensor_fused_adam_capturable",
    "multi_tensor_fused_adam_with_param_remainders",
]

_LISTS = "p m v g p_out"


def multi_tensor_fused_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    grad_scale: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Steps Adam (mode 0) or AdamW (mode 1) in place; lists are p, m, v, g and p_out.

    Gradients are multiplied by ``grad_scale``, one float32 element. ``p_out`` receives the new p,
    rounded. All lists may be float32, float16 or bfloat16. noop_flag is not read.

    Raises:
        ValueError: another number of lists, or a bad mode or chunk_size.
    """
    _step(
        "multi_tensor_fused_adam", chunk_size, tensor_lists, grad_scale, lr, beta1, beta2, eps,
        step, mode, bias_correction, weight_decay, None,
    )  # fmt: skip


def multi_tensor_fused_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    grad_scale: torch.Tensor,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Steps as ``multi_tensor_fused_adam`` does, with lr and step on the device.

    ``lr`` is one float32 element, ``step`` one int32 element. A noop_flag that is not 0 skips the
    step.

    Raises:
        ValueError: another number of lists, or a bad mode or chunk_size.
    """
    _step(
        "multi_tensor_fused_adam_capturable", chunk_size, tensor_lists, grad_scale, lr, beta1,
        beta2, eps, step, mode, bias_correction, weight_decay, noop_flag,
    )  # fmt: skip


def multi_tensor_fused_adam_with_param_remainders(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    grad_scale: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Steps as ``multi_tensor_fused_adam`` does, on float32 weights that are held in two halves.

    Lists are bfloat16 p, int16 remainders, float32 m and v, g and bfloat16 p_out, which receives
    the new p and may be p.

    Raises:
        ValueError: another number of lists, or a bad mode or chunk_size.
    """
    op = "multi_tensor_fused_adam_with_param_remainders"
    adamw = take_mode(op, mode)
    p, rest, m, v, g, out = take_lists(op, chunk_size, tensor_lists, "read remainders m v g p_out")
    for source, target in zip(p, out, strict=True):
        if source is not target and source.data_ptr() != target.data_ptr():
            target.copy_(source)
    multi_tensor_optim.adam(
        out, g, m, v, step=step, lr=float(lr), betas=(float(beta1), float(beta2)),
        eps=float(eps), weight_decay=float(weight_decay), adamw=adamw,
        bias_correction=bool(bias_correction), masters=rest, inv_scale=grad_scale,
    )  # fmt: skip


def _step(
    op, chunk_size, tensor_lists, grad_scale, lr, beta1, beta2, eps, step, mode,
    bias_correction, weight_decay, found_inf,
):  # fmt: skip
    """Steps Adam for function ``op``; ``found_inf`` skips the step if it is not 0."""
    adamw = take_mode(op, mode)
    p, m, v, g, out = take_lists(op, chunk_size, tensor_lists, _LISTS)
    p32, m32, v32 = float32(p), float32(m), float32(v)
    multi_tensor_optim.adam(
        out, g, m32, v32, step=step, lr=lr, betas=(float(beta1), float(beta2)), eps=float(eps),
        weight_decay=float(weight_decay), adamw=adamw, bias_correction=bool(bias_correction),
        masters=p32, inv_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
    for tensors, copies in ((p, p32), (m, m32), (v, v32)):
        write_back(tensors, copies)
