"""Modules on the meta device: shapes without memory, and how parameters get memory and values."""

import pytest
import torch
from schemes import chosen
from torch.testing import assert_close

import apex_te.parameter
from apex_te import fp8_autocast, fp8_model_init
from apex_te.recipe import CurrentScaling

HIDDEN, FFN, HEADS = 32, 64, 4
SHAPE = (6, 2, HIDDEN)
RECIPES = {"high precision": None, **chosen("delayed", "tensorwise", "blockwise", "mxfp8")}
MODULES = {
    "Linear": lambda **more: apex_te.Linear(HIDDEN, FFN, **more),
    "LayerNormLinear": lambda **more: apex_te.LayerNormLinear(HIDDEN, FFN, **more),
    "LayerNormMLP": lambda **more: apex_te.LayerNormMLP(
        HIDDEN, FFN, activation="swiglu", **more
    ),
    "GroupedLinear": lambda **more: apex_te.GroupedLinear(3, HIDDEN, FFN, **more),
    "LayerNorm": lambda **more: apex_te.LayerNorm(HIDDEN, **more),
    "RMSNorm": lambda **more: apex_te.RMSNorm(HIDDEN, **more),
    "MultiheadAttention": lambda **more: apex_te.MultiheadAttention(
        HIDDEN, HEADS, num_gqa_groups=2, qk_norm_type="RMSNorm", **more
    ),
    "TransformerLayer": lambda **more: apex_te.TransformerLayer(HIDDEN, FFN, HEADS, **more),
    "decoder": lambda **more: apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, layer_type="decoder", output_layernorm=True, normalization="RMSNorm",
        drop_path_rate=0.1, fuse_qkv_params=True, **more,
    ),
}  # fmt: skip
modules = pytest.mark.parametrize("name", MODULES)
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
current = "cuda" if torch.cuda.is_available() else "cpu"  # where parameters are made


