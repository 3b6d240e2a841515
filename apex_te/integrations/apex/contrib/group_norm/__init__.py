"""apex.contrib.group_norm: group norm with SiLU."""

from .group_norm import GroupNorm as GroupNorm
