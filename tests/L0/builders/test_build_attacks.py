"""Attacks on what is loaded: planted, swapped, damaged and foreign files in and around a cache."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from attack_loops import swap
from attacks import LIMIT, Tally, call, call_in_process, finish, replace, resized
from tiny_op import Tiny, start, write_op

from op_builder.jit.errors import BuildError, CacheError
from op_builder.jit.find import cache


@pytest.fixture
def library(root, forget):
    """The op's library in the cache, built and forgotten."""
    opened = Tiny(root).open()
    os.close(opened.fd)
    forget()
    return Path(opened.path)


@pytest.mark.filterwarnings("ignore:apex_te. .*is damaged")
class TestContent:
    """A library that is not the one its manifest describes is never loaded."""

    def test_planted_library(self, root, library, planted):
        right = library.read_bytes()
        replace(library, resized(planted, len(right)))
        assert (
            call_in_process(root, APEX_TE_DISABLE_JIT="1")
            .communicate(timeout=LIMIT)[0]
            .startswith("JitDisabledError")
        )
        with pytest.warns(RuntimeWarning, match="checksum is not the manifest's; it is not used"):
            assert Tiny(root).find() is None
        assert call(Tiny(root).open()) == 1
        assert library.read_bytes() == right

    def test_hard_link(self, root, library, planted, tmp_path):
        size = library.stat().st_size
        outside = tmp_path / "outside.so"
        os.link(library, outside)  # as a backup or a package cache does
        found = Tiny(root).find()
        assert found is not None
        assert call(found) == 1
        outside = tmp_path / "planted.so"
        outside.write_bytes(resized(planted, size))
        library.unlink()
        os.link(outside, library)
        assert Tiny(root).find() is None
        assert call(Tiny(root).open()) == 1
        assert outside.read_bytes() == resized(planted, size)

    def test_changed_bytes(self, root, library):
        right = library.read_bytes()
        chance, tally = random.Random(1), Tally("changed bytes")
        for _ in range(60):
            wrong = bytearray(right)
            wrong[chance.randrange(len(wrong))] ^= 1 << chance.randrange(8)
            library.write_bytes(wrong)
            tally.count("refused" if Tiny(root).find() is None else "LOADED")
        library.write_bytes(right)
        assert Tiny(root).find() is not None
        assert "LOADED" not in tally.report()

    def test_cut_and_torn(self, root, library):
        right = library.read_bytes()
        tally = Tally("cut, torn and lengthened libraries")
        page = 4096
        for length in (0, 1, 63, 64, page, len(right) // 2, len(right) - 1):
            # a cut file, one with a hole where a crash lost the end, and one that was added to
            for wrong in (right[:length], resized(right[:length], len(right)), right + b"\0"):
                if wrong == right:  # it ends in a zero
                    continue
                library.write_bytes(wrong)
                tally.count("refused" if Tiny(root).find() is None else "LOADED")
        assert "LOADED" not in tally.report()
        assert call(Tiny(root).open()) == 1

    def test_library_that_shrinks_while_it_is_read(self, root, library, monkeypatch):
        read = os.pread

        def shrinking(fd, count, offset):
            part = read(fd, count // 3, offset)
            os.truncate(library, offset + len(part))
            return part

        monkeypatch.setattr(cache.os, "pread", shrinking)
        assert Tiny(root).find() is None


WRONG_MANIFESTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 100000,
    b'{"a":' * 20000,
    b"{}",
    b" " * (1 << 20) + b"{}",
]
WRONG_VALUES = {
    "key": [None, 5, "", "0" * 64, ["x"]],
    "archs": [None, "9.0", 5, [5], [None], {"a": 1}, [["9.0"]]],
    "size": [None, "15024", -1, 1e30, float("nan"), [], 0],
    "crc32": [None, "1", -1, 1.5, float("inf"), {}, 2**40],
}


def test_wrong_manifests(root, library):
    manifest = library.with_name("manifest.json")
    right = manifest.read_bytes()
    chance, tally = random.Random(2), Tally("wrong manifests")
    contents = list(WRONG_MANIFESTS)
    for name, values in WRONG_VALUES.items():
        contents += [json.dumps({**json.loads(right), name: value}).encode() for value in values]
    for _ in range(100):
        wrong = bytearray(right)
        for _ in range(chance.randrange(1, 5)):
            wrong[chance.randrange(len(wrong))] = chance.randrange(256)
        contents.append(bytes(wrong))
    for content in contents:
        manifest.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = Tiny(root).find()
        if found is None:
            tally.count("missed")
        else:  # a byte of the compiler's version or of the time, which say nothing of the library
            tally.count("right" if call(found) == 1 else "WRONG")
            os.close(found.fd)
    tally.report()
    assert tally.ends["missed"] >= len(contents) - 100
    assert tally.ends["WRONG"] == 0
    manifest.write_bytes(b"{")
    assert call(Tiny(root).open()) == 1
    assert json.loads(manifest.read_text())["key"] == json.loads(right)["key"]


def test_removed_manifest(root, library):
    library.with_name("manifest.json").unlink()
    assert Tiny(root).find() is None
    assert call(Tiny(root).open()) == 1


def link(path):
    real = path.with_name("real")
    path.rename(real)
    path.symlink_to(real)


def open_to_all(path):
    path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o002)


def open_to_group(path):
    path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o020)


def pipe(path):
    path.rename(path.with_name("real"))
    os.mkfifo(path)


