"""Every layout of ranks for a column- and a row-parallel Linear against one rank.

Layouts: tensor-parallel ranks x sequence parallelism x what the other ranks are (replicas under
DistributedDataParallel, FSDP2, FSDP2 whose gathers carry FP8 data) x recipe. Replicas and shards
that all train on the rows of the one rank have its bits: with gradients accumulated, evaluations
between, weights held in FP8, and a checkpoint that goes on under another layout.
"""

import contextlib
import itertools

import pytest
import torch
from on_rank import assert_same, device_of, dtype_of, load, save
from rank_sets import cases, ranks_of
from schemes import SCHEMES, chosen
from shards import decibels
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init, init_fp8_state
from apex_te.distributed import get_state_dict, set_state_dict
from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather
from apex_te.distributed.main_grad import reduce_main_grads
from apex_te.module.linear import Linear
from apex_te.optimizers import FusedAdam
from apex_te.recipe import DelayedScaling

IN, INNER, OUT, ROWS, STEPS, LR = 32, 64, 48, 16, 3, 1e-3
RECIPES = {"none": None, **chosen("delayed", "tensorwise")}
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


def scales_of(states):
    """Of each layer: the scales of its input, its weight and its output's gradient."""
    return [torch.cat((state.scale_fwd[:2], state.scale_bwd[:1])) for state in states]


def train(model, recipe, device, dtype, take, scale, reduced=lambda: None):
    """Outputs, input gradients, parameters' gradients after each step, and what they became.

    Also the scales after each step, if the recipe keeps any.
    """
    found, scales = {}, []
    layers = getattr(model, "module", model)
    states = [layers.first.fp8_state, layers.second.fp8_state]
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
        flush_fp8_state()  # what the next region would do
        if recipe is not None and recipe.keeps_state:
            scales.append(torch.stack(scales_of(states)))
    for name, parameter in model.named_parameters():
        found["updated " + name.removeprefix("module.")] = whole(parameter.detach())
    return found, scales


def compare(found, expected, exact, dtype, same_scales=False):
    """Tolerances of the dtype; with FP8 (``exact`` given) the noise of one rank, to 2 dB.

    ``same_scales``: codes are those of one rank, too, and float32 sums differ in their order only,
    so that hardly a code of the next GEMM does.
    """
    assert found.keys() == expected.keys()
    for name, value in found.items():
        wanted = expected[name]
        assert value.shape == wanted.shape, (name, value.shape, wanted.shape)
        if exact is None and dtype is torch.float32:
            torch.testing.assert_close(
                value, wanted, rtol=1.3e-6, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        elif exact is None:  # sums of bf16 numbers in another order
            assert decibels(value, wanted) > 40, name
        elif same_scales:
            ratio = decibels(value, wanted)
            assert ratio > 60, f"{name}: {ratio:.1f} dB"
        elif name.endswith(
            ("bias", "probs")
        ):  # few numbers, sums in which noise is mostly averaged out
            assert decibels(value, exact[name]) > (40 if "updated" in name else 14), name
        else:
            ours, theirs = (decibels(x, exact[name]) for x in (value, wanted))
            assert ours > max(14, min(theirs, 60) - 2), f"{name}: {ours:.1f}, {theirs:.1f} dB"


def compare_scales(found, expected, replicas, dtype):
    """Scales [layers, 3] of each step: those of one rank.

    Replicas average their gradients, so each starts from one as many times larger.
    """
    factors = torch.tensor([1.0, 1.0, replicas], device=found[0].device)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        ours = ours * factors
        if dtype is torch.float32:
            assert torch.equal(ours, theirs), (step, ours, theirs)
            continue
        # What comes from the data, and the first weights, has no rounding of another order.
        assert torch.equal(ours[0, 0], theirs[0, 0])
        assert torch.equal(ours[-1, 2], theirs[-1, 2])
        if step == 0:
            assert torch.equal(ours[:, 1], theirs[:, 1])
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.0)


