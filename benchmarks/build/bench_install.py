"""Installing with and without libraries built ahead of time; cold builds, imports and look-ups.

    python benchmarks/build/bench_install.py [--parts build plain cpu cuda wheel]

"build", which has a results file of its own, runs each case in a process: import, cold builds, and
look-up, open and bind of a cached op with an empty PATH and a read-only cache. torch's own import
is not counted. CUDA libraries are for the GPU's arch, without a GPU for sm_90.

``pip install`` runs in a process of its own, without build isolation and dependencies, into an
empty folder. CPU seconds are those of all its processes. CUDA rows where nvcc is found.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


def cpu_seconds() -> float:
    """CPU time of all processes this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(command: list[str], cpus: int | None = None, **variables: str) -> dict[str, float]:
    """Seconds and CPU seconds of a command, on ``cpus`` of the CPUs if given."""
    allowed = sorted(os.sched_getaffinity(0))[:cpus]
    before, begin = cpu_seconds(), time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return {"s": time.perf_counter() - begin, "cpu s": cpu_seconds() - before, "cpus": len(allowed)}


def install(target: Path, cpus: int | None = None, **variables: str) -> dict[str, float]:
    options = ["--no-build-isolation", "--no-deps", "--target", str(target)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, "."]
    return timed(pip, cpus, **variables)


def megabytes(folder: Path, pattern: str) -> float:
    return sum(path.stat().st_size for path in folder.rglob(pattern)) / 1e6


def look_up_rows(site: Path) -> list[dict[str, Any]]:
    """From the first call of a prebuilt op to the bound function, with no program on PATH."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PATH": "", "APEX_TE_DISABLE_JIT": "1"}
    rows = []
    for op in ops_of("cpu"):
        command = [sys.executable, "-c", CACHED, op]
        # not from the checkout, whose package would come first
        run = {"cwd": site, "env": environment, "capture_output": True, "text": True}
        times = [float(subprocess.run(command, check=True, **run).stdout) for _ in range(5)]
        what = f"look-up, open and bind of a prebuilt op, {op} (cpu)"
        rows.append({"what": what, "ms": statistics.median(times)})
    return rows


def plain_rows(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    return [{"what": "pip install, nothing built", **install(folder / "plain")}]


def cpu_rows(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    made = install(folder / "cpu", 2, APEX_BUILD_CPP_OPS="1")
    what = "pip install, every CPU op, on 2 CPUs"
    row = {"what": what, **made, "MB": megabytes(folder / "cpu", "*.so")}
    return [row, *look_up_rows(folder / "cpu")]


def cuda_rows(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    variables = {"APEX_BUILD_CUDA_OPS": "1", "APEX_TE_CUDA_ARCH_LIST": options.arch}
    made = install(folder / "cuda", **variables)
    what = f"pip install, every op for {options.arch}"
    return [{"what": what, **made, "MB": megabytes(folder / "cuda", "*.so")}]


def wheel_rows(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    variables = {"APEX_BUILD_CUDA_OPS": "1", "APEX_TE_CUDA_ARCH_LIST": options.archs}
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    made = timed([*pip, "--wheel-dir", str(folder / "wheel"), "."], **variables)
    what = f"wheel, every op for {options.archs}"
    return [{"what": what, **made, "MB": megabytes(folder / "wheel", "*.whl")}]


def build_rows(options: argparse.Namespace, _: Path) -> list[dict[str, Any]]:
    """Import time, cold builds, and look-up, open and bind of a cached op, each in a process."""
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
    return []


PARTS = {"build": build_rows, "plain": plain_rows, "cpu": cpu_rows, "cuda": cuda_rows}
PARTS["wheel"] = wheel_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--archs", default="8.0;9.0;10.0", help="of the wheel with all CUDA ops")
    options = parser.parse_args()
    options.devices, options.arch, rows = devices(), "9.0", []
    if torch.cuda.is_available():
        options.arch = ".".join(map(str, torch.cuda.get_device_capability()))
    with tempfile.TemporaryDirectory() as name:
        for part in options.parts:
            if part in ("cuda", "wheel") and "cuda" not in options.devices:
                print(f"{part}: not run, there is no nvcc")
                continue
            folder = Path(name) / part
            folder.mkdir()
            rows += PARTS[part](options, folder)
            shutil.rmtree(folder)
    where = "gpu_machine" if torch.cuda.is_available() else "cpu"
    if rows:
        harness.report(f"install_{where}", rows)


if __name__ == "__main__":
    main()
