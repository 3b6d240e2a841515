"""Choice of cuBLASLt's algorithms by timing the heuristic's proposals; off by default.

Off by default: the heuristic's first proposal is used, the same in every process. With
APEX_TE_GEMM_TUNE=1 a product that is not in the table yet is timed at its first call, never under
graph capture or inside autograd's backward; ``tune`` times the products of given layers ahead. The
table lives in the user's cache, one file for a GPU and cuBLASLt version.
"""

from __future__ import annotations

import json
import os
import re
import statistics
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
# A later proposal must beat the first by this much: less is noise.
_GAIN = 0.01

is_active: bool = env.boolean("APEX_TE_GEMM_TUNE", False)
_tables: dict[int, dict[str, int]] = {}


def algorithm(key: str, device: torch.device, launch: Callable[[int], None]) -> int:
    """Returns the algorithm for a product: from the table, timed now if possible, else 0.

    Args:
        key: names the product: sizes, dtypes, epilogue, accumulation.
        device: of the operands.
        launch: runs the product on scratch outputs with the given algorithm.
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
    """Returns the algorithm with the least median over rounds in which all take turns."""
    usable = []
    for index in range(_MAX_ALGORITHMS):
        try:
            launch(index)
        except NotImplementedError:
            break
        usable.append(index)
    times: list[list[float]] = [[] for _ in usable]
    for _ in range(_ROUNDS):
        for index in usable:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            launch(index)
            end.record()
            end.synchronize()
            times[index].append(begin.elapsed_time(end))
    if not usable:
        return 0
    medians = [statistics.median(t) for t in times]
    best = min(usable, key=medians.__getitem__)
    return best if medians[best] < medians[0] * (1 - _GAIN) else 0


def _path(index: int) -> Path:
    """Returns the table's file below the cache, e.g. gemm/NVIDIA_H200-cublaslt130100.json."""
    probe = torch.empty(0, device=torch.device("cuda", index))
    gpu = re.sub(r"[^A-Za-z0-9]+", "_", torch.cuda.get_device_name(index))
    version = _lib.cublaslt_version(probe)
    return Path(cache.writable_cache().path) / "gemm" / f"{gpu}-cublaslt{version}.json"


def _load(path: Path) -> dict[str, int]:
    """Returns the stored table; an unreadable or strange file counts as empty."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {
        key: value
        for key, value in stored.items()
        if isinstance(value, int) and 0 <= value < _MAX_ALGORITHMS
    }


def _store(path: Path, key: str, chosen: int) -> None:
    """Adds one choice to the file that all processes share."""
    cache.make_private(str(path.parent))
    with lock.held(f"{path}.lock", "the GEMM table", env.lock_timeout()):
        table = {**_load(path), key: chosen}
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(table, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(partial, path)
