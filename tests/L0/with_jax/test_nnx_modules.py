"""Modules of ``apex_te.jax.nnx``: numbers of Linen's and PyTorch's modules, and FP8 state."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
import jax.numpy as jnp  # noqa: E402
from arrays import assert_same, to_jax  # noqa: E402
from flax_layers import BATCH, HIDDEN, TOKENS, assert_near, torch_layer  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import apex_te  # noqa: E402
import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
import apex_te.jax.nnx as te_nnx  # noqa: E402
from apex_te import recipe  # noqa: E402

DELAYED = recipe.DelayedScaling(amax_history_len=4)
RECIPES = [
    DELAYED,
    recipe.DelayedScaling(amax_history_len=3, first_step="current", margin=1),
    recipe.CurrentScaling(),
    recipe.BlockScaling(),
    recipe.MXFP8Scaling(),
    recipe.CurrentScaling(fp8_format=recipe.Format.HIF8),
]
IN, OUT = 16, 32
GATED = {"activations": ("silu", "linear")}
ATTENTION = {"num_attention_heads": 2, "head_dim": 8}
LAYER = {
    "hidden_size": IN, "mlp_hidden_size": OUT, "num_attention_heads": 2, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
# Constructors of nnx modules and of Linen's.
KINDS = {
    "norm": (
        lambda rngs: te_nnx.LayerNormLinear(IN, OUT, use_bias=True, rngs=rngs),
        te_flax.LayerNormDenseGeneral(OUT, use_bias=True),
    ),
    "mlp": (
        lambda rngs: te_nnx.LayerNormMLP(IN, OUT, rngs=rngs, **GATED),
        te_flax.LayerNormMLP(OUT, **GATED),
    ),
    "attention": (
        lambda rngs: te_nnx.MultiHeadAttention(IN, rngs=rngs, **ATTENTION),
        te_flax.MultiHeadAttention(**ATTENTION),
    ),
    "layer": (
        lambda rngs: te_nnx.TransformerLayer(rngs=rngs, **LAYER),
        te_flax.TransformerLayer(**LAYER),
    ),
    "experts": (
        lambda rngs: te_nnx.MoEBlock(IN, 4, OUT, rngs=rngs, use_ffn_bias=True, aux_loss_coeff=0.1),
        te_flax.MoEBlock(4, 2, OUT, use_ffn_bias=True, aux_loss_coeff=0.1),
    ),
}
X = jax.random.normal(jax.random.key(0), (2, 8, IN))


def first(y):
    return y[0] if isinstance(y, tuple) else y


def pure(model, *filters):
    """Returns arrays of a model's Variables, which later steps do not change."""
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, *filters)))


def collections(model):
    """Returns the Linen variables of a model."""
    found = {"params": pure(model, nnx.Param), "fp8_metas": pure(model, te_nnx.FP8State)}
    return {name: tree for name, tree in found.items() if tree}


def assert_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def loss(model, x=X):
    return (first(model(x)) ** 2).mean()


def steps(model, number=3, f=loss, differentiate=nnx.value_and_grad, x=X):
    """Returns the value and gradients of the last of some steps, without an optimizer."""
    step = nnx.jit(differentiate(f))
    with te.fp8_autocast(True, DELAYED):
        for _ in range(number):
            value, grads = step(model, x)
    return value, nnx.to_pure_dict(grads)


def linear(features=IN, **options):
    with te.fp8_autocast(True, DELAYED):
        return te_nnx.Linear(IN, features, rngs=nnx.Rngs(0), **options)


def linen_step(module, chosen):
    @jax.jit
    def step(variables, x, grad):
        def loss(variables, x):
            y = first(module.apply(variables, x))
            return (y * grad).sum(), y

        with te.fp8_autocast(True, chosen):
            (_, y), found = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)
        return y, found

    return step


def nnx_step(chosen):
    @nnx.jit
    def step(model, x, grad):
        def loss(model, x):
            y = first(model(x))
            return (y * grad).sum(), y

        with te.fp8_autocast(True, chosen):
            (_, y), found = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)
        return y, found

    return step


