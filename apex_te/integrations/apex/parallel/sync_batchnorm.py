"""apex.parallel.sync_batchnorm: the one SyncBatchNorm, under the name of apex's slower variant."""

from __future__ import annotations

from .optimized_sync_batchnorm import SyncBatchNorm as SyncBatchNorm
