"""Attention whose heads lie on several devices, forward and backward, beside one device's."""

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
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "tensorwise": recipe.CurrentScaling(),
    "blockwise": recipe.BlockScaling(),
    "mx": recipe.MXFP8Scaling(),
}
RESOURCE = te.MeshResource(dp_resource="d", tp_resource="t")
BATCH, TOKENS = 4, 64
GATHERS = re.compile(r"= (\S+) (all-gather|all-to-all|collective-permute)(-start)?\(")


def module(**options):
    """Returns attention over 256 features; as many queries' heads of 64 unless told otherwise."""
    defaults = {"head_dim": 64, "num_attention_heads": 4, "use_bias": True}
    return te_flax.MultiHeadAttention(**defaults | options)


def data(cross):
    keys = jax.random.split(jax.random.key(0), 3)
    found = [jax.random.normal(key, (BATCH, TOKENS, 256)) for key in keys]
    return found if cross else found[::2]


def make_step(layer, name, rules, resource=None):
    """Returns a function of the output and the gradients of variables and input."""
    chosen = RECIPES[name]

    def step(variables, x, *rest):
        *others, grad = rest

        def loss(variables, x):
            y = layer.apply(variables, x, *others, deterministic=True)[0]
            return (y * grad).sum(), y

        with (
            partitioning.axis_rules(rules),
            te.fp8_autocast(chosen is not None, chosen, resource),
        ):
            (_, y), found = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)
        return y, found

    return step


def rules():
    with te.fp8_autocast(mesh_resource=RESOURCE):
        return te_flax.extend_logical_axis_rules(())


def first(layer, name, cross):
    """Returns random variables and their logical axes."""
    chosen = RECIPES[name]
    with te.fp8_autocast(chosen is not None, chosen):
        made = jax.jit(functools.partial(layer.init, deterministic=True))(
            jax.random.key(1), *data(cross)[:-1]
        )
    axes, made = nn.get_partition_spec(made["params"]), nn.unbox(made)
    leaves, tree = jax.tree.flatten(made["params"])
    keys = jax.random.split(jax.random.key(2), len(leaves))
    params = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    rest = {n: value for n, value in made.items() if n != "params"}
    return {"params": jax.tree.unflatten(tree, params), **rest}, axes


def placed(mesh, variables, axes):
    by_axes = nn.logical_to_mesh_sharding(axes, mesh, rules())

    def of(path, leaf):
        names = [key.key for key in path]
        found = by_axes if names.pop(0) == "params" else {}
        for each in names:
            found = found.get(each, {}) if isinstance(found, Mapping) else found
        return found if isinstance(found, NamedSharding) else NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(of, variables)


def on_mesh(layer, name, shape, kind, cross=False):
    """Returns results on a mesh, those of one device, and what the program gathers."""
    variables, axes = first(layer, name, cross)
    expected = jax.jit(make_step(layer, name, ()))(variables, *data(cross))
    mesh = jax.make_mesh(
        shape, ("d", "t"), axis_types=(kind, kind), devices=jax.devices()[: shape[0] * shape[1]]
    )
    with jax.set_mesh(mesh):
        places = placed(mesh, variables, axes)
        rows = NamedSharding(mesh, P("d"))
        options = {}
        if kind is AxisType.Auto:
            options["in_shardings"] = (places, *[rows] * len(data(cross)))
            options["out_shardings"] = (rows, (places, rows))
        given = jax.device_put(variables, places)
        inputs = [jax.device_put(x, rows) for x in data(cross)]
        step = jax.jit(make_step(layer, name, rules()), **options)
        program = step.lower(given, *inputs).compile()
        found = program(given, *inputs)
    return found, expected, [m.group(1) for m in GATHERS.finditer(program.as_text())]


def assert_as_on_one_device(options, name, shape, kind, cross=False):
    """Asserts one device's output, gradients and state, and no gather but of keys and values.

    Devices that have parts of heads alone, as there are fewer heads of keys than devices, need
    those. A product that is split along K rounds differently, and so may values that are cast.
    """
    found, expected, gathered = on_mesh(module(**options), name, shape, kind, cross)
    groups = options.get("num_gqa_groups") or options.get("num_attention_heads", 4)
    if groups % shape[1] == 0:
        assert not gathered
    assert all(text.startswith(f"f32[{BATCH // shape[0]},") for text in gathered), gathered
    for (path, x), wanted in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        where, wanted = jax.tree_util.keystr(path), np.asarray(wanted, np.float64)
        # The softmax does not depend on the keys' bias: its gradient is rounding alone.
        if "['key']['bias']" not in where:
            distance = np.linalg.norm(np.asarray(x, np.float64) - wanted)
            assert distance <= 1e-3 * np.linalg.norm(wanted), where
