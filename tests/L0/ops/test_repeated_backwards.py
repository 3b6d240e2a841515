"""Backwards that write over what was saved, run again where autograd does not see that they did."""

import pytest
import torch
from checks import assert_same_bits
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import apex_te
from apex_te import recipe
from apex_te.ops.cross_entropy import cross_entropy

TARGET, WEIGHT = torch.tensor([1, 2, -100, 0]), torch.randn(24, 16)
LOSSES = {
    "mean": lambda x: cross_entropy(x, TARGET),
    "mean over logits": lambda x: cross_entropy(x * 1.0, TARGET, overwrite_logits=True),
    "sum over logits": lambda x: cross_entropy(
        x * 1.0, TARGET, overwrite_logits=True, reduction="sum"
    ),
    "head": lambda x: apex_te.linear_cross_entropy(x, WEIGHT, TARGET),
    "head in FP8": lambda x: apex_te.linear_cross_entropy(
        x, WEIGHT, TARGET, reduction="sum", fp8_recipe=recipe.CurrentScaling()
    ),
}
HOOKS = {"unchanged": lambda: saved_tensors_hooks(lambda t: t, lambda t: t), "cpu": save_on_cpu}
FACTORS = torch.tensor([2.0, 3.0, 1.0])


def expected(loss, x):
    """The gradient for each factor, each from a forward of its own."""
    leaves = [x.clone().requires_grad_() for _ in FACTORS]
    return [
        torch.autograd.grad(loss(leaf), leaf, factor)[0]
        for leaf, factor in zip(leaves, FACTORS, strict=True)
    ]


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("name", LOSSES)
def test_under_hooks_of_saved_tensors(name, hooks):
    x = torch.randn(4, 16)
    leaf = x.clone().requires_grad_()
    with HOOKS[hooks]():
        loss = LOSSES[name](leaf)
    for factor, wanted in zip(FACTORS, expected(LOSSES[name], x), strict=True):
        (found,) = torch.autograd.grad(loss, leaf, factor, retain_graph=True)
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("name", LOSSES)
def test_under_vjp(name):
    x = torch.randn(4, 16)
    wanted = expected(LOSSES[name], x)
    _, vjp = torch.func.vjp(LOSSES[name], x)
    for factor, gradient in zip(FACTORS, wanted, strict=True):
        assert_same_bits(vjp(factor)[0], gradient)
    assert_same_bits(torch.func.vmap(vjp)(FACTORS)[0], torch.stack(wanted))
