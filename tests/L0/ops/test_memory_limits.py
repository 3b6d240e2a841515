"""CPU kernels where memory ends: an allocation that fails in any thread, and threads with small
stacks. Each case runs in a process of its own."""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from apex_te.op_builder import all_builders, get_builder
from apex_te.op_builder.jit.backends.library import BASE_CXX_ARGS
from apex_te.op_builder.jit.backends.toolchain import find_cxx
from apex_te.op_builder.spec import DISPATCHER

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = [*(n for n, b in all_builders().items() if b.device_sources("cpu")), DISPATCHER]
# bytes of a function's frame: with those of Python and torch, 64 KiB hold a chain of them
FRAME = 8192
# What makes room for a frame. The second form bounds the loop that touches each of its pages, by
# which gcc protects from a stack that grows into other memory.
GROWS = re.compile(r"\bsub +\$0x([0-9a-f]{1,8}),%rsp|\blea +-0x([0-9a-f]+)\(%rsp\),%r11")


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.skipif(
    "APEX_TE_SANITIZE" in os.environ, reason="a sanitizer's shadow memory is beyond the limit"
)
@pytest.mark.parametrize("threads", [1, 2])
def test_scratch_that_cannot_be_had_is_an_error_with_its_bytes(threads):
    """Each of the threads wants a row of floats, which the limit leaves no room for."""
    functions = ["cross_entropy_fwd", "scaled_softmax_fwd", "rms_norm_fwd"]
    out = run(
        f"""
        import resource
        import torch
        from apex_te.runtime import function

        torch.set_num_threads({threads})

        def arguments(name, rows, n):
            x = torch.zeros(rows, n, dtype=torch.bfloat16)
            if name == "cross_entropy_fwd":
                target = torch.zeros(rows, dtype=torch.int64)
                values = dict(logits=x, target=target, loss=torch.zeros(rows))
                return dict(values, ignore_index=-100, label_smoothing=0.0)
            if name == "scaled_softmax_fwd":
                x = x.view(1, 1, rows, n)
                return dict(x=x, y=torch.empty_like(x), scale=1.0, causal=0)
            values = dict(x=x, y=torch.empty_like(x), rstd=torch.zeros(rows))
            return dict(values, eps=1e-5, zero_centered_gamma=False)

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        for name in {functions}:
            call = function(name.removesuffix("_fwd"), name)
            call(**arguments(name, 64, 4096))  # starts the threads
            large = arguments(name, 4, 1 << 25)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), most))
            try:
                call(**large)
            except RuntimeError as error:
                print(error)
            call(**arguments(name, 64, 4096))  # the threads are still there
            print("done")
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        """
    )
    lines = out.splitlines()
    assert lines[1::2] == ["done"] * 3
    for function, message in zip(functions, lines[::2], strict=True):
        assert message.startswith(f"{function}: cannot allocate 1342")
        assert message.endswith(" bytes of scratch memory")


@functools.cache
def frames(library):
    """Bytes of the frame of each function of a library, up to 64 less than the compiler says.

    Those are the saved registers. Read from the machine code, as the library is there: compiling
    the sources once more, for the compiler to say, takes minutes.
    """
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, name = {}, None
    for line in listing.splitlines():
        if begin := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            name = begin[1]
            found[name] = 0
        elif size := GROWS.search(line):
            found[name] += int(size[1] or size[2], 16)
    return found


@functools.cache
def runtime_functions():
    """Names of the functions of the C++ runtime, which some compilers link into every library."""
    names = set()
    for archive in ("libstdc++.a", "libgcc.a", "libgcc_eh.a"):
        command = [*find_cxx(), f"-print-file-name={archive}"]
        path = Path(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        )
        if path.is_absolute():
            listing = subprocess.run(
                ["nm", "--defined-only", str(path)], capture_output=True, text=True
            )
            names.update(line.split()[-1] for line in listing.stdout.splitlines() if " " in line)
    return names


def own_frames(library):
    """Frames of a library's functions without those of the C++ runtime."""
    runtime = runtime_functions()
    return {name: size for name, size in frames(library).items() if name not in runtime}


on_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None or shutil.which("nm") is None,
    reason="reads the machine code of x86-64, with objdump and nm",
)


@on_x86
@pytest.mark.skipif(
    "APEX_TE_SANITIZE" in os.environ, reason="a sanitizer's frames are larger than the program's"
)
@pytest.mark.parametrize("name", LIBRARIES)
def test_frames_are_small(name):
    sizes = own_frames(get_builder(name).open("cpu").path)
    assert len(sizes) > 10
    assert max(sizes.values()) > 32
    assert {function: size for function, size in sizes.items() if size > FRAME - 64} == {}


