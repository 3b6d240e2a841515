"""Compiles every GPU source of every op with hipcc for AMD archs and links it; runs nothing.

    python scripts/check_hip.py [op ...]

Needs hipcc (Debian: apt install hipcc) but no GPU and no ROCm torch. Without hipcc it says so and
succeeds, since there is nothing to check with. The copies that are compiled lie in a temporary
folder. Where hipBLASLt is not installed, its declarations come from tests/hip.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["APEX_TE_GPU_PLATFORM"] = "hip"

from apex_te.op_builder import OpBuilder, all_builders
from apex_te.op_builder.jit.backends import toolchain
from apex_te.op_builder.jit.backends.archs import Arch, named_arch_list, parse_arch_list
from apex_te.op_builder.jit.build import resources
from apex_te.op_builder.jit.errors import HeaderNotFoundError, HipccNotFoundError
from check_cuda import compile_one

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_ARCHS = "gfx90a"
DECLARATIONS = str(ROOT / "tests" / "hip")


def provide_headers(builder: OpBuilder) -> None:
    """Lets ``builder`` compile with hipBLASLt's declarations where its headers are missing."""
    try:
        builder.system_include_paths("cuda")
    except HeaderNotFoundError as error:
        print(f"{error}\nusing the declarations of {DECLARATIONS}", flush=True)
        builder.system_include_paths = lambda device: [DECLARATIONS]


def check(builder: OpBuilder, archs: Sequence[Arch], folder: Path) -> bool:
    """Compiles an op's sources, each with a verdict, and links them; True when all passed."""
    place = folder / builder.NAME
    place.mkdir()
    steps = builder.build_steps("cuda", archs, str(place), str(place / "library.so"))
    return all(compile_one((f"{builder.NAME}: {step.label}", step.command)) for step in steps)


def main(names: list[str]) -> int:
    builders = {name: b for name, b in all_builders().items() if "cuda" in b.DEVICES}
    unknown = sorted(set(names) - set(builders))
    if unknown:
        print(f"check_hip: op must be one of {', '.join(builders)}, got {', '.join(unknown)}")
        return 2
    try:
        hipcc = toolchain.find_hipcc()
    except HipccNotFoundError as error:
        print(f"check_hip: NOT CHECKED, no source was compiled for AMD GPUs: {error}")
        return 0
    named = named_arch_list()
    archs = parse_arch_list(named[1] if named else DEFAULT_ARCHS)
    listed = ", ".join(map(str, archs))
    print(f"check_hip: {hipcc.path}, {toolchain.hipcc_version()}, for {listed}", flush=True)
    wanted = [builder for name, builder in builders.items() if not names or name in names]
    for builder in wanted:
        provide_headers(builder)
    with (
        tempfile.TemporaryDirectory(prefix="apex_te_check_hip_") as folder,
        ThreadPoolExecutor(resources.jobs()) as pool,
    ):
        verdicts = list(pool.map(lambda b: check(b, archs, Path(folder)), wanted))
    print(f"check_hip: {verdicts.count(True)} ops passed, {verdicts.count(False)} failed")
    return 0 if verdicts and all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
