"""Flax modules on meshes: training as on one device, logical axes, state, and checkpoints."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from flax import serialization  # noqa: E402
from flax.linen import partitioning  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402

P = PartitionSpec
pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 4, reason="jax was started before this folder's conftest"
)
RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.CurrentScaling(),
    "block": recipe.BlockScaling(),
    "none": None,
}
WIDTH, ROWS = 256, ("batch", "seq", "embed")
RULES = (
    ("batch", "d"), ("seq", None), ("embed", None), ("mlp", "t"), ("act", None), ("part", None),
)  # fmt: skip


class Net(nn.Module):
    """Column- and row-parallel layers, a gated MLP, and norms."""

    @nn.compact
    def __call__(self, x):
        pair, _ = te_flax.LayerNormDenseGeneral(
            (2, WIDTH), kernel_axes=("embed", "part", "mlp"), use_bias=True,
            bias_axes=("part", "mlp"), layernorm_input_axes=ROWS, dot_input_axes=ROWS, name="pair",
        )(x)  # fmt: skip
        y = pair[..., 0, :] * pair[..., 1, :]
        y = te_flax.DenseGeneral(
            WIDTH, kernel_axes=("mlp", "embed"), bias_axes=("embed",), name="out"
        )(y)
        x = x + y
        y, _ = te_flax.LayerNormMLP(
            intermediate_dim=256, activations=("silu", "linear"), layernorm_type="rmsnorm",
            intermediate_dropout_rate=0.0, layernorm_input_axes=ROWS, dot_1_input_axes=ROWS,
            dot_2_input_axes=("batch", "seq", "mlp"), use_bias=True, name="mlp",
        )(x, deterministic=True)  # fmt: skip
        return te_flax.LayerNorm(name="norm")(x + y)


def make_step(name, rules):
    """Returns a function of the loss, the gradients and the next variables."""
    chosen = RECIPES[name]

    def step(variables, x, target):
        def loss(variables):
            with partitioning.axis_rules(rules):
                return ((Net().apply(variables, x) - target) ** 2).mean()

        with te.fp8_autocast(chosen is not None, chosen):
            value, grads = jax.value_and_grad(loss)(variables)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, variables["params"], grads["params"])
        state = {key: grads[key] for key in variables if key == te.FP8_COLLECTION_NAME}
        return value, grads, te.update_collections({"params": params, **state}, variables)

    return step


def data():
    keys = jax.random.split(jax.random.key(0), 2)
    return [jax.random.normal(key, (2, 128, WIDTH)) for key in keys]


@functools.cache
def on_one_device(name):
    """Returns the first variables, their logical axes and the results of two steps."""
    chosen = RECIPES[name]
    with te.fp8_autocast(chosen is not None, chosen):
        variables = jax.jit(Net().init)(jax.random.key(2), data()[0])
    axes = partitioning.get_axis_names(variables["params_axes"])
    variables = {key: value for key, value in variables.items() if key != "params_axes"}
    step, found, now = jax.jit(make_step(name, ())), [], variables
    for _ in range(2):
        found.append(step(now, *data()))
        now = found[-1][2]
    return variables, axes, found


def shardings(mesh, variables, axes):
    """Returns the shardings of the variables by their logical axes; replicated without any."""
    by_axes = nn.logical_to_mesh_sharding(axes, mesh, RULES)

    def of(path, _):
        names = [key.key for key in path]
        found = by_axes if names.pop(0) == "params" else {}
        for name in names:
            found = found.get(name, {}) if isinstance(found, dict) else found
        return found if isinstance(found, NamedSharding) else NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(of, variables)


def assert_close(found, expected):
    """Asserts that elements differ by two units in the last place of bfloat16 of the largest."""
    for (path, x), wanted in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        largest = np.abs(wanted).max()
        ulp = 2.0 ** (np.floor(np.log2(largest)) - 7) if largest else 0.0
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, wanted, rtol=0, atol=2 * ulp, err_msg=name)


def mesh_of(shape, kind):
    count = shape[0] * shape[1]
    return jax.make_mesh(shape, ("d", "t"), axis_types=(kind, kind), devices=jax.devices()[:count])


def run(name, shape, kind):
    """Runs two steps on a mesh; returns their results and the program's text."""
    variables, axes, _ = on_one_device(name)
    mesh = mesh_of(shape, kind)
    rows = NamedSharding(mesh, P("d"))
    with jax.set_mesh(mesh):
        places = shardings(mesh, variables, axes)
        options = {}
        if kind is AxisType.Auto:
            options = {"in_shardings": (places, rows, rows), "out_shardings": (None, None, places)}
        given = jax.device_put(variables, places)
        x, target = (jax.device_put(each, rows) for each in data())
        step = jax.jit(make_step(name, RULES), **options).lower(given, x, target).compile()
        found = []
        for _ in range(2):
            found.append(step(given, x, target))
            given = jax.device_put(found[-1][2], places)
    return found, step.as_text()


CASES = [
    ("delayed", (2, 2), AxisType.Auto), ("delayed", (1, 2), AxisType.Explicit),
    ("current", (2, 2), AxisType.Explicit), ("block", (2, 2), AxisType.Auto),
    ("none", (2, 2), AxisType.Explicit),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "kind"), CASES, ids=str)
def test_training_is_as_on_one_device_and_gathers_nothing(name, shape, kind):
    found, text = run(name, shape, kind)
    for (loss, grads, _), (expected, expected_grads, _) in zip(
        found, on_one_device(name)[2], strict=True
    ):
        np.testing.assert_allclose(loss, expected, rtol=2e-6)
        assert_close(grads, expected_grads)
    assert not re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", text)
    wi = found[-1][1]["params"]["mlp"]["wi_kernel"]
    assert wi.sharding.shard_shape(wi.shape) == (WIDTH, 2, 128)


def test_the_state_is_the_same_on_all_devices_and_its_checkpoint_loads_on_one():
    variables, _, expected = on_one_device("delayed")
    sharded = run("delayed", (2, 2), AxisType.Auto)[0][-1][2]
    for leaf in jax.tree.leaves(sharded["fp8_metas"]):
        assert len({shard.data.tobytes() for shard in leaf.addressable_shards}) == 1
    saved = serialization.to_bytes(sharded)
    loaded = serialization.from_bytes(variables, saved)
    for x, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(sharded), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(wanted).tobytes()
    loaded = jax.tree.map(jnp.asarray, loaded)
    step = jax.jit(make_step("delayed", ()))
    after, wanted = step(loaded, *data()), step(expected[-1][2], *data())
    np.testing.assert_allclose(after[0], wanted[0], rtol=1e-4)
    assert len(jax.tree.leaves(loaded)[0].devices()) == 1


def test_a_mesh_resource_is_names_of_axes_and_part_of_the_region():
    with pytest.raises(TypeError, match="MeshResource: tp_resource must be the name of a mesh"):
        te.MeshResource("d", 3)
    resource = te.ShardingResource("d", "t", "d", "p")
    assert resource.amax_axes == ("d", "t")
    from apex_te.jax.region import active_mesh_resource

    with te.fp8_autocast(True, mesh_resource=resource), te.autocast(True):
        assert active_mesh_resource() == resource
    assert active_mesh_resource() == te.MeshResource()
