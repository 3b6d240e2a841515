"""Gated activations that are cast to 1x128 blocks at once: bits of PyTorch's and of the two ops."""

import re

import pytest
import torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from arrays import assert_fields, bits, calls, mesh_of, to_arrays, to_jax  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from apex_te.jax.ops import block_quantize, swiglu, swiglu_block  # noqa: E402
from apex_te.ops import swiglu_block as torch_swiglu_block  # noqa: E402

P = PartitionSpec
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = {E4M3: jnp.float8_e4m3fn, E5M2: jnp.float8_e5m2}


def operands(form, rows, cols, dtype):
    """Returns output gradient, input and up, and the biases by name.

    ``form`` says how they are given: "together" or "apart", with "one bias" or "two biases".
    """
    apart = form.startswith("apart")
    x = (3 * torch.randn(*rows, cols if apart else 2 * cols)).to(dtype)
    dy, up = torch.randn(*rows, cols).to(dtype), torch.randn(*rows, cols).to(dtype)
    biases = {"bias": None, "up_bias": None}
    if "one bias" in form:
        biases["bias"] = torch.randn(2 * cols).to(dtype)
    elif "two biases" in form:
        biases = {name: torch.randn(cols).to(dtype) for name in biases}
    return dy, x, up if apart else None, biases


def assert_same_bits(made, expected):
    for name, ours in made._asdict().items():
        theirs = getattr(expected, name)
        assert_same_array(ours, theirs)


def assert_same_array(ours, theirs):
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert bits(ours) == bits(theirs)


@pytest.mark.parametrize(
    ("form", "rows", "cols", "dtype", "options"),
    [
        ("together", (3, 23), 256, torch.bfloat16, {}),
        ("together", (0,), 128, torch.bfloat16, {"activation": "relu"}),
        ("apart", (133,), 128, torch.float16, {"pow2": False, "eps": 0.125}),
        ("apart", (133,), 128, torch.float16, {"scales": "server"}),
        ("one bias", (130,), 44, torch.bfloat16, {"columnwise": False}),
        ("two biases", (5,), 128, torch.float16, {"rowwise": False, "activation": "gelu"}),
        ("apart, one bias", (5,), 128, torch.float32, {"rowwise": False}),
        ("apart, two biases", (2, 3), 128, torch.bfloat16, {"activation": "sigmoid"}),
    ],
)
def test_bits_are_torchs(form, rows, cols, dtype, options):
    dy, x, up, biases = operands(form, rows, cols, dtype)
    ours = to_arrays(biases)
    expected = torch_swiglu_block.swiglu_fwd_block(x, up, E4M3, **biases, **options)

    @jax.jit
    def forward(x, up, ours):
        return swiglu_block.swiglu_fwd_block(x, up, FP8[E4M3], **ours, **options)

    assert_fields(forward(to_jax(x), to_arrays(up), ours), expected)
    expected = torch_swiglu_block.swiglu_bwd_block(dy, x, up, E5M2, **biases, **options)
    made = swiglu_block.swiglu_bwd_block(
        to_jax(dy), to_jax(x), to_arrays(up), FP8[E5M2], **ours, **options
    )
    assert_fields(made, expected)


@pytest.mark.parametrize(
    ("width", "dtype"), [(384, jnp.bfloat16), (72, jnp.bfloat16), (128, jnp.float32)]
)
def test_gate_and_up_in_a_dimension_of_their_own_have_the_two_ops_bits(width, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (3, 47, 2, width), dtype)
    dy = jax.random.normal(keys[1], (3, 47, width), dtype)
    bias = jax.random.normal(keys[2], (2, width), dtype)
    options = {"axis": -2, "bias": bias, "activation": "gelu"}
    made = swiglu_block.swiglu_fwd_block(x, None, FP8[E4M3], padded=False, **options)
    values = swiglu.swiglu_fwd(x, **options)
    expected = block_quantize.block_quantize(values, FP8[E4M3], padded=False, flatten_axis=-1)
    assert_same_bits(made, expected)
    made = swiglu_block.swiglu_bwd_block(dy, x, None, FP8[E5M2], padded=False, **options)
    values = swiglu.swiglu_bwd(dy, x, **options)
    expected = block_quantize.block_quantize(values, FP8[E5M2], padded=False, flatten_axis=-2)
    assert_same_bits(made, expected)
    assert made.rowwise.shape == x.shape
    assert made.columnwise.shape == (2, width, 3, 47)
    padded = swiglu_block.swiglu_bwd_block(dy, x, None, FP8[E5M2], **options)
    flat = block_quantize.block_quantize(values.reshape(3 * 47, 2 * width), FP8[E5M2])
    assert bits(padded.rowwise) == bits(made.rowwise)
    assert bits(padded.columnwise) == bits(made.columnwise)
    for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
        assert_same_array(getattr(padded, name), getattr(flat, name))


