"""FP8 training failures that users of other libraries reported, one by one, for every recipe.

What delayed scaling alone can get wrong is in test_scales, test_microbatch, test_checkpoint and
test_state_dict; evaluations in between are in test_evaluation, values that are not finite in
test_nonfinite, saturation and underflow rates in test_statistics.
"""

import copy
import dataclasses
import math

import pytest
import torch
from module_cases import (
    RECIPES,
    SCHEMES,
    gradients_for,
    plain_results,
    randomized,
    results,
    same_bits,
    sqnr,
)
from torch.utils.checkpoint import checkpoint

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import DelayedScaling

MODULES = {
    "Linear": lambda device="cpu", **options: Linear(32, 32, device=device, **options),
    "LayerNormLinear": lambda device="cpu", **options: LayerNormLinear(
        32, 32, device=device, **options
    ),
    "LayerNormMLP": lambda device="cpu", **options: LayerNormMLP(
        32, 48, activation="swiglu", device=device, **options
    ),
}
SCALES_MOVE = DelayedScaling(amax_history_len=3)


def build(name, device="cpu", **options):
    torch.manual_seed(11)
    return randomized(MODULES[name](device, **options))


def state_of(module):
    state = module.fp8_state
    return {n: getattr(state, n).clone() for n in TENSORS} if state.allocated else {}


def train(module, recipe, steps=3, rows=16, **options):
    for step in range(steps):
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(step))
        x = x.to(next(module.parameters()))
        with fp8_autocast(True, recipe):
            module(x, **options).square().sum().backward()


# A cached weight must keep the scale it was cast with.


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
@pytest.mark.parametrize("name", MODULES)
def test_microbatches_equal_one_batch(device, name, recipe):
    """With scales that do not depend on how rows are grouped, neither does the result."""
    chosen = RECIPES[recipe]
    if chosen.keeps_state:
        chosen = dataclasses.replace(chosen, first_step="scale_one", interval=4)
    whole = build(name, device)
    if chosen.keeps_state:  # scales that fit, then none moves for four regions
        train(whole, chosen, 4)
        flush_fp8_state()
    parts = copy.deepcopy(whole)
    amax_groups.pending = 0
    x, dy = (torch.randn(512, 32).to(device) for _ in range(2))
    whole.zero_grad()
    parts.zero_grad()
    with fp8_autocast(True, chosen):
        expected = whole(x)
    expected.backward(dy)
    amax_groups.pending = 0
    found = []
    for i, (rows, grad) in enumerate(zip(x.split(128), dy.split(128), strict=True)):
        with fp8_autocast(True, chosen):
            found.append(parts(rows, is_first_microbatch=i == 0))
        found[-1].backward(grad)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
    for (n, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert sqnr(a.grad, b.grad) >= 60, n


@pytest.mark.parametrize("name", MODULES)
def test_cached_weights_keep_their_scale_while_the_live_one_moves(name):
    module, x = build(name), torch.randn(16, 32)
    exact = plain_results(module, x, None, [torch.randn(16, 32)], torch.float64)["output 0"]
    for first in (True, False, False, False):
        with fp8_autocast(True, SCALES_MOVE):
            out = module(x, is_first_microbatch=first)
        assert sqnr(exact, out) > 18
        out.sum().backward()
    assert module.fp8_state.scale_fwd[1] > 10


@pytest.mark.parametrize("recipe", SCHEMES)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("change", ["in place", "load", "optimizer", "swap", "data"])
def test_a_changed_weight_is_not_taken_from_the_cache(name, recipe, change):
    """What is written through .data nothing can see: the next True or None does."""
    module, x = build(name), torch.randn(8, 32)
    weight = "weight" if name != "LayerNormMLP" else "fc2_weight"
    with fp8_autocast(True, RECIPES[recipe]):
        before = module(x, is_first_microbatch=True)
    before.sum().backward()
    with torch.no_grad():
        if change == "in place":
            getattr(module, weight).mul_(-2)
        elif change == "load":
            module.load_state_dict({n: -2 * p for n, p in module.named_parameters()})
        elif change == "optimizer":
            torch.optim.SGD(module.parameters(), lr=1.0).step()
        elif change == "swap":
            setattr(module, weight, torch.nn.Parameter(-2 * getattr(module, weight)))
        else:
            getattr(module, weight).data.copy_(-2 * getattr(module, weight))
    fresh = copy.deepcopy(module)
    with torch.no_grad(), fp8_autocast(True, RECIPES[recipe]):
        found = module(x, is_first_microbatch=change == "data")
        assert torch.equal(found, fresh(x))
        assert not torch.equal(found, before)


# Amaxes that are tiny, zero, or measured on another dtype.


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38])
@pytest.mark.parametrize("where", ["x", "weight", "dy"])
def test_tiny_values_give_finite_results(device, recipe, value, where):
    module = Linear(32, 32, device=device)
    x, dy = torch.randn(8, 32).to(device), torch.randn(8, 32).to(device)
    with torch.no_grad():
        {"x": x, "weight": module.weight, "dy": dy}[where].fill_(value)
    for _ in range(2):  # delayed scaling has read the amax then
        found = results(module, x, None, [dy], RECIPES[recipe])
        flush_fp8_state()
    exact = plain_results(module, x, None, [dy], torch.float64)
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        if exact[name].abs().max() < 1e-30:
            assert tensor.abs().max() < 1e-30, name
        else:
            assert sqnr(exact[name], tensor) > 20, name
    assert all(torch.isfinite(t).all() for t in state_of(module).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_amax_is_that_of_the_tensor_that_is_cast(device, dtype):
    module = Linear(32, 48, params_dtype=dtype, device=device)
    x, dy = torch.randn(8, 32).to(device, dtype), torch.randn(8, 48).to(device, dtype)
    results(module, x, None, [dy], SCALES_MOVE)
    forward, backward = module.fp8_state.amax_history_fwd[0], module.fp8_state.amax_history_bwd[0]
    assert forward[0] == x.float().abs().max()
    assert forward[1] == module.weight.float().abs().max()
    assert backward[0] == dy.float().abs().max()


def test_amax_under_torch_autocast_is_of_what_is_cast():
    """FP8 data are made from the widest values at hand, not from rounded ones."""
    module, x = Linear(32, 48), torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16), fp8_autocast(True, SCALES_MOVE):
        module(x)
    assert module.fp8_state.amax_history_fwd[0, 0] == x.abs().max()
    assert module.fp8_state.amax_history_fwd[0, 1] == module.weight.abs().max()


