"""Op libraries and their handlers in a JAX process: opened, bound and registered with XLA."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

try:
    import jax
except ImportError as error:
    raise ImportError(
        "apex_te.jax: jax must be installed: pip install 'jax>=0.10' flax optax"
    ) from error

from ..contract import Contract, parse
from ..op_builder import OpBuilder, OpenedLibrary, all_builders, get_builder
from ..op_builder.jit.backends.archs import Capability
from ..op_builder.jit.build import resources
from ..op_builder.jit.build.service import load_library
from ..op_builder.jit.find.key import OP_ABI
from ..op_builder.spec import JAX_HANDLERS

HANDLERS_ABI = 1
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # JAX's names of platforms, and XLA's for targets
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's
_NOT_OFFERED = {"peer_exchange": "XLA has collectives of its own"}
# Functions whose calls XLA must not record in CUDA graphs.
_NOT_CAPTURABLE: frozenset[str] = frozenset()

_lock = threading.RLock()
_libraries: dict[tuple[str, str], ctypes.CDLL] = {}
_bound: dict[tuple[str, str], str] = {}  # op by platform and function


def _forked() -> None:
    """Replaces the lock in a forked child process: another thread may have held it at the fork."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def target_name(function: str) -> str:
    """Returns the name under which XLA knows a function, the same in every process."""
    return f"apex_te.{function}"


