"""Every name of Transformer Engine that frameworks use: what computes, and what is only named."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys

import pytest
import torch
from programs import captured

from apex_te.integrations import te_alias

# By module: the names that compute, and those that raise NotImplementedError when they are used.
RECIPES = (
    """DelayedScaling Float8BlockScaling Float8CurrentScaling Format MXFP8BlockScaling Recipe"""
)
MODULES = """
    Fp8Padding Fp8Unpadding GroupedLinear LayerNorm LayerNormLinear LayerNormMLP Linear RMSNorm
"""
REGIONS = """
    autocast fp8_autocast fp8_model_init get_default_recipe is_fp8_available
    is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available quantized_model_init
"""
SUPPORT = """
    FP8GlobalStateManager check_fp8_block_scaling_support check_fp8_support check_mxfp8_support
    check_nvfp4_support get_default_fp8_recipe get_fp8_torch_dtype
"""
PERMUTATION = """
    moe_permute moe_permute_and_pad_with_probs moe_permute_with_probs moe_sort_chunks_by_index
    moe_sort_chunks_by_index_with_probs moe_unpermute
"""
OPS = """
    AddExtraInput AllReduce BasicLinear BasicOperation Bias ConstantScale Dropout FusibleOperation
    ClampedSwiGLU GEGLU GELU GLU GroupedLinear LayerNorm Linear MakeExtraOutput QGEGLU QGELU
    Quantize RMSNorm ReGLU ReLU ReduceScatter SReGLU SReLU ScaledClampedQGeGLU ScaledSwiGLU
    Sequential SiLU SwiGLU register_backward_fusion register_forward_backward_fusion
    register_forward_fusion
