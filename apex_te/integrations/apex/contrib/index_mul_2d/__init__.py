"""apex.contrib.index_mul_2d: indexed rows of one matrix times the rows of another."""

from .index_mul_2d import index_mul_2d as index_mul_2d
