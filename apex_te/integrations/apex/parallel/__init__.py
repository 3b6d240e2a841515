"""apex.parallel: data parallelism by buckets, batch normalisation over ranks, and LARC."""

from __future__ import annotations

from .distributed import DistributedDataParallel, Reducer, apply_flat_dist_call, flat_dist_call
from .LARC import LARC
from .optimized_sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "apply_flat_dist_call",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "flat_dist_call",
]
