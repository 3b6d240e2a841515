"""Faults around a build: full disks, lost renames, no locks, wrong clocks, kills, forks."""

import errno
import json
import os
import shutil
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
from attack_loops import fill_disk
from attacks import (
    CALL,
    LIMIT,
    Tally,
    call,
    call_in_process,
    finish,
    small_disk,
    wait_for,
)
from tiny_op import Tiny, logging_compiler, start, write_op

from op_builder.jit.build import lock, publish
from op_builder.jit.errors import (
    BuildError,
    CompileError,
    DiskFullError,
)
from op_builder.jit.find import cache

# Full disks ----------------------------------------------------------------------------------


def test_no_space_at_any_moment(root, cache_dir):
    """Files that may not grow beyond a size: the compiler's, the linker's, the manifest's."""
    code = f"""
        import ctypes, resource, shutil, signal
        from pathlib import Path
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        cache = Path({str(cache_dir)!r})
        for size in (0, 400, 1200, 3000, 8192, 15000, 16384):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            try:
                print(size, "value", ctypes.CDLL(Tiny({str(root)!r}).open().proc_path).tiny())
                shutil.rmtree(cache)
            except BuildError as error:
                print(size, type(error).__name__, error)
            print(sorted(path.name for path in cache.glob("*/cpu/*")))
            print(sorted(path.name for path in cache.glob("tmp/*")))
            print(sorted(path.name for path in cache.rglob("failure-*")))
    """
    lines = finish(start(code)).splitlines()
    ends = [line for line in lines if line != "[]"]
    assert len(lines) == 4 * len(ends) == 28, lines
    tally = Tally("files that may not grow")
    for line in ends:
        tally.count("built" if line.endswith("value 1") else "refused")
        if not line.endswith("value 1"):
            assert f"DiskFullError tiny (cpu): no space to build in {cache_dir}" in line
            assert " bytes free" in line
    tally.report()
    assert tally.ends["refused"] >= 5
    assert call(Tiny(root).open()) == 1


@pytest.mark.long
def test_full_disk(root, tmp_path, monkeypatch):
    """A disk of its own, filled up to a few bytes: a build says so, cached ops still load."""
    tally = Tally("full disk")
    try:
        with small_disk(tmp_path / "disk", "size=1m") as disk:
            monkeypatch.setenv("APEX_TE_CACHE_DIR", str(disk / "cache"))
            other = write_op(tmp_path / "other", 2)
            fill_disk(root, other, disk, tally, (0, 3, 9, 60))
    except PermissionError as error:
        pytest.skip(f"needs the right to mount a small disk: {error}")
    tally.report()
    assert set(tally.ends) == {"built", "refused"}


@pytest.mark.parametrize("function", ["mkdir", "rename", "fsync", "chmod"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_for_a_name(root, cache_dir, monkeypatch, function, number):
    def full(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        with pytest.raises(DiskFullError, match=rf"no space to build in {cache_dir}.* free"):
            Tiny(root).open()
    assert Tiny(root).find() is None
    assert call(Tiny(root).open()) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
def test_disk_that_fails(root, monkeypatch, number):
    def broken(*args, **kwargs):
        raise OSError(number, os.strerror(number), args[0])

    with monkeypatch.context() as patch:
        patch.setattr(publish.os, "rename", broken)
        with pytest.raises(BuildError, match=rf"tiny \(cpu\): .*{os.strerror(number)}"):
            Tiny(root).open()
    assert Tiny(root).find() is None
    assert call(Tiny(root).open()) == 1


def test_file_system_without_fsync(root, monkeypatch):
    def unsupported(fd):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(publish.os, "fsync", unsupported)
    assert call(Tiny(root).open()) == 1


# Renames and clean-ups that lose -------------------------------------------------------------


class Rival:
    """Another builder, which publishes the same entry just before this one does."""

    def __init__(self, monkeypatch, content):
        self.content = content
        self._rename = os.rename
        monkeypatch.setattr(publish.os, "rename", self.rename)

    def rename(self, source, target):
        if source.endswith("/entry") and self.content is not None:
            shutil.copytree(self.content, target)
            self.content = None
        self._rename(source, target)


@pytest.fixture
def entry_of_another(root, forget, tmp_path):
    """The op's entry, moved out of the cache."""
    opened = Tiny(root).open()
    os.close(opened.fd)
    forget()
    away = tmp_path / "away"
    Path(opened.path).parent.rename(away)
    return away


def test_lost_rename_keeps_the_winner(root, cache_dir, entry_of_another, monkeypatch):
    (entry_of_another / "winner").write_text("")
    Rival(monkeypatch, entry_of_another)
    opened = Tiny(root).open()
    assert call(opened) == 1
    assert Path(opened.path).with_name("winner").exists()
    assert os.path.samestat(os.fstat(opened.fd), os.stat(opened.path))
    assert list((cache_dir / "tmp").iterdir()) == []


@pytest.mark.parametrize("damage", ["library", "manifest", "everything"])
@pytest.mark.filterwarnings("ignore:apex_te. .*is damaged")
def test_broken_winner_is_replaced(root, cache_dir, entry_of_another, monkeypatch, damage):
    if damage == "everything":
        shutil.rmtree(entry_of_another)
        entry_of_another.mkdir()
        (entry_of_another / "something").write_text("")
    else:
        name = "tiny_cpu.so" if damage == "library" else "manifest.json"
        os.truncate(entry_of_another / name, 10)
    Rival(monkeypatch, entry_of_another)
    opened = Tiny(root).open()
    assert call(opened) == 1
    assert os.path.samestat(os.fstat(opened.fd), os.stat(opened.path))
    assert list((cache_dir / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBUSY, errno.ENOENT, errno.EAGAIN])
@pytest.mark.parametrize("times", [2, 1000])
def test_rename_that_fails_for_a_while(root, cache_dir, monkeypatch, number, times):
    rename, left = os.rename, [times]

    def failing(source, target):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number), source)
        rename(source, target)

    monkeypatch.setattr(publish.os, "rename", failing)
    monkeypatch.setattr(publish.time, "sleep", lambda seconds: None)
    if times == 2:
        opened = Tiny(root).open()
        assert os.path.samestat(os.fstat(opened.fd), os.stat(opened.path))
    else:
        with pytest.warns(RuntimeWarning, match="could not be published .*only this process"):
            opened = Tiny(root).open()
        assert Tiny(root).find() is None
    assert call(opened) == 1
    assert list((cache_dir / "tmp").iterdir()) == []


def test_rename_whose_answer_is_lost(root, monkeypatch):
    rename = os.rename

    def answering_late(source, target):
        rename(source, target)
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), source)

    monkeypatch.setattr(publish.os, "rename", answering_late)
    opened = Tiny(root).open()
    assert os.path.samestat(os.fstat(opened.fd), os.stat(opened.path))