def assert_same_as_linen(model, module, chosen, count, draw, check=None):
    """Compares outputs, gradients and FP8 state over some steps, bitwise."""
    variables = collections(model)
    assert ("fp8_metas" in variables) == chosen.keeps_state
    ours, theirs = nnx_step(chosen), linen_step(module, chosen)
    for number in range(count):
        x, grad = draw(number)
        y, (grads, dx) = ours(model, x, grad)
        expected, (gradients, expected_dx) = theirs(variables, x, grad)
        assert_equal(y, expected)
        assert_equal(dx, expected_dx)
        assert_equal(nnx.to_pure_dict(grads), gradients["params"])
        if chosen.keeps_state:
            state = {"fp8_metas": gradients["fp8_metas"]}
            variables = te.update_collections(state, variables)
            assert_equal(pure(model, te_nnx.FP8State), variables["fp8_metas"])
        if check is not None:
            check(number, y, dx, nnx.to_pure_dict(grads))


@pytest.mark.parametrize("chosen", RECIPES, ids=repr)
def test_linear_is_linens_and_torchs_over_20_steps(chosen):
    def quarters(*shape):
        return torch.randint(-8, 9, shape).float() / 4

    layer = apex_te.Linear(IN, OUT)
    with torch.no_grad():
        layer.weight.copy_(quarters(OUT, IN))
        layer.bias.copy_(quarters(OUT))
    with te.fp8_autocast(True, chosen):
        model = te_nnx.Linear(IN, OUT, rngs=nnx.Rngs(0))
    model.kernel[...], model.bias[...] = to_jax(layer.weight.T), to_jax(layer.bias)
    drawn = {}

    def draw(number):
        scale = 2.0 ** (number % 5)
        drawn[number] = quarters(16, IN) * scale, quarters(16, OUT) / scale
        return tuple(map(to_jax, drawn[number]))

    def check(number, y, dx, grads):
        x, grad = drawn[number]
        with apex_te.fp8_autocast(fp8_recipe=chosen):
            expected = layer(x.requires_grad_())
        layer.zero_grad()
        expected.backward(grad)
        assert_same(y, expected)
        assert_same(dx, x.grad)
        assert_same(grads["kernel"], layer.weight.grad.T)
        assert_same(grads["bias"], layer.bias.grad)
        if chosen.keeps_state:
            for name in te.state.TENSORS:
                assert_same(getattr(model, name)[...], getattr(layer.fp8_state, name))

    assert_same_as_linen(model, te_flax.DenseGeneral(OUT), chosen, 20, draw, check)


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [("norm", DELAYED), ("mlp", DELAYED), ("attention", DELAYED), ("layer", DELAYED),
     ("experts", DELAYED), ("experts", RECIPES[1]), ("experts", RECIPES[3]),
     ("norm", RECIPES[5]), ("mlp", RECIPES[3]), ("attention", RECIPES[2]), ("layer", RECIPES[4])],
    ids=repr,
)  # fmt: skip
def test_layers_are_linens(kind, chosen):
    make, module = KINDS[kind]
    with te.fp8_autocast(True, chosen):
        model = make(nnx.Rngs(0))

    def draw(number):
        x = 2.0 ** (number % 3) * jax.random.normal(jax.random.key(number), X.shape)
        width = OUT if kind == "norm" else IN
        return x, jax.random.normal(jax.random.key(99 - number), (*X.shape[:-1], width))

    assert_same_as_linen(model, module, chosen, 20 if chosen.keeps_state else 3, draw)


def test_experts_balance_their_tokens_as_linens():
    """The losses of the router, and its bias by the numbers of tokens, which backward leaves."""
    options = {"use_expert_routing_bias": True, "score_function": "sigmoid", "z_loss_coeff": 0.1}
    with te.fp8_autocast(True, DELAYED):
        model = te_nnx.MoEBlock(IN, 4, OUT, rngs=nnx.Rngs(0), aux_loss_coeff=0.1, **options)
    module = te_flax.MoEBlock(4, 2, OUT, aux_loss_coeff=0.1, **options)
    variables = collections(model)

    def loss(model, x):
        y, losses = model(x)
        return (y**2).mean() + losses

    @nnx.jit
    def step(model, x):
        with te.fp8_autocast(True, DELAYED):
            found = nnx.value_and_grad(loss)(model, x)
        model.expert_bias[...] = te.update_expert_bias(
            model.expert_bias[...], model.tokens_per_expert[...]
        )
        return found

    @jax.jit
    def linen(variables, x):
        def loss(variables):
            (y, losses), sown = module.apply(variables, x, mutable=["intermediates"])
            return (y**2).mean() + losses, sown["intermediates"]["tokens_per_expert"][0]

        with te.fp8_autocast(True, DELAYED):
            (value, tokens), grads = jax.value_and_grad(loss, has_aux=True)(variables)
        bias = te.update_expert_bias(variables["params"]["expert_bias"], tokens)
        return value, tokens, bias, grads

    for number in range(4):
        x = jax.random.normal(jax.random.key(number), X.shape)
        value, grads = step(model, x)
        expected, tokens, bias, gradients = linen(variables, x)
        assert_equal(value, expected)
        assert_equal(nnx.to_pure_dict(grads), gradients["params"])
        assert not grads["expert_bias"].get_value().any()
        assert_equal(model.tokens_per_expert[...], tokens)
        assert int(tokens.sum()) == 2 * X.shape[0] * X.shape[1]
        assert_equal(model.expert_bias[...], bias)
        variables = te.update_collections({"fp8_metas": gradients["fp8_metas"]}, variables)
        variables["params"]["expert_bias"] = bias
    assert bias.any()


