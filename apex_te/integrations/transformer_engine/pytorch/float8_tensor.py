"""Earlier place of ``Float8Tensor``, the type of FP8 weights with one scale each."""

from .tensor.float8_tensor import Float8Tensor

__all__ = ["Float8Tensor"]
