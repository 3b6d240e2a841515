"""Loader of fp8_gemm."""

from .loader import define_loader

define_loader(globals(), "fp8_gemm")