def test_a_transformer_layer_is_torchs():
    """Near, as for Linen: sums are in another order."""
    layer = torch_layer()
    with te.fp8_autocast(True, DELAYED):
        model = te_nnx.TransformerLayer(
            HIDDEN, 64, 4, rngs=nnx.Rngs(0), hidden_dropout=0.0, attention_dropout=0.0,
            layernorm_epsilon=1e-5, scale_attn_logits=True, enable_relative_embedding=False,
            use_bias=True,
        )  # fmt: skip
    filled = te.state.from_torch(layer.state_dict(), {"params": pure(model, nnx.Param)})
    nnx.update(model, filled["params"])
    step = nnx_step(DELAYED)
    for number in range(3):
        x = (torch.randn(BATCH, TOKENS, HIDDEN) * 2.0**number).requires_grad_()
        grad = torch.randn(BATCH, TOKENS, HIDDEN)
        with apex_te.fp8_autocast(fp8_recipe=DELAYED):
            y = layer(x)
        layer.zero_grad()
        y.backward(grad)
        ours, (grads, dx) = step(model, to_jax(x), to_jax(grad))
        assert_near(ours, y, "y")
        assert_near(dx, x.grad, "dx")
        variables = {"params": nnx.to_pure_dict(grads), "fp8_metas": pure(model, te_nnx.FP8State)}
        with te.fp8_autocast(True, DELAYED):
            found = te.state.to_torch(variables)
        for name, p in layer.named_parameters():
            if not name.endswith("key_bias"):
                assert_near(found[name], p.grad, name)
        state = layer.state_dict()
        for name in (n for n in state if "fp8_state" in n and "header" not in n):
            assert_near(found[name], state[name], name)


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_are_separate_layers(remat):
    """With and without recomputation, which reads the state a second time."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return te_nnx.Linear(IN, IN, rngs=rngs)

    with te.fp8_autocast(True, DELAYED):
        stacked = make(nnx.Rngs(0))
    layers = [linear(), linear()]
    for number, layer in enumerate(layers):
        nnx.update(layer, jax.tree.map(lambda x, n=number: jnp.array(x[n]), pure(stacked)))
    call = nnx.remat(lambda layer, x: x + layer(x)) if remat else lambda layer, x: x + layer(x)

    def scanned(model, x):
        return (nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(model, x) ** 2).mean()

    def separate(layers, x):
        x = x + layers[0](x)
        return ((x + layers[1](x)) ** 2).mean()

    value, grads = steps(stacked, f=scanned)
    expected, parts = steps(nnx.List(layers), f=separate)
    assert_equal(value, expected)
    state = pure(stacked, te_nnx.FP8State)
    for number, layer in enumerate(layers):
        ours = jax.tree.map(lambda x, n=number: x[n], (grads, state))
        assert_equal(ours, (parts[number], pure(layer, te_nnx.FP8State)))
    assert pure(stacked)["amax_history_bwd"][:, 0, 0].all()


def test_refs_arrays_and_eager_steps_give_the_same_bits():
    """As ``nnx.jit`` with Refs: steps without jit, arrays, and ``jax.jit`` of a split model."""
    models = [linear() for _ in range(4)]
    value, grads = steps(models[0])
    with te.fp8_autocast(True, DELAYED):
        for _ in range(3):
            eager = nnx.value_and_grad(loss)(models[1], X)
    te_nnx.use_refs(models[2], False)
    by_arrays = steps(models[2], differentiate=te_nnx.value_and_grad)
    te_nnx.use_refs(models[3], False)
    graph, state = nnx.split(models[3])

    @jax.jit
    def step(state):
        model = nnx.merge(graph, state)
        grads, aux = te_nnx.grad(lambda m: (loss(m), 7), has_aux=True)(model)
        return grads, aux, nnx.state(model)

    with te.fp8_autocast(True, DELAYED):
        for _ in range(3):
            found, aux, state = step(state)
    assert aux == 7
    nnx.update(models[3], state)
    np.testing.assert_allclose(eager[0], value, rtol=1e-6)  # a mean that XLA may fuse
    assert_equal(by_arrays[0], value)
    for other in (nnx.to_pure_dict(eager[1]), by_arrays[1], nnx.to_pure_dict(found)):
        assert_equal(other, grads)
    for model in models[1:]:
        assert_equal(pure(model, te_nnx.FP8State), pure(models[0], te_nnx.FP8State))
    te_nnx.use_refs(models[3])  # goes on with Refs
    assert_equal(steps(models[3], 1), steps(models[0], 1))


@pytest.mark.parametrize("in_refs", [True, False])
def test_nnx_optimizer_trains_and_holds_nothing_of_the_state(in_refs):
    """With arrays the model is donated, too."""
    model = linear()
    te_nnx.use_refs(model, in_refs)
    differentiate = nnx.value_and_grad if in_refs else te_nnx.value_and_grad
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=() if in_refs else (0, 1))
    def step(model, optimizer):
        value, grads = differentiate(loss)(model)
        optimizer.update(model, grads)
        return value

    with te.fp8_autocast(True, DELAYED):
        values = [float(step(model, optimizer)) for _ in range(8)]
    assert values[-1] < 0.8 * values[0]
    moments = optimizer.opt_state[0].mu
    assert set(nnx.to_pure_dict(nnx.state(moments))) == {"kernel", "bias"}
    assert model.scale_fwd[...][0] == 448.0 / np.abs(X).max()


@pytest.mark.parametrize("in_refs", [True, False])
def test_a_module_used_twice_adds_up_as_in_linen_and_an_unused_one_keeps_its_state(in_refs):
    differentiate = nnx.value_and_grad if in_refs else te_nnx.value_and_grad
    model = nnx.Dict(used=linear(), unused=linear())
    te_nnx.use_refs(model, in_refs)
    steps(model["unused"], 2, differentiate=differentiate)
    before = pure(model["unused"])
    module = te_flax.DenseGeneral(IN)
    variables = collections(model["used"])
    value, grads = steps(
        model, 2, lambda m, x: (m["used"](m["used"](x)) ** 2).mean(), differentiate
    )
    with te.fp8_autocast(True, DELAYED):
        twice = jax.jit(jax.value_and_grad(
            lambda v: (module.apply(v, module.apply(v, X)) ** 2).mean()
        ))  # fmt: skip
        for _ in range(2):
            expected, found = twice(variables)
            variables = te.update_collections({"fp8_metas": found["fp8_metas"]}, variables)
    assert_equal(value, expected)
    assert_equal(grads["used"], found["params"])
    assert_equal(pure(model["used"], te_nnx.FP8State), variables["fp8_metas"])
    assert variables["fp8_metas"]["uses"].tolist() == [2.0]
    assert_equal(pure(model["unused"]), before)


def test_evaluation_changes_nothing_and_gradients_of_the_input_neither():
    model = linear()
    steps(model)
    before = pure(model)
    with te.fp8_autocast(True, DELAYED):
        y = nnx.jit(lambda model: model(X))(model)
        dx = nnx.jit(nnx.grad(loss, argnums=1))(model, X)
        expected = jax.jit(te_flax.DenseGeneral(IN).apply)(collections(model), X)
    assert_equal(y, expected)
    assert np.asarray(dx).any()
    assert_equal(pure(model), before)


@pytest.mark.parametrize("in_refs", [True, False])
def test_a_checkpoint_resumes_bitwise(in_refs):
    differentiate = nnx.value_and_grad if in_refs else te_nnx.value_and_grad
    model, other = linear(), linear()
    steps(model, 2)
    te_nnx.use_refs(other, in_refs)
    if in_refs:
        nnx.update(other, nnx.state(model))  # the values, not the Refs
        saved = pure(other)
    else:
        saved = pure(model)
        nnx.update(other, jax.tree.map(jnp.array, saved))
    expected = steps(model, 2)
    assert_equal(pure(other), saved)
    assert_equal(steps(other, 2, differentiate=differentiate), expected)
    assert_equal(pure(other, te_nnx.FP8State), pure(model, te_nnx.FP8State))
    if in_refs:
        nnx.update(other, jax.tree.map(jnp.array, saved))
        graph, state = nnx.split(other)
        assert_equal(steps(nnx.merge(graph, state), 2), expected)


def test_a_state_that_would_stand_still_is_refused():
    model = linear()
    te_nnx.use_refs(model, False)
    with te.fp8_autocast(True, DELAYED):
        for differentiate in (nnx.value_and_grad, nnx.grad, lambda f: nnx.jit(nnx.grad(f))):
            with pytest.raises(ValueError, match=r"got a constant .*after use_refs"):
                differentiate(loss)(model)
        outside = te_nnx.LayerNorm(IN, rngs=nnx.Rngs(0))
        assert outside(X).shape == X.shape
    plain = te_nnx.Linear(IN, IN, rngs=nnx.Rngs(0))
    missing = pytest.raises(ValueError, match=r"variables must have .*fp8_metas.* inside")
    with te.fp8_autocast(True, DELAYED), missing:
        nnx.grad(loss)(plain)
    jitted = nnx.jit(lambda: linear())
    with pytest.raises(ValueError, match="mutable array references cannot be returned"):
        jitted()


def test_a_jitted_function_makes_a_model_with_arrays():
    @nnx.jit
    def make():
        model = linear()
        te_nnx.use_refs(model, False)
        return model

    made, model = make(), linear()
    np.testing.assert_allclose(made.kernel[...], model.kernel[...], rtol=1e-6)
    nnx.update(made, nnx.state(model, nnx.Param))
    te_nnx.use_refs(made)
    assert_equal(steps(made), steps(model))
    abstract = nnx.eval_shape(lambda: linear())
    assert abstract.amax_history_fwd.shape == (4, 3)


def test_parameters_have_logical_axes():
    model = linear(kernel_axes=("embed", "mlp"))
    assert isinstance(model.kernel, nnx.Param)
    assert model.kernel.get_metadata()["out_sharding"] == ("embed", "mlp")
    assert nnx.get_partition_spec(nnx.state(model))["kernel"].get_value() == PartitionSpec(
        "embed", "mlp"
    )
    several = te_nnx.Linear((2, 8), (4, 5), rngs=nnx.Rngs(0))
    assert several.kernel.shape == (2, 8, 4, 5)
    assert several(jnp.ones((3, 2, 8))).shape == (3, 4, 5)


def test_logical_axes_place_parameters_where_rules_say_so():
    """Parameters whose axes are not in the rules stay unsharded, as in Linen."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    resource = te.MeshResource(dp_resource="data", tp_resource="model")

    def made(rules):
        region = te.fp8_autocast(True, DELAYED, mesh_resource=resource)
        with jax.set_mesh(mesh), region, nn.logical_axis_rules(rules()):
            return te_nnx.TransformerLayer(rngs=nnx.Rngs(0), **LAYER)

    alone, placed = made(tuple), made(lambda: te_flax.extend_logical_axis_rules(()))
    assert_equal(pure(alone), pure(placed))
    names = alone.mlp.wo_kernel.get_metadata()["out_sharding"]
    assert names == placed.mlp.wo_kernel.get_metadata()["out_sharding"]
    assert placed.mlp.wo_kernel.get_value().sharding.spec == PartitionSpec("model", None)
    assert alone.mlp.wo_kernel.get_value().sharding.spec == PartitionSpec()