@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP"])
def test_amax_of_a_fused_producer(device, name):
    module, x = build(name, device), torch.randn(16, 32).to(device)
    results(module, x, None, gradients_for(module, x), SCALES_MOVE)
    norm = torch.nn.functional.layer_norm(
        x.double(), (32,), module.layer_norm_weight.double(), module.layer_norm_bias.double(), 1e-5
    )
    staged = module.fp8_state.amax_history_fwd[0]
    torch.testing.assert_close(staged[0], norm.abs().max().float(), rtol=1e-6, atol=0)
    if name == "LayerNormMLP":  # the activation sees what the first product gave
        assert staged[3] > 0
        assert module.fp8_state.amax_history_bwd[0, [0, 2]].gt(0).all()


# Recomputation.


def steps(name, recipe, mode, device):
    """Four training steps; all that must not depend on the recomputation."""
    amax_groups.pending = 0
    model = torch.nn.ModuleList([build(name, device), build("Linear", device)])
    found = {}
    before = fp8_gemm_count()
    for step in range(4):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(device)
        x.requires_grad_()
        first = step % 2 == 0

        def block(x, first=first):
            return model[1](model[0](x, is_first_microbatch=first), is_first_microbatch=first)

        with fp8_autocast(True, recipe):
            out = block(x) if mode is None else checkpoint(block, x, use_reentrant=mode)
        loss = out.square().mean()
        loss.backward()
        found |= {f"{step} loss": loss.detach(), f"{step} input": x.grad}
        with torch.no_grad():
            for n, p in model.named_parameters():
                found[f"{step} {n}"] = p.grad.clone()
                if not first:
                    p.sub_(0.01 * p.grad)
                    p.grad = None
        for i, module in enumerate(model):
            found |= {f"{step} {i} {n}": t for n, t in state_of(module).items()}
    return found, fp8_gemm_count() - before


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", [*RECIPES, "moving"])
@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP"])
def test_recomputation_is_bitwise(device, name, recipe, reentrant):
    chosen = RECIPES.get(recipe, SCALES_MOVE)
    expected, count = steps(name, chosen, None, device)
    found, recomputed = steps(name, chosen, reentrant, device)
    assert same_bits(expected, found)
    forward = 4 * (3 if name == "LayerNormMLP" else 2)
    assert recomputed == count + forward  # in FP8, all of it


# Resuming.


@pytest.mark.parametrize("recipe", [*SCHEMES, "moving"])
@pytest.mark.parametrize("name", MODULES)
def test_resume_is_bitwise(name, recipe):
    chosen = RECIPES.get(recipe, SCALES_MOVE)

    def run(module, optimizer, seeds):
        for seed in seeds:
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            with fp8_autocast(True, chosen):
                loss = module(x).square().mean()
            loss.backward()
            optimizer.step()

    module = build(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run(module, optimizer, range(3))
    saved = copy.deepcopy(module.state_dict())
    assert any("fp8_state" in key for key in saved) == chosen.keeps_state
    run(module, optimizer, range(3, 6))
    amax_groups.pending = 0
    other = MODULES[name]()
    other.load_state_dict(saved, strict=True)
    run(other, torch.optim.SGD(other.parameters(), lr=0.1), range(3, 6))
    flush_fp8_state()
    expected = dict(module.named_parameters()) | state_of(module)
    assert same_bits(expected, dict(other.named_parameters()) | state_of(other))


# NaN and Inf.


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_pass_through_norms(device, name, recipe, value):
    module, x = build(name, device), torch.randn(8, 32).to(device)
    x[3, 5] = value
    found = results(module, x, None, gradients_for(module, torch.ones_like(x)), RECIPES[recipe])
    assert not torch.isfinite(found["output 0"][3]).any()
    assert not torch.isfinite(found["input"][3]).any()
