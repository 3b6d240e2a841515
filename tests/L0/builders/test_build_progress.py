"""What is told while something is built: on a terminal, in a log, by those who wait."""

import contextlib
import io
import json
import os
import pty
import re
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_op import Tiny, logging_compiler, start, write_op

from op_builder import CPUOpBuilder
from op_builder.jit.build import lock, progress
from op_builder.jit.errors import CompileError, LockTimeoutError
from op_builder.jit.find import cache


class Terminal:
    """A pseudo-terminal in place of stderr; what was written to it, and what a reader sees."""

    def __init__(self, stream, monkeypatch):
        self.columns = 80
        self.written = ""
        self._stream = stream
        self._monkeypatch = monkeypatch

    def attach(self):
        """From now on, since pytest sets a stderr of its own between a fixture and its test."""
        self._monkeypatch.setattr(sys, "stderr", self._stream)

    def screen(self):
        """The lines after carriage returns, cursor movements and erasures."""
        lines, row = [""], 0
        for part in re.split(r"(\x1b\[\d*[A-Z]|\r\n|\r|\n)", self.written):
            if part in ("\r\n", "\n"):
                row += 1
                lines.extend([""] * (row + 1 - len(lines)))
            elif part == "\x1b[A":
                row -= 1
            elif part == "\x1b[J":
                del lines[row + 1 :]
                lines[row] = ""
            elif part != "\r":
                lines[row] += part
        return [line for line in lines if line]


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns."""
    master, slave = pty.openpty()
    seen = Terminal(open(slave, "w"), monkeypatch)  # noqa: SIM115
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(seen.columns))

    def read():
        with contextlib.suppress(OSError):
            while part := os.read(master, 65536):
                seen.written += part.decode()

    reader = threading.Thread(target=read)
    reader.start()
    yield seen
    seen._stream.close()
    reader.join(timeout=5)
    os.close(master)


def settled(terminal):
    """Waits until what was written has been read."""
    length = -1
    while length != len(terminal.written):
        length = len(terminal.written)
        time.sleep(0.1)


def test_terminal_shows_time_and_step(root, tmp_path, terminal, monkeypatch):
    terminal.attach()
    compiler, _ = logging_compiler(tmp_path, sleep=0.8)
    monkeypatch.setenv("CXX", str(compiler))
    Tiny(root).open()
    settled(terminal)
    live = re.findall(
        r"apex_te: building tiny \(cpu\), (\d\.\d) s: (.*?) \((\d)/2 done\)", terminal.written
    )
    assert len(live) >= 3
    assert live[0][1:] == ("compiling tiny_cpu.cpp", "0")
    assert [float(item[0]) for item in live] == sorted(float(item[0]) for item in live)
    assert len(terminal.screen()) == 1
    assert re.fullmatch(r"apex_te: tiny \(cpu\): built in \d\.\d s", terminal.screen()[0])


def test_estimate_is_the_last_build_of_the_same_library(
    root, terminal, cache_dir, tmp_path, monkeypatch, forget
):
    terminal.attach()
    compiler, _ = logging_compiler(tmp_path, sleep=0.7)
    monkeypatch.setenv("CXX", str(compiler))
    first = Path(Tiny(root).open().path)
    settled(terminal)
    assert "about" not in terminal.written  # nobody knows yet
    manifest = first.parent / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "seconds": 12.4}))
    write_op(root, value=2)  # another key: the sources have changed
    forget()
    Tiny(root).open()
    settled(terminal)
    assert re.search(r"building tiny \(cpu\), 0\.\d of about 12 s: compiling", terminal.written)


def test_longer_than_the_estimate(monkeypatch):
    shown = progress.Progress("op (cpu)", ["compiling a", "linking a"], 2.0)
    assert shown.line() == "apex_te: building op (cpu), 0.0 of about 2 s: compiling a (0/2 done)"
    shown.done("compiling a")
    shown.done("never heard of")
    monkeypatch.setattr(progress.time, "monotonic", lambda: shown._start + 3.04)
    assert shown.line() == "apex_te: building op (cpu), 3.0 s, last time 2 s: linking a (1/2 done)"


def test_a_line_for_each_building_op(root, tmp_path, terminal, monkeypatch):
    terminal.attach()
    compiler, _ = logging_compiler(tmp_path, sleep=1.0)
    monkeypatch.setenv("CXX", str(compiler))
    builders = []
    for name in ("one", "two", "three"):
        folder = root / "csrc" / name
        folder.mkdir()
        (folder / f"{name}.h").write_text("")
        (folder / f"{name}_cpu.cpp").write_text(f'extern "C" int {name}() {{ return 1; }}\n')
        builders.append(type(name, (CPUOpBuilder,), {"NAME": name})(root))
    screens = []
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(builder.open) for builder in builders]
        while not all(future.done() for future in running):
            screens.append(terminal.screen())
            time.sleep(0.1)
        for future in running:
            future.result()
    settled(terminal)
    most = max(screens, key=len)
    assert sorted(re.findall(r"building (\w+) \(cpu\)", "\n".join(most))) == ["one", "three", "two"]
    assert all(len(line) < terminal.columns for line in most)
    ends = [
        re.fullmatch(r"apex_te: (\w+) \(cpu\): built in .* s", line) for line in terminal.screen()
    ]
    assert sorted(end[1] for end in ends if end) == ["one", "three", "two"]
    assert len(ends) == 3


def test_narrow_terminal_keeps_one_line_each(terminal, monkeypatch):
    terminal.attach()
    monkeypatch.setenv("COLUMNS", "30")
    with progress.Progress("rms_norm (cuda)", ["compiling " + "x" * 200]):
        time.sleep(0.5)
        settled(terminal)
        assert [len(line) for line in terminal.screen()] == [29]


def test_failure_and_interruption_are_told(root, terminal):
    terminal.attach()
    write_op(root, body="return no_such_name;")
    with pytest.raises(CompileError):
        Tiny(root).open()
    with pytest.raises(KeyboardInterrupt), progress.Progress("other (cpu)", []):
        raise KeyboardInterrupt
    settled(terminal)
    ends = [re.sub(r"\d+\.\d", "N", line) for line in terminal.screen()]
    assert ends == [
        "apex_te: tiny (cpu): failed after N s",
        "apex_te: other (cpu): interrupted after N s",
    ]


def test_hit_is_silent(root, terminal, forget):
    terminal.attach()
    Tiny(root).open()
    settled(terminal)
    written = terminal.written
    forget()
    Tiny(root).open()
    Tiny(root).find()
    settled(terminal)
    assert terminal.written == written


def test_log_gets_one_line_per_op(root, forget):
    code = f"""
        Tiny({str(root)!r}).open()
        print("done")
    """
    out, err = start(code).communicate(timeout=60)
    assert out == "done\n"
    assert re.fullmatch(r"apex_te: tiny \(cpu\): built in \d+\.\d s\n", err)
    assert start(code).communicate(timeout=60) == ("done\n", "")


def test_dumb_terminal_is_a_log(root, terminal, monkeypatch):
    terminal.attach()
    monkeypatch.setenv("TERM", "dumb")
    Tiny(root).open()
    settled(terminal)
    assert re.fullmatch(r"apex_te: tiny \(cpu\): built in \d+\.\d s\r\n", terminal.written)


def test_log_of_a_long_build_shows_life(monkeypatch, capsys):
    monkeypatch.setattr(progress, "HEARTBEAT", 0.3)
    with progress.Progress("op (cuda)", ["compiling op_cuda.cu"], 90.0):
        time.sleep(0.9)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 4
    assert re.fullmatch(
        r"apex_te: building op \(cuda\), 0\.\d of about 90 s: compiling op_cuda.cu \(0/1 done\)",
        lines[0],
    )


class Redirector:
    """What a logger puts in place of stderr: it has ``write`` and ``flush`` alone."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self): ...


