"""Bases of tests over several processes, one per GPU, or over gloo without GPUs."""

from __future__ import annotations

import os

import torch
from torch import distributed
from torch.testing._internal import common_distributed

__all__ = ["HAS_UCC", "DistributedTestBase", "NcclDistributedTestBase", "UccDistributedTestBase"]

HAS_UCC = hasattr(distributed, "is_ucc_available") and distributed.is_ucc_available()


class DistributedTestBase(common_distributed.MultiProcessTestCase):
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
        """Where the processes find each other."""
        return f"{common_distributed.FILE_SCHEMA}{self.file_name}"

    @classmethod
    def _run(
        cls, rank: int, test_name: str, file_name: str, pipe: object, **kwargs: object
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
        self.run_test(test_name, pipe)
        distributed.barrier()
        distributed.destroy_process_group()
        os._exit(0)


class NcclDistributedTestBase(DistributedTestBase):
    """Base of a test case over NCCL."""

    DISTRIBUTED_BACKEND = "nccl"


class UccDistributedTestBase(DistributedTestBase):
    """Base of a test case over UCC."""

    DISTRIBUTED_BACKEND = "ucc"
