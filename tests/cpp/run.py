"""Builds the op libraries and tests/cpp/test_ops.cpp, and runs it: no torch in the process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from apex_te.op_builder import get_builder  # noqa: E402
from apex_te.op_builder.jit.backends.toolchain import find_cxx  # noqa: E402

OPS = ("cast_transpose", "amax_scale_update", "fp8_gemm")


def main() -> int:
    libraries = [get_builder(op).open("cpu").path for op in OPS]
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "test_ops")
        source = str(ROOT / "tests" / "cpp" / "test_ops.cpp")
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}"]
        subprocess.run([*find_cxx(), *flags, source, "-o", program, "-ldl"], check=True)
        return subprocess.run([program, *libraries]).returncode


if __name__ == "__main__":
    sys.exit(main())
