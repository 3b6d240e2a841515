"""CUDA archs: parsing, choice, coverage of a device, nvcc flags."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .errors import ArchError

Capability = tuple[int, int]
EXAMPLE = 'APEX_TE_CUDA_ARCH_LIST="9.0" (several: "8.0;9.0+PTX")'
_TOKEN = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?", re.IGNORECASE)
_OWN_ARCH = re.compile(r"_sm(\d+)(\d)_cuda\.cu$")
_NAMES = {
    "turing": "7.5",
    "ampere": "8.0 8.6",
    "ada": "8.9",
    "hopper": "9.0",
    "blackwell": "10.0 12.0",
}


class Arch(NamedTuple):
    """One target: compute capability, ``a`` / ``f`` suffix, and whether PTX goes along."""

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def number(self) -> str:
        """The arch as nvcc writes it, such as ``90a``."""
        return f"{self.major}{self.minor}{self.suffix}"

    def covers(self, capability: Capability) -> bool:
        """Whether code for this arch runs on a device of ``capability``."""
        own = (self.major, self.minor)
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
    """One arch such as ``9.0a`` or ``8.0+PTX``; raises ArchError."""
    match = _TOKEN.fullmatch(text.strip())
    if match is None:
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
        if name.lower() == "native":
            devices = native() if native is not None else ()
            if not devices:
                raise ArchError(f'arch "native" needs a visible GPU; name the archs: {EXAMPLE}')
            found.update(Arch(*device, ptx=bool(plus)) for device in devices)
        elif name.lower() in _NAMES and (not plus or rest.upper() == "PTX"):
            found.update(parse_arch(part + plus + rest) for part in _NAMES[name.lower()].split())
        else:
            found.add(parse_arch(token))
    return tuple(sorted(found))


def specialise(archs: Iterable[Arch], specific: Iterable[Capability]) -> tuple[Arch, ...]:
    """Turn a plain arch into its ``a`` form where the op has files for exactly that arch.

    The PTX of an ``a`` arch runs nowhere else, so "9.0+PTX" keeps its plain form beside "9.0a".
    """
    wanted = set(specific)
    result: set[Arch] = set()
    for arch in archs:
        if not arch.suffix and (arch.major, arch.minor) in wanted:
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
    return sorted({cuda.get_device_capability(i) for i in range(cuda.device_count())})


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
    import subprocess

    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    pairs = [line.split() for line in done.stdout.splitlines() if done.returncode == 0]
    return sorted({(int(major), int(minor)) for major, minor in pairs})


def named_arch_list() -> tuple[str, str] | None:
    """(variable, text) of the arch list in the environment, or None."""
    for variable in ("APEX_TE_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST"):
        text = os.environ.get(variable, "").strip()
        if text:
            return variable, text
    return None


def own_arch(source: str) -> Arch | None:
    """The arch of a file such as ``<op>_sm90_cuda.cu`` (9.0a), None for other files."""
    match = _OWN_ARCH.search(source)
    return Arch(int(match[1]), int(match[2]), "a") if match else None


def choose(
    op: str, min_arch: Capability, specific: Iterable[Capability], capability: Capability | None
) -> tuple[Arch, ...]:
    """The archs to build ``op`` for: the environment's list, else the visible GPUs.

    Raises ArchError when none can be chosen or the list does not serve ``capability``.
    """
    floor = f"{min_arch[0]}.{min_arch[1]}"
    if capability is not None and capability < min_arch:
        raise ArchError(f"{op}: needs a GPU of arch {floor} or later, got {Arch(*capability)}")
    named = named_arch_list()
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
            raise ArchError(f"{op}: no GPU is visible to choose a CUDA arch from; set {EXAMPLE}")
        archs = tuple(sorted(Arch(*device) for device in devices))
        origin = "the visible GPUs"
    usable = [arch for arch in archs if (arch.major, arch.minor) >= min_arch]
    if not usable:
        raise ArchError(f"{op}: needs arch {floor} or later, and {origin} names none")
    result = specialise(usable, specific)
    if capability is not None and not any(arch.covers(capability) for arch in result):
        raise ArchError(
            f"{op}: {origin} does not cover the device of arch {Arch(*capability)};"
            " add it to the list"
        )
    return result
