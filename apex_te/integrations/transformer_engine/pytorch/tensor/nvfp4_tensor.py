"""``NVFP4Tensor``, a type without instances, since apex_te has no NVFP4 recipe."""

from ..quantized_tensor import quantizer_type, weight_type

__all__ = ["NVFP4Quantizer", "NVFP4Tensor"]

_MODULE = "transformer_engine.pytorch.tensor.nvfp4_tensor"
NVFP4Tensor = weight_type(f"{_MODULE}.NVFP4Tensor")
NVFP4Quantizer = quantizer_type(
    f"{_MODULE}.NVFP4Quantizer", "apex_te has no NVFP4 recipe; use one of FP8"
)
