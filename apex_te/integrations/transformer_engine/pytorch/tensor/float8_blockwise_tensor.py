"""``Float8BlockwiseQTensor``, the type of FP8 weights with a scale for each block."""

from ..._names import named, not_served
from ..quantized_tensor import QuantizedTensor, Quantizer, WeightType

__all__ = ["Float8BlockQuantizer", "Float8BlockwiseQTensor"]

_MODULE = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"


@named(_MODULE)
class Float8BlockwiseQTensor(QuantizedTensor, metaclass=WeightType):
    """Type of every FP8 weight with a scale for each 128x128 block, by ``isinstance``."""

    quantizers = ("block",)


Float8BlockQuantizer = not_served(
    f"{_MODULE}.Float8BlockQuantizer",
    "modules quantize tensors by their recipe, without an object that users can hold",
    Quantizer,
)
