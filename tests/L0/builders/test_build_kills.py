"""Kills, interrupts, forks and threads in the middle of a build."""

import ctypes
import os
import signal
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from attack_loops import interrupt, kill_builders, kill_compilers, start_cold
from attacks import (
    CALL,
    LIMIT,
    Tally,
    call,
    call_in_process,
    finish,
    kill,
    processes_of,
    wait_for,
)
from tiny_op import Tiny, logging_compiler, start, write_op

from op_builder.jit.build import lock
from op_builder.jit.errors import (
    BuildError,
    BuildInterruptedError,
    CompileError,
    LockTimeoutError,
    ReentrantLoadError,
)
from op_builder.jit.find import cache

# Kills and interrupts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "times"),
    [
        pytest.param(kill_builders, 6, marks=pytest.mark.long),
        (kill_compilers, 6),
        pytest.param(interrupt, 4, marks=pytest.mark.long),
    ],
)
def test_builds_that_end_early(root, cache_dir, forget, attack, times):
    tally = Tally(attack.__name__)
    attack(root, cache_dir, forget, tally, times)
    tally.report()


def test_interrupted_waiter(root, tmp_path):
    compiler, log = logging_compiler(tmp_path, sleep=1.5)
    holder = call_in_process(root, CXX=str(compiler))
    assert wait_for(log.read_text)
    code = f"""
        from op_builder.jit.build import lock
        wait = lock._wait
        def saying(*args):
            print("waiting", flush=True)
            wait(*args)
        lock._wait = saying
        try:
            Tiny({str(root)!r}).open()
        except KeyboardInterrupt:
            print("interrupted")
    """
    waiter = start(code)
    assert waiter.stdout.readline() == "waiting\n"
    begun = time.monotonic()
    waiter.send_signal(signal.SIGINT)
    assert finish(waiter) == "interrupted\n"
    assert time.monotonic() - begun < 1
    assert finish(holder) == "value 1\n"
    assert log.read_text() == "x\n"


def test_leftovers_of_the_same_op_go_with_its_next_build(root, cache_dir):
    name = cache.entry_folder("tiny_cpu", Tiny(root).key("cpu"))
    for folder in (f"{name}.dead", "another-0.dead"):
        (cache_dir / "tmp" / folder / "entry").mkdir(parents=True)
        (cache_dir / "tmp" / folder / "alive").write_text("")
    (cache_dir / "locks").mkdir(mode=0o700)
    with lock.held(str(cache_dir / "locks" / "living-0"), "another op", 1):
        (cache_dir / "tmp" / "living-0.building").mkdir()
        Tiny(root).open()
        assert os.listdir(cache_dir / "tmp") == ["living-0.building"]


# Processes, forks and threads ----------------------------------------------------------------


@pytest.mark.long
def test_two_versions_share_a_cache(tmp_path):
    tally = Tally("sixteen cold processes, two versions")
    start_cold(tmp_path, tally, processes=16, ops=2)
    tally.report()
    assert tally.ends["right"] == 16


def test_fork_after_loading(root):
    code = f"""
        import ctypes
        def value():
            return ctypes.CDLL(Tiny({str(root)!r}).open().proc_path).tiny()
        print(value(), flush=True)
        for _ in range(4):
            if os.fork() == 0:
                os._exit(10 + value())
        print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)))
    """
    assert finish(start(code)) == "1\n[11, 11, 11, 11]\n"


BUILD_IN_A_THREAD = """
    import ctypes, threading
    def value():
        return ctypes.CDLL(Tiny({root!r}).open().proc_path).tiny()
    thread = threading.Thread(target=value)
    thread.start()
    while not os.path.getsize({log!r}):
        time.sleep(0.01)
"""


def test_fork_while_a_thread_builds(root, tmp_path):
    """The child waits for its parent's build like any other process, and gets its library."""
    compiler, log = logging_compiler(tmp_path, sleep=0.7)
    code = textwrap.dedent(BUILD_IN_A_THREAD.format(root=str(root), log=str(log)))
    code += """
children = [os.fork() for _ in range(2)]
if 0 in children:
    os._exit(10 + value())
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
thread.join()
print(codes, value())
"""
    assert finish(start(code, CXX=str(compiler))) == "[11, 11] 1\n"
    assert log.read_text() == "x\n"


