"""MoELayer with its experts spread over ranks, against one rank that has them all."""

import copy
import itertools
import pickle

import pytest
import torch
from on_rank import alone, assert_told, device_of, dtype_of, load, save, told
from schemes import chosen
from shards import decibels
from torch import distributed
from torch.distributed.fsdp import fully_shard

from apex_te import MoELayer, flush_fp8_state, fp8_autocast, fp8_model_init
from apex_te.distributed import get_state_dict, reduce_main_grads, set_state_dict
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.module.grouped import experts
from tests.checks import assert_same_bits

HIDDEN, FFN, EXPERTS, TOKENS = 32, 48, 4, 12
RECIPES = {"none": None, **chosen("delayed", "tensorwise", "blockwise", "mxfp8", reduce_amax=False)}
EXCHANGES = ("all_to_all", "all_gather")


def layer_of(device, held=False, stored=None, **options):
    options = {"bias": True, "params_dtype": dtype_of(device), "device": device, **options}
    torch.manual_seed(3)
    ffn, count = options.pop("ffn", FFN), options.pop("experts", EXPERTS)
    with fp8_model_init(held, stored):
        layer = MoELayer(HIDDEN, ffn, count, **options)
    assert (type(layer.fc1.weight) is FP8Parameter) == held
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, value in sorted(layer.named_parameters()):
            spread = name.startswith("fc")
            shape = (count, *value.shape[1:]) if spread else value.shape
            whole = torch.randn(shape, generator=generator) * 0.2
            value.copy_(part_of(whole, layer) if spread else whole)
    return layer


def part_of(whole, layer):
    """This rank's experts of all."""
    if layer.expert_ranks == 1:
        return whole
    return whole.chunk(layer.expert_ranks)[distributed.get_rank(layer.expert_group)]


def step(layer, x, dy, recipe):
    x = x.clone().requires_grad_()
    with fp8_autocast(recipe is not None, recipe):
        out = layer(x)
    out.backward(dy)
    return out.detach(), x.grad


def tokens_of(exchange, device):
    """Tokens and gradients of each rank; with "all_to_all" in other numbers."""
    torch.manual_seed(5)
    ranks = distributed.get_world_size()
    counts = [TOKENS - 5 * r if exchange == "all_to_all" else TOKENS for r in range(ranks)]
    pairs = [torch.randn(2, count, HIDDEN) for count in counts]
    return [pair.to(device, dtype_of(device)).unbind(0) for pair in pairs]


def against_one_rank(rank, exchange, recipe, held):
    device = device_of(rank)
    dtype, scaling = dtype_of(device), RECIPES[recipe]
    # Scales of a shared expert's tensors would be those of one rank's tokens.
    shared = 16 if recipe in ("none", "blockwise", "mxfp8") else None
    options = {"shared_expert_ffn_hidden_size": shared, "held": held, "stored": scaling}
    spread = layer_of(device, expert_group=distributed.group.WORLD, exchange=exchange, **options)
    whole = layer_of(device, **options)
    # Keeps the probabilities out of what FC2 casts, where they are between ranks, too.
    whole.fc2.register_forward_pre_hook(lambda *args: None)
    every = tokens_of(exchange, device)
    joined = [torch.cat(parts) for parts in zip(*every, strict=True)]
    ends = list(itertools.accumulate(len(x) for x, _ in every))
    mine = slice(ends[rank] - len(every[rank][0]), ends[rank])
    for _ in range(2):
        spread.zero_grad()
        whole.zero_grad()
        out, grad = step(spread, *every[rank], scaling)
        wanted, wanted_grad = step(whole, *joined, scaling)
    found = {"out": (out, wanted[mine]), "x": (grad, wanted_grad[mine])}
    for name, parameter in whole.named_parameters():
        grad = spread.get_parameter(name).grad
        if name.startswith("fc"):
            found[name] = grad, part_of(parameter.grad, spread)
        else:
            distributed.all_reduce(grad)
            found[name] = grad, parameter.grad
    counts = spread.tokens_per_expert.clone()
    distributed.all_reduce(counts)
    assert torch.equal(counts, whole.tokens_per_expert)
    for name, (value, other) in found.items():
        assert value.shape == other.shape, name
        least = 100 if recipe == "none" else 25
        if dtype is not torch.float32:
            least = 35 if recipe == "none" else 20
        ratio = decibels(value, other)
        assert ratio > least, f"{name}: {ratio:.1f} dB"


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("held", [False, True], ids=["bf16 weights", "FP8 weights"])
def test_equals_one_rank(each_two, exchange, recipe, held):
    each_two.run(against_one_rank, exchange, recipe, held)


