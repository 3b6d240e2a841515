"""Timing and reporting shared by the benchmarks.

Kernel time: CUDA events around one call, L2 flushed before it (cold), median of many with p10 and
p90; ops wait until the host has issued their kernels, up to 0.2 ms. Pairs: two contenders
alternate, so that clock drift hits both. Data is random normal. Every report carries CPU, GPU,
driver, torch, commit, date and the SM clock before and after.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from result_file import output_of, provenance, result_text

Row = dict[str, Any]  # of a results file
Call = Callable[[], Any]
Peers = dict[str, Call]  # other implementations, by name
Rows = Callable[..., Iterable[Row]]
Small = Callable[[torch.Tensor], Peers]
Sums = Callable[[list[Row]], dict[str, Any]]

# Layouts of a cast's outputs, by name, as its arguments.
LAYOUTS = {
    name: {"rowwise": name != "columnwise", "columnwise": name != "rowwise"}
    for name in ("both", "rowwise", "columnwise")
}

with_peers = True  # False: ``measure`` times no peer
_FLUSH_BYTES = 256 << 20
_AHEAD = 400_000  # clocks of the GPU in which the host issues the kernels of a call
_flush: torch.Tensor | None = None


def environment() -> dict[str, Any]:
    """Returns what a figure depends on: date, commit, versions, CPU and GPU."""
    info = {**provenance(), "torch": torch.__version__}
    if torch.cuda.is_available():
        info |= {"gpu": torch.cuda.get_device_name(), "driver": _smi("driver_version")}
    return info


def _smi(query: str) -> str:
    told = output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    return told.partition("\n")[0]


def sm_clock_mhz() -> str:
    return _smi("clocks.sm")


def elapsed_us(call: Callable[[], Any]) -> float:
    """GPU time of a call in microseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _cold_us(call: Callable[[], Any], clocks: int = 0) -> float:
    global _flush
    if _flush is None:
        _flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    _flush.zero_()
    if clocks:
        torch.cuda._sleep(clocks)
    return elapsed_us(call)


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    p10, p90 = ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]
    return {"us": statistics.median(ordered), "p10": p10, "p90": p90}


def kernel_us(
    call: Callable[[], Any], repeats: int = 60, warmup: int = 5, prepare: Call = lambda: None
) -> dict[str, float]:
    """Median, p10 and p90 microseconds, cold L2; ``prepare`` runs before each call, untimed."""
    times = []
    for _ in range(warmup + repeats):
        prepare()
        times.append(_cold_us(call, _AHEAD))
    return summary(times[warmup:])


def in_turns(
    calls: list[Call], repeats: int, time_us: Callable[[Call], float]
) -> list[dict[str, float]]:
    """Figures of calls that take turns, each in the time that ``time_us`` returns for it."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(repeats):
        for k in range(len(calls))[:: 1 if i % 2 == 0 else -1]:
            times[k].append(time_us(calls[k]))
    return [summary(t) for t in times]


def paired_us(
    calls: list[Call], repeats: int = 20, warmup: int = 3, clocks: int = 0
) -> list[dict[str, float]]:
    """Times several calls that take turns, cold L2; the host has ``clocks`` of the GPU ahead."""
    for call in calls:
        for _ in range(warmup):
            call()
    return in_turns(calls, repeats, lambda call: _cold_us(call, clocks))


def paired_ms(calls: dict[str, Call], repeats: int, warmup: int = 3) -> dict[str, float]:
    """Median milliseconds by name of calls that take turns, each as ``paired_us`` does."""
    times = paired_us([*calls.values()], repeats, warmup)
    return {name: each["us"] / 1e3 for name, each in zip(calls, times, strict=True)}


def running_us(
    calls: list[Call], repeats: int = 6, length: int = 4, lead: int = 2
) -> list[dict[str, float]]:
    """Times several calls that take turns, each ``length`` times in a row, the host ahead.

    For calls that use more memory than L2 has, and whose GPU time exceeds the host's, which issues
    their first kernels in the time of the ``lead``.
    """

    def time_us(call: Callable[[], Any]) -> float:
        for _ in range(lead):
            call()
        return elapsed_us(lambda: [call() for _ in range(length)]) / length

    return in_turns(calls, repeats, time_us)


def host_us(call: Call, calls: int = 200, rounds: int = 7, warmup: int = 20) -> float:
    """Host time to issue one call: the median round's mean, the GPU drained between rounds."""
    drain = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(warmup):
        call()
    means = []
    for _ in range(rounds):
        drain()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - begin) / calls * 1e6)
    drain()
    return statistics.median(means)