def test_experts_on_four_devices_are_those_of_one():
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    found = []
    for axis in (None, "expert"):
        with jax.set_mesh(mesh), te.fp8_autocast(True, DELAYED):
            model = te_nnx.MoEBlock(IN, 8, OUT, rngs=nnx.Rngs(0), ep_axis=axis)
            value, grads = steps(model)
        found.append((value, grads, pure(model, te_nnx.FP8State)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *found)


@pytest.mark.parametrize("chosen", [DELAYED, recipe.CurrentScaling()], ids=repr)
def test_dot_general_of_an_nnx_linear_is_a_linear(chosen):
    """Its state, if any, is part of the model."""
    with te.fp8_autocast(True, chosen):
        ours = te_nnx.Linear(IN, OUT, rngs=nnx.Rngs(0))
    theirs = nnx.Linear(IN, OUT, rngs=nnx.Rngs(1), dot_general=te_nnx.DotGeneral(chosen))
    nnx.update(theirs, nnx.state(ours, nnx.Param))
    step = nnx.jit(nnx.value_and_grad(loss))
    for _ in range(3):
        value, grads = step(theirs)
        with te.fp8_autocast(True, chosen):
            expected, gradients = step(ours)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(grads["kernel"][...], gradients["kernel"][...], atol=1e-6)
    state = pure(ours, te_nnx.FP8State)
    assert bool(state) == chosen.keeps_state
    for name, leaf in state.items():
        np.testing.assert_allclose(getattr(theirs.dot_general, name)[...], leaf, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_dot_general_places_its_result(kind):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,), devices=jax.devices()[:2])
    spec = PartitionSpec(None, None, "model")
    layer = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0), dot_general=te_nnx.DotGeneral("tensorwise"))
    expected = layer(X)
    with jax.set_mesh(mesh):
        layer = jax.device_put(layer, NamedSharding(mesh, PartitionSpec()))
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec()))
        y = nnx.jit(lambda layer, x: layer(x, out_sharding=spec))(layer, x)
    assert y.sharding.spec == spec
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    with pytest.raises(
        TypeError, match=r"out_sharding must be None, a PartitionSpec or .* got int"
    ):
        layer(X, out_sharding=3)


