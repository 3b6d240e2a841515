"""``MXFP8Tensor``, the type of FP8 weights with a scale for every 32 values."""

from ..quantized_tensor import quantizer_type, weight_type

__all__ = ["MXFP8Quantizer", "MXFP8Tensor"]

_MODULE = "transformer_engine.pytorch.tensor.mxfp8_tensor"
MXFP8Tensor = weight_type(f"{_MODULE}.MXFP8Tensor", "mx")
MXFP8Quantizer = quantizer_type(f"{_MODULE}.MXFP8Quantizer")
