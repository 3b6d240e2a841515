"""Recipes that users derive: which may keep state, what is saved of them, and their errors."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch

import apex_te
from apex_te.fp8.scheme.base import scheme_of
from apex_te.recipe import DelayedScaling, Recipe, unpack_recipe


@dataclasses.dataclass(frozen=True)
class Derived(DelayedScaling):
    """Delayed scaling with an option more."""

    option: int = 3


def test_state_wants_the_options_of_delayed_scaling() -> None:
    with pytest.raises(TypeError, match=r"Own: a recipe with keeps_state must derive from Delayed"):

        class Own(Recipe):
            keeps_state: ClassVar[bool] = True


def test_unknown_scheme() -> None:
    class Lost(DelayedScaling):
        quantizer = "losst"

    with pytest.raises(ValueError, match=r"Lost: quantizer must be the name of a scheme"):
        scheme_of(Lost())


def test_weights_of_a_recipe_that_was_not_imported() -> None:
    with pytest.raises(
        ValueError, match="Elsewhere, which no recipe is called; is its package imported"
    ):
        unpack_recipe(("Elsewhere", {"fp8_format": "E4M3"}))


def _trained(recipe: DelayedScaling) -> torch.nn.Module:
    torch.manual_seed(0)
    module = apex_te.Linear(32, 32)
    for step in range(3):
        with apex_te.fp8_autocast(fp8_recipe=recipe):
            out = module(torch.randn(16, 32) * 10.0**step)
        out.sum().backward()
    return module


def test_a_derived_recipe_is_evaluated_and_loaded_as_delayed_scaling() -> None:
    x = torch.randn(16, 32) * 100
    results = []
    for recipe in (DelayedScaling(amax_history_len=4), Derived(amax_history_len=4)):
        module = _trained(recipe)
        copy = apex_te.Linear(32, 32)
        copy.load_state_dict(module.state_dict())
        for each in (module, copy):
            with torch.no_grad(), apex_te.fp8_autocast(fp8_recipe=recipe):
                results.append(each(x))
        apex_te.flush_fp8_state()
    assert all(torch.equal(result, results[0]) for result in results)
