"""``NVFP4Tensor``, a type without instances, since apex_te has no NVFP4 recipe."""

from ..._names import named, not_served
from ..quantized_tensor import QuantizedTensor, Quantizer, WeightType

__all__ = ["NVFP4Quantizer", "NVFP4Tensor"]

_MODULE = "transformer_engine.pytorch.tensor.nvfp4_tensor"


@named(_MODULE)
class NVFP4Tensor(QuantizedTensor, metaclass=WeightType):
    """Type that no tensor has, since apex_te has no NVFP4 recipe."""

    quantizers = ()


NVFP4Quantizer = not_served(
    f"{_MODULE}.NVFP4Quantizer", "apex_te has no NVFP4 recipe; use one of FP8", Quantizer
)
