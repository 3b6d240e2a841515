"""apex's _apex_nccl_allocator: memory that NCCL has registered, for ``torch.cuda.MemPool``."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from apex_te._version import __version__ as __version__

__all__ = ["get_nccl_allocator"]


def get_nccl_allocator() -> Any:
    """Returns the allocator of the default process group's NCCL backend, for ``MemPool``.

    Raises:
        RuntimeError: there is no default process group yet, or none with NCCL for CUDA tensors.
    """
    actual = "none"
    if distributed.is_available() and distributed.is_initialized():
        group = distributed.distributed_c10d._get_default_group()
        backends = distributed.get_backend_config(group)
        if torch.cuda.is_available() and "cuda:nccl" in backends:
            return group._get_backend(torch.device("cuda")).mem_allocator
        actual = backends
    raise RuntimeError(
        "get_nccl_allocator: the default process group must have the NCCL backend for CUDA "
        f"tensors (torch.distributed.init_process_group('nccl')), got {actual}"
    )
