"""A compiled model under DDP whose reducer is Python code, which torch.compile sees, too."""

import copy
import dataclasses

import pytest
import torch
from on_rank import told
from schemes import FIRST_STEP, chosen
from shards import decibels
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import apex_te
from apex_te import flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.ranks import amax_groups

HIDDEN, FFN, TOKENS, STEPS = 32, 64, 8, 3
DELAYED = {"amax_history_len": 3}
RECIPES = {
    "none": None,
    "first": dataclasses.replace(FIRST_STEP, **DELAYED),
    **chosen("delayed", "tensorwise", "blockwise", **DELAYED),
}
MODULES = {
    "linear": lambda: apex_te.Linear(HIDDEN, HIDDEN),
    "mlp": lambda: apex_te.LayerNormMLP(HIDDEN, FFN, activation="swiglu"),
}


def _steps(model, scaling, rank, ranks, compiled_autograd=False):
    """Losses, and what becomes of the weights."""
    amax_groups.pending = 0
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(STEPS):
        x = torch.randn(TOKENS, ranks, HIDDEN, generator=torch.Generator().manual_seed(step))
        x = x if rank is None else x[:, rank : rank + 1].contiguous()
        with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
            with fp8_autocast(scaling is not None, scaling):
                loss = model(x).square().mean()
            (1024.0 * loss).backward()
        for p in model.parameters():
            p.grad /= 1024.0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    flush_fp8_state()
    return losses


def _compare(rank, name, recipe, compiled_autograd):
    torch._dynamo.reset()
    torch.manual_seed(1)
    ranks, scaling = distributed.get_world_size(), RECIPES[recipe]
    one = MODULES[name]()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        many = DistributedDataParallel(copy.deepcopy(one))
        assert many._use_python_reducer
        run = torch.compile(many, backend="aot_eager")
        start = torch.cat([p.detach().flatten().clone() for p in one.parameters()])
        _steps(run, scaling, rank, ranks, compiled_autograd)
    _steps(one, scaling, None, ranks)
    ours, whole = (
        torch.cat([p.detach().flatten() for p in m.parameters()]) - start for m in (many, one)
    )
    return decibels(ours, whole), ours


@pytest.mark.parametrize(
    ("name", "recipe", "compiled_autograd"),
    [
        ("mlp", "none", False),
        ("mlp", "delayed", True),
        ("linear", "first", True),
        ("linear", "tensorwise", False),
        ("linear", "blockwise", True),
    ],
)
def test_python_reducer(two_ranks, name, recipe, compiled_autograd):
    found = two_ranks.run(_compare, name, recipe, compiled_autograd)
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0] > (90 if recipe == "none" else 20)


def _main_grad(rank, compiled, option):
    """What a backward says that puts a gradient where DDP does not look for it."""
    torch._dynamo.reset()
    module = apex_te.Linear(HIDDEN, HIDDEN, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros_like(module.weight)
    if option == "owned":
        module.weight.grad_added_to_main_grad = False
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        run = DistributedDataParallel(module)
        run = torch.compile(run, backend="aot_eager") if compiled else run
        error = told(lambda: run(torch.ones(4, HIDDEN)).sum().backward())
    if option == "none":
        return error
    return float(module.weight.main_grad.sum())


@pytest.mark.parametrize("compiled", [False, True])
def test_main_grad_needs_an_owner(two_ranks, compiled):
    message = "fuse_wgrad_accumulation must be False under DistributedDataParallel"
    for found in two_ranks.run(_main_grad, compiled, "none"):
        assert message in found
    assert two_ranks.run(_main_grad, compiled, "owned") == [4.0 * HIDDEN * HIDDEN] * 2
