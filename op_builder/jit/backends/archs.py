"""GPU archs, CUDA's and AMD's: parsing, choice, coverage of a device, nvcc flags."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import ArchError
from . import hip

# (major, minor) of an NVIDIA GPU, (major, minor, stepping) of an AMD one
Capability = tuple[int, int] | tuple[int, int, int]
EXAMPLE = 'APEX_TE_CUDA_ARCH_LIST="9.0" (several: "8.0;9.0+PTX")'
_TOKEN = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?", re.IGNORECASE)
_GFX = re.compile(r"gfx(\d{1,2})(\d)([0-9a-f])((?::[\w-]+[+-])*)", re.IGNORECASE)
HIP_EXAMPLE = 'APEX_TE_ROCM_ARCH="gfx90a" (several: "gfx90a;gfx942")'
KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"  # the kernel driver's list of AMD GPUs
_OWN_ARCH = re.compile(r"_sm(\d+)(\d)_cuda\.cu$")
_NAMES = {
    "turing": "7.5",
    "ampere": "8.0 8.6",
    "ada": "8.9",
    "hopper": "9.0",
    "blackwell": "10.0 12.0",
}


class Arch(NamedTuple):
    """One target: compute capability, ``a`` / ``f`` suffix, and whether PTX goes along.

    An AMD arch has a stepping instead of the suffix: gfx90a is (9, 0, 10).
    """

    major: int
    minor: int
    suffix: str | int = ""
    ptx: bool = False

    @property
    def is_amd(self) -> bool:
        """Whether it is an AMD GPU's."""
        return isinstance(self.suffix, int)

    def __str__(self) -> str:
        if isinstance(self.suffix, int):
            return f"gfx{self.major}{self.minor}{self.suffix:x}"
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def number(self) -> str:
        """The arch as nvcc writes it, such as ``90a``, or hipcc, such as ``gfx90a``."""
        if self.is_amd:
            return str(self)
        return f"{self.major}{self.minor}{self.suffix}"

    def covers(self, capability: Capability) -> bool:
        """Whether code for this arch runs on a device of ``capability``."""
        own = (self.major, self.minor)
        if self.is_amd or len(capability) != 2:
            return (*own, self.suffix) == capability
        if self.suffix == "a":
            return own == capability
        same_major = self.major == capability[0] and self.minor <= capability[1]
        return same_major or (self.ptx and not self.suffix and own <= capability)

    def gencode(self) -> list[str]:
        """nvcc's -gencode flags for this arch."""
        flags = [f"-gencode=arch=compute_{self.number},code=sm_{self.number}"]
        if self.ptx:
            flags.append(f"-gencode=arch=compute_{self.number},code=compute_{self.number}")
        return flags


def parse_arch(text: str) -> Arch:
    """One arch such as ``9.0a``, ``8.0+PTX`` or ``gfx90a``; raises ArchError.

    Target features of an AMD arch (``gfx90a:xnack-``) are left out: code without runs with any.
    """
    gfx = _GFX.fullmatch(text.strip())
    if gfx is not None:
        return Arch(int(gfx[1]), int(gfx[2]), int(gfx[3], 16))
    match = _TOKEN.fullmatch(text.strip())
    if match is None:
        if hip.is_active():
            raise ArchError(f"unknown ROCm arch {text!r}; example: {HIP_EXAMPLE}")
        raise ArchError(f"unknown CUDA arch {text!r}; example: {EXAMPLE}")
    return Arch(int(match[1]), int(match[2]), match[3].lower(), bool(match[4]))


def parse_arch_list(
    text: str, native: Callable[[], Sequence[Capability]] | None = None
) -> tuple[Arch, ...]:
    """Archs of a list separated by ``;``, ``,`` or blanks, sorted by number.

    ``native`` supplies the visible devices for the word "native". Raises ArchError.
    """
    found: set[Arch] = set()
    for token in re.split(r"[;,\s]+", text.strip()):
        if not token:
            continue
        name, plus, rest = token.partition("+")
        if name.lower() == "native" and not (plus and hip.is_active()):
            devices = native() if native is not None else ()
            if not devices:
                raise ArchError(f'arch "native" needs a visible GPU; name the archs: {example()}')
            found.update(Arch(*device)._replace(ptx=bool(plus)) for device in devices)
        elif name.lower() in _NAMES and (not plus or rest.upper() == "PTX"):
            found.update(parse_arch(part + plus + rest) for part in _NAMES[name.lower()].split())
        else:
            found.add(parse_arch(token))
    for arch in found:
        if arch.is_amd != hip.is_active():
            wanted, got = ("a ROCm", "CUDA") if hip.is_active() else ("a CUDA", "ROCm")
            raise ArchError(f"{arch} must be {wanted} arch, got one of {got}; example: {example()}")
    return tuple(sorted(found))


def example() -> str:
    """A list of archs as the environment names it here."""
    return HIP_EXAMPLE if hip.is_active() else EXAMPLE