def call(name, module, x):
    if name == "GroupedLinear":
        return module(x, [5, 0, 7])
    if name == "decoder":
        return module(x, encoder_output=x)
    if name in ("MultiheadAttention", "TransformerLayer"):
        angles = torch.zeros(9, 1, 1, HIDDEN // HEADS, device=x.device)
        return module(x, rotary_pos_emb=angles)
    return module(x)


def shapes(tensors):
    return [(t.shape, t.stride(), t.dtype) for t in tensors]


@pytest.mark.cover(2)
@modules
@recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(name, recipe, dtype):
    """Those of the same module with memory, of the output and of every gradient."""
    found = []
    for where in ("cpu", "meta"):
        module = MODULES[name](device=where, params_dtype=dtype)
        x = torch.randn(SHAPE, device=where, dtype=dtype, requires_grad=True)
        with fp8_autocast(recipe is not None, recipe):
            y = call(name, module, x)
        y.sum().backward()
        assert y.device.type == where
        assert all(p.grad.device.type == where for p in module.parameters())
        found.append(shapes([y, x.grad, *(p.grad for p in module.parameters())]))
    assert found[0] == found[1]


@modules
@recipes
def test_a_run_on_meta_leaves_no_trace(name, recipe):
    """The same results after the module has run on the meta device, moved and been filled."""
    if recipe is None:
        pytest.skip("no state")
    torch.manual_seed(0)
    plain = MODULES[name](device=current)
    module = MODULES[name](device="meta")
    for calibrating in (False, True):
        with fp8_autocast(not calibrating, calibrating=calibrating, fp8_recipe=recipe):
            call(name, module, torch.randn(SHAPE, device="meta"))
    assert not any(key for key in module.state_dict() if "fp8_state" in key)
    module.to_empty(device=current)
    module.load_state_dict(plain.state_dict())
    x = torch.randn(SHAPE, device=current)
    for each in (plain, module):
        each.eval()
    for _ in range(3):
        with fp8_autocast(True, recipe):
            assert_close(call(name, module, x), call(name, plain, x), rtol=0.0, atol=0.0)


@modules
def test_autocast_is_of_other_devices(name):
    module, x = MODULES[name](device="meta"), torch.randn(SHAPE, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert call(name, module, x).dtype == torch.float32


@modules
@pytest.mark.parametrize("empty_first", [False, True])
def test_reset_parameters(name, empty_first, device):
    torch.manual_seed(1)
    module = MODULES[name](device="meta")
    parameters = dict(module.named_parameters())
    assert all(p.is_meta for p in parameters.values())
    with torch.device(device):
        if empty_first:
            module.to_empty(device=device)
            for p in module.parameters():
                p.data.fill_(float("nan"))
        module.reset_parameters()
    where = device.type if empty_first else current
    for key, p in module.named_parameters():
        assert p.device.type == where
        assert type(p) is torch.nn.Parameter
        assert p.requires_grad
        assert torch.isfinite(p).all()
        if p.dim() == 2:
            assert 0.015 < p.std() < 0.03, key
        else:
            gamma = "norm" in key or name.endswith("Norm")
            assert p.eq(1.0 if gamma and key.endswith("weight") else 0.0).all(), key
    assert torch.isfinite(call(name, module, torch.randn(SHAPE, device=where))).all()


@modules
def test_each_module_resets_its_own(name):
    """As frameworks do: every module that has parameters of its own, one after the other."""
    module = MODULES[name](device="meta")
    for each in module.modules():
        if next(each.parameters(recurse=False), None) is not None:
            each.reset_parameters()
    assert {p.device.type for p in module.parameters()} == {current}
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_stays_where_the_default_device_is_meta():
    with torch.device("meta"):
        module = apex_te.LayerNormLinear(HIDDEN, FFN)
        module.reset_parameters()
    assert all(p.is_meta for p in module.parameters())


def test_attributes_and_frozen_parameters_are_kept():
    parallel = apex_te.Linear(HIDDEN, FFN, parallel_mode="column", device="meta")
    norm = apex_te.LayerNorm(HIDDEN, sequence_parallel=True, device="meta")
    parallel.weight.requires_grad_(False)
    for module in (parallel, norm):
        module.reset_parameters()
    assert not parallel.weight.requires_grad
    assert parallel.weight.tensor_model_parallel
    assert parallel.weight.partition_dim == 0
    assert norm.weight.sequence_parallel
    row = apex_te.Linear(HIDDEN, FFN, parallel_mode="row", device="meta").to_empty(device="cpu")
    assert row.weight.partition_dim == 1
    assert row.bias.partition_dim == -1


@recipes
def test_weights_held_in_fp8(recipe):
    if recipe is None:
        pytest.skip("no FP8")
    with fp8_model_init(recipe=recipe):
        module = apex_te.LayerNormLinear(HIDDEN, FFN, device="meta")
    x = torch.randn(4, HIDDEN, device="meta")
    with fp8_autocast(True, recipe):
        assert module(x).shape == (4, FFN)
    module.reset_parameters()
    assert type(module.weight) is apex_te.parameter.FP8Parameter
    assert module.weight.device.type == current
    assert 0.015 < module.weight.dequantize().std() < 0.03
    with fp8_autocast(True, recipe):
        assert torch.isfinite(module(torch.randn(4, HIDDEN, device=current))).all()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["causal", "padding", "arbitrary"])
def test_attention(dropout, kind):
    module = apex_te.DotProductAttention(4, 8, 2, dropout, attn_mask_type=kind)
    q = torch.randn(5, 2, 4, 8, device="meta", requires_grad=True)
    k = torch.randn(5, 2, 2, 8, device="meta")
    mask = {"causal": None, "padding": (2, 1, 1, 5), "arbitrary": (2, 1, 5, 5)}[kind]
    if mask is not None:
        mask = torch.zeros(mask, dtype=torch.bool, device="meta")
    for more in ({}, {"core_attention_bias_type": "alibi"}, {"checkpoint_core_attention": True}):
        out = module(q, k, k, mask, **more)
        assert out.shape == (5, 2, 32)
        out.sum().backward()
        assert q.grad.shape == q.shape


def test_packed_attention():
    module = apex_te.DotProductAttention(4, 8, qkv_format="thd")
    q = torch.randn(9, 4, 8, device="meta")
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device="meta")
    assert module(q, q, q, cu_seqlens_q=cu, max_seqlen_q=5).shape == (9, 32)
    with pytest.raises(ValueError, match="max_seqlen_q must be given if cu_seqlens_q is on the"):
        module(q, q, q, cu_seqlens_q=cu)


def test_grouped_splits_of_the_device():
    module = apex_te.GroupedLinear(3, HIDDEN, FFN, device="meta")
    splits = torch.tensor([2, 3, 4], device="meta")
    for recipe in (None, CurrentScaling()):
        with fp8_autocast(recipe is not None, recipe):
            assert module(torch.randn(9, HIDDEN, device="meta"), splits).shape == (9, FFN)


def test_refuses_meta_beside_memory():
    module = apex_te.LayerNorm(HIDDEN)
    with pytest.raises(ValueError, match=r"LayerNorm: inp must be on cpu like .*, got meta"):
        module(torch.randn(4, HIDDEN, device="meta"))
