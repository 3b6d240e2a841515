"""Gated activations and QKV gradients that are cast to FP8 at once: bits as PyTorch's."""

import re
from functools import partial

import pytest
import torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from arrays import (  # noqa: E402
    assert_same,
    assert_same_gradients,
    bits,
    mesh_of,
    to_arrays,
    to_jax,
)
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from apex_te.jax.ops import qkv_cast, swiglu  # noqa: E402
from apex_te.ops import qkv_cast as torch_qkv_cast  # noqa: E402
from apex_te.ops import swiglu as torch_swiglu  # noqa: E402

P = PartitionSpec
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = {E4M3: jnp.float8_e4m3fn, E5M2: jnp.float8_e5m2}
# How gate, up and biases are given.
FORMS = ["together", "apart", "one bias", "two biases", "apart, one bias", "apart, two biases"]


def one(value):
    return torch.tensor([value], dtype=torch.float32)


def operands(form, rows, cols, dtype):
    """Returns input, up, bias and up_bias."""
    apart = form.startswith("apart")
    x = (3 * torch.randn(*rows, cols if apart else 2 * cols)).to(dtype)
    up = torch.randn(*rows, cols).to(dtype) if apart else None
    bias = up_bias = None
    if "one bias" in form:
        bias = torch.randn(2 * cols).to(dtype)
    elif "two biases" in form:
        bias, up_bias = torch.randn(cols).to(dtype), torch.randn(cols).to(dtype)
    return x, up, bias, up_bias


def assert_output(made, expected, amax=None):
    for name in ("rowwise", "columnwise", "scale_inv"):
        assert_same(getattr(made, name), getattr(expected, name))
    if amax is not None:
        assert_same(made.amax, amax)


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request):
    return mesh_of(request.param, d=4)


