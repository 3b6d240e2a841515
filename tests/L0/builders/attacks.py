"""What the attacks on the cache share: processes with hard time limits, faults, and counts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

from tiny_op import Tiny, start, write_op

from op_builder.jit.find import cache

LIMIT = 60.0  # seconds after which a process counts as hanging

# "value 1" from a process that opens the op and calls it, else the error's name and text
CALL = """
    import ctypes
    def call(root):
        try:
            return f"value {{ctypes.CDLL(Tiny(root).open().proc_path).tiny()}}"
        except BuildError as error:
            return f"{{type(error).__name__}} {{error}}"
    print(call({root!r}), flush=True)
"""


def call(opened):
    """What the opened library's function returns."""
    return int(ctypes.CDLL(opened.proc_path).tiny())


def finish(process, limit=LIMIT):
    """Output of a process; a hang fails the test and leaves nothing running."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"no end after {limit} s: {out} {err}") from None
    return out if out else err


def call_in_process(root, **environment):
    """A process that prints what the op of ``root`` returns."""
    return start(CALL.format(root=str(root)), **environment)


def wait_for(condition, limit=20.0, pause=0.005):
    """Whether the condition came true in time."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def library_bytes(folder, value):
    """A library of the op that returns ``value``, built apart from the cache under attack."""
    root = write_op(folder / f"other-{value}", value)
    apart = cache.Location(str(folder / f"apart-{value}"), True, "cache")
    from op_builder.jit.build.service import build

    opened = build(Tiny(root), "cpu", location=apart)
    os.close(opened.fd)
    return Path(opened.path).read_bytes()


def replace(library, content):
    """Put another file in the library's place, in one step."""
    temporary = library.with_suffix(".new")
    temporary.write_bytes(content)
    temporary.chmod(0o644)
    temporary.rename(library)


def resized(content, size):
    """A library cut, or lengthened by zeros, to ``size`` bytes."""
    return content[:size] + bytes(max(0, size - len(content)))


def processes_of(folder):
    """Living processes that work in ``folder`` or name it: builders, ninja, compilers."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = Path("/proc", name, "cmdline").read_bytes()
            state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
            if str(folder).encode() in command and state != "Z":
                found.append(int(name))
    return found


def names_of(pids):
    """Command names of processes that still live."""
    names = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            names[pid] = Path("/proc", str(pid), "comm").read_text().strip()
    return names


def kill(pid):
    """SIGKILL, if the process is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def half_written(folder, root):
    """Entries that a look-up may see and that do not hold a whole library."""
    broken = []
    for entry in folder.glob(f"tiny_cpu-{Tiny(root).key('cpu')[:24]}/cpu"):
        found = cache.find(
            cache.Location(str(folder), True, "cache"), "tiny_cpu", Tiny(root).key("cpu")
        )
        if found is None:
            broken.append(str(entry))
        else:
            os.close(found.fd)
    return broken


@contextlib.contextmanager
def small_disk(folder, options):
    """A tmpfs of its own mounted on ``folder``; raises PermissionError without the right to."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise PermissionError("no mount") from None
    if done.returncode != 0:
        raise PermissionError(done.stderr)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Tally:
    """Counts the ends of an attack's tries and reports them in one line."""

    def __init__(self, attack, file=None):
        self.attack = attack
        self.file = file
        self.ends: Counter[str] = Counter()
        self._start = time.monotonic()

    def count(self, end):
        """One try that ended so."""
        self.ends[end] += 1

    def report(self):
        """The line, printed and, if a file is named, added to it."""
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        seconds = time.monotonic() - self._start
        line = f"{self.attack}: {self.ends.total()} tries, {seconds:.1f} s: {ends}"
        print(line)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        return line
