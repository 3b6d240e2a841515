"""Tensor-parallel ranks that are about to do different things: an error on all of them at once."""

import copy
import pickle

import pytest
import torch
from on_rank import device_of, recorded, told
from torch import distributed

import apex_te
from apex_te import fp8_autocast
from apex_te.comm import agreement
from apex_te.comm.agreement import check_same
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.recipe import CurrentScaling, DelayedScaling, Format

IN, FFN, ROWS = 32, 64, 8
DELAYED = DelayedScaling(amax_history_len=4)


def _make(kind, device, sequence_parallel=True, **options):
    options |= {"tp_group": distributed.group.WORLD, "device": device}
    if kind == "mlp":
        return apex_te.LayerNormMLP(
            IN, FFN, set_parallel_mode=True, sequence_parallel=sequence_parallel, **options
        )
    make = {"column": apex_te.Linear, "row": apex_te.Linear, "norm": apex_te.LayerNormLinear}[kind]
    mode = "row" if kind == "row" else "column"
    return make(IN, FFN, parallel_mode=mode, sequence_parallel=sequence_parallel, **options)


def _step(module, x, recipe=None):
    with fp8_autocast(recipe is not None, recipe):
        out = module(x)
    out.float().square().mean().backward()
    return out.shape[0]


def _differing(rank, kind, what, recipe):
    """Rank 1 differs; the message, and then a step of a module that is the same everywhere."""
    amax_groups.pending = 0  # no update: the ranks have made different modules
    device = device_of(rank)
    odd, recipe = rank == 1, {"none": None, "delayed": DELAYED}[recipe]
    options, features, rows = {}, IN, ROWS
    if kind == "row":
        features //= distributed.get_world_size()
    if odd and what == "sequence_parallel":
        options["sequence_parallel"] = False
    elif odd and what == "parallel_mode":
        kind = "norm"
    elif odd and what == "save_original_input":
        options[what] = True
    elif odd and what == "dtype":
        options["params_dtype"] = torch.bfloat16
    module = _make(kind, device, **options)
    if odd and what in ("weights", "one weight"):
        for parameter in list(module.parameters())[: 1 if what == "one weight" else None]:
            parameter.requires_grad_(False)
    dtype = next(module.parameters()).dtype
    x = torch.ones(rows + (odd and what == "rows"), features, dtype=dtype, device=device)
    if odd and what == "refused":
        x = x[:, 1:]
    x.requires_grad_(not (odd and what == "input"))
    if odd and what == "recipe":
        recipe = CurrentScaling()
    elif odd and what == "reduce_amax":
        recipe = DelayedScaling(amax_history_len=4, reduce_amax=False)
    elif odd and what == "region":
        recipe = None
    message = told(_step, module, x, recipe)
    ranks = distributed.get_world_size()
    assert _step(_make("column", device), torch.ones(ROWS, IN, device=device)) == ROWS * ranks
    return message


TOLD = {
    "weights": "trained parameters (got weight, bias on rank 0 and none on rank 1)",
    "one weight": "trained parameters (got weight, bias on rank 0 and bias on rank 1)",
    "input": "inp requires_grad (got True on rank 0 and False on rank 1)",
    "rows": "inp shape (got [8, 32] on rank 0 and [9, 32] on rank 1)",
    "sequence_parallel": "sequence_parallel (got True on rank 0 and False on rank 1)",
    "save_original_input": "save_original_input (got False on rank 0 and True on rank 1)",
    "parallel_mode": "class (got Linear on rank 0 and LayerNormLinear on rank 1)",
    "dtype": "inp dtype (got torch.float32 on rank 0 and torch.bfloat16 on rank 1)",
    "recipe": "recipe (got DelayedScaling on rank 0 and CurrentScaling on rank 1)",
    "reduce_amax": "recipe.reduce_amax (got True on rank 0 and False on rank 1)",
    "region": "fp8_autocast enabled (got True on rank 0 and False on rank 1)",
}


def _check(messages, told):
    for message in messages:
        assert message.startswith("RankMismatchError: ")
        assert told in message


@pytest.mark.parametrize("what", TOLD)
def test_linear(two_ranks, what):
    _check(two_ranks.run(_differing, "column", what, "delayed"), TOLD[what])


