"""FSDP2 with weights that are gathered as FP8 data."""

from .fp8_all_gather import enable_fp8_all_gather

__all__ = ["enable_fp8_all_gather"]
