"""Run of one build graph with ninja, and errors that say why it failed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence

from .. import errors
from ..backends.library import Step
from ..backends.toolchain import find_ninja
from ..platform import python_program
from . import failure, hints, resources
from .progress import Progress

_DIAGNOSTIC = re.compile(
    r"\b(fatal )?error\b\s*(#[\w-]+\s*)?:|undefined reference to|cannot find -l|ptxas fatal"
    r"|nvcc fatal|multiple definition of|undefined symbol:|ld: cannot open",
    re.IGNORECASE,
)
_LONGEST_LINE = 600  # characters of a compiler's message that an error shows; the log has them all
# nvcc hands paths to a shell and splits them at commas
_REFUSED_BY_NVCC = '$",`'
_STATUS = re.compile(r"\[\d+/\d+\] (.*)")
# A child forked while ninja is being started would hold its pipes open, and wait for the build that
# reads them to their end.
_starting = threading.Lock()
os.register_at_fork(
    before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release
)


def _check_paths(what: str, folder: str, steps: Sequence[Step]) -> None:
    sources = [path for step in steps for path in step.inputs if not path.startswith(folder)]
    with_nvcc = any(os.path.basename(step.command[0]) == "nvcc" for step in steps)
    refused = _REFUSED_BY_NVCC if with_nvcc else ""
    for path in (folder, *sources):
        unfit = next((c for c in path if not c.isprintable() or c in refused), None)
        if unfit is not None:
            advice = "; name another folder with APEX_TE_CACHE_DIR" if path is folder else ""
            raise errors.BuildError(
                f"{what}: a path of a build must not have the character {unfit!r}, got"
                f" {path!r}{advice}"
            )


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def write_graph(folder: str, steps: Sequence[Step]) -> None:
    """Writes ``build.ninja`` into ``folder``, with one build statement for each step."""
    lines = ["rule run", "  command = $cmd", "  description = $label", ""]
    for step in steps:
        inputs = " ".join(_escape(path) for path in step.inputs)
        lines.append(f"build {_escape(step.output)}: run {inputs}")
        lines.append(f"  cmd = {shlex.join(step.command).replace('$', '$$')}")
        lines.append(f"  label = {step.label.replace('$', '$$')}")
    with open(os.path.join(folder, "build.ninja"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def first_line(output: str, pattern: re.Pattern[str]) -> str:
    """Returns the first matching line, cut to 600 characters, that is not ninja's own, or ""."""
    for line in output.splitlines():
        if not line.startswith(("ninja:", "FAILED:")) and pattern.search(line):
            line = line.strip()
            if len(line) <= _LONGEST_LINE:
                return line
            return f"{line[:_LONGEST_LINE]} ... ({len(line)} characters)"
    return ""


def first_error(output: str) -> str:
    """Returns the first line of ninja's output with an error of a compiler or linker, or ""."""
    return first_line(output, _DIAGNOSTIC)


def disk_full(what: str, folder: str, detail: str = "") -> errors.DiskFullError:
    """Returns an error that says how many bytes are free on a full disk."""
    free = "an unknown number of"
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        free = str(status.f_bavail * status.f_frsize)
    hint = f" ({detail})" if detail else ""
    return errors.DiskFullError(
        f"{what}: no space to build in {folder}, {free} bytes free{hint};"
        " free some or name another folder with APEX_TE_CACHE_DIR"
    )


@contextlib.contextmanager
def disk_errors(what: str, folder: str) -> Iterator[None]:
    """Turns the ``OSError`` of a full disk or a refused access into a ``errors.BuildError``."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise disk_full(what, folder, error.strerror or "") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = f"{error.filename or folder}: {error.strerror}"
            raise errors.NoPermissionError(
                f"{what}: {_details(text, hints.building(text))}"
            ) from None
        raise


class _Watch:
    """Shell process that stops ninja, and so the compilers, if this process dies in any way."""

    # its input, a pipe that this process holds, ends without a line if this process has died
    _SCRIPT = 'read -r done || kill -TERM "$1"'

    def __init__(self, ninja: int) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        reading, self.pipe = os.pipe()
        command = ["/bin/sh", "-c", self._SCRIPT, "sh", str(ninja)]
        try:
            self.process = subprocess.Popen(
                command, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            _watches.add(self)
        except OSError:  # there are no processes left; the build goes on
            self.forget()
        finally:
            os.close(reading)

    def end(self) -> None:
        """Dismisses the watching shell, which would stop ninja if this process died."""
        if self.process is None or self.pipe < 0:
            return
        _watches.discard(self)
        with contextlib.suppress(OSError):
            os.write(self.pipe, b"done\n")
        self.forget()
        self.process.wait()

    def forget(self) -> None:
        """Closes this process's end of the pipe; a forked child must do so at once."""
        pipe, self.pipe = self.pipe, -1
        with contextlib.suppress(OSError):
            os.close(pipe)


