"""The ops of attention and of the layers around it: bits as PyTorch's, transforms, refusals."""

import re
from functools import partial

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from arrays import assert_same, assert_same_gradients, mesh_of, to_arrays, to_jax  # noqa: E402

from apex_te import ops as torch_ops  # noqa: E402
from apex_te.jax import ops  # noqa: E402

FLOATS = [torch.float32, torch.bfloat16]


def assert_vmap_is_a_loop(function, axes, *arguments):
    """Asserts that jax.vmap, also in jit, gives what calls with one element each give."""
    found = jax.jit(jax.vmap(function, axes))(*arguments)
    count = next(x.shape[a] for x, a in zip(arguments, axes, strict=True) if a is not None)
    alone = jax.jit(function)
    for i in range(count):
        one = alone(
            *(x if a is None else jnp.take(x, i, a) for x, a in zip(arguments, axes, strict=True))
        )
        for made, wanted in zip(*map(jax.tree.leaves, (found, one)), strict=True):
            assert np.array_equal(made[i], wanted)


MASKS = {
    "none": None, "own": (3, 4, 6, 6), "heads": (3, 1, 6, 6), "batch": (1, 4, 6, 6),
    "keys": (3, 1, 1, 6), "rows": (1, 1, 6, 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [None, "upper_left", "bottom_right"])
@pytest.mark.parametrize("mask", MASKS)
def test_softmax_has_torchs_bits(mask, causal, dtype):
    x, grad = (torch.randn(3, 4, 6, 6) * 3).to(dtype), torch.randn(3, 4, 6, 6).to(dtype)
    hidden = None if MASKS[mask] is None else torch.rand(MASKS[mask]) < 0.4

    def softmax(module, mask):
        return lambda x: module.scaled_softmax.scaled_softmax(x, 0.3, mask, causal=causal)

    pair = softmax(ops, to_arrays(hidden)), softmax(torch_ops, hidden)
    assert_same_gradients(*pair, [x], grad)


def test_softmax_of_three_dimensions_and_of_more_keys_than_queries():
    x = torch.randn(5, 4, 9)
    expected = torch_ops.scaled_softmax.scaled_softmax(x, -2.0, causal="bottom_right")
    assert_same(ops.scaled_softmax.scaled_softmax(to_jax(x), -2.0, causal="bottom_right"), expected)


@pytest.mark.parametrize("shape", [(4, 7, 9), (1, 1, 9)])
def test_softmax_maps_scores_and_masks(shape):
    x, masks = to_jax(torch.randn(2, 4, 7, 9)), to_jax(torch.rand(2, *shape) < 0.4)

    def softmax(x, mask):
        def total(x):
            y = ops.scaled_softmax.scaled_softmax(x, 0.5, mask)
            return (y**2).sum(), y

        return jax.grad(total, has_aux=True)(x)

    assert_vmap_is_a_loop(softmax, (0, 0), x, masks)
    assert_vmap_is_a_loop(softmax, (1, None), x.swapaxes(0, 1), masks[0])
    assert_vmap_is_a_loop(softmax, (None, 0), x[0], masks)
    assert_vmap_is_a_loop(jax.vmap(softmax, (None, 0)), (0, None), x, masks)
    assert_vmap_is_a_loop(jax.vmap(softmax, (0, None)), (None, 0), x, masks)


def angles(rows, columns):
    return torch.randn(rows, columns) * 3


ROPE = {
    "sbhd": ((7, 2, 3, 16), {"freqs": angles(9, 16)}),
    "bshd": ((2, 7, 3, 16), {"freqs": angles(9, 8).view(9, 1, 1, 8), "start": 2}),
    "some": ((2, 7, 3, 16), {"freqs": angles(9, 6), "rotary_dim": 12}),
    "half": ((2, 7, 3, 16), {"freqs": angles(9, 8).bfloat16(), "interleaved": True}),
    "cos": ((2, 7, 3, 16), {"cos": angles(9, 8), "sin": angles(9, 8)}),
    "starts": ((7, 2, 3, 16), {"freqs": angles(9, 8), "starts": torch.tensor([1, 4])}),
    "thd": (
        (11, 3, 16),
        {"freqs": angles(9, 8), "cu_seqlens": torch.tensor([1, 4, 4, 10], dtype=torch.int32)},
    ),
    "thd, starts": (
        (11, 3, 16),
        {
            "freqs": angles(9, 8), "cu_seqlens": torch.tensor([0, 4, 10], dtype=torch.int32),
            "starts": torch.tensor([3, 1], dtype=torch.int32),
        },
    ),
}  # fmt: skip


def rope_options(name):
    """Returns the options of a case for torch and for JAX, where integers have 32 bits."""
    options = dict(ROPE[name][1])
    layout = "thd" if "thd" in name else "sbhd" if ROPE[name][0][0] == 7 else "bshd"
    options["layout"] = layout
    return options, to_arrays(options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROPE)
def test_rope_has_torchs_bits(name, dtype):
    x, grad = (torch.randn(ROPE[name][0]).to(dtype) for _ in range(2))
    options, arrays = rope_options(name)
    pair = partial(ops.rope.rope, **arrays), partial(torch_ops.rope.rope, **options)
    assert_same_gradients(*pair, [x], grad)


def test_rope_maps_arrays_and_starts():
    for name in ("sbhd", "bshd", "thd"):
        _, options = rope_options(name)
        x = to_jax(torch.randn(3, *ROPE[name][0]))
        assert_vmap_is_a_loop(lambda x, options=options: ops.rope.rope(x, **options), (0,), x)
    _, options = rope_options("starts")
    del options["starts"]
    x, starts = to_jax(torch.randn(3, 7, 2, 3, 16)), jnp.arange(6).reshape(3, 2)

    def rotated(x, starts):
        return ops.rope.rope(x, **options, starts=starts)

    assert_vmap_is_a_loop(rotated, (0, 0), x[:, :4], starts)
    assert_vmap_is_a_loop(rotated, (None, 0), x[0, :4], starts)
    tables = to_jax(torch.randn(3, 9, 16))
    assert_vmap_is_a_loop(lambda freqs: ops.rope.rope(x[0], freqs), (0,), tables)


def test_rope_in_scans_and_remat():
    x, freqs = to_jax(torch.randn(7, 2, 3, 16)), to_jax(angles(9, 16))

    def loss(x, body):
        y, _ = jax.lax.scan(lambda x, _: (body(x, freqs) ** 2, None), x, None, length=3)
        return y.sum()

    plain = jax.jit(jax.grad(lambda x: loss(x, ops.rope.rope)))(x)
    again = jax.jit(jax.grad(lambda x: loss(x, jax.checkpoint(ops.rope.rope))))(x)
    assert np.array_equal(plain, again)
    with pytest.raises(NotImplementedError, match="rope: freqs must not require a gradient"):
        jax.grad(lambda freqs: ops.rope.rope(x, freqs).sum())(freqs)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16])
