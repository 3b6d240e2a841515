"""FP8 formats that a device can multiply: the one module that knows GPU archs by name.

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
    return torch.cuda.get_device_capability(device)


def multiplies_fnuz(device: torch.device) -> bool:
    """Returns True if the device's FP8 matrix units take the fnuz formats rather than OCP's."""
    return (amd_arch(device) or "").startswith("gfx94")


def has_fp8_products(device: torch.device) -> bool:
    """Returns True if the device, the CPU too, multiplies FP8 matrices with one scale each."""
    arch = amd_arch(device)
    if arch is not None:
        return arch.startswith(("gfx94", "gfx95", "gfx12"))
    return device.type != "cuda" or nvidia_capability(device) >= (8, 9)
