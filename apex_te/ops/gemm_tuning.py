"""Chooses cuBLASLt's algorithm for a product by timing the proposals of its heuristic.

It is off by default: then every process uses the heuristic's first proposal. With
``APEX_TE_GEMM_TUNE=1`` a product without a stored choice is timed at its first call, except during
capture and inside autograd's backward; ``fp8_gemm.tune`` times the products of given layers ahead.
Choices are stored in the user's cache, in one file for each GPU model and cuBLASLt version.
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
    """Returns the number of the algorithm to use for a product.

    Args:
        key: text that identifies the product: sizes, dtypes, epilogue, accumulation.
        device: device of the operands.
        launch: runs the product on scratch outputs with the algorithm of a given number; raises
            NotImplementedError where there is none.

    Returns:
        A position among the heuristic's proposals: the stored choice, else the fastest by timing,
        which is then stored. During capture and in backward, where nothing can be timed, it is 0,
        the first proposal.
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
    """Times all algorithms in turn for some rounds and returns the one of the least median time.

    Returns:
        The number of the algorithm; 0 unless another one is faster by more than ``_GAIN``.
    """
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
    """Returns the file of stored choices for CUDA device ``index``, in the user's cache.

    An example of its name is ``gemm/NVIDIA_H200-cublaslt130100.json``.
    """
    probe = torch.empty(0, device=torch.device("cuda", index))
    gpu = re.sub(r"[^A-Za-z0-9]+", "_", torch.cuda.get_device_name(index))
    version = _lib.cublaslt_version(probe)
    return Path(cache.writable_cache().path) / "gemm" / f"{gpu}-cublaslt{version}.json"


def _load(path: Path) -> dict[str, int]:
    """Returns the stored choices, algorithm numbers by key; none if the file cannot be used."""
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
    """Adds the choice for one key to the file, which other processes may write at the same time."""
    cache.make_private(str(path.parent))
    with lock.held(f"{path}.lock", "the GEMM table", env.lock_timeout()):
        table = {**_load(path), key: chosen}
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(table, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(partial, path)
