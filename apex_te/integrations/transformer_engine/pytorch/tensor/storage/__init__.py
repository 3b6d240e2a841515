"""Types by which programs recognise the data of FP8 weights, without autograd's interface.

Here they recognise the weights themselves, which hold their data.
"""

from ...quantized_tensor import weight_type

__all__ = [
    "Float8BlockwiseQTensorStorage",
    "Float8TensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
]

_MODULE = "transformer_engine.pytorch.tensor.storage"
Float8TensorStorage = weight_type(
    f"{_MODULE}.float8_tensor_storage.Float8TensorStorage", "current", "delayed"
)
MXFP8TensorStorage = weight_type(f"{_MODULE}.mxfp8_tensor_storage.MXFP8TensorStorage", "mx")
Float8BlockwiseQTensorStorage = weight_type(
    f"{_MODULE}.float8_blockwise_tensor_storage.Float8BlockwiseQTensorStorage", "block"
)
NVFP4TensorStorage = weight_type(f"{_MODULE}.nvfp4_tensor_storage.NVFP4TensorStorage")
