"""Compilers, flags and places that must not make a library: refused with an error that says why."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from attacks import processes_of, wait_for
from programs import captured
from tiny_op import Tiny, TinyCuda, logging_compiler, start, write_op

from op_builder import get_builder
from op_builder.jit.backends import toolchain
from op_builder.jit.build import publish
from op_builder.jit.errors import (
    BuildError,
    BuildInterruptedError,
    CompileError,
    SettingError,
)
from op_builder.jit.find import cache, elf, inventory
from op_builder.jit.inspect import clean
from op_builder.jit.inspect import facts as stale


def wrapper(folder, after_link, name="wrapped-cxx"):
    """A compiler that runs shell commands on the library, ``$out``, and reports success."""
    script = folder / name
    script.write_text(
        '#!/bin/sh\ng++ "$@" || exit\ncase " $* " in *" -shared "*) ;; *) exit 0;; esac\n'
        'while [ "$1" != -o ]; do shift; done; out="$2"\n'
        f"{after_link}\nexit 0\n"
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("after_link", "told"),
    [
        ('truncate -s -1 "$out"', "ends after"),
        ('truncate -s 4096 "$out"', "ends after"),
        ('truncate -s 20 "$out"', "it is no ELF file (20 bytes)"),
        (': > "$out"', "it is no ELF file (0 bytes)"),
        ('echo "int main(){}" | g++ -x c++ -o "$out" -no-pie -', "it is no 64-bit shared library"),
        ('echo | g++ -shared -x c++ -o "$out" -', "it does not export apex_te_abi"),
        (
            'echo "extern int gone(); int (*f)() = gone;" | g++ -fPIC -shared -x c++ -o "$out" -',
            "undefined symbol",
        ),
        (
            'echo "__attribute__((constructor)) void f() { __builtin_trap(); }"'
            ' | g++ -fPIC -shared -x c++ -o "$out" -',
            "ended a process with status -",
        ),
        (
            'echo "extern \\"C\\" { extern const int apex_te_abi = 1; extern const char* const'
            ' apex_te_tiny_signature = \\"other\\"; }" | g++ -fPIC -shared -x c++ -o "$out" -',
            "tiny has the signature b'other' instead of b'x: Tensor, y: float -> int'",
        ),
    ],
)
def test_broken_library_is_not_published(
    root, cache_dir, tmp_path, forget, monkeypatch, after_link, told
):
    monkeypatch.setenv("CXX", str(wrapper(tmp_path, after_link)))
    with pytest.raises(BuildInterruptedError, match="reported success and left a library") as error:
        Tiny(root).open()
    assert told in str(error.value)
    assert list(cache_dir.glob("*/*/*.so")) == []
    # The next try, with a compiler that works, is not told of the failure.
    monkeypatch.delenv("CXX")
    forget()
    assert Tiny(root).open().path.startswith(str(cache_dir))


def test_every_shortened_library_is_noticed(root, tmp_path):
    whole = Path(Tiny(root).open().path).read_bytes()
    path = tmp_path / "short.so"
    for size in {0, 1, 63, 64, 100, *range(0, len(whole), 97), len(whole) - 1}:
        path.write_bytes(whole[:size])
        assert elf.file_problem(str(path)), size
    path.write_bytes(whole)
    assert elf.file_problem(str(path)) == ""
    path.write_bytes(b"\x7fELF" + os.urandom(4096))
    assert elf.file_problem(str(path))


def test_broken_library_of_an_earlier_version_is_stale(root, monkeypatch):
    """Its checksum is right: it was published before libraries were checked."""
    with monkeypatch.context() as patch:
        patch.setattr(publish, "library_problem", lambda *_: "")
        patch.setenv("CXX", str(wrapper(root, 'truncate -s 4096 "$out"')))
        path = Tiny(root).open().path
    (entry,) = inventory.entries(cache.user_cache())
    assert "ends after 4096 bytes" in entry.problem
    monkeypatch.setenv("CXX", "g++")
    (removed,) = clean.remove_stale(cache.user_cache(), stale.current([Tiny(root)]))
    assert "ends after 4096 bytes" in removed.reason
    assert not Path(path).exists()


def test_libraries_of_the_suite_are_whole():
    for device in ("cpu", "cuda"):
        found = get_builder("byte_transpose").find(device)
        if found is not None:
            path = f"/proc/self/fd/{found.fd}"
            assert elf.file_problem(path) == ""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("-march=native", "for this machine's CPU alone"),
        ("-mcpu=native", "for this machine's CPU alone"),
        ("-march=x86-64-v3", "one kind of CPU"),
        ("-O2 -mavx2", "one kind of CPU"),
        ("-ffast-math", "changes the results of floating-point arithmetic"),
        ("-Ofast", "changes the results of floating-point arithmetic"),
        ("-ffp-contract=fast", "changes the results of floating-point arithmetic"),
        ("-Xcompiler=-O2,-march=native", "for this machine's CPU alone"),
    ],
)
def test_flags_in_cxx(root, monkeypatch, flags, told):
    monkeypatch.setenv("CXX", f"g++ {flags}")
    with pytest.raises(SettingError, match=r"CXX='g\+\+ .*' *: ") as error:
        Tiny(root).open()
    assert told in str(error.value)
    for variable in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv("CXX", "g++")
        monkeypatch.setenv(variable, flags)
        with pytest.raises(SettingError, match=f"{variable}="):
            toolchain.find_nvcc()
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    "flags",
    ["-pipe", "-O1 -g", "-std=gnu++17", "-march=x86-64", "-ffp-contract=off", "-DX=-march"],
)
def test_flags_in_cxx_that_change_no_result(root, monkeypatch, flags):
    monkeypatch.setenv("CXX", f"g++ {flags}")
    assert toolchain.find_cxx()[1:] == flags.split()


def test_fast_math_for_nvcc(monkeypatch):
    for flags in ("-use_fast_math", "--use_fast_math", "-fmad=true", "--prec-div=false"):
        monkeypatch.setenv("NVCC_APPEND_FLAGS", flags)
        with pytest.raises(SettingError, match="floating-point arithmetic"):
            toolchain.find_nvcc()


def test_cached_library_is_served_whatever_cxx_says(root, forget, monkeypatch):
    Tiny(root).open()
    forget()
    monkeypatch.setenv("CXX", 'g++ -march=native "')
    assert Tiny(root).open().kind == "cache"


def test_open_quote_in_cxx(root, monkeypatch):
    monkeypatch.setenv("CXX", 'g++ "-O2')
    with pytest.raises(SettingError, match="CXX='g\\+\\+ \"-O2' cannot be split into words"):
        Tiny(root).open()
    done = captured(
        [sys.executable, "-m", "op_builder.jit.cli", "report"],
        check=False,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert done.returncode in (0, 1)
    assert "cannot be split into words" in done.stdout
    assert "Traceback" not in done.stderr


def test_compiler_that_prints_no_utf8(root, tmp_path, forget):
    script = tmp_path / "latin-cxx"
    script.write_text(
        '#!/bin/sh\ncase " $* " in *" --version "*) printf "\\351 1.0\\n"; exit;; esac\n'
        "printf 'note: \\351\\377\\n' >&2\nexec g++ \"$@\"\n"
    )
    script.chmod(0o755)
    os.environ["CXX"] = str(script)
    try:
        assert Tiny(root).open().kind == "cache"
        forget()
        write_op(root, body="return no_such_name;")
        with pytest.raises(CompileError, match="no_such_name"):
            Tiny(root).open()
    finally:
        del os.environ["CXX"]


def test_long_line_of_a_compiler_is_cut(root, tmp_path, cache_dir):
    name = "n" * 50_000
    write_op(root, body=f"return {name};")
    with pytest.raises(CompileError) as error:
        Tiny(root).open()
    assert len(error.value.first_error) < 1000
    assert " characters)" in error.value.first_error
    assert name in Path(error.value.log).read_text()


@pytest.mark.parametrize("name", ["two words", "dol$lar", "quo'te", 'quo"te', "col:on", "ünï", "%"])
def test_cache_in_an_odd_folder(root, tmp_path, monkeypatch, name):
    monkeypatch.setenv("APEX_TE_CACHE_DIR", str(tmp_path / name))
    assert Tiny(root).open().path.startswith(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("new\nline", Tiny), ("t\tab", Tiny), ("b\udcff", Tiny), ("com,ma", TinyCuda)],
)
def test_cache_where_nothing_can_be_built(root, tmp_path, monkeypatch, name, kind):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("APEX_TE_CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("APEX_TE_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("APEX_TE_CACHE_DIR", str(tmp_path / name))
    with pytest.raises(BuildError, match=r"must not have the character .*APEX_TE_CACHE_DIR"):
        kind(root).open("cuda" if kind is TinyCuda else "cpu")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_killed_process_ends_its_compilers(root, tmp_path, how):
    compiler, log = logging_compiler(tmp_path, sleep=60)
    builder = start(f"Tiny({str(root)!r}).open()", CXX=str(compiler))
    assert wait_for(log.read_text)
    assert processes_of(compiler)
    builder.send_signal(how)
    assert builder.wait(timeout=10) == -how
    begun = time.monotonic()
    while processes_of(compiler):
        assert time.monotonic() - begun < 10
        time.sleep(0.05)
