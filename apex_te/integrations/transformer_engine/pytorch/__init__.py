"""Modules, regions and functions of Transformer Engine for PyTorch, over apex_te."""

import importlib

# Submodules, and the names of each that are here, too.
_NAMES = {
    "attention": (
        "DotProductAttention GatedDeltaNet2Attention GatedDeltaNetAttention InferenceParams "
        "MultiheadAttention RotaryPositionEmbedding"
    ),
    "constants": "DType",
    "cpu_offload": "ManualOffloadSynchronizer get_cpu_offload_context mark_not_offload",
    "cross_entropy": "parallel_cross_entropy",
    "distributed": "CudaRNGStatesTracker checkpoint",
    "export": "onnx_export",
    "float8_tensor": "",
    "fp8": "",
    "graph": "make_graphed_callables",
    "module": (
        "Fp8Padding Fp8Unpadding GroupedLinear LayerNorm LayerNormLinear LayerNormMLP Linear "
        "RMSNorm UserBufferQuantizationMode destroy_ub initialize_ub"
    ),
    "ops": "",
    "optimizers": "CusolverMpCtx newton_schulz newton_schulz_tp",
    "permutation": (
        "moe_permute moe_permute_and_pad_with_probs moe_permute_with_probs "
        "moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute"
    ),
    "quantization": (
        "DelayedScalingRequest QuantizerRequest QuantizerRole apply_recipe autocast fp8_autocast "
        "fp8_model_init get_default_recipe is_fp8_available is_fp8_block_scaling_available "
        "is_mxfp8_available is_nvfp4_available quantization_backward_scope quantized_model_init"
    ),
    "quantized_tensor": (
        "QuantizedTensor QuantizedTensorStorage Quantizer prepare_for_saving "
        "restore_from_func_ctx restore_from_saved"
    ),
    "router": "",
    "tensor": (
        "Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage "
        "Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor Float8TensorStorage "
        "HybridQuantizedTensor HybridQuantizedTensorStorage HybridQuantizer IdentityQuantizer "
        "IdentityTensor IdentityTensorStorage MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage "
        "NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage"
    ),
    "transformer": "TransformerLayer",
    "utils": (
        "deinterleave_glu_tensor get_cudnn_version get_device_compute_capability "
        "interleave_glu_tensor is_bf16_available"
    ),
}

for _module, _names in _NAMES.items():
    _found = importlib.import_module(f"{__name__}.{_module}")
    globals().update({_name: getattr(_found, _name) for _name in _names.split()})

__all__ = sorted([*_NAMES, *" ".join(_NAMES.values()).split()])
