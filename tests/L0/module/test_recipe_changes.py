"""A recipe is read at each region: what changes between two of them counts from the second on."""

import dataclasses

import pytest
import torch
from module_cases import (
    RECIPES,
    gradients_for,
    leaf,
    plain_results,
    randomized,
    results,
    same_bits,
    sqnr,
)

from apex_te import fp8_autocast
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import DelayedScaling, Format


def linear():
    torch.manual_seed(11)
    return randomized(Linear(32, 32))


def mlp():
    torch.manual_seed(11)
    return randomized(LayerNormMLP(32, 48, activation="swiglu"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RECIPES["tensorwise"], dataclasses.replace(RECIPES["tensorwise"], pow2=True)),
        (RECIPES["tensorwise"], RECIPES["tensorwise-e4m3"]),
        (RECIPES["tensorwise"], RECIPES["hif8"]),
        (RECIPES["blockwise"], RECIPES["blockwise-hybrid"]),
        (RECIPES["blockwise"], dataclasses.replace(RECIPES["blockwise"], pow2=False)),
        (RECIPES["mxfp8"], dataclasses.replace(RECIPES["mxfp8"], rounding="floor")),
        (RECIPES["mxfp8"], dataclasses.replace(
            RECIPES["mxfp8"], override_linear_precision=(False, False, True)
        )),
    ],
)  # fmt: skip
def test_a_recipe_is_read_at_each_region(first, second):
    module = mlp()
    x = torch.randn(16, 32)
    grads = gradients_for(module, x)
    before = results(module, x, None, grads, first)
    found = results(module, x, None, grads, second)
    assert not same_bits(before, found)
    assert same_bits(found, results(mlp(), x, None, grads, second))


@pytest.mark.parametrize("second", [Format.E4M3, Format.HYBRID])
def test_delayed_scales_follow_a_changed_format(second):
    """No region casts with a scale that was made for another format."""
    first = Format.HYBRID if second is Format.E4M3 else Format.E4M3
    module, x, dy = linear(), torch.randn(64, 32), torch.randn(64, 32)
    exact = plain_results(module, x, None, [dy], torch.float64)
    for step in range(6):
        recipe = DelayedScaling(amax_history_len=3, fp8_format=first if step < 3 else second)
        found = results(module, x, None, [dy], recipe)
        if step == 0:
            continue  # with scale 1
        expected = 448.0 if recipe.fp8_format is Format.E4M3 else 57344.0
        assert module.fp8_state.scale_bwd[0] == torch.tensor(expected) / dy.abs().max()
        assert min(sqnr(exact[n], found[n]) for n in ("input", "weight")) > 20


def test_delayed_scales_follow_a_changed_margin():
    module, x = linear(), torch.randn(64, 32)
    for step in range(4):
        with fp8_autocast(True, DelayedScaling(margin=0 if step < 2 else 3)):
            module(x).sum().backward()
        if step:
            expected = torch.tensor(448.0 if step < 2 else 56.0) / x.abs().max()
            assert module.fp8_state.scale_fwd[0] == expected


def test_the_wgrad_override_is_read_at_each_region():
    module, x = mlp(), torch.randn(16, 32)
    counts = []
    for override in (False, True, False):
        recipe = DelayedScaling(override_linear_precision=(False, False, override))
        before = fp8_gemm_count()
        with fp8_autocast(True, recipe):
            module(leaf(x)).sum().backward()
        counts.append(fp8_gemm_count() - before)
    assert counts == [6, 4, 6]
