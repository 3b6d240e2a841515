"""Broadcast of a batch from the first rank of the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import distributed

from .. import parallel_state


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, torch.Tensor] | None, datatype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns tensors of the group's first rank by name, on this process's device.

    Args:
        keys: names of the tensors.
        data: the tensors; only the first rank's are read.
        datatype: dtype of all of them.

    Raises:
        TypeError: a tensor of the first rank has another dtype.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    is_source = parallel_state.get_tensor_model_parallel_rank() == 0
    shapes: list[list[int] | None] = [None] * len(keys)
    if is_source and data is not None:
        for key in keys:
            if data[key].dtype != datatype:
                raise TypeError(
                    f"broadcast_data: {key} must have dtype {datatype}, got {data[key].dtype}"
                )
        shapes = [list(data[key].shape) for key in keys]
    distributed.broadcast_object_list(shapes, source, group)
    is_cuda = "nccl" in distributed.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    sizes = [torch.Size(shape or []) for shape in shapes]
    if is_source and data is not None:
        flat = torch.cat([data[key].reshape(-1).to(device) for key in keys])
    else:
        flat = torch.empty(sum(size.numel() for size in sizes), dtype=datatype, device=device)
    distributed.broadcast(flat, source, group)
    parts = flat.split([size.numel() for size in sizes])
    return {key: part.view(size) for key, part, size in zip(keys, parts, sizes, strict=True)}
