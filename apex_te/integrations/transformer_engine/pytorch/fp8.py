"""Earlier name of ``transformer_engine.pytorch.quantization``, which it hands on."""

from .quantization import *  # noqa: F403
from .quantization import __all__ as __all__
