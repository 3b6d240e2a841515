"""Types by which programs recognise the data of FP8 weights, without autograd's interface.

Here they recognise the weights themselves, which hold their data.
"""

from ...._names import named
from ...quantized_tensor import QuantizedTensor, WeightType

__all__ = [
    "Float8BlockwiseQTensorStorage",
    "Float8TensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
]

_MODULE = "transformer_engine.pytorch.tensor.storage"


@named(f"{_MODULE}.float8_tensor_storage")
class Float8TensorStorage(QuantizedTensor, metaclass=WeightType):
    """Type of every FP8 weight with one scale, by ``isinstance``."""

    quantizers = ("current", "delayed")


@named(f"{_MODULE}.mxfp8_tensor_storage")
class MXFP8TensorStorage(QuantizedTensor, metaclass=WeightType):
    """Type of every FP8 weight with MX scales, by ``isinstance``."""

    quantizers = ("mx",)


@named(f"{_MODULE}.float8_blockwise_tensor_storage")
class Float8BlockwiseQTensorStorage(QuantizedTensor, metaclass=WeightType):
    """Type of every FP8 weight with block scales, by ``isinstance``."""

    quantizers = ("block",)


@named(f"{_MODULE}.nvfp4_tensor_storage")
class NVFP4TensorStorage(QuantizedTensor, metaclass=WeightType):
    """Type that no tensor has, since apex_te has no NVFP4 recipe."""

    quantizers = ()
