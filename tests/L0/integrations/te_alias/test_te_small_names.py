"""Constants, small functions, permutation and named operations of Transformer Engine's modules."""

import pytest
import torch

import apex_te
from apex_te.integrations.transformer_engine import pytorch as te
from apex_te.integrations.transformer_engine.pytorch import constants, ops, permutation, utils
from apex_te.integrations.transformer_engine.pytorch.ops import op
from apex_te.integrations.transformer_engine.pytorch.ops.basic.l2normalization import (
    L2Normalization,
)
from apex_te.recipe import DelayedScaling


def test_dtype_numbers():
    assert constants.TE_DType[torch.bfloat16] == 6
    assert constants.TE_DType[torch.float8_e4m3fn] is constants.DType.kFloat8E4M3
    for dtype, number in constants.TE_DType.items():
        assert constants.TE_DType_To_Torch[number] is dtype
    assert "padding_causal_bottom_right" in constants.AttnMaskTypes
    assert constants.AttnTypes == ("self", "cross")
    assert "alibi" in constants.AttnBiasTypes
    assert constants.LayerTypes == ("encoder", "decoder")
    assert constants.dist_group_type is torch.distributed.ProcessGroup


def test_divide():
    assert utils.divide(12, 4) == 3
    with pytest.raises(ValueError, match="divide: numerator must be a multiple of 5, got 12"):
        utils.divide(12, 5)


def test_cast_if_needed():
    x = torch.ones(3)
    assert utils.cast_if_needed(x, torch.float32) is x
    assert utils.cast_if_needed(x, torch.float16).dtype is torch.float16
    assert utils.cast_if_needed(None, torch.float16) is None


def test_default_init_method():
    weight = torch.empty(400, 400)
    assert utils.get_default_init_method()(weight) is weight
    assert abs(float(weight.mean())) < 1e-3
    assert float(weight.std()) == pytest.approx(0.023, rel=0.02)


def test_device_answers():
    capability = utils.get_device_compute_capability()
    assert len(capability) == 2
    assert (capability == (0, 0)) is not torch.cuda.is_available()
    assert utils.is_bf16_available() is True
    assert utils.is_bf16_available(True) == (True, "")
    utils.nvtx_range_push("range")
    utils.nvtx_range_pop("range")


def test_weak_references_share_memory_only(device):
    x = torch.arange(24.0, device=device).view(4, 6)[1:, ::2]
    made = utils.make_weak_ref({"a": [x, 3], "b": (x,)})
    for view in (made["a"][0], made["b"][0]):
        assert torch.equal(view, x)
        assert view.data_ptr() == x.data_ptr()
        assert view.stride() == x.stride()
    assert made["a"][1] == 3
    x.fill_(5.0)
    assert (made["b"][0] == 5).all()


@pytest.mark.parametrize("sizes", [2, [1, 4], (3, 2)])
def test_split_along_a_dimension(sizes):
    x = torch.randn(3, 5, 4, requires_grad=True)
    parts = utils.SplitAlongDim.apply(x, 1, sizes)
    expected = torch.split(x, sizes if isinstance(sizes, int) else list(sizes), 1)
    for part, wanted in zip(parts, expected, strict=True):
        assert torch.equal(part, wanted)
    grads = [torch.randn_like(part) for part in parts]
    torch.autograd.backward(parts, grads)
    assert torch.equal(x.grad, torch.cat(grads, 1))


def test_split_and_squeeze():
    parts = utils.SplitAlongDim.apply(torch.randn(3, 2, 4), 1, 1, True)
    assert [tuple(part.shape) for part in parts] == [(3, 4), (3, 4)]


def test_unpermute_takes_probs_by_both_names():
    tokens, probs = torch.randn(5, 8), torch.rand(5, 3)
    routing = torch.rand(5, 3) > 0.4
    out, row_id_map = permutation.moe_permute(tokens, routing, int(routing.sum()))
    expected = apex_te.permutation.moe_unpermute(out, row_id_map, probs)
    assert torch.equal(permutation.moe_unpermute(out, row_id_map, probs), expected)
    assert torch.equal(permutation.moe_unpermute(out, row_id_map, probs=probs), expected)
    assert torch.equal(
        permutation.moe_unpermute(out, row_id_map, probs, tokens.shape, "mask"), expected
    )
    with pytest.raises(TypeError, match="probs must be None beside merging_probs"):
        permutation.moe_unpermute(out, row_id_map, probs, probs=probs)


def test_the_other_permutations_are_apex_te_s():
    for name in permutation.__all__:
        if name != "moe_unpermute":
            assert getattr(permutation, name) is getattr(apex_te.permutation, name)


@pytest.mark.parametrize("name", [name for name in ops.__all__ if name != "L2Normalization"])
def test_operations_are_named_only(name):
    made = getattr(ops, name)
    assert isinstance(made, type) or name.startswith("register_")
    assert made.__module__.startswith("transformer_engine.pytorch.ops")
    with pytest.raises(NotImplementedError, match=rf"transformer_engine.pytorch.ops.*{name}"):
        made(4)


def test_operations_are_modules_for_annotations():
    assert issubclass(ops.Linear, op.FusibleOperation)
    assert issubclass(op.FusibleOperation, torch.nn.Module)
    assert issubclass(ops.Sequential, torch.nn.Module)
    assert not isinstance(torch.nn.Linear(2, 2), ops.Linear)


