"""Timing and reporting shared by the benchmarks.

Kernel time: CUDA events around one call, L2 flushed before it (cold), median of many with p10 and
p90. Pairs: two contenders alternate, so that clock drift hits both. Data is random normal. Every
report carries CPU, GPU, driver, torch, commit, date and the SM clock before and after.
"""

from __future__ import annotations

import functools
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
Peers = dict[str, Callable[[], Any]]  # other implementations, by name

# Layouts of a cast's outputs, by name, as its arguments.
LAYOUTS = {
    "both": {"rowwise": True, "columnwise": True},
    "rowwise": {"rowwise": True, "columnwise": False},
    "columnwise": {"rowwise": False, "columnwise": True},
}

_FLUSH_BYTES = 256 << 20
_flush: torch.Tensor | None = None


def environment() -> dict[str, Any]:
    """Returns what a figure depends on: date, commit, versions, CPU and GPU."""
    info = {**provenance(), "torch": torch.__version__}
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
        info["driver"] = _smi("driver_version")
    return info


def _smi(query: str) -> str:
    """Returns the answer of nvidia-smi to ``query`` for the first GPU."""
    told = output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    return told.partition("\n")[0]


def sm_clock_mhz() -> str:
    return _smi("clocks.sm")


def _event_us(call: Callable[[], Any]) -> float:
    global _flush
    if _flush is None:
        _flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    _flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "us": statistics.median(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[len(ordered) * 9 // 10],
    }


def kernel_us(
    call: Callable[[], Any],
    repeats: int = 60,
    warmup: int = 5,
    prepare: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
    """Median, p10 and p90 of the GPU time of one call, cold L2, in microseconds.

    ``prepare`` runs before each call, untimed: it restores what a call consumes.
    """
    times = []
    for i in range(warmup + repeats):
        prepare()
        elapsed = _event_us(call)
        if i >= warmup:
            times.append(elapsed)
    return summary(times)


def paired_us(
    calls: list[Callable[[], Any]], repeats: int = 20, warmup: int = 3
) -> list[dict[str, float]]:
    """Times several calls that take turns, each as ``kernel_us`` does."""
    for call in calls:
        for _ in range(warmup):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for i in range(repeats):
        order = range(len(calls)) if i % 2 == 0 else reversed(range(len(calls)))
        for k in order:
            times[k].append(_event_us(calls[k]))
    return [summary(t) for t in times]


def running_us(
    calls: list[Callable[[], Any]], repeats: int = 6, length: int = 4, lead: int = 2
) -> list[dict[str, float]]:
    """Times several calls that take turns, each ``length`` times in a row, the host ahead.

    A call that is timed alone also waits for the host to issue its first kernels; in a loop of many
    the host has issued them before, in the time of the ``lead``. For calls that use more memory
    than L2 has, and whose GPU time exceeds the host's.
    """
    times: list[list[float]] = [[] for _ in calls]
    for i in range(repeats):
        order = range(len(calls)) if i % 2 == 0 else reversed(range(len(calls)))
        for k in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(lead):
                calls[k]()
            start.record()
            for _ in range(length):
                calls[k]()
            end.record()
            end.synchronize()
            times[k].append(start.elapsed_time(end) * 1e3 / length)
    return [summary(t) for t in times]


def host_us(call: Callable[[], Any], calls: int = 200, rounds: int = 7, warmup: int = 20) -> float:
    """Host time to issue one call: the median round's mean, the GPU drained between rounds."""
    for _ in range(warmup):
        call()
    means = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - begin) / calls * 1e6)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return statistics.median(means)


def copy_us(num_bytes: int) -> dict[str, float]:
    """Tensor.copy_ that reads and writes ``num_bytes`` in total: the ceiling for that size."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return kernel_us(lambda: target.copy_(source))


@functools.cache
def _ceiling_us(num_bytes: int) -> float:
    return copy_us(num_bytes)["us"]


def peak_gib(call: Callable[[], Any]) -> float:
    """The most that a call holds above what is allocated before it, after a first call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def normal(*shape: int) -> torch.Tensor:
    """Random normal values in bf16."""
    return torch.randn(shape, device="cuda").bfloat16()


