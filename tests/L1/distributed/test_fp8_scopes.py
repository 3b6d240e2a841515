"""Regions with groups of their own: each moves the scales of what ran in it, over its ranks."""

import copy
import gc

import pytest
import torch
from on_rank import all_equal, alone, device_of, recorded, told
from torch import distributed

import apex_te
from apex_te import flush_fp8_state, fp8_autocast
from apex_te.comm.groups import _covered, covers
from apex_te.fp8.delayed.ranks import _QUANTUM, RankReduction, SlotRange, amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)
OWN = DelayedScaling(amax_history_len=4, reduce_amax=False)
SIZE = 16


def _rows(seed, device):
    return torch.randn(32, SIZE, generator=torch.Generator().manual_seed(seed)).to(device)


def _counted():
    """Numbers and groups of the all-reduces inside."""
    return recorded("all_reduce", lambda x, *args, group=None, **kwargs: (x.numel(), group))


def _experts(rank, how):
    """A dense layer over the world, then experts that keep their amaxes to themselves."""
    amax_groups.pending = 0
    torch.manual_seed(1)
    device = device_of(rank)
    dense = apex_te.Linear(SIZE, SIZE).to(device)
    experts = apex_te.GroupedLinear(2, SIZE, SIZE, False).to(device)
    group = alone(rank) if how == "group" else None
    own = OWN if how == "reduce_amax" else RECIPE
    values = []
    with _counted() as calls:
        for step in range(5):
            x = _rows(step, device) * (1 + 7 * rank)
            with fp8_autocast(True, RECIPE):
                y = dense(x)
            with fp8_autocast(True, own, group):
                z = experts(x, [16, 16])
            values.append(x[:16].abs().max().item())
            (y.sum() + z.sum() * (1 + rank)).backward()
        flush_fp8_state()
    scales = {name: getattr(dense.fp8_state, name).cpu() for name in TENSORS}
    found = experts.fp8_state.scale_fwd[0].item(), experts.fp8_state.scale_bwd[0].item()
    return scales, found, max(values[-4:]), [group for _, group in calls].count(None), len(calls)


@pytest.mark.parametrize("how", ["group", "reduce_amax"])
def test_dense_layers_and_experts(each_two, how):
    (ours, *mine), (theirs, *other) = each_two.run(_experts, how)
    assert all(torch.equal(ours[name], theirs[name]) for name in TENSORS)
    assert ours["scale_bwd"][0] != 1
    for (forward, backward), largest, world, _ in (mine, other):
        assert forward == pytest.approx(448.0 / largest)
        assert world == 5  # one collective an update, of the dense layer's regions alone
        assert backward != 1
    assert mine[0][0] != other[0][0]
    assert mine[0][1] == 2 * other[0][1]


def _split(rank, change):
    """Column- and row-parallel layers with rows of very different size, against one rank."""
    amax_groups.pending = 0
    torch.manual_seed(1)
    tp, own_group, device = distributed.group.WORLD, alone(rank), device_of(rank)
    w1, w2 = torch.randn(32, SIZE) * 0.3, torch.randn(SIZE, 32) * 0.3
    kwargs = {"tp_group": tp, "sequence_parallel": True}
    column = apex_te.Linear(SIZE, 32, False, parallel_mode="column", **kwargs)
    row = apex_te.Linear(32, SIZE, False, parallel_mode="row", **kwargs)
    with torch.no_grad():
        column.weight.copy_(w1.chunk(2, 0)[rank])
        row.weight.copy_(w2.chunk(2, 1)[rank])
    extra = apex_te.Linear(SIZE, SIZE).to(device)
    column.to(device)
    row.to(device)
    found, gathered = [], []
    for step in range(8):
        x = _rows(7, device)
        x[16:] *= 20  # rank 1's rows
        own = x.chunk(2)[rank].clone().requires_grad_()
        recipe, group = RECIPE, None
        if change in ("group", "backward"):
            group = own_group if step < 4 else None
        elif change == "reduce_amax":
            recipe = OWN if step < 4 else RECIPE
        elif change == "load" and step == 4:  # of a run whose ranks had scales of their own
            state = {name: value.clone() for name, value in column.state_dict().items()}
            with torch.no_grad():
                for name in ("scale_fwd", "amax_history_fwd"):
                    state[f"fp8_state.{name}"] *= 1 + 2.0 * rank
            state["fp8_state.scale_inv_fwd"] = 1 / state["fp8_state.scale_fwd"]
            column.load_state_dict(state)
        with fp8_autocast(True, recipe, group):
            y = row(column(own))
        gathered.append(column.fp8_state.sync.over(tp))
        if change == "backward":  # another region before the backward
            with fp8_autocast(True, RECIPE, None if step < 4 else own_group):
                y = y + 0 * extra(y)
        y.square().sum().backward()
        reference = (x @ w1.to(device).t() @ w2.to(device).t()).chunk(2)[rank]
        found.append(((y.detach() - reference).norm() / reference.norm()).item())
    flush_fp8_state()
    return found, gathered, [getattr(column.fp8_state, name).cpu() for name in TENSORS]


