"""apex's contrib fused_lamb_cuda: LAMB with the gradients' global norm as a number."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__

from ._lamb import multi_tensor_lamb
from ._multi_tensor import Tensors, scalar

__all__ = ["lamb"]


def lamb(
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
    global_grad_norm: float,
    max_grad_norm: float,
) -> None:
    """Steps LAMB in place as ``amp_C.multi_tensor_lamb`` does, without its ``use_nvlamb_python``.

    ``global_grad_norm`` is a Python number; the other arguments are the same.
    """
    norm = scalar(float(global_grad_norm), noop_flag)
    multi_tensor_lamb(
        chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, bias_correction,
        weight_decay, grad_averaging, mode, norm, max_grad_norm,
    )  # fmt: skip