def linear_layout(rank, tp, sequence_parallel, data, recipe):
    device, ranks, scaling = device_of(rank), torch.distributed.get_world_size(), RECIPES[recipe]
    dtype = dtype_of(device)
    mesh = mesh_of(device.type, ranks // tp, tp)
    replicas, replica = ranks // tp, mesh.get_local_rank("data")
    group, place = mesh.get_group("model"), mesh.get_local_rank("model")
    model = Pair(device, dtype, group, sequence_parallel)
    fill(model, place, tp)
    parts = {n: p.partition_dim for n, p in model.named_parameters() if p.tensor_model_parallel}
    rows_only = [n for n, p in model.named_parameters() if p.sequence_parallel]
    states = [model.first.fp8_state, model.second.fp8_state]
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

    found, scales = train(model, scaling, device, dtype, take, replicas, reduced)

    alone = Pair(device, dtype)
    fill(alone)
    # The ranks reduce their amaxes; one rank has all of them.
    single = scaling
    if recipe == "delayed":
        single = DelayedScaling(amax_history_len=4, reduce_amax=False)
    expected, expected_scales = train(alone, single, device, dtype, lambda x: x, 1)
    exact = None
    if scaling is not None:
        fill(alone_exact := Pair(device, dtype))
        exact, _ = train(alone_exact, None, device, dtype, lambda x: x, 1)
    for name in list(expected):
        key = name.split(" ", 2)[-1].removeprefix("updated ")
        for values in (expected, exact) if exact else (expected,):
            if key in parts:
                values[name] = values[name].chunk(tp, parts[key])[place]
            elif name.endswith(("output", "input")):
                values[name] = take(values[name])
    compare(found, expected, exact, dtype, recipe == "delayed" and dtype is torch.float32)
    if recipe == "delayed":
        compare_scales(scales, expected_scales, replicas, dtype)
        same_everywhere(states)


def same_everywhere(states):
    """Every rank has the same scales."""
    scales = torch.cat([t for s in states for t in (s.scale_fwd, s.scale_bwd)])
    everywhere = [torch.empty_like(scales) for _ in range(torch.distributed.get_world_size())]
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


@pytest.mark.parametrize(
    ("where", "tp", "sp", "data", "recipe"),
    cases(layouts, (2, "gloo"), (4, "gloo"), (2, "nccl")),
)
def test_linear(all_ranks, where, tp, sp, data, recipe):
    ranks_of(all_ranks, *where).run(linear_layout, tp, sp, data, recipe)


# Replicas and shards, all with the rows of one rank, whose bits they have.

WIDE = 512  # rows of the weights: whole 128-row blocks on each of four ranks
LAYOUTS = ("ddp", "fsdp", "fsdp layers", "fsdp fp8", "hsdp")
ALONE = {**SCHEMES, "delayed": DelayedScaling(amax_history_len=4, reduce_amax=False), "none": None}


def replicated(layout, recipe, held, seed):
    """A model as the layout has it, and its optimizer; ``layout`` "one" is one rank alone."""
    torch.manual_seed(seed)
    scaling = ALONE[recipe] if layout == "one" else {**SCHEMES, "none": None}[recipe]
    with fp8_model_init(recipe=scaling) if held else contextlib.nullcontext():
        model = torch.nn.Sequential(Linear(IN, WIDE), torch.nn.Tanh(), Linear(WIDE, WIDE))
    ranks = torch.distributed.get_world_size()
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout != "one":
        if layout == "fsdp fp8":
            enable_fp8_all_gather(model, scaling)
        sizes = (2, ranks // 2) if layout == "hsdp" else (1, ranks)
        mesh = mesh_of("cpu", *sizes)
        mesh = mesh if layout == "hsdp" else mesh["model"]
        for layer in model if layout == "fsdp layers" else ():
            if not isinstance(layer, torch.nn.Tanh):
                fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    return model, FusedAdam(model.parameters(), lr=1e-2, master_weights=held), scaling


def accumulated(model, optimizer, scaling, steps):
    """Losses of microbatches and of evaluations between them, and what weights became."""
    losses = []
    for step in steps:
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            x = torch.randn(32, IN, generator=generator) * (step + 1)
            flush_fp8_state()  # as one rank does by itself for an evaluation
            with torch.no_grad(), fp8_autocast(scaling is not None, scaling):
                losses.append(model(x[:16].tanh()).square().mean())
            with fp8_autocast(scaling is not None, scaling):
                loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    flush_fp8_state()
    return torch.stack(losses)


def numbers_of(model):
    """Weights, biases and FP8 states, by the names of one rank."""
    found = {}
    for name, value in model.state_dict().items():
        if not name.endswith("header"):
            found[name.removeprefix("module.")] = whole(value).clone()
    return found


def replicas_bits(rank, path, layout, after, recipe, held):
    """Trains, saves, trains on, and goes on under the layout ``after`` as if nothing had been."""
    runs = []
    for kind in ("one", layout):
        model, optimizer, scaling = replicated(kind, recipe, held, 1)
        losses = accumulated(model, optimizer, scaling, range(2))
        if kind == layout:
            save(path, model, optimizer, get_state_dict)
        numbers = numbers_of(model)
        later = accumulated(model, optimizer, scaling, range(2, 4))
        runs.append((losses, numbers, later, numbers_of(model)))
    expected, found = runs
    assert torch.equal(found[0], expected[0])
    assert_same(found[1], expected[1])
    assert torch.equal(found[2], expected[2])
    assert_same(found[3], expected[3])
    model, optimizer, scaling = replicated(after, recipe, held, 2)
    if scaling is not None and scaling.keeps_state:
        init_fp8_state(model, scaling)
    load(path, model, optimizer, get_state_dict, set_state_dict)
    assert torch.equal(accumulated(model, optimizer, scaling, range(2, 4)), expected[2])
    assert_same(numbers_of(model), expected[3])


def replicas(ranks):
    for layout, recipe, held in itertools.product(LAYOUTS, ("none", *SCHEMES), (False, True)):
        if (held and (recipe == "none" or layout == "fsdp fp8")) or (
            layout == "fsdp fp8" and recipe in ("none", "mxfp8")
        ):
            continue
        if layout != "hsdp" or ranks == 4:
            after = {"ddp": "fsdp layers", "fsdp": "ddp", "fsdp layers": "one", "hsdp": "fsdp"}
            yield layout, after.get(layout, "hsdp" if ranks == 4 else "fsdp"), recipe, held


@pytest.mark.parametrize(
    ("where", "layout", "after", "recipe", "held"), cases(replicas, (2, "gloo"), (4, "gloo"))
)
def test_bits_of_replicas(all_ranks, tmp_path, where, layout, after, recipe, held):
    """Ranks with the rows of one have its losses, weights and FP8 states, bit for bit."""
    ranks = ranks_of(all_ranks, *where)
    ranks.run(replicas_bits, str(tmp_path), layout, after, recipe, held)


# A split pair of layers, which has the noise of one rank, and its own bits once more.


def split_pair(split, recipe, held, seed):
    """Layers split over all ranks, or whole ones, their optimizer and recipe."""
    scaling = {**SCHEMES, "none": None}[recipe] if split else ALONE[recipe]
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    with fp8_model_init(recipe=scaling) if held else contextlib.nullcontext():
        model = Pair("cpu", torch.float32, torch.distributed.group.WORLD if split else None)
    if seed:
        torch.manual_seed(seed)
        for layer in (model.first, model.second):
            layer.reset_parameters()
    else:
        fill(model, rank, ranks if split else 1)
    return model, FusedAdam(model.parameters(), lr=1e-3, master_weights=held), scaling


def pair_losses(model, optimizer, scaling, steps, evaluated=True):
    """Losses of microbatches; between them evaluations, which are to change nothing."""
    losses = []
    for step in steps:
        for micro in range(2):
            x, dy = step_data(2 * step + micro, "cpu", torch.float32)
            with fp8_autocast(scaling is not None, scaling):
                loss = (model(x) - dy).square().mean()
            loss.backward()
            losses.append(loss.detach())
            if evaluated:
                with torch.no_grad(), fp8_autocast(scaling is not None, scaling):
                    model(10 * x)
        optimizer.step()
        optimizer.zero_grad()
    flush_fp8_state()
    return torch.stack(losses)


def split_bits(rank, path, recipe, held):
    model, optimizer, scaling = split_pair(True, recipe, held, 0)
    losses = pair_losses(model, optimizer, scaling, range(2))
    save(path, model, optimizer, get_state_dict)
    later = pair_losses(model, optimizer, scaling, range(2, 4))
    plain, other, _ = split_pair(True, recipe, held, 0)
    assert torch.equal(pair_losses(plain, other, scaling, range(2), False), losses)
    one, other, single = split_pair(False, recipe, held, 0)
    torch.testing.assert_close(pair_losses(one, other, single, range(2)), losses, rtol=0.02, atol=0)
    for split in (True, False):
        made, other, single = split_pair(split, recipe, held, 2)
        if single is not None and single.keeps_state:
            init_fp8_state(made, single)
        load(path, made, other, get_state_dict, set_state_dict)
        found = pair_losses(made, other, single, range(2, 4))
        if split:
            assert torch.equal(found, later)
        else:
            torch.testing.assert_close(found, later, rtol=0.02, atol=0)


@pytest.mark.parametrize("held", [False, True], ids=["high precision", "fp8 weights"])
@pytest.mark.parametrize("recipe", SCHEMES)
def test_bits_of_a_split_pair(ranks, tmp_path, recipe, held):
    """Evaluations change nothing, and a checkpoint goes on, split with the same bits or whole."""
    ranks.run(split_bits, str(tmp_path), recipe, held)
