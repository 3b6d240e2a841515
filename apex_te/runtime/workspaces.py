"""Scratch memory of kernels, one buffer for each device, stream and thread of use."""

from __future__ import annotations

import torch

_buffers: dict[tuple[int, int], torch.Tensor] = {}


def workspace(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Returns a uint8 tensor of ``num_bytes`` or more, reused by later calls on the same stream.

    Two streams never share one, so kernels on them cannot overwrite each other's partial sums.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    key = (index, torch.cuda.current_stream(index).cuda_stream)
    buffer = _buffers.get(key)
    if buffer is None or buffer.numel() < num_bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _buffers[key] = buffer
    return buffer
