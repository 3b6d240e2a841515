"""Attention on a mesh that splits the columns of fused projections: one device's numbers."""

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import sharded_attention as sharded  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from apex_te.jax.joined_columns import joined_columns  # noqa: E402

pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 4, reason="jax was started before this folder's conftest"
)
KINDS = AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
OPTIONS = {
    "fused": {},
    "separate": {"fuse_qkv_params": False},
    "grouped": {"num_gqa_groups": 2, "num_attention_heads": 8},
    "grouped, separate": {
        "num_gqa_groups": 2, "num_attention_heads": 8, "fuse_qkv_params": False,
    },
}  # fmt: skip
# Options, recipe, extents of the mesh, types of its axes, and whether keys have an input of their
# own.
CASES = [
    ("fused", "delayed", (2, 2), AUTO, False),
    ("grouped, separate", "tensorwise", (1, 2), EXPLICIT, False),
    ("grouped", "delayed", (1, 4), AUTO, True),
]


@pytest.mark.parametrize(("options", "name", "shape", "kind", "cross"), CASES, ids=str)
def test_split_columns_are_not_gathered(options, name, shape, kind, cross):
    sharded.assert_as_on_one_device(OPTIONS[options], name, shape, kind, cross)


@pytest.mark.parametrize(
    ("shapes", "parts", "block", "expected"),
    [
        ([(3, 256)], 2, 1, None),
        ([(256,), (256,), (256,)], 2, 128, None),
        ([(256,), (2, 128)], 1, 1, 1),
        ([(256,), (2, 128)], 2, 1, 2),
        ([(256,), (2, 128)], 2, 32, 2),
        ([(256,), (2, 128)], 2, 128, 1),
        ([(2, 128)], 2, 128, 1),
        ([(256,)], 4, 1, None),
    ],
)
def test_joined_columns_are_split_into_those_of_the_kernels(shapes, parts, block, expected):
    chosen = {1: None, 32: sharded.RECIPES["mx"], 128: sharded.RECIPES["blockwise"]}[block]
    rng = np.random.default_rng(0)
    kernels = [jnp.asarray(rng.integers(-4, 5, (16, *shape)), jnp.float32) for shape in shapes]
    biases = [kernel[0] for kernel in kernels]
    columns = joined_columns(kernels, parts, chosen)
    assert columns.parts == expected
    x = jnp.asarray(rng.integers(-4, 5, (5, 16)), jnp.float32)
    joined, bias = columns.join(kernels, 1), columns.join(biases, 0)
    assert joined.shape[1:] == bias.shape
    found = columns.split(jnp.tensordot(x, joined, 1) + bias)
    wanted = [
        x @ kernel.reshape(16, -1, kernel.shape[-1])[:, i] + bias.reshape(-1, kernel.shape[-1])[i]
        for kernel, bias in zip(kernels, biases, strict=True)
        for i in range(kernel[0].size // kernel.shape[-1])
    ]
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.array_equal(ours, theirs)


def test_parts_of_joined_columns_lie_where_those_of_the_kernels_do():
    mesh = jax.make_mesh((2,), ("t",), axis_types=(EXPLICIT,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        kernels = [
            jax.device_put(jnp.ones((16, width)), NamedSharding(mesh, P(None, "t")))
            for width in (64, 32, 32)
        ]
        columns = joined_columns(kernels, 2, None)
        joined = jax.eval_shape(lambda *given: columns.join(given, 1), *kernels)
        assert joined.shape == (16, 2, 64)
        assert joined.sharding.spec == P(None, "t", None)