def _check_split(answers, change):
    for errors, gathered, _ in answers:
        assert max(errors[1:]) < 0.1, errors
        if change == "none":
            assert all(gathered)
        else:  # the second update over the world makes them equal
            assert not any(gathered[:6])
            assert all(gathered[6:])
    assert all_equal(answers[0][2], answers[1][2])


@pytest.mark.parametrize("change", ["none", "group", "backward", "reduce_amax"])
def test_rows_travel_as_codes_only_with_equal_scales(fresh, change):
    """Scales of ranks that moved on their own become equal again, history and all."""
    _check_split(fresh.run(_split, change), change)


@pytest.mark.cuda
def test_rows_travel_as_codes_on_gpus(two_gpus):
    for change in ("none", "group", "backward", "reduce_amax"):
        _check_split(two_gpus.run(_split, change), change)


def test_loaded_scales_become_equal(fresh):
    answers = fresh.run(_split, "load")
    for _, gathered, _ in answers:
        assert all(gathered)  # by what was saved: equal over the world
    assert all_equal(answers[0][2], answers[1][2])


def _resumed(rank):
    """What was saved with a pending update goes on bit by bit, each region over its ranks."""
    amax_groups.pending = 0
    group = alone(rank)
    torch.manual_seed(1)
    models = [torch.nn.ModuleList(apex_te.Linear(SIZE, SIZE) for _ in range(2)) for _ in range(2)]
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        theirs.data.copy_(ours.data)

    def step(model, number):
        x = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(number)) * (1 + 7 * rank)
        with fp8_autocast(True, RECIPE):
            y = model[0](x)
        with fp8_autocast(True, RECIPE, group):
            z = model[1](x)
        (y.sum() + z.sum()).backward()

    for number in range(3):
        step(models[0], number)
    saved = copy.deepcopy(models[0].state_dict())
    for number in range(3, 6):
        step(models[0], number)
    expected = [getattr(m.fp8_state, name).clone() for m in models[0] for name in TENSORS]
    models[0] = None
    gc.collect()
    models[1].load_state_dict(saved)
    for number in range(3, 6):
        step(models[1], number)
    found = [getattr(m.fp8_state, name) for m in models[1] for name in TENSORS]
    return all_equal(expected, found)


def test_resuming_with_two_groups(fresh):
    assert all(fresh.run(_resumed))


def _flushed(rank):
    amax_groups.pending = 0
    group, again = alone(rank), alone(rank)
    first, second = apex_te.Linear(SIZE, SIZE), apex_te.Linear(SIZE, SIZE)
    found = []
    for wrong in ("x", group):
        with fp8_autocast(True, RECIPE):
            first(torch.full((4, SIZE), 1.0 + rank)).sum().backward()
        found.append(told(flush_fp8_state, wrong))
    with fp8_autocast(True, RECIPE, group):
        second(torch.full((4, SIZE), 1.0 + rank)).sum().backward()
    flush_fp8_state(again)  # another group of the same ranks
    found.append((first.fp8_state.scale_fwd[0].item(), second.fp8_state.scale_fwd[0].item()))
    flush_fp8_state(distributed.group.WORLD)
    flush_fp8_state()
    found.append(first.fp8_state.scale_fwd[0].item())
    return found