def on_the_wire(rank, exchange, recipe):
    """FP8 between the ranks changes no bit of what rows of blocks are computed from."""
    device, scaling = device_of(rank), RECIPES[recipe]
    x, dy = tokens_of(exchange, device)[rank]
    results, layers = [], []
    for wire in (None, "blockwise"):
        options = {"expert_group": distributed.group.WORLD, "exchange": exchange, "wire": wire}
        layers.append(copy.deepcopy(layer_of(device, **options)))
        results.append(step(layers[-1], x, dy, scaling))
    exact = recipe == "blockwise"
    if exact:
        assert_same_bits(results[0][0], results[1][0])
    if exact and exchange == "all_to_all":
        assert_same_bits(results[0][1], results[1][1])
    grads = [[parameter.grad for parameter in layer.parameters()] for layer in layers]
    for pair in (*zip(*results, strict=True), *zip(*grads, strict=True)):
        # E5M2 of a gradient has 26 dB alone; the router's gradient is a difference of such.
        assert decibels(pair[1], pair[0]) > 16
        assert exact or not torch.equal(*pair)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("recipe", ["none", "tensorwise", "blockwise"])
def test_wire(each_two, exchange, recipe):
    each_two.run(on_the_wire, exchange, recipe)


def fused(rank, exchange, recipe, wire):
    """Experts as one function give the bits of one op at a time."""
    device, scaling = device_of(rank), RECIPES[recipe]
    group, (x, dy) = distributed.group.WORLD, tokens_of(exchange, device)[rank]
    options = {"bias": False, "ffn": 128, "expert_group": group, "exchange": exchange, "wire": wire}
    layer, other = (layer_of(device, **options) for _ in range(2))
    # A hook has the experts' ops run one at a time.
    other.fc1.register_forward_pre_hook(lambda *_: None)
    calls, of = [], experts.ExpertsFunction.apply
    experts.ExpertsFunction.apply = lambda *args: calls.append(1) or of(*args)
    try:
        for _ in range(3):
            assert_same_bits(*(step(each, x, dy, scaling) for each in (layer, other)))
    finally:
        del experts.ExpertsFunction.apply
    assert len(calls) == 3
    for value, wanted in zip(layer.parameters(), other.parameters(), strict=True):
        assert_same_bits(value.grad, wanted.grad)


