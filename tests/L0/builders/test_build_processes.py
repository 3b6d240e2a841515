"""Several processes, killed builders, failures that are remembered, clear errors."""

import ctypes
import errno
import os
import random
import shutil
import signal
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_op import Tiny, TinyCuda, logging_compiler, start, write_op

from op_builder.core import CoreBuilder
from op_builder.jit.backends import toolchain
from op_builder.jit.build import failure, lock, ninja
from op_builder.jit.errors import (
    ArchError,
    BuildError,
    BuildInterruptedError,
    CompileError,
    CompilerNotFoundError,
    DiskFullError,
    HeaderNotFoundError,
    LockTimeoutError,
    NvccNotFoundError,
)

CALL = """
    import ctypes
    try:
        opened = Tiny({root!r}).open()
        print("value", ctypes.CDLL(opened.proc_path).tiny())
    except BuildError as error:
        print(type(error).__name__, error)
"""


def test_eight_processes_compile_once(root, tmp_path):
    compiler, log = logging_compiler(tmp_path, sleep=0.5)
    processes = [start(CALL.format(root=str(root)), CXX=str(compiler)) for _ in range(8)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert outputs == ["value 1\n"] * 8
    assert log.read_text() == "x\n"


def test_eight_threads_compile_once(root, tmp_path, monkeypatch):
    compiler, log = logging_compiler(tmp_path, sleep=0.2)
    monkeypatch.setenv("CXX", str(compiler))
    builder = Tiny(root)
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: builder.open(), range(8)))
    assert len({item.fd for item in opened}) == 1
    assert log.read_text() == "x\n"


def test_sources_changed_while_compiling(root, cache_dir, tmp_path):
    compiler, log = logging_compiler(tmp_path, sleep=1)
    process = start(CALL.format(root=str(root)), CXX=str(compiler))
    deadline = time.monotonic() + 20
    while not log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    write_op(root, value=2)
    assert "sources changed while being compiled" in process.communicate(timeout=60)[0]
    assert list(cache_dir.glob("tiny_cpu-*/cpu")) == []


def test_eight_processes_report_the_same_error(root, tmp_path):
    write_op(root, body="return no_such_name;")
    compiler, log = logging_compiler(tmp_path, sleep=0.5)
    processes = [start(CALL.format(root=str(root)), CXX=str(compiler)) for _ in range(8)]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert len(outputs) == 1
    text = outputs.pop()
    assert text.startswith("CompileError tiny (cpu): ")
    assert "no_such_name" in text
    assert log.read_text() == "x\n"


def test_killed_builders_leave_nothing_broken(root, tmp_path, cache_dir, forget):
    compiler, _ = logging_compiler(tmp_path, sleep=0.15)
    random.seed(1)
    for _ in range(8):
        process = start(CALL.format(root=str(root)), CXX=str(compiler))
        time.sleep(random.uniform(0.05, 0.45))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        for path in cache_dir.glob("tiny_cpu-*/cpu"):  # killed after publishing: start afresh
            assert Tiny(root).find() is not None
            shutil.rmtree(path)
    done = start(CALL.format(root=str(root)))
    assert done.communicate(timeout=60)[0] == "value 1\n"
    # builders' folders of the dead went with the next build; an orphaned compiler may still write
    deadline = time.monotonic() + 10
    while list((cache_dir / "tmp").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.5)
        (root / "csrc/common/value.h").write_text(f"#define VALUE {time.monotonic_ns() % 1000}\n")
        forget()
        Tiny(root).open()
    assert list((cache_dir / "tmp").iterdir()) == []


def test_waiter_takes_over_from_a_killed_holder(root, tmp_path):
    compiler, log = logging_compiler(tmp_path, sleep=20)
    holder = start(CALL.format(root=str(root)), CXX=str(compiler))
    deadline = time.monotonic() + 20
    while not log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert log.read_text() == "x\n"
    waiter = start(CALL.format(root=str(root)))
    time.sleep(0.4)
    assert waiter.poll() is None
    holder.send_signal(signal.SIGKILL)
    begun = time.monotonic()
    assert waiter.communicate(timeout=60)[0] == "value 1\n"
    assert time.monotonic() - begun < 10
    holder.communicate()