@pytest.mark.parametrize("reduction", ops.cross_entropy.REDUCTIONS)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_cross_entropy_has_torchs_bits(reduction, factor, dtype):
    logits = (torch.randn(3, 5, 37) * 3).to(dtype)
    target = torch.randint(0, 37, (3, 5), dtype=torch.int32)
    target[1, 2] = -1
    options = {"ignore_index": -1, "label_smoothing": 0.1, "reduction": reduction}
    grad = torch.full((3, 5) if reduction == "none" else (), factor)

    def loss(module, target):
        return lambda logits: module.cross_entropy.cross_entropy(logits, target, **options)

    assert_same_gradients(loss(ops, to_jax(target)), loss(torch_ops, target), [logits], grad)


def test_cross_entropy_without_a_gradient_makes_none():
    logits, target = jnp.ones((6, 32)), jnp.arange(6)

    def results(function):
        text = jax.jit(function).lower(logits).as_text()
        return re.search(r"apex_te\.cross_entropy_fwd\(.*-> (.*)", text)[1]

    def mean(logits):
        return ops.cross_entropy.cross_entropy(logits, target)

    assert results(mean) == "tensor<6xf32>"
    assert "tensor<6x32xf32>" in results(jax.grad(mean))


def test_losses_map():
    logits, target = to_jax(torch.randn(3, 5, 33)), to_jax(torch.randint(0, 33, (3, 5)).int())

    def losses(logits, target):
        return ops.cross_entropy.cross_entropy(logits, target, reduction="none")

    assert_vmap_is_a_loop(losses, (0, 0), logits, target)
    assert_vmap_is_a_loop(
        jax.grad(lambda *given: (losses(*given) ** 2).sum()), (0, None), logits, target[0]
    )
    target = target.at[1, :3].set(-100)  # another number of valid tokens
    assert_vmap_is_a_loop(ops.cross_entropy.cross_entropy, (0, 0), logits, target)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", ["tanh", "erf"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_gelu_has_torchs_bits(with_bias, form, dtype):
    x, grad = (torch.randn(3, 25, 32).to(dtype) for _ in range(2))
    bias = torch.randn(32).to(dtype) if with_bias else None
    ours, theirs = (partial(m.bias_gelu.bias_gelu, form=form) for m in (ops, torch_ops))
    assert_same_gradients(ours, theirs, [x, bias], grad)


