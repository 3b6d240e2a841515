"""Second derivatives are right or refused; what backward writes over may be saved elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same_bits
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import recipe
from apex_te.ops import (
    activation,
    bias_dropout_add,
    bias_gelu,
    cross_entropy,
    focal_loss,
    layer_norm,
    rms_norm,
    rope,
    scaled_softmax,
    swiglu,
)

W, TARGET = torch.rand(16), torch.tensor([1, 2, 3, 0])
REFUSING = {
    "activation": lambda x: activation.activation(x, "silu"),
    "bias_dropout_add": lambda x: bias_dropout_add.bias_dropout_add(x, None, x.detach(), 0.0),
    "bias_gelu": lambda x: bias_gelu.bias_gelu(x, W),
    "cross_entropy": lambda x: cross_entropy.cross_entropy(x, TARGET, reduction="sum"),
    "focal_loss": lambda x: focal_loss.focal_loss(x, TARGET, torch.ones(1)),
    "layer_norm": lambda x: layer_norm.layer_norm(x, W, W, 1e-5),
    "linear_cross_entropy": lambda x: apex_te.linear_cross_entropy(x, torch.eye(16), TARGET),
    "linear_log_probs": lambda x: apex_te.linear_log_probs(x, torch.eye(16), TARGET),
    "moe_unpermute": lambda x: apex_te.permutation.moe_unpermute(
        x, apex_te.permutation.moe_permute(x.detach(), torch.eye(4, dtype=torch.bool))[1]
    ),
    "rms_norm": lambda x: rms_norm.rms_norm(x, W, 1e-5),
    "scaled_softmax": lambda x: scaled_softmax.scaled_softmax(x[None], 0.5),
    "swiglu": lambda x: swiglu.swiglu(x),
}


def penalised(function, x):
    """The gradient of an output's sum and of the squares of that sum's own gradient."""
    x = x.clone().requires_grad_()
    total = function(x).sum()
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    (total + grad.square().sum()).backward()
    return x.grad


@pytest.mark.parametrize("name", REFUSING)
def test_a_penalty_on_a_gradient_is_refused(name):
    x = torch.randn(4, 16)
    with pytest.raises(NotImplementedError, match=f"{name}: a second derivative is not supported"):
        penalised(REFUSING[name], x)
    x.requires_grad_()
    first, usual = (
        torch.autograd.grad(REFUSING[name](x).sum(), x, create_graph=create)[0]
        for create in (True, False)
    )
    assert torch.equal(first, usual)


def test_it_is_refused_on_the_way_to_a_leaf():
    """Autograd runs only the nodes between what it is asked for; the refusal is one of them."""
    x = torch.randn(4, 16, requires_grad=True)
    total = activation.activation(x, "silu").sum()
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="activation: a second derivative"):
        torch.autograd.grad(total + grad.square().sum(), x)


SAVING = ("activation", "bias_gelu", "layer_norm", "rms_norm", "scaled_softmax", "swiglu")


@pytest.mark.parametrize("name", SAVING)
def test_it_is_refused_on_the_way_behind_an_input(name):
    """The input is neither a leaf nor what autograd is asked for."""
    leaf = torch.randn(4, 16, requires_grad=True)
    x = leaf * 2
    total = REFUSING[name](x).sum()
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    refusal = pytest.raises(NotImplementedError, match="a second derivative")
    for wanted in (leaf, x):
        with refusal:
            torch.autograd.grad(total + grad.square().sum(), wanted, retain_graph=True)


def test_a_graph_of_a_checkpointed_op_can_be_created():
    x = torch.randn(4, 16, requires_grad=True)
    found = []
    for create in (False, True):
        y = checkpoint(REFUSING["swiglu"], x * 2, use_reentrant=False)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=create)
        found.append(grad.detach())
    assert torch.equal(*found)


def test_what_has_a_second_derivative_gives_it():
    freqs = torch.rand(4, 16)
    x = torch.randn(4, 1, 1, 16)
    given = penalised(lambda x: rope.rope(x, freqs).square(), x)
    assert torch.allclose(given, penalised(lambda x: rope.reference(x, freqs).square(), x))


@pytest.mark.parametrize("make", [apex_te.Linear, apex_te.LayerNormLinear, apex_te.LayerNormMLP])
def test_modules_in_fp8(make):
    layer = make(16, 32)
    refusal = pytest.raises(NotImplementedError, match="a second derivative is not supported")
    with apex_te.fp8_autocast(fp8_recipe="tensorwise"), refusal:
        penalised(lambda x: layer(torch.tanh(x)), torch.randn(16, 16))


def test_high_precision_linear_has_one():
    layer = apex_te.Linear(16, 8)
    x = torch.randn(4, 16)
    given = penalised(lambda x: layer(torch.tanh(x)), x)
    assert torch.equal(
        given, penalised(lambda x: F.linear(torch.tanh(x), layer.weight, layer.bias), x)
    )


LABELS, WEIGHT = torch.tensor([1, 2, -100, 0]), torch.randn(24, 16)
LOSSES = {
    "mean": lambda x: cross_entropy.cross_entropy(x, LABELS),
    "mean over logits": lambda x: cross_entropy.cross_entropy(
        x * 1.0, LABELS, overwrite_logits=True
    ),
    "sum over logits": lambda x: cross_entropy.cross_entropy(
        x * 1.0, LABELS, overwrite_logits=True, reduction="sum"
    ),
    "head": lambda x: apex_te.linear_cross_entropy(x, WEIGHT, LABELS),
    "head in FP8": lambda x: apex_te.linear_cross_entropy(
        x, WEIGHT, LABELS, reduction="sum", fp8_recipe=recipe.CurrentScaling()
    ),
    "log-probabilities": lambda x: sum(
        each.sum() for each in apex_te.linear_log_probs(x, WEIGHT, LABELS, return_entropy=True)
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
