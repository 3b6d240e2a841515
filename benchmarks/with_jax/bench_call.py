"""Cost of calling ops from JAX on a CPU: handler, op in a program, dispatch, build, import.

Needs jax and no torch. Prints a table, and writes benchmarks/results/jax_call.json, or a file of
that name below $OUT where it is set.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from apex_te.op_builder import get_builder
from apex_te.op_builder.jit.backends import toolchain
from result_file import provenance, result_text

from apex_te.jax._call import call

ROOT = Path(__file__).resolve().parents[2]
IMPORT = """
import jax, flax.linen, time
begin = time.perf_counter()
import apex_te.jax
print((time.perf_counter() - begin) * 1e3)
"""
FIRST = """
import jax, time
from apex_te.jax import _library
jax.devices()
times = []
for function in ("rms_norm_fwd", "rms_norm_bwd"):
    begin = time.perf_counter()
    _library.bind("rms_norm", function, "cpu")
    times.append((time.perf_counter() - begin) * 1e3)
print(*times)
"""


def handler_ns() -> float:
    """Returns the time of one call of a handler, from a C++ program."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "handler_loop")
        source = str(Path(__file__).with_name("handler_loop.cpp"))
        flags = ["-std=c++17", "-O2", f"-I{ROOT / 'csrc'}", source, "-o", program, "-ldl"]
        subprocess.run([*toolchain.find_cxx(), *flags], check=True)
        library = get_builder("apex_te_jax").open().path
        return float(subprocess.run([program, library], check=True, stdout=-1).stdout)


def build_cpu_seconds() -> float:
    """Returns the CPU time that compiling the handler library takes."""
    with tempfile.TemporaryDirectory() as folder:
        builder = get_builder("apex_te_jax")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for step in builder.build_steps("cpu", (), folder, os.path.join(folder, "x.so")):
            subprocess.run(step.command, check=True, cwd=folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def in_new_process(code: str) -> list[float]:
    """Returns the numbers that a new interpreter prints, the least of five runs each."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    runs = [
        subprocess.run([sys.executable, "-c", code], check=True, stdout=-1, env=environment).stdout
        for _ in range(5)
    ]
    return [min(values) for values in zip(*(map(float, run.split()) for run in runs), strict=True)]


def best_us(run: Callable[[], Any], calls: int = 200, rounds: int = 15) -> float:
    """Returns the time of one call, waited for, of the best round."""
    jax.block_until_ready(run())
    means = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        means.append((time.perf_counter() - begin) / calls * 1e6)
    return min(means)


def scaled(x: jax.Array, one: jax.Array) -> jax.Array:
    """Multiplies in place by a factor of 1: an op that checks its arguments and touches nothing."""
    return call("cross_entropy", "cross_entropy_scale", grad=x, grad_output=one, ignore_index=-100)[
        "grad"
    ]


def one_more_us() -> float:
    """Returns the time that an op adds to a program, from programs of 10 and of 110 of them."""

    def program(count: int) -> Callable[[], Any]:
        def body(x: jax.Array, one: jax.Array) -> jax.Array:
            for _ in range(count):
                x = scaled(x, one)
            return x

        run = jax.jit(body)
        x, one = jnp.ones((1, 1)), jnp.ones(1)
        return lambda: run(x, one)

    few, many = program(10), program(110)
    differences = [(best_us(many, 100, 5) - best_us(few, 100, 5)) / 100 for _ in range(5)]
    return statistics.median(differences)


def dispatch_us() -> tuple[float, float]:
    """Returns the times of programs that are one op, and one multiplication of jnp."""
    x, one = jnp.ones((1, 1)), jnp.ones(1)
    ours, theirs = jax.jit(scaled), jax.jit(lambda x, one: x * one)
    pairs = [(best_us(lambda: ours(x, one), 500, 3), best_us(lambda: theirs(x, one), 500, 3))
             for _ in range(15)]  # fmt: skip
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def main() -> None:
    ours, theirs = dispatch_us()
    first, second = in_new_process(FIRST)
    (imported,) = in_new_process(IMPORT)
    rows = [
        ("handler, five tensors and two scalars", handler_ns(), "ns", 150),
        ("one more op in a jitted program", one_more_us(), "us", 0.5),
        ("jit dispatch of a program that is one op", ours, "us", None),
        ("jit dispatch of a program that is one jnp op", theirs, "us", None),
        ("build of the handler library, CPU time", build_cpu_seconds(), "s", 3),
        ("import of apex_te.jax after jax and flax", imported, "ms", 100),
        ("first function: look up, open, bind, register", first, "ms", 10),
        ("a further function", second, "ms", 0.2),
    ]
    told = {**provenance(), "jax": jax.__version__}
    print(told)
    for name, value, unit, bar in rows:
        print(f"{name:48} {value:8.3g} {unit}" + (f"  (bar {bar})" if bar else ""))
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    keys = ("figure", "value", "unit", "bar")
    table = [dict(zip(keys, row, strict=True)) for row in rows]
    (folder / "jax_call.json").write_text(result_text({"environment": told, "rows": table}))


if __name__ == "__main__":
    main()
