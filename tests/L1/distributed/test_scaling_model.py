"""benchmarks/scaling_collectives.py against what layers really send: counts and bytes, exactly."""

import contextlib
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from rank_sets import ranks_of
from schemes import chosen
from torch import distributed

import apex_te
from apex_te import fp8_autocast
from apex_te.comm.agreement import HEADER
from apex_te.fp8.delayed.ranks import _QUANTUM, RankReduction
from apex_te.fp8.delayed.state import BACKWARD_SLOTS, FORWARD_SLOTS

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import scaling_collectives as paper

SIZES = {"hidden": 64, "ffn": 96, "heads": 4, "groups": 4, "vocabulary": 101, "sequence": 16}
RECIPES = {"none": None, **chosen("delayed", "tensorwise", "blockwise")}
# What is called: its kind, and which of its tensors is the largest buffer.
CALLS = {
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "all_reduce": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 1),
}


@contextlib.contextmanager
def counted():
    """A counter of (phase, kind, bytes, ranks), and a function that says which phase it is."""
    found, now, depth = Counter(), ["forward"], [0]

    def counting(name, original):
        kind, which = CALLS[name]

        def call(*args, **kwargs):
            if not depth[0]:  # torch 2.13 has two names for some, one of which calls the other
                tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
                size = tensors[which].numel() * tensors[which].element_size()
                ranks = distributed.get_world_size(kwargs.get("group"))
                found[now[0], kind, size, ranks] += 1
            depth[0] += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    kept = {name: getattr(distributed, name) for name in CALLS if hasattr(distributed, name)}
    for name, original in kept.items():
        setattr(distributed, name, counting(name, original))
    try:
        yield found, lambda phase: now.__setitem__(0, phase)
    finally:
        for name, original in kept.items():
            setattr(distributed, name, original)


def expected(*lists):
    """The same counter by the model; amaxes travel as the next forward's region is entered."""
    return Counter(
        ("forward" if c.phase == "step" else c.phase, c.op, c.size, c.group.ranks)
        for found in lists
        for c in found
    )


def steps(module, inputs, scaling, group=None):
    """What the second step sends: the first finds scales and agrees with the other ranks."""
    for _ in range(2):
        with counted() as (found, phase):
            with fp8_autocast(scaling is not None, scaling, group):
                out = module(*[x.detach().requires_grad_() for x in inputs])
            phase("backward")
            out.square().mean().backward()
        module.zero_grad()
    return found


def model_of(layers=1, batch=2, **more):
    return paper.Model("tiny", **SIZES, layers=layers, batch=batch, **more)


def transformer_layer(**more):
    return apex_te.TransformerLayer(
        SIZES["hidden"], SIZES["ffn"], SIZES["heads"], num_gqa_groups=SIZES["groups"],
        normalization="RMSNorm", bias=False, fuse_qkv_params=True, hidden_dropout=0.0,
        attention_dropout=0.0, **more,
    )  # fmt: skip


