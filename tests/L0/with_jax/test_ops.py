"""The ops of ``apex_te.jax.ops``: bits as PyTorch's, gradients, transforms and refusals."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from arrays import (  # noqa: E402
    assert_fields,
    assert_same,
    assert_same_gradients,
    bits,
    mesh_of,
    to_jax,
)

from apex_te import ops as torch_ops  # noqa: E402
from apex_te.jax import ops  # noqa: E402

FLOATS = [torch.float32, torch.bfloat16]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def fp8(dtype):
    return jnp.dtype(str(dtype).removeprefix("torch."))


@pytest.fixture
def poisoned(poison):
    """Memory that torch.empty returns holds NaN."""


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norms_and_their_gradients_have_torchs_bits(op, with_residual, dtype):
    shapes = [(3, 5, 48), *[(48,)] * (2 if op == "layer_norm" else 1)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    residual = torch.randn(3, 5, 48).to(dtype) if with_residual else None
    grads = [torch.randn(3, 5, 48).to(dtype)] * (2 if with_residual else 1)

    def norm(function):
        return lambda *given: function(*given[:-1], residual=given[-1])

    pair = norm(getattr(getattr(ops, op), op)), norm(getattr(getattr(torch_ops, op), op))
    assert_same_gradients(*pair, [*tensors, residual], *grads)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norms_to_fp8_have_torchs_bits(op):
    x, weight, scale = torch.randn(21, 64), torch.randn(64), torch.tensor([5.0])
    bias = (torch.randn(64),) if op == "layer_norm" else ()
    amax = torch.tensor([0.5])
    function = getattr(getattr(torch_ops, op), f"{op}_fwd_fp8")
    expected = function(x, weight, *bias, 1e-5, scale, E4M3, amax=amax)
    arrays = [to_jax(t) for t in (x, weight, *bias)]
    made = getattr(getattr(ops, op), f"{op}_fwd_fp8")(
        *arrays, 1e-5, to_jax(scale), jnp.float8_e4m3fn, amax=jnp.full(1, 0.5)
    )
    assert_same(made.y.rowwise, expected.y.rowwise)
    assert_same(made.y.columnwise, expected.y.columnwise)
    assert_same(made.y.scale_inv, expected.y.scale_inv)
    assert_same(made.y.amax, amax)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ops.activation.KINDS)
def test_activations_have_torchs_bits(kind, dtype):
    x, grad = (torch.randn(4, 6, 32).to(dtype) for _ in range(2))
    ours, theirs = ops.activation.activation, torch_ops.activation.activation
    assert_same_gradients(lambda x: ours(x, kind), lambda x: theirs(x, kind), [x], grad)
    scale, amax = torch.tensor([3.0]), torch.zeros(1)
    for name, arguments in (("activation_fwd_fp8", (x,)), ("activation_bwd_fp8", (grad, x))):
        wanted = getattr(torch_ops.activation, name)(
            *(t.detach() for t in arguments), kind, scale, E5M2, amax=amax.zero_()
        )
        made = getattr(ops.activation, name)(
            *map(to_jax, arguments), kind, to_jax(scale), jnp.float8_e5m2, amax=jnp.zeros(1)
        )
        assert_same(made.rowwise, wanted.rowwise)
        assert_same(made.columnwise, wanted.columnwise)
        assert_same(made.amax, amax)


@pytest.mark.parametrize("activation", ops.swiglu.ACTIVATIONS)
def test_gated_activations_have_torchs_bits(activation):
    ours, theirs = (partial(m.swiglu.swiglu, activation=activation) for m in (ops, torch_ops))
    x, grad = torch.randn(2, 5, 64).bfloat16(), torch.randn(2, 5, 32).bfloat16()
    assert_same_gradients(ours, theirs, [x], grad)


@pytest.mark.parametrize("dtype", FLOATS)
def test_casts_have_torchs_bits(dtype, poisoned):
    x, scale, amax = torch.randn(37, 48).to(dtype) * 9, torch.tensor([4.0]), torch.tensor([1.5])
    expected = torch_ops.cast_transpose.cast_transpose(x, scale, E4M3, amax=amax, with_dbias=True)
    made = ops.cast_transpose.cast_transpose(
        to_jax(x), to_jax(scale), fp8(E4M3), amax=jnp.full(1, 1.5), with_dbias=True
    )
    for name in ("rowwise", "columnwise", "scale_inv", "dbias"):
        assert_same(getattr(made, name), getattr(expected, name))
    assert_same(made.amax, amax)
    expected = torch_ops.current_scale.current_scale(x, E5M2, pow2=True)
    made = ops.current_scale.current_scale(to_jax(x), fp8(E5M2), pow2=True)
    assert_fields(made, expected)
    for block_rows in (1, 128):
        expected = torch_ops.block_quantize.block_quantize(x, E4M3, block_rows=block_rows)
        made = ops.block_quantize.block_quantize(to_jax(x), fp8(E4M3), block_rows=block_rows)
        assert_fields(made, expected)
    back = ops.block_quantize.block_dequantize(
        made.rowwise, made.rowwise_scale_inv, jnp.float32, block_rows=128
    )
    values = x.float().numpy()
    assert np.abs(np.asarray(back) - values).max() < 2**-3 * np.abs(values).max()


@pytest.mark.parametrize(
    ("shape", "flatten_axis"), [((3, 5, 130), -1), ((4, 3, 2, 64), 2), ((0, 5, 2, 192), -2)]
)
@pytest.mark.parametrize("block_rows", [1, 128])
def test_padded_scales_are_those_of_the_flattened_matrix(shape, flatten_axis, block_rows):
    x = torch.randn(shape).bfloat16()
    rows = math.prod(shape[:flatten_axis])
    matrix = x.reshape(rows, math.prod(shape[flatten_axis:]))
    expected = torch_ops.block_quantize.block_quantize(matrix, E4M3, block_rows=block_rows)
    made = ops.block_quantize.block_quantize(
        to_jax(x), fp8(E4M3), block_rows=block_rows, flatten_axis=flatten_axis
    )
    assert made.rowwise.shape == shape
    assert made.columnwise.shape == (*shape[flatten_axis:], *shape[:flatten_axis])
    for name in made._fields:
        theirs = getattr(expected, name)
        ours = getattr(made, name)
        assert_same(ours if name.endswith("scale_inv") else ours.reshape(theirs.shape), theirs)


def quarters(*shape):
    """Multiples of 1/4, whose products and sums are exact in float32 in any order."""
    return torch.randint(-8, 9, shape).float() / 4


@pytest.mark.parametrize("shape", [(16, 32, 48), (5, 17, 33), (4, 0, 16), (0, 16, 16)])
@pytest.mark.parametrize("with_rest", [False, True])
def test_products_have_torchs_bits_where_sums_are_exact(shape, with_rest):
    rows, cols, inner = shape
    a, b = quarters(rows, inner).to(E4M3), quarters(cols, inner).to(E5M2)
    scales = torch.tensor([0.5]), torch.tensor([0.25])
    rest = {}
    if with_rest:
        rest = {"bias": torch.randn(cols), "c": torch.randn(rows, cols).bfloat16()}
    expected = torch_ops.fp8_gemm.fp8_gemm(a, b, *scales, **rest)
    given = {name: to_jax(t) for name, t in rest.items()}
    made = jax.jit(ops.fp8_gemm.fp8_gemm)(*map(to_jax, (a, b, *scales)), **given)
    assert_same(made, expected)


@pytest.mark.parametrize("shape", [(16, 32, 256), (5, 17, 133)])
def test_block_scaled_products_have_torchs_bits_where_sums_are_exact(shape):
    rows, cols, inner = shape
    x, w = quarters(rows, inner), quarters(cols, inner)
    qx = torch_ops.block_quantize.block_quantize(x, E4M3, columnwise=False)
    qw = torch_ops.block_quantize.block_quantize(w, E4M3, columnwise=False, block_rows=128)
    arguments = qx.rowwise, qw.rowwise, qx.rowwise_scale_inv, qw.rowwise_scale_inv
    expected = torch_ops.fp8_gemm.block_scaled_gemm(*arguments, out_dtype=torch.float32)
    made = jax.jit(lambda *given: ops.fp8_gemm.block_scaled_gemm(*given, out_dtype=jnp.float32))(
        *map(to_jax, arguments)
    )
    assert_same(made, expected)


def test_scale_updates_have_torchs_bits_also_in_parts():
    histories = [torch.rand(5, 3) for _ in range(70)]
    histories[1][0, 1] = float("inf")
    scales, inverses = [torch.rand(3) for _ in range(70)], [torch.rand(3) for _ in range(70)]
    limits = [448.0, 57344.0] * 35
    lists = [[to_jax(t) for t in each] for each in (histories, scales, inverses)]
    update = ops.amax_scale_update.amax_scale_update
    made = jax.jit(lambda *lists: update(*lists, limits, margin=1, pow2=True))(*lists)
    torch_ops.amax_scale_update.amax_scale_update(
        histories, scales, inverses, limits, margin=1, pow2=True
    )
    for found, expected in zip(made, (histories, scales, inverses), strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)


def plain_norm(x, weight, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * weight + bias


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_gradients_are_those_of_plain_jax(wanted):
    x, weight, bias = (to_jax(torch.randn(*s)) for s in ((6, 40), (40,), (40,)))

    def loss(norm):
        return jax.jit(jax.grad(lambda *a: (norm(*a) ** 3).sum(), wanted))

    ours = loss(ops.layer_norm.layer_norm)(x, weight, bias)
    for found, expected in zip(ours, loss(plain_norm)(x, weight, bias), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def calls(function, *arguments):
    """Returns the results' types of every call of an op in a lowered program, by function."""
    text = jax.jit(function).lower(*arguments).as_text()
    found = re.findall(r"custom_call @apex_te\.(\w+)\(.*-> (.*)", text)
    return dict(found)


