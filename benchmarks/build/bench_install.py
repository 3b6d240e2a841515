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
import contextlib
import os
import resource
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


def run(code: str, *arguments: str, cwd: Path | None = None, **environment: str) -> float:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def devices() -> tuple[str, ...]:
    """Returns the devices for which a library can be compiled here."""
    with contextlib.suppress(BuildError):
        find_nvcc()
        return ("cpu", "cuda")
    return ("cpu",)


def ops_of(device: str) -> list[str]:
    return [name for name, builder in all_builders().items() if device in builder.DEVICES]


def cpu_seconds() -> float:
    """CPU time of all processes this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(command: list[str], cpus: int | None = None, **variables: str) -> dict[str, float]:
    allowed = sorted(os.sched_getaffinity(0))[:cpus]
    before, begin = cpu_seconds(), time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return {"s": time.perf_counter() - begin, "cpu s": cpu_seconds() - before, "cpus": len(allowed)}


def megabytes(folder: Path, pattern: str) -> float:
    return sum(path.stat().st_size for path in folder.rglob(pattern)) / 1e6


def look_up_rows(site: Path) -> list[dict[str, Any]]:
    """From the first call of a prebuilt op to the bound function, with no program on PATH."""
    variables = {"PYTHONPATH": str(site), "PATH": "", "APEX_TE_DISABLE_JIT": "1"}
    rows = []
    for op in ops_of("cpu"):
        # not from the checkout, whose package would come first
        times = [run(CACHED, op, cwd=site, **variables) for _ in range(5)]
        what = f"look-up, open and bind of a prebuilt op, {op} (cpu)"
        rows.append({"what": what, "ms": statistics.median(times)})
    return rows


def install_rows(part: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Installs, or makes a wheel, with the libraries that the part of that name has."""
    archs = options.archs if part == "wheel" else options.arch
    cuda = {"APEX_BUILD_CUDA_OPS": "1", "APEX_TE_CUDA_ARCH_LIST": archs}
    what, variables = {
        "plain": ("pip install, nothing built", {}),
        "cpu": ("pip install, every CPU op, on 2 CPUs", {"APEX_BUILD_CPP_OPS": "1"}),
        "cuda": (f"pip install, every op for {archs}", cuda),
        "wheel": (f"wheel, every op for {archs}", cuda),
    }[part]
    command = ["wheel", "--wheel-dir"] if part == "wheel" else ["install", "--target"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *command, str(folder)]
    pip += ["--no-build-isolation", "--no-deps", "."]
    row = {"what": what, **timed(pip, 2 if part == "cpu" else None, **variables)}
    if part != "plain":
        row["MB"] = megabytes(folder, "*.whl" if part == "wheel" else "*.so")
    return [row, *(look_up_rows(folder) if part == "cpu" else [])]


def build_rows() -> None:
    """Import time, cold builds, and look-up, open and bind of a cached op, each in a process."""
    imports = statistics.median(run(IMPORT) for _ in range(5))
    rows = [{"what": "import apex_te after torch", "ms": imports}]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        for op in ("dispatcher", *all_builders()):
            for device in devices():
                if op in (["dispatcher"] if device == "cpu" else []) + ops_of(device):
                    seconds = run(COLD, op, device, APEX_TE_CACHE_DIR=folder)
                    rows.append({"what": f"cold build, {op} ({device})", "ms": seconds * 1e3})
        for path in [Path(folder), *Path(folder).rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)
        for op in ops_of("cpu"):
            times = [run(CACHED, op, APEX_TE_CACHE_DIR=folder, PATH="") for _ in range(3)]
            label = f"look-up, open and bind of a cached op, {op} (cpu)"
            rows.append({"what": label, "ms": statistics.median(times)})
        for path in [Path(folder), *Path(folder).rglob("*")]:
            path.chmod(path.stat().st_mode | 0o700)
    harness.report(f"build_{WHERE}", rows, cpus=len(os.sched_getaffinity(0)))


PARTS = ("build", "plain", "cpu", "cuda", "wheel")
WHERE = "gpu_machine" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--archs", default="8.0;9.0;10.0", help="of the wheel with all CUDA ops")
    options = parser.parse_args()
    options.arch, rows = "9.0", []
    if torch.cuda.is_available():
        options.arch = ".".join(map(str, torch.cuda.get_device_capability()))
    for part in options.parts:
        if part in ("cuda", "wheel") and "cuda" not in devices():
            print(f"{part}: not run, there is no nvcc")
        elif part == "build":
            build_rows()
        else:
            with tempfile.TemporaryDirectory() as folder:
                rows += install_rows(part, options, Path(folder))
    if rows:
        harness.report(f"install_{WHERE}", rows)


if __name__ == "__main__":
    main()
