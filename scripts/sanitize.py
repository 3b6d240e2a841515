"""Runs the unit tests of the ops, and a fuzz of every bound function, under ASAN and UBSAN.

    python scripts/sanitize.py [--calls 100000] [--jobs 2] [--files PATH ...] [--only PART]

CPU libraries and the dispatcher are compiled with APEX_TE_SANITIZE=address,undefined into a cache
of their own, ``build/sanitize/cache``; reports, outputs and recorded calls go to
``build/sanitize``. Three parts follow: ``record`` runs the test files without a sanitizer and
writes down the calls that they make, ``fuzz`` changes these calls, once for each instruction set,
and starts again behind a call that ends its process, ``tests`` runs the files with the sanitizers.
Succeeds if no sanitizer reported anything, every test passed and every call of the fuzz returned
or raised an error of ours. Needs g++ with its sanitizers, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "scripts" / "sanitizer"
OUTPUT = ROOT / "build" / "sanitize"
ISAS = ("", "avx2", "portable")
PARTS = ("record", "fuzz", "tests")
SEED = 1
FAULTS = """
#include <cstddef>
extern "C" int overflow(int value) { return value + 2147483647; }
extern "C" int behind(const char* bytes, std::size_t size) { return bytes[size]; }
"""
RECORDING_SECONDS = 60  # for each test file


class Piece(NamedTuple):
    """Findings of one process."""

    name: str
    failed: bool
    reports: list[str]
    text: str
    facts: dict[str, object]


def preloaded() -> str:
    """Libraries of the sanitizers, which an interpreter compiled without them must load first."""
    from apex_te.op_builder.jit.backends.toolchain import find_cxx

    found = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        command = [*find_cxx(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path):
            raise SystemExit(f"{find_cxx()[0]} has no {name}: install its sanitizers")
        found.append(path)
    return ":".join(found)


def environment(log: Path) -> dict[str, str]:
    """The environment of a process under the sanitizers, which write to ``log``.<pid>."""
    address = {
        "detect_leaks": "0",  # the interpreter's
        "halt_on_error": "0",
        "allocator_may_return_null": "1",  # a size that cannot be had is an error, no report
        "detect_odr_violation": "0",  # every op library has a function of the same name
        "log_path": str(log),
    }
    # UBSAN's start sets ASAN's log_path (see sitecustomize.py): the same again
    undefined = {"print_stacktrace": "1", "log_path": str(log)}
    return {
        **os.environ,
        "APEX_TE_SANITIZE": "address,undefined",
        "APEX_TE_CACHE_DIR": str(OUTPUT / "cache"),
        "ASAN_OPTIONS": ":".join(f"{key}={value}" for key, value in address.items()),
        "APEX_TE_UBSAN_LOG": f"{log}.undefined",
        "UBSAN_OPTIONS": ":".join(f"{key}={value}" for key, value in undefined.items()),
        "LD_PRELOAD": preloaded(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "PYTHONMALLOC": "malloc",  # one block for each object
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, ROOT, ROOT / "tests"))),
    }


def build() -> None:
    """Compiles the dispatcher and every CPU library, without the sanitizers in the compiler."""
    code = (
        "from apex_te.op_builder import all_builders\n"
        "from apex_te.op_builder.core import CoreBuilder\n"
        "CoreBuilder().open('cpu')\n"
        "for builder in all_builders().values():\n"
        "    if builder.device_sources('cpu'):\n"
        "        builder.open('cpu')\n"
    )
    given = environment(OUTPUT / "build")
    del given["LD_PRELOAD"], given["APEX_TE_UBSAN_LOG"]
    given["ASAN_OPTIONS"] += ":verify_asan_link_order=0"  # a new library is loaded to check it
    subprocess.run([sys.executable, "-c", code], env=given, check=True)


def reports(log: Path) -> list[str]:
    """First lines of the reports in the logs, with the place where they have one."""
    found = []
    for path in sorted(log.parent.glob(f"{log.name}.*")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for i, line in enumerate(lines):
            if "ERROR: AddressSanitizer" in line or "runtime error:" in line:
                frames = [text.strip() for text in lines[i + 1 : i + 40] if "csrc/" in text]
                found.append(" ".join([line.strip(), *frames[:1]]))
    return found


def check_reports() -> None:
    """Makes one fault of each kind; a sanitizer that is not heard ends the run."""
    from apex_te.op_builder.jit import env
    from apex_te.op_builder.jit.backends.toolchain import find_cxx

    log, source, library = OUTPUT / "faults", OUTPUT / "faults.cpp", OUTPUT / "faults.so"
    for path in log.parent.glob(f"{log.name}.*"):
        path.unlink()
    source.write_text(FAULTS)
    given = environment(log)
    os.environ["APEX_TE_SANITIZE"] = given["APEX_TE_SANITIZE"]
    flags = env.sanitizers()
    del os.environ["APEX_TE_SANITIZE"]
    command = [*find_cxx(), "-shared", "-fPIC", *flags, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    code = (
        "import ctypes\n"
        "import torch\n"
        f"faults = ctypes.CDLL({str(library)!r})\n"
        "faults.overflow(1)\n"
        "x = torch.zeros(24, dtype=torch.uint8)\n"
        "faults.behind(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.numel()))\n"
    )
    subprocess.run([sys.executable, "-c", code], env=given, cwd=ROOT, capture_output=True)
    found = " ".join(reports(log))
    for text in ("heap-buffer-overflow", "signed integer overflow"):
        if text not in found:
            raise SystemExit(f"no report of a {text} was heard, got {found or 'none'!r}")


def pytest_command(path: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-m", "not cuda", *options, path]


def record(path: str) -> str:
    """Writes down the calls of one test file, made without a sanitizer; a line about them.

    A test that fails is no obstacle: what it called before is kept.
    """
    name = Path(path).stem
    written = OUTPUT / f"calls-{name}.jsonl"
    given = {
        **os.environ,
        "APEX_TE_FUZZ_CALLS": str(written),
        "APEX_TE_FUZZ_SECONDS": str(RECORDING_SECONDS),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = pytest_command(path, "-p", "fuzz.record")
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    (OUTPUT / f"recording-{name}.txt").write_text(done.stdout + done.stderr)
    lines = written.read_text().splitlines() if written.exists() else []
    functions = {tuple(json.loads(line)[:2]) for line in lines}
    closing = f", pytest ended with {done.returncode}" if done.returncode not in (0, 5) else ""
    return f"{name}: {len(lines)} calls of {len(functions)} functions recorded{closing}"


def run_tests(path: str, minutes: float) -> Piece:
    """One test file under the sanitizers; failed if it takes longer than ``minutes``."""
    name = Path(path).stem
    log = OUTPUT / f"log-{name}"
    with open(OUTPUT / f"output-{name}.txt", "w+", encoding="utf-8") as output:
        command = pytest_command(path, "-p", "no:cacheprovider")
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment(log),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=minutes * 60,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        output.seek(0)
        text = output.read()
    if code == -1:
        text += f"\nended after {minutes:g} minutes\n"
    counts = re.findall(r"(\d+) (passed|skipped|failed|error)", text.rstrip().rsplit("\n", 1)[-1])
    facts: dict[str, object] = {what: int(count) for count, what in counts}
    return Piece(name, code not in (0, 5), reports(log), text, facts)


def run_fuzz(isa: str, calls: int, recorded: Path, left_out: str) -> Piece:
    """``calls`` calls with one instruction set; goes on behind a call that ends the process."""
    name = f"fuzz-{isa or 'native'}"
    log, progress = OUTPUT / f"log-{name}", OUTPUT / f"progress-{name}"
    seed = SEED + ISAS.index(isa)
    given = {**environment(log), "APEX_TE_CPU_ISA": isa}
    first, end, text = 0, calls, ""
    facts: dict[str, object] = {"calls": 0, "succeeded": 0, "functions": 0}
    failed = False
    while first < end:
        command = [sys.executable, str(ROOT / "tests" / "fuzz" / "run.py"), "--seed", str(seed)]
        command += ["--first", str(first), "--calls", str(end - first), "--log", str(log)]
        command += ["--recorded", str(recorded), "--progress", str(progress)]
        command += ["--except", left_out]
        done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
        text += done.stdout
        failed |= done.returncode != 0
        last = done.stdout.rstrip().rsplit("\n", 1)[-1]
        if last.startswith("{"):
            found = json.loads(last)
            facts = {key: found[key] for key in ("calls", "succeeded", "functions", "never")}
            facts["calls"] = end
            break
        at, _, where = progress.read_text().strip().partition(" ")
        text += f"seed {seed} call {at}: {where.strip()}: ended the process"
        text += f" ({done.returncode})\n{done.stderr[-2000:]}\n"
        first = int(at) + 1
    (OUTPUT / f"output-{name}.txt").write_text(text)
    return Piece(name, failed, reports(log), text, facts)


def test_files(given: list[str]) -> list[str]:
    """Test files of the given files and folders, the largest first."""
    files: set[Path] = set()
    for text in given:
        path = ROOT / text
        files |= set(path.rglob("test_*.py")) if path.is_dir() else {path}
    return [str(path) for path in sorted(files, key=lambda path: (-path.stat().st_size, path))]


def fuzz(pool: ThreadPoolExecutor, calls: int, left_out: str) -> list[Piece]:
    """The calls, shared among the instruction sets."""
    recorded = OUTPUT / "calls.jsonl"
    with open(recorded, "wb") as file:
        for path in sorted(OUTPUT.glob("calls-*.jsonl")):
            file.write(path.read_bytes())
    share = -(-calls // len(ISAS))
    pieces = []
    for piece in pool.map(lambda isa: run_fuzz(isa, share, recorded, left_out), ISAS):
        pieces.append(piece)
        print(f"{piece.name}: {json.dumps(piece.facts)}", flush=True)
        if piece.failed:
            print("\n".join(piece.text.splitlines()[:40]), flush=True)
    return pieces


def total(pieces: list[Piece], fact: str) -> int:
    return sum(int(str(piece.facts.get(fact, 0))) for piece in pieces)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000, help="of the fuzz, in all")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--files", nargs="*", default=["tests/L0/ops"], help="files or folders")
    parser.add_argument("--only", choices=PARTS, help="one part; the fuzz takes earlier recordings")
    parser.add_argument("--except", dest="left_out", default="", help="functions not fuzzed")
    parser.add_argument("--minutes", type=float, default=30, help="longest time of a test file")
    options = parser.parse_args()
    parts = [options.only] if options.only else PARTS
    start = time.monotonic()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for path in [*OUTPUT.glob("log-*"), *OUTPUT.glob("progress-*")]:
        path.unlink()
    files = test_files(options.files)
    pieces: list[Piece] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        if "record" in parts:
            for path in OUTPUT.glob("calls*.jsonl"):
                path.unlink()
            for line in pool.map(record, files):
                print(line, flush=True)
        if parts != ["record"]:
            build()
            check_reports()
            print(f"built after {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
        if "fuzz" in parts:
            pieces += fuzz(pool, options.calls, options.left_out)
        if "tests" in parts:
            for piece in pool.map(lambda path: run_tests(path, options.minutes), files):
                pieces.append(piece)
                closing = piece.text.rstrip().rsplit("\n", 1)[-1]
                print(f"{piece.name}: {closing}; {len(piece.reports)} reports", flush=True)
    bad = [piece for piece in pieces if piece.failed or piece.reports]
    for piece in bad:
        for report in dict.fromkeys(piece.reports):
            print(f"{piece.name}: {report}")
    functions = max((int(str(piece.facts.get("functions", 0))) for piece in pieces), default=0)
    print(
        f"{total(pieces, 'calls')} calls of {functions} functions,"
        f" {total(pieces, 'passed')} tests passed and {total(pieces, 'skipped')} skipped in"
        f" {len(files) if 'tests' in parts else 0} files,"
        f" {sum(len(piece.reports) for piece in pieces)} reports,"
        f" {len(bad)} of {len(pieces)} processes with failures or reports,"
        f" {(time.monotonic() - start) / 60:.1f} minutes"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    if shutil.which("g++") is None and "CXX" not in os.environ:
        sys.exit("scripts/sanitize.py needs g++")
    sys.exit(main())