def test_flush(fresh):
    for rank, (kind, group, one, both) in enumerate(fresh.run(_flushed)):
        assert kind == (
            "TypeError: flush_fp8_state: group must be a torch.distributed.ProcessGroup, got str"
        )
        assert group.startswith("ValueError: flush_fp8_state: group must be the fp8_group of")
        assert group.endswith(f"got ranks [{rank}]")
        assert one == (448.0 / 2, 448.0 / (1 + rank))  # the second region has updated the first
        assert both == 448.0 / 2


def _compiled(rank, how):
    """Two layers of one code, in regions with groups of their own, inside or outside of a graph."""
    amax_groups.pending = 0
    group = alone(rank)
    torch.manual_seed(1)
    torch.compiler.reset()
    layers = [apex_te.Linear(SIZE, SIZE), apex_te.Linear(SIZE, SIZE)]
    called = [torch.compile(layer, backend="aot_eager") for layer in layers]

    def both(x, modules):
        with fp8_autocast(True, RECIPE):
            y = modules[0](x)
        with fp8_autocast(True, RECIPE, group):
            z = modules[1](x)
        return y.sum() + z.sum() * (1 + rank)

    run = torch.compile(both, backend="aot_eager") if how == "inside" else both
    for step in range(3):
        x = _rows(step, "cpu") * (1 + 7 * rank)
        run(x, called if how == "outside" else layers).backward()
    flush_fp8_state()
    return [getattr(layer.fp8_state, name).clone() for layer in layers for name in TENSORS]


def test_compiled_layers(two_ranks):
    expected = two_ranks.run(_compiled, "eager")
    for how in ("inside", "outside"):
        for ours, theirs in zip(expected, two_ranks.run(_compiled, how), strict=True):
            assert all_equal(ours, theirs), how


def _many(rank, counts):
    """More modules than the first collective has numbers for."""
    found, modules, device = [], [], device_of(rank)

    def steps(linear):
        for _ in range(4):
            with fp8_autocast(True, RECIPE):
                linear(torch.full((16, SIZE), 1.0 + rank, device=device)).sum().backward()

    for count in counts[rank]:
        modules.append(apex_te.GroupedLinear(count, SIZE, SIZE, bias=False))
        linear = apex_te.Linear(SIZE, SIZE).to(device)
        with _counted() as calls:
            error = told(steps, linear)
        if error != "nothing was raised":
            return [*found, error]
        found += [linear.fp8_state.scale_fwd[0].item(), [numbers for numbers, _ in calls]]
    return found


def test_more_slots_than_the_first_collective_holds(fresh):
    """It grows once, where all ranks have more; then each update is one collective again."""
    assert _QUANTUM == 16384
    q = _QUANTUM
    ours, theirs = fresh.run(_many, [[3300, 3300]] * 2)
    assert ours == theirs
    assert ours[0] == ours[2] == 224.0
    assert ours[1] == [q, q, 2 * q, 2 * q]
    assert ours[3] == [2 * q, q, 3 * q, 3 * q, 3 * q]


@pytest.mark.parametrize("counts", [[[3300], [3200]], [[3000], [3700]], [[10, 10], [10, 3300]]])
def test_ranks_on_both_sides_of_the_size(fresh, counts):
    for found in fresh.run(_many, counts):
        assert found[-1].startswith("RankMismatchError: fp8_autocast: every rank of fp8_group")


def _unequal(rank):
    """Histories of other lengths, slots that were never set, a rank that is sure."""
    length = 3 + 2 * rank
    history = torch.zeros(length, 3)
    history[1:, 0] = torch.arange(length - 1.0, 0.0, -1.0) + rank  # the newest last
    history[1:, 1] = 5.0 - rank
    scale = torch.tensor([8.0, 2.0 + rank, 1.0])
    slots = [SlotRange(4, history, scale, 1 / scale)]
    sharing = slots[0].scale_inv
    reduction = RankReduction([4, 3], ["a", "b"], slots, torch.device("cpu"), rank == 1)
    done = [reduction.run(None) for _ in range(3)]
    return done, scale.tolist(), sharing.tolist(), history.tolist()


