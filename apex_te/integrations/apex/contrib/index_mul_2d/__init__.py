"""Rows that an index picks times those of another matrix."""

from .index_mul_2d import index_mul_2d as index_mul_2d
