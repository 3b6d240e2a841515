"""Ops and layers with 64-bit types enabled, and with ``jax.disable_jit``."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402

DELAYED = recipe.DelayedScaling(amax_history_len=4)


def gradients(module, variables, x):
    def loss(variables, x):
        y = module.apply(variables, x)
        return ((y[0] if isinstance(y, tuple) else y) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1))(variables, x)


@pytest.mark.parametrize(
    ("module", "chosen"),
    [
        (te_flax.DenseGeneral(16), DELAYED),
        (te_flax.DenseGeneral(16), recipe.MXFP8Scaling()),
        (te_flax.LayerNormDenseGeneral(16), None),
        (te_flax.LayerNormDenseGeneral(16), recipe.BlockScaling()),
        (te_flax.LayerNormMLP(16, activations=("silu", "linear")), recipe.CurrentScaling()),
    ],
    ids=["delayed", "mxfp8", "none", "blockwise", "tensorwise"],
)
def test_layers_without_jit_are_those_with_it(module, chosen):
    """The results of ``jax.disable_jit`` are the jitted ones, forward and backward."""
    x = jax.random.normal(jax.random.key(0), (4, 32))
    with te.fp8_autocast(chosen is not None, chosen):
        variables = module.init(jax.random.key(1), x)
        expected = jax.jit(lambda v, x: gradients(module, v, x))(variables, x)
        with jax.disable_jit():
            found = gradients(module, variables, x)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_ops_and_optimizers_run_without_jit():
    x = jax.random.normal(jax.random.key(0), (4, 32))
    angles, scale = jnp.arange(4.0)[:, None] * jnp.ones(4), jnp.ones(1)

    def run(x):
        heads = x.reshape(1, 4, 4, 8)
        return (
            te.ops.rms_norm.rms_norm(x, jnp.ones(32)),
            te.ops.swiglu.swiglu(x),
            te.ops.rope.rope(heads, angles, layout="bshd", rotary_dim=8),
            te.ops.cast_transpose.cast_transpose(x, scale, jnp.float8_e4m3fn),
        )

    expected = jax.jit(run)(x)
    with jax.disable_jit():
        found = run(x)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    pytest.importorskip("optax")
    from apex_te.jax.optimizers import fused_adam

    tx = fused_adam(1e-2)
    state = tx.init({"x": x})
    with jax.disable_jit():
        params, _ = tx.step({"x": x}, state, {"x": x})
    assert np.array_equal(params["x"], tx.step({"x": x}, state, {"x": x})[0]["x"])


def test_rotary_embedding_with_64_bit_types_has_float32_angles():
    """Attention, and relative position biases, have the bits that they have without them."""
    layer = te_flax.MultiHeadAttention(4, 4, enable_rotary_pos_emb=True)
    biases = te_flax.RelativePositionBiases(32, 128, 4)
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)

    def run(x):
        key = jax.random.key(0)
        bias, _ = biases.init_with_output(key, 8, 8)
        return layer.init_with_output(key, x, bias=bias)[0][0], bias

    expected = jax.jit(run)(x)
    with jax.enable_x64(True):
        found = jax.jit(run)(x)
        with pytest.raises(TypeError, match=r"inputs_q must have dtype float32, .* got float64"):
            layer.init(jax.random.key(0), jnp.ones((2, 8, 16)))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        assert np.array_equal(ours, theirs)