def test_init_methods():
    """Normal with a standard deviation, divided by sqrt(2 layers), and constant."""
    weight = torch.empty(400, 400)
    assert utils.init_method_normal(0.5)(weight) is weight
    assert float(weight.std()) == pytest.approx(0.5, rel=0.02)
    utils.scaled_init_method_normal(0.5, 8)(weight)
    assert float(weight.std()) == pytest.approx(0.125, rel=0.02)
    assert utils.init_method_constant(2.0)(weight).unique().tolist() == [2.0]


def test_attention_mask_func_writes_in_place():
    scores = torch.zeros(1, 1, 2, 2)
    mask = torch.tensor([[[[False, True], [False, False]]]])
    assert utils.attention_mask_func(scores, mask) is scores
    assert scores.flatten().tolist() == [0.0, -10000.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("version", "expected"), [(8907, (8, 9, 7)), (91002, (9, 10, 2)), (None, (0, 0, 0))]
)
def test_cudnn_version(version, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert utils.get_cudnn_version() == te.get_cudnn_version() == expected


def test_blocks_of_gated_weights_go_there_and_back():
    weight = torch.arange(8)[:, None].expand(8, 3)
    mixed = utils.interleave_glu_tensor(weight, 2)
    assert mixed[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert torch.equal(utils.deinterleave_glu_tensor(mixed, 2), weight)
    with pytest.raises(ValueError, match="interleave_size must be above 0, and twice it divide"):
        utils.interleave_glu_tensor(weight, 3)


def test_numbers_of_scales_and_dtypes():
    assert te.DType is constants.DType
    assert te.DType.cast(7) is te.DType.kFloat8E4M3
    assert vars(constants.FP8FwdTensorIdx)["GEMM2_WEIGHT"] == 4
    assert constants.FP8BwdTensorIdx.GRAD_OUTPUT2 == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_l2_normalization(dtype):
    """``x / sqrt(sum(x ** 2) + eps)``, with its gradient."""
    x = torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)
    out = L2Normalization(eps=0.1, seq_length=5, micro_batch_size=3)(x)
    expected = x.double() / (x.double().square().sum(-1, keepdim=True) + 0.1).sqrt()
    grad = torch.randn(3, 5, 16, dtype=dtype)
    got = torch.autograd.grad(out, x, grad, retain_graph=True)[0]
    want = torch.autograd.grad(expected, x, grad.double())[0]
    # The gradient is a difference of terms that bfloat16 has rounded.
    tolerance = {"rtol": 1e-5, "atol": 1e-6 if dtype is torch.float32 else 4e-3}
    if dtype is torch.bfloat16:
        tolerance["rtol"] = 2e-2
    torch.testing.assert_close(out, expected.to(dtype), **tolerance)
    torch.testing.assert_close(got, want.to(dtype), **tolerance)


def test_tensors_saved_and_restored():
    x, y = torch.ones(2), torch.zeros(3)
    tensors, objects = te.prepare_for_saving(x, None)
    restored, rest = te.restore_from_saved(objects, (*tensors, y), return_saved_tensors=True)
    assert restored[0] is x
    assert restored[1] is None
    assert rest[0] is y


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8", "blockwise"])
def test_storage_types_recognise_fp8_weights(recipe):
    with apex_te.fp8_model_init(recipe=recipe):
        weight = apex_te.Linear(32, 32, device="cpu").weight
    types = ("Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor")
    for name in types:
        storage = getattr(te, f"{name}Storage")
        assert isinstance(weight, storage) is isinstance(weight, getattr(te, name))


def test_the_translation_table_is_read_only():
    """torch.onnx.export takes it; there is nothing to translate, and nothing can be added."""
    assert dict(te.export.te_translation_table) == {}
    with pytest.raises(TypeError):
        te.export.te_translation_table["op"] = None


def test_scales_are_served_to_be_read():
    """``fp8_meta`` has copies of the scales and amaxes of delayed scaling."""
    module = te.LayerNormMLP(32, 32, device="cpu")
    assert "scaling_fwd" not in module.fp8_meta
    for factor in (1.0, 4.0):
        with apex_te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
            module(torch.full((16, 32), factor)).sum().backward()
    state, meta = module.fp8_state, module.fp8_meta
    for direction, count in (("fwd", 6), ("bwd", 4)):
        scaling = meta[f"scaling_{direction}"]
        assert scaling.scale.shape == scaling.scale_inv.shape == (count,)
        assert scaling.amax_history.shape[1] == count
        assert torch.equal(scaling.scale, getattr(state, f"scale_{direction}"))
        torch.testing.assert_close(scaling.scale * scaling.scale_inv, torch.ones(count))
        scaling.scale.zero_()
        assert torch.equal(scaling.scale, getattr(state, f"scale_{direction}"))
        with pytest.raises(AttributeError):
            scaling.scale = torch.ones(count)
    weight = constants.FP8FwdTensorIdx.GEMM2_WEIGHT
    assert float(meta["scaling_fwd"].scale[weight]) != 1.0
    assert "scaling_fwd" not in te.LayerNorm(32, device="cpu").fp8_meta


def test_grouped_linear_without_grouped_tensors():
    te.GroupedLinear(2, 16, 16, use_grouped_tensor=False, device="cpu")
    with pytest.raises(NotImplementedError, match="use_grouped_tensor must be None or False"):
        te.GroupedLinear(2, 16, 16, use_grouped_tensor=True, device="cpu")