@pytest.mark.parametrize("wire", [None, "blockwise"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_fused_experts(each_two, exchange, recipe, wire):
    each_two.run(fused, exchange, recipe, wire)


def losses_and_capacity(rank, exchange):
    """They are those of a layer with all experts and this rank's tokens."""
    device = device_of(rank)
    options = {"capacity_factor": 0.6, "aux_loss_coeff": 0.1, "z_loss_coeff": 0.1}
    spread = layer_of(device, expert_group=distributed.group.WORLD, exchange=exchange, **options)
    whole = layer_of(device, **options)
    summed = {name: 0.0 for name, _ in whole.named_parameters()}
    for r, (x, dy) in enumerate(tokens_of(exchange, device)):
        whole.zero_grad()
        results = step(whole, x, dy, None)
        for name, parameter in whole.named_parameters():
            summed[name] = summed[name] + parameter.grad
        if r == rank:
            found = step(spread, x, dy, None)
            torch.testing.assert_close(found, results, rtol=1e-5, atol=1e-5)
            for name in ("aux_loss", "z_loss", "tokens_per_expert"):
                assert_same_bits(getattr(spread, name), getattr(whole, name))
    for name, parameter in spread.named_parameters():
        is_expert = name.startswith("fc")
        if not is_expert:
            distributed.all_reduce(parameter.grad)
        wanted = part_of(summed[name], spread) if is_expert else summed[name]
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_losses_and_capacity(two_ranks, exchange):
    two_ranks.run(losses_and_capacity, exchange)


def first_values_and_copies(rank):
    group = distributed.group.WORLD
    torch.manual_seed(0)
    layer = MoELayer(HIDDEN, FFN, EXPERTS, expert_group=group, shared_expert_ffn_hidden_size=16)
    after = torch.rand(())
    every = [None] * distributed.get_world_size()
    values = {name: value.detach() for name, value in layer.named_parameters()}
    distributed.all_gather_object(every, (values, after))
    for name, value in every[0][0].items():
        assert torch.equal(value, every[1][0][name]) != name.startswith("fc"), name
    assert every[0][1] == every[1][1]
    spread = [not getattr(p, "allreduce", True) for p in layer.parameters()]
    assert spread == [name.startswith("fc") for name in values]
    x = torch.randn(4, HIDDEN)
    again, loaded = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    empty = MoELayer(
        HIDDEN, FFN, EXPERTS, expert_group=group, shared_expert_ffn_hidden_size=16, device="meta"
    ).to_empty(device="cpu")
    for other in (again, loaded, empty):
        assert spread == [not getattr(p, "allreduce", True) for p in other.parameters()]
    assert_same_bits(again(x), layer(x))
    found = [
        told(loaded, x),
        told(loaded.set_expert_group, alone(rank)),
        told(MoELayer, HIDDEN, FFN, 3, expert_group=group),
        told(MoELayer, HIDDEN, FFN, 4, expert_group=group, exchange="ring"),
        told(MoELayer, HIDDEN, FFN, 4, expert_group=group, wire="fp8"),
    ]
    loaded.set_expert_group(group)
    assert_same_bits(loaded(x), layer(x))
    layer.zero_grad()
    (layer(x).sum() * (rank + 1)).backward()
    grads = {name: value.grad.clone() for name, value in layer.named_parameters()}
    reduce_main_grads(layer, average=False)
    for name, value in layer.named_parameters():
        assert torch.equal(value.grad, grads[name]) == name.startswith("fc"), name
    return found


def test_first_values_and_copies(two_ranks):
    """Experts differ between ranks, and nothing else does; copies know that."""
    for found in two_ranks.run(first_values_and_copies):
        assert_told(found, [
            "ValueError: MoELayer: expert_group must be set by set_expert_group",
            "ValueError: MoELayer: expert_group must have the 2 ranks",
            "ValueError: MoELayer: num_experts must be a multiple of the 2 ranks",
            "ValueError: MoELayer: exchange must be one of all_to_all, all_gather, got 'ring'",
            'ValueError: MoELayer: wire must be "blockwise", a BlockScaling recipe or None',
        ])  # fmt: skip


def trained(layer, optimizer, steps, scaling, rank=0, ranks=1):
    """Losses of all ranks' tokens."""
    losses = []
    for seed in steps:
        torch.manual_seed(seed)
        x = torch.randn(16, HIDDEN).chunk(ranks)[rank]
        optimizer.zero_grad()
        with fp8_autocast(scaling is not None, scaling):
            loss = (layer(x) - x).square().sum()
        loss.backward()
        loss = loss.detach()
        if ranks > 1:
            distributed.all_reduce(loss)
            reduce_main_grads(layer, average=False)
        optimizer.step()
        losses.append(loss.item())
    flush_fp8_state()
    return losses


def checkpoints(rank, path, recipe, held):
    """Saved by spread experts; loaded by spread experts and by one rank."""
    world, ranks, scaling = distributed.group.WORLD, distributed.get_world_size(), RECIPES[recipe]

    def made(group):
        layer = layer_of(torch.device("cpu"), held, expert_group=group)
        return layer, torch.optim.AdamW(layer.parameters(), lr=1e-2)

    spread = made(world)
    trained(*spread, range(2), scaling, rank, ranks)
    save(path, *spread, get_state_dict, expert_group=world)
    wanted = trained(*spread, range(2, 4), scaling, rank, ranks)
    again = made(world)
    trained(*again, range(7, 8), scaling, rank, ranks)
    load(path, *again, get_state_dict, set_state_dict, expert_group=world)
    assert trained(*again, range(2, 4), scaling, rank, ranks) == wanted
    single = made(None)
    # Probabilities outside of FP8, as those of several ranks are.
    single[0].fc2.register_forward_pre_hook(lambda *_: None)
    trained(*single, range(7, 8), scaling)
    load(path, *single, get_state_dict, set_state_dict, expert_group=alone(rank))
    parts = {name: value for name, value in spread[0].state_dict().items() if "fp8" not in name}
    assert parts["fc1.weight"].shape[0] * ranks == single[0].fc1.weight.shape[0]
    found = trained(*single, range(2, 4), scaling)
    torch.testing.assert_close(found, wanted, rtol=1e-4 if scaling is None else 1e-2, atol=0.0)
    for name, value in parts.items():
        whole = single[0].state_dict()[name]
        whole = part_of(whole, spread[0]) if name.startswith("fc") else whole
        assert decibels(value, whole) > (60 if scaling is None else 25), name


@pytest.mark.parametrize(
    ("recipe", "held"), [("none", False), ("delayed", False), ("delayed", True)], ids=str
)
def test_checkpoints(two_ranks, tmp_path, recipe, held):
    two_ranks.run(checkpoints, str(tmp_path), recipe, held)


def sharded(rank, parts, recipe, held):
    device = device_of(rank)
    layer = layer_of(device, held, recipe, bias=False)
    other = copy.deepcopy(layer)
    for name in parts:
        fully_shard(layer.get_submodule(name))
        # A hook, such as FSDP2's, has the experts' ops run one at a time.
        other.get_submodule(name).register_forward_pre_hook(lambda *_: None)
    fully_shard(layer)
    results = []
    for seed in range(2):
        torch.manual_seed(10 * seed + rank)
        x, dy = torch.randn(2, TOKENS, HIDDEN).to(device, dtype_of(device))
        results += [step(each, x, dy, recipe) for each in (layer, other)]
    for i in (0, 2):
        assert_same_bits(*results[i : i + 2])
    for name, value in layer.named_parameters():
        wanted = other.get_parameter(name).grad.float()
        distributed.all_reduce(wanted)
        wanted /= distributed.get_world_size()
        assert decibels(value.grad.full_tensor(), wanted) > 40, name
        other.get_parameter(name).grad = wanted.to(value.dtype)
    for each in (layer, other):
        torch.optim.SGD(each.parameters(), lr=0.01).step()
    for name, value in layer.named_parameters():
        assert (type(value.to_local()) is FP8Parameter) == (held and name.startswith("fc"))
        assert decibels(value.full_tensor().float(), other.get_parameter(name).float()) > 35, name


@pytest.mark.parametrize("parts", [(), ("fc1", "fc2")], ids=["whole", "each"])
@pytest.mark.parametrize("recipe", ["none", "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("held", [False, True], ids=["bf16 weights", "FP8 weights"])
def test_fully_sharded(each_two, parts, recipe, held):
    """FSDP2 over the layer, or over each of its two grouped layers, too."""
    each_two.run(sharded, parts, RECIPES[recipe], held)
