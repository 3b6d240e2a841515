"""Layers and Flax modules of every recipe in more layouts on four devices."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import sharded_net  # noqa: E402
import test_sharding as layers  # noqa: E402

pytestmark = layers.pytestmark
MORE = [
    each
    for each in itertools.product(layers.RECIPES, layers.LAYOUTS, layers.KINDS)
    # Of 256 rows no quarter is whole blocks.
    if each not in layers.LAYERS and each[:2] != ("block", "data 4")
]


@pytest.mark.parametrize(("name", "layout", "kind"), MORE, ids=str)
def test_layers_have_one_devices_bits(name, layout, kind):
    layers.test_layers_have_one_devices_bits(name, layout, kind)


# HiF8's casts of a product in another order differ by more: test_sharding compares their bits.
TENSOR_PARALLEL = [name for name in sharded_net.RECIPES if name != "hif8"]


@pytest.mark.parametrize("kind", layers.KINDS, ids=str)
def test_modules_with_hif8_train_data_parallel(kind):
    sharded_net.assert_trains_as_on_one_device("hif8", (2, 1), kind)


@pytest.mark.parametrize("kind", layers.KINDS, ids=str)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_modules_train_as_on_one_device(name, shape, kind):
    sharded_net.assert_trains_as_on_one_device(name, shape, kind)


def test_the_documents_example_runs():
    text = (Path(__file__).resolve().parents[3] / "docs" / "jax.md").read_text()
    example = text.split("## Several devices")[1].split("```python\n")[1].split("```")[0]
    found: dict = {}
    exec(example, found)
    assert found["loss"] < 2
    kernel = found["variables"]["params"]["wi_kernel"].value
    assert kernel.sharding.shard_shape(kernel.shape) == (256, 2, 256)
