"""Libraries that this system cannot load: told before, built again where that helps, explained."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import struct
import sys
import warnings
import zlib
from pathlib import Path

import pytest
from programs import captured
from tiny_op import CHECKOUT, Tiny, logging_compiler, write_op

import op_builder
from op_builder.jit import platform
from op_builder.jit.build import service
from op_builder.jit.errors import JitDisabledError
from op_builder.jit.find import cache, elf
from op_builder.jit.find.cache import OpenedLibrary

OUTER = cache.user_cache().path  # the user's own, before the tests get empty ones


@pytest.fixture
def root(tmp_path):
    """An op that needs a function of glibc."""
    return write_op(tmp_path / "project", body="int getpid(); if (getpid() == 0) return 7;")


def change(entry, content=None, **changes):
    """Gives an entry another content, and a manifest that describes it."""
    (library,) = entry.glob("*.so")
    content = library.read_bytes() if content is None else content
    library.write_bytes(content)
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest.update(size=len(content), crc32=zlib.crc32(content), **changes)
    (entry / "manifest.json").write_text(json.dumps(manifest))


def elf_hash(name):
    """The hash of a version's name that stands beside it in the library."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return struct.pack("<I", value)


def of_a_newer_system(content):
    """A library that needs a glibc of the future."""
    found = max(set(re.findall(rb"GLIBC_2\.[\d.]+(?=\0)", content)), key=len)
    future = b"GLIBC_2." + b"9" * (len(found) - 8)
    return content.replace(found + b"\0", future + b"\0").replace(elf_hash(found), elf_hash(future))


BROKEN = {
    "newer system": (of_a_newer_system, "built on a newer system"),
    "no library": (lambda content: b"text" * 100, "the compiler left a broken library"),
}


def call(opened):
    """Loads the opened library and calls its function."""
    try:
        return int(ctypes.CDLL(opened.proc_path).tiny())
    except OSError as error:
        raise ImportError(str(error)) from None


def load(op):
    return service.load_library(op, "cpu", None, call)


def test_manifest_names_the_glibc(root, cache_dir):
    """It is the highest version of glibc's symbols that the library needs."""
    opened = Tiny(root).open()
    manifest = json.loads((Path(opened.path).parent / "manifest.json").read_text())
    versions = elf.needs(Path(opened.path).read_bytes()).versions["GLIBC"]
    assert manifest["glibc"] == ".".join(map(str, versions))
    assert versions <= platform.glibc()
    future = elf.needed_glibc(of_a_newer_system(Path(opened.path).read_bytes()))
    assert future.startswith("2.9")
    assert elf.needed_glibc(b"text") == ""


