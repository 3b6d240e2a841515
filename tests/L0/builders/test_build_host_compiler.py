"""What nvcc gets of ``CXX``: the compiler without a launcher, and the compiler's flags."""

import ctypes
import os
import shutil

import pytest
from tiny_op import Tiny, TinyCuda

from op_builder.jit.backends import toolchain

GXX = shutil.which("g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.fixture
def launchers(tmp_path, monkeypatch):
    """A folder on PATH with launchers: each runs its arguments, as ccache does."""
    folder = tmp_path / "launchers"
    folder.mkdir()
    for name in ("ccache", "distcc", "own-launcher"):
        (folder / name).write_text('#!/bin/sh\nexec "$@"\n')
    # taken for the name of a compiler, it would be a call of one
    (folder / "sccache").write_text(
        '#!/bin/sh\ncase $1 in -*) exec g++ "$@";; *) exec "$@";; esac\n'
    )
    (folder / "wrapper").write_text('#!/bin/sh\nexec g++ "$@"\n')
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize(
    ("cxx", "expected"),
    [
        ("g++", [f"-ccbin={GXX}"]),
        ("g++ -m64", [f"-ccbin={GXX}", "-Xcompiler=-m64"]),
        ("ccache g++", [f"-ccbin={GXX}"]),
        ("sccache g++ -m64", [f"-ccbin={GXX}", "-Xcompiler=-m64"]),
        ("distcc ccache g++ -g", [f"-ccbin={GXX}", "-Xcompiler=-g"]),
        ("own-launcher g++ -g", [f"-ccbin={GXX}", "-Xcompiler=-g"]),
        ("env X=1 g++ -DY=2", [f"-ccbin={GXX}", "-Xcompiler=-DY=2"]),
        ("nice -n 1 g++ -Wl,-s", [f"-ccbin={GXX}", r"-Xcompiler=-Wl\,-s"]),
        ("g++ -std=c++20 -O0 -g", [f"-ccbin={GXX}", "-Xcompiler=-g"]),
        ("g++ -B /usr/bin", [f"-ccbin={GXX}", "-Xcompiler=-B", "-Xcompiler=/usr/bin"]),
        (" ", []),
    ],
)
def test_nvcc_gets_compiler_and_flags(launchers, monkeypatch, cxx, expected):
    """The host compiler is the program after the launchers; its other words are handed on."""
    monkeypatch.setenv("CXX", cxx)
    assert toolchain.nvcc_host_flags() == expected


def test_other_compiler_than_nvcc_looks_for(tmp_path, monkeypatch):
    """Without CXX and gcc, nvcc gets the compiler that C++ sources get."""
    (tmp_path / "clang++").symlink_to(str(GXX))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.nvcc_host_flags() == [f"-ccbin={tmp_path}/clang++"]


def test_wrapper_stays_the_compiler(launchers, monkeypatch):
    """A program that compiles by itself is the compiler, whatever it calls."""
    monkeypatch.setenv("CXX", "wrapper -g")
    wrapper = launchers / "wrapper"
    assert toolchain.nvcc_host_flags() == [f"-ccbin={wrapper}", "-Xcompiler=-g"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVCC_CCBIN", "g++"),
        ("NVCC_PREPEND_FLAGS", "-ccbin=g++"),
        ("NVCC_APPEND_FLAGS", "--compiler-bindir g++"),
    ],
)
def test_host_compiler_that_nvcc_is_told_itself(monkeypatch, name, value):
    """Variables that nvcc reads itself name its host compiler before CXX does."""
    monkeypatch.setenv("CXX", "clang++ -stdlib=libc++")
    monkeypatch.setenv(name, value)
    assert toolchain.nvcc_host_flags() == []


def test_compiler_in_a_folder_with_blanks(root, tmp_path, monkeypatch):
    """A path with blanks in CXX is one word if it is a program, quoted or not."""
    folder = tmp_path / "my tools"
    folder.mkdir()
    (folder / "g++").symlink_to(str(GXX))
    monkeypatch.setenv("CXX", f"{folder}/g++")
    assert toolchain.find_cxx() == [f"{folder}/g++"]
    assert toolchain.nvcc_host_flags() == [f"-ccbin={folder}/g++"]
    assert Tiny(root).open().fd >= 0
    monkeypatch.setenv("CXX", f"'{folder}/g++' -g")
    assert toolchain.nvcc_host_flags() == [f"-ccbin={folder}/g++", "-Xcompiler=-g"]


@pytest.mark.cover(0)
@needs_nvcc
@pytest.mark.parametrize(
    "cxx",
    [
        """ccache g++ -m64 '-DFROM_CXX="a, b"' -Wl,--build-id=none""",
        """env X=1 '{blank}/g++' '-DFROM_CXX="a, b"' '-I{blank}'""",
    ],
)
def test_cuda_library_of_a_launched_compiler(root, tmp_path, launchers, monkeypatch, cxx):
    """nvcc compiles and links with the compiler and the flags of CXX, whatever launches it."""
    blank = tmp_path / "with blank"
    blank.mkdir()
    (blank / "g++").symlink_to(str(GXX))
    source = root / "csrc/tiny/tiny_cuda.cu"
    source.write_text(
        "#ifndef FROM_CXX\n#error the flags of CXX are lost\n#endif\n__global__ void kernel() {}\n"
        'extern "C" __attribute__((visibility("default"))) int size()'
        " { kernel<<<1, 1>>>(); return sizeof(FROM_CXX); }\n" + source.read_text()
    )
    monkeypatch.setenv("CXX", cxx.format(blank=blank))
    opened = TinyCuda(root).open("cuda", (9, 0))
    assert opened.archs == ("9.0",)
    assert ctypes.CDLL(opened.proc_path).size() == len("a, b") + 1