def test_waiting_names_the_holder_and_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "MESSAGE_EVERY", 0.1)
    path = str(tmp_path / "lock")
    with (
        lock.held(path, "first", 1),
        pytest.raises(LockTimeoutError, match=rf"pid {os.getpid()} on host .*, building first"),
        lock.held(path, "second", 0.5),
    ):
        pass
    assert f"waiting for pid {os.getpid()}" in capsys.readouterr().err
    assert lock.is_free(path)


def test_removed_lock_file_is_not_a_lock(tmp_path):
    path = tmp_path / "lock"
    with lock.held(str(path), "first", 1):
        path.unlink()
        with lock.held(str(path), "second", 1):
            assert not lock.is_free(str(path))


def test_compile_error_says_what_and_where(root):
    write_op(root, body="return no_such_name;")
    with pytest.raises(CompileError, match="no_such_name") as caught:
        Tiny(root).open()
    error = caught.value
    assert error.first_error in str(error)
    assert "tiny_cpu.cpp" in error.first_error
    assert "error:" in error.first_error
    assert "-ffp-contract=off" in error.command
    assert "no_such_name" in Path(error.log).read_text()


def test_stored_failure_lives_a_minute(root, tmp_path, monkeypatch):
    write_op(root, body="return no_such_name;")
    compiler, log = logging_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    for expected in (1, 1, 2, 3):
        if expected == 2:
            monkeypatch.setenv("APEX_TE_JIT_RETRY", "1")
        if expected == 3:
            monkeypatch.delenv("APEX_TE_JIT_RETRY")
            monkeypatch.setattr(failure, "KEPT_SECONDS", -1.0)
        with pytest.raises(CompileError):
            Tiny(root).open()
        assert log.read_text() == "x\n" * expected
    monkeypatch.setattr(failure, "KEPT_SECONDS", 60.0)
    write_op(root)
    assert Tiny(root).open().fd >= 0


def test_stored_failure_of_another_compiler_does_not_count(tmp_path):
    path = str(tmp_path / "failure.json")
    failure.store(path, CompileError("text", "error: x", "g++", "log"), "g++ 12")
    recalled = failure.recall(path, "g++ 12", time.time() - 60)
    assert recalled is not None
    assert (str(recalled), recalled.first_error) == ("text", "error: x")
    assert failure.recall(path, "g++ 13", time.time() - 60) is None
    assert failure.recall(path, "g++ 12", time.time() + 1) is None


def test_killed_compiler_is_not_stored(root, tmp_path, cache_dir, monkeypatch):
    script = tmp_path / "killed-cxx"
    script.write_text('#!/bin/sh\ncase " $* " in *" -c "*) kill -9 $$;; esac\nexec g++ "$@"\n')
    script.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(script))
        with pytest.raises(BuildInterruptedError, match="MAX_JOBS=1"):
            Tiny(root).open()
    assert list(cache_dir.rglob("failure-*")) == []
    assert Tiny(root).open().fd >= 0


def test_full_disk_while_compiling(root, cache_dir):
    code = f"""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            Tiny({str(root)!r}).open()
        except BuildError as error:
            print(type(error).__name__, error)
    """
    out, err = start(code).communicate(timeout=60)
    assert out.startswith("DiskFullError tiny (cpu): no space to build in"), (out, err)
    assert str(cache_dir) in out
    assert "bytes free" in out
    assert list(cache_dir.glob("tiny_cpu-*/cpu")) == []
    assert list(cache_dir.rglob("failure-*")) == []
    assert Tiny(root).open().fd >= 0


def test_full_disk_while_writing(tmp_path):
    with (
        pytest.raises(DiskFullError, match="bytes free"),
        ninja.disk_errors("tiny (cpu)", str(tmp_path)),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_missing_compiler(root, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerNotFoundError, match=r"no C\+\+ compiler found.*apt install g\+\+"):
        Tiny(root).open()


def test_missing_nvcc_leaves_the_cpu_library(root, tmp_path, monkeypatch):
    assert TinyCuda(root).open("cpu").fd >= 0
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain.sys, "path", [])
    monkeypatch.setattr(toolchain, "_in_home", lambda home, program: None)
    with pytest.raises(NvccNotFoundError, match=r"pip install nvidia-cuda-nvcc.*APEX_TE_CUDA_HOME"):
        TinyCuda(root).open("cuda", (9, 0))