@pytest.mark.parametrize("activation", swiglu.ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_gated_activations_to_fp8_have_torchs_bits(form, activation):
    for rows, cols, dtype in (((3, 23), 17, torch.bfloat16), ((130,), 48, torch.float32)):
        x, up, *biases = operands(form, rows, cols, dtype)
        dy = torch.randn(*rows, cols).to(dtype)
        named = dict(zip(("bias", "up_bias"), biases, strict=True))
        ours = dict(zip(named, to_arrays(biases), strict=True))
        scale, amax = one(5.0), one(0.25)
        options = {"activation": activation}
        expected = torch_swiglu.swiglu_fwd_fp8(x, up, scale, E4M3, **named, **options, amax=amax)

        @jax.jit
        def forward(x, up, scale, ours, options=options):
            start = jnp.full(1, 0.25)
            return swiglu.swiglu_fwd_fp8(x, up, scale, FP8[E4M3], **ours, **options, amax=start)

        given = to_arrays((x, up, scale))
        assert_output(forward(*given, ours), expected, amax)
        amax.fill_(0.0)
        expected = torch_swiglu.swiglu_bwd_fp8(
            dy, x, up, scale, E5M2, **named, **options, amax=amax, with_dbias=True
        )
        made = swiglu.swiglu_bwd_fp8(
            to_jax(dy), *given, FP8[E5M2], **ours, **options, amax=jnp.zeros(1), with_dbias=True
        )
        assert_output(made.output, expected.output, amax)
        assert_same(made.dbias, expected.dbias)


@pytest.mark.parametrize("rowwise", [True, False])
def test_copies_that_are_not_wanted_are_not_made(rowwise):
    x, dy = torch.randn(5, 12), torch.randn(5, 6)
    options = {"rowwise": rowwise, "columnwise": not rowwise}
    expected = torch_swiglu.swiglu_fwd_fp8(x, None, one(2.0), E4M3, **options)
    made = swiglu.swiglu_fwd_fp8(to_jax(x), None, jnp.full(1, 2.0), FP8[E4M3], **options)
    assert_output(made, expected)
    assert made.amax is None
    expected = torch_swiglu.swiglu_bwd_fp8(dy, x, None, one(2.0), E5M2, **options)
    made = swiglu.swiglu_bwd_fp8(
        to_jax(dy), to_jax(x), None, jnp.full(1, 2.0), FP8[E5M2], **options
    )
    assert_output(made.output, expected.output)
    assert made.dbias is None


@pytest.mark.parametrize("form", FORMS)
def test_gated_activations_of_two_arrays_and_with_biases_have_torchs_gradients(form):
    tensors, dy = operands(form, (2, 9), 20, torch.bfloat16), torch.randn(2, 9, 20).bfloat16()
    pair = (partial(module.swiglu, activation="gelu") for module in (swiglu, torch_swiglu))
    assert_same_gradients(*pair, tensors, dy)
    plain = [None if t is None else t.detach() for t in tensors]
    wanted = torch_swiglu.swiglu_bwd(dy, *plain, with_dbias=True)
    found = swiglu.swiglu_bwd(to_jax(dy), *to_arrays(plain), with_dbias=True)
    for made, tensor in zip(found, wanted, strict=True):
        assert_same(made, tensor)


def test_gate_and_up_in_a_dimension_of_their_own_have_the_same_bits():
    x, dy, bias = torch.randn(4, 3, 2 * 10), torch.randn(4, 3, 10), torch.randn(20)
    pair, scale = to_jax(x).reshape(4, 3, 2, 10), jnp.full(1, 4.0)
    given = {"bias": to_jax(bias).reshape(2, 10), "amax": jnp.zeros(1), "axis": -2}
    amax = one(0.0)
    expected = torch_swiglu.swiglu_fwd_fp8(x, None, one(4.0), E4M3, bias=bias, amax=amax)
    made = swiglu.swiglu_fwd_fp8(pair, None, scale, FP8[E4M3], **given)
    assert made.rowwise.shape == (4, 3, 10)
    assert made.columnwise.shape == (10, 4, 3)
    assert bits(made.rowwise) == bits(expected.rowwise)
    assert bits(made.columnwise) == bits(expected.columnwise)
    assert_same(made.amax, amax)
    expected = torch_swiglu.swiglu_bwd_fp8(dy, x, None, one(4.0), E5M2, bias=bias, with_dbias=True)
    made = swiglu.swiglu_bwd_fp8(to_jax(dy), pair, None, scale, FP8[E5M2], **given, with_dbias=True)
    assert made.output.rowwise.shape == (4, 3, 2, 10)
    assert made.output.columnwise.shape == (2, 10, 4, 3)
    assert made.dbias.shape == (2, 10)
    for ours, theirs in (
        (made.output.rowwise, expected.output.rowwise),
        (made.output.columnwise, expected.output.columnwise),
        (made.dbias, expected.dbias),
    ):
        assert bits(ours) == bits(theirs)


def test_vmap_of_gated_activations_to_fp8():
    x, scale = jax.random.normal(jax.random.key(0), (3, 7, 24)), jnp.full(1, 2.0)

    def cast(x):
        return swiglu.swiglu_fwd_fp8(x, None, scale, FP8[E4M3], amax=jnp.zeros(1))

    made = jax.jit(jax.vmap(cast))(x)
    for i in range(3):
        alone = cast(x[i])
        assert bits(made.rowwise[i]) == bits(alone.rowwise)
        assert bits(made.columnwise[i]) == bits(alone.columnwise)
    assert float(made.amax.max()) == max(float(cast(x[i]).amax[0]) for i in range(3))


# (tokens, groups, repeats, size)
GRADS = [
    ((3, 5), 2, 4, 16),
    ((7,), 1, 1, 3),
    ((130, 2), 2, 0, 8),
    ((300,), 2, 1, 24),
    ((0,), 1, 2, 4),
]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", GRADS)
def test_qkv_gradients_have_torchs_bits(shape, dtype, interleaved):
    tokens, groups, repeats, size = shape

    def heads(count):
        return (torch.randn(*tokens, count, size) * 20).to(dtype)

    given = (heads(groups * repeats) if repeats else None, heads(groups), heads(groups))
    amax, options = one(0.5), {"interleaved": interleaved, "with_dbias": True}
    expected = torch_qkv_cast.qkv_cast_grad(*given, one(3.0), E5M2, amax=amax, **options)

    @jax.jit
    def cast(*given):
        start = jnp.full(1, 0.5)
        return qkv_cast.qkv_cast_grad(*given, jnp.full(1, 3.0), FP8[E5M2], amax=start, **options)

    made = cast(*to_arrays(given))
    assert_output(made.output, expected.output, amax)
    assert_same(made.dbias, expected.dbias)
    only = qkv_cast.qkv_cast_grad(
        *to_arrays(given), jnp.full(1, 3.0), FP8[E5M2], interleaved=interleaved, columnwise=False
    )
    assert_same(only.output.rowwise, expected.output.rowwise)
    assert (only.output.columnwise, only.output.amax, only.dbias) == (None, None, None)


@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("shape", [(2, 4, 16, 64), (1, 1, 3, 7), (3, 2, 5, 33), (2, 0, 4, 9)])
def test_qkv_weights_have_torchs_bits(shape, columnwise):
    groups, repeats, size, cols = shape
    weight = torch.randn(groups * (repeats + 2) * size, cols)
    amax, options = one(0.0), {"repeats": repeats, "groups": groups, "columnwise": columnwise}
    expected = torch_qkv_cast.qkv_cast_weight(weight, one(2.0), E4M3, amax=amax, **options)

    @jax.jit
    def cast(weight):
        start, scale = jnp.zeros(1), jnp.full(1, 2.0)
        return qkv_cast.qkv_cast_weight(weight, scale, FP8[E4M3], amax=start, **options)

    assert_output(cast(to_jax(weight)), expected, amax)


GATHERS = re.compile(r" (?:all-gather|all-to-all|collective-permute)(?:-start)?\(")


def assert_shared(mesh, function, given, specs):
    """Asserts that devices compute their parts, with the bits of one device but for dbias."""
    expected = jax.jit(function)(*given)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)
    ]
    run = jax.jit(function)
    assert not GATHERS.findall(run.lower(*placed).compile().as_text())
    for name, made in run(*placed).items():
        if name == "dbias":
            np.testing.assert_allclose(made, expected[name], rtol=1e-5, atol=1e-5)
        else:
            assert bits(made) == bits(expected[name]), name


