"""``Float8BlockwiseQTensor``, the type of FP8 weights with a scale for each block."""

from ..quantized_tensor import quantizer_type, weight_type

__all__ = ["Float8BlockQuantizer", "Float8BlockwiseQTensor"]

_MODULE = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
Float8BlockwiseQTensor = weight_type(f"{_MODULE}.Float8BlockwiseQTensor", "block")
Float8BlockQuantizer = quantizer_type(f"{_MODULE}.Float8BlockQuantizer")
