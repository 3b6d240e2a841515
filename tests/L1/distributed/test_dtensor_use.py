"""DTensor parameters: checkpoints, fully_shard over another dimension, what is refused."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dtensor_cases import (
    FFN,
    HEADS,
    HIDDEN,
    RECIPES,
    against_one_rank,
    batches,
    decibels,
    parallelized,
    step,
    tp_mesh,
    whole_module,
)
from on_rank import all_equal, assert_same, recorded, told
from shards import rows
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init
from apex_te.distributed.dtensor.parallel_styles import (
    ColumnParallel,
    LayerParallel,
    Replicated,
    RowParallel,
)
from apex_te.distributed.fsdp import enable_fp8_all_gather
from apex_te.recipe import CurrentScaling


@pytest.mark.parametrize("name", ["pair", "gated", "mlp"])
def test_equals_one_rank_on_four(four_ranks, name):
    for found in four_ranks.run(against_one_rank, name, True, None, 1):
        assert min(found.values()) > 100, found


def _trained(rank, path):
    """TP 2, two replicas of it, in FP8: saved, and what the whole values are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    part = parallelized(whole_module("post-norm"), "post-norm", True, mesh)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for x, dy in batches(2):
        x, dy = (rows(t, mesh.get_local_rank(), 2) for t in (x, dy))
        step(part, x, dy, RECIPES["delayed"], optimizer)
    flush_fp8_state()
    state = part.state_dict()
    dcp.save(state, checkpoint_id=path)
    return _full(state)


def _full(state):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in state.items()}


