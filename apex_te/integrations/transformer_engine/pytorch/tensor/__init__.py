"""Types by which frameworks recognise weights that are held in FP8 only."""

from ..._names import not_served
from ..quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer
from . import utils as utils
from .float8_blockwise_tensor import Float8BlockQuantizer, Float8BlockwiseQTensor
from .float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from .grouped_tensor import GroupedTensor
from .mxfp8_tensor import MXFP8Quantizer, MXFP8Tensor
from .nvfp4_tensor import NVFP4Quantizer, NVFP4Tensor
from .storage import (
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
)

_MODULE = "transformer_engine.pytorch.tensor"
_REASON = "a weight has the data of one recipe; leave it to fp8_model_init"
HybridQuantizedTensor = not_served(f"{_MODULE}.HybridQuantizedTensor", _REASON)
HybridQuantizedTensorStorage = not_served(f"{_MODULE}.HybridQuantizedTensorStorage", _REASON)
HybridQuantizer = not_served(f"{_MODULE}.HybridQuantizer", _REASON, Quantizer)
IdentityQuantizer = not_served(f"{_MODULE}.IdentityQuantizer", _REASON, Quantizer)
IdentityTensor = not_served(f"{_MODULE}.IdentityTensor", _REASON)
IdentityTensorStorage = not_served(f"{_MODULE}.IdentityTensorStorage", _REASON)

__all__ = [
    "Float8BlockQuantizer", "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor", "Float8TensorStorage",
    "GroupedTensor", "HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer",
    "IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage", "MXFP8Quantizer", "MXFP8Tensor",
    "MXFP8TensorStorage", "NVFP4Quantizer", "NVFP4Tensor", "NVFP4TensorStorage", "QuantizedTensor",
    "QuantizedTensorStorage", "Quantizer",
]  # fmt: skip