def text_of(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def layouts(x: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields name, number of copies, and arguments of a cast with its outputs, for each layout."""
    row, col = torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)
    for name, wanted in LAYOUTS.items():
        outputs = {"out_rowwise": row, "out_columnwise": col}
        given = {key: out for key, out in outputs.items() if wanted[key.removeprefix("out_")]}
        yield name, len(given), {**wanted, **given}


def measure(
    function: str,
    shape: str | Sequence[int],
    num_bytes: int,
    call: Callable[[], Any],
    peers: Peers | None = None,
    repeats: int = 40,
    **extra: Any,
) -> Row:
    """One row of a results file: a call, cold L2, taking turns with its peers.

    Args:
        function: what runs, e.g. "swiglu_fwd"; rows of one function form one group of the chart.
        shape: e.g. "16384x4096", or its extents.
        num_bytes: the fewest bytes the function must move: the floor, not what a kernel moves.
        call: every output preallocated.
        peers: other implementations of the same function by name, e.g. {"torch": ...}; one that
            raises is reported as not run.
    """
    running, missing = {}, {}
    for name, peer in (peers or {}).items():
        try:
            peer()
            running[name] = peer
        except Exception as error:  # a peer's own limits are its own
            missing[f"{name} us"] = f"not run: {type(error).__name__}"
    ours, *theirs = paired_us([call, *running.values()], repeats=repeats)
    ceiling = _ceiling_us(num_bytes)
    shape = shape if isinstance(shape, str) else text_of(shape)
    row = {"function": function, "shape": shape, **extra, **ours}
    row |= {"TB/s": terabytes_per_second(num_bytes, ours["us"]), "of copy": ceiling / ours["us"]}
    for name, times in zip(running, theirs, strict=True):
        row |= {f"{name} us": times["us"], f"over {name}": times["us"] / ours["us"]}
    return row | missing


def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of a plain formula: the cheapest strong peer."""
    torch._dynamo.reset()
    return torch.compile(formula, fullgraph=True, dynamic=False)


def formula_peers(formula: Callable[..., Any], *args: Any) -> Peers:
    """A plain formula as it is and compiled; compiling takes seconds."""
    fused = compiled(formula)
    return {"torch": lambda: formula(*args), "compile": lambda: fused(*args)}


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
    times = []
    for i in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def in_graph(function: str, call: Callable[[], Any], shape: str = "64x4096 in a graph") -> Row:
    """One row of a results file: a small call as ``graph_us`` times it."""
    return {"function": function, "shape": shape, "us": graph_us(call)}


def terabytes_per_second(num_bytes: int, microseconds: float) -> float:
    return num_bytes / microseconds / 1e6


def run(
    name: str, rows: Iterable[Row], sums: Callable[[list[Row]], dict[str, Any]] = lambda rows: {}
) -> list[Row]:
    """Measures rows, which a generator yields, and reports them with the SM clock around them.

    ``sums`` returns figures of all rows, for the head of the report.
    """
    clock = sm_clock_mhz()
    measured = list(rows)
    report(name, measured, **sums(measured), sm_clock_mhz=f"{clock} to {sm_clock_mhz()}")
    return measured


def mean_and_least(ratios: list[float], suffix: str = "") -> dict[str, float]:
    """Returns geometric mean and least of ratios, for ``report``."""
    mean = round(statistics.geometric_mean(ratios), 4)
    return {f"geometric_mean{suffix}": mean, f"least{suffix}": round(min(ratios), 4)}


def report(name: str, rows: list[Row], hidden: tuple[str, ...] = (), **extra: Any) -> None:
    """Prints a table of the rows without the keys in ``hidden``, and saves all as ``save`` does."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in hidden))
    table = [keys] + [
        [
            f"{row.get(k, ''):.4g}" if isinstance(row.get(k), float) else str(row.get(k, ""))
            for k in keys
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in table) for i in range(len(keys))]
    told = {**environment(), **extra}
    print(f"\n{name}: " + ", ".join(f"{k} {v}" for k, v in told.items()))
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    save(name, rows, **extra)


def save(name: str, rows: list[Row], **extra: Any) -> None:
    """Writes benchmarks/results/<name>.json, or below $OUT where it is set."""
    info = environment()
    folder = Path(os.environ.get("OUT") or Path(__file__).resolve().parent / "results")
    folder.mkdir(parents=True, exist_ok=True)
    text = result_text({"environment": info, **extra, "rows": rows})
    (folder / f"{name}.json").write_text(text)
