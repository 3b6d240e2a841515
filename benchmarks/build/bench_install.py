"""Installing with and without libraries built ahead of time.

    python benchmarks/build/bench_install.py [--parts plain cpu cuda wheel]

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
import bench_build
import harness

ROOT = bench_build.ROOT


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
    for op in bench_build.ops_of("cpu"):
        command = [sys.executable, "-c", bench_build.CACHED, op]
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


PARTS = {"plain": plain_rows, "cpu": cpu_rows, "cuda": cuda_rows, "wheel": wheel_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--archs", default="8.0;9.0;10.0", help="of the wheel with all CUDA ops")
    options = parser.parse_args()
    options.devices, options.arch, rows = bench_build.devices(), "9.0", []
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
    harness.report(f"install_{where}", rows)


if __name__ == "__main__":
    main()