def test_only_what_is_wanted_is_computed():
    x, weight, bias = jnp.ones((8, 32)), jnp.ones(32), jnp.ones(32)

    def loss(*given):
        return ops.layer_norm.layer_norm(*given).sum()

    assert set(calls(loss, x, weight, bias)) == {"layer_norm_fwd"}
    of_x = calls(jax.grad(loss), x, weight, bias)["layer_norm_bwd"]
    assert of_x == "tensor<8x32xf32>"
    of_all = calls(jax.grad(loss, (0, 1, 2)), x, weight, bias)["layer_norm_bwd"]
    assert of_all.count("tensor<32xf32>") == 2
    cast = calls(
        lambda x: ops.cast_transpose.cast_transpose(
            x, jnp.ones(1), jnp.float8_e4m3fn, columnwise=False
        ).rowwise,
        x,
    )
    assert "32x8" not in cast["cast_transpose"]


def test_remat_and_scan_repeat_the_same_bits():
    x, weights = to_jax(torch.randn(6, 32)), to_jax(torch.randn(4, 32))

    def layer(x, weight):
        return ops.activation.activation(ops.rms_norm.rms_norm(x, weight), "gelu")

    def loss(layer, x, weights):
        y, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return (y**2).sum()

    def unrolled(x, weights):
        for weight in weights:
            x = layer(x, weight)
        return (x**2).sum()

    expected = jax.jit(jax.grad(unrolled, (0, 1)))(x, weights)
    for body in (layer, jax.checkpoint(layer)):
        made = jax.jit(jax.grad(lambda *a, body=body: loss(body, *a), (0, 1)))(x, weights)
        for found, wanted in zip(made, expected, strict=True):
            assert np.array_equal(found, wanted)


