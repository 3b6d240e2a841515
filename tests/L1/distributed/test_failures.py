"""Ranks that skip, freeze or lack something: the right result or an error on every rank."""

import sys
import types

import pytest
import torch
from on_rank import all_equal, told
from torch import distributed

import apex_te
from apex_te import flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.integrations.megatron import TEColumnParallelLinear
from apex_te.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)
HIDDEN = 32


def _parallel(rank, case):
    """A tensor-parallel MLP beside a plain layer; what one rank skips, freezes or lacks."""
    amax_groups.pending = 0
    torch.manual_seed(1)
    group = distributed.group.WORLD
    mlp = apex_te.LayerNormMLP(
        HIDDEN, 2 * HIDDEN, set_parallel_mode=True, tp_group=group, sequence_parallel=True
    )
    head = apex_te.Linear(HIDDEN, HIDDEN)
    if case == "frozen" and rank:
        head.requires_grad_(False)
    for step in range(3):
        x = torch.full((4, 2, HIDDEN), 1.0 + rank + step)
        x[..., 0] = 0.5
        with fp8_autocast(True, RECIPE):
            out = mlp(x.requires_grad_())
            if case == "skipped" and rank:
                out.sum().backward()
                continue
            result = head(out)
        if case == "no_backward" and rank:
            # The MLP's backward has collectives, so it runs everywhere; the head's has none.
            result = result.detach() * out
        result.square().sum().backward()
    flush_fp8_state()
    found = {}
    for name, module in (("mlp", mlp), ("head", head)):
        if module.fp8_state.allocated:
            found[name] = {key: getattr(module.fp8_state, key).clone() for key in TENSORS}
    return found


@pytest.mark.parametrize("case", ["skipped", "frozen", "no_backward"])
def test_tensor_parallel_modules(two_ranks, case):
    ours, theirs = two_ranks.run(_parallel, case)
    assert ours["mlp"]["scale_bwd"][0] != 1
    for name in ours.keys() & theirs.keys():
        assert all_equal(ours[name].values(), theirs[name].values()), name
    assert ("head" in theirs) == (case != "skipped")
    assert ours["head"]["scale_bwd"][0] != 1  # rank 0's gradients, though it alone has any


def _no_backward(rank):
    """Rank 1 runs the forward only: an evaluation step in the middle of the others' training."""
    amax_groups.pending = 0
    torch.manual_seed(1)
    model = torch.nn.Sequential(apex_te.Linear(HIDDEN, HIDDEN), apex_te.Linear(HIDDEN, HIDDEN))
    for step in range(3):
        with fp8_autocast(True, RECIPE):
            out = model(torch.full((4, HIDDEN), 1.0 + rank))
        if rank == 0 or step == 0:
            (out * (1.0 + rank)).sum().backward()
    flush_fp8_state()
    return [getattr(m.fp8_state, key).clone() for m in model for key in TENSORS]


def test_backward_is_skipped(two_ranks):
    ours, theirs = two_ranks.run(_no_backward)
    assert all_equal(ours, theirs)
    assert ours[9][0] == 57344 / 2.0  # of the last layer: the largest of all steps and ranks


def _steps(layer, x):
    for _ in range(3):
        with fp8_autocast(True, RECIPE):
            out = layer(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()


def _stages(rank, numbered):
    """Two pipeline stages of the same layers, each with its own regions, over the whole world."""
    layer = apex_te.TransformerLayer(
        HIDDEN, HIDDEN, 4, layer_number=rank + 1 if numbered else None, hidden_dropout=0.0
    )
    return told(_steps, layer, torch.ones(2, 1, HIDDEN))


def _assert_told_of_stages(messages):
    for message in messages:
        assert message.startswith("RankMismatchError: fp8_autocast: every rank of fp8_group")
        assert message.endswith("are there ranks of another pipeline stage among them?")


def test_pipeline_stages(fresh):
    """Told by layer_number, which Megatron counts over all stages; without it they are alike."""
    assert fresh.run(_stages, False) == ["nothing was raised"] * 2
    _assert_told_of_stages(fresh.run(_stages, True))


def _megatron_stages(rank, how):
    """Two stages of Megatron's layers, which have no number; fp8_group is left out."""
    config = types.SimpleNamespace()
    if how == "config":
        config.pipeline_model_parallel_rank = rank
    else:
        state = types.ModuleType("megatron.core.parallel_state")
        state.model_parallel_is_initialized = lambda: True
        state.get_tensor_model_parallel_group = lambda check_initialized: None
        state.get_pipeline_model_parallel_rank = lambda: rank
        sys.modules[state.__name__] = state
    try:
        layer = TEColumnParallelLinear(
            HIDDEN, HIDDEN, config=config, init_method=None, gather_output=False, bias=True,
            skip_bias_add=False,
        )  # fmt: skip
        return told(_steps, layer, torch.ones(4, HIDDEN))
    finally:
        sys.modules.pop("megatron.core.parallel_state", None)


@pytest.mark.parametrize("how", ["config", "parallel_state"])
def test_pipeline_stages_of_megatron(fresh, how):
    _assert_told_of_stages(fresh.run(_megatron_stages, how))


def _classes(rank):
    kinds = (apex_te.Linear, apex_te.LayerNormLinear)
    for kind in kinds if rank else kinds[::-1]:
        module = kind(HIDDEN, HIDDEN)
    return told(_steps, module, torch.ones(4, HIDDEN))


def test_modules_in_another_order(fresh):
    for message in fresh.run(_classes):
        assert "whose sizes, classes, layer numbers or stages differ" in message
