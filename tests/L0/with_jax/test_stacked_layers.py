"""Layers that ``nn.scan`` stacks: numbers, FP8 state and checkpoints of single layers."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from flax import serialization  # noqa: E402
from flax.core import FrozenDict, freeze  # noqa: E402

import apex_te  # noqa: E402
import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax.ops.amax_scale_update import amax_scale_update  # noqa: E402

LAYERS, WIDTH, ROWS = 2, 128, 8
# As many rows of a history as layers, so that neither passes for the other by its extent.
DELAYED = recipe.DelayedScaling(amax_history_len=LAYERS)
RECIPES = {
    "delayed": DELAYED,
    "first step": recipe.DelayedScaling(
        amax_history_len=4, first_step="current", amax_compute_algo="most_recent"
    ),
    "tensorwise": recipe.CurrentScaling(),
    "blockwise": recipe.BlockScaling(),
}

stack = functools.partial(te.state.stack_layers, partition_name="layers")


class Layer(nn.Module):
    """One layer with two products, in the form of an ``nn.scan``'s body."""

    @nn.compact
    def __call__(self, x, _=None):
        y, _ = te_flax.LayerNormMLP(
            intermediate_dim=WIDTH, activations=("relu",), name="mlp",
        )(x, deterministic=True)  # fmt: skip
        return x + y, None


class Stacked(nn.Module):
    """Layers in an ``nn.scan``, each recomputed in backward if ``remat``."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(Layer, prevent_cse=False) if self.remat else Layer,
            variable_axes={"params": 0, "fp8_metas": 0}, split_rngs={"params": True},
            length=LAYERS, metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        return scan(name="layers")(x, None)[0]


class Unrolled(nn.Module):
    """Layers of the scanned stack as modules of their own."""

    @nn.compact
    def __call__(self, x):
        for number in range(LAYERS):
            x, _ = Layer(name=f"layers_{number}")(x)
        return x


def checkpointed(variables, x):
    """Applies stacked layers by a ``jax.lax.scan`` of a ``jax.checkpoint``."""
    layers = {name: tree["layers"] for name, tree in variables.items()}

    @jax.checkpoint
    def body(x, layer):
        return Layer().apply(layer, x)

    return jax.lax.scan(body, x, layers)[0]


APPLY = {
    "scan": Stacked().apply,
    "remat": Stacked(remat=True).apply,
    "checkpoint": checkpointed,
    "unrolled": Unrolled().apply,
}


def make_step(apply, chosen, updates):
    """Returns a jitted step, with donated variables: the loss and the next variables."""

    def step(variables, x, target):
        def loss(variables):
            return ((apply(variables, x) - target) ** 2).mean()

        with te.fp8_autocast(True, chosen):
            value, grads = jax.value_and_grad(loss)(variables)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads["params"])
            state = {key: grads[key] for key in grads if key != "params"}
            moved = te.update_collections({"params": params, **state}, variables)
            return value, te.update_fp8_metas(moved) if updates else moved

    return jax.jit(step, donate_argnums=0)


@functools.cache
def start(name):
    """Returns the stacked layers' first variables, on the host."""
    with te.fp8_autocast(True, RECIPES[name]):
        made = jax.jit(Stacked().init)(jax.random.key(0), jnp.ones((ROWS, WIDTH)))
    return jax.tree.map(np.asarray, made)


def data(number):
    keys = jax.random.split(jax.random.key(number + 1), 2)
    x, target = (jax.random.normal(key, (ROWS, WIDTH)) for key in keys)
    return 2.0**number * x, target


@functools.cache
def five_steps(name, way, updates):
    """Returns losses and all variables of five steps, those of layers of their own."""
    variables = start(name)
    if way == "unrolled":
        variables = te.state.unstack_layers(variables, "layers")
    step, found = make_step(APPLY[way], RECIPES[name], updates), []
    for number in range(5):
        loss, variables = step(jax.tree.map(jnp.array, variables), *data(number))
        found.append((loss, jax.tree.map(np.asarray, variables)))
    if way == "unrolled":
        return found
    return [(loss, te.state.unstack_layers(each, "layers")) for loss, each in found]


