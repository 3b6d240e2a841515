"""Running one build graph with ninja, and telling what went wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import env
from .errors import BuildInterruptedError, CompileError, DiskFullError
from .toolchain import find_ninja

_DIAGNOSTIC = re.compile(
    r"\b(fatal )?error\b\s*(#[\w-]+\s*)?:|undefined reference to|cannot find -l|ptxas fatal"
    r"|nvcc fatal|multiple definition of|undefined symbol:",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|file size limit", re.IGNORECASE
)
_STOPPED = re.compile(
    r"^(?!\s).*\b(Killed|Terminated|died due to signal|out of memory|cannot allocate memory"
    r"|bad_alloc|subcommand interrupted|interrupted by user|Segmentation fault"
    r"|internal compiler error)\b",
    re.IGNORECASE | re.MULTILINE,  # a quoted source line starts with a blank
)


class Step(NamedTuple):
    """One command of the graph."""

    output: str
    inputs: tuple[str, ...]
    command: tuple[str, ...]
    label: str


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def write_graph(folder: str, steps: Sequence[Step]) -> None:
    """Write ``build.ninja``; every step is one command line."""
    lines = ["rule run", "  command = $cmd", "  description = $label", ""]
    for step in steps:
        inputs = " ".join(_escape(path) for path in step.inputs)
        lines.append(f"build {_escape(step.output)}: run {inputs}")
        lines.append(f"  cmd = {shlex.join(step.command).replace('$', '$$')}")
        lines.append(f"  label = {step.label.replace('$', '$$')}")
    with open(os.path.join(folder, "build.ninja"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


class Progress:
    """One line on a terminal: op, device, step, seconds. Silent elsewhere."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.step = "starting"
        self._shown = sys.stderr is not None and sys.stderr.isatty()
        self._start = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._done.wait(0.2):
            seconds = time.monotonic() - self._start
            text = f"apex_te: building {self.what}: {self.step}, {seconds:.1f} s"
            with contextlib.suppress(OSError, ValueError):
                width = max(20, shutil.get_terminal_size().columns - 1)
                sys.stderr.write("\r\033[K" + text[:width])
                sys.stderr.flush()

    def __enter__(self) -> Progress:
        if self._shown:
            self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if not self._shown:
            return
        self._done.set()
        self._thread.join()
        seconds = time.monotonic() - self._start
        end = "failed after" if failure[0] is not None else "built in"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r\033[Kapex_te: {self.what}: {end} {seconds:.1f} s\n")
            sys.stderr.flush()


def first_error(output: str) -> str:
    """The first line of a compiler's own message, "" if there is none."""
    for line in output.splitlines():
        if not line.startswith(("ninja:", "FAILED:")) and _DIAGNOSTIC.search(line):
            return line.strip()
    return ""


def _was_stopped(output: str) -> bool:
    return bool(_STOPPED.search(output))


def _failed_command(output: str) -> str:
    lines = iter(output.splitlines())
    for line in lines:
        if line.startswith("FAILED:"):
            return next(lines, "").strip()
    return ""


def disk_full(what: str, folder: str, detail: str = "") -> DiskFullError:
    """The error for a full disk, with the bytes left."""
    free = "an unknown number of"
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        free = str(status.f_bavail * status.f_frsize)
    hint = f" ({detail})" if detail else ""
    return DiskFullError(
        f"{what}: no space to build in {folder}, {free} bytes free{hint};"
        " free some or name another folder with APEX_TE_CACHE_DIR"
    )


@contextlib.contextmanager
def disk_errors(what: str, folder: str) -> Iterator[None]:
    """Turn the OSErrors of a full disk into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise disk_full(what, folder, error.strerror or "") from None
        raise


def _stop(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(what: str, folder: str, steps: Sequence[Step], log: str, verbose: bool) -> None:
    """Run the graph in ``folder``; the whole output goes to ``log`` when it fails.

    Raises CompileError, BuildInterruptedError, DiskFullError, NinjaNotFoundError.
    """
    write_graph(folder, steps)
    command = [find_ninja(), "-C", folder, "-j", str(env.jobs())]
    if verbose:
        command.append("-v")
    # LC_ALL: messages are searched for "error:"; TMPDIR: a killed build leaves nothing elsewhere
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "TMPDIR": folder,
        "NINJA_STATUS": "[%f/%t] ",
        "TERM": "dumb",
    }
    lines: list[str] = []
    with Progress(what) as progress:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            progress.step = steps[0].label
            for line in process.stdout:
                lines.append(line)
                if verbose:
                    sys.stderr.write(line)
                if line.startswith("["):
                    progress.step = line.strip()
            process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            process.stdout.close()
        if process.returncode != 0:
            _raise_failure(what, folder, "".join(lines), process.returncode, log)


def _raise_failure(what: str, folder: str, output: str, code: int, log: str) -> None:
    if _NO_SPACE.search(output):
        raise disk_full(what, folder)
    with contextlib.suppress(OSError), open(log, "w", encoding="utf-8") as file:
        file.write(output)
    error = first_error(output)
    if code < 0 or code in (130, 137, 143) or _was_stopped(output) or not error:
        tail = " / ".join(line.strip() for line in output.strip().splitlines()[-3:])
        raise BuildInterruptedError(
            f"{what}: the build was stopped before the compiler could finish (ninja returned"
            f" {code}: {tail}); if memory is short, set MAX_JOBS=1; log: {log}"
        )
    command = _failed_command(output)
    raise CompileError(f"{what}: {error}\n  command: {command}\n  log: {log}", error, command, log)
