"""Ops on four devices: nothing big is gathered, and the bits are those of one device."""

from __future__ import annotations

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import apex_te.jax as te  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax import ops  # noqa: E402
from apex_te.jax import state as fp8_state  # noqa: E402
from apex_te.jax.dense import dense_with_state as dense  # noqa: E402

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


E4M3 = jnp.float8_e4m3fn
GATHERS = re.compile(r" (?:all-gather|all-to-all|collective-permute)(?:-start)?\(")
KINDS = [AxisType.Auto, AxisType.Explicit]
_expected: dict = {}


def square(kind):
    """Returns a mesh of 2 x 2 devices."""
    axes = jax.devices()[:4]
    return jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind, kind), devices=axes)


def exact(seed, *shape):
    """Returns numbers whose products and sums are exact, with another amax in every quarter."""
    units = jax.random.randint(jax.random.key(seed), shape, -8, 9).astype(jnp.float32) / 4
    ups = 2.0 ** (jnp.arange(shape[0]) * 4 // shape[0])
    downs = 2.0 ** -(jnp.arange(shape[-1]) * 4 // shape[-1])
    return units * ups.reshape(-1, *[1] * (len(shape) - 1)) * downs


def per_tensor(a, b, bias):
    one = jnp.ones(1)
    options = {"out_dtype": jnp.float32, "bias": bias}
    return ops.fp8_gemm.fp8_gemm(a.astype(E4M3), b.astype(E4M3), one, one, **options)


def blocks(a, b, bias):
    qa = ops.block_quantize.block_quantize(a, E4M3, columnwise=False)
    qb = ops.block_quantize.block_quantize(b, E4M3, columnwise=False, block_rows=128)
    scales = qa.rowwise_scale_inv, qb.rowwise_scale_inv
    options = {"out_dtype": jnp.float32, "bias": bias}
    return ops.fp8_gemm.block_scaled_gemm(qa.rowwise, qb.rowwise, *scales, **options)


def current(x):
    return ops.current_scale.current_scale(x, E4M3, pow2=True)


def block_rows(x):
    return ops.block_quantize.block_quantize(x, E4M3, padded=False)[:2]


def rms(x, weight):
    return ops.rms_norm.rms_norm(x, weight)


def gelu(x):
    return jax.grad(lambda x: ops.activation.activation(x, "gelu").sum())(x)


def gated(x):
    y, pull = jax.vjp(lambda x: ops.swiglu.swiglu(x, axis=-2), x)
    return y, pull(y)


def mx(a, b):
    qa, qb = (ops.mx_quantize.mx_quantize(x, columnwise=False) for x in (a, b))
    scales = qa.rowwise_scale, qb.rowwise_scale
    return ops.emulated_gemm.mx_gemm(qa.rowwise, qb.rowwise, *scales, out_dtype=jnp.float32)


def hif8(a, b):
    qa, qb = (ops.hif8.quantize_current(x, pow2=True) for x in (a, b))
    scales = qa.scale_inv, qb.scale_inv
    y = ops.emulated_gemm.hif8_gemm(qa.rowwise, qb.rowwise, *scales, out_dtype=jnp.float32)
    return y, qa.columnwise


PRODUCT = [(256, 256), (256, 256), (256,)]
CASES = {
    "activation": (gelu, [(4, 6, 32)], [P("d", None, "t")]),
    "gated activation": (gated, [(4, 6, 2, 32)], [P("d", None, None, "t")]),
    "norm of rows that two axes split": (rms, [(4, 8, 32), (32,)], [P("d", "t"), P()]),
    "current, columns": (current, [(64, 64)], [P(None, "t")]),
    "current, both": (current, [(64, 64)], [P("d", "t")]),
    "blocks of columns": (block_rows, [(256, 256)], [P("d", "t")]),
    "product, rows and columns": (per_tensor, PRODUCT, [P("d"), P("t"), P("t")]),
    "product, K": (per_tensor, PRODUCT, [P("d", "t"), P(None, "t"), P()]),
    "product of blocks": (blocks, PRODUCT, [P("d"), P("t"), P("t")]),
    "MXFP8": (mx, PRODUCT[:2], [P("d", "t"), P(None, "t")]),
    "HiF8": (hif8, PRODUCT[:2], [P("d", "t"), P(None, "t")]),
    "product of blocks, K": (blocks, PRODUCT, [P("d", "t"), P(None, "t"), P()]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_parts_of_every_dimension_stay_on_their_devices(case, kind):
    function, shapes, specs = CASES[case]
    mesh, arrays = square(kind), [exact(i, *shape) for i, shape in enumerate(shapes)]
    given = [on(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
    program = jax.jit(function).lower(*given).compile()
    assert not GATHERS.search(program.as_text())
    if case not in _expected:
        _expected[case] = jax.jit(function)(*arrays)
    assert_one_devices(program(*given), _expected[case])


RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4, scaling_factor_compute_algo="pow2"),
    "current": recipe.CurrentScaling(pow2=True),
    "block": recipe.BlockScaling(),
    "float32 wgrad": recipe.CurrentScaling(
        pow2=True, override_linear_precision=(False, False, True)
    ),
}
# Of x, kernel, bias, and the output.
LAYOUTS = {
    "data 4": (P(("d", "t")), P(), P(), P(("d", "t"))),
    "data 2": (P("d"), P(), P(), P("d")),
    "column": (P("d"), P(None, "t"), P("t"), P("d", "t")),
    "row": (P("d", "t"), P("t"), P(), P("d")),
}
AUTO, EXPLICIT = KINDS
LAYERS = [
    ("delayed", "data 4", AUTO), ("delayed", "row", EXPLICIT), ("current", "column", EXPLICIT),
    ("current", "data 2", AUTO), ("block", "row", AUTO), ("float32 wgrad", "row", AUTO),
]  # fmt: skip


def layer_inputs(name):
    arrays = exact(0, 256, 256), exact(1, 256, 256), exact(2, 256), exact(3, 256, 256)
    state = fp8_state.initial(RECIPES[name]) if name == "delayed" else None
    return (*arrays[:3], state, arrays[3])


def layer_step(name, resource=None):
    """Returns a function of a layer's output, gradients and next state."""

    def step(x, kernel, bias, state, grad):
        def loss(*primals):
            y = dense(*primals)
            return (y * grad).sum(), y

        with te.fp8_autocast(True, RECIPES[name], resource):
            run = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
            (_, y), gradients = run(x, kernel, bias, state)
        return y, gradients

    return step


def two_steps(step, x, kernel, bias, state, grad):
    """Returns the results of two steps, the second with the first's state and twice the input."""
    first = step(x, kernel, bias, state, grad)
    like = jax.tree.map(lambda leaf: leaf.sharding, state)
    moved = jax.tree.map(jax.device_put, first[1][3], like)
    return first, step(2 * x, kernel, bias, moved, grad)


def expected_of(name):
    if name not in _expected:
        _expected[name] = two_steps(jax.jit(layer_step(name)), *layer_inputs(name))
    return _expected[name]


def placed(mesh, layout, inputs):
    x, kernel, bias, out = LAYOUTS[layout]
    state = jax.tree.map(lambda leaf: on(mesh, leaf, P()), inputs[3])
    return [on(mesh, inputs[0], x), on(mesh, inputs[1], kernel), on(mesh, inputs[2], bias),
            state, on(mesh, inputs[4], out)]  # fmt: skip


def assert_one_devices(found, expected):
    for (path, x), wanted in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert same(x, wanted), jax.tree_util.keystr(path)


@pytest.mark.parametrize(("name", "layout", "kind"), LAYERS, ids=str)
def test_layers_have_one_devices_bits(name, layout, kind):
    given = placed(square(kind), layout, layer_inputs(name))
    program = jax.jit(layer_step(name)).lower(*given).compile()
    found = two_steps(program, *given)
    assert_one_devices(found, expected_of(name))
    assert not GATHERS.search(program.as_text())
    for leaf in jax.tree.leaves(found[1][1][3]):
        assert len({shard.data.tobytes() for shard in leaf.addressable_shards}) == 1
        assert leaf.sharding.is_fully_replicated


RESOURCE = te.MeshResource(dp_resource="d", tp_resource="t")


def in_shard_map(name, resource, check_vma, wrap):
    """Returns a step of the column-parallel layer in a ``shard_map``."""
    x, kernel, bias, out = LAYOUTS["column"]
    state = jax.tree.map(lambda _: P(), layer_inputs(name)[3])
    primals = x, kernel, bias, state
    step = layer_step(name, resource)
    return jax.shard_map(
        lambda *args: wrap(step(*args)), mesh=square(AxisType.Auto), in_specs=(*primals, out),
        out_specs=(out, primals), check_vma=check_vma,
    )  # fmt: skip


def on_square(name):
    return placed(square(AxisType.Auto), "column", layer_inputs(name))


def sums(made):
    """Adds gradients up as a caller of ``shard_map`` does who turns its checks off."""
    y, (dx, dkernel, dbias, state) = made
    return y, (jax.lax.psum(dx, "t"), *jax.lax.psum((dkernel, dbias), "d"), state)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_shard_map_combines_amaxes_over_the_resources_axes(name):
    step = jax.jit(in_shard_map(name, RESOURCE, False, sums))
    assert_one_devices(two_steps(step, *on_square(name)), expected_of(name))


def test_shard_map_that_checks_axes_sums_gradients_and_combines_amaxes_of_the_state():
    step = jax.jit(in_shard_map("delayed", None, True, lambda made: made))
    assert_one_devices(two_steps(step, *on_square("delayed")), expected_of("delayed"))


def test_update_fp8_metas_combines_staged_amaxes_in_shard_map():
    state = fp8_state.initial(RECIPES["delayed"])
    amaxes = jnp.arange(1.0, 13.0).reshape(4, 3)

    def update(amaxes, state):
        staged = state["amax_history_fwd"].at[0].set(amaxes[0])
        with te.fp8_autocast(True, RECIPES["delayed"]):
            return te.update_fp8_metas({**state, "amax_history_fwd": staged}, ("d", "t"))

    run = jax.shard_map(
        update, mesh=square(AxisType.Auto), in_specs=(P(("d", "t")), P()), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    found = jax.jit(run)(amaxes, state)
    assert found["amax_history_fwd"][-1].tolist() == [10, 11, 12]
    assert found["scale_fwd"].tolist() == [32, 32, 32]


@pytest.mark.parametrize(("spec", "words"), [(P("d"), "rows"), (P(None, "d"), "columns")])
def test_shards_that_cut_blocks_are_refused(spec, words):
    text = f"block_quantize: x must be split between devices in multiples of 128 {words}, got 96"

    def cast(x):
        return ops.block_quantize.block_quantize(x, E4M3, block_rows=128)

    x = jnp.ones((192, 192))
    with pytest.raises(ValueError, match=text):
        jax.jit(cast).trace(on(square(AxisType.Explicit), x, spec))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ValueError: {text}"):
        jax.jit(cast)(on(square(AxisType.Auto), x, spec))


def test_a_contraction_that_cuts_blocks_is_refused():
    mesh, scales = square(AxisType.Explicit), jnp.ones((2, 4))
    a = on(mesh, jnp.ones((4, 192), E4M3), P(None, "d"))
    text = "block_scaled_gemm: a must be split between devices in multiples of 128 elements along K"
    with pytest.raises(ValueError, match=text):
        jax.jit(ops.fp8_gemm.block_scaled_gemm).trace(a, a, scales, jnp.ones((1, 4)))
