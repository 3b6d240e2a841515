"""GPU archs of NVIDIA and AMD: parsing of lists, choice of those to build for, match with a GPU."""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import ArchError
from ..platform import CUDA, ROCM, gpu_platform, is_hip, python_program, text_of
from ..text import nearest

# (major, minor) of an NVIDIA GPU, (major, minor, stepping) of an AMD one
Capability = tuple[int, int] | tuple[int, int, int]
_TOKEN = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?", re.IGNORECASE)
_GFX = re.compile(r"gfx(\d{1,2})(\d)([0-9a-f])((?::[\w-]+[+-])*)", re.IGNORECASE)
KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"  # the kernel driver's list of AMD GPUs
_OWN_ARCH = re.compile(r"_sm(\d+)(\d)_cuda\.cu$")
_NAMES = {"turing": "7.5", "ampere": "8.0 8.6", "ada": "8.9", "hopper": "9.0"}
_NAMES["blackwell"] = "10.0 12.0"


class Arch(NamedTuple):
    """Target of GPU code; ``str()`` of it is its name in arch lists, such as "9.0a" or "gfx90a"."""

    major: int
    minor: int
    suffix: str | int = ""  # "a", "f" or "" for NVIDIA, the stepping for AMD: gfx90a is (9, 0, 10)
    ptx: bool = False  # with PTX, which later NVIDIA GPUs compile when they load it

    @property
    def is_amd(self) -> bool:
        """True for the arch of an AMD GPU."""
        return isinstance(self.suffix, int)

    def __str__(self) -> str:
        if isinstance(self.suffix, int):
            return f"gfx{self.major}{self.minor}{self.suffix:x}"
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def number(self) -> str:
        """Name of the arch in compiler flags: ``90a`` for nvcc, ``gfx90a`` for hipcc."""
        return str(self) if self.is_amd else f"{self.major}{self.minor}{self.suffix}"

    def covers(self, capability: Capability) -> bool:
        """Returns True if code for this arch runs on a device of ``capability``."""
        own = (self.major, self.minor)
        if self.is_amd or len(capability) != 2:
            return (*own, self.suffix) == capability
        if self.suffix == "a":
            return own == capability
        same_major = self.major == capability[0] and self.minor <= capability[1]
        return same_major or (self.ptx and not self.suffix and own <= capability)

    def gencode(self) -> list[str]:
        """Returns nvcc's ``-gencode`` flags for this arch."""
        kinds = ["sm", "compute"] if self.ptx else ["sm"]
        return [f"-gencode=arch=compute_{self.number},code={kind}_{self.number}" for kind in kinds]


def parse_arch(text: str) -> Arch:
    """Parses "9.0a", "8.0+PTX" or "gfx90a"; drops features of AMD archs, as in "gfx90a:xnack-"."""
    name = text.strip()
    if gfx := _GFX.fullmatch(name):
        return Arch(int(gfx[1]), int(gfx[2]), int(gfx[3], 16))
    if match := _TOKEN.fullmatch(name):
        return Arch(int(match[1]), int(match[2]), match[3].lower(), bool(match[4]))
    gpu = gpu_platform()
    near = None if gpu is ROCM else nearest(name, _NAMES)
    hint = f"did you mean {near!r}?" if near else f"example: {gpu.example}"
    raise ArchError(f"unknown {gpu.name} arch {text!r}; {hint}")


def parse_arch_list(
    text: str, native: Callable[[], Sequence[Capability]] = lambda: ()
) -> tuple[Arch, ...]:
    """Returns the sorted archs of a list of archs, generations such as "hopper", or "native"."""
    gpu = gpu_platform()
    found: set[Arch] = set()
    for token in filter(None, re.split(r"[;,\s]+", text.strip())):
        name, plus, rest = token.partition("+")
        if name.lower() == "native" and not (plus and gpu is ROCM):
            if not (devices := native()):
                raise ArchError(f'arch "native" needs a visible GPU; name the archs: {gpu.example}')
            found.update(Arch(*device)._replace(ptx=bool(plus)) for device in devices)
        elif name.lower() in _NAMES and (not plus or rest.upper() == "PTX"):
            found.update(parse_arch(part + plus + rest) for part in _NAMES[name.lower()].split())
        else:
            found.add(parse_arch(token))
    for arch in found:
        if arch.is_amd != (gpu is ROCM):
            got = CUDA if gpu is ROCM else ROCM
            raise ArchError(
                f"{arch} must be a {gpu.name} arch, got one of {got.name}; example: {gpu.example}"
            )
    return tuple(sorted(found))


def specialise(archs: Sequence[Arch], specific: Iterable[Capability]) -> tuple[Arch, ...]:
    """Replaces each plain arch by its ``a`` form if the op has a source for exactly that arch."""
    # the PTX of an "a" arch runs nowhere else, so "9.0+PTX" stays, and "9.0a" is added to it
    plain = {each for each in archs if each.suffix == "" and each[:2] in {*specific}}
    kept = {each for each in archs if each not in plain or each.ptx}
    return tuple(sorted(kept | {Arch(each.major, each.minor, "a") for each in plain}))


