"""Layers by Megatron's and MindSpeed's names, in one process."""

import copy
import enum
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import apex_te
from apex_te import CudaRNGStatesTracker, GroupedLinear, fp8_autocast
from apex_te.integrations import megatron
from apex_te.integrations.megatron import (
    MindSpeedTEColumnParallelGroupedLinear,
    MindSpeedTEGroupedLinear,
    MindSpeedTELayernorm,
    MindSpeedTELayerNormColumnParallelLinear,
    MindSpeedTERowParallelGroupedLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from apex_te.integrations.megatron._config import DEFAULTS
from apex_te.recipe import BlockScaling, CurrentScaling, make_recipe

IN, OUT = 32, 48
COLUMN = {"gather_output": False, "bias": True, "skip_bias_add": False}
ROW = {"input_is_parallel": True, "bias": True, "skip_bias_add": False}
GROUPED = {"bias": False, "skip_bias_add": False, "is_expert": True}
LINEAR = {
    "column": (TEColumnParallelLinear, COLUMN),
    "row": (TERowParallelLinear, ROW),
    "norm": (MindSpeedTELayerNormColumnParallelLinear, COLUMN),
}


def make(name, config=None, **options):
    kind, needed = LINEAR[name]
    config = SimpleNamespace() if config is None else config
    return kind(IN, OUT, **{"config": config, "init_method": None, **needed, **options})


def group_of(kind, config=None, sizes=(2, IN, OUT), **options):
    config = SimpleNamespace() if config is None else config
    return kind(*sizes, **{"config": config, "init_method": None, **GROUPED, **options})


def inputs(layer, *shape):
    """Random values where ``layer`` is: on the current GPU, if there is one, as Megatron's are."""
    return torch.randn(shape, device=next(layer.parameters()).device)


def plain(layer, x):
    if hasattr(layer, "layer_norm_weight"):
        x = functional.layer_norm(
            x, (IN,), layer.layer_norm_weight, layer.layer_norm_bias, layer.eps
        )
    return functional.linear(x, layer.weight)


def test_signatures():
    """The keywords by which Megatron and MindSpeed call these, in their order."""
    shared = ["input_size", "output_size", "config", "init_method"]
    end = ["tp_comm_buffer_name", "tp_group"]
    column = ["gather_output", "bias", "skip_bias_add", "is_expert", "skip_weight_param_allocation"]
    row = ["bias", "input_is_parallel", "skip_bias_add", "is_expert"]
    grouped = ["bias", "skip_bias_add", "is_expert", *end, "pg_collection"]
    expected = {
        TEColumnParallelLinear: [*shared, *column, *end, "stride"],
        MindSpeedTELayerNormColumnParallelLinear: [*shared, *column, *end, "stride"],
        TERowParallelLinear: [*shared, *row, *end, "stride"],
        MindSpeedTEGroupedLinear: [
            "num_gemms", *shared[:2], "parallel_mode", *shared[2:], *grouped,
        ],
        MindSpeedTEColumnParallelGroupedLinear: ["num_gemms", *shared, *grouped],
        MindSpeedTERowParallelGroupedLinear: ["num_gemms", *shared, *grouped],
    }  # fmt: skip
    for kind, names in expected.items():
        assert list(inspect.signature(kind).parameters) == names
    assert TELayerNormColumnParallelLinear is MindSpeedTELayerNormColumnParallelLinear


@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_results_are_pairs(name, bias, skip_bias_add):
    layer = make(name, bias=bias, skip_bias_add=skip_bias_add)
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = inputs(layer, 6, 2, IN)
    out, returned = layer(x)
    expected = plain(layer, x)
    if bias and not skip_bias_add:
        expected = expected + layer.bias
    torch.testing.assert_close(out, expected)
    if bias and skip_bias_add:
        assert torch.equal(returned, layer.bias)
    else:
        assert returned is None


@pytest.mark.parametrize("name", LINEAR)
def test_in_fp8(name):
    layer = make(name, bias=False)
    x = inputs(layer, 16, IN)
    with fp8_autocast(True, CurrentScaling()):
        out = layer(x)[0]
    exact = plain(layer, x)
    assert not torch.equal(out, exact)
    noise = (out - exact).square().mean() / exact.square().mean()
    assert noise < 10**-2.5


def test_parameters_and_what_is_read_of_config():
    config = SimpleNamespace(
        params_dtype=torch.bfloat16, normalization="RMSNorm", layernorm_epsilon=1e-3,
        layernorm_zero_centered_gamma=True, gradient_accumulation_fusion=True,
        delay_wgrad_compute=True, init_method=lambda w: w.fill_(0.5),
    )  # fmt: skip
    layer = make("norm", config)
    assert {k: v.dtype for k, v in layer.named_parameters()} == dict.fromkeys(
        ("layer_norm_weight", "weight", "bias"), torch.bfloat16
    )
    assert layer.layer_norm_bias is None
    assert (layer.eps, layer.zero_centered_gamma) == (1e-3, True)
    assert layer.fuse_wgrad_accumulation
    assert layer.delay_wgrad_compute
    assert (layer.weight == 0.5).all()
    assert (make("row", config, init_method=lambda w: w.fill_(2.0)).weight == 2.0).all()
    given = SimpleNamespace(**DEFAULTS)
    for name in LINEAR:  # absent is the same as the default
        torch.manual_seed(5)
        first = make(name, given)
        torch.manual_seed(5)
        for key, value in make(name).state_dict().items():
            assert torch.equal(value, first.state_dict()[key])


def test_new_weights():
    torch.manual_seed(1)
    assert 0.018 < make("column").weight.std() < 0.028
    meta = make("column", SimpleNamespace(init_model_with_meta_device=True))
    assert meta.weight.is_meta
    meta.to_empty(device="cpu").reset_parameters()
    assert 0.018 < meta.weight.std() < 0.028
    calls = []
    make("row", SimpleNamespace(perform_initialization=False), init_method=calls.append)
    assert calls == []


def test_split_sizes_and_attributes():
    """Two ranks, no group yet: sizes and attributes are there before any process group is."""
    config = SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=True)
    found = {}
    for name in LINEAR:
        for key, p in make(name, config).named_parameters():
            found[name, key] = (
                tuple(p.shape), p.tensor_model_parallel, p.partition_dim, p.partition_stride,
                p.sequence_parallel, p.allreduce,
            )  # fmt: skip
    split, whole = (True, 0, 1, False, True), (False, -1, 1, True, True)
    assert found == {
        ("column", "weight"): ((OUT // 2, IN), *split),
        ("column", "bias"): ((OUT // 2,), *split),
        ("row", "weight"): ((OUT, IN // 2), True, 1, 1, False, True),
        ("row", "bias"): ((OUT,), *whole),
        ("norm", "layer_norm_weight"): ((IN,), *whole),
        ("norm", "layer_norm_bias"): ((IN,), *whole),
        ("norm", "weight"): ((OUT // 2, IN), *split),
        ("norm", "bias"): ((OUT // 2,), *split),
    }
    with pytest.raises(ValueError, match="set_tensor_parallel_group must be called before forward"):
        make("column", config)(torch.randn(4, IN))
    with pytest.raises(ValueError, match="set_tensor_parallel_group must be called before sharded"):
        make("column", config).sharded_state_dict()


def test_experts():
    config = SimpleNamespace(
        tensor_model_parallel_size=4, expert_tensor_parallel_size=2, sequence_parallel=True,
        expert_model_parallel_size=2,
    )  # fmt: skip
    column = make("column", config, is_expert=True)
    row = make("row", config, is_expert=True, bias=False)
    assert tuple(column.weight.shape) == (OUT // 2, IN)
    assert tuple(row.weight.shape) == (OUT, IN // 2)
    for layer, dim in ((column, 0), (row, 1)):
        assert (layer.parallel_mode, layer.tp_size, layer.sequence_parallel) == (None, 1, False)
        assert layer.weight.partition_dim == dim
        assert layer.weight.tensor_model_parallel
        assert not any(p.allreduce for p in layer.parameters())
    x = inputs(column, 4, IN)  # no collective, so no group is needed
    torch.testing.assert_close(column(x)[0], plain(column, x))
    with pytest.raises(NotImplementedError, match="bias must be False or skip_bias_add True"):
        make("row", config, is_expert=True)
    with pytest.raises(NotImplementedError, match="sharded_state_dict must be of layers that all"):
        column.sharded_state_dict()
    config.expert_model_parallel_size = 1
    assert make("column", config, is_expert=True).weight.allreduce
    config.expert_tensor_parallel_size = None
    assert tuple(make("column", config, is_expert=True).weight.shape) == (OUT // 4, IN)


def test_trackers():
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    tracker.add("expert-parallel-rng", 4)
    config = SimpleNamespace(tensor_model_parallel_size=2, get_rng_state_tracker=lambda: tracker)
    before = torch.get_rng_state()
    weights = [make("column", config, is_expert=expert).weight for expert in (False, True)]
    weights.append(group_of(MindSpeedTEColumnParallelGroupedLinear, config).weight0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])  # the next draw of the same sequence


@pytest.mark.parametrize("kind", [MindSpeedTEGroupedLinear, MindSpeedTEColumnParallelGroupedLinear])
def test_grouped(kind):
    options = {"parallel_mode": None} if kind is MindSpeedTEGroupedLinear else {}
    torch.manual_seed(2)
    layer = group_of(kind, sizes=(3, IN, OUT), **options)
    assert [k for k, _ in layer.named_parameters()] == ["weight0", "weight1", "weight2"]
    other = GroupedLinear(3, IN, OUT, False, device=layer.weight0.device)
    other.load_state_dict(layer.state_dict())
    x, splits = inputs(layer, 10, IN), [4, 0, 6]
    for recipe in (None, CurrentScaling(), make_recipe("tensorwise", "hif8")):
        with fp8_autocast(recipe is not None, recipe):
            out, bias = layer(x, splits)
            assert bias is None
            assert torch.equal(out, other(x, splits))


def test_grouped_and_block_scaling():
    layer = group_of(MindSpeedTERowParallelGroupedLinear)
    x = inputs(layer, 8, IN)
    with (
        fp8_autocast(True, BlockScaling()),
        pytest.raises(NotImplementedError, match="fp8_recipe must be another than block scaling"),
    ):
        layer(x, [4, 4])
    config = SimpleNamespace(fp8="e4m3", fp8_recipe="blockwise")
    with pytest.raises(
        NotImplementedError, match=r"config\.fp8_recipe must be delayed, tensorwise"
    ):
        group_of(MindSpeedTERowParallelGroupedLinear, config)
    config.use_gmm_fp8 = False
    layer = group_of(MindSpeedTERowParallelGroupedLinear, config)
    exact = layer(x, [4, 4])[0]
    with fp8_autocast(True, BlockScaling()):
        assert torch.equal(layer(x, [4, 4])[0], exact)


def test_grouped_over_ranks():
    config = SimpleNamespace(tensor_model_parallel_size=2, expert_model_parallel_size=4)
    column = group_of(MindSpeedTEColumnParallelGroupedLinear, config)
    row = group_of(MindSpeedTERowParallelGroupedLinear, config, is_expert=False)
    assert tuple(column.weight1.shape) == (OUT // 2, IN)
    assert tuple(row.weight1.shape) == (OUT, IN // 2)
    assert (column.weight1.partition_dim, column.weight1.allreduce) == (0, False)
    assert (row.weight1.partition_dim, row.weight1.allreduce) == (1, True)
    assert row.sharded_axes == {"weight0": 1, "weight1": 1}
    with pytest.raises(NotImplementedError, match="sharded_state_dict must be of layers that all"):
        column.sharded_state_dict()


def test_layernorm():
    norm = MindSpeedTELayernorm(IN, 1e-3, True)
    assert [p.sequence_parallel for p in norm.parameters()] == [True, True]
    x = inputs(norm, 4, IN)
    torch.testing.assert_close(norm(x), functional.layer_norm(x, (IN,), eps=1e-3))
    config = SimpleNamespace(params_dtype=torch.bfloat16)
    assert MindSpeedTELayernorm(hidden_size=IN, config=config).weight.dtype is torch.bfloat16
    with pytest.raises(NotImplementedError, match="zero_centered_gamma must be False, got True"):
        MindSpeedTELayernorm(IN, zero_centered_gamma=True)
    with pytest.raises(TypeError, match="elementwise_affine"):
        MindSpeedTELayernorm(IN, elementwise_affine=False)


def test_first_microbatch():
    """With the cache, a loop that sets the attribute decides when weights are quantized."""
    layer = make("column", SimpleNamespace(disable_parameter_transpose_cache=False))
    x = inputs(layer, 16, IN)
    with fp8_autocast(True, CurrentScaling()):
        first = layer(x)[0]
        assert not layer.is_first_microbatch
        kept = layer._modes.weight_cache[0][1]
        assert torch.equal(layer(x)[0], first)
        assert layer._modes.weight_cache[0][1] is kept
        layer.is_first_microbatch = True
        layer(x)
        assert layer._modes.weight_cache[0][1] is not kept
        plainer = make("column")
        plainer(x)
        assert not plainer._modes.weight_cache


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("column", {"gather_output": True}, NotImplementedError, "gather_output must be False"),
        ("norm", {"gather_output": True}, NotImplementedError, "gather_output must be False"),
        ("norm", {"is_expert": True}, NotImplementedError, "is_expert must be False, got True"),
        (
            "norm",
            {"skip_weight_param_allocation": True},
            NotImplementedError,
            "skip_weight_param_allocation must be False",
        ),
        (
            "column",
            {"skip_weight_param_allocation": True},
            NotImplementedError,
            "skip_weight_param_allocation must be False",
        ),
        ("column", {"stride": 2}, NotImplementedError, "stride must be 1, got 2"),
        ("row", {"input_is_parallel": False}, NotImplementedError, "input_is_parallel must be Tr"),
        ("row", {"gather_output": False}, TypeError, "unexpected keyword argument 'gather_output'"),
        ("column", {"ub_name": "qkv"}, TypeError, "unexpected keyword argument 'ub_name'"),
        ("column", {"bias": None}, TypeError, "bias must be a bool, got NoneType"),
        ("column", {"config": {}}, TypeError, "config must be an object with attributes, got dict"),
        ("column", {"init_method": 3}, TypeError, "init_method must be a callable, got int"),
        ("column", {"tp_group": 3}, TypeError, "tp_group must be a torch.distributed.ProcessGroup"),
        (
            "column",
            {"config": SimpleNamespace(tensor_model_parallel_size=5)},
            ValueError,
            "out_features must be a multiple of the 5 tensor-parallel ranks, got 48",
        ),
        (
            "norm",
            {"config": SimpleNamespace(normalization="GroupNorm")},
            ValueError,
            "normalization must be one of LayerNorm, RMSNorm",
        ),
        (
            "row",
            {"config": SimpleNamespace(fp8="hif8", fp8_recipe="delayed")},
            ValueError,
            "config.fp8 and config.fp8_recipe must go together",
        ),
    ],
)
def test_rejects(name, options, error, message):
    with pytest.raises(error, match=message):
        make(name, **options)


def test_grouped_rejects():
    with pytest.raises(NotImplementedError, match="bias must be False, got True"):
        group_of(MindSpeedTEColumnParallelGroupedLinear, bias=True)
    with pytest.raises(TypeError, match="parallel_mode"):
        group_of(MindSpeedTEColumnParallelGroupedLinear, parallel_mode="row")
    with pytest.raises(TypeError, match="unexpected keyword argument 'fused'"):
        group_of(MindSpeedTEColumnParallelGroupedLinear, fused=True)


class Names(str, enum.Enum):
    """As Megatron keeps the names of recipes."""

    tensorwise = "tensorwise"
    delayed = "delayed"


@pytest.mark.parametrize("fp8", ["e4m3", "hybrid", "hif8"])
def test_formats_of_config(fp8):
    config = SimpleNamespace(fp8=fp8, fp8_recipe=Names.tensorwise)
    make("column", config)
    config.fp8_recipe = Names.delayed
    if fp8 == "hif8":
        wrong = """make_recipe.'delayed'.: fp8_format must be "hybrid" or "e4m3", got 'hif8'"""
        with pytest.raises(ValueError, match=wrong):
            make("column", config)
    else:
        make("column", config)


@pytest.mark.parametrize("name", LINEAR)
def test_copies(name):
    layer = make(name)
    x = inputs(layer, 4, IN)
    assert torch.equal(copy.deepcopy(layer)(x)[0], layer(x)[0])


def test_documented_names():
    """MindSpeed's documentation leaves the prefix out, and has apex_te's paddings."""
    assert megatron.TELayernorm is megatron.MindSpeedTELayernorm
    assert megatron.TEGroupedLinear is megatron.MindSpeedTEGroupedLinear
    assert megatron.Fp8Padding is apex_te.Fp8Padding
    assert megatron.Fp8Unpadding is apex_te.Fp8Unpadding
    with pytest.raises(TypeError, match="normalized_shape must be an int or several ints, got nam"):
        megatron.MindSpeedTELayernorm(SimpleNamespace(), 32)