@functools.cache
def copy_us(num_bytes: int) -> dict[str, float]:
    """Tensor.copy_ that reads and writes ``num_bytes`` in total: the ceiling for that size."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return kernel_us(lambda: target.copy_(source))


def memory(call: Callable[[], Any]) -> tuple[Any, int, int]:
    """Returns a call's result, and on a GPU the bytes that it left and its peak above before."""
    if not torch.cuda.is_available():
        return call(), 0, 0
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    gc.collect()
    return result, torch.cuda.memory_allocated() - before, peak


def peak_gib(call: Callable[[], Any]) -> float:
    """The most that a call holds above what is allocated before it, after a first call."""
    call()
    return memory(call)[2] / 2**30


def distances(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> list[float]:
    """Returns the relative distance of each tensor from the one wanted."""
    pairs = zip(found, wanted, strict=True)
    return [float((f.float() - w.float()).norm() / w.float().norm()) for f, w in pairs]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser of a command line, whose help shows the benchmark's docstring as it is."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def text_of(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def layouts(x: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields name, number of copies, and arguments of a cast with its outputs, for each layout."""
    outputs = {"rowwise": torch.empty_like(x, dtype=dtype)}
    outputs["columnwise"] = x.new_empty(x.shape[::-1], dtype=dtype)
    for name, wanted in LAYOUTS.items():
        given = {f"out_{key}": out for key, out in outputs.items() if wanted[key]}
        yield name, len(given), {**wanted, **given}


def measure(
    function: str,
    shape: str | Sequence[int],
    num_bytes: int,
    call: Call,
    peers: Peers | None = None,
    repeats: int = 40,
    **extra: Any,
) -> Row:
    """One row of a results file: a call, cold L2, taking turns with its peers.

    ``num_bytes`` are the fewest that the function must move, and ``call`` has every output
    preallocated; a peer that raises is reported as not run.
    """
    running, missing = {}, {}
    for name, peer in (peers or {}).items() if with_peers else ():
        try:
            peer()
            running[name] = peer
        except Exception as error:  # a peer's own limits are its own
            missing[f"{name} us"] = f"not run: {type(error).__name__}"
    ours, *theirs = paired_us([call, *running.values()], repeats, clocks=_AHEAD)
    shape = shape if isinstance(shape, str) else text_of(shape)
    rates_of_call = rates(num_bytes, ours["us"])
    row = {"function": function, "shape": shape, **extra, **ours, **rates_of_call}
    for name, times in zip(running, theirs, strict=True):
        row |= {f"{name} us": times["us"], f"over {name}": times["us"] / ours["us"]}
    return row | missing


def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of a plain formula: the cheapest strong peer."""
    torch._dynamo.reset()
    return torch.compile(formula, fullgraph=True, dynamic=False)


def gradients(out: Any, inputs: Any, grad: Any) -> Call:
    """A call that runs the backward of one forward again and again."""
    return functools.partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)


def backward(formula: Callable[..., Any], inputs: Iterable[torch.Tensor], grad: Any = None) -> Call:
    """The backward of a formula alone, by default of a random gradient."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = formula(*leaves)
    return gradients(out, leaves, torch.randn_like(out) if grad is None else grad)


def compile_peer(formula: Callable[..., Any], *args: Any) -> Peers:
    return {"compile": functools.partial(compiled(formula), *args)}


def formula_peers(formula: Callable[..., Any], *args: Any) -> Peers:
    """A plain formula as it is and compiled; compiling takes seconds."""
    return {"torch": functools.partial(formula, *args), **compile_peer(formula, *args)}


def graph_us(call: Callable[[], Any], calls: int = 100) -> float:
    """Time of one call inside a replayed CUDA graph of ``calls``, warm L2, in microseconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = [elapsed_us(graph.replay) / calls for _ in range(12)]
    return statistics.median(times[2:])


def in_graph(function: str, call: Callable[[], Any], shape: str = "64x4096 in a graph") -> Row:
    """One row of a results file: a small call as ``graph_us`` times it."""
    return {"function": function, "shape": shape, "us": graph_us(call)}


def terabytes_per_second(num_bytes: int, microseconds: float) -> float:
    return num_bytes / microseconds / 1e6


def rates(num_bytes: int, us: float) -> dict[str, float]:
    return {"TB/s": terabytes_per_second(num_bytes, us), "of copy": copy_us(num_bytes)["us"] / us}


CASES: dict[str, list[Callable[[], Iterable[Row]]]] = {}  # by results file, as ``case`` adds them
SUMS: dict[str, Sums] = {}


def case(name: str, *values: Iterable[Any], sums: Sums | None = None) -> Callable[[Rows], Rows]:
    """Adds a generator of rows to those of the results file ``name``, which ``run.py`` measures.

    ``values`` are its arguments, a call for each; ``sums`` returns figures of all rows for the head
    of the report.
    """

    def add(rows: Rows) -> Rows:
        calls = [functools.partial(rows, *given) for given in zip(*values, strict=True)]
        CASES.setdefault(name, []).extend(calls if values else [rows])
        if sums is not None:
            SUMS[name] = sums
        return rows

    return add


def graph_case(
    name: str, shape: str = "64x4096 in a graph", size: tuple[int, ...] = (64, 4096)
) -> Callable[[Small], Small]:
    """Adds rows of small calls, which a function makes of a random tensor, as ``in_graph`` does."""

    def add(calls: Small) -> Small:
        def rows() -> Iterator[Row]:
            for function, call in calls(normal(*size)).items():
                yield in_graph(function, call, shape)

        CASES.setdefault(name, []).append(rows)
        return calls

    return add


def run(name: str, rows: Iterable[Row], sums: Sums = lambda rows: {}) -> list[Row]:
    """Measures rows, which a generator yields, and reports them with the SM clock around them."""
    clock = sm_clock_mhz()
    measured = list(rows)
    name += "" if torch.cuda.is_available() else "_cpu"
    report(name, measured, **sums(measured), sm_clock_mhz=f"{clock} to {sm_clock_mhz()}")
    return measured


def mean_and_least(ratios: list[float], suffix: str = "") -> dict[str, float]:
    mean = round(statistics.geometric_mean(ratios), 4)
    return {f"geometric_mean{suffix}": mean, f"least{suffix}": round(min(ratios), 4)}


def report(name: str, rows: list[Row], hidden: tuple[str, ...] = (), **extra: Any) -> None:
    """Prints a table of the rows without the keys in ``hidden``, and saves all as ``save`` does."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in hidden))
    table = [keys]
    for row in rows:
        cells = [row.get(key, "") for key in keys]
        table.append([f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells])
    widths = [max(len(line[i]) for line in table) for i in range(len(keys))]
    told = {**environment(), **extra}
    print(f"\n{name}: " + ", ".join(f"{k} {v}" for k, v in told.items()))
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    save(name, rows, **extra)


def save(name: str, rows: list[Row], **extra: Any) -> None:
    """Writes benchmarks/results/<name>.json, or below $OUT where it is set."""
    folder = Path(os.environ.get("OUT") or Path(__file__).resolve().parent / "results")
    folder.mkdir(parents=True, exist_ok=True)
    text = result_text({"environment": environment(), **extra, "rows": rows})
    (folder / f"{name}.json").write_text(text)
