"""What training on several ranks needs: activation checkpoints and random states by name."""

from .checkpoint import checkpoint
from .rng import CudaRNGStatesTracker

__all__ = ["CudaRNGStatesTracker", "checkpoint"]
