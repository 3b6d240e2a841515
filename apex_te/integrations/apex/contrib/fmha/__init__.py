"""apex.contrib.fmha: attention of packed sequences."""

from .fmha import FMHA as FMHA
from .fmha import FMHAFun as FMHAFun