def test_one_op_runs_where_there_is_one():
    def forward(x):
        return swiglu_block.swiglu_fwd_block(x, None, FP8[E4M3])

    def backward(dy, x):
        return swiglu_block.swiglu_bwd_block(dy, x, None, FP8[E5M2])

    x, dy = jnp.ones((4, 256), jnp.bfloat16), jnp.ones((4, 128), jnp.bfloat16)
    assert calls(forward, x) == {"swiglu_fwd_block"}
    assert calls(backward, dy, x) == {"swiglu_bwd_block"}
    assert calls(forward, x.astype(jnp.float32)) == {"swiglu_fwd", "block_quantize"}
    assert calls(backward, dy[:, :64], x[:, :128]) == {"swiglu_bwd", "block_quantize"}


def test_checkpoint_and_scan_keep_the_bits():
    x = jax.random.normal(jax.random.key(1), (3, 5, 256), jnp.bfloat16)

    def cast(x):
        return swiglu_block.swiglu_fwd_block(x, None, FP8[E4M3])

    _, stacked = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, jax.checkpoint(cast)(x)), 0, x))(x)
    for i in range(3):
        for made, expected in zip(stacked, cast(x[i]), strict=True):
            assert bits(made[i]) == bits(expected)


@pytest.mark.parametrize("rows", [4, 128])
def test_vmap_has_blocks_of_each_element(rows):
    x = jax.random.normal(jax.random.key(0), (2, rows, 256), jnp.bfloat16)
    dy = jax.random.normal(jax.random.key(1), (2, rows, 128), jnp.bfloat16)

    def both(dy, x):
        forward = swiglu_block.swiglu_fwd_block(x, None, FP8[E4M3], padded=False)
        return (*forward, *swiglu_block.swiglu_bwd_block(dy, x, None, FP8[E5M2], padded=False))

    made = jax.jit(jax.vmap(both))(dy, x)
    for i in range(2):
        for ours, alone in zip(made, both(dy[i], x[i]), strict=True):
            assert bits(ours[i]) == bits(alone)


GATHERS = re.compile(r" (?:all-gather|all-to-all|collective-permute)(?:-start)?\(")


def casts(dy, x):
    """Returns the casts of an activation and of its gradients by name."""
    options = {"axis": -2, "padded": False}
    made = swiglu_block.swiglu_fwd_block(x, None, FP8[E4M3], **options)._asdict()
    grads = swiglu_block.swiglu_bwd_block(dy, x, None, FP8[E5M2], **options)._asdict()
    return {**made, **{f"d{name}": value for name, value in grads.items()}}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_devices_share_rows_and_hidden_columns(kind):
    mesh = mesh_of(kind, d=2, t=2)
    keys = jax.random.split(jax.random.key(2), 2)
    x = jax.random.normal(keys[0], (2, 128, 2, 256), jnp.bfloat16)
    dy = jax.random.normal(keys[1], (2, 128, 256), jnp.bfloat16)
    expected = jax.jit(casts)(dy, x)
    specs = P("d", None, "t"), P("d", None, None, "t")
    given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((dy, x), specs, strict=True)]
    run = jax.jit(casts)
    assert not GATHERS.findall(run.lower(*given).compile().as_text())
    made = run(*given)
    for name in expected:
        assert bits(made[name]) == bits(expected[name]), name
    assert made["drowwise"].sharding.shard_shape((2, 128, 2, 256)) == (1, 128, 2, 128)


def test_a_device_must_have_whole_blocks():
    if len(jax.devices()) < 2:
        pytest.skip("jax was started before this folder's conftest")
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    x, dy = jnp.ones((4, 2, 128), jnp.bfloat16), jnp.ones((4, 128), jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(mesh, P(None, None, "t")))
    dy = jax.device_put(dy, NamedSharding(mesh, P(None, "t")))
    text = "input must be split between devices in multiples of 128 elements along F, got 64"
    with pytest.raises(ValueError, match=f"swiglu_fwd_block: {text}"):
        swiglu_block.swiglu_fwd_block(x, None, FP8[E4M3], axis=-2)
    with pytest.raises(ValueError, match="in multiples of 128 elements along F, got 64"):
        swiglu_block.swiglu_bwd_block(dy, x, None, FP8[E5M2], axis=-2)


def test_refusals_of_what_torch_does_not_have():
    pair = jnp.ones((4, 2, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="swiglu_fwd_block: axis must be -1 or -2, got -3"):
        swiglu_block.swiglu_fwd_block(pair, None, FP8[E4M3], axis=-3)
    nothing = {"axis": -2, "rowwise": False, "columnwise": False}
    for x in (pair, pair.astype(jnp.float32)):
        with pytest.raises(ValueError, match="swiglu_fwd_block: rowwise or columnwise must be"):
            swiglu_block.swiglu_fwd_block(x, None, FP8[E4M3], **nothing)
        with pytest.raises(ValueError, match="swiglu_bwd_block: rowwise or columnwise must be"):
            swiglu_block.swiglu_bwd_block(x[:, 0], x, None, FP8[E4M3], **nothing)
