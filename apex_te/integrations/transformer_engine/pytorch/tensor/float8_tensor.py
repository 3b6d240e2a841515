"""``Float8Tensor``, the type of FP8 weights with one scale each."""

from ..quantized_tensor import quantizer_type, weight_type

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor"]

_MODULE = "transformer_engine.pytorch.tensor.float8_tensor"
Float8Tensor = weight_type(f"{_MODULE}.Float8Tensor", "current", "delayed")
Float8Quantizer = quantizer_type(f"{_MODULE}.Float8Quantizer")
Float8CurrentScalingQuantizer = quantizer_type(f"{_MODULE}.Float8CurrentScalingQuantizer")