def specialise(archs: Iterable[Arch], specific: Iterable[Capability]) -> tuple[Arch, ...]:
    """Turn a plain arch into its ``a`` form where the op has files for exactly that arch.

    The PTX of an ``a`` arch runs nowhere else, so "9.0+PTX" keeps its plain form beside "9.0a".
    """
    wanted = set(specific)
    result: set[Arch] = set()
    for arch in archs:
        if arch.suffix == "" and (arch.major, arch.minor) in wanted:
            result.add(Arch(arch.major, arch.minor, "a"))
            if not arch.ptx:
                continue
        result.add(arch)
    return tuple(sorted(result))


def covered(archs: Iterable[str], capability: Capability) -> bool:
    """Whether any arch of a manifest's list runs on ``capability``."""
    return any(parse_arch(arch).covers(capability) for arch in archs)


def initialised_capabilities() -> list[Capability]:
    """Devices torch sees, if torch is loaded and has initialised CUDA; never starts CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    return sorted({device_capability(i) for i in range(cuda.device_count())})


def device_capability(index: int) -> Capability:
    """The capability of one of torch's devices, which starts CUDA or HIP."""
    import torch

    if torch.version.hip is None:
        return torch.cuda.get_device_capability(index)
    return _capability_of(torch.cuda.get_device_properties(index).gcnArchName)


def _capability_of(gcn_arch_name: str) -> Capability:
    arch = parse_arch(gcn_arch_name)
    return (arch.major, arch.minor, int(arch.suffix))


def _kfd_capabilities() -> list[Capability]:
    """AMD GPUs that the kernel driver lists; needs no program and no runtime."""
    found: set[Capability] = set()
    for path in glob.glob(os.path.join(KFD_NODES, "*", "properties")):
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                match = re.search(r"^gfx_target_version (\d+)", file.read(), re.MULTILINE)
        except OSError:
            continue
        version = int(match[1]) if match else 0
        if version:  # a CPU's is 0
            found.add((version // 10000, version // 100 % 100, version % 100))
    return sorted(found)


_PROBE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, value = ctypes.c_int(), ctypes.c_int()
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for device in range(count.value):
        pair = []
        for attribute in (75, 76):
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            pair.append(value.value)
        print(*pair)
"""


def visible_capabilities() -> list[Capability]:
    """Capabilities of the visible GPUs; asks the driver in a process of its own if torch cannot.

    A child asks, because initialising CUDA here would break later forks.
    """
    known = initialised_capabilities()
    if known:
        return known
    if hip.is_active():
        return _kfd_capabilities()
    import subprocess

    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE],
            env={**os.environ, "CUDA_CACHE_DISABLE": "1"},  # else the driver makes ~/.nv
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    pairs = [line.split() for line in done.stdout.splitlines() if done.returncode == 0]
    return sorted({(int(major), int(minor)) for major, minor in pairs})


def named_arch_list() -> tuple[str, str] | None:
    """(variable, text) of the arch list in the environment, or None."""
    variables = ("APEX_TE_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST")
    if hip.is_active():
        variables = ("APEX_TE_ROCM_ARCH", "PYTORCH_ROCM_ARCH")
    for variable in variables:
        text = os.environ.get(variable, "").strip()
        if text:
            return variable, text
    return None


def own_arch(source: str) -> Arch | None:
    """The arch of a file such as ``<op>_sm90_cuda.cu`` (9.0a), None for other files."""
    match = _OWN_ARCH.search(source)
    return Arch(int(match[1]), int(match[2]), "a") if match else None


def choose(
    op: str,
    min_arch: Capability,
    specific: Iterable[Capability],
    capability: Capability | None,
    named: tuple[str, str] | None = None,
) -> tuple[Arch, ...]:
    """The archs to build ``op`` for: the list ``named`` (whose it is, text), else the environment's
    list, else the visible GPUs.

    Raises ArchError when none can be chosen or the list does not serve ``capability``.
    """
    floor = f"{min_arch[0]}.{min_arch[1]}"
    if capability is not None and len(capability) == 2 and capability < min_arch:
        raise ArchError(f"{op}: needs a GPU of arch {floor} or later, got {Arch(*capability)}")
    named = named or named_arch_list()
    if named is not None:
        variable, text = named
        archs = parse_arch_list(text, visible_capabilities)
        origin = f"{variable}={text!r}"
    else:
        devices = set(initialised_capabilities())
        if capability is not None:
            devices.add(capability)
        elif not devices:
            devices.update(visible_capabilities())
        if not devices:
            kind = "ROCm" if hip.is_active() else "CUDA"
            raise ArchError(
                f"{op}: no GPU is visible to choose a {kind} arch from; set {example()}"
            )
        archs = tuple(sorted(Arch(*device) for device in devices))
        origin = "the visible GPUs"
    # an AMD GPU has no limit here: an op that needs some unit of it says so itself
    usable = [arch for arch in archs if arch.is_amd or (arch.major, arch.minor) >= min_arch]
    if not usable:
        raise ArchError(f"{op}: needs arch {floor} or later, and {origin} names none")
    result = specialise(usable, specific)
    if capability is not None and not any(arch.covers(capability) for arch in result):
        raise ArchError(
            f"{op}: {origin} does not cover the device of arch {Arch(*capability)};"
            " add it to the list"
        )
    return result
