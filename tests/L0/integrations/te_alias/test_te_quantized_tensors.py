"""Types of FP8 weights, and the functions by which a distributed optimizer writes to them."""

import pytest
import torch

import apex_te
from apex_te.integrations.transformer_engine.pytorch import float8_tensor, tensor
from apex_te.integrations.transformer_engine.pytorch.tensor import utils
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling

RECIPES = {
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "pow2": CurrentScaling(pow2=True),
    "block": BlockScaling(),
    "mx": MXFP8Scaling(),
}
TYPES = {
    "delayed": tensor.Float8Tensor,
    "current": tensor.Float8Tensor,
    "pow2": tensor.Float8Tensor,
    "block": tensor.Float8BlockwiseQTensor,
    "mx": tensor.MXFP8Tensor,
}
ALL = (
    tensor.Float8Tensor,
    tensor.Float8BlockwiseQTensor,
    tensor.MXFP8Tensor,
    tensor.NVFP4Tensor,
    tensor.GroupedTensor,
)


def weight(recipe, shape=(160, 192), dtype=torch.bfloat16):
    with apex_te.fp8_model_init(recipe=recipe):
        return apex_te.Linear(shape[1], shape[0], bias=False, params_dtype=dtype).weight


def same(a, b):
    """Returns True if two weights hold equal FP8 data and scales."""
    mine, theirs = a._held, b._held
    return torch.equal(
        mine.rowwise.view(torch.uint8), theirs.rowwise.view(torch.uint8)
    ) and torch.equal(
        mine.rowwise_scale_inv.view(torch.uint8), theirs.rowwise_scale_inv.view(torch.uint8)
    )


@pytest.mark.parametrize("name", RECIPES)
def test_types_follow_the_recipe(name):
    param = weight(RECIPES[name])
    assert isinstance(param, tensor.QuantizedTensor)
    assert isinstance(param.detach(), tensor.QuantizedTensor)
    assert [kind for kind in ALL if isinstance(param, kind)] == [TYPES[name]]
    for kind in (tensor.QuantizedTensor, *ALL):
        assert not isinstance(torch.ones(2), kind)
        assert not isinstance(param.dequantize(), kind)
        assert kind.__module__.startswith("transformer_engine.pytorch.")
        with pytest.raises(NotImplementedError, match=kind.__name__):
            kind(torch.ones(2))
    assert issubclass(type(param), tensor.QuantizedTensor)
    assert not issubclass(torch.Tensor, tensor.QuantizedTensor)
    assert float8_tensor.Float8Tensor is tensor.Float8Tensor


@pytest.mark.parametrize("name", RECIPES)
def test_data_move_into_a_buffer(name):
    param = weight(RECIPES[name])
    before = param.dequantize()
    buffer = torch.zeros(param.numel() + 32, dtype=torch.uint8)
    part = buffer[16 : 16 + param.numel()]
    utils.replace_raw_data(param, part.view(param.shape))
    assert torch.equal(param.dequantize(), before)
    assert param.data_ptr() == part.data_ptr()
    assert buffer[:16].sum() == buffer[-16:].sum() == 0
    param.data.copy_(2 * before)  # written through every alias
    assert torch.equal(param.dequantize(), 2 * before)
    part.zero_()
    assert not param.dequantize().any()