def _tensor_parallel(rank, name, sequence_parallel, gated, dtype):
    ranks = distributed.get_world_size()
    torch.manual_seed(1)
    layer = transformer_layer(
        activation="swiglu" if gated else "gelu", set_parallel_mode=True, params_dtype=dtype,
        tp_group=distributed.group.WORLD, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    own = SIZES["sequence"] // (ranks if sequence_parallel else 1)
    found = steps(layer, [torch.randn(own, 2, SIZES["hidden"], dtype=dtype)], RECIPES[name])
    model = model_of(gated=gated)
    layout = paper.Layout(ranks, ranks, sequence_parallel)
    scaling = paper.Recipe(name, value_bytes=dtype.itemsize)
    lists = [paper.layer_collectives(model, layout, scaling)]
    lists.append(paper.step_collectives(model, layout, scaling))
    return dict(found), dict(expected(*lists))


def check(results):
    for found, predicted in results:
        assert predicted
        assert found == predicted


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_layer(two_ranks, name, sequence_parallel):
    check(two_ranks.run(_tensor_parallel, name, sequence_parallel, True, torch.float32))


@pytest.mark.parametrize("name", ["none", "delayed", "tensorwise"])
def test_tensor_parallel_layer_on_four_ranks(all_ranks, name):
    ranks = ranks_of(all_ranks, 4, "gloo")
    check(ranks.run(_tensor_parallel, name, True, False, torch.float32))


@pytest.mark.parametrize("name", ["none", "delayed"])
def test_tensor_parallel_layer_in_bfloat16(two_ranks, name):
    check(two_ranks.run(_tensor_parallel, name, True, True, torch.bfloat16))


class _Whole(torch.nn.Module):
    """Layers between an embedding, a norm and a head."""

    def __init__(self, layers):
        super().__init__()
        hidden, vocabulary = SIZES["hidden"], SIZES["vocabulary"]
        self.tokens = torch.nn.Parameter(torch.randn(vocabulary, hidden))
        self.layers = torch.nn.ModuleList(layers)
        self.norm = torch.nn.RMSNorm(hidden)
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x):
        x = x @ self.tokens
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _sharded(rank, name, fp8_all_gather, replicas):
    from torch.distributed.fsdp import fully_shard

    from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather

    ranks = distributed.get_world_size()
    torch.manual_seed(1)
    whole = _Whole([transformer_layer(activation="swiglu") for _ in range(3)])
    shape, names = ((replicas, ranks // replicas), ("r", "s")) if replicas > 1 else ((ranks,), None)
    mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
    if fp8_all_gather:
        enable_fp8_all_gather(whole, RECIPES[name])
    for layer in whole.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    x = torch.randn(SIZES["sequence"], 1, SIZES["vocabulary"])
    for _ in range(2):
        with counted() as (found, phase):
            with fp8_autocast(RECIPES[name] is not None, RECIPES[name]):
                out = whole(x)
            phase("backward")
            out.square().mean().backward()
        optimizer.step()  # weights have changed: the next gather finds their amaxes
        optimizer.zero_grad()
    model = model_of(3, 1)
    layout = paper.Layout(ranks, shard=ranks // replicas)
    scaling = paper.Recipe(name, fp8_all_gather, value_bytes=4)
    lists = [paper.layer_collectives(model, layout, scaling)] * model.layers
    lists.append(paper.step_collectives(model, layout, scaling))
    return dict(found), dict(expected(*lists))


@pytest.mark.parametrize(
    ("name", "fp8_all_gather"),
    [("none", False), ("delayed", False), ("delayed", True), ("tensorwise", True)],
)
def test_sharded_layers(ranks, name, fp8_all_gather):
    """101 rows of the vocabulary: what FSDP2 fills up is counted, too."""
    check(ranks.run(_sharded, name, fp8_all_gather, 1))


@pytest.mark.parametrize(
    ("name", "fp8_all_gather"), [("none", False), ("delayed", True), ("tensorwise", True)]
)
def test_sharded_layers_with_replicas(all_ranks, name, fp8_all_gather):
    check(ranks_of(all_ranks, 4, "gloo").run(_sharded, name, fp8_all_gather, 2))


def _exchanged(rank, name, even):
    from apex_te.comm.expert_parallel import TokenDispatcher

    ranks, hidden, ffn = distributed.get_world_size(), SIZES["hidden"], SIZES["ffn"]
    model = model_of(experts=8, topk=2)
    dispatcher = TokenDispatcher(model.experts)
    local = model.experts // ranks
    torch.manual_seed(1)
    fc1 = apex_te.GroupedLinear(local, hidden, 2 * ffn, bias=False)
    fc2 = apex_te.GroupedLinear(local, ffn, hidden, bias=False)

    def experts(tokens):
        scores = torch.rand(tokens.shape[0], model.experts) + 0.1 * rank
        if even:  # each expert gets as many
            at = torch.arange(tokens.shape[0])[:, None] - torch.arange(model.experts)
            scores = 1.0 / (1 + at % model.experts)
        routed = torch.zeros_like(scores, dtype=torch.bool)
        routed.scatter_(1, scores.topk(model.topk).indices, True)
        dispatch = dispatcher.dispatch(tokens, scores * routed, routed)
        gate, up = fc1(dispatch.rows, dispatch.m_splits).chunk(2, -1)
        hidden_rows = torch.nn.functional.silu(gate) * up
        return dispatch.combine(fc2(hidden_rows.contiguous(), dispatch.m_splits))

    module = torch.nn.Module()
    module.forward, module.fc1, module.fc2 = experts, fc1, fc2
    tokens = torch.randn(model.sequence * model.batch, hidden)
    found = steps(module, [tokens], RECIPES[name])
    layout = paper.Layout(ranks, shard=ranks, ep=ranks)
    scaling = paper.Recipe(name, value_bytes=4)
    amaxes = [c for c in paper.step_collectives(model, layout, scaling) if c.axis == "world"]
    return dict(found), dict(expected(paper.exchanged(model, layout, scaling), amaxes))


@pytest.mark.parametrize("name", ["none", "delayed"])
def test_exchanged_tokens(ranks, name):
    check(ranks.run(_exchanged, name, True))


def test_exchanged_tokens_that_go_where_they_like(ranks):
    """A rank may then send more than another; all of them send what the model says."""
    results = ranks.run(_exchanged, "none", False)
    for phase in ("forward", "backward"):
        found, predicted = (
            sum(key[2] * n for r in results for key, n in r[i].items() if key[0] == phase)
            for i in (0, 1)
        )
        assert found == predicted
    assert any(found != predicted for found, predicted in results)


class _Experts(torch.nn.Module):
    """All experts on each rank, each with as many of the tokens."""

    def __init__(self, model):
        super().__init__()
        count, hidden, ffn = model.experts, model.hidden, model.ffn
        self.splits = [model.sequence * model.batch // count] * count
        self.fc1 = apex_te.GroupedLinear(count, hidden, 2 * ffn, bias=False)
        self.fc2 = apex_te.GroupedLinear(count, ffn, hidden, bias=False)

    def forward(self, x):
        gate, up = self.fc1(x, self.splits).chunk(2, -1)
        return self.fc2((torch.nn.functional.silu(gate) * up).contiguous(), self.splits)


def _layer_of_experts(rank, name):
    """Sharded experts, and attention over the ranks."""
    from torch.distributed.fsdp import fully_shard

    from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather

    ranks, scaling = distributed.get_world_size(), RECIPES[name]
    model = model_of(batch=4, experts=2, topk=1)
    torch.manual_seed(1)
    experts = _Experts(model)
    if scaling is not None:
        enable_fp8_all_gather(experts, scaling)
    # Below a root: it would keep its weights for backward.
    fully_shard(experts)
    whole = fully_shard(torch.nn.Sequential(experts))
    x = torch.randn(model.sequence * model.batch, model.hidden)
    own = paper.Recipe(name, scaling is not None, value_bytes=4)
    layout = paper.Layout(ranks, shard=ranks)
    lists = [paper.sharded(paper.expert_weights(model, layout), layout, own, 1, ranks)]
    lists.append([c for c in paper.step_collectives(model, layout, own) if c.axis == "world"])
    results = [(dict(steps(whole, [x], scaling)), dict(expected(*lists)))]

    attention = apex_te.MultiheadAttention(
        model.hidden, model.heads, input_layernorm=True, normalization="RMSNorm", bias=False,
        fuse_qkv_params=True, attention_dropout=0.0, set_parallel_mode=True,
        tp_group=distributed.group.WORLD, sequence_parallel=True,
    )  # fmt: skip
    x = torch.randn(model.sequence // ranks, model.batch, model.hidden)
    layout = paper.Layout(ranks, ranks)
    lists[0] = paper.tensor_parallel(model, layout, own)
    results.append((dict(steps(attention, [x], scaling)), dict(expected(*lists))))
    return results


@pytest.mark.parametrize("name", ["none", "delayed"])
def test_layer_of_experts(ranks, name):
    for results in ranks.run(_layer_of_experts, name):
        check(results)


def test_amax_collective_has_the_size_of_the_codes():
    assert (paper.HEADER, paper.QUANTUM) == (HEADER, _QUANTUM)
    assert paper.SLOTS == FORWARD_SLOTS + BACKWARD_SLOTS
    for gemms in (1, 3275, 3276, 3277, 10000):
        sizes = [paper.SLOTS] * gemms
        reduction = RankReduction(sizes, ["x"] * gemms, [], torch.device("cpu"))
        buffer = reduction._buffer
        assert paper.amax_bytes(gemms) == buffer.numel() * buffer.element_size()
