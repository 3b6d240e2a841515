"""Permutation of tokens, casts and products of groups in JAX: bits as PyTorch's."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from arrays import assert_same, to_jax  # noqa: E402

from apex_te import ops as torch_ops  # noqa: E402
from apex_te import permutation  # noqa: E402
from apex_te.jax import ops  # noqa: E402

TOKENS, EXPERTS, HIDDEN, ROWS = 37, 6, 24, 90
MASK = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1)) < 0.35


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


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPLITS = torch.tensor([7, 0, 20, 5], dtype=torch.int32)
GROUP_ROWS = 40


def both_groups():
    return (
        torch_ops.grouped_quantize.groups_of(SPLITS, GROUP_ROWS),
        jax.jit(lambda splits: ops.grouped_quantize.groups_of(splits, GROUP_ROWS))(to_jax(SPLITS)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_of_groups_have_torchs_bits(dtype):
    theirs, ours = both_groups()
    assert_same(ours.table, theirs.table)
    module, mine = torch_ops.grouped_quantize, ops.grouped_quantize
    x, scale, amax = torch.randn(GROUP_ROWS, 24).to(dtype), torch.rand(4) * 9, torch.rand(4)
    given = to_jax(amax)
    expected = module.quantize_groups(x, theirs, scale, E4M3, amax=amax)
    made = jax.jit(
        lambda x, groups, scale, amax: mine.quantize_groups(
            x, groups, scale, jnp.float8_e4m3fn, amax=amax
        )
    )(to_jax(x), ours, to_jax(scale), given)
    used, columns = int(SPLITS.sum()), int(theirs.column_ends[-1])
    for found, wanted, part in (
        (made.rowwise, expected.rowwise, np.s_[:used]),
        (made.columnwise, expected.columnwise, np.s_[:, :columns]),
        (made.scale_inv, expected.scale_inv, np.s_[:]),
        (made.row_scale_inv, expected.row_scale_inv, np.s_[:used]),
        (made.amax, amax, np.s_[:]),
    ):
        assert_same(found[part], wanted[part])
    matrices = torch.randn(4, 16, 24).to(dtype)
    expected = module.quantize_matrices(list(matrices), scale, E5M2, scale_inv=scale.clone())
    for passed in (to_jax(matrices), [to_jax(m) for m in matrices]):
        made = mine.quantize_matrices(
            passed, to_jax(scale), jnp.float8_e5m2, scale_inv=to_jax(scale)
        )
        assert_same(made.rowwise, expected.rowwise)
        assert_same(made.columnwise, expected.columnwise)
    for options in ({}, {"eps": 0.5, "pow2": True}):
        expected = module.scales_of(amax, E4M3, **options)
        for found, wanted in zip(
            mine.scales_of(to_jax(amax), jnp.float8_e4m3fn, **options), expected, strict=True
        ):
            assert_same(found, wanted)
    bias, out = torch.randn(4, 24).to(dtype), torch.randn(GROUP_ROWS, 24).to(dtype)
    made = mine.finish_rows(to_jax(out), ours, to_jax(bias))
    made_sums = mine.column_sums(to_jax(x), ours)
    made_scaled = mine.scale_rows(to_jax(out), to_jax(torch.arange(40.0)))
    made_cleared = mine.zero_unused(to_jax(matrices), ours)
    assert_same(made_sums, module.column_sums(x, theirs))
    kept = out.clone()
    module.finish_rows(kept, theirs, bias)
    assert_same(made, kept)
    module.scale_rows(out, torch.arange(40.0))
    assert_same(made_scaled, out)
    module.zero_unused(matrices, theirs)
    assert_same(made_cleared, matrices)
    due, first, inverse = torch.tensor([1, 1, 1, 0], dtype=torch.int32), scale.clone(), 1 / scale
    made = mine.first_scales(
        to_jax(amax), ours, to_jax(due), to_jax(first), to_jax(inverse), 448.0, margin=1
    )
    module.first_scales(amax, theirs, due, first, inverse, 448.0, margin=1)
    for found, wanted in zip(made, (due, first, inverse), strict=True):
        assert_same(found, wanted)


def small(*shape):
    """Small integers, whose products and sums are exact."""
    return torch.randint(-3, 4, shape).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_have_torchs_bits_where_sums_are_exact(dtype):
    theirs, ours = both_groups()
    module, mine = torch_ops.grouped_gemm, ops.grouped_gemm
    used = int(SPLITS.sum())
    a, b = small(GROUP_ROWS, 32).to(dtype), small(4, 24, 32).to(dtype)
    a[used:] = float("nan")
    expected = module.multiply_groups(a, b, theirs)
    made = jax.jit(mine.multiply_groups)(to_jax(a), to_jax(b), ours)
    assert_same(made[:used], expected[:used])
    x = small(GROUP_ROWS, 24).to(dtype)
    for wide in (False, True):
        expected = module.contract_groups(a.t().contiguous(), x, theirs, wide)
        made = jax.jit(mine.contract_groups, static_argnums=3)(
            to_jax(a.t().contiguous()), to_jax(x), ours, wide
        )
        for group in (0, 2, 3):  # a group without rows has no defined values
            assert_same(made[group], expected[group])
    row_scales, scales = torch.rand(GROUP_ROWS), torch.rand(4)
    codes, matrices = a.float().to(E5M2), b.to(E4M3)
    operands = codes, row_scales, matrices, scales
    expected = module.scaled_multiply_groups(*operands, theirs, False)
    made = jax.jit(mine.scaled_multiply_groups, static_argnums=5)(
        *map(to_jax, operands), ours, False
    )
    assert_same(made[:used], expected[:used])
    columns = theirs.columns
    a, b = small(16, columns), small(24, columns)
    a[:, int(theirs.column_ends[-1]) :] = float("nan")
    operands = a.to(E4M3), scales, b.to(E5M2), scales.flip(0)
    for wide in (False, True):
        expected = module.scaled_contract_groups(*operands, theirs.column_ends, True, wide)
        made = jax.jit(mine.scaled_contract_groups, static_argnums=(5, 6))(
            *map(to_jax, operands), ours.column_ends, True, wide
        )
        assert_same(made, expected)
