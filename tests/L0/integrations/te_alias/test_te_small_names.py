"""Constants, small functions, permutation and named operations of Transformer Engine's modules."""

import pytest
import torch

import apex_te
from apex_te.integrations.transformer_engine.pytorch import constants, ops, permutation, utils
from apex_te.integrations.transformer_engine.pytorch.ops import op


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


@pytest.mark.parametrize("name", ops.__all__)
def test_operations_are_named_only(name):
    made = getattr(ops, name)
    assert isinstance(made, type)
    assert made.__module__.startswith("transformer_engine.pytorch.ops")
    with pytest.raises(NotImplementedError, match=rf"transformer_engine.pytorch.ops.*{name}"):
        made(4)


def test_operations_are_modules_for_annotations():
    assert issubclass(ops.Linear, op.FusibleOperation)
    assert issubclass(op.FusibleOperation, torch.nn.Module)
    assert issubclass(ops.Sequential, torch.nn.Module)
    assert not isinstance(torch.nn.Linear(2, 2), ops.Linear)
