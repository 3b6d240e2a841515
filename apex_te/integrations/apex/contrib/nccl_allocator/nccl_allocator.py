"""Memory pools of ``torch.cuda.MemPool`` with the allocator of PyTorch's NCCL backend."""

from __future__ import annotations

import contextlib
import inspect
import os
from typing import Any

import torch
from torch import distributed

from apex_te.compatibility.apex import _apex_nccl_allocator

__all__ = ["create_nccl_mem_pool", "init", "nccl_mem"]


def init() -> None:
    """Sets the environment variables with which NCCL uses NVLS; call it before NCCL starts."""
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "0"


def create_nccl_mem_pool(symmetric: bool | None = None) -> Any:
    """Returns a ``torch.cuda.MemPool`` whose memory NCCL allocates.

    Delete its tensors and the pool before ``destroy_process_group``: PyTorch aborts the process
    where the memory outlives NCCL.

    Args:
        symmetric: passed on to ``MemPool`` unless it is None.

    Raises:
        NotImplementedError: ``symmetric`` is set, and this PyTorch does not support it.
        RuntimeError: the default process group does not have the NCCL backend.

    Source: apex.contrib.nccl_allocator.
    """
    options = {}
    if symmetric is not None:
        known = inspect.signature(torch.cuda.MemPool.__init__).parameters
        name = next((name for name in ("symmetric", "symm_mem") if name in known), None)
        if name is None:
            raise NotImplementedError(
                "create_nccl_mem_pool: symmetric must be None with this PyTorch, whose "
                f"torch.cuda.MemPool does not support it, got {symmetric}; "
                "torch.distributed._symmetric_memory has symmetric tensors"
            )
        options[name] = symmetric
    return torch.cuda.MemPool(_apex_nccl_allocator.get_nccl_allocator(), **options)


class nccl_mem(contextlib.AbstractContextManager):
    """Context in which CUDA tensors are allocated in ``pool``, which is registered on exit.

    Args:
        pool: what ``create_nccl_mem_pool`` returned.
        enabled: False leaves allocation as it is.
        device: CUDA device, its name or index; None uses the current one.
        group: process group whose NCCL backend registers the pool; None uses the default one.

    Raises:
        ValueError: ``device`` is not a CUDA device.

    Source: apex.contrib.nccl_allocator.
    """

    def __init__(
        self,
        pool: Any,
        enabled: bool = True,
        device: torch.device | str | int | None = None,
        group: Any = None,
    ) -> None:
        self.pool, self.group = pool, None
        self.device: Any = None
        self.mem_context: Any = contextlib.nullcontext()
        if not enabled:
            return
        index = torch.cuda.current_device() if device is None else device
        self.device = torch.device("cuda", index) if isinstance(index, int) else torch.device(index)
        if self.device.type != "cuda":
            raise ValueError(f"nccl_mem: device must be a CUDA device, got {device!r}")
        self.group = distributed.distributed_c10d._get_default_group() if group is None else group
        self.mem_context = torch.cuda.use_mem_pool(self.pool)

    def __enter__(self) -> None:
        self.mem_context.__enter__()
        self._tell_backend("deregister_mem_pool")

    def __exit__(self, *error: Any) -> None:
        self._tell_backend("register_mem_pool")
        self.mem_context.__exit__(*error)

    def _tell_backend(self, method: str) -> None:
        if self.group is not None:
            # A pool that is new is not registered, and one that is not used has nothing to.
            with contextlib.suppress(RuntimeError):
                getattr(self.group._get_backend(self.device), method)(self.pool)
