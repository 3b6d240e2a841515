"""Number of microbatches of a step, constant or growing with the global batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .log_util import get_transformer_logger

_logger = get_transformer_logger(__name__)


class NumMicroBatchesCalculator(ABC):
    """Base of the calculators.

    Attributes:
        num_micro_batches: microbatches of a step, per data-parallel rank.
        current_global_batch_size: samples of a step, over all data-parallel ranks.
        micro_batch_size: samples of a microbatch.
    """

    num_micro_batches: int
    current_global_batch_size: int
    micro_batch_size: int

    def get(self) -> int:
        """Returns the number of microbatches of a step."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Returns the samples of a step."""
        return self.current_global_batch_size

    @abstractmethod
    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Adapts the global batch to the samples that were consumed so far."""


class ConstantNumMicroBatches(NumMicroBatchesCalculator):
    """Calculator of a constant global batch."""

    def __init__(
        self, global_batch_size: int, micro_batch_size: int, data_parallel_size: int
    ) -> None:
        samples = micro_batch_size * data_parallel_size
        if global_batch_size < samples or global_batch_size % samples:
            raise ValueError(
                "global_batch_size must be a multiple of micro_batch_size * data_parallel_size ="
                f" {samples}, got {global_batch_size}"
            )
        self.num_micro_batches = global_batch_size // samples
        self.current_global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Does nothing."""


class RampupBatchsizeNumMicroBatches(NumMicroBatchesCalculator):
    """Calculator of a global batch that grows in equal steps of samples.

    Args:
        start_batch_size: global batch at first.
        batch_size_increment: samples by which it grows.
        ramup_samples: samples over which it grows to ``global_batch_size``.
        global_batch_size: global batch in the end.
        micro_batch_size: samples of a microbatch.
        data_parallel_size: data-parallel ranks.
    """

    def __init__(
        self,
        start_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
    ) -> None:
        growth = global_batch_size - start_batch_size
        for name, value, valid in (
            ("start_batch_size", start_batch_size, start_batch_size > 0),
            ("batch_size_increment", batch_size_increment, batch_size_increment > 0),
            ("ramup_samples", ramup_samples, ramup_samples >= 0),
            ("global_batch_size", global_batch_size, growth >= 0),
        ):
            if not valid:
                raise ValueError(f"{name} is too small, got {value}")
        if growth % batch_size_increment:
            raise ValueError(
                "batch_size_increment must divide global_batch_size - start_batch_size ="
                f" {growth}, got {batch_size_increment}"
            )
        self.micro_batch_size = micro_batch_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.start_batch_size = start_batch_size
        self.batch_size_increment = batch_size_increment
        self.ramup_samples = ramup_samples
        self.global_batch_size = global_batch_size
        increments = growth // batch_size_increment
        self.rampup_samples_per_increment = ramup_samples / max(1, increments)
        self.update(0, False)

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Sets the global batch for the samples that were consumed so far.

        Raises:
            ValueError: ``consistency_check``, and microbatches do not divide the global batch.
        """
        size = self.global_batch_size
        if consumed_samples <= self.ramup_samples and self.rampup_samples_per_increment:
            steps = int(consumed_samples / self.rampup_samples_per_increment)
            size = min(size, self.start_batch_size + steps * self.batch_size_increment)
        samples = self.micro_batch_times_data_parallel_size
        if consistency_check and size % samples:
            raise ValueError(
                f"the global batch must be a multiple of micro_batch_size * data_parallel_size ="
                f" {samples}, got {size}"
            )
        self.current_global_batch_size = size
        self.num_micro_batches = size // samples


def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> NumMicroBatchesCalculator:
    """Returns the calculator; ``rampup_batch_size`` is [start, increment, samples] or None.

    Raises:
        ValueError: sizes do not match, or not three numbers.
    """
    if rampup_batch_size is None:
        constant = ConstantNumMicroBatches(global_batch_size, micro_batch_size, data_parallel_size)
        if rank == 0:
            _logger.info("setting number of micro-batches to constant %d", constant.get())
        return constant
    if len(rampup_batch_size) != 3:
        raise ValueError(
            f"rampup_batch_size must be [start, increment, samples], got {list(rampup_batch_size)}"
        )
    start, increment, samples = map(int, rampup_batch_size)
    return RampupBatchsizeNumMicroBatches(
        start, increment, samples, global_batch_size, micro_batch_size, data_parallel_size
    )
