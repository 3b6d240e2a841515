"""Samplers that yield the indices of a data-parallel rank's batches, and resume."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class _Sampler:
    """Base of the samplers.

    Args:
        total_samples: samples of the data set.
        consumed_samples: samples that training has used.
        local_minibatch_size: samples of a rank's batch.
        data_parallel_rank: this rank.
        data_parallel_size: ranks.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        name = type(self).__name__
        for what, value in (
            ("total_samples", total_samples),
            ("local_minibatch_size", local_minibatch_size),
            ("data_parallel_size", data_parallel_size),
        ):
            if value <= 0:
                raise RuntimeError(f"{name}: {what} must be positive, got {value}")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise RuntimeError(
                f"{name}: data_parallel_rank must be below {data_parallel_size}, got"
                f" {data_parallel_rank}"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.local_minibatch_size = local_minibatch_size

    @property
    def local_minibatch_size(self) -> int:
        """Samples of a rank's batch, which may be set."""
        return self._local_minibatch_size

    @local_minibatch_size.setter
    def local_minibatch_size(self, size: int) -> None:
        self._local_minibatch_size = size
        self.local_minibatch_times_data_parallel_size = size * self.data_parallel_size

    def __len__(self) -> int:
        return self.total_samples


class MegatronPretrainingSampler(_Sampler):
    """Sampler in the data set's order.

    Args:
        total_samples: samples of the data set.
        consumed_samples: samples that training has used, from which it goes on.
        local_minibatch_size: samples of a rank's batch.
        data_parallel_rank: this rank.
        data_parallel_size: ranks.
        drop_last: leaves out a last batch that is too small.

    Raises:
        RuntimeError: a number is out of range, or no samples are left.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        sizes = (local_minibatch_size, data_parallel_rank, data_parallel_size)
        super().__init__(total_samples, consumed_samples, *sizes)
        if consumed_samples >= total_samples:
            raise RuntimeError(
                f"MegatronPretrainingSampler: consumed_samples must be below {total_samples}, got"
                f" {consumed_samples}"
            )
        self.drop_last = drop_last

    def get_start_end_idx(self) -> tuple[int, int]:
        """Returns the range of this rank's samples in a batch of all ranks."""
        start = self.data_parallel_rank * self.local_minibatch_size
        return start, start + self.local_minibatch_size

    def __iter__(self) -> Iterator[list[int]]:
        start, end = self.get_start_end_idx()
        batch: list[int] = []
        for index in range(self.consumed_samples, self.total_samples):
            batch.append(index)
            if len(batch) == self.local_minibatch_times_data_parallel_size:
                yield batch[start:end]
                batch = []
        if batch and not self.drop_last:
            yield batch[start:end]


class MegatronPretrainingRandomSampler(_Sampler):
    """Sampler in an order that the epoch fixes, each rank from its own part of the data set.

    Its arguments are those of ``MegatronPretrainingSampler`` without ``drop_last``; a last batch
    that is too small is left out.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        sizes = (local_minibatch_size, data_parallel_rank, data_parallel_size)
        super().__init__(total_samples, consumed_samples, *sizes)
        together = self.local_minibatch_times_data_parallel_size
        self.last_batch_size = total_samples % together

    def __iter__(self) -> Iterator[list[int]]:
        together = self.local_minibatch_times_data_parallel_size
        whole = self.total_samples - self.last_batch_size
        self.epoch, used = divmod(self.consumed_samples, whole)
        size = self.total_samples // together * self.local_minibatch_size
        first = self.data_parallel_rank * size
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        order = torch.randperm(size, generator=generator)[used // self.data_parallel_size :]
        batch: list[int] = []
        for index in order.tolist():
            batch.append(first + index)
            if len(batch) == self.local_minibatch_size:
                self.consumed_samples += together
                yield batch
                batch = []