@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("what", ["weights", "one weight", "input", "rows"])
@pytest.mark.parametrize("kind", ["row", "norm", "mlp"])
def test_other_modules(two_ranks, kind, what, recipe):
    told = TOLD[what].split(" (got", 1)[0]
    _check(two_ranks.run(_differing, kind, what, recipe), f"the same {told} (got ")


def test_values_of_many_ranks():
    ranks, own = list(range(40, 60)), {"key": "a"}
    found = [own if rank != 41 else {"key": "b"} for rank in ranks]
    few = agreement._by_value("key", ranks[:4], found[:4])
    assert few == "a on ranks 40, 42, 43 and b on rank 41"
    many = agreement._by_value("key", ranks, found)
    assert many.startswith("a on ranks 40, 42, ")
    assert many.endswith(", 56 and 3 more and b on rank 41")


def test_refused_on_one_rank(two_ranks):
    """The rank with the wrong input says what is wrong with it, the others that it does."""
    ours, theirs = two_ranks.run(_differing, "column", "refused", "none")
    assert theirs == "ValueError: Linear: inp must have a last dimension of 32, got [8, 31]"
    assert ours == (
        "RankMismatchError: Linear: arguments must fit on all of the ranks of tp_group "
        f"(ranks 0, 1), got {theirs} on rank 1"
    )


@pytest.mark.cuda
@pytest.mark.parametrize("what", ["weights", "input", "rows", "reduce_amax"])
def test_on_gpus(two_gpus, what):
    _check(two_gpus.run(_differing, "column", what, "delayed"), TOLD[what])


def _times_asked(rank):
    """How often ranks compare what they are about to do, step by step."""
    amax_groups.pending = 0
    layer, group, x = _make("mlp", "cpu"), distributed.group.WORLD, torch.ones(ROWS, IN)
    found = []

    def count(run, *args):
        with recorded("all_gather", lambda *args, **kwargs: None) as asked:
            run(*args)
        found.append(len(asked))

    with torch.no_grad():
        count(layer, x)
    count(_step, layer, x)
    count(_step, layer, x, DELAYED)
    count(_step, copy.deepcopy(layer), x)
    read = pickle.loads(pickle.dumps(layer))
    for module in (read, layer):
        module.set_tensor_parallel_group(group)
        count(_step, module, x)
    options = {"bias": False, "parallel_mode": "column", "tp_group": group}
    grouped = apex_te.GroupedLinear(2, IN, FFN, **options)
    rows = [1 + rank, 2]  # a rank has tokens of its own
    count(lambda: grouped(x[: 3 + rank], rows).sum().backward())
    return found


def test_asks_once(two_ranks):
    """Without gradients never; a copy, and one with another group, once more."""
    assert two_ranks.run(_times_asked) == [[0, 1, 0, 1, 1, 1, 0]] * 2


def _compiled(rank):
    """Not in a graph, which needs no other one once eager code has asked."""
    torch._dynamo.reset()
    layer = _make("column", "cpu")
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.ones(ROWS, IN)
    with torch.no_grad():
        layer(x)
    for _ in range(2):
        _step(compiled, x)
        _step(layer, x)
    torch._dynamo.reset()
    return len(graphs)


def test_compiled_code_does_not_ask(two_ranks):
    assert two_ranks.run(_compiled) == [1, 1]


def _long(rank):
    values = {f"value {i}": "x" * 100 for i in range(60)} | {"last": rank}
    given = values, {"first": rank, **values}
    return [told(check_same, "Test", "group", None, g, torch.device("cpu")) for g in given]


def test_longer_than_what_is_sent(two_ranks):
    """The digest differs even if what can be shown does not."""
    for unseen, seen in two_ranks.run(_long):
        assert unseen.endswith("must have the same description beyond 4096 bytes")
        assert seen.endswith("must have the same first (got 0 on rank 0 and 1 on rank 1)")


def _doubled(amax):
    return 2 * amax


def test_values_are_told_in_words():
    """Nothing that is another in each process, as an address is."""
    recipe = DelayedScaling(amax_compute_algo=_doubled, fp8_format=Format.E4M3)
    told = agreement._read(agreement._description(vars(recipe), False))
    assert (told["amax_compute_algo"], told["fp8_format"]) == ("_doubled", "E4M3")
    assert "0x" not in str(told)
