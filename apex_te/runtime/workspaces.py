"""Scratch memory of kernels, one buffer for each device and stream."""

from __future__ import annotations

import torch

# By device and stream: the buffer and its size, which costs a call to ask a tensor for.
_buffers: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}


def workspace(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Returns uint8 scratch memory of at least ``num_bytes`` for kernels on the current stream.

    Later calls on the same stream get the same buffer; its content does not outlive the next kernel
    that uses it. Two streams never share a buffer, so kernels on them cannot overwrite each other's
    partial sums.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    # Not torch.cuda.current_stream, which makes a Python object for each product.
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    found = _buffers.get(key)
    if found is None or found[1] < num_bytes:
        found = torch.empty(num_bytes, dtype=torch.uint8, device=device), num_bytes
        _buffers[key] = found
    return found[0]
