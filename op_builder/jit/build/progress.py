"""Progress of builds on stderr: live lines on a terminal, one line at a build's end in a log."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from typing import TextIO

_PAUSE = 0.2  # seconds between two drawings
# A log gets one line at a build's end; one that takes longer than this says that it is alive.
HEARTBEAT = 60.0


class _Screen:
    """Live lines of all builds of this process, one line per build, drawn by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._builds: list[Progress] = []
        self._drawn = 0  # lines on the terminal now
        self._wake = threading.Event()

    def add(self, build: Progress) -> None:
        """Adds a build's line; starts the thread for the first build."""
        with self._lock:
            self._builds.append(build)
            if len(self._builds) == 1:
                self._wake = threading.Event()
                drawing = threading.Thread(target=self._run, args=(self._wake,), daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter ends, or too many threads
                    drawing.start()

    def remove(self, build: Progress) -> None:
        """Removes a build's line; ends the thread after the last build."""
        with self._lock:
            self._builds.remove(build)
            if not self._builds:
                self._wake.set()

    def say(self, text: str, stream: TextIO) -> None:
        """Writes lines of text above the live lines."""
        with self._lock, contextlib.suppress(Exception):  # whatever has replaced sys.stderr
            live = self._lines()
            stream.write(self._erase() + text + "".join(live))
            stream.flush()
            self._drawn = len(live)

    def _erase(self) -> str:
        return "\r" + "\033[A" * (self._drawn - 1) + "\033[J" if self._drawn else ""

    def _lines(self) -> list[str]:
        """Returns the live lines as they are now, cut to the terminal's width."""
        width = max(20, shutil.get_terminal_size().columns - 1)
        lines = [build.line()[:width] for build in self._builds if build.live]
        return [f"{line}\n" for line in lines[:-1]] + lines[-1:]

    def _run(self, wake: threading.Event) -> None:
        while not wake.wait(_PAUSE):
            with self._lock, contextlib.suppress(Exception):
                if wake.is_set():
                    return
                live = self._lines()
                if live and (stream := sys.stderr) is not None:
                    stream.write(self._erase() + "".join(live))
                    stream.flush()
                    self._drawn = len(live)
            for build in tuple(self._builds):
                build.beat()


_screen = _Screen()


def _forked() -> None:
    """Gives a forked child an empty screen: it has neither the parent's thread nor its builds."""
    global _screen
    _screen = _Screen()


os.register_at_fork(after_in_child=_forked)


class Progress:
    """Context manager that reports one build on stderr; ``estimate`` is in seconds."""

    def __init__(self, what: str, labels: list[str], estimate: float | None = None) -> None:
        self.what = what
        self.live = False
        self._left = list(labels)
        self._total = len(labels)
        self._estimate = estimate
        self._start = self._told = time.monotonic()

    def done(self, label: str) -> None:
        """Counts the step with this label as done."""
        if label in self._left:
            self._left.remove(label)

    def say(self, text: str) -> None:
        """Writes text, such as the compiler's output, above the live lines."""
        if sys.stderr is not None:
            _screen.say(text, sys.stderr)

    def line(self) -> str:
        """Returns the duration, first since narrow terminals cut the end, step and count."""
        seconds, known = time.monotonic() - self._start, self._estimate
        spent = f"{seconds:.1f} s"
        if known is not None:
            in_time = seconds <= known
            spent = f"{seconds:.1f} of about {known:.0f} s" if in_time else spent
            spent += "" if in_time else f", last time {known:.0f} s"
        step = self._left[0] if self._left else "publishing"
        done = self._total - len(self._left)
        return f"apex_te: building {self.what}, {spent}: {step} ({done}/{self._total} done)"

    def beat(self) -> None:
        """Writes the line of a long build into a log, once a minute; nothing on a terminal."""
        if not self.live and time.monotonic() - self._told >= HEARTBEAT:
            self._told = time.monotonic()
            self.say(self.line() + "\n")

    def __enter__(self) -> Progress:
        with contextlib.suppress(Exception):  # a closed stream, or an object that only writes
            self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        _screen.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        _screen.remove(self)
        end = "built in"
        if kind is not None:
            end = "failed after" if issubclass(kind, Exception) else "interrupted after"
        self.say(f"apex_te: {self.what}: {end} {time.monotonic() - self._start:.1f} s\n")