_watches: set[_Watch] = set()


def _forked() -> None:
    """Closes a forked child's ends of the pipes, so that the shells notice the parent's death."""
    for watch in list(_watches):
        watch.forget()
    _watches.clear()


os.register_at_fork(after_in_child=_forked)


def _stop(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


_running: set[subprocess.Popen[str]] = set()


def stop_all() -> bool:
    """Stops all builds that this process runs; returns True if there was any."""
    running = list(_running)
    for process in running:
        _stop(process)
    return bool(running)


# Becomes ninja with the signals that Python or its parent ignores as a program expects them.
_DEFAULT_SIGNALS = """
import os, signal, sys
for each in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(each, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def _ignores_children() -> bool:
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigIgn:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)
    return signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN


def _start(command: list[str], folder: str) -> tuple[subprocess.Popen[str], _Watch]:
    # LC_ALL: messages are searched for "error:"; TMPDIR: a killed build leaves nothing elsewhere
    if _ignores_children() and (python := python_program()) is not None:
        # ninja before 1.12 and some compilers never see their children end
        command = [python, "-I", "-S", "-c", _DEFAULT_SIGNALS, *command]
    special = {"LC_ALL": "C", "TMPDIR": folder, "NINJA_STATUS": "[%f/%t] ", "TERM": "dumb"}
    with _starting:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env={**os.environ, **special}, start_new_session=True,
        )  # fmt: skip
        return process, _Watch(process.pid)


def run(
    what: str,
    folder: str,
    steps: Sequence[Step],
    log: str,
    verbose: bool,
    jobs: int | None = None,
    estimate: float | None = None,
) -> None:
    """Runs build steps with ninja in ``folder``; a failed build's output goes to ``log``."""
    _check_paths(what, folder, steps)
    write_graph(folder, steps)
    command = [find_ninja(), "-C", folder, "-j", str(jobs or resources.jobs())]
    if verbose:
        command.append("-v")
    # ninja tells a step when it ends, with -v by its command
    labels = {shlex.join(step.command): step.label for step in steps}
    lines: list[str] = []
    with Progress(what, [step.label for step in steps], estimate) as progress:
        process, watch = _start(command, folder)
        assert process.stdout is not None
        _running.add(process)
        try:
            for line in process.stdout:
                lines.append(line)
                if verbose:
                    progress.say(line)
                if status := _STATUS.match(line):
                    progress.done(labels.get(status[1], status[1]))
            process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            _running.discard(process)
            process.stdout.close()
            watch.end()
        # the exit status is lost if the program ignores SIGCHLD or waits itself
        done = any(line.startswith(f"[{len(steps)}/{len(steps)}] ") for line in lines)
        failed = any(line.startswith("FAILED: ") for line in lines)
        if process.returncode != 0 or failed or not done:
            _raise_failure(what, folder, "".join(lines), process.returncode, log)


def _details(error: str, hint: str, command: str = "", log: str = "", next_try: str = "") -> str:
    more = {"hint": hint, "command": command, "log": log, "next try": next_try}
    return "\n".join([error, *(f"  {name}: {text}" for name, text in more.items() if text)])


def _raise_failure(what: str, folder: str, output: str, code: int, log: str) -> None:
    """Raises the error that ninja's output tells of, and writes the output to ``log``."""
    if hints.NO_SPACE.search(output):
        raise disk_full(what, folder)
    with contextlib.suppress(OSError), open(log, "w", encoding="utf-8") as file:
        file.write(output)
    if code < 0:  # a signal for ninja itself, in its own way of telling
        output += f"[code={128 - code}]"
    error, hint = first_error(output), hints.building(output)
    failed = re.search(r"^FAILED:.*\n(.*)", output, re.MULTILINE)
    command = failed[1].strip() if failed else ""
    if (
        code < 0
        or code in (130, 137, 143)
        or hints.KILLED.search(output)
        or hints.STOPPED.search(output)
    ):
        what_for = "the build was stopped before the compiler could finish: "
    elif hints.NO_PERMISSION.search(error or output):
        error = error or first_line(output, hints.NO_PERMISSION)
        raise errors.NoPermissionError(f"{what}: {_details(error, hint, command, log)}")
    elif error:
        text = _details(error, hint, command, log, failure.NEXT_TRY)
        raise errors.CompileError(f"{what}: {text}", error, command, log, hint)
    else:
        what_for = "the build failed without a compiler's message: "
    last = " / ".join(line.strip() for line in output.strip().splitlines()[-3:])[:_LONGEST_LINE]
    text = _details(f"{error or last} (ninja returned {code})", hint, command, log)
    raise errors.BuildInterruptedError(f"{what}: {what_for}{text}")