def _load(op: str, platform: str, symbol: str, abi: int) -> ctypes.CDLL:
    """Loads an op's library, opened or built, and checks the number that it exports."""

    def use(opened: OpenedLibrary) -> ctypes.CDLL:
        """Returns an opened library, loaded; refuses one whose number is not ``abi``."""
        try:
            library = ctypes.CDLL(opened.proc_path, os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise ImportError(str(error)) from None
        try:
            found = ctypes.c_int32.in_dll(library, symbol).value
        except ValueError:
            found = None
        if found != abi:
            raise ImportError(f"it must have ABI {abi}, got {found}")
        return library

    return load_library(get_builder(op), platform, _capability(platform), use)


def _handlers() -> ctypes.CDLL:
    """Returns the library of handlers, opened or built on the first call."""
    library = _libraries.get((JAX_HANDLERS, "cpu"))
    if library is None:
        library = _load(JAX_HANDLERS, "cpu", "apex_te_jax_abi", HANDLERS_ABI)
        library.apex_te_jax_bind.restype = ctypes.c_void_p
        library.apex_te_jax_bind.argtypes = (
            ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32,
            ctypes.c_char_p, ctypes.c_size_t,
        )  # fmt: skip
        _libraries[JAX_HANDLERS, "cpu"] = library
    return library


def _capability(platform: str) -> Capability | None:
    """Returns the compute capability of JAX's first GPU; None on a CPU and without a GPU."""
    if platform != "cuda":
        return None
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # lowering for GPUs on a machine without one
        return None
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def gpu_capability() -> Capability | None:
    """Returns the compute capability of JAX's first GPU; None without a GPU."""
    return _capability("cuda")


def _address(op: str, function: str, platform: str) -> tuple[int, bytes]:
    """Returns the address of a C function, and its signature, which must be the header's."""
    library = _libraries.get((op, platform))
    if library is None:
        library = _libraries[op, platform] = _load(op, platform, "apex_te_abi", OP_ABI)
    try:
        address = ctypes.cast(getattr(library, f"apex_te_{function}"), ctypes.c_void_p).value
        compiled = ctypes.c_char_p.in_dll(library, f"apex_te_{function}_signature").value
    except (AttributeError, ValueError):
        raise NotImplementedError(
            f"{function}: {platform} tensors are not supported by this function"
        ) from None
    declared = get_builder(op).functions()[function].signature.encode()
    if compiled != declared or address is None:
        raise ImportError(
            f"{function}: the compiled signature must be '{declared.decode()}',"
            f" got '{(compiled or b'').decode()}'"
        )
    return address, declared


@functools.cache
def contract_of(op: str, function: str) -> Contract:
    """Returns the contract of a C function from the op's header."""
    spec = get_builder(op).functions().get(function)
    if spec is None:
        raise AttributeError(f"op {op} has no function {function}")
    if "->" in spec.signature:
        raise NotImplementedError(
            f"{function}: the function must return nothing to be called from JAX, got"
            f" {spec.signature!r}"
        )
    return parse(spec.signature)


def _register(op: str, function: str, platform: str) -> None:
    """Makes a handler of a function and registers it with XLA."""
    address, signature = _address(op, function, platform)
    is_capturable = platform == "cuda" and function not in _NOT_CAPTURABLE
    error = ctypes.create_string_buffer(512)
    handler = _handlers().apex_te_jax_bind(
        function.encode(), signature, address, _DEVICE_TYPES[platform], is_capturable, error,
        len(error),
    )  # fmt: skip
    if not handler:
        raise RuntimeError(error.value.decode())
    stages: Any = {"execute": jax.ffi.pycapsule(handler)}
    if is_capturable:
        stages["initialize"] = jax.ffi.pycapsule(handler)
    jax.ffi.register_ffi_target(target_name(function), stages, platform=PLATFORMS[platform])


def bind(op: str, function: str, platform: str) -> str:
    """Returns XLA's name of a function; the first call opens or builds and registers it."""
    known = _bound.get((platform, function))
    if known != op:
        with _lock:
            known = _bound.get((platform, function))
            if known is None:
                if op in _NOT_OFFERED:
                    raise NotImplementedError(f"{function}: {_NOT_OFFERED[op]}")
                _register(op, function, platform)
                known = _bound[platform, function] = op
        if known != op:
            raise ValueError(f"{function}: the op must be {known}, which has this name, got {op}")
    return target_name(function)


def load(
    ops: str | Iterable[str] | None = None, platforms: str | Iterable[str] | None = None
) -> None:
    """Opens, or builds, op libraries and registers their functions with XLA, ahead of their use.

    Programs that this process compiles load their ops themselves. Ops of a deserialized program
    must be loaded before it runs. A call before the processes of a job start keeps them from
    waiting for a build.

    Args:
        ops: names of ops, e.g. "rms_norm" or ["rms_norm", "fp8_gemm"]; None means all.
        platforms: "cpu", "cuda" or both; None means the CPU and the platforms of JAX's devices.

    Raises:
        UnknownOpError: ``ops`` contains a name that is not an op's.
        ValueError: ``platforms`` contains another name.
        BuildError: a library cannot be found or compiled.
    """
    names = [ops] if isinstance(ops, str) else ops
    if names is None:
        chosen = {name: each for name, each in all_builders().items() if name not in _NOT_OFFERED}
    else:
        chosen = {name: get_builder(name) for name in names}
    where = [platforms] if isinstance(platforms, str) else platforms
    if where is None:
        has_gpu = any(device.platform in ("gpu", "cuda") for device in jax.devices())
        where = ["cpu", *["cuda"] * has_gpu]
    wanted = list(where)
    for platform in wanted:
        if platform not in PLATFORMS:
            raise ValueError(f'load: platforms must be "cpu" or "cuda", got {platform!r}')
    pairs = [(each, p) for each in chosen.values() for p in wanted if p in each.built_devices()]
    _build(pairs)
    for builder, platform in pairs:
        for function, spec in builder.functions().items():
            if platform in spec.devices and "->" not in spec.signature:
                contract_of(builder.NAME, function)
                bind(builder.NAME, function, platform)


def _build(pairs: Iterable[tuple[OpBuilder, str]]) -> None:
    """Opens the libraries of ops for platforms, side by side where they must be compiled."""
    capabilities = {platform: _capability(platform) for platform in {p for _, p in pairs}}
    with ThreadPoolExecutor(resources.jobs()) as pool:
        waiting = [pool.submit(get_builder(JAX_HANDLERS).open, "cpu")]
        waiting += [pool.submit(each.open, p, capabilities[p]) for each, p in pairs]
        for each in waiting:
            each.result()