def test_missing_python_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(HeaderNotFoundError, match=r"Python\.h is not in .*python3-dev"):
        CoreBuilder().system_include_paths("cpu")


def test_nvcc_is_found_where_it_is_named(tmp_path, monkeypatch):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version) echo "Cuda compilation tools, release 12.8, V12.8.93";;'
        " *) printf 'sm_80\\nsm_90\\n';; esac\n"
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", f":{tmp_path} ")
    found = toolchain.find_nvcc()
    assert found.path == os.path.realpath(nvcc)
    assert toolchain.nvcc_version() == "nvcc 12.8.93"
    toolchain.check_archs(found, ["80", "90a"])
    with pytest.raises(ArchError, match=r"unknown CUDA arch 10\.0 .* knows 8\.0, 9\.0"):
        toolchain.check_archs(found, ["100f"])
    monkeypatch.setenv("APEX_TE_CUDA_HOME", str(tmp_path / "empty"))
    with pytest.raises(NvccNotFoundError, match=r"APEX_TE_CUDA_HOME=.*holds no bin/nvcc"):
        toolchain.find_nvcc()


def test_header_of_a_wheel(tmp_path, monkeypatch):
    include = tmp_path / "nvidia" / "cu13" / "include"
    include.mkdir(parents=True)
    (include / "only_here.h").write_text("")
    monkeypatch.setattr(toolchain, "nvcc_major", lambda: 13)
    monkeypatch.setattr(toolchain.sys, "path", [str(tmp_path)])
    nvcc = toolchain.Nvcc(str(tmp_path / "bin" / "nvcc"), str(tmp_path / "toolkit"))
    assert toolchain.find_header("only_here.h", "cublas", nvcc) == [str(include)]
    with pytest.raises(HeaderNotFoundError, match="pip install nvidia-cublas"):
        toolchain.find_header("nowhere.h", "cublas", nvcc)
    (tmp_path / "toolkit" / "include").mkdir(parents=True)
    (tmp_path / "toolkit" / "include" / "only_here.h").write_text("")
    assert toolchain.find_header("only_here.h", "cublas", nvcc) == []


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_files_of_one_arch_and_system_headers(root, tmp_path):
    system = tmp_path / "with blank"
    system.mkdir()
    (system / "outside.h").write_text("#define OUTSIDE 5\n")
    folder = root / "csrc" / "tiny"
    (folder / "tiny_sm90_cuda.cu").write_text(
        "#include <outside.h>\n"
        'extern "C" __attribute__((visibility("default"))) int outside() { return OUTSIDE; }\n'
    )

    class Outside(TinyCuda):
        def system_include_paths(self, device):
            return [str(system)]

    opened = Outside(root).open("cuda", (9, 0))
    assert opened.archs == ("9.0a",)
    assert ctypes.CDLL(opened.proc_path).outside() == 5


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_library_of_another_arch_is_built_beside(root, cache_dir, forget, monkeypatch):
    builder = TinyCuda(root)
    assert builder.open("cuda", (8, 0)).archs == ("8.0",)
    forget()
    assert builder.open("cuda", (8, 9)).archs == ("8.0",)
    assert builder.find("cuda", (9, 0)) is None
    monkeypatch.setenv("APEX_TE_CUDA_ARCH_LIST", "9.0")
    assert builder.open("cuda", (9, 0)).archs == ("9.0",)
    assert sorted(path.name for path in cache_dir.glob("tiny_cuda-*/*.*")) == ["8.0", "9.0"]


def test_errors_share_a_base():
    for kind in (CompileError, DiskFullError, ArchError, LockTimeoutError):
        assert issubclass(kind, BuildError)
        assert issubclass(kind, RuntimeError)
