"""torch.utils.checkpoint gives bitwise the same loss, gradients and state as no checkpoint."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from apex_te import LayerNormLinear, LayerNormMLP, Linear, flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling


def build(device):
    torch.manual_seed(1)
    return torch.nn.ModuleList([Linear(16, 32, device=device), Linear(32, 16, device=device)])


def train(device, mode, recipe, inner=False, microbatch=False, calibrate=False, outside=False):
    """Three steps; returns everything that must not depend on ``mode``."""
    amax_groups.pending = 0
    model = build(device)
    generator = torch.Generator().manual_seed(2)
    seen = []

    def block(x, first):
        if inner:
            with fp8_autocast(True, recipe):
                return model[1](torch.relu(model[0](x, is_first_microbatch=first)))
        return model[1](torch.relu(model[0](x, is_first_microbatch=first)))

    for step in range(4):
        x = torch.randn(4, 16, generator=generator).to(device).requires_grad_()
        first = step % 2 == 0 if microbatch else None
        with fp8_autocast(not calibrate, recipe, calibrating=calibrate):
            for _ in range(2):  # the block runs twice: shared weights
                if mode is None:
                    out = block(x, first)
                else:
                    out = checkpoint(block, x, first, use_reentrant=mode)
            loss = out.square().mean()
            if not outside:
                loss.backward()
        if outside:
            with torch.no_grad(), fp8_autocast(True, recipe):
                block(100 * x, None)  # an evaluation before the backward
            loss.backward()
        seen += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        seen += [getattr(m.fp8_state, name).clone() for m in model for name in TENSORS]
    return [*seen, torch.tensor(amax_groups.pending)]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"inner": True}, {"microbatch": True}, {"calibrate": True}, {"outside": True}],
    ids=str,
)
@pytest.mark.parametrize("first_step", ["scale_one", "current"])
def test_checkpoint_is_bitwise(reentrant, options, first_step, device):
    recipe = DelayedScaling(amax_history_len=3, first_step=first_step)
    plain = train(device, None, recipe, **options)
    recomputed = train(device, reentrant, recipe, **options)
    assert len(plain) == len(recomputed)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_follows_the_last_forward(reentrant):
    """FP8 in the forward means FP8 in the recompute, and none means none."""
    module, x = Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    recipe = DelayedScaling()
    before = fp8_gemm_count()
    with fp8_autocast(True, recipe):
        out = checkpoint(module, x, use_reentrant=reentrant)
    out.sum().backward()
    assert fp8_gemm_count() - before == 4
    flush_fp8_state()
    state = [getattr(module.fp8_state, name).clone() for name in TENSORS]
    out = checkpoint(module, x, use_reentrant=reentrant)
    with fp8_autocast(True, recipe):
        out.sum().backward()
    assert fp8_gemm_count() - before == 4
    assert all(
        torch.equal(a, getattr(module.fp8_state, n)) for a, n in zip(state, TENSORS, strict=True)
    )


NORMED = {
    "linear": lambda **options: LayerNormLinear(64, 32, **options),
    "gelu": lambda **options: LayerNormMLP(64, 32, **options),
    "swiglu": lambda **options: LayerNormMLP(64, 32, activation="swiglu", bias=False, **options),
}


@pytest.mark.parametrize("kind", NORMED)
@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(override_linear_precision=(False, False, True)),
        CurrentScaling(override_linear_precision=(False, False, True)),
        BlockScaling(backward="high_precision"),
        DelayedScaling(),
    ],
    ids=["delayed, no wgrad", "tensorwise, no wgrad", "high precision", "delayed"],
)
def test_calls_without_gradients_have_the_same_bits(device, kind, recipe):
    """The first forward of a reentrant checkpoint rounds the input as the training step does."""
    torch.manual_seed(1)
    first = NORMED[kind](device=device, params_dtype=torch.bfloat16)
    x = torch.randn(32, 64, device=device).bfloat16()
    found = []
    for grad, learns in ((True, True), (False, True), (True, False)):
        module = copy.deepcopy(first).requires_grad_(learns)
        with torch.set_grad_enabled(grad), fp8_autocast(fp8_recipe=recipe):
            found.append(module(x.clone().requires_grad_(grad)).detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
