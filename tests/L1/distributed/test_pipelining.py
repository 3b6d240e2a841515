"""Stages of torch.distributed.pipelining under a region around the schedule's step."""

import pytest
import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

import apex_te
from apex_te import fp8_autocast
from apex_te.recipe import DelayedScaling

HIDDEN, PARTS, TOKENS = 32, 4, 16
# Longer than the run: an amax that a trial of unwritten memory leaves would stay.
RECIPE = DelayedScaling(amax_history_len=16)


def _module(index):
    torch.manual_seed(100 + index)
    return torch.nn.Sequential(
        apex_te.LayerNormMLP(HIDDEN, 2 * HIDDEN), apex_te.Linear(HIDDEN, HIDDEN)
    )


def _loss(out, target):
    return (out - target).square().mean()


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, TOKENS, HIDDEN, generator=generator)


def _moved(module):
    """Moves a module against its gradients, and returns these."""
    grads = [p.grad for p in module.parameters()]
    with torch.no_grad():
        for p in module.parameters():
            p.sub_(p.grad, alpha=0.05)
            p.grad = None
    return grads


def _staged(rank, kind, steps, is_known):
    """The gradients of this rank's stages at each step, by stage."""
    world = [distributed.new_group([r]) for r in range(2)]
    indices = [rank, 3 - rank] if kind is ScheduleZBVZeroBubble else [rank]
    modules = {index: _module(index) for index in indices}
    count = 2 * len(indices)
    example = torch.zeros(TOKENS // PARTS, HIDDEN)
    stages = []
    for index, module in modules.items():
        known = {}
        if is_known:
            known["input_args"] = (example.clone().requires_grad_(index > 0),)
            known["output_args"] = (example.clone().requires_grad_(),)
        stages.append(PipelineStage(module, index, count, torch.device("cpu"), **known))
    schedule = kind(stages if len(indices) > 1 else stages[0], PARTS, loss_fn=_loss)

    def run(step):
        x, target = _batch(step)
        given = {"target": target} if count - 1 in modules else {}
        schedule.step(*([x] if 0 in modules else []), **given)

    if not is_known:
        run(0)
        for module in modules.values():
            module.zero_grad()
    found = []
    for step in range(steps):
        with fp8_autocast(fp8_recipe=RECIPE, fp8_group=world[rank]):
            run(step)
        found.append({index: _moved(module) for index, module in modules.items()})
    return found


def _alone(stages, steps):
    """Result of ``_staged`` in one process."""
    modules = [_module(index) for index in range(stages)]
    found = []
    for step in range(steps):
        with fp8_autocast(fp8_recipe=RECIPE):
            for x, target in zip(*(part.chunk(PARTS) for part in _batch(step)), strict=True):
                _loss(torch.nn.Sequential(*modules)(x), target).backward()
        for module in modules:
            for p in module.parameters():
                p.grad.div_(PARTS)
        found.append([_moved(module) for module in modules])
    return found


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleZBVZeroBubble])
def test_stages_train_as_one_process(two_ranks, kind, is_known):
    """With shapes that are given, or learned in a step outside of the region."""
    expected = _alone(4 if kind is ScheduleZBVZeroBubble else 2, 4)
    for found in two_ranks.run(_staged, kind, 4, is_known):
        for step, stages in enumerate(found):
            for index, grads in stages.items():
                assert all(map(torch.equal, grads, expected[step][index])), (step, index)