def assert_equal(found, expected):
    """Asserts two trees with the same names and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        name, ours, theirs = jax.tree_util.keystr(path), np.asarray(ours), np.asarray(theirs)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert ours.tobytes() == theirs.tobytes(), name


CASES = [("delayed", "scan"), ("delayed", "remat"), ("tensorwise", "scan"), ("blockwise", "scan")]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_stacked_layers_train_with_the_bits_of_single_ones(name, way):
    updates = way != "checkpoint"
    found, expected = (five_steps(name, each, updates) for each in (way, "unrolled"))
    assert_equal(found, expected)
    if name != "delayed":
        return
    state = found[-1][1]["fp8_metas"]["layers_1"]["mlp"]
    assert state["scale_fwd"].shape == (6,)
    scales = [each[1]["fp8_metas"]["layers_1"]["mlp"]["scale_fwd"][0] for each in found]
    assert len(set(map(float, scales))) > 2


def test_scales_of_stacked_layers_move_by_their_own_amaxes():
    state = te.state.initial(DELAYED, 2)
    amaxes = np.arange(1.0, 19.0, dtype=np.float32).reshape(3, 6)
    each = [
        {**state, "amax_history_fwd": state["amax_history_fwd"].at[0].set(row), "uses": uses}
        for row, uses in zip(amaxes, jnp.array([[1.0, 1], [2, 1], [0, 1]]), strict=True)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    tree = {"fp8_metas": {"layer": freeze(stacked)}, "params": 1}
    nested = jax.tree.map(lambda leaf: leaf[None], stacked)
    with te.fp8_autocast(True, DELAYED):
        update = jax.jit(te.update_fp8_metas)
        expected = [update(one) for one in each]
        moved, moved_nested = update(tree), update(nested)
    assert moved["params"] == 1
    found = moved["fp8_metas"]["layer"]
    assert isinstance(found, FrozenDict)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
    assert_equal(dict(found), expected)
    assert_equal(moved_nested, jax.tree.map(lambda leaf: leaf[None], expected))
    assert found["scale_fwd"][0, 0] == 448


def test_devices_agree_on_the_amaxes_of_stacked_layers():
    if len(jax.devices()) < 4:
        pytest.skip("jax was started before this folder's conftest")
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    state = te.state.initial(DELAYED)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state)
    amaxes = jnp.arange(1.0, 25.0).reshape(4, 2, 3)

    def update(amaxes):
        history = stacked["amax_history_fwd"].at[:, 0].set(amaxes[0])
        with te.fp8_autocast(True, DELAYED):
            return te.update_fp8_metas({**stacked, "amax_history_fwd": history}, "d")

    run = jax.shard_map(update, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P(), check_vma=False)
    found = jax.jit(run)(amaxes)
    assert found["amax_history_fwd"][:, -1].tolist() == [[19, 20, 21], [22, 23, 24]]
    np.testing.assert_allclose(found["scale_fwd"], 448 / amaxes[-1], rtol=1e-6)


def test_amax_scale_update_is_mapped_over_any_argument():
    keys = jax.random.split(jax.random.key(0), 4)
    histories = [jax.random.uniform(key, (4, 5, 3)) for key in keys[:2]]
    scales = [jax.random.uniform(key, (3,)) for key in keys[2:]]

    def update(histories, scales):
        return amax_scale_update(histories, scales, scales, [448.0, 57344.0], margin=1)

    update = jax.jit(update)
    found = jax.jit(jax.vmap(update, (1, None), 0))([h.swapaxes(0, 1) for h in histories], scales)
    expected = [update([h[i] for h in histories], scales) for i in range(4)]
    assert_equal(found, jax.tree.map(lambda *leaves: np.stack(leaves), *expected))


def test_checkpoints_of_stacked_layers_load_into_single_ones_and_back():
    name = "delayed"
    trained = five_steps(name, "scan", True)[1][1]
    stacked = stack(trained, "layers")
    assert_equal(te.state.unstack_layers(stacked, "layers"), trained)
    saved = serialization.to_bytes(stacked)
    assert_equal(serialization.from_bytes(start(name), saved), stacked)
    # Both continue with the same bits.
    step = make_step(APPLY["unrolled"], RECIPES[name], True)
    after = step(jax.tree.map(jnp.array, trained), *data(2))
    assert_equal(after, five_steps(name, "scan", True)[2])
    below = {key: {"a": {"b": freeze(tree)}} for key, tree in stacked.items()}
    apart = te.state.unstack_layers(freeze(below), "a/b/layers", "{}")
    assert isinstance(apart, FrozenDict)
    assert sorted(apart["params"]["a"]["b"]) == ["0", "1"]
    assert_equal(stack(apart, "a/b/layers", "{}"), freeze(below))


def test_stacked_layers_go_to_torchs_module_list_and_back():
    variables = stack(five_steps("delayed", "scan", True)[0][1], "layers")
    modules = torch.nn.ModuleDict({"layers": torch.nn.ModuleList()})
    for _ in range(LAYERS):
        mlp = apex_te.LayerNormMLP(WIDTH, WIDTH, activation="relu", bias=False)
        modules["layers"].append(torch.nn.ModuleDict({"mlp": mlp}))
    with te.fp8_autocast(True, DELAYED):
        apart = te.state.unstack_layers(variables, "layers", "layers.{}")
        saved = te.state.to_torch(apart)
    modules.load_state_dict({key: torch.from_numpy(v.copy()) for key, v in saved.items()})
    again = te.state.from_torch(modules.state_dict(), apart)
    assert_equal(stack(again, "layers", "layers.{}"), variables)
    dense = {"params": {"kernel": np.ones((2, 4, 8)), "bias": np.ones((2, 8))}}
    for stacked in (variables, {"params": variables["params"]}, dense):
        with pytest.raises(ValueError, match=r"to_torch: .*unstack_layers takes stacked layers"):
            te.state.to_torch(stacked)
    for stacked in (variables, dense):
        with pytest.raises(ValueError, match=r"from_torch: .*unstack_layers takes stacked layers"):
            te.state.from_torch(modules.state_dict(), stacked)


def test_states_of_other_layers_are_refused():
    variables = start("delayed")
    layer = {key: tree["layers"] for key, tree in variables.items()}
    single = jax.tree.map(lambda leaf: leaf[0], layer)
    x = jnp.ones((ROWS, WIDTH))
    text = r"LayerNormMLP: .* of the FP8 state must have shape .*unstack_layers"
    dense = te_flax.DenseGeneral(WIDTH)
    of_flax = nn.Dense(WIDTH, dot_general_cls=te_flax.make_dot_general_cls(DELAYED))
    made, where = of_flax.init(jax.random.key(0), x), "_overwrite_with_gradient"
    made = {**made, where: jax.tree.map(lambda leaf: leaf[None], made[where])}
    with pytest.raises(ValueError, match=r"DotGeneral: .* must have shape \[.*got \[1, .*\]"):
        of_flax.apply(made, x)
    last = jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, -1), layer["fp8_metas"])
    with te.fp8_autocast(True, DELAYED):
        with pytest.raises(ValueError, match=rf"{text}.*, got \[2, "):
            Layer().apply({**single, "fp8_metas": layer["fp8_metas"]}, x)
        shapes = jax.eval_shape(lambda: dense.init(jax.random.key(0), x))
        kernels = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes["params"])
        mixed = {"params": kernels, "fp8_metas": single["fp8_metas"]["mlp"]}
        with pytest.raises(ValueError, match=r"DenseGeneral: .* must have shape \["):
            dense.apply(mixed, x)
        with pytest.raises(ValueError, match=r"update_fp8_metas: .* must have the layers"):
            te.update_fp8_metas(last)


@pytest.mark.parametrize("chosen", [DELAYED, recipe.BlockScaling()], ids=["delayed", "blockwise"])
def test_mapped_layers_with_scales_of_their_own_are_single_layers(chosen):
    """``nn.vmap`` over layers, whose FP8 state or blocks differ."""
    mapped = nn.vmap(
        te_flax.DenseGeneral, variable_axes={"params": 0, "fp8_metas": 0},
        split_rngs={"params": True}, metadata_params={nn.PARTITION_NAME: None},
    )(WIDTH)  # fmt: skip
    x = jax.random.normal(jax.random.key(1), (LAYERS, ROWS, WIDTH)) * jnp.array([[[1.0]], [[8.0]]])

    def step(module):
        @jax.jit
        def run(variables, x):
            with te.fp8_autocast(True, chosen):
                return jax.value_and_grad(
                    lambda v: (module.apply(v, x) ** 2).sum(axis=(-1, -2)).sum()
                )(variables)

        return run

    with te.fp8_autocast(True, chosen):
        variables = nn.unbox(mapped.init(jax.random.key(0), x))
    alone = [jax.tree.map(lambda leaf, i=i: leaf[i], variables) for i in range(LAYERS)]
    together, one = step(mapped), step(te_flax.DenseGeneral(WIDTH))
    for _ in range(2):
        _, grads = together(variables, x)
        singles = [one(each, x[i])[1] for i, each in enumerate(alone)]
        for i, single in enumerate(singles):
            for ours, theirs in zip(*map(jax.tree.leaves, (grads, single)), strict=True):
                assert np.array_equal(ours[i], theirs)
        variables = te.update_collections({k: grads[k] for k in grads if k != "params"}, variables)
        alone = [
            te.update_collections({k: g[k] for k in g if k != "params"}, each)
            for g, each in zip(singles, alone, strict=True)
        ]


def test_variables_that_cannot_be_stacked_are_refused():
    stacked = start("delayed")
    apart = te.state.unstack_layers(stacked, "layers")
    split, join = te.state.unstack_layers, te.state.stack_layers
    with pytest.raises(KeyError, match="stack must be a module of the variables, got 'layer'"):
        split(stacked, "layer")
    with pytest.raises(KeyError, match=r"layers must be names of modules .* got 'block_0'"):
        join(apart, "layers", "block_{}")
    with pytest.raises(ValueError, match=r"layers have one \{\}, got 'layers' and 'layer'"):
        split(stacked, "layers", "layer")
    with pytest.raises(ValueError, match="must have no module 'layers_1', got one"):
        split({"params": {**stacked["params"], "layers_1": {}}}, "layers")
    with pytest.raises(TypeError, match=r"params must have arrays in 'layers' .*, got int"):
        split({"params": {"layers": {"kernel": 3}}}, "layers")
    uneven = {"layers": {"a": np.ones((3, 2)), "b": np.ones((2, 2))}}
    with pytest.raises(ValueError, match=r"params/layers\['b'\] must have 3 layers .* got 2"):
        split({"params": uneven}, "layers")
    fewer = {**apart, "params": {"layers_0": apart["params"]["layers_0"]}}
    with pytest.raises(ValueError, match=r"must have \d layers, as others have, got \d"):
        join(fewer, "layers")
    other = {**apart["params"], "layers_1": apart["params"]["layers_1"]["mlp"]}
    with pytest.raises(ValueError, match="params/layers must have layers with the same param"):
        join({"params": other}, "layers")
    wide = {"layers_0": {"a": np.ones(3)}, "layers_1": {"a": np.ones(4)}}
    with pytest.raises(ValueError, match=r"\['a'\] must be \(\(3,\), 'float64'\) in all layers"):
        join({"params": wide}, "layers")
