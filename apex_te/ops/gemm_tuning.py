"""Chooses cuBLASLt's algorithm for a GEMM by timing the proposals of its heuristic.

It is off by default: then every process uses the heuristic's first proposal. With
``APEX_TE_GEMM_TUNE=1`` a GEMM without a stored choice is timed at its first call, except during
capture and inside autograd's backward; ``fp8_gemm.tune`` times the GEMMs of given layers ahead.
Choices are stored in the user's cache, in one file for each GPU model and cuBLASLt version.

A GPU that has rested ranks algorithms by their pipelines; in training it is at its power limit,
where the one that needs less energy is faster. So a short look at a cool GPU only leaves out what
is much slower, and the others are timed under load: in blocks of launches that take turns.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .. import runtime
from ..op_builder.jit import env
from ..op_builder.jit.build import lock
from ..op_builder.jit.find import cache

_lib = runtime.ops("fp8_gemm")

_MAX_ALGORITHMS = 16
_ROUNDS = 7
# Slower ones than this, of the fastest on a cool GPU, are not timed under load.
_NEAR = 1.15
_FINALISTS = 6
# Launches of shorter GEMMs cannot load the GPU: the host issues them more slowly.
_LOADING_MS = 0.05
_LOAD_ROUNDS = 2
_WARMUP_SECONDS = 1.0
_REST_SECONDS = 0.1  # after less than this between two GEMMs the GPU is still warm
# A later proposal must beat the first by this much: less is noise.
_GAIN = 0.01

is_active: bool = env.boolean("APEX_TE_GEMM_TUNE", False)
# Length of a block under load: a GEMM takes at most 1 s and 2 blocks for each of 6 algorithms.
block_seconds: float = 0.1
_loaded_at = float("-inf")
_tables: dict[int, dict[str, int]] = {}


def algorithm(key: str, device: torch.device, launch: Callable[[int], None]) -> int:
    """Returns the position of the stored or fastest algorithm among the heuristic's proposals.

    What is timed is stored by ``key``: sizes, dtypes, epilogue, accumulation. During capture and in
    backward nothing can be timed: without a stored choice the result is 0, the first proposal.
    ``launch`` runs an algorithm, by its number, on scratch outputs, or raises NotImplementedError.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    table = _tables.get(index)
    if table is None:
        table = _tables[index] = _load(_path(index))
    chosen = table.get(key)
    if chosen is None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or torch.cuda.is_current_stream_capturing():
            return 0
        chosen = table[key] = _fastest(launch)
        _store(_path(index), key, chosen)
    return chosen


def _fastest(launch: Callable[[int], None]) -> int:
    """Returns the fastest algorithm, timed cool, then under load; 0 unless it gains > ``_GAIN``."""
    usable = []
    for index in range(_MAX_ALGORITHMS):
        try:
            launch(index)
        except NotImplementedError:
            break
        usable.append(index)
    if not usable:
        return 0
    times = _cool_times(launch, usable)
    order = sorted(usable, key=times.__getitem__)
    if times[order[0]] >= _LOADING_MS:
        near = [index for index in order if times[index] <= times[order[0]] * _NEAR]
        finalists = [0, *(index for index in near[:_FINALISTS] if index)]
        if len(finalists) > 1:
            times = _loaded_times(launch, {index: times[index] for index in finalists})
    best = min(times, key=times.__getitem__)
    return best if times[best] < times[0] * (1 - _GAIN) else 0


def _elapsed(launch: Callable[[int], None], index: int, launches: int) -> float:
    """Returns the mean milliseconds of a launch among several back to back."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(launches):
        launch(index)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / launches


def _cool_times(launch: Callable[[int], None], usable: list[int]) -> dict[int, float]:
    """Returns the median milliseconds of each algorithm, by its number, timed in turns."""
    times: dict[int, list[float]] = {index: [] for index in usable}
    for _ in range(_ROUNDS):
        for index in usable:
            times[index].append(_elapsed(launch, index, 1))
    return {index: statistics.median(t) for index, t in times.items()}


def _loaded_times(launch: Callable[[int], None], cool: dict[int, float]) -> dict[int, float]:
    """Returns mean milliseconds of ``cool``'s algorithms under load, in blocks that take turns."""
    global _loaded_at

    def launches(index: int, seconds: float) -> int:
        return max(3, round(seconds * 1e3 / cool[index]))

    warm = time.perf_counter() - _loaded_at < _REST_SECONDS
    end = time.perf_counter() + (block_seconds if warm else _WARMUP_SECONDS)
    while time.perf_counter() < end:
        for index in cool:
            _elapsed(launch, index, launches(index, block_seconds / 4))
    total = dict.fromkeys(cool, 0.0)
    for k in range(_LOAD_ROUNDS):
        for index in list(cool) if k % 2 == 0 else reversed(list(cool)):
            _elapsed(launch, index, launches(index, block_seconds / 4))  # the clock settles
            total[index] += _elapsed(launch, index, launches(index, block_seconds))
    _loaded_at = time.perf_counter()
    return {index: sum_ms / _LOAD_ROUNDS for index, sum_ms in total.items()}


def _path(index: int) -> Path:
    """Returns the user's file of choices, e.g. ``gemm/NVIDIA_H200-cublaslt130100.json``."""
    probe = torch.empty(0, device=torch.device("cuda", index))
    gpu = re.sub(r"[^A-Za-z0-9]+", "_", torch.cuda.get_device_name(index))
    version = _lib.cublaslt_version(probe)
    return Path(cache.writable_cache().path) / "gemm" / f"{gpu}-cublaslt{version}.json"


def _load(path: Path) -> dict[str, int]:
    """Returns the stored choices, algorithm numbers by key; none if the file cannot be used."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {
        key: value
        for key, value in stored.items()
        if isinstance(value, int) and 0 <= value < _MAX_ALGORITHMS
    }


def _store(path: Path, key: str, chosen: int) -> None:
    """Adds the choice for one key to the file, which other processes may write at the same time."""
    cache.make_private(str(path.parent))
    with lock.held(f"{path}.lock", "the GEMM table", env.lock_timeout()):
        table = {**_load(path), key: chosen}
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(table, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(partial, path)
