"""Sets of ranks that the tests of a file share, each started when first asked for."""

import pytest
import torch
from ranks import Ranks


def cases(layouts, *sets):
    """Cases of a test: of each set of ranks (size, backend) every one of ``layouts(size)``."""
    gpus = {"nccl": [pytest.mark.cuda], "gloo": []}
    return [
        pytest.param(where, *layout, marks=gpus[where[1]], id="-".join(map(str, (*where, *layout))))
        for where in sets
        for layout in layouts(where[0])
    ]


def ranks_of(all_ranks, size, backend):
    """Returns ``size`` ranks over a backend; skips the test without as many GPUs for "nccl".

    Args:
        all_ranks: the fixture of that name.
        size: number of ranks.
        backend: "gloo" or "nccl".
    """
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, got {torch.cuda.device_count()}")
    key = (size, backend)
    if key not in all_ranks:
        all_ranks[key] = Ranks(size, backend)
    return all_ranks[key]
