"""Attention of more recipes in more layouts on four devices."""

import itertools

import pytest

pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import sharded_attention as sharded
import test_sharded_attention as attention

pytestmark = attention.pytestmark
MORE = [
    each
    for each in itertools.product(
        attention.OPTIONS, sharded.RECIPES, [(1, 2), (2, 2)], attention.KINDS, [False, True]
    )
    # Of keys' 128 columns no half is whole blocks: these are gathered.
    if each not in attention.CASES
    and (each[1] == "delayed" or each[2] == (1, 2))
    and not ("grouped" in each[0] and each[1] == "blockwise")
]


@pytest.mark.parametrize(("options", "name", "shape", "kind", "cross"), MORE, ids=str)
def test_split_columns_are_not_gathered(options, name, shape, kind, cross):
    attention.test_split_columns_are_not_gathered(options, name, shape, kind, cross)
