"""``Float8Tensor``, the type of FP8 weights with one scale each."""

from ..._names import named, not_served
from ..quantized_tensor import QuantizedTensor, Quantizer, WeightType

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor"]

_MODULE = "transformer_engine.pytorch.tensor.float8_tensor"
_REASON = "modules quantize tensors by their recipe, without an object that users can hold"


@named(_MODULE)
class Float8Tensor(QuantizedTensor, metaclass=WeightType):
    """Type of every FP8 weight with one scale, by ``isinstance``."""

    quantizers = ("current", "delayed")


Float8Quantizer = not_served(f"{_MODULE}.Float8Quantizer", _REASON, Quantizer)
Float8CurrentScalingQuantizer = not_served(
    f"{_MODULE}.Float8CurrentScalingQuantizer", _REASON, Quantizer
)