def test_dropout_follows_train_and_eval():
    model = te_nnx.LayerNormMLP(IN, OUT, rngs=nnx.Rngs(0), intermediate_dropout_rate=0.5)
    run = nnx.jit(lambda model: model(X)[0])
    a, b = run(model), run(model)
    assert not np.array_equal(a, b)
    model.eval()
    kept = run(model)
    assert_equal(run(model), kept)
    assert_equal(model(X, deterministic=True)[0], kept)
    module = te_flax.LayerNormMLP(OUT, intermediate_dropout_rate=0.5)
    expected = module.apply(collections(model), X, deterministic=True)[0]
    np.testing.assert_allclose(kept, expected, rtol=1e-6)
    model.train()
    assert not np.array_equal(run(model), kept)


def test_decoding_with_a_cache_is_attention_to_all_tokens():
    model = te_nnx.MultiHeadAttention(IN, rngs=nnx.Rngs(0), **ATTENTION)
    whole, _ = model(X)
    model.init_cache(X.shape)
    step = nnx.jit(lambda model, x: model(x, decode=True)[0])
    tokens = [step(model, X[:, n : n + 1]) for n in range(3)]
    np.testing.assert_allclose(np.concatenate(tokens, 1), whole[:, :3], atol=1e-6)
    assert int(model.cache_index[...]) == 3


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda r: te_nnx.Linear(0, 4, rngs=r), ValueError, "Linear: in_features must be at"),
        (lambda r: te_nnx.Linear(4.0, 4, rngs=r), TypeError, "Linear: in_features must be an int"),
        (lambda r: te_nnx.Linear(4, 4, rngs=7), TypeError, "Linear: rngs must be .*, got int"),
        (lambda r: te_nnx.Linear(4, 4, rngs=None), TypeError, "Linear: rngs must be .* NoneType"),
        (lambda r: te_nnx.Linear(4, 4, rngs=r, axis=0), TypeError, "options must .*, got 'axis'"),
        (lambda r: te_nnx.Linear(4, 4, rngs=r, wide=0), TypeError, "options must .*, got 'wide'"),
        (
            lambda r: te_nnx.DotProductAttention(4, 2, attention_dropout=0.1), TypeError,
            "rngs must be an nnx.Rngs with dropout, got None",
        ),
        (lambda r: te_nnx.DotGeneral("late"), ValueError, "DotGeneral: recipe must be"),
        (lambda r: te_nnx.use_refs(7), TypeError, "module must be an nnx.Module, got int"),
        (
            lambda r: te_nnx.grad(loss)(model=3), TypeError,
            "argument 0 must be given by position, got 0",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make(nnx.Rngs(0))
