"""Compiles all lines of every CUDA source of every op for a supported arch; links and runs nothing.

    python scripts/check_cuda.py [--every-arch] [op ...]

Needs nvcc but no GPU. Without nvcc it says so and succeeds, since there is nothing to check with.
Compiles without optimisation, which finds the same errors in a quarter of the time, and for the
archs between which our code differs; ``--every-arch`` adds the others, for which ``make dist`` also
compiles. cuBLASLt's headers come from NVIDIA's wheel where the toolkit lacks them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from apex_te.op_builder import OpBuilder, all_builders
from apex_te.op_builder.jit.backends import toolchain
from apex_te.op_builder.jit.backends.archs import Arch, own_arch
from apex_te.op_builder.jit.build import resources
from apex_te.op_builder.jit.errors import HeaderNotFoundError, NvccNotFoundError

ROOT = Path(__file__).resolve().parents[1]
# One arch per generation the project supports; a builder's min_arch cuts the list from below.
ARCHS = (Arch(8, 0), Arch(8, 9), Arch(9, 0, "a"), Arch(10, 0, "a"))
COMPARISON = re.compile(r"__CUDA_ARCH__ *([<>=!]=?) *(\d+)")
CUBLAS_WHEEL = "nvidia-cublas==13.1.0.3"
CUBLAS_MAJOR = 13


def branches() -> set[str] | None:
    """The N of ``__CUDA_ARCH__ >= N`` in csrc, None if it compares otherwise, too."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cu")]
    texts = (path.read_text(encoding="utf-8") for path in sources)
    found = {match.groups() for text in texts for match in COMPARISON.finditer(text)}
    has_others = any(operator != ">=" for operator, _ in found)
    return None if has_others else {number for _, number in found}


def declared_archs(builder: OpBuilder, starts: set[str] | None = None) -> list[Arch]:
    """The archs a builder is checked for: generations from ``min_arch`` on, and its files' own.

    With ``branches()`` the first one and those at which a branch begins: the code of others is that
    of the arch before.
    """
    own = {arch for arch in map(own_arch, builder.sources()) if arch is not None}
    common = [arch for arch in ARCHS if (arch.major, arch.minor) >= builder.min_arch]
    if starts is not None:
        rest = [arch for arch in common[1:] if f"{arch.major}{arch.minor}0" in starts]
        common = [*common[:1], *rest]
    return sorted(own.union(common))


def provide_headers(builder: OpBuilder) -> None:
    """Installs the wheel with cuBLASLt's headers here if the builder lacks them."""
    try:
        builder.system_include_paths("cuda")
        return
    except HeaderNotFoundError as error:
        if toolchain.nvcc_major() != CUBLAS_MAJOR:
            raise
        print(f"{error}\ninstalling {CUBLAS_WHEEL} (headers only are used)", flush=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*command, "--no-deps", CUBLAS_WHEEL], check=True)
    builder.system_include_paths("cuda")


def fast_flags(nvcc: toolchain.Nvcc) -> list[str]:
    """Returns nvcc's flags for the shortest compilation; only later versions know the first."""
    flags = ["-O0", "-Xcompiler=-fsyntax-only"]  # the host's object files are not linked
    known = subprocess.run([nvcc.path, "--help"], capture_output=True, text=True, check=True)
    if "--Ofast-compile" in known.stdout:
        return [*flags, "--Ofast-compile=max"]
    return [*flags, "-Xcicc=-O1", "-Xptxas=-O0"]


def commands(
    builder: OpBuilder, archs: Sequence[Arch], folder: Path, flags: list[str]
) -> dict[str, tuple[str, ...]]:
    """Compile commands by what they compile, such as ``csrc/op/op_cuda.cu for 8.9, 9.0a``."""
    found: dict[str, tuple[str, ...]] = {}
    place = folder / builder.NAME
    place.mkdir()
    for step in builder.build_steps("cuda", archs, str(place), str(place / "library.so")):
        source = Path(step.inputs[0])
        if source.suffix != ".cu":
            continue  # the link
        # A file of one arch is compiled for that arch alone, whatever was asked for.
        own = own_arch(source.name)
        targets = ", ".join(map(str, [own] if own else archs))
        command = [word for word in step.command if word != "-O3"]
        found[f"{source.relative_to(builder.root)} for {targets}"] = (*command, *flags)
    return found


def compile_one(job: tuple[str, tuple[str, ...]]) -> bool:
    """Runs one command and prints its verdict; True when it compiled."""
    label, command = job
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    verdict = "ok" if done.returncode == 0 else "FAILED"
    told = (done.stdout + done.stderr).splitlines()
    # what ptxas would like optimised differently means nothing in a build without optimisation
    told = [line for line in told if not line.startswith("ptxas info")]
    print("\n".join([f"{verdict}: {label} ({time.monotonic() - start:.1f} s)", *told]), flush=True)
    return done.returncode == 0


def main(names: list[str], every_arch: bool) -> int:
    builders = {name: b for name, b in all_builders().items() if "cuda" in b.DEVICES}
    unknown = sorted(set(names) - set(builders))
    if unknown:
        print(f"check_cuda: op must be one of {', '.join(builders)}, got {', '.join(unknown)}")
        return 2
    wanted = {name: b for name, b in builders.items() if not names or name in names}
    try:
        nvcc = toolchain.find_nvcc()
    except NvccNotFoundError as error:
        print(f"check_cuda: NOT CHECKED, no CUDA source was compiled: {error}")
        return 0
    print(f"check_cuda: {nvcc.path}, {toolchain.nvcc_version()}", flush=True)
    flags = fast_flags(nvcc)
    starts = None if every_arch else branches()
    with tempfile.TemporaryDirectory(prefix="apex_te_check_cuda_") as folder:
        jobs: dict[str, tuple[str, ...]] = {}
        for builder in wanted.values():
            archs = declared_archs(builder, starts)
            toolchain.check_archs(nvcc, [arch.number for arch in archs])
            provide_headers(builder)
            jobs |= commands(builder, archs, Path(folder), flags)
        with ThreadPoolExecutor(resources.jobs()) as pool:
            verdicts = list(pool.map(compile_one, jobs.items()))
    compiled = {label.partition(" for ")[0] for label in jobs}
    missed: list[str] = []
    if not names:  # a .cu that no builder names would otherwise never be compiled
        sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cu")}
        extensions = [b for b in all_builders().values() if b.BINDING == "pybind11"]
        # these may include torch: a CUDA one is needed to compile them
        apart = {source for b in extensions for source in b.sources()}
        missed = sorted(sources - compiled - apart)
        for source in missed:
            print(f"FAILED: {source} belongs to no builder")
    failed = verdicts.count(False) + len(missed)
    print(f"check_cuda: {verdicts.count(True)} compilations passed, {failed} failed")
    return 1 if failed or not verdicts else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every-arch", action="store_true", help="also archs without own lines")
    parser.add_argument("names", nargs="*", metavar="op")
    arguments = parser.parse_args()
    sys.exit(main(arguments.names, arguments.every_arch))