"""
NAMES: dict[str, tuple[str, str]] = {
    "": ("__version__ common pytorch", ""),
    "common": ("recipe", ""),
    "common.recipe": (
        f"{RECIPES} MMParams QParams _FormatHelper",
        "CustomRecipe NVFP4BlockScaling",
    ),
    "pytorch": (
        f"""{MODULES} {REGIONS} {PERMUTATION} CudaRNGStatesTracker DotProductAttention
        InferenceParams MultiheadAttention QuantizedTensor RotaryPositionEmbedding
        TransformerLayer attention checkpoint constants cross_entropy distributed float8_tensor fp8
        DType Float8BlockwiseQTensorStorage Float8TensorStorage MXFP8TensorStorage
        ManualOffloadSynchronizer NVFP4TensorStorage deinterleave_glu_tensor
        get_cpu_offload_context get_cudnn_version get_device_compute_capability graph
        interleave_glu_tensor is_bf16_available mark_not_offload prepare_for_saving
        restore_from_func_ctx restore_from_saved
        make_graphed_callables module onnx_export ops optimizers parallel_cross_entropy permutation
        quantization quantized_tensor router tensor transformer utils""",
        """CusolverMpCtx DelayedScalingRequest GatedDeltaNet2Attention GatedDeltaNetAttention
        HybridQuantizedTensor HybridQuantizedTensorStorage HybridQuantizer IdentityQuantizer
        IdentityTensor IdentityTensorStorage QuantizedTensorStorage Quantizer QuantizerRequest
        QuantizerRole UserBufferQuantizationMode apply_recipe destroy_ub initialize_ub
        newton_schulz newton_schulz_tp quantization_backward_scope""",
    ),
    "pytorch.fp8": (f"{RECIPES} {REGIONS} {SUPPORT} get_fp8_recipe", ""),
    "pytorch.quantization": (f"{RECIPES} {REGIONS} {SUPPORT}", ""),
    "pytorch.module": (MODULES, "destroy_ub initialize_ub"),
    "pytorch.module.base": (
        "TransformerEngineBaseModule get_dummy_wgrad get_workspace",
        "initialize_ub",
    ),
    "pytorch.module.linear": ("Linear", ""),
    "pytorch.module.layernorm": ("LayerNorm", ""),
    "pytorch.module.rmsnorm": ("RMSNorm", ""),
    "pytorch.module.layernorm_linear": ("LayerNormLinear", ""),
    "pytorch.module.layernorm_mlp": ("LayerNormMLP", ""),
    "pytorch.module.grouped_linear": ("GroupedLinear", ""),
    "pytorch.module.fp8_padding": ("Fp8Padding", ""),
    "pytorch.module.fp8_unpadding": ("Fp8Unpadding", ""),
    "pytorch.attention": (
        """DotProductAttention InferenceParams MultiheadAttention RotaryPositionEmbedding
        apply_rotary_pos_emb dot_product_attention inference rope""",
        "",
    ),
    "pytorch.attention.rope": (
        "RotaryPositionEmbedding apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb",
        "",
    ),
    "pytorch.attention.inference": ("InferenceParams", "PagedKVCacheManager"),
    "pytorch.attention.dot_product_attention": (
        "DotProductAttention context_parallel dot_product_attention",
        "",
    ),
    "pytorch.attention.dot_product_attention.dot_product_attention": ("DotProductAttention", ""),
    "pytorch.attention.dot_product_attention.context_parallel": (
        "generate_positional_ids_for_cp get_batch_on_this_cp_rank pad_thd_sequences_for_cp",
        "",
    ),
    "pytorch.distributed": (
        """CudaRNGStatesTracker activation_recompute_forward checkpoint gather_along_first_dim
        get_activation_recompute_contexts get_all_rng_states get_distributed_rank
        get_distributed_world_size in_fp8_activation_recompute_phase
        is_fp8_activation_recompute_enabled prepare_te_modules_for_fsdp
        reduce_scatter_along_first_dim""",
        "",
    ),
    "pytorch.optimizers": (
        """FusedAdam FusedSGD fused_adam fused_sgd multi_tensor_adam multi_tensor_adam_capturable
        multi_tensor_adam_capturable_master multi_tensor_applier multi_tensor_l2norm
        multi_tensor_scale multi_tensor_scale_tensor multi_tensor_sgd
        multi_tensor_unscale_l2norm""",
        "CusolverMpCtx multi_tensor_adam_fp8 newton_schulz newton_schulz_tp",
    ),
    "pytorch.optimizers.fused_adam": ("FusedAdam", ""),
    "pytorch.optimizers.fused_sgd": ("FusedSGD", ""),
    "pytorch.permutation": (PERMUTATION, ""),
    "pytorch.graph": (
        """make_graphed_callables restore_fp8_tensors save_fp8_tensors set_capture_end
        set_capture_start""",
        "",
    ),
    "pytorch.cross_entropy": ("parallel_cross_entropy", ""),
    "pytorch.router": (
        """RoutingMapFormat fused_compute_score_for_moe_aux_loss fused_moe_aux_loss
        fused_topk_with_score_function""",
        "",
    ),
    "pytorch.transformer": ("TransformerLayer", ""),
    "pytorch.constants": (
        """AttnBiasTypes AttnMaskTypes AttnTypes DType FP8BwdTensorIdx FP8FwdTensorIdx LayerTypes
        TE_DType dist_group_type""",
        "",
    ),
    "pytorch.utils": (
        """SplitAlongDim attention_mask_func cast_if_needed divide get_cudnn_version
        get_default_init_method get_device_compute_capability init_method_constant
        init_method_normal make_weak_ref nvtx_range_pop nvtx_range_push
        scaled_init_method_normal""",
        "",
    ),
    "pytorch.float8_tensor": ("Float8Tensor", ""),
    "pytorch.quantized_tensor": ("QuantizedTensor", "Quantizer"),
    "pytorch.tensor": (
        """Float8BlockwiseQTensor Float8Tensor MXFP8Tensor QuantizedTensor float8_blockwise_tensor
        float8_tensor grouped_tensor mxfp8_tensor nvfp4_tensor utils""",
        "",
    ),
    "pytorch.tensor.float8_tensor": ("Float8Tensor", ""),
    "pytorch.tensor.mxfp8_tensor": ("MXFP8Tensor", ""),
    "pytorch.tensor.float8_blockwise_tensor": ("Float8BlockwiseQTensor", ""),
    "pytorch.tensor.nvfp4_tensor": ("NVFP4Tensor", ""),
    "pytorch.tensor.grouped_tensor": ("GroupedTensor", ""),
    "pytorch.tensor.utils": (
        """cast_master_weights_to_fp8 post_all_gather_processing quantize_master_weights
        replace_raw_data""",
        "",
    ),
    "pytorch.ops": ("op", OPS),
    "pytorch.ops.op": ("", "BasicOperation FusibleOperation"),
}
# What frameworks guard with ImportError.
ABSENT = ("pytorch.cpp_extensions", "jax", "debug")


@pytest.fixture(scope="module", autouse=True)
def _alias():
    """Installs the alias in this process, and removes it for the tests of other files."""
    te_alias.install()
    yield
    te_alias.uninstall()


def names(which):
    return [(module, name) for module, both in NAMES.items() for name in both[which].split()]


def full(module):
    return f"transformer_engine.{module}".rstrip(".")


def is_refusal(value):
    return (getattr(value, "__doc__", None) or "").startswith("Raises NotImplementedError")


@pytest.mark.parametrize("module", NAMES)
def test_modules_are_one_object_under_both_names(module):
    imported = importlib.import_module(full(module))
    own = f"apex_te.integrations.{full(module)}"
    assert imported is importlib.import_module(own) is sys.modules[own]
    for name in getattr(imported, "__all__", []):
        assert hasattr(imported, name), name


@pytest.mark.parametrize(("module", "name"), names(0))
def test_what_is_served_is_no_refusal(module, name):
    value = getattr(importlib.import_module(full(module)), name)
    assert not is_refusal(value)
    submodule = f"{full(module)}.{name}"
    if inspect.ismodule(value):
        assert importlib.import_module(submodule) is value
    else:
        assert submodule not in sys.modules
    if isinstance(value, type) and value.__module__.startswith(("apex_te.", "transformer_engine")):
        assert value.__module__.startswith("transformer_engine") or name in APEX_TE_CLASSES, value


# Classes of which apex_te's own are as good: nothing tells them by their module.
APEX_TE_CLASSES = ("Format", "CudaRNGStatesTracker")


@pytest.mark.parametrize(("module", "name"), names(1))
def test_what_is_only_named_says_so_when_it_is_used(module, name):
    value = getattr(importlib.import_module(full(module)), name)
    with pytest.raises(NotImplementedError, match=rf"transformer_engine\.[\w.]*{name} .*: \w+"):
        value()
    if isinstance(value, type):
        assert not isinstance(torch.nn.Linear(1, 1), value)
        assert value | None


@pytest.mark.parametrize("module", ABSENT)
def test_what_is_absent_raises_import_error(module):
    if module == "jax" and importlib.util.find_spec("jax") is not None:
        pytest.skip("with JAX it is there")
    with pytest.raises(ImportError):
        importlib.import_module(full(module))


def test_attributes_can_be_replaced(monkeypatch):
    linear = importlib.import_module("transformer_engine.pytorch.module.linear")
    monkeypatch.setattr("transformer_engine.pytorch.module.linear.Linear", 5)
    monkeypatch.setattr("transformer_engine.pytorch.attention.new", 6, raising=False)
    assert linear.Linear == 5


def test_a_plain_import_gives_all_modules_and_names():
    body = """
import apex_te
assert not [name for name in __import__("sys").modules if name.startswith("transformer_engine")]
import transformer_engine
assert hasattr(transformer_engine, "pytorch")
assert transformer_engine.pytorch.module.linear.Linear is transformer_engine.pytorch.Linear
assert transformer_engine.common.recipe.Format.HYBRID
import pickle, torch
for layer in (transformer_engine.pytorch.Linear(16, 16), transformer_engine.pytorch.RMSNorm(8)):
    copy = pickle.loads(pickle.dumps(layer))
    assert type(copy) is type(layer)
"""
    environment = {**os.environ, "APEX_TE_TRANSFORMER_ENGINE": "1"}
    captured([sys.executable, "-c", body], env=environment)
