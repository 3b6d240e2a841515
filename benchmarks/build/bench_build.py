"""Import time, cold builds, and look-up + open + bind of a cached op, each in processes of its own.

The cached case runs with an empty PATH and a read-only cache; torch's own import is not counted.
CUDA libraries are built wherever nvcc is found: for the GPU's arch, without a GPU for sm_90.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
from apex_te.op_builder import BuildError, all_builders
from apex_te.op_builder.jit.backends.toolchain import find_nvcc

ROOT = Path(__file__).resolve().parents[2]

IMPORT = """
import time, torch
begin = time.perf_counter()
import apex_te
print((time.perf_counter() - begin) * 1e3)
assert not torch.cuda.is_initialized()
"""
COLD = """
import sys, time, torch, apex_te
from apex_te.op_builder import get_builder
from apex_te.op_builder.core import CoreBuilder
op, device = sys.argv[1:]
gpu = torch.cuda.is_available()
capability = None if device == "cpu" else torch.cuda.get_device_capability() if gpu else (9, 0)
builder = CoreBuilder() if op == "dispatcher" else get_builder(op)
begin = time.perf_counter()
builder.open(device, capability)
print(time.perf_counter() - begin)
"""
CACHED = """
import sys, time, torch, apex_te
from apex_te import runtime
from apex_te.op_builder import get_builder
runtime.core()
op = sys.argv[1]
functions = get_builder(op).functions()
name = next(name for name, spec in functions.items() if "cpu" in spec.devices)
begin = time.perf_counter()
runtime.dispatcher._resolve(op, name, runtime.function(op, name).signature, "cpu", 0)
print((time.perf_counter() - begin) * 1e3)
"""


def run(code: str, *arguments: str, **environment: str) -> float:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return float(done.stdout)


def devices() -> tuple[str, ...]:
    """Returns the devices for which a library can be compiled here."""
    try:
        find_nvcc()
    except BuildError:
        return ("cpu",)
    return ("cpu", "cuda")


def ops_of(device: str) -> list[str]:
    """Returns the ops that have a library for ``device``."""
    return [name for name, builder in all_builders().items() if device in builder.DEVICES]


def main() -> None:
    rows, ops = [], ops_of("cpu")
    imports = statistics.median(run(IMPORT) for _ in range(5))
    rows.append({"what": "import apex_te after torch", "ms": imports})
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        for op in ("dispatcher", *all_builders()):
            for device in devices():
                if op not in (["dispatcher"] if device == "cpu" else []) + ops_of(device):
                    continue
                seconds = run(COLD, op, device, APEX_TE_CACHE_DIR=folder)
                rows.append({"what": f"cold build, {op} ({device})", "ms": seconds * 1e3})
        for path in [Path(folder), *Path(folder).rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)
        for op in ops:
            times = [run(CACHED, op, APEX_TE_CACHE_DIR=folder, PATH="") for _ in range(3)]
            label = f"look-up, open and bind of a cached op, {op} (cpu)"
            rows.append({"what": label, "ms": statistics.median(times)})
        for path in [Path(folder), *Path(folder).rglob("*")]:
            path.chmod(path.stat().st_mode | 0o700)
    where = "gpu_machine" if torch.cuda.is_available() else "cpu"
    harness.report(f"build_{where}", rows, cpus=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main()
