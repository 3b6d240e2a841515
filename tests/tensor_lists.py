"""Lists of tensors that multi_tensor's tests share."""

import torch
from checks import DTYPES

# Empty first, in the middle and last; below, at and above chunks of 2,048 and 16,384.
SIZES = [0, 1, 3, 7, 8, 127, 0, 129, 1000, 2048, 2049, 3584, 4095, 16384, 16385, 40000, 0]
MIXED = "mixed"


def tensors(device, dtype, sizes=SIZES, factor=1.0):
    """Random tensors; of all dtypes in turn for MIXED."""
    types = DTYPES if dtype is MIXED else [dtype]
    made = [torch.randn(n) * factor for n in sizes]
    return [t.to(types[i % len(types)]).to(device) for i, t in enumerate(made)]


def flags(device):
    return [torch.zeros(1, dtype=d, device=device) for d in (torch.float32, torch.int32)]


def ones(count, device, value=1.0):
    return [torch.full((1,), value, dtype=torch.float32, device=device) for _ in range(count)]
