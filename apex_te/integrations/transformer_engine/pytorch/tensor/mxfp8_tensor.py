"""``MXFP8Tensor``, the type of FP8 weights with a scale for every 32 values."""

from ..._names import named, not_served
from ..quantized_tensor import QuantizedTensor, Quantizer, WeightType

__all__ = ["MXFP8Quantizer", "MXFP8Tensor"]

_MODULE = "transformer_engine.pytorch.tensor.mxfp8_tensor"


@named(_MODULE)
class MXFP8Tensor(QuantizedTensor, metaclass=WeightType):
    """Type of every FP8 weight with MX scales, by ``isinstance``."""

    quantizers = ("mx",)


MXFP8Quantizer = not_served(
    f"{_MODULE}.MXFP8Quantizer",
    "modules quantize tensors by their recipe, without an object that users can hold",
    Quantizer,
)