def test_bias_gelu_to_fp8_has_torchs_bits():
    dy, x, bias = torch.randn(75, 48), torch.randn(75, 48), torch.randn(48)
    scale, e5m2 = torch.tensor([3.0]), torch.float8_e5m2
    amax = torch.zeros(1)
    module, ours = torch_ops.bias_gelu, ops.bias_gelu
    expected = module.bias_gelu_fwd_fp8(x, bias, scale, e5m2, amax=amax)
    arrays = [to_jax(t) for t in (x, bias, scale)]
    made = ours.bias_gelu_fwd_fp8(*arrays, jnp.float8_e5m2, amax=jnp.zeros(1))
    for name in ("rowwise", "columnwise", "scale_inv"):
        assert_same(getattr(made, name), getattr(expected, name))
    assert_same(made.amax, amax)
    expected = module.bias_gelu_bwd_fp8(
        dy, x, bias, scale, e5m2, amax=amax.zero_(), with_dbias=True
    )
    made = ours.bias_gelu_bwd_fp8(
        to_jax(dy), *arrays, jnp.float8_e5m2, amax=jnp.zeros(1), with_dbias=True
    )
    for name in ("rowwise", "columnwise", "scale_inv"):
        assert_same(getattr(made.output, name), getattr(expected.output, name))
    assert_same(made.output.amax, amax)
    assert_same(made.dbias, expected.dbias)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_dropout_add_has_torchs_bits(with_bias, p, dtype):
    x, residual, grad = (torch.randn(3, 25, 33).to(dtype) for _ in range(3))
    bias = torch.randn(33).to(dtype) if with_bias else None
    words = torch.tensor([123456789, -5], dtype=torch.int32)
    seed, key = words.view(torch.int64), to_jax(words).view(jnp.uint32)

    def added(module, seed):
        return lambda *given: module.bias_dropout_add.bias_dropout_add(*given, p, seed=seed)

    assert_same_gradients(added(ops, key), added(torch_ops, seed), [x, bias, residual], grad)
    one = ops.bias_dropout_add.bias_dropout_add(
        to_jax(x), None, to_jax(residual), p, seed=jax.random.wrap_key_data(key)
    )
    plain = torch_ops.bias_dropout_add.bias_dropout_add(x, None, residual, p, seed=seed)
    assert_same(one, plain)


