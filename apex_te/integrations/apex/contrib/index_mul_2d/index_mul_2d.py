"""Indexed rows of one matrix times the rows of another, with the op ``index_mul_2d``."""

from .....ops.index_mul_2d import IndexMulBackwardFunction as IndexMul2dBackward_
from .....ops.index_mul_2d import IndexMulFunction as IndexMul2d_
from .....ops.index_mul_2d import index_mul_2d

__all__ = ["IndexMul2dBackward_", "IndexMul2d_", "index_mul_2d"]
