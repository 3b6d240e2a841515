"""Building a library: locks, the compilers' run, checks and publication."""
