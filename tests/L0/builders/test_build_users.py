"""Attacks of another user, and folders that do not belong where they are."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from attacks import CALL, LIMIT, call, finish, replace, resized
from tiny_op import ABI, PRELUDE, Tiny, write_op

from op_builder.jit.errors import CacheError
from op_builder.jit.find import cache
from op_builder.jit.inspect import facts as report

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as two users")


@pytest.fixture
def shared():
    """A folder that other users can reach; pytest's own are private."""
    path = Path(tempfile.mkdtemp(prefix="apex_te_attack-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_user(user, code, **environment):
    """A process that becomes ``user`` after its imports."""
    become = f"""
import ctypes, sysconfig, subprocess, tempfile  # another user may not read the Python in use
from op_builder.jit.backends import library, toolchain
from op_builder.jit.build import failure, lock, publish
toolchain.find_ninja()
os.setgroups([]); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})
if not os.access(sys.executable, os.X_OK) and os.access("/usr/bin/python3", os.X_OK):
    sys.executable = "/usr/bin/python3"  # for children
"""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + become + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        cwd="/",
    )


VICTIM, ATTACKER = 54321, 54322


def pausing_compiler(folder, signals):
    """A compiler that tells what it has linked, and goes on once the attacker is done."""
    script = folder / "pausing-cxx"
    script.write_text(
        '#!/bin/sh\ng++ "$@" || exit\ncase " $* " in *" -shared "*)\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'echo "$2" > {signals}/telling; mv {signals}/telling {signals}/linked\n'
        f"while [ ! -e {signals}/exchanged ]; do sleep 0.02; done;;\nesac\n"
    )
    script.chmod(0o755)
    return script


def proving_library(folder, proof):
    """A library that makes a file when it is loaded."""
    source, library = folder / "proving.cpp", folder / "proving.so"
    source.write_text(
        f"#include <fcntl.h>\n{ABI}"
        f'__attribute__((constructor)) static void run() {{ creat("{proof}", 0644); }}\n'
        'extern "C" int tiny() { return 666; }\n'
    )
    command = ["g++", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    library.chmod(0o755)
    return library


@as_root
class TestTwoUsers:
    """One user's cache against another user."""

    def prepare(self, shared):
        root = write_op(shared / "project")
        home = shared / "home"
        home.mkdir(mode=0o755)
        os.chown(home, VICTIM, VICTIM)
        return root, home

    def victim(self, root, home, **environment):
        settings = {"HOME": str(home), "APEX_TE_CACHE_DIR": "", **environment}
        return finish(as_user(VICTIM, CALL.format(root=str(root)), **settings))

    def test_cannot_be_written(self, shared):
        root, home = self.prepare(shared)
        assert self.victim(root, home) == "value 1\n"
        folder = home / ".cache" / "apex_te"
        library = next(folder.glob("*/cpu/tiny_cpu.so"))
        code = f"""
            tally = []
            for action in (lambda: os.listdir({str(folder)!r}),
                           lambda: open({str(library)!r}, "r+"),
                           lambda: open({str(folder / "planted")!r}, "w"),
                           lambda: os.rename({str(folder)!r}, {str(folder)!r} + "-away"),
                           lambda: os.mkdir({str(folder / "tiny_cpu-0")!r})):
                try:
                    action()
                    tally.append("DONE")
                except PermissionError:
                    tally.append("refused")
            print(*tally)
        """
        assert finish(as_user(ATTACKER, code)) == "refused refused refused refused refused\n"
        assert self.victim(root, home, CXX="/nonexistent") == "value 1\n"

    @pytest.mark.parametrize("owner", [ATTACKER, 0])
    def test_folder_of_another_user(self, shared, owner):
        """Such as one that root made in the user's home, or an attacker before the user came."""
        root, home = self.prepare(shared)
        folder = home / ".cache" / "apex_te"
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        os.chown(folder, owner, owner)
        output = self.victim(root, home)
        assert output == "value 1\n"
        assert list(folder.iterdir()) == []
        output = self.victim(root, home, APEX_TE_CACHE_DIR=str(folder))
        assert output.startswith(f"CacheError APEX_TE_CACHE_DIR={folder} cannot be used: {folder}")
        assert f"must belong to user {VICTIM}, it belongs to {owner}" in output

    def test_planted_for_the_victim(self, shared, planted):
        root, home = self.prepare(shared)
        assert self.victim(root, home) == "value 1\n"
        library = next((home / ".cache" / "apex_te").glob("*/cpu/tiny_cpu.so"))
        replace(library, resized(planted, library.stat().st_size))
        os.chown(library, ATTACKER, ATTACKER)
        assert self.victim(root, home) == "value 1\n"  # in a folder of its own, with a warning
        output = self.victim(root, home, APEX_TE_DISABLE_JIT="1")
        assert output.startswith("JitDisabledError")

    def test_extra_cache_of_an_attacker(self, shared, planted):
        root, home = self.prepare(shared)
        assert self.victim(root, home) == "value 1\n"
        extra = shared / "extra"
        shutil.move(home / ".cache" / "apex_te", extra)
        extra.chmod(0o755)
        for path in [extra, *extra.rglob("*")]:
            os.chown(path, ATTACKER, ATTACKER)
        environment = {"APEX_TE_CACHE_PATH": str(extra), "CXX": "/nonexistent"}
        assert "CompilerNotFoundError" in self.victim(root, home, **environment)
        for path in [extra, *extra.rglob("*")]:
            os.chown(path, 0, 0)
            path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o055)
        assert self.victim(root, home, **environment) == "value 1\n"

    @pytest.mark.parametrize("way", ["HOME", "XDG_CACHE_HOME", "APEX_TE_CACHE_DIR"])
    @pytest.mark.parametrize("mode", [0o777, 0o775])
    def test_tree_exchanged_during_a_compile(self, shared, way, mode):
        """Whoever may rename a folder above the cache runs no code as the builder."""
        root = write_op(shared / "project")
        signals, place = shared / "signals", shared / "place"
        signals.mkdir()
        signals.chmod(0o1777)
        place.mkdir()
        os.chown(place, 0, ATTACKER)
        place.chmod(mode)
        (place / "mine").mkdir(mode=0o755)
        os.chown(place / "mine", VICTIM, VICTIM)
        compiler = pausing_compiler(shared, signals)
        planted = proving_library(shared, signals / "proof")
        folder = place / "mine" if way == "HOME" else place / "mine" / "cache"
        settings = {"HOME": "/nonexistent", "APEX_TE_CACHE_DIR": "", way: str(folder)}
        attack = f"""
            import shutil
            def wait_for(path):
                while not os.path.exists(path):
                    time.sleep(0.01)
            wait_for({str(signals / "linked")!r})
            library = open({str(signals / "linked")!r}).read().strip()
            os.umask(0)
            os.rename({str(place / "mine")!r}, {str(place / "away")!r})
            if library.startswith({str(place)!r}):
                os.makedirs(os.path.dirname(library), mode=0o777)
                shutil.copy({str(planted)!r}, library)
            open({str(signals / "exchanged")!r}, "w").close()
            print("done")
        """
        victim = as_user(VICTIM, CALL.format(root=str(root)), CXX=str(compiler), **settings)
        attacker = as_user(ATTACKER, attack)
        out, err = victim.communicate(timeout=LIMIT)
        assert finish(attacker) == "done\n"
        assert not (signals / "proof").exists()
        assert f"{place} is writable by {'all' if mode == 0o777 else 'group'}" in err
        assert out == "value 1\n", err
        named = way == "APEX_TE_CACHE_DIR"
        assert ("the default cache cannot be used" in err) is not named
        assert ("is not safe while it is built in" in err) is named

    def test_read_only_home(self, shared):
        root, home = self.prepare(shared)
        home.chmod(0o555)
        process = as_user(VICTIM, CALL.format(root=str(root)), HOME=str(home), APEX_TE_CACHE_DIR="")
        out, err = process.communicate(timeout=LIMIT)
        assert out == "value 1\n"
        # not the line of source that Python prints after a warning if it can read it
        assert err.count("apex_te: the default cache cannot be used") == 1
        assert list(home.iterdir()) == []

    def test_user_without_a_home(self, shared):
        """No HOME and no entry in the user database: nothing is made in the current folder."""
        root, home = self.prepare(shared)
        code = f"os.chdir({str(home)!r}); del os.environ['HOME']" + textwrap.dedent(
            CALL.format(root=str(root))
        )
        out, err = as_user(VICTIM, code, APEX_TE_CACHE_DIR="").communicate(timeout=LIMIT)
        assert out == "value 1\n", err
        assert "the default cache cannot be used: /.cache" in err
        assert list(home.iterdir()) == []


@pytest.mark.parametrize("home", ["relative", "~", "unset"])
def test_home_that_is_no_folder(tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APEX_TE_CACHE_DIR")
    monkeypatch.setenv("HOME", home)
    if home == "unset":
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without an entry
    assert cache.default_cache() == "/.cache/apex_te"


@pytest.mark.parametrize("home", ["/proc", "/dev/null"])
def test_home_that_cannot_be_written(root, tmp_path, monkeypatch, home):
    monkeypatch.delenv("APEX_TE_CACHE_DIR")
    monkeypatch.setenv("HOME", home)
    with pytest.warns(
        RuntimeWarning, match=rf"default cache cannot be used: {home}/\.cache"
    ) as seen:
        opened = Tiny(root).open()
    assert len(seen) == 1
    assert call(opened) == 1


def unsafe_parents(place):
    """Caches in folders that others may rename in, and what is said of each; "" for safe ones."""
    for name, mode in (("all", 0o777), ("sticky", 0o1777), ("group", 0o775), ("mine", 0o755)):
        (place / name / "in").mkdir(parents=True)
        (place / name).chmod(mode)
    os.chown(place / "group", -1, ATTACKER)
    (place / "theirs").mkdir(mode=0o755)
    os.chown(place / "theirs", ATTACKER, ATTACKER)
    (place / "mine" / "link").symlink_to("../all/in")
    (place / "mine" / "circle").symlink_to("circle")
    (place / "sticky" / "link").symlink_to(place / "mine")
    os.chown(place / "sticky" / "link", ATTACKER, ATTACKER, follow_symlinks=False)
    owner = f"belongs to user {ATTACKER}, who could exchange what is in it"
    return {
        "all": (place / "all" / "in" / "cache", f"{place}/all is writable by all and not sticky"),
        "all, missing": (place / "all" / "a" / "b", f"{place}/all is writable by all"),
        "sticky": (place / "sticky" / "in" / "cache", ""),
        "group": (place / "group" / "in", f"{place}/group is writable by group {ATTACKER}"),
        "mine": (place / "mine" / "in" / "cache", ""),
        "theirs": (place / "theirs" / "cache", f"{place}/theirs {owner}"),
        "a link": (place / "mine" / "link" / "cache", f"{place}/all is writable by all"),
        "a circle": (place / "mine" / "circle" / "cache", "has more than 40 links"),
        "their link": (place / "sticky" / "link" / "cache", f"{place}/sticky/link {owner}"),
        "up and down": (place / "all" / ".." / "mine" / "cache", f"{place}/all is writable by all"),
        "missing": (place / "mine" / "no" / "cache", ""),
    }


@as_root
def test_parents_that_others_may_rename_in(shared, monkeypatch):
    """Every folder on the way to a cache counts, also behind links, and a report names it."""
    for name, (path, told) in unsafe_parents(shared).items():
        found = cache.parent_problem(str(path))
        assert told in found if told else found == "", (name, found)
    (shared / "group").chmod(0o775)
    os.chown(shared / "group", -1, 0)  # root's own group
    assert cache.parent_problem(str(shared / "group" / "in" / "cache")) == ""
    monkeypatch.delenv("APEX_TE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "all"))
    facts = report.cache_folder(cache.user_cache())
    assert facts["problem"].startswith(f"nothing is built in it: {shared}/all is writable by all")


def test_fresh_folder_in_an_unsafe_place(root, tmp_path, monkeypatch):
    """Where everybody may rename folders, one of ours could be changed for another's in a build."""
    place = tmp_path / "shared"
    (place / "mine").mkdir(parents=True)
    place.chmod(0o777)
    monkeypatch.delenv("APEX_TE_CACHE_DIR")
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.setattr(tempfile, "tempdir", str(place / "mine"))
    with pytest.raises(CacheError, match=rf"{place} is writable by all and not sticky"):
        Tiny(root).open()
    assert list((place / "mine").iterdir()) == []
    place.chmod(0o1777)
    with pytest.warns(RuntimeWarning, match="default cache cannot be used"):
        assert call(Tiny(root).open()) == 1


def test_parents_are_made_private(root, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_TE_CACHE_DIR", str(tmp_path / "a" / "b" / "c"))
    previous = os.umask(0)
    try:
        Tiny(root).open()
    finally:
        os.umask(previous)
    for name in ("a", "a/b", "a/b/c", "a/b/c/tmp", "a/b/c/locks"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