@pytest.mark.parametrize("place", ["cache", "extra"])
def test_library_of_a_newer_glibc_is_not_loaded(
    root, cache_dir, tmp_path, forget,
    monkeypatch, place
):  # fmt: skip
    """One that names a newer glibc than this system's is passed over and built again, once."""
    op, (compiler, log) = Tiny(root), logging_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    entry = Path(op.open().path).parent
    change(entry, glibc="99.1")
    if place == "extra":
        extra = tmp_path / "extra"
        shutil.move(cache_dir, extra)
        cache_dir.mkdir(mode=0o700)
        monkeypatch.setenv("APEX_TE_CACHE_PATH", str(extra))
    forget()
    with pytest.warns(RuntimeWarning, match=r"needs glibc 99\.1, this system has \d"):
        assert call(op.open()) == 1
    forget()
    assert call(op.open()) == 1
    assert log.read_text() == "x\n" * 2


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("place", ["cache", "extra"])
def test_refused_library_is_built_again(
    root, cache_dir, tmp_path, forget,
    monkeypatch, kind, place
):  # fmt: skip
    """A library of an earlier version, whose manifest says nothing, is built again if ld.so says
    no; what cannot be built again raises ld.so's words with a hint."""
    op, (compiler, log) = Tiny(root), logging_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    entry = Path(op.open().path).parent
    change(entry, BROKEN[kind][0]((entry / "tiny_cpu.so").read_bytes()), glibc="")
    if place == "extra":
        shutil.move(cache_dir, tmp_path / "extra")
        cache_dir.mkdir(mode=0o700)
        monkeypatch.setenv("APEX_TE_CACHE_PATH", str(tmp_path / "extra"))
    forget()
    monkeypatch.setattr(service, "_built", set())
    with monkeypatch.context() as patch:
        patch.setenv("APEX_TE_DISABLE_JIT", "1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ImportError, match=f"hint: .*{BROKEN[kind][1]}") as caught:
                load(op)
        assert isinstance(caught.value.__cause__, JitDisabledError)
    forget()
    cache.warned.clear()
    with pytest.warns(RuntimeWarning, match="cannot be loaded here"):
        assert load(op) == 1
    assert log.read_text() == "x\n" * 2


def test_own_build_that_is_refused(root, monkeypatch):
    """A library that this process has just built is not built a second time."""

    def refuse(opened):
        calls.append(opened)
        raise ImportError("libstdc++.so.6: version `GLIBCXX_9.9' not found (required by x)")

    calls: list[OpenedLibrary] = []
    with pytest.raises(ImportError, match="newer system"):
        service.load_library(Tiny(root), "cpu", None, refuse)
    assert len(calls) == 1


DISPATCHER = """
import warnings; warnings.simplefilter("ignore")
import torch, apex_te
from apex_te.runtime import core
try:
    print(core().__name__)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def dispatcher(monkeypatch, cache_dir):
    """The dispatcher's entry in the cache, copied from the user's own."""
    pytest.importorskip("torch")
    with monkeypatch.context() as patch:
        patch.setenv("APEX_TE_CACHE_DIR", OUTER)
        entry = Path(op_builder.get_builder("apex_te_core").open().path).parent
    return Path(shutil.copytree(entry.parent, cache_dir / entry.parent.name)) / entry.name


def import_core(*before, **environment):
    command = [*before, sys.executable, "-B", "-c", DISPATCHER]
    variables = {**os.environ, "PYTHONPATH": str(CHECKOUT), **environment}
    done = captured(command, check=False, env=variables)
    return done.stdout or done.stderr


@pytest.mark.long
def test_refused_dispatcher(dispatcher, cache_dir, tmp_path):
    """A dispatcher that ld.so refuses is replaced by another; without one there is a hint."""
    good = tmp_path / "good"
    shutil.copytree(cache_dir, good)
    good.chmod(0o700)
    (library,) = dispatcher.glob("*.so")
    change(dispatcher, of_a_newer_system(library.read_bytes()), glibc="")
    assert import_core(APEX_TE_CACHE_PATH=str(good)) == "apex_te_core\n"
    told = import_core(APEX_TE_DISABLE_JIT="1")
    assert told.startswith(f"ImportError apex_te_core: {library} cannot be loaded: ")
    assert "hint: the library was built on a newer system" in told


def test_dispatcher_on_a_noexec_file_system(dispatcher, cache_dir):
    """The error says that the cache is mounted noexec, and which variable names another folder."""
    mount = f"mount -t tmpfs -o noexec,size=8m,mode=700 none {cache_dir}"
    copy = f"{cache_dir}-copy"
    script = f"mv {cache_dir} {copy} && mkdir {cache_dir} && {mount} && cp -r {copy}/* {cache_dir}"
    script += ' && exec "$@"'
    told = import_core("unshare", "-rm", "sh", "-c", script, "sh")
    if "apex_te_core" not in told:
        pytest.skip(f"mounting is not allowed here: {told[-200:]}")
    assert told.startswith("ImportError apex_te_core: ")
    assert "mounted noexec: set APEX_TE_CACHE_DIR" in told
