"""Operations on lists of tensors, and the object that calls them, as apex names them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .....compatibility.apex.amp_C import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from .....ops import multi_tensor
from .... import _multi_tensor_apply
from ..._names import named

__all__ = [
    "MultiTensorApply", "multi_tensor_adam", "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master", "multi_tensor_applier", "multi_tensor_l2norm",
    "multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]  # fmt: skip


@named("transformer_engine.pytorch.optimizers.multi_tensor_apply")
class MultiTensorApply(_multi_tensor_apply.MultiTensorApply):
    """Callable that calls an operation on lists of tensors with its chunk size."""


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale_tensor(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    scale: torch.Tensor,
) -> None:
    """Computes out = in * scale, with the factor on the device.

    Args:
        chunk_size: not used.
        noop_flag: one float32 or int32 element; becomes 1 if a stored result is not finite.
        tensor_lists: [in, out], float32, float16 or bfloat16; an out may be its in.
        scale: one element.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: another number of lists, or a shape or device does not match.
    """
    inputs, outputs = tensor_lists
    factor = scale.reshape(1).to(torch.float32)
    multi_tensor.scale(list(inputs), list(outputs), factor, found_inf=noop_flag)
