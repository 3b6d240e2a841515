"""apex.contrib.sparsity: training with 2:4 sparse weights."""

from .asp import ASP as ASP
from .sparse_masklib import create_mask as create_mask
