"""Stacked layers of more recipes, also by a ``jax.lax.scan`` of a ``jax.checkpoint``."""

import itertools

import pytest

pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import test_stacked_layers as stacked

WAYS = ["scan", "remat", "checkpoint"]
MORE = [each for each in itertools.product(stacked.RECIPES, WAYS) if each not in stacked.CASES]


@pytest.mark.parametrize(("name", "way"), MORE)
def test_stacked_layers_train_with_the_bits_of_single_ones(name, way):
    stacked.test_stacked_layers_train_with_the_bits_of_single_ones(name, way)