def _loaded(rank, path, size):
    """On ``size`` of four ranks, from other values; 1: a module that never was parallel."""
    part = whole_module("post-norm")
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.zero_()
    if size > 1:
        mesh = init_device_mesh("cpu", (4 // size, size), mesh_dim_names=("dp", "tp"))
        part = parallelized(part, "post-norm", True, mesh["tp"])
    apex_te.init_fp8_state(part, RECIPES["delayed"])
    state = part.state_dict()
    dcp.load(state, checkpoint_id=path)
    part.load_state_dict(state)
    return _full(part.state_dict())


def test_checkpoints_move_between_sizes(four_ranks, tmp_path):
    saved = four_ranks.run(_trained, str(tmp_path))[0]
    for size in (1, 2, 4):
        for found in four_ranks.run(_loaded, str(tmp_path), size):
            assert_same(found, saved)


def _averaged(module, group):
    """What data parallelism makes of the gradients."""
    for parameter in module.parameters():
        grad = parameter.grad.to_local()
        distributed.all_reduce(grad, group=group)
        grad /= distributed.get_world_size(group)


def _two_dimensions(rank, name, recipe):
    """2 x 2, each half of the data on two ranks: against the same without fully_shard, and in
    fp32 against the whole module on all of the data.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = whole_module(name)
    other = parallelized(whole, name, True, mesh["tp"])
    part = parallelized(whole, name, True, mesh["tp"])
    for child in part.children():
        fully_shard(child, mesh=mesh["dp"])
    fully_shard(part, mesh=mesh["dp"])
    modules = (whole, other, part)
    optimizers = [torch.optim.SGD(module.parameters(), 0.05, 0.9) for module in modules]
    replica, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    found = {}
    for x, dy in batches(2):
        step(whole, x, dy, RECIPES[recipe], optimizers[0])
        x, dy = (rows(t.chunk(2, 1)[replica], tp, 2).contiguous() for t in (x, 2 * dy))
        expected = step(other, x, dy, RECIPES[recipe])
        actual = step(part, x, dy, RECIPES[recipe], optimizers[2])
        _averaged(other, mesh["dp"].get_group())
        optimizers[1].step()
        for what, a, b in zip(("output", "input"), actual, expected, strict=True):
            found[what] = decibels(a, b)
    for key, parameter in part.named_parameters():
        assert parameter.device_mesh.ndim == 2
        grad, value = parameter.grad.full_tensor(), parameter.detach().full_tensor()
        for kind, module in (("other", other), ("whole", whole)):
            if kind == "whole" and recipe is not None:
                continue
            reference = module.get_parameter(key)
            assert parameter.shape == reference.shape
            for what, a, b in (("grad", grad, reference.grad), ("value", value, reference)):
                b = b.full_tensor() if isinstance(b, DTensor) else b
                found[f"{key} {what} {kind}"] = decibels(a, b.detach())
    state = get_model_state_dict(part) if recipe is None else part.state_dict()
    for key, parameter in whole.named_parameters():
        assert state[key].shape == parameter.shape
    return found


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@pytest.mark.parametrize("name", ["pair", "block"])
def test_fully_shard_over_the_other_dimension(four_ranks, name, recipe):
    for found in four_ranks.run(_two_dimensions, name, recipe):
        assert min(found.values()) > 90, found


def _refused(rank):
    mesh = tp_mesh()
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    linear, column = apex_te.Linear(HIDDEN, FFN), ColumnParallel()

    def told_of(module, style=column, mesh=mesh):
        return told(parallelize_module, module, mesh, style)

    flat = {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "num_gqa_groups": 1}
    split = {"parallel_mode": "column", "tp_group": distributed.group.WORLD}
    layer, attention = LayerParallel(), apex_te.MultiheadAttention
    with fp8_model_init(recipe=CurrentScaling()):
        held = apex_te.Linear(16, 16)
    found = {
        "mesh": told_of(linear, mesh=square),
        "kind": told_of(nn.Linear(4, 4)),
        "norm": told_of(apex_te.LayerNorm(8)),
        "row": told_of(apex_te.LayerNormLinear(8, 8), RowParallel()),
        "size": told_of(apex_te.Linear(8, 7)),
        "part": told_of(apex_te.Linear(8, 8, parameters_split={"a": 5, "b": 3})),
        "option": told(ColumnParallel, sequence_parallel=1),
        "fused": told_of(apex_te.Linear(8, 8, fuse_wgrad_accumulation=True)),
        "later": told_of(apex_te.Linear(8, 8, delay_wgrad_compute=True)),
        "none": told_of(apex_te.Linear(8, 8, skip_weight_param_allocation=True)),
        "gated": told_of(apex_te.LayerNormMLP(8, 9, activation="swiglu"), layer),
        "flat": told_of(attention(HIDDEN, HEADS, **flat), layer),
        "heads": told_of(attention(9, 3), layer),
        "own": told_of(attention(HIDDEN, HEADS, set_parallel_mode=True), layer),
        "already": told_of(apex_te.Linear(8, 8, **split)),
        "held": told_of(held),
    }
    tried = apex_te.TransformerLayer(HIDDEN, FFN + 1, HEADS)
    assert "ffn_hidden_size" in told_of(tried, layer)
    assert not any(isinstance(p, DTensor) for p in tried.parameters())  # nothing by halves
    parallelize_module(linear, mesh, column)
    found["twice"] = told_of(linear)
    found["again"] = told_of(linear, RowParallel())
    found["gathered"] = told(enable_fp8_all_gather, linear)
    x = distribute_tensor(torch.randn(4, HIDDEN), mesh, [Replicate()])
    found["input"] = told(linear, x)
    sharded = apex_te.LayerNormLinear(HIDDEN, FFN)
    parallelize_module(sharded, mesh, column)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("d", "t"))["t"])
    found["reshard"] = told(sharded.forward_with_residual, torch.randn(4, HIDDEN), None)
    return found


def test_refusals(two_ranks):
    gemm = "must be whole before a style is applied, got tp_size"
    expected = {
        "mesh": "ValueError: ColumnParallel: device_mesh must have one dimension",
        "kind": "TypeError: ColumnParallel: module must be a Linear or LayerNormLinear, got Linear",
        "norm": "TypeError: ColumnParallel: module must be a Linear or LayerNormLinear, got LayerN",
        "row": "TypeError: RowParallel: module must be a Linear, got LayerNormLinear",
        "size": "ValueError: ColumnParallel: Linear: out_features must be a multiple of the 2",
        "part": "ValueError: ColumnParallel: Linear: parameters_split['a'] must be a multiple of",
        "option": "TypeError: ColumnParallel: sequence_parallel must be a bool, got int",
        "fused": "NotImplementedError: ColumnParallel: Linear.fuse_wgrad_accumulation must be F",
        "later": "NotImplementedError: ColumnParallel: Linear.delay_wgrad_compute must be False",
        "none": "ValueError: ColumnParallel: Linear must own its weight",
        "gated": "ValueError: LayerParallel: LayerNormMLP: ffn_hidden_size must be a multiple of",
        "flat": "ValueError: LayerParallel: MultiheadAttention: num_gqa_groups must be a multiple ",
        "heads": "ValueError: LayerParallel: MultiheadAttention: num_attention_heads must be a mul",
        "own": "ValueError: LayerParallel: MultiheadAttention must be whole before a style",
        "already": f"ValueError: ColumnParallel: Linear {gemm} 2 and parallel mode 'column'",
        "twice": f"ValueError: ColumnParallel: Linear {gemm} 2 and parallel mode 'column'",
        "again": f"ValueError: RowParallel: Linear {gemm} 2 and parallel mode 'column'",
        "gathered": "ValueError: enable_fp8_all_gather: model must not be sharded yet (call it "
        "before fully_shard, and split layers by tp_group=, not by styles such as LayerParallel)",
        "input": "TypeError: Linear: inp must be this rank's part as a plain tensor, got a DTensor",
        "held": "NotImplementedError: ColumnParallel: Linear.weight must be a plain torch.nn.Par",
        "reshard": "RuntimeError: LayerNormLinear: layer_norm_weight must be gathered over the dat",
    }
    for found in two_ranks.run(_refused):
        assert found.keys() == expected.keys()
        for key, message in expected.items():
            assert found[key].startswith(message), found[key]


def _others(rank, name, weight):
    """Copies, a checkpointed forward, evaluation, a frozen weight, one rank alone.

    Returns what is exchanged in a step, and in a forward after it.
    """
    whole, mesh = whole_module(name), tp_mesh()
    part = parallelized(whole, name, False, mesh)
    assert isinstance(part, type(whole))
    assert type(part).__name__ == type(whole).__name__
    ((x, dy),) = batches(1)
    with recorded("all_to_all_single", lambda out, x, *args, **kwargs: tuple(x.shape)) as sent:
        expected = step(part, x, dy, None)
        both = sent.copy()
        with torch.no_grad():
            assert torch.equal(part(x), expected[0])
    grads = {k: p.grad.full_tensor() for k, p in part.named_parameters()}
    frozen = copy.deepcopy(part)
    frozen.get_parameter(weight).requires_grad_(False)
    assert all_equal(step(frozen, x, dy, None), expected)
    for key, parameter in frozen.named_parameters():
        if key == weight:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad.full_tensor(), grads[key])
    part.zero_grad()
    own = x.clone().requires_grad_()
    apex_te.checkpoint(part, own).backward(dy)
    assert torch.equal(own.grad, expected[1])
    for key, parameter in part.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), grads[key])
    # One rank alone has nothing to exchange.
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    single = parallelized(whole, name, True, alone)
    assert isinstance(single.get_parameter(weight), DTensor)
    with recorded("all_to_all_single") as nothing:
        found = step(single, x, dy, None)
    assert not nothing
    assert all_equal(found, step(whole, x, dy, None))
    return both, sent[len(both) :]


@pytest.mark.parametrize(
    ("name", "weight", "exchanged"),
    [("mlp", "fc1_weight", []), ("layer", "layernorm_mlp.fc1_weight", [(FFN, HIDDEN)])],
)
def test_other_uses(two_ranks, name, weight, exchanged):
    assert two_ranks.run(_others, name, weight) == [(2 * exchanged, exchanged)] * 2


def _whole_ones(rank):
    """Modules that stay whole: no collective, gradients that are not summed."""
    linear, grouped = apex_te.Linear(HIDDEN, 16), apex_te.GroupedLinear(2, HIDDEN, 16)
    x, found = torch.randn(8, HIDDEN), []
    for module, args in ((linear, ()), (grouped, ([3, 5],)), (apex_te.RMSNorm(HIDDEN), ())):
        part = parallelize_module(copy.deepcopy(module), tp_mesh(), Replicated())
        module.load_state_dict({k: p.to_local() for k, p in part.state_dict().items()})
        outs = [m(x, *args) for m in (module, part)]
        for out in outs:
            out.sum().backward()
        found.append(torch.equal(*outs))
        for key, parameter in module.named_parameters():
            found.append(torch.equal(part.get_parameter(key).grad.full_tensor(), parameter.grad))
    return all(found)


def test_replicated(two_ranks):
    assert two_ranks.run(_whole_ones) == [True, True]


def _microbatches(rank, name):
    """FP8 weights kept over microbatches are made again when the optimizer has stepped."""
    part = parallelized(whole_module(name), name, False, tp_mesh())
    part = part[1] if name == "pair" else part
    optimizer = torch.optim.SGD(part.parameters(), lr=1.0)
    x = torch.randn(16, HIDDEN)
    held = []  # so that no memory is used again
    with fp8_autocast(True, CurrentScaling()):
        for first in (True, False):
            held.append(part(x, is_first_microbatch=first))
            held.append(part._modes.weight_cache[0][1])
    assert torch.equal(held[0], held[2])
    assert held[1] is held[3]
    held[0].sum().backward()
    optimizer.step()
    with fp8_autocast(True, CurrentScaling()):
        stale = part(x, is_first_microbatch=False)
        assert torch.equal(stale, part(x))
    assert part._modes.weight_cache[0][1] is not held[1]
    return torch.equal(stale, held[0])


@pytest.mark.parametrize("name", ["pair", "geglu"])
def test_weight_cache(two_ranks, name):
    assert two_ranks.run(_microbatches, name) == [False, False]


def _sharded_microbatches(rank):
    """``fully_shard`` frees weights, so none is kept: the promise of False changes nothing."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    part = parallelized(whole_module("pair"), "pair", True, mesh["tp"])[1]
    fully_shard(part, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(part.parameters(), lr=1.0)
    x = torch.randn(16, HIDDEN)
    with warnings.catch_warnings(), fp8_autocast(True, CurrentScaling()):
        warnings.simplefilter("ignore")
        first = part(x, is_first_microbatch=True)
        first.sum().backward()
        optimizer.step()
        later = part(x, is_first_microbatch=False)
        return torch.equal(later, part(x)), torch.equal(later, first)


def test_weight_cache_under_fully_shard(two_ranks):
    assert two_ranks.run(_sharded_microbatches) == [(True, False)] * 2