def test_wrong_buffers():
    param = weight(CurrentScaling())
    with pytest.raises(TypeError, match="data must be uint8"):
        utils.replace_raw_data(param, torch.zeros(param.shape))
    with pytest.raises(ValueError, match="data must be 30720 contiguous elements"):
        utils.replace_raw_data(param, torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(TypeError, match="weight must be an FP8Parameter"):
        utils.replace_raw_data(torch.ones(2), torch.zeros(2, dtype=torch.uint8))


def test_post_processing_frees_the_columnwise_copy():
    param = weight(CurrentScaling())
    param._held.columnwise, param._held.columnwise_scale_inv = param._transposed()
    version = param._version
    utils.post_all_gather_processing([param])
    assert param._held.columnwise is None
    assert param._version > version
    utils.post_all_gather_processing(param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_one_rank_with_the_whole_master_weight(name, dtype):
    param, other = weight(RECIPES[name], dtype=dtype), weight(RECIPES[name], dtype=dtype)
    master = torch.randn(param.shape)
    utils.cast_master_weights_to_fp8([param], [master.view(-1)], [0], None)
    with torch.no_grad():
        other.copy_(master.to(dtype))
    assert same(param, other)


@pytest.mark.parametrize("cuts", [(1000, 30720), (128 * 192, 128 * 192), (0, 30720), (777, 30001)])
@pytest.mark.parametrize("name", RECIPES)
def test_parts_of_two_ranks_make_the_whole(monkeypatch, name, cuts):
    """Ranks one after the other in this process, each with the other's amaxes."""
    from apex_te.fp8.parameter import sharded_write

    recipe = RECIPES[name]
    masters = [torch.randn(160, 192) * 3, torch.randn(160, 192) / 7]
    masters[0][100, 50] = 91.0
    whole = [weight(recipe) for _ in masters]
    with torch.no_grad():
        for param, master in zip(whole, masters, strict=True):
            param.copy_(master.bfloat16())

    def parts(rank):
        spans = [(0, cuts[0]), (cuts[0], cuts[1])] if rank == 0 else [(cuts[0], 30720), None]
        # The second weight's part of rank 1 is what rank 0 does not have of it.
        spans = [spans[0], (0, cuts[1])] if rank == 0 else [spans[0], (cuts[1], 30720)]
        flat = [master.view(-1)[a:b] for master, (a, b) in zip(masters, spans, strict=True)]
        return (
            [part if part.numel() else None for part in flat],
            [a if b > a else None for a, b in spans],
        )

    amaxes = []
    monkeypatch.setattr(sharded_write, "world_size", lambda group: 2)
    monkeypatch.setattr(sharded_write, "max_over_ranks", lambda t, group: amaxes.append(t.clone()))
    for rank in range(2):
        utils.quantize_master_weights([weight(recipe), weight(recipe)], *parts(rank), None)
    common = torch.maximum(*amaxes)
    monkeypatch.setattr(sharded_write, "max_over_ranks", lambda t, group: t.copy_(common))
    ranks = []
    for rank in range(2):
        params = [weight(recipe), weight(recipe)]
        for param in params:
            param._held.rowwise.view(torch.uint8).zero_()
        utils.quantize_master_weights(params, *parts(rank), None)
        ranks.append(params)
    for first, second, wanted in zip(*ranks, whole, strict=True):
        # Each has written its own part, and left the rest, zero, alone.
        mine, theirs = (p._held.rowwise.view(torch.uint8) for p in (first, second))
        assert not ((mine != 0) & (theirs != 0)).any()
        gathered = mine | theirs
        assert torch.equal(gathered, wanted._held.rowwise.view(torch.uint8))
        for param in (first, second):
            found, scales = (p._held.rowwise_scale_inv.view(torch.uint8) for p in (param, wanted))
            assert torch.equal(found, scales)


def test_wrong_parts():
    param = weight(CurrentScaling())
    with pytest.raises(ValueError, match="starts must be from 0 to 30710"):
        utils.quantize_master_weights([param], [torch.ones(10)], [30711], None)
    with pytest.raises(NotImplementedError, match="fsdp_shard_model_weights"):
        utils.quantize_master_weights([param], [None], [None], None, [torch.ones(1)])
    with pytest.raises(TypeError, match="weight must be an FP8Parameter"):
        utils.quantize_master_weights([torch.ones(4)], [torch.ones(4)], [0], None)


def test_initial_values_are_freed():
    with apex_te.fp8_model_init(recipe=CurrentScaling(), preserve_high_precision_init_val=True):
        param = apex_te.Linear(32, 32).weight
    assert param.get_high_precision_init_val() is not None
    utils.cast_master_weights_to_fp8([param], [torch.randn(1024)], [0], None, None, True)
    assert not hasattr(param, "get_high_precision_init_val")


@pytest.mark.parametrize("name", ["Quantizer", "QuantizedTensorStorage", "Float8Quantizer"])
def test_quantizers_are_named_only(name):
    with pytest.raises(NotImplementedError, match=name):
        getattr(tensor, name)()