class OnlyWrites:
    """An object without ``flush`` and ``isatty``."""

    text = ""

    def write(self, text):
        self.text += text


class Broken:
    """An object whose every method fails."""

    def __getattr__(self, name):
        raise RuntimeError(name)


def closed_stream():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [Redirector, OnlyWrites, Broken, closed_stream, lambda: None])
def test_whatever_replaces_stderr(root, tmp_path, monkeypatch, make):
    """An op builds, and waits for another's build, whatever sys.stderr is; what can be told is."""
    stream = make()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(lock, "MESSAGE_EVERY", 0.05)
    monkeypatch.setenv("APEX_TE_JIT_VERBOSE", "1")
    assert Tiny(root).open().fd >= 0
    path = str(tmp_path / "lock")
    with lock.held(path, "first", 1), pytest.raises(LockTimeoutError), lock.held(path, "one", 0.2):
        pass
    if isinstance(stream, (Redirector, OnlyWrites)):
        assert "apex_te: tiny (cpu): built in" in stream.text
        assert "apex_te: waiting for" in stream.text
    assert not Tiny(root / "missing").is_compatible(verbose=True)
    monkeypatch.setattr(warnings, "showwarning", lambda *args: sys.stderr.write("warned"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        cache.warn_once("told or not")
    assert not isinstance(stream, Redirector) or "warned" in stream.text


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_fork_during_a_build_leaves_the_child_silent(terminal):
    terminal.attach()
    with progress.Progress("op (cpu)", ["compiling"]):
        time.sleep(0.3)
        child = os.fork()
        if child == 0:
            os._exit(0 if not progress._screen._builds and not progress._screen._drawn else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_verbose_shows_commands_and_changes_nothing(root, cache_dir, tmp_path):
    code = f"""
        import json
        opened = Tiny({str(root)!r}).open()
        print(open(opened.path.rpartition("/")[0] + "/manifest.json").read())
    """
    told, made = {}, {}
    for value in ("0", "1"):
        folder = tmp_path / f"cache{value}"
        process = start(code, APEX_TE_JIT_VERBOSE=value, APEX_TE_CACHE_DIR=str(folder))
        out, told[value] = process.communicate(timeout=60)
        made[value] = json.loads(out)
    for value, manifest in made.items():
        manifest["commands"] = [
            command.replace(str(tmp_path / f"cache{value}"), "") for command in manifest["commands"]
        ]
        for name in ("time", "seconds"):
            manifest.pop(name)
    assert made["0"] == made["1"]
    assert "-ffp-contract=off" not in told["0"]
    for part in ("-ffp-contract=off", "-c ", "tiny_cpu.cpp", "-shared"):
        assert part in told["1"]
    assert told["1"].endswith(" s\n")


def test_verbose_and_live_lines_do_not_mix(root, tmp_path, terminal, monkeypatch):
    terminal.attach()
    compiler, _ = logging_compiler(tmp_path, sleep=0.6)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("APEX_TE_JIT_VERBOSE", "1")
    Tiny(root).open()
    settled(terminal)
    lines = terminal.screen()
    commands = [line for line in lines if line.startswith("[")]
    assert [line.partition("]")[0] for line in commands] == ["[1/2", "[2/2"]
    assert not [line for line in lines if "building" in line]
    assert "(1/2 done)" in terminal.written  # a step counts as done although its command is shown


# Those who wait -----------------------------------------------------------------------------------


class Clock:
    """Time that passes in ``sleep`` alone, so that a busy machine delays no message."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_waiter_names_the_op_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "MESSAGE_EVERY", 0.1)
    monkeypatch.setattr(lock, "time", Clock())
    path, me = str(tmp_path / "lock"), rf"pid {os.getpid()} on host \S+, building swiglu \(cpu\)"
    with (
        lock.held(path, "swiglu (cpu)", 1),
        pytest.raises(
            LockTimeoutError, match=rf"^waited \d+ s for {me} \(lock {path}\); APEX_TE_LOCK"
        ),
        lock.held(path, "swiglu (cpu)", 0.3),
    ):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert re.fullmatch(rf"apex_te: waiting for {me}: \d+ s so far \(lock {path}\)", line)


def test_waiter_names_the_op_where_the_holder_does_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "MESSAGE_EVERY", 0.1)
    monkeypatch.setattr(lock, "time", Clock())
    path = tmp_path / "lock"
    with lock.held(str(path), "swiglu (cpu)", 1):
        path.write_text("")  # its disk was full
        with pytest.raises(LockTimeoutError), lock.held(str(path), "swiglu (cpu)", 0.5):
            pass
    assert "waiting for another process, for swiglu (cpu): 0 s so far" in capsys.readouterr().err


def test_waiting_process_says_for_whom(root, tmp_path):
    compiler, log = logging_compiler(tmp_path, sleep=1.5)
    code = f"""
        from op_builder.jit.build import lock
        lock.MESSAGE_EVERY = 0.4
        Tiny({str(root)!r}).open()
    """
    builder = start(code, CXX=str(compiler))
    while not log.read_text():
        time.sleep(0.02)
    waiter = start(code, CXX=str(compiler))
    _, told = waiter.communicate(timeout=60)
    builder.communicate(timeout=60)
    first = told.splitlines()[0]
    assert re.match(
        rf"apex_te: waiting for pid {builder.pid} on host \S+, building tiny \(cpu\): ", first
    )
    assert first.count("tiny (cpu)") == 1
    assert "built in" not in told  # the waiter built nothing
