"""Loader of grouped_gemm."""

from .loader import define_loader

define_loader(globals(), "grouped_gemm")
