"""Modules within ``flax.nnx``, and gradients that would leave FP8 state where it is."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
import apex_te.jax.flax.te_v1 as te_v1  # noqa: E402
from apex_te import recipe  # noqa: E402

DELAYED = recipe.DelayedScaling(amax_history_len=4)
STATELESS = ["tensorwise", "blockwise", "mxfp8"]
X = jax.random.normal(jax.random.key(0), (2, 8, 16))
STANDS_STILL = "FP8 state: its collection must be differentiated together with the parameters"
# By the rule that differentiates them: one product, norm and product, gated MLP, attention.
LAYERS = {
    "dense": lambda kinds: kinds.DenseGeneral(8),
    "norm": lambda kinds: kinds.LayerNormDenseGeneral(8, return_layernorm_output=False),
    "gated": lambda kinds: kinds.LayerNormMLP(
        8, activations=("silu", "linear"), intermediate_dropout_rate=0.0
    ),
    "attention": lambda kinds: kinds.MultiHeadAttention(4, 4),
}


def first(y):
    return y[0] if isinstance(y, tuple) else y


def loss(model):
    return (first(model(X)) ** 2).sum()


def bridged(module, chosen):
    with te.fp8_autocast(True, chosen):
        return nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(X)


@pytest.mark.parametrize("kinds", [te_flax, te_v1], ids=["today", "v1"])
@pytest.mark.parametrize("kind", LAYERS)
def test_training_by_nnx_refuses_delayed_scaling_whose_state_would_stand_still(kind, kinds):
    model = bridged(LAYERS[kind](kinds), DELAYED)
    with te.fp8_autocast(True, DELAYED):
        assert np.isfinite(np.asarray(first(model(X)))).all()  # no gradient, no update
        for differentiate in (nnx.value_and_grad, nnx.grad, lambda f: nnx.jit(nnx.grad(f))):
            with pytest.raises(ValueError, match=STANDS_STILL):
                differentiate(loss)(model)


def test_nnx_may_differentiate_the_state_too():
    """A filter that takes the state in gets the next state as its gradient."""
    model = bridged(te_flax.DenseGeneral(8), DELAYED)
    everything = nnx.DiffState(0, lambda path, value: isinstance(value, nnx.Variable) and (
        jnp.issubdtype(value.dtype, jnp.floating)
    ))  # fmt: skip
    with te.fp8_autocast(True, DELAYED):
        grads = nnx.grad(loss, argnums=everything)(model)
    history = np.asarray(grads["amax_history_fwd"][...])
    assert history[0, 0] == np.abs(X).max()


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [*(("dense", each) for each in STATELESS), ("norm", "mxfp8"), ("gated", "blockwise"),
     ("attention", "tensorwise")],
)  # fmt: skip
def test_nnx_trains_with_recipes_without_state(kind, chosen):
    module = LAYERS[kind](te_flax)
    model = bridged(module, chosen)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with te.fp8_autocast(True, chosen):
        value, grads = jax.jit(
            jax.value_and_grad(lambda p: (first(module.apply({"params": p}, X)) ** 2).sum())
        )(params)
        ours, found = nnx.jit(nnx.value_and_grad(loss))(model)
    np.testing.assert_allclose(ours, value, rtol=1e-6)
    found = nnx.to_pure_dict(found)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_parameters_alone_are_refused_in_linen_too(kind):
    """As in nnx the state would stand still; gradients of the input alone leave it on purpose."""
    module = LAYERS[kind](te_flax)
    with te.fp8_autocast(True, DELAYED):
        variables = module.init(jax.random.key(0), X)
        params, state = variables["params"], {"fp8_metas": variables["fp8_metas"]}

        def total(params, state, x):
            return (first(module.apply({"params": params, **state}, x)) ** 2).sum()

        for wrap in (lambda f: f, jax.jit, jax.checkpoint):
            with pytest.raises(ValueError, match=STANDS_STILL):
                jax.grad(wrap(total))(params, state, X)
        with pytest.raises(ValueError, match=STANDS_STILL):
            jax.grad(total)(params, jax.lax.stop_gradient(state), X)
        dx = jax.jit(jax.grad(total, 2))(params, state, X)
        _, moved = jax.jit(jax.grad(total, (0, 1)))(params, state, X)
    assert np.isfinite(np.asarray(dx)).all()
    histories = [v for p, v in jax.tree_util.tree_leaves_with_path(moved) if "amax" in str(p)]
    assert any(np.asarray(h).any() for h in histories)


@pytest.mark.parametrize("chosen", STATELESS)
def test_nnx_linear_takes_an_object_of_the_class_as_dot_general(chosen):
    made = te_flax.make_dot_general_cls(chosen)()
    layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0), dot_general=made)
    dense = te_flax.DenseGeneral(8)
    params = {"kernel": layer.kernel[...], "bias": layer.bias[...]}
    with te.fp8_autocast(True, chosen):
        wanted = jax.jit(dense.apply)({"params": params}, X)
    np.testing.assert_allclose(layer(X), wanted, atol=1e-6)
    grads = nnx.grad(loss)(layer)
    assert np.asarray(grads["kernel"][...]).any()
    general = nnx.LinearGeneral(16, (2, 4), rngs=nnx.Rngs(0), dot_general=made)
    assert general(X).shape == (2, 8, 2, 4)


def test_dot_generals_that_cannot_be_are_refused():
    layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0), dot_general=te_flax.make_dot_general_cls()())
    with pytest.raises(NotImplementedError, match=r"DotGeneral: recipe must .*nnx"):
        layer(X)
    made = te_flax.make_dot_general_cls("tensorwise")()
    layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0), dot_general=made)
    with pytest.raises(TypeError, match=r"DotGeneral: out_sharding must be None, a P.*, got str"):
        layer(X, out_sharding="x")


def test_nnx_training_with_state_in_dot_general_is_refused():
    module = te_flax.make_dot_general_cls(DELAYED)()
    dims, kernel = (((2,), (0,)), ((), ())), jnp.ones((16, 8))
    model = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(X, kernel, dims)
    with pytest.raises(ValueError, match=STANDS_STILL):
        nnx.grad(lambda model, kernel: model(X, kernel, dims).sum(), argnums=1)(model, kernel)


@pytest.mark.parametrize("use", ["dot_general_cls", "dot_general"])
@pytest.mark.parametrize(
    ("given", "equal"), [("delayed", None), (None, "delayed"), ("tensorwise", "tensorwise")]
)
def test_make_dot_general_cls_takes_recipes_as_fp8_autocast_does(given, equal, use):
    """None stands for delayed scaling, and a name for its recipe."""

    def layer(given):
        made = te_flax.make_dot_general_cls(given)
        return nn.Dense(8, **{use: made if use == "dot_general_cls" else made()})

    variables = layer(given).init(jax.random.key(0), X)
    assert ("_overwrite_with_gradient" in variables) == (given != "tensorwise")
    y, other = (layer(each).apply(variables, X) for each in (given, equal))
    assert np.array_equal(y, other)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("late", ValueError, "recipe must be a recipe or one of delayed, .*, got 'late'"),
        (7, TypeError, "recipe must be a recipe from apex_te.recipe or its name, got int"),
        (recipe.DelayedScaling(interval=2), NotImplementedError, "interval must be 1 in JAX"),
        (recipe.DelayedScaling(amax_compute_algo=max), NotImplementedError, "given by name"),
    ],
)
def test_make_dot_general_cls_refuses_what_fp8_autocast_refuses(given, error, text):
    with pytest.raises(error, match=f"make_dot_general_cls: .*{text}"):
        te_flax.make_dot_general_cls(given)
