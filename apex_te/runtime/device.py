"""Devices: the FP8 formats that they multiply, scratch memory of kernels, copies of tensors.

AMD's gfx94x (MI300) multiply e4m3fnuz and e5m2fnuz, gfx95x and gfx12 the OCP formats e4m3fn and
e5m2; other AMD GPUs have no FP8 matrix units. NVIDIA GPUs have them from sm_89 on, with the OCP
formats.
"""

from __future__ import annotations

import torch


def amd_arch(device: torch.device) -> str | None:
    """Returns the name of an AMD GPU's arch, such as "gfx942"; None for other devices."""
    if device.type != "cuda" or torch.version.hip is None:
        return None
    return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]


def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability (major, minor) of an NVIDIA GPU, (0, 0) for other devices.

    torch reports a capability for AMD GPUs, too, with another meaning: (9, 0) for a gfx90a.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    if device.index is None or torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(device)
    found = _capabilities.get(device.index)
    if found is None:
        found = _capabilities[device.index] = torch.cuda.get_device_capability(device)
    return found


_capabilities: dict[int, tuple[int, int]] = {}  # by index


def multiplies_fnuz(device: torch.device) -> bool:
    """Returns True if the device's FP8 matrix units take the fnuz formats rather than OCP's."""
    return (amd_arch(device) or "").startswith("gfx94")


def has_fp8_products(device: torch.device) -> bool:
    """Returns True if the device, the CPU too, multiplies FP8 matrices with one scale each."""
    arch = amd_arch(device)
    if arch is not None:
        return arch.startswith(("gfx94", "gfx95", "gfx12"))
    return device.type != "cuda" or nvidia_capability(device) >= (8, 9)


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


def moved(x: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns ``x`` on ``device``, in ``dtype`` if given, waiting only for copies to the CPU.

    A GPU runs the copy before the kernels that are launched next, so the host need not wait. A copy
    to the CPU with ``non_blocking=True`` might be read before it has arrived, so that one is waited
    for.
    """
    return x.to(device, dtype or x.dtype, non_blocking=device.type != "cpu")
