"""What a failed build says: the compiler's own line, and what to do about it."""

import ctypes
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from programs import captured
from tiny_op import Tiny, TinyCuda

from op_builder.jit.backends import toolchain
from op_builder.jit.build import hints, ninja, resources
from op_builder.jit.errors import (
    BuildError,
    BuildInterruptedError,
    CompileError,
    DiskFullError,
    NoPermissionError,
)

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

# Each as the program printed it: g++ 12.2, GNU ld 2.40, nvcc 13.0.88, ninja 1.13 and dash, except
# for clang's, hipcc's and nvcc's "died due to signal", which are quoted from their users' reports.
SAID = {
    "killed g++": (
        "FAILED: [code=1] x.o \ng++ -O3 -c x.cpp -o x.o\n"
        "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n",
        "g++: fatal error: Killed signal terminated program cc1plus",
        r"memory.*MAX_JOBS=1",
    ),
    "killed cicc": (
        "FAILED: [code=137] x.o \nnvcc -c x.cu -o x.o\nKilled\n"
        "ninja: build stopped: subcommand failed.\n",
        "",
        r"memory.*MAX_JOBS=1",
    ),
    "cicc died": (
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        r"memory.*MAX_JOBS=1",
    ),
    "no memory": ("virtual memory exhausted: Cannot allocate memory\n", "", r"MAX_JOBS=1"),
    "cudafe without memory": (
        "big.cu(47): catastrophic error: out of memory\n"
        "  template<int N> __attribute__((global)) void k45(float*x){ }\n      ^\n\n"
        '1 catastrophic error detected in the compilation of "big.cu".\nCompilation terminated.\n',
        "big.cu(47): catastrophic error: out of memory",
        r"memory.*MAX_JOBS=1",
    ),
    "killed clang": (
        "clang-15: error: unable to execute command: Killed\n",
        "clang-15: error: unable to execute command: Killed",
        r"memory.*MAX_JOBS=1",
    ),
    "crash": (
        "x.cpp:3:1: internal compiler error: Segmentation fault\n",
        "x.cpp:3:1: internal compiler error: Segmentation fault",
        "crashed: try once more, or another one",
    ),
    "header of g++": (
        "hp.cpp:1:10: fatal error: Python.h: No such file or directory\n"
        "    1 | #include <Python.h>\n      |          ^~~~~~~~~~\ncompilation terminated.\n",
        "hp.cpp:1:10: fatal error: Python.h: No such file or directory",
        "Python.h is missing.*apt install python3-dev",
    ),
    "header of clang": (
        "x.cpp:1:10: fatal error: 'hip/hip_runtime.h' file not found\n",
        "x.cpp:1:10: fatal error: 'hip/hip_runtime.h' file not found",
        "hip/hip_runtime.h is missing.*ROCm",
    ),
    "header of cudafe": (
        'x.cu(1): catastrophic error: cannot open source file "crt/host_config.h"\n',
        'x.cu(1): catastrophic error: cannot open source file "crt/host_config.h"',
        "crt/host_config.h is missing.*pip install nvidia-cuda-crt",
    ),
    "new g++": (
        "In file included from /usr/local/cuda-13.0/include/cuda_runtime.h:82,"
        "\n                 from <command-line>:\n"
        "/usr/local/cuda-13.0/include/crt/host_config.h:137:2: error: #error --"
        " unsupported GNU version! gcc versions later than 15 are not supported! The nvcc flag "
        "'-allow-unsupported-compiler' can be used to override this version check\n",
        "/usr/local/cuda-13.0/include/crt/host_config.h:137:2: error: #error --"
        " unsupported GNU version! gcc versions later than 15 are not supported! The nvcc flag "
        "'-allow-unsupported-compiler' can be used to override this version check",
        r"nvcc takes g\+\+ up to 15: install g\+\+-15 and set CXX=g\+\+-15",
    ),
    "new clang": (
        "host_config.h:170:2: error: #error -- unsupported clang version! clang version must be"
        " less than 21 and greater than 3.2 .\n",
        "host_config.h:170:2: error: #error -- unsupported clang version! clang version must be"
        " less than 21 and greater than 3.2 .",
        "nvcc takes clang below 21.*CXX",
    ),
    "arch of nvcc": (
        "nvcc fatal   : Unsupported gpu architecture 'compute_70'\n",
        "nvcc fatal   : Unsupported gpu architecture 'compute_70'",
        "this nvcc does not know arch 7.0.*APEX_TE_CUDA_ARCH_LIST",
    ),
    "suffixed arch of nvcc": (
        "nvcc fatal   : Unsupported gpu architecture 'sm_100a'\n",
        "nvcc fatal   : Unsupported gpu architecture 'sm_100a'",
        "arch 10.0",
    ),
    "arch of hipcc": (
        "clang-15: error: invalid target ID 'gfx9999'; format is a processor name\n",
        "clang-15: error: invalid target ID 'gfx9999'; format is a processor name",
        "this hipcc does not know gfx9999",
    ),
    "no host compiler": (
        "/nowhere/g++: No such file or directory\n"
        "nvcc fatal   : Failed to preprocess host compiler properties.\n",
        "nvcc fatal   : Failed to preprocess host compiler properties.",
        "nvcc cannot run its host compiler.*CXX",
    ),
    "permission of as": (
        "Assembler messages:\nFatal error: can't create ok.o: Permission denied\n",
        "Fatal error: can't create ok.o: Permission denied",
        "owner and mode of the file named.*APEX_TE_CACHE_DIR",
    ),
    "permission of ld": (
        "/usr/bin/ld: cannot open output file ok.so: Permission denied\n"
        "collect2: error: ld returned 1 exit status\n",
        "/usr/bin/ld: cannot open output file ok.so: Permission denied",
        "owner and mode",
    ),
    "permission of g++": (
        "cc1plus: fatal error: /home/x/a.cpp: Permission denied\ncompilation terminated.\n",
        "cc1plus: fatal error: /home/x/a.cpp: Permission denied",
        "owner and mode",
    ),
    "permission of a program": (
        "/bin/sh: 1: /opt/bin/g++: Permission denied\n",
        "",
        "owner and mode",
    ),
    "read-only": (
        "x.cpp:1:1: fatal error: error writing to x.s: Read-only file system\n",
        "x.cpp:1:1: fatal error: error writing to x.s: Read-only file system",
        "owner and mode",
    ),
    "permission of nvcc": (
        "nvcc fatal   : Could not open output file '/tmp/tmpxft_000051d1_0000000a'\n",
        "nvcc fatal   : Could not open output file '/tmp/tmpxft_000051d1_0000000a'",
        "owner and mode",
    ),
    "permission of ptxas": (
        "ptxas fatal   : Output file '/sys/x.cubin' could not be opened\n",
        "ptxas fatal   : Output file '/sys/x.cubin' could not be opened",
        "owner and mode",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_recognised(name):
    output, first, advice = SAID[name]
    assert ninja.first_error(output) == first
    assert re.search(advice, hints.building(output), re.DOTALL), hints.building(output)


# what each ends in, so that no other than the sources' own fault is stored
ENDS = {
    "killed": BuildInterruptedError,
    "cicc": BuildInterruptedError,
    "memory": BuildInterruptedError,
    "crash": BuildInterruptedError,
    "permission": NoPermissionError,
    "read-only": NoPermissionError,
}


@pytest.mark.parametrize("name", SAID)
def test_kind_of_error(name, tmp_path):
    kind = next((ENDS[word] for word in ENDS if word in name), CompileError)
    with pytest.raises(BuildError) as caught:
        ninja._raise_failure("op (cpu)", str(tmp_path), SAID[name][0], 1, f"{tmp_path}/log")
    assert type(caught.value) is kind
    text = str(caught.value)
    assert text.startswith("op (cpu): ")
    assert SAID[name][1] in text
    assert f"\n  log: {tmp_path}/log" in text
    assert "\n  hint: " in text
    assert (tmp_path / "log").read_text() == SAID[name][0]


@pytest.mark.parametrize(
    "output",
    [
        "/tmp/cclA6mnZ.s: Fatal error: can't write 284 bytes to section .text of /dev/full:"
        " 'No space left on device'\n",
        "/usr/bin/ld: final link failed: No space left on device\n"
        "collect2: error: ld returned 1 exit status\n",
        "as: BFD (GNU Binutils for Debian) 2.40 assertion fail ../../bfd/elf.c:3108\n"
        "/tmp/cclA6mnZ.s: Fatal error: x.o: File too large\n",
        "x.cpp:1: fatal error: error writing to x.s: Disk quota exceeded\n",
    ],
)
def test_no_space(output, tmp_path):
    with pytest.raises(DiskFullError, match=f"no space to build in {tmp_path}, .* bytes free"):
        ninja._raise_failure("op (cpu)", str(tmp_path), output, 1, f"{tmp_path}/log")


@pytest.mark.parametrize(
    ("header", "advice"),
    [
        ("cublasLt.h", "nvidia-cublas"),
        ("cuda_bf16.h", "nvidia-cuda-runtime"),
        ("nv/target", "nvidia-cuda-cccl"),
        ("pybind11/pybind11.h", "pip install pybind11"),
        ("torch/extension.h", "torch; this one was installed without its headers"),
        ("vector", "apt install g"),
        ("stdio.h", "apt install g"),
        ("bits/wordsize.h", "apt install g"),
        ("common/checks.h", "apex_te itself"),
        ("zlib.h", "CPATH"),
    ],
)
def test_missing_header_has_an_owner(header, advice):
    said = f"/x/a.cpp:1:10: fatal error: {header}: No such file or directory\n"
    assert header in hints.building(said)
    assert advice in hints.building(said)


@pytest.mark.parametrize(
    "output",
    [
        "a.cpp:3:5: error: 'Killed' was not declared in this scope\n",
        'a.cu(12): error: identifier "Terminated" is undefined\n',
        'a.cpp:7:1: error: expected ;\n    7 | say("No space left on device: Permission denied")\n',
        "a.cpp:7:1: warning: unused 'bad_alloc'\na.cpp:8:1: error: expected ;\n",
    ],
)
def test_words_of_the_sources_do_not_count(output, tmp_path):
    with pytest.raises(CompileError) as caught:
        ninja._raise_failure("op (cpu)", str(tmp_path), output, 1, f"{tmp_path}/log")
    assert caught.value.hint == ""
    assert "hint" not in str(caught.value)


def test_ninja_killed_by_the_kernel(tmp_path):
    with pytest.raises(BuildInterruptedError, match=r"(?s)ninja returned -9.*hint:.*MAX_JOBS=1"):
        ninja._raise_failure("op (cpu)", str(tmp_path), "", -9, f"{tmp_path}/log")
    with pytest.raises(BuildInterruptedError) as caught:
        ninja._raise_failure("op (cpu)", str(tmp_path), "", -15, f"{tmp_path}/log")
    assert "hint" not in str(caught.value)  # somebody ended it: memory has nothing to do with it


def test_memory_hint_says_how_much(monkeypatch):
    monkeypatch.setattr(resources, "free_memory", lambda: 123 << 20)
    assert "123 MiB are free now" in hints.building("Killed\n")
    monkeypatch.setattr(resources, "free_memory", lambda: None)
    assert "free now" not in hints.building("Killed\n")


# Provoked -----------------------------------------------------------------------------------------


def wrapper(folder, text):
    script = folder / "wrapped-cxx"
    script.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*) {text};; esac\nexec g++ "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_missing_header(root):
    source = root / "csrc/tiny/tiny_cpu.cpp"
    source.write_text("#include <cublasLt_absent.h>\n" + source.read_text())
    with pytest.raises(CompileError, match=r"fatal error: cublasLt_absent\.h: No such") as caught:
        Tiny(root).open()
    assert "nvidia-cublas" in caught.value.hint
    assert f"hint: {caught.value.hint}" in str(caught.value)
    assert "APEX_TE_JIT_RETRY=1" in str(caught.value)  # what was installed now counts at once


def test_memory_runs_out(root, tmp_path, cache_dir, monkeypatch):
    source = root / "csrc/tiny/tiny_cpu.cpp"
    source.write_text('#include <regex>\nstd::regex r("a");\n' + source.read_text())
    monkeypatch.setenv("CXX", wrapper(tmp_path, "ulimit -v 120000"))
    with pytest.raises(BuildInterruptedError, match="MAX_JOBS=1") as caught:
        Tiny(root).open()
    assert "command: " in str(caught.value)
    assert list(cache_dir.rglob("failure-*")) == []


def test_compiler_is_killed(root, tmp_path, monkeypatch):
    # cc1plus waits for its input, so that there is time to kill it
    text = (
        "mkfifo $$.cpp; g++ -c $$.cpp -o $$.o & driver=$!;"
        ' until child=$(cat /proc/$driver/task/$driver/children) && [ -n "$child" ] &&'
        " grep -q cc1plus /proc/${child% }/cmdline; do :; done;"
        " kill -9 $child; wait $driver; exit $?"
    )
    monkeypatch.setenv("CXX", wrapper(tmp_path, text))
    if not os.path.exists("/proc/thread-self/children"):
        pytest.skip("this kernel does not name children")
    with pytest.raises(BuildInterruptedError, match="Killed signal terminated program cc1plus"):
        Tiny(root).open()


@pytest.mark.skipif(os.access("/sys/apex_te.o", os.F_OK), reason="/sys holds such a file")
def test_no_permission(root, tmp_path, cache_dir, monkeypatch):
    script = Path(wrapper(tmp_path, 'exec g++ "$@" -o /sys/apex_te.o'))
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(NoPermissionError, match=r"/sys/apex_te\.o: (Perm|Read-only)") as caught:
        Tiny(root).open()
    assert "owner and mode" in str(caught.value)
    assert list(cache_dir.rglob("failure-*")) == []


@needs_nvcc
def test_nvcc_refuses_the_host_compiler_and_the_arch(root):
    class NewHost(TinyCuda):
        def nvcc_args(self):
            return ["-Xcompiler=-U__GNUC__,-D__GNUC__=99"]

    class OldArch(TinyCuda):
        def nvcc_args(self):
            return ["-gencode=arch=compute_10,code=sm_10"]

    with pytest.raises(CompileError, match=r"unsupported GNU version") as caught:
        NewHost(root).open("cuda", (9, 0))
    assert "set CXX=g++-" in caught.value.hint
    with pytest.raises(CompileError, match="Unsupported gpu architecture 'compute_10'") as caught:
        OldArch(root).open("cuda", (9, 0))
    assert "does not know arch 1.0" in caught.value.hint


@pytest.mark.long
@needs_nvcc
def test_driver_and_kernel_image(root):
    folder = root / "csrc/tiny"
    shutil.rmtree(root / "csrc/common")  # the suite's is found instead
    (folder / "tiny.h").write_text("")
    (folder / "tiny_cuda.cu").write_text(
        '#include "common/gpu/device.h"\n#include <cstdio>\n'
        'extern "C" __attribute__((visibility("default")))\n'
        "void explain(int code, char* text, size_t size) {\n"
        "  text[0] = 0;\n"
        '  try { apex_te::check_cuda(static_cast<cudaError_t>(code), "launch"); }\n'
        '  catch (const apex_te::OpError& error) { snprintf(text, size, "%s", error.text); }\n'
        "}\n"
    )
    library = ctypes.CDLL(TinyCuda(root).open("cuda", (9, 0)).proc_path)

    def explain(code):
        text = ctypes.create_string_buffer(1000)
        library.explain(code, text, ctypes.c_size_t(1000))
        return text.value.decode()

    release = toolchain.nvcc_version().removeprefix("nvcc ").rpartition(".")[0]
    assert explain(0) == ""
    for code, name in (
        (35, "cudaErrorInsufficientDriver"),
        (222, "cudaErrorUnsupportedPtxVersion"),
    ):
        assert f"missing or older than CUDA {release}" in explain(code)
        assert name in explain(code)
        assert "update the driver or compile with an older toolkit" in explain(code)
    assert "no code for this GPU (cudaErrorNoKernelImageForDevice)" in explain(209)
    assert "APEX_TE_CUDA_ARCH_LIST" in explain(209)
    assert explain(1) == "launch: invalid argument (cudaErrorInvalidValue)"


# Loading ------------------------------------------------------------------------------------------


def test_load_error_names_the_file_and_what_to_do():
    said = "/proc/self/fd/7: failed to map segment from shared object"
    error = hints.load_error("rope", "/cache/rope_cpu.so", ImportError(said))
    assert str(error).startswith(f"rope: /cache/rope_cpu.so cannot be loaded: {said}\n  hint: ")
    assert "noexec" in str(error)
    said = "/lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_9.9.9' not found (required by x)"
    assert "newer system" in hints.loading(said)
    for said in ("/x.so: file too short", "/x.so: undefined symbol: gone"):
        assert "apex_te clean <op>" in hints.loading(said)
    assert "hint" not in str(hints.load_error("rope", "/x.so", ImportError("no such thing")))


def test_cache_on_a_noexec_file_system(tmp_path, root):
    library, mount = Tiny(root).open().path, tmp_path / "noexec"
    mount.mkdir()
    load = f'import ctypes; ctypes.CDLL("{mount}/x.so")'
    script = (
        f"mount -t tmpfs -o noexec,size=1m none {mount} && cp {library} {mount}/x.so &&"
        f" exec {sys.executable} -c '{load}'"
    )
    done = captured(["unshare", "-rm", "sh", "-c", script], check=False)
    if "OSError" not in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr[-200:]}")
    assert "noexec" in hints.loading(done.stderr)
