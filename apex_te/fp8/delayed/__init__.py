"""Delayed scaling: the FP8 state of modules, and the clock and update of scales in a process."""