def test_entry_that_is_not_seen_yet(root, monkeypatch):
    """A network file system remembers for a while that a name did not exist."""
    monkeypatch.setattr(cache, "find", lambda *args: None)
    assert call(Tiny(root).open()) == 1


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ENOTEMPTY, errno.ESTALE])
def test_cleanup_that_fails(root, tmp_path, forget, monkeypatch, number):
    def busy(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        assert call(Tiny(root).open()) == 1
        forget()
        assert call(Tiny(write_op(tmp_path / "second", 2)).open()) == 2


@pytest.mark.cover(0)
@pytest.mark.parametrize("removed", ["locks", "tmp", "."])
def test_cleaned_while_processes_wait(root, cache_dir, tmp_path, removed):
    """`rm` of another shell in the middle: all get the library all the same."""
    compiler, log = logging_compiler(tmp_path, sleep=0.7)
    processes = [call_in_process(root, CXX=str(compiler)) for _ in range(3)]
    assert wait_for(log.read_text)
    time.sleep(0.2)
    shutil.rmtree(cache_dir / removed, ignore_errors=True)  # as far as it gets: others write
    outputs = [finish(process) for process in processes]
    assert outputs == ["value 1\n"] * 3
    assert Tiny(root).find() is not None


# Locks ---------------------------------------------------------------------------------------

WITHOUT_LOCKS = """
    import errno, fcntl
    flock = fcntl.flock
    def refusing(fd, operation):
        if os.readlink(f"/proc/self/fd/{{fd}}").startswith(os.environ["APEX_TE_CACHE_DIR"]):
            raise OSError(errno.{name}, os.strerror(errno.{name}))
        return flock(fd, operation)
    fcntl.flock = refusing
"""


@pytest.mark.cover(0)
@pytest.mark.parametrize(
    ("name", "session"), [("ENOLCK", True), ("EOPNOTSUPP", False), ("ENOSYS", True)]
)
def test_file_system_without_locks(root, cache_dir, tmp_path, name, session):
    """Processes of one machine share a lock beside the user's session; without one all build."""
    compiler, log = logging_compiler(tmp_path, sleep=0.3)
    environment = {"CXX": str(compiler)}
    if session:
        (tmp_path / "runtime").mkdir(mode=0o700)
        environment["XDG_RUNTIME_DIR"] = str(tmp_path / "runtime")
    code = WITHOUT_LOCKS.format(name=name) + CALL.format(root=str(root))
    processes = [start(code, **environment) for _ in range(4)]
    for process in processes:
        out, err = process.communicate(timeout=LIMIT)
        assert out == "value 1\n", err
        assert f"file locks do not work in {cache_dir}/locks" in err or "built" not in err
    compiles = log.read_text().count("x")
    assert compiles == 1 if session else 1 <= compiles <= 4
    assert list((cache_dir / "tmp").iterdir()) == []
    assert len(list(cache_dir.glob("tiny_cpu-*/cpu/tiny_cpu.so"))) == 1


OWN_LOCKS = """
    import fcntl
    fcntl.flock = lambda fd, operation: None  # as if no lock of another process were seen
    from op_builder.jit.build import lock
    {kernel}
"""
OTHER_HOSTS = "lock._kernel = lambda: f'{os.getpid():08x}'"


@pytest.mark.cover(0)
@pytest.mark.parametrize("kernel", ["", OTHER_HOSTS], ids=["one host", "four hosts"])
def test_locks_that_reach_no_other_machine(root, cache_dir, tmp_path, kernel):
    """Builders that see none of each other's locks leave each other's running builds alone."""
    compiler, log = logging_compiler(tmp_path, sleep=1.5)
    code = OWN_LOCKS.format(kernel=kernel) + CALL.format(root=str(root))
    processes = [start(code, CXX=str(compiler)) for _ in range(4)]
    assert [finish(process) for process in processes] == ["value 1\n"] * 4
    assert log.read_text().count("x") <= 4  # none began anew
    assert list((cache_dir / "tmp").iterdir()) == []
    assert len(list(cache_dir.glob("tiny_cpu-*/cpu/tiny_cpu.so"))) == 1


def test_who_may_be_alive(tmp_path, monkeypatch):
    """A dead builder of this machine is told by its process id, another machine's by its age."""
    name = f"tiny_cpu-{'0' * 24}"

    def folder(builder, age=0.0):
        path = tmp_path / "tmp" / f"{name}.{builder}-abcdefgh"
        path.mkdir(parents=True)
        os.utime(path, (time.time() - age,) * 2)
        return str(path)

    mine = lock.builder_name()
    kernel, pid, started = mine.split("-")
    ended = subprocess.Popen(["true"])
    ended.wait()
    alive = [folder(mine, age=9e4), folder("00000000-1-1", age=lock.ABANDONED_AFTER - 60)]
    dead = [
        folder(f"{kernel}-{ended.pid}-{started}"),
        folder(f"{kernel}-{pid}-{int(started) + 1}"),
        folder("00000001-1-1", age=lock.ABANDONED_AFTER + 60),
    ]
    publish.remove_leftovers(str(tmp_path), name)
    assert [path for path in (*alive, *dead) if os.path.exists(path)] == alive
    monkeypatch.setattr(lock, "FRESH_EVERY", 0.01)
    with lock.marked(alive[1]):
        assert wait_for(lambda: os.stat(alive[1]).st_mtime > time.time() - 60)


# Clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("years", [-30, 30])
def test_failure_of_another_time(root, cache_dir, tmp_path, monkeypatch, years):
    """A clock that was wrong, and was put right: the failure it stamped is not believed."""
    compiler, log = logging_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    write_op(root, body="return no_such_name;")
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + years * 3.15e7)
        with pytest.raises(CompileError):
            Tiny(root).open()
    for expected in (2, 2):  # the second one is fresh, and counts
        with pytest.raises(CompileError):
            Tiny(root).open()
        assert log.read_text() == "x\n" * expected
    stored = next(cache_dir.rglob("failure-*"))
    record = json.loads(stored.read_text())
    for wrong in (None, "now", float("nan"), float("inf"), -1e300, [], True):
        stored.write_text(json.dumps({**record, "time": wrong}))
        with pytest.raises(CompileError):
            Tiny(root).open()
        expected += 1
        assert log.read_text() == "x\n" * expected


