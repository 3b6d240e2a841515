"""Ops over rows on four devices: no gathers, and one device's bits where no sum is split."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from apex_te.jax import ops  # noqa: E402

P = PartitionSpec
pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 4, reason="jax was started before this folder's conftest"
)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request):
    return jax.make_mesh((4,), ("d",), axis_types=(request.param,), devices=jax.devices()[:4])


def arrays():
    keys = jax.random.split(jax.random.key(0), 2)
    return jax.random.normal(keys[0], (8, 32)), jax.random.normal(keys[1], (32,))


def on(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def compiled(function, *given):
    return jax.jit(function).lower(*given).compile().as_text()


def same(found, expected):
    return np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def gradients(x, weight):
    def loss(x, weight):
        y = ops.layer_norm.layer_norm(x, weight, weight)
        return (ops.activation.activation(y, "gelu") ** 2).sum()

    return jax.grad(loss, (0, 1))(x, weight)


def cast(x, scale):
    dtype, amax = jnp.float8_e4m3fn, jnp.zeros(1)
    made = ops.cast_transpose.cast_transpose(x, scale, dtype, amax=amax, with_dbias=True)
    return made._asdict()


def test_rows_stay_on_their_devices(mesh):
    x, weight = arrays()
    given = on(mesh, x, P("d")), on(mesh, weight, P())
    dx, dweight = jax.jit(gradients)(*given)
    expected = jax.jit(gradients)(x, weight)
    assert same(dx, expected[0])
    np.testing.assert_allclose(dweight, expected[1], rtol=1e-5, atol=1e-5)
    assert dx.sharding.spec[0] == "d"
    assert "all-gather" not in compiled(gradients, *given)


def test_casts_stay_on_their_devices_and_agree_on_the_amax(mesh):
    x, scale = arrays()[0], jnp.full(1, 3.0)
    given = on(mesh, x, P("d")), on(mesh, scale, P())
    made, expected = jax.jit(cast)(*given), jax.jit(cast)(x, scale)
    for name in ("rowwise", "columnwise", "scale_inv", "amax"):
        assert same(made[name], expected[name]), name
    np.testing.assert_allclose(made["dbias"], expected["dbias"], rtol=1e-6, atol=1e-6)
    assert made["columnwise"].sharding.spec[1] == "d"
    assert "all-gather" not in compiled(cast, *given)


@pytest.mark.parametrize("spec", [P(), P(None, "d")])
def test_whole_rows_and_split_columns_give_the_same_bits(mesh, spec):
    x, scale = arrays()[0], jnp.full(1, 3.0)
    made = jax.jit(cast)(on(mesh, x, spec), on(mesh, scale, P()))
    expected = jax.jit(cast)(x, scale)
    assert all(same(made[name], expected[name]) for name in expected)


def test_rows_that_the_devices_do_not_divide(mesh):
    x, scale = jax.random.normal(jax.random.key(1), (6, 32)), jnp.full(1, 3.0)
    made = jax.jit(cast)(on(mesh, x, P()), on(mesh, scale, P()))
    assert all(same(made[name], each) for name, each in jax.jit(cast)(x, scale).items())
