"""Makes the files of a release: an sdist, and wheels built from it.

    python scripts/dist.py [--out dist] [pure] [cpu] [cpu-aarch64] [cuda]

- pure: ``apex_te-<version>-py3-none-any.whl``; ops compile when they are first used;
- cpu: ``<version>+cpu``, with the CPU library of every op, for this machine's architecture;
- cpu-aarch64, cpu-x86_64: the same for the other architecture, by a cross compiler such as
  ``aarch64-linux-gnu-g++``;
- cuda: ``<version>+cu13``, with CPU and CUDA libraries for ``APEX_TE_CUDA_ARCH_LIST``,
  by default those that the project supports. Takes long.

Without names it makes all that this machine's compilers can make, and says what it skips and why.
A wheel that was named and cannot be made is an error. Wheels with libraries get the manylinux tag
of the oldest system that they run on, and a dispatcher for each Python that is found, or that
``APEX_BUILD_PYTHONS`` names.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import wheel_platform

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from op_builder.jit.backends import pythons, toolchain  # noqa: E402
from op_builder.jit.errors import BuildError  # noqa: E402
from op_builder.jit.platform import compile_for, machine  # noqa: E402

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
ARCHS = "8.0;8.9;9.0;10.0+PTX"
MACHINES = ("x86_64", "aarch64")
_HOOK = "import setuptools.build_meta as b, sys; b.{hook}(sys.argv[1])"


class Kind(NamedTuple):
    """One kind of wheel.

    Attributes:
        name: name on the command line.
        variables: environment variables of its build.
        unable: reason why this machine cannot make it, "" if it can.
    """

    name: str
    variables: dict[str, str]
    unable: str


def say(text: str) -> None:
    print(f"dist: {text}", flush=True)


def found_pythons() -> str:
    """Returns the Pythons to compile dispatchers for, separated by semicolons."""
    if named := os.environ.get(pythons.VARIABLE):
        return named
    found, missing = [], []
    for version in PYTHONS:
        try:
            pythons.find(version)
            found.append(version)
        except BuildError:
            missing.append(version)
    if missing:
        say(f"no headers of Python {', '.join(missing)} here: they compile the dispatcher, once")
    return ";".join(found)


def cpu_kind(name: str, architecture: str, dispatchers: str) -> Kind:
    """Returns the wheel of CPU libraries for an architecture."""
    unable = ""
    with compile_for(architecture):
        try:
            toolchain.find_cxx()
        except BuildError as error:
            unable = str(error)
    variables = {
        "APEX_BUILD_CPP_OPS": "1",
        "APEX_BUILD_LABEL": "cpu",
        "APEX_BUILD_MACHINE": architecture,
        pythons.VARIABLE: dispatchers,
    }
    return Kind(name, variables, unable)


def cuda_kind(dispatchers: str) -> Kind:
    """Returns the wheel of CPU and CUDA libraries."""
    unable, label = "", "cuda"
    try:
        label = f"cu{toolchain.nvcc_major()}"
        toolchain.find_header("cublasLt.h", "cublas", toolchain.find_nvcc())
    except BuildError as error:
        unable = str(error)
    variables = {
        "APEX_BUILD_CUDA_OPS": "1",
        "APEX_BUILD_LABEL": label,
        "APEX_TE_CUDA_ARCH_LIST": os.environ.get("APEX_TE_CUDA_ARCH_LIST", ARCHS),
        pythons.VARIABLE: dispatchers,
    }
    return Kind("cuda", variables, unable)


def kinds() -> dict[str, Kind]:
    """Returns all kinds of wheels by name."""
    dispatchers = found_pythons()
    others = [name for name in MACHINES if name != machine()]
    all_kinds = [Kind("pure", {}, ""), cpu_kind("cpu", machine(), dispatchers)]
    all_kinds += [cpu_kind(f"cpu-{name}", name, dispatchers) for name in others]
    all_kinds.append(cuda_kind(dispatchers))
    return {kind.name: kind for kind in all_kinds}


def run_hook(hook: str, folder: Path, out: Path, variables: dict[str, str]) -> None:
    """Runs a hook of the build backend in ``folder`` with this environment's packages.

    ``APEX_BUILD_*`` variables of the caller do not count. Ends the program if the hook fails.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("APEX_BUILD_")}
    command = [sys.executable, "-B", "-c", _HOOK.format(hook=hook), str(out)]
    done = subprocess.run(
        command, cwd=folder, env={**kept, **variables}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        print(done.stdout[-4000:])
        raise SystemExit(f"dist: {hook} failed, see above")
    _, found, table = done.stdout.partition("apex_te: libraries built ahead of time\n")
    if found:
        print(table.partition("\n\n")[0])


def make_sdist(out: Path) -> Path:
    """Makes the sdist in ``out`` and returns its path."""
    with tempfile.TemporaryDirectory(prefix="apex_te-sdist-") as folder:
        # The copy that setuptools makes reads the checkout alone; its own files go elsewhere.
        run_hook("build_sdist", ROOT, Path(folder), {})
        (made,) = Path(folder).glob("*.tar.gz")
        return Path(shutil.move(made, out / made.name))


def make_wheel(kind: Kind, sources: Path, out: Path) -> Path:
    """Makes a wheel from an unpacked sdist, with its final platform tag, and returns its path."""
    with tempfile.TemporaryDirectory(prefix="apex_te-wheel-") as folder:
        run_hook("build_wheel", sources, Path(folder), kind.variables)
        (made,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(made) as archive:
            names = [name for name in archive.namelist() if name.endswith(".so")]
            libraries = {name: archive.read(name) for name in names}
        if libraries:
            tag = wheel_platform.tag(libraries)
            command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag]
            subprocess.run([*command, str(made)], check=True, stdout=subprocess.DEVNULL)
            (made,) = Path(folder).glob("*.whl")
        return Path(shutil.move(made, out / made.name))


def write_checksums(files: Sequence[Path], out: Path) -> None:
    """Writes ``SHA256SUMS``, which ``sha256sum --check`` reads.

    Lines of files that an earlier run has made, and that are still in ``out``, stay.
    """
    sums = out / "SHA256SUMS"
    lines = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    for line in sums.read_text(encoding="utf-8").splitlines() if sums.exists() else ():
        digest, _, name = line.partition("  ")
        if name and (out / name).exists():
            lines.setdefault(name, digest)
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(lines.items()))
    sums.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="*", help="pure, cpu, cpu-aarch64, cpu-x86_64, cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files")
    arguments = parser.parse_args()
    known = kinds()
    wanted = arguments.wheels or list(known)
    if unknown := sorted(set(wanted) - set(known)):
        raise SystemExit(f"dist: wheels must be of {', '.join(known)}, got {', '.join(unknown)}")
    for name in list(wanted):
        if known[name].unable:
            if arguments.wheels:
                raise SystemExit(f"dist: {name}: {known[name].unable}")
            say(f"skipped {name}: {known[name].unable}")
            wanted.remove(name)
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    files = [make_sdist(out)]
    with tempfile.TemporaryDirectory(prefix="apex_te-sources-") as folder:
        with tarfile.open(files[0]) as archive:
            archive.extractall(folder, filter="data")
        (sources,) = Path(folder).iterdir()
        for name in wanted:
            say(f"making {name}")
            files.append(make_wheel(known[name], sources, out))
    write_checksums(files, out)
    for path in files:
        print(f"{path.stat().st_size / 2**20:8.1f} MB  {path}")


if __name__ == "__main__":
    main()