def test_clock_that_is_put_back_while_processes_wait(root, tmp_path):
    write_op(root, body="return no_such_name;")
    compiler, log = logging_compiler(tmp_path, sleep=0.8)
    code = f"""
        now = time.time
        def put_back():
            return now() - 3600 * (os.path.getsize({str(log)!r}) > 0)
        time.time = put_back
    """
    code = textwrap.dedent(code) + textwrap.dedent(CALL.format(root=str(root)))
    processes = [start(code, CXX=str(compiler)) for _ in range(4)]
    outputs = {finish(process) for process in processes}
    assert len(outputs) == 1
    assert outputs.pop().startswith("CompileError tiny (cpu): ")
    assert log.read_text() == "x\n"


@pytest.mark.parametrize("name", ["join_cuda.cu", "tiny_join.cpp", "tiny_join.cu"])
def test_source_of_another_name(root, forget, name):
    """It would be left out, and its functions missing from the library."""
    (root / "csrc" / "tiny" / name).write_text("")
    with pytest.raises(BuildError, match=f"tiny_.*_cuda.cu alone, got {name}"):
        Tiny(root).open()


@pytest.mark.parametrize("stamp", [0, 1, 4102444800])
def test_sources_of_another_time(root, forget, stamp):
    for path in root.rglob("*"):
        os.utime(path, (stamp, stamp))
    assert call(Tiny(root).open()) == 1
    forget()
    assert Tiny(root).find() is not None
    write_op(root, value=2)
    for path in root.rglob("*"):
        os.utime(path, (stamp, stamp + 1))
    forget()
    assert call(Tiny(root).open()) == 2