@pytest.mark.parametrize("spec", ["rows", "F"])
def test_devices_share_gated_casts(mesh, spec):
    keys = jax.random.split(jax.random.key(1), 2)
    x, dy = jax.random.normal(keys[0], (8, 2, 64)), jax.random.normal(keys[1], (8, 64))

    def casts(x, dy):
        options = {"amax": jnp.zeros(1), "axis": -2}
        scale = jnp.full(1, 3.0)
        made = swiglu.swiglu_fwd_fp8(x, None, scale, FP8[E4M3], **options)
        grads = swiglu.swiglu_bwd_fp8(dy, x, None, scale, FP8[E5M2], with_dbias=True, **options)
        output = {f"d{name}": value for name, value in grads.output._asdict().items()}
        return {**made._asdict(), **output, "dbias": grads.dbias}

    specs = {"rows": (P("d"), P("d")), "F": (P(None, None, "d"), P(None, "d"))}[spec]
    assert_shared(mesh, casts, (x, dy), specs)


def test_devices_share_the_tokens_of_qkv_gradients(mesh):
    keys = jax.random.split(jax.random.key(2), 3)
    q, k, v = (jax.random.normal(key, (8, n, 4)) for key, n in zip(keys, (6, 2, 2), strict=True))

    def cast(q, k, v):
        made = qkv_cast.qkv_cast_grad(
            q, k, v, jnp.full(1, 3.0), FP8[E5M2], interleaved=True, amax=jnp.zeros(1),
            with_dbias=True,
        )  # fmt: skip
        return {**made.output._asdict(), "dbias": made.dbias}

    assert_shared(mesh, cast, (q, k, v), [P("d")] * 3)


def test_devices_share_the_columns_of_qkv_weights(mesh):
    weight = jax.random.normal(jax.random.key(3), (24, 32))

    def cast(weight):
        return qkv_cast.qkv_cast_weight(
            weight, jnp.full(1, 3.0), FP8[E4M3], repeats=2, groups=3, columnwise=True,
            amax=jnp.zeros(1),
        )._asdict()  # fmt: skip

    assert_shared(mesh, cast, (weight,), [P(None, "d")])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axis": -3}, "swiglu_fwd: axis must be -1 or -2, got -3"),
        ({"axis": -2}, r"swiglu_fwd: input must have shape \[\.\.\., 2, F\], got \[4, 8\]"),
    ],
)
def test_refusals_of_axes(given, message):
    with pytest.raises(ValueError, match=message):
        swiglu.swiglu(jnp.ones((4, 8)), **given)
    pair, wide = jnp.ones((4, 2, 8)), jnp.ones(8)
    with pytest.raises(ValueError, match="up must be None with axis -2, got an array"):
        swiglu.swiglu(pair, pair, axis=-2)
    with pytest.raises(ValueError, match="up_bias must be None with axis -2, got an array"):
        swiglu.swiglu(pair, None, wide, wide, axis=-2)
    with pytest.raises(ValueError, match="rowwise or columnwise must be True"):
        swiglu.swiglu_fwd_fp8(
            pair, None, jnp.ones(1), FP8[E4M3], axis=-2, rowwise=False, columnwise=False
        )