def test_a_mapped_dropout_has_the_masks_of_its_seeds():
    x, residual = to_jax(torch.randn(3, 6, 16)), to_jax(torch.randn(3, 6, 16))
    keys = jax.random.split(jax.random.key(1), 3)

    def added(x, residual, key):
        def total(x):
            y = ops.bias_dropout_add.bias_dropout_add(x, None, residual, 0.5, seed=key)
            return (y**2).sum(), y

        return jax.grad(total, has_aux=True)(x)

    assert_vmap_is_a_loop(added, (0, 0, 0), x, residual, keys)
    assert_vmap_is_a_loop(added, (0, 0, None), x, residual, keys[0])
    plain = ops.bias_dropout_add.bias_dropout_add
    with pytest.raises(ValueError, match=r"bias_dropout_add: seed must be given for p = 0.5"):
        plain(x, None, residual, 0.5)
    with pytest.raises(TypeError, match="seed must have dtype int64, int32 or uint32, got float32"):
        plain(x, None, residual, 0.5, True, seed=jnp.zeros(2))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_rows_stay_where_they_are(kind):
    P, mesh = jax.sharding.PartitionSpec, mesh_of(kind, d=4)
    x, mask = to_jax(torch.randn(8, 2, 4, 16)), to_jax(torch.rand(1, 1, 4, 16) < 0.4)
    freqs, target = to_jax(angles(4, 16)), to_jax(torch.randint(0, 16, (8, 2, 4)).int())
    bias = to_jax(torch.randn(16))

    def loss(x, bias, mask, freqs, target):
        x = ops.scaled_softmax.scaled_softmax(x, 2.0, mask)
        x = ops.rope.rope(x.swapaxes(1, 2), freqs, layout="bshd").swapaxes(1, 2)
        x = ops.bias_gelu.bias_gelu(x, bias)
        x = ops.bias_dropout_add.bias_dropout_add(x, bias, x, 0.0)
        return ops.cross_entropy.cross_entropy(x, target)

    whole = [jax.device_put(t, jax.NamedSharding(mesh, P())) for t in (bias, mask, freqs)]
    rows = [jax.device_put(t, jax.NamedSharding(mesh, P("d"))) for t in (x, target)]
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    compiled = step.lower(rows[0], *whole, rows[1]).compile()
    assert "all-gather" not in compiled.as_text()
    value, (dx, dbias) = compiled(rows[0], *whole, rows[1])
    one, (one_dx, one_dbias) = step(x, bias, mask, freqs, target)
    np.testing.assert_allclose(value, one, rtol=1e-6)
    assert np.array_equal(dx, one_dx)
    np.testing.assert_allclose(dbias, one_dbias, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_random_mask_is_that_of_one_device(kind):
    P, mesh = jax.sharding.PartitionSpec, mesh_of(kind, d=4)
    x, key = to_jax(torch.randn(8, 33)), jax.random.key_data(jax.random.key(5))

    def total(x, key):
        y = ops.bias_dropout_add.bias_dropout_add(x, None, x, 0.5, seed=key)
        return (y**2).sum()

    step = jax.jit(jax.value_and_grad(total))
    value, dx = step(
        jax.device_put(x, jax.NamedSharding(mesh, P("d"))),
        jax.device_put(key, jax.NamedSharding(mesh, P())),
    )
    one, one_dx = step(x, key)
    np.testing.assert_allclose(value, one, rtol=1e-6)
    assert np.array_equal(dx, one_dx)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("shape", [(2, 8, 6, 6), (1, 1, 6, 6), (2, 1, 1, 6)])
def test_devices_share_the_heads(shape, kind):
    P, mesh = jax.sharding.PartitionSpec, mesh_of(kind, d=2, t=2)
    x, mask = to_jax(torch.randn(2, 8, 6, 6)), to_jax(torch.rand(shape) < 0.4)
    freqs, bias = to_jax(angles(6, 6)), to_jax(torch.randn(8))

    def loss(x, mask, freqs):
        y = ops.scaled_softmax.scaled_softmax(x, 2.0, mask)
        y = ops.rope.rope(y.swapaxes(1, 2), freqs, layout="bshd")
        y = ops.bias_gelu.bias_gelu(y.swapaxes(2, 3), bias)
        return (y**3).sum(), y

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    spec = P("d", "t" if shape[1] > 1 else None) if shape[0] > 1 else P()
    given = [(x, P("d", "t")), (mask, spec), (freqs, P())]
    placed = [jax.device_put(each, jax.NamedSharding(mesh, where)) for each, where in given]
    compiled = step.lower(*placed).compile()
    assert "all-gather" not in compiled.as_text()
    (_, y), dx = compiled(*placed)
    (_, one), one_dx = step(x, mask, freqs)
    assert np.array_equal(y, one)
    assert np.array_equal(dx, one_dx)
