"""Amaxes over ``fp8_group``: one collective, whatever the ranks run, and no hang if they differ."""

import pytest
import torch
from on_rank import alone, recorded, told
from torch import distributed

import apex_te
from apex_te import flush_fp8_state, fp8_autocast
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)


def _step(modules, value=1.0, group=None):
    with fp8_autocast(True, RECIPE, group):
        for module in modules:
            module(torch.full((4, 16), value, requires_grad=True)).sum().backward()


def _steps(modules, count):
    for _ in range(count):
        _step(modules)


def _scales(modules):
    flush_fp8_state()
    return [m.fp8_state.scale_fwd.clone() for m in modules if m.fp8_state.allocated]


def _skips(rank):
    modules = [apex_te.Linear(16, 16) for _ in range(3)]
    if rank:
        modules[2].requires_grad_(False)  # frozen there, trained here
    for _ in range(3):
        _step(modules if rank == 0 else modules[1:], 1.0 + rank)
    return [s[0].item() for s in _scales(modules[1:])]


def test_a_rank_skips_a_module(two_ranks):
    ours, theirs = two_ranks.run(_skips)
    assert ours == theirs == [448.0 / 2.0] * 2


def _collectives(rank):
    modules = [apex_te.Linear(16, 16) for _ in range(5)]
    with recorded("all_reduce") as calls:
        for _ in range(4):
            _step(modules)
        if rank:  # garbage goes at other times on other ranks
            del modules[0]
        _step(modules[-4:])
        flush_fp8_state()
    return calls


def test_one_collective_for_an_update(two_ranks):
    for calls in two_ranks.run(_collectives):
        assert len(calls) == 5
        assert len(set(calls)) == 1


def _without(rank):
    modules = [apex_te.Linear(16, 16)] if rank else []
    return told(_steps, modules, 3)


def test_a_rank_without_modules(fresh):
    for rank, message in enumerate(fresh.run(_without)):
        assert message == (
            "RankMismatchError: fp8_autocast: every rank of fp8_group (the whole world) must have "
            "constructed the same FP8 modules in the same order; "
            f"this rank has {rank}, the ranks have from 0 to 1"
        )


def _other_sizes(rank):
    return told(_steps, [apex_te.LayerNormMLP(16, 32) if rank else apex_te.Linear(16, 16)], 3)


def test_other_modules(fresh):
    for message in fresh.run(_other_sizes):
        assert "this rank has 1, the ranks have from 1 to 1" in message


def _added(rank):
    modules = [apex_te.Linear(16, 16)]
    _steps(modules, 3)
    if rank:
        modules.append(apex_te.Linear(16, 16))
    for count in range(5):
        if (error := told(_step, modules)) != "nothing was raised":
            return count, error
    return None, error


def test_a_module_added_on_one_rank(fresh):
    """It notices at its next update, the other at the one after: before a collective is alone."""
    (later, first), (sooner, second) = fresh.run(_added)
    assert "this rank has 1, the ranks have from 1 to 2" in first
    assert "this rank has 2, the ranks have from 1 to 2" in second
    assert sooner <= later <= sooner + 1


def _subgroup(rank):
    group, module = alone(rank), apex_te.Linear(16, 16)
    for _ in range(2):
        _step([module], 1.0 + rank, group)
    flush_fp8_state(group)
    return module.fp8_state.scale_fwd[0].item()


def test_groups_of_their_own(two_ranks):
    assert two_ranks.run(_subgroup) == [448.0, 224.0]


def _destroyed(rank):
    group, module = distributed.new_group([0, 1]), apex_te.Linear(16, 16)
    distributed.destroy_process_group(group)
    with pytest.raises(ValueError, match=r"fp8_group must be .* was destroyed"):
        _step([module], 1.0, group)
    for _ in range(2):  # and in no region of it
        _step([module], 1.0 + rank)
    return _scales([module])[0][0].item()


def test_a_destroyed_group(two_ranks):
    assert two_ranks.run(_destroyed) == [448.0 / 2.0] * 2


def _reads_alone(rank):
    if rank == 0:  # as a rank does that prints or converts a checkpoint
        weight = FP8Parameter.empty((16, 16), RECIPE, torch.float32)
        weight.copy_(torch.ones(16, 16))
        weight.dequantize()
    modules = [apex_te.Linear(16, 16)]
    for _ in range(3):
        _step(modules, 1.0 + rank)
    return _scales(modules)[0][0].item()


def test_a_rank_reads_fp8_weights_alone(fresh):
    """What reads them is none of the process's FP8 modules."""
    assert fresh.run(_reads_alone) == [448.0 / 2.0] * 2
