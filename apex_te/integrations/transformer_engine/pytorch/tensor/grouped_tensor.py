"""``GroupedTensor``, a type without instances: ``GroupedLinear`` holds a weight for each expert."""

from ..quantized_tensor import weight_type

__all__ = ["GroupedTensor"]

_MODULE = "transformer_engine.pytorch.tensor.grouped_tensor"
GroupedTensor = weight_type(f"{_MODULE}.GroupedTensor")
