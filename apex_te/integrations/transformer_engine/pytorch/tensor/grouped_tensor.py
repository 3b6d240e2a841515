"""``GroupedTensor``, a type without instances: ``GroupedLinear`` holds a weight for each expert."""

from ..._names import named
from ..quantized_tensor import QuantizedTensor, WeightType

__all__ = ["GroupedTensor"]


@named("transformer_engine.pytorch.tensor.grouped_tensor")
class GroupedTensor(QuantizedTensor, metaclass=WeightType):
    """Type that no tensor has, since ``GroupedLinear`` holds a weight for each expert."""

    quantizers = ()