def covered(archs: Iterable[str], capability: Capability) -> bool:
    """Returns True if code for any of ``archs``, names of a manifest, runs on ``capability``."""
    return any(parse_arch(arch).covers(capability) for arch in archs)


def initialised_capabilities() -> list[Capability]:
    """Returns the capabilities of torch's GPUs, none before torch has initialised CUDA itself."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    return sorted({device_capability(i) for i in range(cuda.device_count())})


def device_capability(index: int) -> Capability:
    """Returns the capability of torch's GPU number ``index``; may initialise CUDA or HIP."""
    import torch

    if torch.version.hip is None:
        return torch.cuda.get_device_capability(index)
    arch = parse_arch(torch.cuda.get_device_properties(index).gcnArchName)
    return (arch.major, arch.minor, int(arch.suffix))


# Asked in a process of its own: initialising CUDA here would break later forks. No context is made.
_PROBE = """
import ctypes, json
answer = {"driver": None, "cuda": None, "problem": "", "devices": []}
try:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, 96) == 0:
        answer["driver"] = text.value.decode()
except (OSError, AttributeError):
    pass
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    answer["problem"] = "no NVIDIA driver (libcuda.so.1 is not there)"
else:
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        answer["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    code = cuda.cuInit(0)
    if code == 0:
        code = cuda.cuDeviceGetCount(ctypes.byref(number))
    if code != 0:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        answer["problem"] = f"the driver answers {(name.value or b'').decode() or code}"
    for device in range(number.value if code == 0 else 0):
        name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        answer["devices"].append({"name": name.value.decode(), "memory": memory.value,
            "arch": f"{major.value}.{minor.value}"})
print(json.dumps(answer))
"""


def ask_driver() -> dict[str, Any]:
    """Asks NVIDIA's driver, in a process of its own, for its version and the visible GPUs."""
    answer: dict[str, Any] = {"driver": None, "cuda": None, "problem": "", "devices": []}
    python = python_program()
    if python is None:
        problem = "this program embeds Python, and there is no interpreter to ask with"
        return {**answer, "problem": problem}
    environment = {**os.environ, "CUDA_CACHE_DISABLE": "1"}  # else the driver makes ~/.nv
    command = [python, "-I", "-S", "-c", _PROBE]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return {**answer, **json.loads(done.stdout)}
        return {**answer, "problem": f"asking the driver ended with status {done.returncode}"}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {**answer, "problem": "the driver does not answer"}


def visible_capabilities() -> list[Capability]:
    """Returns the visible GPUs' capabilities, each once; before torch starts CUDA, the driver's."""
    if known := initialised_capabilities():
        return known
    if is_hip():  # the kernel driver's list; needs no runtime
        files = glob.glob(os.path.join(KFD_NODES, "*", "properties"))
        found = [re.search(r"^gfx_target_version (\d+)", text_of(path), re.M) for path in files]
        versions = {int(match[1]) for match in found if match} - {0}  # a CPU's is 0
        return sorted((each // 10000, each // 100 % 100, each % 100) for each in versions)
    archs = [parse_arch(device["arch"]) for device in ask_driver()["devices"]]
    return sorted({(arch.major, arch.minor) for arch in archs})


def named_arch_list() -> tuple[str, str] | None:
    """Returns name and value of the variable that lists archs, None if none is set."""
    named = ((name, os.environ.get(name, "").strip()) for name in gpu_platform().arch_variables)
    return next((each for each in named if each[1]), None)


def own_arch(source: str) -> Arch | None:
    """Returns the arch that a source ``<op>_sm90_cuda.cu`` is written for, None for other files."""
    match = _OWN_ARCH.search(source)
    return Arch(int(match[1]), int(match[2]), "a") if match else None


def choose(
    op: str,
    min_arch: Capability,
    specific: Iterable[Capability],
    capability: Capability | None,
    named: tuple[str, str] | None = None,
) -> tuple[Arch, ...]:
    """Returns the archs to build ``op`` for: those of a list, or else of the GPUs."""
    floor = f"{min_arch[0]}.{min_arch[1]}"
    if capability is not None and len(capability) == 2 and capability < min_arch:
        raise ArchError(f"{op}: needs a GPU of arch {floor} or later, got {Arch(*capability)}")
    named = named or named_arch_list()
    if named is not None:
        variable, text = named
        archs = parse_arch_list(text, visible_capabilities)
        origin = f"{variable}={text!r}"
    else:
        devices = {*initialised_capabilities()} | ({capability} if capability else set())
        devices = devices or {*visible_capabilities()}
        if not devices:
            gpu = gpu_platform()
            raise ArchError(
                f"{op}: no GPU is visible to choose a {gpu.name} arch from; set {gpu.example}"
            )
        archs, origin = tuple(sorted(Arch(*device) for device in devices)), "the visible GPUs"
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
