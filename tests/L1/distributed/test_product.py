"""Every layout of ranks for a column- and a row-parallel Linear, and of experts, against one rank.

Layouts: tensor-parallel ranks x sequence parallelism x what the other ranks are (replicas under
DistributedDataParallel, FSDP2, FSDP2 whose gathers carry FP8 codes) x recipe; and expert-parallel
ranks x the same.
"""

import itertools

import pytest
import torch
from shards import decibels
from test_expert_parallel import FFN, HIDDEN, experts_of, routed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.distributed.expert_parallel import TokenDispatcher
from apex_te.distributed.fsdp import enable_fp8_all_gather
from apex_te.distributed.main_grad import reduce_main_grads
from apex_te.module.grouped_linear import GroupedLinear
from apex_te.module.linear import Linear
from apex_te.recipe import CurrentScaling, DelayedScaling

IN, INNER, OUT, ROWS, STEPS, LR = 32, 64, 48, 16, 3, 1e-3
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "tensorwise": CurrentScaling(),
}
_meshes = {}


def mesh_of(device_type, *sizes):
    """One mesh for each shape: its groups stay for the whole file."""
    names = ("data", "model")
    if sizes not in _meshes:
        _meshes[sizes] = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return _meshes[sizes]


class Pair(torch.nn.Module):
    """A column-parallel Linear and the row-parallel one that takes its features."""

    def __init__(self, device, dtype, group=None, sequence_parallel=False):
        super().__init__()
        shared = {"params_dtype": dtype, "device": device}
        if group is not None:
            shared |= {"tp_group": group, "sequence_parallel": sequence_parallel}
        self.first = Linear(IN, INNER, parallel_mode="column", **shared)
        self.second = Linear(INNER, OUT, parallel_mode="row", **shared)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def fill(model, rank=0, ranks=1):
    """The same values whoever has which part of them."""
    sizes = {"first": (INNER, IN), "second": (OUT, INNER)}
    with torch.no_grad():
        for k, (name, parameter) in enumerate(model.named_parameters()):
            rows, cols = sizes[name.split(".")[0]]
            shape = (rows, cols) if name.endswith("weight") else (rows,)
            full = torch.randn(shape, generator=torch.Generator().manual_seed(20 + k)) * 0.3
            if getattr(parameter, "tensor_model_parallel", False) and ranks > 1:
                full = full.chunk(ranks, parameter.partition_dim)[rank]
            parameter.copy_(full)


def whole(parameter):
    """All of a parameter or gradient, of which FSDP2 has shards."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def step_data(step, device, dtype):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, 2, IN, generator=generator)
    dy = torch.randn(ROWS, 2, OUT, generator=generator)
    return x.to(device, dtype), dy.to(device, dtype)


def train(model, recipe, device, dtype, take, scale, reduced=lambda: None):
    """Outputs, input gradients, parameters' gradients after each step, and what they became."""
    found = {}
    for step in range(STEPS):
        x, dy = (take(t) for t in step_data(step, device, dtype))
        x.requires_grad_()
        model.zero_grad()
        with fp8_autocast(recipe is not None, recipe):
            out = model(x)
        ((out * dy).sum() * scale).backward()
        reduced()
        found |= {f"{step} output": out.detach(), f"{step} input": x.grad / scale}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                name = name.removeprefix("module.")
                found[f"{step} gradient {name}"] = whole(parameter.grad).clone()
                parameter.sub_(LR * parameter.grad)
    for name, parameter in model.named_parameters():
        found["updated " + name.removeprefix("module.")] = whole(parameter.detach())
    flush_fp8_state()
    return found