def test_vmap_folds_the_batch_into_the_rows():
    x, weight = to_jax(torch.randn(3, 4, 5, 32)), to_jax(torch.randn(32))

    def norm(x):
        return ops.rms_norm.rms_norm(x, weight)

    expected = norm(x)
    assert np.array_equal(jax.vmap(norm)(x), expected)
    assert np.array_equal(jax.vmap(jax.vmap(norm, 1, 1), 2, 2)(x), expected)
    gradient = jax.grad(lambda x: (norm(x) ** 2).sum())
    assert np.array_equal(jax.jit(jax.vmap(gradient))(x), gradient(x))
    scale = jnp.full(1, 2.0)

    def cast(x):
        return ops.cast_transpose.cast_transpose(x, scale, jnp.float8_e4m3fn, amax=jnp.zeros(1))

    made = jax.vmap(cast)(x[0])
    for i in range(4):
        one = cast(x[0, i])
        assert bits(made.rowwise[i]) == bits(one.rowwise)
        assert bits(made.columnwise[i]) == bits(one.columnwise)
    assert float(made.amax.max()) == float(jnp.abs(x[0]).max())


def test_vmap_calls_an_op_for_each_element_where_rows_cannot_hold_the_batch():
    """Weights that differ, and sums over the rows of each element."""
    x, weights = jax.random.normal(jax.random.key(0), (3, 4, 32)), jnp.arange(96.0).reshape(3, 32)

    def gradient(x, weight):
        return jax.grad(lambda w: (ops.rms_norm.rms_norm(x, w) ** 2).sum())(weight)

    def cast(x, weight):
        return ops.cast_transpose.cast_transpose(
            x, jnp.full(1, 2.0), jnp.float8_e5m2, amax=jnp.zeros(1), with_dbias=True
        ).dbias

    for function, axes in (
        (ops.rms_norm.rms_norm, (0, 0)), (ops.rms_norm.rms_norm, (None, 0)), (gradient, (0, None)),
        (gradient, (0, 0)), (cast, (0, None)),
    ):  # fmt: skip
        given = [
            each if axis == 0 else each[0] for each, axis in zip((x, weights), axes, strict=True)
        ]
        made = jax.jit(jax.vmap(function, axes))(*given)
        for i in range(3):
            one = [each[i] if axis == 0 else each for each, axis in zip(given, axes, strict=True)]
            assert bits(made[i]) == bits(jax.jit(function)(*one))
    twice = jax.vmap(jax.vmap(ops.rms_norm.rms_norm, (None, 0)), (0, None))(x, weights)
    assert bits(twice[2, 1]) == bits(ops.rms_norm.rms_norm(x[2], weights[1]))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("check", [True, False])
def test_gradients_inside_of_shard_map(kind, check):
    P, mesh = jax.sharding.PartitionSpec, mesh_of(kind, d=4)
    x, weight = to_jax(torch.randn(8, 32)), to_jax(torch.randn(32))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
    whole = jax.device_put(weight, jax.NamedSharding(mesh, P()))

    def gradients(x, weight):
        dx, dweight = jax.grad(lambda *a: (ops.rms_norm.rms_norm(*a) ** 2).sum(), (0, 1))(x, weight)
        return dx, dweight if check else jax.lax.psum(dweight, "d")

    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P()), check_vma=check
    )
    dx, dweight = jax.jit(mapped)(sharded, whole)
    one_dx, one_dweight = jax.jit(
        jax.grad(lambda *a: (ops.rms_norm.rms_norm(*a) ** 2).sum(), (0, 1))
    )(x, weight)
    assert np.array_equal(dx, one_dx)
    np.testing.assert_allclose(dweight, one_dweight, rtol=1e-5, atol=1e-5)