def test_equal_scales_and_histories(fresh):
    ours, theirs = fresh.run(_unequal)
    assert ours[0] == theirs[0] == [False, True, False]
    assert ours[1] == theirs[1] == [8.0, 2.0, 1.0]
    assert ours[2] == theirs[2] == [0.125, 0.5, 1.0]
    assert theirs[3][1:] == [[5, 4, 0], [4, 4, 0], [3, 5, 0], [2, 5, 0]]
    assert ours[3][1:] == theirs[3][-2:]


def _known(rank):
    first, second = distributed.new_group([0, 1]), alone(rank)
    found = [covers(first, second), covers(second, first), covers(first, None), covers(None, first)]
    with recorded("get_process_group_ranks", lambda group: None) as calls:
        found += [covers(first, second), covers(second, first)]
    kept = [first in _covered, second in _covered[first]]
    distributed.destroy_process_group(second)
    del second
    gc.collect()
    return found, len(calls), kept, len(_covered[first])


def test_covers_is_remembered_while_the_groups_live(two_ranks):
    for found, calls, kept, left in two_ranks.run(_known):
        assert found == [True, False, True, True, True, False]
        assert calls == 0
        assert kept == [True, True]
        assert left <= 1  # the whole world's


@pytest.mark.cuda
def test_ranks_on_both_sides_of_the_size_on_gpus(two_gpus):
    for found in two_gpus.run(_many, [[3300, 10], [3300, 3400]]):
        assert found[0] == 224.0
        assert found[-1].startswith("RankMismatchError: fp8_autocast: every rank of fp8_group")


def _evaluated(rank):
    """One rank evaluates between the steps of all; regions of its own read the newest scales."""
    amax_groups.pending = 0
    torch.manual_seed(1)
    device = device_of(rank)
    world, own = (apex_te.Linear(SIZE, SIZE, device=device) for _ in range(2))

    def out(module, recipe):
        with torch.no_grad(), fp8_autocast(True, recipe):
            return module(_rows(9, device))

    equal = []
    for step in range(3):
        x = _rows(step, device) * (1 + 7 * rank)
        with fp8_autocast(True, RECIPE):
            y = world(x)
        with fp8_autocast(True, OWN):
            z = own(x)
        (y.sum() + z.sum()).backward()
        if rank == 0:
            before = world.fp8_state.scale_fwd.clone()
            with _counted() as calls:
                early = out(world, RECIPE), out(own, OWN)
            equal += [not calls, torch.equal(before, world.fp8_state.scale_fwd)]
    flush_fp8_state()
    if rank == 0:
        equal.append(torch.equal(early[1], out(own, OWN)))
    return equal, world.fp8_state.scale_fwd.cpu()


def test_an_evaluation_on_one_rank_needs_no_other(fresh):
    (equal, ours), (_, theirs) = fresh.run(_evaluated)
    assert all(equal)
    assert torch.equal(ours, theirs)


def _calibrated(rank):
    amax_groups.pending = 0
    device = device_of(rank)
    torch.manual_seed(1)
    module = apex_te.Linear(SIZE, SIZE, device=device)
    x = _rows(0, device) * (1 + 7 * rank)
    with _counted() as calls, torch.no_grad(), fp8_autocast(False, RECIPE, calibrating=True):
        module(x)
    return len(calls), module.fp8_state.scale_fwd.cpu(), x.abs().max().item()


def test_calibration_reduces_over_the_group(fresh):
    (calls, ours, one), (_, theirs, other) = fresh.run(_calibrated)
    assert calls == 1
    assert torch.equal(ours, theirs)
    assert ours[0].item() == pytest.approx(448 / max(one, other), rel=1e-6)