def compare(found, expected, exact, dtype):
    """Tolerances of the dtype; with FP8 (``exact`` given) the noise of one rank, to 2 dB."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        wanted = expected[name]
        assert value.shape == wanted.shape, (name, value.shape, wanted.shape)
        if exact is None and dtype is torch.float32:
            torch.testing.assert_close(
                value, wanted, rtol=1.3e-6, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        elif exact is None:  # sums of bf16 numbers in another order
            assert decibels(value, wanted) > 40, name
        elif name.endswith("bias"):  # few numbers, sums in which noise is mostly averaged out
            assert decibels(value, exact[name]) > (40 if "updated" in name else 14), name
        else:
            ours, theirs = (decibels(x, exact[name]) for x in (value, wanted))
            assert ours > max(14, min(theirs, 60) - 2), f"{name}: {ours:.1f}, {theirs:.1f} dB"


def linear_layout(rank, device, dtype, ranks, tp, sequence_parallel, data, recipe):
    device = torch.device(device, rank) if device == "cuda" else torch.device(device)
    scaling = RECIPES[recipe]
    mesh = mesh_of(device.type, ranks // tp, tp)
    replicas, replica = ranks // tp, mesh.get_local_rank("data")
    group, place = mesh.get_group("model"), mesh.get_local_rank("model")
    model = Pair(device, dtype, group, sequence_parallel)
    fill(model, place, tp)
    parts = {n: p.partition_dim for n, p in model.named_parameters() if p.tensor_model_parallel}
    rows_only = [n for n, p in model.named_parameters() if p.sequence_parallel]
    states = [model.first._fp8, model.second._fp8]
    if data == "ddp":
        model = DistributedDataParallel(model, process_group=mesh.get_group("data"))
    elif data.startswith("fsdp"):
        if data == "fsdp fp8":
            enable_fp8_all_gather(model, scaling)
        fully_shard(model.first, mesh=mesh["data"])
        fully_shard(model.second, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])

    def take(x):
        x = x.chunk(replicas, 0)[replica]
        return (x.chunk(tp, 0)[place] if sequence_parallel else x).clone()

    def reduced():
        named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
        reduce_main_grads([named[n] for n in rows_only], group, average=False)

    found = train(model, scaling, device, dtype, take, replicas, reduced)

    alone = Pair(device, dtype)
    fill(alone)
    # The ranks reduce their amaxes; one rank has all of them.
    single = scaling
    if recipe == "delayed":
        single = DelayedScaling(amax_history_len=4, reduce_amax=False)
    expected = train(alone, single, device, dtype, lambda x: x, 1)
    exact = None
    if scaling is not None:
        fill(alone_exact := Pair(device, dtype))
        exact = train(alone_exact, None, device, dtype, lambda x: x, 1)
    for name in list(expected):
        key = name.split(" ", 2)[-1].removeprefix("updated ")
        for values in (expected, exact) if exact else (expected,):
            if key in parts:
                values[name] = values[name].chunk(tp, parts[key])[place]
            elif name.endswith(("output", "input")):
                values[name] = take(values[name])
    compare(found, expected, exact, dtype)
    if recipe == "delayed":
        for state, other in zip(states, (alone.first._fp8, alone.second._fp8), strict=True):
            # Replicas average their gradients, so each starts from one as many times larger.
            for name, factor in (("scale_fwd", 1), ("scale_bwd", replicas)):
                mine, theirs = (getattr(s, name)[: 2 if factor == 1 else 1] for s in (state, other))
                torch.testing.assert_close(mine * factor, theirs, rtol=0.1, atol=0.0)
        scales = torch.cat([t for s in states for t in (s.scale_fwd, s.scale_bwd)])
        everywhere = [torch.empty_like(scales) for _ in range(ranks)]
        torch.distributed.all_gather(everywhere, scales)
        assert all(torch.equal(scales, others) for others in everywhere)


def layouts(ranks):
    sizes = [n for n in (1, 2, 4) if ranks % n == 0]
    for tp, sp, recipe in itertools.product(sizes, (False, True), RECIPES):
        kinds = ("none",) if tp == ranks else ("ddp", "fsdp", "fsdp fp8")
        for data in kinds:
            if (sp and tp == 1) or (data == "fsdp fp8" and recipe == "none"):
                continue
            yield tp, sp, data, recipe


@pytest.mark.parametrize(("tp", "sp", "data", "recipe"), list(layouts(2)))
def test_linear_on_two_ranks(two_ranks, tp, sp, data, recipe):
    two_ranks.run(linear_layout, "cpu", torch.float32, 2, tp, sp, data, recipe)


@pytest.mark.parametrize(("tp", "sp", "data", "recipe"), list(layouts(4)))
def test_linear_on_four_ranks(four_ranks, tp, sp, data, recipe):
    four_ranks.run(linear_layout, "cpu", torch.float32, 4, tp, sp, data, recipe)


class Experts(torch.nn.Module):
    """Two grouped layers; some of the experts, with the values that each has anywhere."""

    def __init__(self, count, first, device, dtype):
        super().__init__()
        self.fc1, self.fc2 = experts_of(count, first, device, dtype)

    def forward(self, rows, m_splits):
        return self.fc2(torch.tanh(self.fc1(rows, m_splits)), m_splits)


def expert_layout(rank, device, dtype, ranks, ep, data, exchange, recipe):
    device = torch.device(device, rank) if device == "cuda" else torch.device(device)
    experts, local, scaling = 4, 4 // ep, RECIPES[recipe]
    mesh = mesh_of(device.type, ranks // ep, ep)
    replicas, place = ranks // ep, mesh.get_local_rank("model")
    dispatcher = TokenDispatcher(
        experts, mesh.get_group("model"), exchange=exchange, max_experts_per_token=2
    )
    model = layers = Experts(local, local * place, device, dtype)
    if data == "ddp":
        model = DistributedDataParallel(layers, process_group=mesh.get_group("data"))
    elif data.startswith("fsdp"):
        if data == "fsdp fp8":
            enable_fp8_all_gather(layers, scaling)
        fully_shard(layers, mesh=mesh["data"])
    every = [routed(r, 12, experts, 2, device) for r in range(ranks)]
    every = [[t.to(dtype) if t.is_floating_point() else t for t in one] for one in every]

    def run(model, dispatcher, inputs, scale):
        x, probs, routing_map, dy = (t.clone() for t in inputs)
        x.requires_grad_()
        probs.requires_grad_()
        dispatch = dispatcher.dispatch(x, probs, routing_map)
        with fp8_autocast(scaling is not None, scaling):
            rows = model(dispatch.rows, dispatch.m_splits)
        out = dispatch.combine(rows)
        ((out * dy).sum() * scale).backward()
        return {"output": out.detach(), "input": x.grad / scale, "probs": probs.grad / scale}

    found = run(model, dispatcher, every[rank], replicas)
    found |= {f"gradient {n}": whole(p.grad).clone() for n, p in layers.named_parameters()}
    alone = Experts(experts, 0, device, dtype)
    me = torch.distributed.new_group([rank], use_local_synchronization=True)
    joined = [torch.cat(parts) for parts in zip(*every, strict=True)]
    results = run(alone, TokenDispatcher(experts, me), joined, 1)
    expected = {name: value.chunk(ranks, 0)[rank] for name, value in results.items()}
    for name in found:
        if name.startswith("gradient"):
            layer, number = name.removeprefix("gradient ").split(".weight")
            weight = getattr(getattr(alone, layer), f"weight{local * place + int(number)}")
            expected[name] = weight.grad
    if scaling is None:
        return compare(found, expected, None, dtype)
    for name, value in found.items():  # each rank scales its own tokens' rows
        assert decibels(value, expected[name]) > 17, name


def expert_layouts(ranks):
    for ep, exchange in itertools.product((2, 4), ("all_to_all", "all_gather")):
        if ranks % ep == 0:
            for data in ("none",) if ep == ranks else ("ddp", "fsdp", "fsdp fp8"):
                for recipe in ("none", "tensorwise"):
                    if data != "fsdp fp8" or recipe != "none":
                        yield ep, data, exchange, recipe


@pytest.mark.parametrize(("ep", "data", "exchange", "recipe"), list(expert_layouts(4)))
def test_experts_on_four_ranks(four_ranks, ep, data, exchange, recipe):
    four_ranks.run(expert_layout, "cpu", torch.float32, 4, ep, data, exchange, recipe)


def split_experts(rank, device, dtype):
    """Experts over two ranks, each of their weights over two others."""
    mesh = mesh_of(device, 2, 2)
    place, part = mesh.get_local_rank("data"), mesh.get_local_rank("model")
    dispatcher = TokenDispatcher(4, mesh.get_group("data"))
    group = mesh.get_group("model")
    shared = {"bias": False, "params_dtype": dtype, "device": device, "tp_group": group}
    whole_layers = experts_of(2, 2 * place, device, dtype)
    layers = (
        GroupedLinear(2, HIDDEN, FFN, parallel_mode="column", **shared),
        GroupedLinear(2, FFN, HIDDEN, parallel_mode="row", **shared),
    )
    with torch.no_grad():
        for layer, full in zip(layers, whole_layers, strict=True):
            for name, parameter in layer.named_parameters():
                values = full.get_parameter(name)
                parameter.copy_(values.chunk(2, parameter.partition_dim)[part])
    x, probs, routing_map, dy = routed(place, 9 + place, 4, 2, device)
    outs = []
    for pair in (layers, whole_layers):
        dispatch = dispatcher.dispatch(x, probs, routing_map)
        rows = torch.tanh(pair[0](dispatch.rows, dispatch.m_splits))
        out = dispatch.combine(pair[1](rows, dispatch.m_splits))
        (out * dy).sum().backward()
        out = out.detach()
        if pair is layers:
            torch.distributed.all_reduce(out, group=group)
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1], rtol=1.3e-6, atol=1e-5)
    for layer, full in zip(layers, whole_layers, strict=True):
        for name, parameter in layer.named_parameters():
            wanted = full.get_parameter(name).grad.chunk(2, parameter.partition_dim)[part]
            torch.testing.assert_close(parameter.grad, wanted, rtol=1.3e-6, atol=1e-5)


def test_experts_whose_weights_are_split(four_ranks):
    four_ranks.run(split_experts, "cpu", torch.float32)


@pytest.mark.cuda
@pytest.mark.parametrize(("tp", "sp", "data", "recipe"), list(layouts(2)))
def test_linear_on_gpus(two_gpus, tp, sp, data, recipe):
    two_gpus.run(linear_layout, "cuda", torch.bfloat16, 2, tp, sp, data, recipe)
