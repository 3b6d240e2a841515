"""Delayed scaling: the FP8 state of modules, and the process-wide order in which scales move."""