@on_x86
@pytest.mark.parametrize("options", [(), ("-fstack-clash-protection",)])
@pytest.mark.parametrize("size", [200, FRAME, 3 * FRAME])
def test_sizes_of_frames_are_found(size, options, tmp_path):
    source, library = tmp_path / "frame.cpp", tmp_path / "frame.so"
    source.write_text(
        "void fill(char*);\n"
        f'extern "C" void frame() {{ char bytes[{size}]; fill(bytes); fill(bytes); }}\n'
    )
    flags = [*BASE_CXX_ARGS, *options, "-shared", "-o", str(library)]
    subprocess.run([*find_cxx(), *flags, str(source)], check=True)
    assert size <= frames(library)["frame"] <= 1.25 * size + 64  # a page more with a loop


@pytest.mark.long
def test_calls_from_threads_with_small_stacks():
    """64 KiB, the size that threading.stack_size's documentation names, for forward and backward
    of ops with large tiles; torch itself needs the rest."""
    out = run(
        """
        import threading
        import torch
        from apex_te.runtime import function

        E4M3 = torch.float8_e4m3fn
        torch.set_num_threads(1)
        x = torch.randn(256, 512)
        codes = [torch.zeros(s, dtype=torch.uint8).view(E4M3) for s in ((256, 512), (512, 256))]
        one, amax, inverse = torch.ones(1), torch.zeros(1), torch.zeros(1)
        half = torch.randn(256, 256)
        scales = [torch.zeros(s, dtype=torch.uint8).view(torch.float8_e8m0fnu)
                  for s in ((256, 16), (512, 8))]
        y = torch.softmax(torch.randn(1, 1, 64, 4096), -1)
        dx = torch.empty_like(y)
        norm = dict(x=x, y=torch.empty_like(x), rstd=torch.zeros(256), eps=1e-5)
        norm["zero_centered_gamma"] = False
        lists = [[torch.randn(5000).bfloat16()] for _ in range(3)]
        calls = [
            ("cast_transpose", dict(x=x, scale=one, rowwise=codes[0], columnwise=codes[1])),
            ("activation_fwd_fp8", dict(x=x, scale=one, rowwise=codes[0], columnwise=codes[1],
                                        kind=0)),
            ("swiglu_fwd", dict(input=x, out=half, activation=0, limit=0.0, alpha=0.0,
                                offset=0.0)),
            ("scaled_softmax_bwd", dict(dy=y, y=y, dx=dx, scale=1.0, causal=0)),
            ("rms_norm_fwd", norm),
            ("multi_tensor_axpby", dict(xs=lists[0], ys=lists[1], outputs=lists[2], a=1.0, b=1.0,
                                        check=-1)),
            ("mx_quantize", dict(x=x, rowwise=codes[0], rowwise_scale=scales[0],
                                 columnwise=codes[1], columnwise_scale=scales[1],
                                 use_floor=False)),
        ]
        ops = {"activation_fwd_fp8": "activation", "swiglu_fwd": "swiglu",
               "scaled_softmax_bwd": "scaled_softmax", "rms_norm_fwd": "rms_norm",
               "multi_tensor_axpby": "multi_tensor"}
        bound = [(function(ops.get(name, name), name), given) for name, given in calls]
        for call, given in bound:  # libraries are opened on a usual stack
            call(**given)
        done = []

        def work():
            for call, given in bound:
                call(**given)
                done.append(1)

        threading.stack_size(64 << 10)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print(len(done), len(bound))
        """
    )
    called, wanted = out.split()
    assert called == wanted


@on_x86
def test_frames_of_a_runtime_that_is_linked_in_do_not_count(tmp_path):
    source, library = tmp_path / "throws.cpp", tmp_path / "throws.so"
    source.write_text(
        "void fill(char*);\n"
        f'extern "C" void throws() {{ char bytes[{2 * FRAME}]; fill(bytes); throw bytes[0]; }}\n'
    )
    flags = [*BASE_CXX_ARGS, "-static-libstdc++", "-static-libgcc", "-shared", "-o", str(library)]
    if subprocess.run([*find_cxx(), *flags, str(source)], capture_output=True).returncode:
        pytest.skip("there is no C++ runtime to link in")
    assert {"throws", "__cxa_throw"} <= set(frames(library))
    assert own_frames(library)["throws"] > FRAME
    assert "__cxa_throw" not in own_frames(library)
