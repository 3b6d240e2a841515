"""The ops of attention and of the layers around it: bits as PyTorch's, transforms, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from arrays import assert_same, to_jax  # noqa: E402

from apex_te import ops as torch_ops  # noqa: E402
from apex_te.jax import ops  # noqa: E402

FLOATS = [torch.float32, torch.bfloat16]


def refused(ours, theirs):
    """Asserts that a function of JAX raises while it is traced, in the words of PyTorch's."""
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as expected:
        theirs()
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as found:
        jax.jit(ours).trace()
    assert type(found.value) is type(expected.value)
    assert str(found.value) == str(expected.value)


def assert_vmap_is_a_loop(function, axes, *arguments):
    """Asserts that jax.vmap, also in jit, gives what calls with one element each give."""
    found = jax.jit(jax.vmap(function, axes))(*arguments)
    count = next(x.shape[a] for x, a in zip(arguments, axes, strict=True) if a is not None)
    for i in range(count):
        one = function(
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
    x = (torch.randn(3, 4, 6, 6) * 3).to(dtype).requires_grad_()
    hidden = None if MASKS[mask] is None else torch.rand(MASKS[mask]) < 0.4
    grad = torch.randn(3, 4, 6, 6).to(dtype)
    expected = torch_ops.scaled_softmax.scaled_softmax(x, 0.3, hidden, causal=causal)
    expected.backward(grad)

    @jax.jit
    def run(x, grad):
        given = None if hidden is None else to_jax(hidden)
        y, pull = jax.vjp(
            lambda x: ops.scaled_softmax.scaled_softmax(x, 0.3, given, causal=causal), x
        )
        return y, pull(grad)[0]

    y, dx = run(to_jax(x), to_jax(grad))
    assert_same(y, expected)
    assert_same(dx, x.grad)


def test_softmax_of_three_dimensions_and_of_more_keys_than_queries():
    x = torch.randn(5, 4, 9)
    expected = torch_ops.scaled_softmax.scaled_softmax(x, -2.0, causal="bottom_right")
    assert_same(ops.scaled_softmax.scaled_softmax(to_jax(x), -2.0, causal="bottom_right"), expected)


@pytest.mark.parametrize("shape", [(4, 7, 9), (1, 7, 9), (4, 1, 9)])
def test_softmax_maps_scores_and_masks(shape):
    x, masks = to_jax(torch.randn(3, 4, 7, 9)), to_jax(torch.rand(3, *shape) < 0.4)

    def softmax(x, mask):
        def total(x):
            y = ops.scaled_softmax.scaled_softmax(x, 0.5, mask)
            return (y**2).sum(), y

        return jax.grad(total, has_aux=True)(x)

    assert_vmap_is_a_loop(softmax, (0, 0), x, masks)
    assert_vmap_is_a_loop(softmax, (1, None), x.swapaxes(0, 1), masks[0])
    assert_vmap_is_a_loop(softmax, (None, 0), x[0], masks)
    assert_vmap_is_a_loop(jax.vmap(softmax, (None, 0)), (0, None), x, masks[:2])
    assert_vmap_is_a_loop(jax.vmap(softmax, (0, None)), (None, 0), x[:2], masks)


S = (2, 3, 4, 4)


@pytest.mark.parametrize(
    ("x", "mask", "causal"),
    [
        (torch.zeros(S, dtype=torch.int32), None, None),
        (torch.zeros(4, 4), None, None),
        (torch.zeros(2, 3, 4, 5), None, "upper_left"),
        (torch.zeros(S), None, "lower_left"),
        (torch.zeros(S), torch.zeros(S, dtype=torch.uint8), None),
        (torch.zeros(S), torch.zeros(4, 4, dtype=torch.bool), None),
        (torch.zeros(S), torch.zeros(2, 2, 4, 4, dtype=torch.bool), None),
    ],
)
def test_bad_input_of_softmax_is_refused_as_torch_does(x, mask, causal):
    arrays = to_jax(x), 0.5, None if mask is None else to_jax(mask)
    refused(
        lambda: ops.scaled_softmax.scaled_softmax(*arrays, causal=causal),
        lambda: torch_ops.scaled_softmax.scaled_softmax(x, 0.5, mask, causal=causal),
    )
    refused(
        lambda: ops.scaled_softmax.scaled_softmax_bwd(arrays[0], jnp.zeros((2, 3)), 0.5),
        lambda: torch_ops.scaled_softmax.scaled_softmax_bwd(x, torch.zeros(2, 3), 0.5),
    )


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
    return options, {
        key: to_jax(value) if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
    }


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROPE)
def test_rope_has_torchs_bits(name, dtype):
    x = torch.randn(ROPE[name][0]).to(dtype).requires_grad_()
    grad = torch.randn(ROPE[name][0]).to(dtype)
    options, arrays = rope_options(name)
    expected = torch_ops.rope.rope(x, **options)
    expected.backward(grad)

    @jax.jit
    def run(x, grad):
        y, pull = jax.vjp(lambda x: ops.rope.rope(x, **arrays), x)
        return y, pull(grad)[0]

    y, dx = run(to_jax(x), to_jax(grad))
    assert_same(y, expected)
    assert_same(dx, x.grad)


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
    text = "rope_fwd: freqs must be the same for all elements of jax.vmap, got one for each"
    with pytest.raises(NotImplementedError, match=text):
        jax.vmap(lambda freqs: ops.rope.rope(x[0], freqs))(jnp.ones((3, 9, 16)))


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


X4, TABLE = torch.zeros(4, 2, 3, 8), torch.zeros(4, 8)


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (X4, {"freqs": TABLE, "layout": "hbsd"}),
        (X4.int(), {"freqs": TABLE}),
        (X4[0], {"freqs": TABLE}),
        (X4, {"freqs": TABLE, "rotary_dim": 3}),
        (X4, {"freqs": TABLE, "rotary_dim": 10}),
        (torch.zeros(1, 1, 1, 8194), {"freqs": torch.zeros(1, 8194)}),
        (X4, {}),
        (X4, {"freqs": TABLE, "cos": TABLE, "sin": TABLE}),
        (X4, {"cos": TABLE}),
        (X4, {"freqs": TABLE.int()}),
        (X4, {"freqs": TABLE[0], "rotary_dim": 8}),
        (X4, {"freqs": TABLE, "rotary_dim": 4}),
        (X4, {"cos": TABLE, "sin": TABLE[:, :4]}),
        (X4, {"freqs": TABLE, "layout": "thd"}),
        (X4[0], {"freqs": TABLE, "layout": "thd"}),
        (X4, {"freqs": TABLE, "cu_seqlens": torch.zeros(2, dtype=torch.int32)}),
        (X4[0], {"freqs": TABLE, "layout": "thd", "cu_seqlens": torch.zeros(2)}),
        (
            X4[0],
            {"freqs": TABLE, "layout": "thd", "cu_seqlens": torch.zeros(0, dtype=torch.int32)},
        ),
        (X4, {"freqs": TABLE, "starts": torch.zeros(3, dtype=torch.int32)}),
        (X4, {"freqs": TABLE, "starts": torch.zeros(2)}),
        (X4, {"freqs": TABLE, "start": -1}),
        (X4, {"freqs": TABLE, "start": 1}),
    ],
)
def test_bad_input_of_rope_is_refused_as_torch_does(x, options):
    arrays = {k: to_jax(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    refused(lambda: ops.rope.rope(to_jax(x), **arrays), lambda: torch_ops.rope.rope(x, **options))
