"""Permutation of tokens, casts and products of groups in JAX: bits as PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from arrays import assert_same, refused, to_jax  # noqa: E402

from apex_te import ops as torch_ops  # noqa: E402
from apex_te import permutation  # noqa: E402
from apex_te.jax import ops  # noqa: E402

TOKENS, EXPERTS, HIDDEN, ROWS = 37, 6, 24, 90
MASK = torch.rand(TOKENS, EXPERTS) < 0.35


def routing(kind):
    """Returns a routing map and the options of its kind."""
    if kind == "index":
        return torch.rand(TOKENS, EXPERTS).topk(2)[1].int(), {
            "map_type": "index", "num_experts": EXPERTS,
        }  # fmt: skip
    return MASK, {"align_size": 4} if kind == "padded" else {}


def same_counts(ours, theirs):
    """Asserts equal counts; parts of a map itself are never written."""
    assert ours.row_id_map.shape == theirs.row_id_map.shape
    for found, expected in zip(ours[1:], theirs[1:], strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert_same(found, expected)


@pytest.mark.parametrize("kind", ["mask", "index", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permutation_has_torchs_bits(kind, dtype):
    routes, options = routing(kind)
    module, ours = torch_ops.moe_permute, ops.moe_permute
    expected = module.make_map(routes, num_rows=ROWS, **options)
    row_map = ours.make_map(to_jax(routes), num_rows=ROWS, **options)
    same_counts(row_map, expected)
    x, probs = torch.randn(TOKENS, HIDDEN).to(dtype), torch.rand(TOKENS, routes.shape[1])
    grad, grad_probs = torch.randn(ROWS, HIDDEN).to(dtype), torch.rand(ROWS)
    permuted = module.permute(x, expected.row_id_map, ROWS, probs)
    grads = module.permute_bwd(grad, expected.row_id_map, grad_probs)
    back = module.unpermute(grad, expected.row_id_map, probs)
    unpermuted = module.unpermute_bwd(x, grad, expected.row_id_map, probs)
    plain = module.permute(x, expected.row_id_map, ROWS)[0]

    @jax.jit
    def run(x, probs, grad, grad_probs):
        def permute(x, probs):
            return ours.permute(x, row_map.row_id_map, ROWS, probs)

        def unpermute(rows, probs=None):
            return ours.unpermute(rows, row_map.row_id_map, probs)

        permuted, pull = jax.vjp(permute, x, probs)
        back, pull_back = jax.vjp(unpermute, grad, probs)
        no_probs = jax.vjp(unpermute, grad)[1](x)[0]
        both = ours.permute_by(x, to_jax(routes), ROWS, probs, **options)
        return permuted, pull((grad, grad_probs)), back, pull_back(x), no_probs, both

    arrays = map(to_jax, (x, probs, grad, grad_probs))
    found = run(*arrays)
    for made, wanted in zip(found[:4], (permuted, grads, (back,), unpermuted), strict=True):
        made = made if isinstance(made, tuple) else (made,)
        for one, other in zip(made, wanted, strict=True):
            assert_same(one, other)
    assert_same(found[4], plain)
    for one, other in zip(found[5][:2], permuted, strict=True):
        assert_same(one, other)
    same_counts(found[5][2], expected)


def test_only_gradients_that_are_wanted_are_computed():
    row_map = ops.moe_permute.make_map(to_jax(MASK)).row_id_map
    x, probs = jnp.ones((TOKENS, HIDDEN)), jnp.ones((TOKENS, EXPERTS))

    def rows(x, probs):
        return ops.moe_permute.permute(x, row_map, ROWS, probs)[0].sum()

    def weights(x, probs):
        return (ops.moe_permute.permute(x, row_map, ROWS, probs)[1] ** 2).sum()

    found = jax.grad(rows, (0, 1))(x, probs)
    copies = np.asarray(MASK.sum(1))
    assert np.array_equal(found[0], np.repeat(copies[:, None], HIDDEN, 1))
    assert not np.asarray(found[1]).any()
    found = jax.grad(weights, (0, 1))(x, probs)
    assert not np.asarray(found[0]).any()
    assert np.array_equal(found[1], 2.0 * MASK.numpy())
    fp8 = x.astype(jnp.float8_e4m3fn)
    out, _ = ops.moe_permute.permute(fp8, row_map, ROWS)
    assert out.dtype == jnp.float8_e4m3fn
    assert float(out.astype(jnp.float32).sum()) == HIDDEN * float(MASK.sum())
    with pytest.raises(TypeError, match="moe_permute: inp must have dtype float32, float16 or"):
        jax.vjp(lambda x: ops.moe_permute.permute(x, row_map, ROWS)[0], fp8)


def test_chunks_are_sorted_as_torch_does():
    sizes, index = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 0, 3, 1])
    x, probs = torch.randn(12, 8).requires_grad_(), torch.rand(12).requires_grad_()
    y, permuted = permutation.moe_sort_chunks_by_index_with_probs(x, probs, sizes, index)
    grad, grad_probs = torch.randn(12, 8), torch.rand(12)
    torch.autograd.backward((y, permuted), (grad, grad_probs))
    chunk_map = ops.moe_permute.make_chunk_map(to_jax(sizes.int()), to_jax(index.int()), 12)
    made, pull = jax.vjp(
        lambda *given: ops.moe_permute.sort_chunks(given[0], chunk_map, given[1]),
        to_jax(x), to_jax(probs),
    )  # fmt: skip
    assert_same(made[0], y)
    assert_same(made[1], permuted)
    dx, dprobs = pull((to_jax(grad), to_jax(grad_probs)))
    assert_same(dx, x.grad)
    assert_same(dprobs, probs.grad)
    only = jax.grad(lambda p: (ops.moe_permute.sort_chunks(to_jax(x), chunk_map, p)[1] * 2).sum())
    assert np.array_equal(only(to_jax(probs))[:10], np.full(10, 2.0, np.float32))


def test_bad_input_of_permutation_is_refused_as_torch_does():
    module, ours = torch_ops.moe_permute, ops.moe_permute
    routes = torch.ones(5, 3, dtype=torch.int32)
    for given, options in (
        (routes[0], {}), (routes.float(), {}), (routes, {"map_type": "list"}),
        (routes, {"map_type": "index", "align_size": 4}),
        (routes, {"map_type": "index", "num_experts": 0}),
        (routes, {"map_type": "index", "num_experts": 1025}), (routes[:, :0], {}),
        (routes, {"align_size": 0}),
    ):  # fmt: skip
        refused(
            lambda given=given, options=options: ours.make_map(to_jax(given), **options),
            lambda given=given, options=options: module.make_map(given, **options),
        )
    row_map, x = module.make_map(routes).row_id_map, torch.zeros(5, 8)
    for given in (
        (x[0], row_map, 4), (x[:4], row_map, 4), (x, row_map.float(), 4), (x, row_map, -1),
        (x, row_map[:1], 4), (x, row_map, 4, x), (x, row_map, 4, torch.zeros(5, 3).half()),
    ):  # fmt: skip
        arrays = [to_jax(t) if isinstance(t, torch.Tensor) else t for t in given]
        refused(
            lambda arrays=arrays: ours.permute(*arrays),
            lambda given=given: module.permute(*given),
        )
    refused(
        lambda: ours.unpermute(to_jax(x), to_jax(row_map), to_jax(x)),
        lambda: module.unpermute(x, row_map, x),
    )
    refused(
        lambda: ours.make_chunk_map(to_jax(x), to_jax(routes[0]), 4),
        lambda: module.make_chunk_map(x, routes[0], 4),
    )
