"""FP8 ops for JAX: the compiled libraries that the PyTorch modules use, called from XLA programs.

Needs JAX 0.10 or later and no torch. Importing compiles nothing; a program's ops are built, if no
cache holds them, while it is lowered.
"""

from ._library import load as load

__all__ = ["load"]
