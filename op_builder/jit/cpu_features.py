"""CPU features beyond the baseline that a library was compiled for, and those of this machine."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterable, Sequence

# Macros that GCC and Clang predefine, with the names that /proc/cpuinfo has for the features. The
# baselines, x86-64 with SSE2 and armv8-a with Advanced SIMD, have none of them.
_MACROS = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe",
    "__LZCNT__": "abm",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AVX512VNNI__": "avx512_vnni",
    "__ARM_FEATURE_ATOMICS": "atomics",
    "__ARM_FEATURE_CRC32": "crc32",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_BF16": "bf16",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE2": "sve2",
}


def compiled_for(command: Sequence[str]) -> list[str]:
    """Returns features beyond the baseline that a compiler uses wherever it likes, sorted."""
    return list(_compiled_for(tuple(command)))


@functools.cache
def _compiled_for(command: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the features of ``compiled_for``, asking each command once."""
    question = [*command, "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        done = subprocess.run(
            question, capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    defined = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("#define ")}
    return tuple(sorted(_MACROS[name] for name in defined & _MACROS.keys()))


@functools.cache
def of_this_machine() -> frozenset[str] | None:
    """Returns the features of this machine's CPU, None if the kernel does not list them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return None


def missing(features: Iterable[str]) -> list[str]:
    """Returns those of ``features`` that this machine's CPU lacks, sorted."""
    wanted = set(features)
    here = of_this_machine() if wanted else None
    return sorted(wanted - here) if here is not None else []
