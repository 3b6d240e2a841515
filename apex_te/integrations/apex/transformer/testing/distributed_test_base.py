"""Bases of tests over several processes, one per GPU, or over gloo without GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

from ....transformer_engine._names import not_served

Case: Any
try:
    from torch.testing._internal.common_distributed import MultiProcessTestCase as Case
except ImportError as error:
    _reason = f"torch's tests need the package {error.name}, which is not installed"
    Case = not_served(f"{__name__}.MultiProcessTestCase", _reason)

__all__ = ["HAS_UCC", "DistributedTestBase", "NcclDistributedTestBase", "UccDistributedTestBase"]

HAS_UCC = hasattr(distributed, "is_ucc_available") and distributed.is_ucc_available()


class DistributedTestBase(Case):
    """Base of a test case whose methods run in ``world_size`` processes with a process group.

    Attributes:
        DISTRIBUTED_BACKEND: backend of the group; a subclass names it.
    """

    DISTRIBUTED_BACKEND = "gloo"

    def setUp(self) -> None:
        """Starts the processes."""
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        """Releases the GPU's memory."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        super().tearDown()

    @property
    def world_size(self) -> int:
        """Number of processes: of GPUs, at most 4, or 2 without GPUs."""
        return min(torch.cuda.device_count(), 4) or 2

    @property
    def init_method(self) -> str:
        """File through which the processes find each other."""
        return f"file://{self.file_name}"

    @classmethod
    def _run(
        cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any
    ) -> None:
        """Runs a test method in one process."""
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        distributed.init_process_group(
            backend=cls.DISTRIBUTED_BACKEND,
            init_method=self.init_method,
            rank=rank,
            world_size=self.world_size,
        )
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
        distributed.barrier()
        self.run_test(test_name, parent_pipe)
        distributed.barrier()
        distributed.destroy_process_group()
        os._exit(0)


class NcclDistributedTestBase(DistributedTestBase):
    """Base of a test case over NCCL."""

    DISTRIBUTED_BACKEND = "nccl"


class UccDistributedTestBase(DistributedTestBase):
    """Base of a test case over UCC."""

    DISTRIBUTED_BACKEND = "ucc"
