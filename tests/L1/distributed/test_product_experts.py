"""Every layout of ranks for experts, several steps of training, against one rank that has them all.

Layouts: expert-parallel ranks x what the other ranks are (replicas under DistributedDataParallel,
FSDP2, FSDP2 whose gathers carry FP8 data) x exchange x recipe; and experts over some ranks, whose
weights, with those of a layer before them, are split over the others.
"""

import contextlib
import itertools

import pytest
import torch
from on_rank import device_of, dtype_of, load, save
from rank_sets import cases, ranks_of
from schemes import SCHEMES
from shards import decibels
from test_expert_parallel import FFN, HIDDEN, experts_of, routed
from test_product import LR, RECIPES, compare, mesh_of, same_everywhere, scales_of, whole
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init, init_fp8_state
from apex_te.comm.expert_parallel import TokenDispatcher
from apex_te.distributed import get_state_dict, set_state_dict
from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather
from apex_te.fp8.delayed.state import BACKWARD_SLOTS, FORWARD_SLOTS
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.linear import Linear
from apex_te.optimizers import FusedAdam
from apex_te.recipe import DelayedScaling

EXPERTS, TOKENS, STEPS = 4, 12, 3
ALONE = {**RECIPES, "delayed": DelayedScaling(amax_history_len=4, reduce_amax=False)}


class Experts(torch.nn.Module):
    """Two grouped layers; some of the experts, with the values that each has anywhere."""

    def __init__(self, count, first, device, dtype):
        super().__init__()
        self.fc1, self.fc2 = experts_of(count, first, device, dtype)

    def forward(self, rows, m_splits):
        return self.fc2(torch.tanh(self.fc1(rows, m_splits)), m_splits)


def data(ranks, step, device, dtype, tokens=TOKENS):
    """Of all ranks, in their order: tokens, probabilities, where they go, gradients."""
    parts = [routed(ranks * step + r, tokens, EXPERTS, 2, device) for r in range(ranks)]
    return [
        torch.cat(part).to(dtype if part[0].is_floating_point() else part[0].dtype)
        for part in zip(*parts, strict=True)
    ]


def state_of(layers, first, count):
    """Scales of each expert's two GEMMs [2 * count, 3], from the ``first`` of this rank's on."""
    rows = []
    for state in (layers.fc1.fp8_state, layers.fc2.fp8_state):
        for gemm in range(first, first + count):
            ahead, back = gemm * FORWARD_SLOTS, gemm * BACKWARD_SLOTS
            scales = (state.scale_fwd[ahead : ahead + 2], state.scale_bwd[back : back + 1])
            rows.append(torch.cat(scales))
    return torch.stack(rows)


def updated(step, name, parameter):
    """A step on a parameter: what of it is compared."""
    found = {f"{step} gradient {name}": whole(parameter.grad).clone()}
    parameter.sub_(LR * parameter.grad)
    if step == STEPS - 1:
        found[f"updated {name}"] = whole(parameter.detach()).clone()
    return found


def train(model, layers, dispatcher, recipe, group, take, scale, ranks, device, dtype, mine):
    """As in test_product; ``mine``: the first of the experts that are compared, and their number.

    The names of parameters are those of one rank that has all experts.
    """
    found, scales = {}, []
    place = 0 if dispatcher.ranks == 1 else distributed.get_rank(dispatcher.group)
    first = dispatcher.local_experts * place
    for step in range(STEPS):
        x, probs, routing_map, dy = (take(t).clone() for t in data(ranks, step, device, dtype))
        x.requires_grad_()
        probs.requires_grad_()
        layers.zero_grad()
        dispatch = dispatcher.dispatch(x, probs, routing_map)
        with fp8_autocast(recipe is not None, recipe, group):
            rows = model(dispatch.rows, dispatch.m_splits)
        out = dispatch.combine(rows)
        ((out * dy).sum() * scale).backward()
        grads = {"input": x.grad / scale, "probs": probs.grad / scale}
        found |= {f"{step} {name}": value for name, value in grads.items()}
        found[f"{step} output"] = out.detach()
        with torch.no_grad():
            for name, parameter in layers.named_parameters():
                layer, number = name.split(".weight")
                name = f"{layer}.weight{first + int(number)}"
                found |= updated(step, name, parameter)
        flush_fp8_state(group)
        if recipe is not None and recipe.keeps_state:
            scales.append(state_of(layers, mine[0] - first, mine[1]))
    return found, scales


