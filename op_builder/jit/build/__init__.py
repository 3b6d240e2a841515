"""Compilation of a library: locks, the run of ninja, checks of the result and its publication."""
