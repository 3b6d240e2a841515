"""FSDP2 (``fully_shard``) with all-gathers that carry weights as FP8 data."""

from .fp8_all_gather import enable_fp8_all_gather

__all__ = ["enable_fp8_all_gather"]
