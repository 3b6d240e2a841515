"""A model of sharded Flax modules, trained for two steps on one device and on meshes."""

import functools
import re
from collections.abc import Mapping

import flax.linen as nn
import jax
import numpy as np
from flax.linen import partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import apex_te.jax as te
import apex_te.jax.flax as te_flax
from apex_te import recipe

RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.CurrentScaling(),
    "block": recipe.BlockScaling(),
    "block 1x128": recipe.BlockScaling(wgrad_input="1x128"),
    "mx": recipe.MXFP8Scaling(),
    "hif8": recipe.CurrentScaling(fp8_format=recipe.Format.HIF8),
    "first step": recipe.DelayedScaling(amax_history_len=4, first_step="current"),
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
            layernorm_input_axes=ROWS, dot_1_input_axes=ROWS,
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
    axes, variables = nn.get_partition_spec(variables["params"]), nn.unbox(variables)
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
            found = found.get(name, {}) if isinstance(found, Mapping) else found
        return found if isinstance(found, NamedSharding) else NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(of, variables)


def assert_close(found, expected):
    """Asserts that elements differ by two units in the last place of bfloat16 of the largest.

    Where products are added in another order, a value beside the middle of two FP8 values may be
    cast to the other one: one element in 100 may differ by more, if the norm of all
    differences stays below two units of that of the gradient.
    """
    for (path, x), wanted in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        name, wanted = jax.tree_util.keystr(path), np.asarray(wanted, np.float64)
        largest, distance = np.abs(wanted).max(), np.abs(np.asarray(x, np.float64) - wanted)
        ulp = 2.0 ** (np.floor(np.log2(largest)) - 7) if largest else 0.0
        assert (distance > 2 * ulp).sum() <= wanted.size // 100, name
        assert np.linalg.norm(distance) <= 2.0**-7 * np.linalg.norm(wanted), name


def mesh_of(shape, kind):
    count = shape[0] * shape[1]
    return jax.make_mesh(shape, ("d", "t"), axis_types=(kind, kind), devices=jax.devices()[:count])


@functools.cache
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


def assert_trains_as_on_one_device(name, shape, kind):
    """Asserts equal losses, close first gradients and states, and a program without gathers."""
    found, text = run(name, shape, kind)
    expected = on_one_device(name)[2]
    for tolerance, (loss, *_), (wanted, *_) in zip((1e-5, 1e-3), found, expected, strict=True):
        np.testing.assert_allclose(loss, wanted, rtol=tolerance)
    # A later step's casts may round a value to the other neighbour.
    assert_close(found[0][1], expected[0][1])
    assert not re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", text)
    wi = found[-1][1]["params"]["mlp"]["wi_kernel"]
    assert wi.sharding.shard_shape(wi.shape) == (WIDTH, 2, WIDTH // shape[1])
