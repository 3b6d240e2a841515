"""The attacks on the cache that take luck, many times; the counts are printed and kept."""

import os
import random
import shutil
import warnings
from pathlib import Path

import pytest
from attack_loops import (
    fail_cold,
    fill_disk,
    interrupt,
    kill_builders,
    kill_compilers,
    start_cold,
    swap,
)
from attacks import (
    CALL,
    Tally,
    call,
    call_in_process,
    finish,
    half_written,
    library_bytes,
    replace,
    small_disk,
)
from test_build_faults import WITHOUT_LOCKS
from test_build_kills import in_threads
from tiny_op import Tiny, start, write_op


@pytest.fixture
def tally(request, tmp_path):
    """The counts of one test, also written to ``attacks.txt`` in its folder."""
    counts = Tally(request.node.name.removeprefix("test_"), tmp_path / "attacks.txt")
    yield counts
    counts.report()


@pytest.mark.parametrize(
    ("attack", "times", "ending", "least"),
    [
        (kill_builders, 200, "in the build", 31),
        (kill_compilers, 100, "killed", 51),
        (interrupt, 100, "interrupted", 21),
    ],
)
def test_builds_that_end_early(root, cache_dir, forget, tally, attack, times, ending, least):
    attack(root, cache_dir, forget, tally, times)
    assert tally.ends.total() == times
    assert sum(tally.ends[end] for end in tally.ends if end.endswith(ending)) >= least


def test_sixteen_cold_processes(tmp_path, tally):
    for number in range(5):
        start_cold(tmp_path / str(number), tally, processes=16, ops=6)
    assert tally.ends["right"] == 80


def test_sixteen_processes_and_a_failing_compile(tmp_path, tally):
    for number in range(10):
        fail_cold(tmp_path / str(number), tally, 16)
    assert tally.ends == {"the same error": 160, "compile": 10}


def test_sixteen_threads(root, forget, tally):
    for value in range(50):
        write_op(root, value, "" if value % 5 else "return no_such_name;")
        forget()
        ends = in_threads(16, lambda: Tiny(root).open())
        assert len({str(end) for end in ends}) == 1
        right = "CompileError" if value % 5 == 0 else "OpenedLibrary"
        assert {type(end).__name__ for end in ends} == {right}
        if right == "OpenedLibrary":
            assert call(ends[0]) == value
        tally.count(f"sixteen times the same {right}")


def test_processes_without_locks(root, cache_dir, tally):
    """All may build; each rename but one loses."""
    code = WITHOUT_LOCKS.format(name="ENOLCK") + CALL.format(root=str(root))
    for _ in range(20):
        processes = [start(code) for _ in range(8)]
        for process in processes:
            tally.count("right" if finish(process) == "value 1\n" else "WRONG")
        assert half_written(cache_dir, root) == []
        assert list((cache_dir / "tmp").iterdir()) == []
        for path in cache_dir.glob("tiny_cpu-*"):
            shutil.rmtree(path)
    assert tally.ends == {"right": 160}


def test_removed_caches(root, cache_dir, tally):
    """Somebody removes the whole cache, at a random moment, while processes build and wait."""
    chance = random.Random(3)
    for _ in range(60):
        processes = [call_in_process(root) for _ in range(3)]
        finish(start(f"time.sleep({chance.uniform(0.0, 0.5)})"))
        shutil.rmtree(cache_dir, ignore_errors=True)
        for process in processes:
            output = finish(process)
            # files vanish one by one: a compiler may miss one before its folder is gone
            tally.count(output if output == "value 1\n" else output.split()[0])
        assert finish(call_in_process(root, APEX_TE_JIT_RETRY="1")) == "value 1\n"
        shutil.rmtree(cache_dir, ignore_errors=True)
    assert tally.ends["value 1\n"] >= 170


def test_swapped_libraries(root, tmp_path, forget, tally):
    opened = Tiny(root).open()
    os.close(opened.fd)
    swap(root, Path(opened.path), library_bytes(tmp_path, 666), tmp_path, tally, 20000)
    assert set(tally.ends) == {"right", "refused"}


def test_changed_libraries_and_manifests(root, tally):
    library = Path(Tiny(root).open().path)
    content = library.read_bytes()
    chance = random.Random(4)
    for path in (library, library.with_name("manifest.json")):
        right = path.read_bytes()
        for _ in range(5000):
            wrong = bytearray(right)
            for _ in range(chance.randrange(1, 4)):
                wrong[chance.randrange(len(wrong))] = chance.randrange(256)
            cut = chance.randrange(len(wrong)) if chance.random() < 0.2 else len(wrong)
            replace(path, bytes(wrong[:cut]))  # one that is loaded must not change in place
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = Tiny(root).find()
            if found is None:
                tally.count(f"{path.suffix} missed")
                continue
            same = os.pread(found.fd, 1 << 20, 0) == content
            tally.count(f"{path.suffix} right" if same and call(found) == 1 else "WRONG")
            os.close(found.fd)
        replace(path, right)
    assert tally.ends["WRONG"] == 0


def test_full_disks(root, tmp_path, monkeypatch, tally):
    try:
        with small_disk(tmp_path / "disk", "size=1m") as disk:
            monkeypatch.setenv("APEX_TE_CACHE_DIR", str(disk / "cache"))
            other = write_op(tmp_path / "other", 2)
            fill_disk(root, other, disk, tally, [number // 2 for number in range(80)])
    except PermissionError as error:
        pytest.skip(f"needs the right to mount a small disk: {error}")
    assert set(tally.ends) == {"built", "refused"}
