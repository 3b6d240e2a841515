"""A small op in a temporary folder, which compiles in a fraction of a second."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(CHECKOUT))

from op_builder import CPUOpBuilder, CUDAOpBuilder  # noqa: E402

PRELUDE = f"""
import os, sys, time
sys.path.insert(0, {str(CHECKOUT)!r})
sys.dont_write_bytecode = True
from op_builder import CPUOpBuilder, CUDAOpBuilder, BuildError
class Tiny(CPUOpBuilder):
    NAME = "tiny"
class TinyCuda(CUDAOpBuilder):
    NAME = "tiny"
"""


# What APEX_TE_LIBRARY defines, without the suite's headers.
ABI = (
    'extern "C" { extern const int apex_te_abi __attribute__((visibility("default")));'
    " const int apex_te_abi = 1; }\n"
)


class Tiny(CPUOpBuilder):
    """An op with a CPU source."""

    NAME = "tiny"


class TinyCuda(CUDAOpBuilder):
    """An op with a CUDA source, too."""

    NAME = "tiny"


def write_op(root, value=1, body=""):
    """An op whose function returns ``value`` out of a header."""
    folder = root / "csrc" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    common = root / "csrc" / "common"
    common.mkdir(exist_ok=True)
    (common / "value.h").write_text(f"#pragma once\n#define VALUE {value}\n")
    (folder / "tiny.h").write_text(
        '#pragma once\n#include "common/value.h"\n'
        '// APEX_TE_FUNCTION(no, "x: int")\n'
        'APEX_TE_FUNCTION(tiny, "x: Tensor, "\n  "y: float -> int")\n'
        'APEX_TE_FUNCTION(tiny_cuda_only, "x: Tensor", "cuda")\n'
    )
    define = '#define APEX_TE_FUNCTION(name, ...)\n#include "tiny.h"\n'
    code = f'{define}{ABI}extern "C" __attribute__((visibility("default"))) int tiny() {{'
    (folder / "tiny_cpu.cpp").write_text(f"{code} {body} return VALUE; }}\n")
    (folder / "tiny_cuda.cu").write_text(f"{code} return VALUE; }}\n")
    return root


def start(code, **environment):
    """A Python process that knows the op ``tiny``."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def logging_compiler(folder, sleep=0.0):
    """A C++ compiler that counts its compilations in a file; (compiler, file)."""
    log, script = folder / "compilations", folder / "counting-cxx"
    log.write_text("")
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) echo x >> {log}; sleep {sleep};; esac\n'
        'exec g++ "$@"\n'
    )
    script.chmod(0o755)
    return script, log


def quick_compiler(folder):
    """A compiler that takes any source and copies the same small library to every output."""
    library, script = folder / "quick.so", folder / "quick-cxx"
    (folder / "quick.cpp").write_text(ABI)
    build = ["g++", "-shared", "-fPIC", "-o", str(library), str(folder / "quick.cpp")]
    subprocess.run(build, check=True)
    script.write_text(
        '#!/bin/sh\ncase " $* " in *" --version "*) echo "quick 1.0"; exit;; esac\n'
        f'while [ "$1" != -o ]; do shift; done; cp {library} "$2"\n'
    )
    script.chmod(0o755)
    return script