def expert_layout(rank, ep, kind, exchange, recipe):
    device, ranks = device_of(rank), distributed.get_world_size()
    dtype, local, scaling = dtype_of(device), EXPERTS // ep, RECIPES[recipe]
    mesh = mesh_of(device.type, ranks // ep, ep)
    replicas, place = ranks // ep, mesh.get_local_rank("model")
    dispatcher = TokenDispatcher(
        EXPERTS, mesh.get_group("model"), exchange=exchange, max_experts_per_token=2
    )
    model = layers = Experts(local, local * place, device, dtype)
    if kind == "ddp":
        model = DistributedDataParallel(layers, process_group=mesh.get_group("data"))
    elif kind.startswith("fsdp"):
        if kind == "fsdp fp8":
            enable_fp8_all_gather(layers, scaling)
        fully_shard(layers, mesh=mesh["data"])
    # Ranks with the same experts share scales, which then are those of one rank.
    group, mine = mesh.get_group("data"), (local * place, local)
    shared = (ranks, device, dtype, mine)
    found, scales = train(
        model, layers, dispatcher, scaling, group, lambda t: t.chunk(ranks)[rank], replicas, *shared
    )
    me = TokenDispatcher(EXPERTS, alone_group(rank))

    def alone(recipe):
        layers = Experts(EXPERTS, 0, device, dtype)
        results = train(layers, layers, me, recipe, me.group, lambda t: t, 1, *shared)
        for name, value in results[0].items():
            if name.endswith(("output", "input", "probs")):
                results[0][name] = value.chunk(ranks)[rank]
        return {name: results[0][name] for name in found}, results[1]

    expected, expected_scales = alone(ALONE[recipe])
    exact = alone(None)[0] if scaling is not None else None
    compare(found, expected, exact, dtype, recipe == "delayed" and dtype is torch.float32)
    if recipe == "delayed":
        factors = torch.tensor([1.0, 1.0, replicas], device=device)
        for ours, theirs in zip(scales, expected_scales, strict=True):
            assert (ours != 1).any()
            if dtype is torch.float32:
                assert torch.equal(ours * factors, theirs)
            else:
                torch.testing.assert_close(ours * factors, theirs, rtol=0.1, atol=0.0)


_alone = {}


def alone_group(rank):
    """A group of this rank only, one for the whole file."""
    if rank not in _alone:
        _alone[rank] = distributed.new_group([rank], use_local_synchronization=True)
    return _alone[rank]


def expert_layouts(ranks):
    exchanges = ("all_to_all", "all_gather")
    for ep, exchange, recipe in itertools.product((2, 4), exchanges, RECIPES):
        if ranks % ep == 0:
            for kind in ("none",) if ep == ranks else ("ddp", "fsdp", "fsdp fp8"):
                if kind != "fsdp fp8" or recipe != "none":
                    yield ep, kind, exchange, recipe


@pytest.mark.parametrize(
    ("where", "ep", "kind", "exchange", "recipe"),
    cases(expert_layouts, (2, "gloo"), (4, "gloo"), (2, "nccl"), (4, "nccl")),
)
def test_experts(all_ranks, where, ep, kind, exchange, recipe):
    ranks_of(all_ranks, *where).run(expert_layout, ep, kind, exchange, recipe)


# Experts' losses with evaluations between and microbatches, and a checkpoint that goes on.


def spread(group, recipe, held, seed=None):
    """This rank's experts of all that the ranks of ``group`` have, and what trains them."""
    delayed = DelayedScaling(amax_history_len=4, reduce_amax=False)
    scaling = delayed if recipe == "delayed" else SCHEMES[recipe]
    dispatcher = TokenDispatcher(EXPERTS, group)
    local = dispatcher.local_experts
    first = local * distributed.get_rank(group)
    with fp8_model_init(recipe=scaling) if held else contextlib.nullcontext():
        layers = Experts(local, first, "cpu", torch.float32)
    if seed is not None:
        torch.manual_seed(seed + first)
        layers.fc1.reset_parameters()
        layers.fc2.reset_parameters()
    optimizer = FusedAdam(layers.parameters(), lr=1e-3, master_weights=held)
    return layers, optimizer, scaling, dispatcher


def expert_outputs(made, steps, take, evaluated=True):
    """Outputs of microbatches; between them evaluations, which are to change nothing."""
    layers, optimizer, scaling, dispatcher = made
    found = []
    for step in steps:
        for micro in range(2):
            every = data(distributed.get_world_size(), 2 * step + micro, "cpu", torch.float32)
            x, probs, routing_map, dy = (take(t).clone() for t in every)
            dispatch = dispatcher.dispatch(x, probs, routing_map)
            with fp8_autocast(True, scaling):
                rows = layers(dispatch.rows, dispatch.m_splits)
            out = dispatch.combine(rows)
            (out * dy).sum().backward()
            found.append(out.detach())
            if evaluated:
                with torch.no_grad(), fp8_autocast(True, scaling):
                    layers(10 * dispatch.rows.detach(), dispatch.m_splits)
        optimizer.step()
        optimizer.zero_grad()
    flush_fp8_state()
    return torch.stack(found)


def expert_bits(rank, path, recipe, held):
    """Spread over all ranks, against one rank; the checkpoint goes on spread and on one rank."""
    world, me = distributed.group.WORLD, alone_group(rank)
    ranks = distributed.get_world_size()

    def part(t):
        return t.chunk(ranks)[rank]

    made = spread(world, recipe, held)
    found = expert_outputs(made, range(2), part)
    save(path, *made[:2], get_state_dict, expert_group=world)
    later = expert_outputs(made, range(2, 4), part)
    plain = spread(world, recipe, held)
    assert torch.equal(expert_outputs(plain, range(2), part, False), found)
    one = expert_outputs(spread(me, recipe, held), range(2), lambda t: t)
    assert decibels(found, torch.stack([part(t) for t in one])) > 25
    again = spread(world, recipe, held, 7)
    if again[2].keeps_state:
        init_fp8_state(again[0], again[2])
    load(path, *again[:2], get_state_dict, set_state_dict, expert_group=world)
    assert torch.equal(expert_outputs(again, range(2, 4), part), later)


@pytest.mark.parametrize("held", [False, True], ids=["high precision", "fp8 weights"])
@pytest.mark.parametrize("recipe", SCHEMES)
def test_bits_of_experts(ranks, tmp_path, recipe, held):
    """Evaluations change nothing, and a checkpoint of spread experts goes on with the same bits."""
    ranks.run(expert_bits, str(tmp_path), recipe, held)


# Experts over two ranks, each of their weights over two others, behind a split layer.


class _Sum(torch.autograd.Function):
    """The sum over ranks; every rank has the gradient of it."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Copy(torch.autograd.Function):
    """What every rank has; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class Dense(torch.nn.Module):
    """Two layers, whole or split, with the same values."""

    def __init__(self, device, dtype, group=None):
        super().__init__()
        shared = {"params_dtype": dtype, "device": device, "tp_group": group}
        self.first = Linear(HIDDEN, FFN, parallel_mode="column", **shared)
        self.second = Linear(FFN, HIDDEN, parallel_mode="row", **shared)
        full = [
            torch.randn(shape, generator=torch.Generator().manual_seed(30 + k)) * 0.2
            for k, shape in enumerate(((FFN, HIDDEN), (FFN,), (HIDDEN, FFN), (HIDDEN,)))
        ]
        with torch.no_grad():
            for parameter, values in zip(self.parameters(), full, strict=True):
                parameter.copy_(part_of(values, parameter, group))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def part_of(values, parameter, group):
    """This rank's part of whole ``values``, split as ``parameter`` is."""
    if group is None or not parameter.tensor_model_parallel:
        return values
    parts = values.chunk(distributed.get_world_size(group), parameter.partition_dim)
    return parts[distributed.get_rank(group)]


class SplitExperts(Experts):
    """Of each expert a rank has some of the inner features."""

    def __init__(self, count, first, device, dtype, group):
        super().__init__(count, first, device, dtype)
        shared = {"bias": False, "params_dtype": dtype, "device": device, "tp_group": group}
        self.group = group
        split = (
            GroupedLinear(count, HIDDEN, FFN, parallel_mode="column", **shared),
            GroupedLinear(count, FFN, HIDDEN, parallel_mode="row", **shared),
        )
        with torch.no_grad():
            for layer, full in zip(split, (self.fc1, self.fc2), strict=True):
                for name, parameter in layer.named_parameters():
                    parameter.copy_(part_of(full.get_parameter(name), parameter, group))
        self.fc1, self.fc2 = split

    def forward(self, rows, m_splits):
        return _Sum.apply(super().forward(_Copy.apply(rows, self.group), m_splits), self.group)


def train_both(dense, layers, experts, dispatcher, recipe, take, scale, replicas, device, dtype):
    """As ``train``, with ``dense`` before the experts; all scales after the first step."""
    found, plain = {}, getattr(dense, "module", dense)
    place = 0 if dispatcher.ranks == 1 else distributed.get_rank(dispatcher.group)
    first = dispatcher.local_experts * place
    for step in range(STEPS):
        every = data(replicas, step, device, dtype, 4 * TOKENS)
        x, probs, routing_map, dy = (take(t).clone() for t in every)
        x.requires_grad_()
        probs.requires_grad_()
        layers.zero_grad()
        with fp8_autocast(recipe is not None, recipe):
            dispatch = dispatcher.dispatch(dense(x), probs, routing_map)
            out = dispatch.combine(experts(dispatch.rows, dispatch.m_splits))
        ((out * dy).sum() * scale).backward()
        found |= {f"{step} input": x.grad / scale, f"{step} probs": probs.grad / scale}
        found[f"{step} output"] = out.detach()
        with torch.no_grad():
            for name, parameter in layers.named_parameters():
                name = name.replace("module.", "")
                if name.startswith("experts"):  # their ranks' losses are summed, not averaged
                    parameter.grad /= scale
                    name, number = name.split(".weight")
                    name = f"{name}.weight{first + int(number)}"
                found |= updated(step, name, parameter)
        flush_fp8_state()
        if step == 0 and recipe is not None and recipe.keeps_state:
            scales = scales_of([plain.first.fp8_state, plain.second.fp8_state])
            scales = torch.stack(scales), state_of(experts, 0, experts.fc1.num_gemms)
    return found, scales if recipe is not None and recipe.keeps_state else None


def split_layout(rank, kind, exchange, recipe):
    device = device_of(rank)
    dtype = dtype_of(device)
    scaling, mesh = RECIPES[recipe], mesh_of(device.type, 2, 2)
    place, group = mesh.get_local_rank("data"), mesh.get_group("model")
    dispatcher = TokenDispatcher(EXPERTS, mesh.get_group("data"), exchange=exchange)
    local = dispatcher.local_experts
    layers = torch.nn.ModuleDict({"dense": Dense(device, dtype, group)})
    layers["experts"] = SplitExperts(local, local * place, device, dtype, group)
    dense = layers["dense"]
    split = {f"dense.{n}": p for n, p in dense.named_parameters()}
    for name, parameter in layers["experts"].named_parameters():
        name, number = name.split(".weight")
        split[f"experts.{name}.weight{local * place + int(number)}"] = parameter
    split = {n: p.partition_dim for n, p in split.items() if p.tensor_model_parallel}
    states = [m.fp8_state for m in layers.modules() if hasattr(m, "fp8_state")]
    if kind == "ddp":
        dense = DistributedDataParallel(dense, process_group=mesh.get_group("data"))
    else:
        if kind == "fsdp fp8":
            enable_fp8_all_gather(dense, scaling)
        fully_shard(dense.first, mesh=mesh["data"])
        fully_shard(dense.second, mesh=mesh["data"])
        fully_shard(dense, mesh=mesh["data"])
    shared = (2, device, dtype)
    found, scales = train_both(
        dense, layers, layers["experts"], dispatcher, scaling, lambda t: t.chunk(2)[place], 2,
        *shared,
    )  # fmt: skip
    me = TokenDispatcher(EXPERTS, alone_group(rank))

    def alone(recipe):
        layers = torch.nn.ModuleDict({"dense": Dense(device, dtype)})
        layers["experts"] = experts = Experts(EXPERTS, 0, device, dtype)
        values, scales = train_both(
            layers["dense"], layers, experts, me, recipe, lambda t: t, 1, *shared
        )
        for name, value in values.items():
            key = name.split(" ")[-1]
            if key in split:
                values[name] = value.chunk(2, split[key])[mesh.get_local_rank("model")]
            elif name.endswith(("output", "input", "probs")):
                values[name] = value.chunk(2)[place]
        return {name: values[name] for name in found}, scales

    expected, expected_scales = alone(ALONE[recipe])
    exact = alone(None)[0] if scaling is not None else None
    compare(found, expected, exact, dtype)
    if recipe == "delayed":
        same_everywhere(states)
        # Experts in the same place share the smaller scale. Sums in another order flip codes, on
        # which scales of what follows depend.
        of_experts = expected_scales[1].view(2, 2, local, 3).amin(1).flatten(0, 1)
        factors = torch.tensor([1.0, 1.0, 2.0], device=device)
        tolerance = 0.01 if dtype is torch.float32 else 0.1
        for ours, theirs in zip(scales, (expected_scales[0], of_experts), strict=True):
            torch.testing.assert_close(ours * factors, theirs, rtol=tolerance, atol=0.0)
        assert torch.equal(scales[0][:, 1], expected_scales[0][:, 1])  # weights


SPLIT = [
    (kind, exchange, recipe)
    for kind in ("ddp", "fsdp", "fsdp fp8")
    for exchange in ("all_to_all", "all_gather")
    for recipe in RECIPES
    if kind != "fsdp fp8" or recipe != "none"
]


@pytest.mark.parametrize(
    ("where", "kind", "exchange", "recipe"), cases(lambda size: SPLIT, (4, "gloo"), (4, "nccl"))
)
def test_split_experts(all_ranks, where, kind, exchange, recipe):
    if where[1] == "nccl" and exchange == "all_gather" and recipe != "none":
        pytest.skip("FFN / 2 is not a multiple of 16, which splits on the device need in FP8")
    ranks_of(all_ranks, *where).run(split_layout, kind, exchange, recipe)