def test_fork_while_ninja_is_started(root, tmp_path):
    """The child does not hold the pipe that the builder reads to its end."""
    compiler, log = logging_compiler(tmp_path, sleep=0.2)
    code = textwrap.dedent(f"""
        import ctypes, subprocess, threading
        start, entered = subprocess.Popen._execute_child, threading.Event()
        def slowly(self, args, *more, **options):
            if os.path.basename(args[0]) == "ninja":
                entered.set()
                time.sleep(0.5)  # its pipe is open, the parent's end of it not closed yet
            return start(self, args, *more, **options)
        subprocess.Popen._execute_child = slowly
        def value():
            return ctypes.CDLL(Tiny({str(root)!r}).open().proc_path).tiny()
        thread = threading.Thread(target=value)
        thread.start()
        entered.wait()
        child = os.fork()
        if child == 0:
            os._exit(10 + value())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        thread.join()
        print(code, value())
    """)
    assert finish(start(code, CXX=str(compiler))) == "11 1\n"
    assert log.read_text() == "x\n"


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("how", ["ignored", "taken"])
def test_exit_status_that_is_lost(root, tmp_path, how, broken):
    """Servers ignore SIGCHLD or wait for whatever child there is: ninja's status is not seen."""
    if broken:
        write_op(root, body="return no_such_name;")
    lose = """
import signal, threading
def take():
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.0005)
"""
    lose += {
        "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n",
        "taken": "threading.Thread(target=take, daemon=True).start()\n",
    }[how]
    compiler = tmp_path / "cxx"
    signals = tmp_path / "signals"
    compiler.write_text(f'#!/bin/sh\ngrep SigIgn /proc/$$/status > {signals}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    code = lose + textwrap.dedent(CALL.format(root=str(root)))
    output = finish(start(code, CXX=str(compiler)))
    ignored = int(signals.read_text().split()[1], 16)
    assert not ignored >> (signal.SIGCHLD - 1) & 1  # ninja 1.11 and compilers wait for children
    assert output.startswith("CompileError tiny (cpu): " if broken else "value 1\n")
    assert broken == ("no_such_name" in output)


@pytest.mark.parametrize("who", ["child", "stranger"])
def test_fork_whose_parent_is_killed(root, tmp_path, who):
    """A child shares its parent's open files, but must not keep the parent's lock."""
    compiler, log = logging_compiler(tmp_path, sleep=30)
    result = tmp_path / "result"
    code = (
        BUILD_IN_A_THREAD.format(root=str(root), log=str(log))
        + f"""
    if os.fork() == 0:
        os.environ["CXX"] = "g++"
        while os.getppid() == {os.getpid()} or not os.path.exists({str(tmp_path / "killed")!r}):
            time.sleep(0.01)
        if {who!r} == "child":
            open({str(result)!r}, "w").write(str(value()))
        time.sleep(20)
        os._exit(0)
    print("forked", flush=True)
    time.sleep(60)
    """
    )
    parent = start(code, CXX=str(compiler))
    try:
        assert parent.stdout.readline() == "forked\n"
        parent.kill()
        parent.wait(timeout=LIMIT)
        (tmp_path / "killed").write_text("")
        if who == "child":
            assert wait_for(lambda: result.exists() and result.read_text() == "1")
        else:
            begun = time.monotonic()
            assert finish(call_in_process(root)) == "value 1\n"
            assert time.monotonic() - begun < 10
    finally:
        for pid in processes_of(tmp_path):
            kill(pid)
        parent.communicate(timeout=LIMIT)


def test_dispatcher_after_a_fork():
    """A thread binds an op, which may build it, while the process forks."""
    dispatcher = pytest.importorskip("apex_te.runtime.dispatcher")
    taken, done = threading.Event(), threading.Event()

    def bind():
        with dispatcher._lock:
            taken.set()
            done.wait(LIMIT)

    thread = threading.Thread(target=bind)
    thread.start()
    assert taken.wait(LIMIT)
    child = os.fork()
    if child == 0:
        os._exit(7 if dispatcher._lock.acquire(timeout=10) else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def in_threads(count, action):
    """What ``count`` threads that start together return or raise."""
    barrier = threading.Barrier(count)

    def run(_):
        barrier.wait()
        try:
            return action()
        except BuildError as error:
            return error

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(run, range(count)))
    finally:
        sys.setswitchinterval(interval)


def test_sixteen_threads(root, tmp_path, forget, monkeypatch):
    compiler, log = logging_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    for value in range(1, 6):
        write_op(root, value)
        forget()
        opened = in_threads(16, lambda: Tiny(root).open())
        assert len(set(opened)) == 1
        assert isinstance(opened[0], cache.OpenedLibrary)
        assert int(ctypes.CDLL(opened[0].proc_path).tiny()) == value
    assert log.read_text() == "x\n" * 5


def test_sixteen_threads_get_one_error(root, tmp_path, monkeypatch):
    compiler, log = logging_compiler(tmp_path, sleep=0.2)
    monkeypatch.setenv("CXX", str(compiler))
    write_op(root, body="return no_such_name;")
    errors = in_threads(16, lambda: Tiny(root).open())
    assert {type(error) for error in errors} == {CompileError}
    assert len({(str(error), error.first_error, error.log) for error in errors}) == 1
    assert len({id(error) for error in errors}) == 16
    assert log.read_text() == "x\n"


def test_threads_share_the_error_of_a_wait(root, cache_dir, monkeypatch):
    """Not one limit after the other."""
    monkeypatch.setenv("APEX_TE_LOCK_TIMEOUT", "1")
    (cache_dir / "locks").mkdir(mode=0o700)
    name = cache.entry_folder("tiny_cpu", Tiny(root).key("cpu"))
    begun = time.monotonic()
    with lock.held(str(cache_dir / "locks" / name), "tiny (cpu)", 1):
        errors = in_threads(16, lambda: Tiny(root).open())
    assert time.monotonic() - begun < 4
    assert {type(error) for error in errors} == {LockTimeoutError}
    assert call(Tiny(root).open()) == 1


def test_sixteen_threads_and_a_killed_compiler(root, tmp_path, monkeypatch):
    """Those who wait get its error, those who come later try again."""
    compiler, log = logging_compiler(tmp_path, sleep=0.3)
    compiler.write_text(compiler.read_text().replace("sleep 0.3", "sleep 0.3; kill -9 $$"))
    monkeypatch.setenv("CXX", str(compiler))
    errors = in_threads(16, lambda: Tiny(root).open())
    assert {type(error) for error in errors} == {BuildInterruptedError}
    assert log.read_text() == "x\n"
    monkeypatch.delenv("CXX")
    assert call(Tiny(root).open()) == 1


def test_after_a_reentrant_load(root):
    class Loop(Tiny):
        again = True

        def cxx_args(self):
            if self.again:
                self.open()
            return []

    builder = Loop(root)
    for _ in range(2):
        with pytest.raises(ReentrantLoadError, match="asked for the same library again"):
            builder.open()
    builder.again = False
    assert call(builder.open()) == 1