@pytest.mark.parametrize("attack", [link, open_to_all, open_to_group, pipe])
@pytest.mark.parametrize("where", ["key folder", "entry", "manifest", "library"])
def test_planted_at_every_level(root, library, where, attack):
    paths = {
        "key folder": library.parents[1],
        "entry": library.parent,
        "manifest": library.with_name("manifest.json"),
        "library": library,
    }
    attack(paths[where])
    with pytest.raises(CacheError, match=r"APEX_TE_CACHE_DIR=.* cannot be used: .* must"):
        Tiny(root).find()
    output = finish(call_in_process(root))
    assert output.startswith(f"CacheError APEX_TE_CACHE_DIR={cache.named_cache()} cannot be used")


@pytest.mark.parametrize("name", ["tmp", "locks"])
def test_linked_working_folder(root, cache_dir, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    (cache_dir / name).symlink_to(elsewhere)
    with pytest.raises(CacheError, match=f"{name} must not be a link"):
        Tiny(root).open()
    assert list(elsewhere.iterdir()) == []


def test_working_folder_that_others_write(root, cache_dir):
    (cache_dir / "tmp").mkdir()
    (cache_dir / "tmp").chmod(0o777)
    with pytest.raises(CacheError, match="tmp must not be writable by group or others"):
        Tiny(root).open()
    assert list((cache_dir / "tmp").iterdir()) == []


def test_planted_entry_of_the_default_cache_is_left_alone(root, tmp_path, forget, monkeypatch):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.delenv("APEX_TE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    library = Path(Tiny(root).open().path)
    forget()
    open_to_all(library)
    with pytest.warns(RuntimeWarning, match=r"default cache cannot be used: .*must not be writ"):
        opened = Tiny(root).open()
    assert opened.path.startswith(str(runtime))
    assert call(opened) == 1
    # the next process finds it there, says nothing and compiles nothing
    environment = {"XDG_CACHE_HOME": str(tmp_path / "home"), "CXX": "/nonexistent"}
    process = call_in_process(root, **environment)
    assert process.communicate(timeout=LIMIT) == ("value 1\n", "")


class TestSwap:
    """What was checked is what is loaded."""

    def test_swapped_between_check_and_load(self, root, library, planted):
        swaps: list[Callable[[], object]] = [
            lambda: replace(library, planted),
            lambda: library.unlink(),
            lambda: library.symlink_to("/nonexistent"),
            lambda: library.parent.rename(library.parent.with_name("away")),
            lambda: shutil.rmtree(library.parents[2]),
        ]
        found = Tiny(root).find()
        assert found is not None
        for act in swaps:
            act()
        assert call(found) == 1

    def test_swapped_all_the_time(self, root, library, planted, tmp_path):
        tally = Tally("library swapped all the time")
        swap(root, library, planted, tmp_path, tally, 300)
        tally.report()
        assert set(tally.ends) == {"right", "refused"}

    def test_number_of_a_closed_descriptor(self, root, tmp_path, forget):
        """dlopen knows libraries by path, and a path of a descriptor can come again."""
        roots = [root, write_op(tmp_path / "second", 2), write_op(tmp_path / "third", 3)]
        for other in roots:
            os.close(Tiny(other).open().fd)
        forget()
        numbers = set()
        for value, other in enumerate(roots, 1):
            opened = Tiny(other).open()
            assert call(opened) == value
            os.close(opened.fd)
            numbers.add(opened.fd)
        assert len(numbers) == 1
        # its number is another file's now, so the library is opened again
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, opened.fd)
        again = Tiny(roots[2]).open()
        assert call(again) == 3
        assert os.path.samestat(os.fstat(again.fd), os.stat(again.path))
        os.close(opened.fd)
        os.close(null)

    def test_names_of_many_files_under_one_number(self, tmp_path):
        """Each of 500 files gets a name of its own that opens it, as short as the first's."""
        names, numbers = set(), set()
        for i in range(500):
            path = tmp_path / f"{i}.so"
            path.touch()
            fd = os.open(path, os.O_RDONLY)
            status = os.fstat(fd)
            name = cache._proc_path(fd, (status.st_dev, status.st_ino))
            assert os.path.samestat(os.stat(name), status)
            names.add(name)
            numbers.add(fd)
            os.close(fd)
        assert (len(names), len(numbers)) == (500, 1)
        assert max(map(len, names)) < 300
        largest = (1 << 64) - 1
        assert len(cache._proc_path(1 << 30, (largest, largest))) < 300

    def test_daemon_that_closed_everything(self, root):
        code = f"""
            import ctypes
            first = Tiny({str(root)!r}).open()
            os.closerange(3, 1000)
            log = open("/dev/null")
            print(ctypes.CDLL(Tiny({str(root)!r}).open().proc_path).tiny())
        """
        assert finish(start(code)) == "1\n"

    def test_no_standard_streams(self, root, tmp_path):
        result = tmp_path / "result"
        code = f"""
            import ctypes
            for fd in range(3):
                os.close(fd)
            sys.stdin = sys.stdout = sys.stderr = None
            value = ctypes.CDLL(Tiny({str(root)!r}).open().proc_path).tiny()
            open({str(result)!r}, "w").write(str(value))
        """
        finish(start(code))
        assert result.read_text() == "1"


def test_errors_of_the_attacks_are_build_errors():
    for kind in (cache.Unsafe, cache.Damaged):
        assert issubclass(kind, BuildError)
