"""Samplers of batches for data parallelism."""

from ._batchsampler import MegatronPretrainingRandomSampler as MegatronPretrainingRandomSampler
from ._batchsampler import MegatronPretrainingSampler as MegatronPretrainingSampler
