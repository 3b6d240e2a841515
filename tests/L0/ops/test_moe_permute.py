"""moe_permute against plain PyTorch: maps and copies bit for bit, sums and gradients by error."""

import pytest
import torch
from checks import DTYPES, FP8, assert_as_good_as_torch, assert_same_bits, in_pairs

from apex_te import permutation as moe
from apex_te.ops import moe_permute as op
from apex_te.ops import moe_permute_reference as ref

# tokens, experts, hidden
SHAPES = [
    (0, 4, 16), (1, 1, 1), (3, 7, 8), (17, 8, 15), (127, 33, 17), (128, 64, 128), (129, 1, 1000),
    (300, 100, 40), (64, 8, 3584), (20, 1024, 129), (33, 5, 4095), (1000, 16, 8), (9, 3, 0),
]  # fmt: skip


def mask_of(tokens, experts, top_k=None, kind=torch.bool):
    """Each token goes to top_k experts, or to any number of them, none among them."""
    scores = torch.rand(tokens, experts)
    if top_k is None:
        return (scores < 0.3).to(kind)
    chosen = scores.topk(top_k, 1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True).to(kind)


def leaf(x, device="cpu", dtype=None):
    return x.to(device=device, dtype=dtype).detach().clone().requires_grad_()


def rows_in(row_id_map, width):
    """The reference's rows, out of the map that the kernel made."""
    entries = row_id_map.cpu().long()
    rows = torch.full((entries.shape[0] - 2, width), -1)
    for token, entry in enumerate(entries[:-2].tolist()):
        for k in range(entry[0]):
            rows[token, entry[2 + 2 * k]] = entry[1 + 2 * k]
    return rows


def check(x, probs, mask, device, num_rows=None, align=None):
    """Permute with probs and unpermute with probs, forward and all gradients."""
    rows = ref.rows_of(mask, align_size=align or 1, num_rows=num_rows)
    ours, our_probs = leaf(x, device), leaf(probs, device)
    args = (ours, our_probs, mask.to(device))
    if align is None:
        out, out_probs, row_id_map = moe.moe_permute_with_probs(*args, num_rows)
        pads = None
    else:
        counts = (mask != 0).sum(0).to(device)
        out, out_probs, row_id_map, pads, _ = moe.moe_permute_and_pad_with_probs(
            *args, counts, align, num_rows
        )
    total = out.shape[0]
    if num_rows is not None:
        assert total == num_rows
    assert torch.equal(rows_in(row_id_map, mask.shape[1]), rows)
    expected, expected_probs = ref.permute(x, rows, total, probs)
    assert_same_bits([out, out_probs], [expected, expected_probs])

    grad_out, grad_probs = torch.randn(out.shape).to(x.dtype), torch.randn(total).to(probs.dtype)
    torch.autograd.backward((out, out_probs), (grad_out.to(device), grad_probs.to(device)))
    grads = []
    for dtype in (torch.float64, x.dtype):
        inp, p = leaf(x, dtype=dtype), leaf(probs)
        results = ref.permute(inp, rows, total, p)
        torch.autograd.backward(results, (grad_out.to(dtype), grad_probs))
        grads.append((inp.grad, p.grad))
    assert_as_good_as_torch(ours.grad, grads[0][0], grads[1][0])
    assert_same_bits(our_probs.grad, grads[1][1])

    copies = torch.randn(total, x.shape[1]).to(x.dtype)
    grad = torch.randn(x.shape).to(x.dtype)
    for merging in (None, probs):
        inp = leaf(copies, device)
        merged = None if merging is None else leaf(merging, device)
        y = moe.moe_unpermute(inp, row_id_map, merged, restore_shape=x.shape, pad_offsets=pads)
        y.backward(grad.to(device))
        found = [y, inp.grad] + ([] if merging is None else [merged.grad])
        results = []
        for dtype in (torch.float64, x.dtype):
            inp = leaf(copies, dtype=dtype)
            p_dtype = torch.float64 if dtype == torch.float64 else probs.dtype
            merged = None if merging is None else leaf(merging, dtype=p_dtype)
            y = ref.unpermute(inp, rows, merged)
            y.backward(grad.to(dtype))
            results.append([y, inp.grad] + ([] if merging is None else [merged.grad]))
        for ours_, exact, same in zip(found, *results, strict=True):
            assert_as_good_as_torch(ours_, exact, same)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fwd_and_bwd(device, poison, shape, dtype):
    tokens, experts, hidden = shape
    x = torch.randn(tokens, hidden).to(dtype)
    check(x, torch.rand(tokens, experts), mask_of(tokens, experts), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probs_in_the_dtype_of_inp(device, poison, dtype):
    x = torch.randn(70, 64).to(dtype)
    check(x, torch.rand(70, 9).to(dtype), mask_of(70, 9), device)


@pytest.mark.parametrize("top_k", [1, 2, 5, 8, 40])
def test_any_top_k(device, poison, top_k):
    check(torch.randn(50, 72), torch.rand(50, 40), mask_of(50, 40, top_k), device)


@pytest.mark.parametrize("align", [1, 16, 48])
@pytest.mark.parametrize("num_rows", [None, 1024])
def test_padding(device, poison, align, num_rows):
    mask = mask_of(90, 12)
    mask[:, [0, 5, 11]] = False
    x = torch.randn(90, 40).bfloat16()
    check(x, torch.rand(90, 12), mask, device, num_rows, align)
    counts = mask.sum(0)
    for dtype in (torch.int32, torch.int64):
        _, _, row_id_map, pads, padded = moe.moe_permute_and_pad_with_probs(
            x.to(device), torch.rand(90, 12).to(device), mask.to(device),
            counts.to(device, dtype), align, num_rows,
        )  # fmt: skip
        expected = (counts + align - 1) // align * align
        assert torch.equal(padded.cpu(), expected.to(dtype))
        assert torch.equal(pads.cpu().long(), (expected - counts).cumsum(0) - (expected - counts))
        assert torch.equal(row_id_map[-2, 1:13].cpu().long(), counts)


def test_one_expert_has_all_and_others_none(device, poison):
    mask = torch.zeros(200, 6, dtype=torch.bool)
    mask[:, 3] = True
    check(torch.randn(200, 24), torch.rand(200, 6), mask, device)
    check(torch.randn(200, 24), torch.rand(200, 6), mask, device, 512, 64)
    check(torch.randn(200, 24), torch.rand(200, 6), torch.zeros_like(mask), device)
    check(torch.randn(200, 24), torch.rand(200, 6), torch.zeros_like(mask), device, 33, 8)


@pytest.mark.parametrize("num_rows", [0, 1, 100, 150, 161, 400])
def test_more_rows_than_copies_or_fewer(device, poison, num_rows):
    """Rows past the copies are zero, copies past the rows are dropped and have no gradient."""
    check(torch.randn(80, 16), torch.rand(80, 10), mask_of(80, 10, 2), device, num_rows)


@pytest.mark.parametrize("num_rows", [0, 7, 40, 70])
def test_map_of_more_rows_than_the_matrix_has(device, poison, num_rows):
    """Its padding lies past the last row, too, where nothing may be written."""
    mask = torch.zeros(20, 6, dtype=torch.bool)
    mask[:11, 1] = mask[3:5, 2] = mask[:, 5] = True
    x = torch.randn(20, 8)
    row_id_map = op.make_map(mask.to(device), align_size=16).row_id_map
    around = torch.full((num_rows + 64, 8), 7.0, device=device)
    made, _ = op.permute(x.to(device), row_id_map, num_rows)
    expected = ref.permute(x, ref.rows_of(mask, align_size=16, num_rows=num_rows), num_rows)[0]
    assert_same_bits(made, expected)
    torch.ops.apex_te.moe_permute_rows(x.to(device), None, row_id_map, around[:num_rows], None)
    assert_same_bits(around[:num_rows], expected)
    assert torch.equal(around[num_rows:], torch.full((64, 8), 7.0, device=device))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_masks_of_other_dtypes(device, kind):
    mask = mask_of(140, 11)
    x = torch.randn(140, 8, device=device)
    expected, expected_map = moe.moe_permute(x, mask.to(device))
    marks = torch.where(mask, -3 if kind.is_signed else 200, 0).to(kind)
    out, row_id_map = moe.moe_permute(x, marks.to(device), max_token_num=500)
    assert torch.equal(out, expected)
    assert torch.equal(rows_in(row_id_map, 11), rows_in(expected_map, 11))


@in_pairs(num_rows=[None, -1, 100, 700], num_experts=[None, 13], kind=[torch.int32, torch.int64])
def test_indices(device, poison, num_experts, num_rows, kind):
    """Dropped ones among them, and a token that goes to the same expert twice."""
    index = torch.randint(-2, 13, (150, 4), dtype=kind)
    x, probs, grad = torch.randn(150, 48), torch.rand(150, 4), torch.randn(150, 48)
    total = num_rows if num_rows and num_rows > 0 else 600
    rows = ref.rows_of(index, map_type="index", num_rows=total)
    ours = leaf(x, device)
    out, row_id_map = moe.moe_permute(
        ours, index.to(device), num_rows, map_type="index", num_experts=num_experts
    )
    assert torch.equal(rows_in(row_id_map, 4), rows)
    expected = ref.permute(x, rows, total)[0]
    assert_same_bits(out, expected)
    merging = leaf(probs, device)
    y = moe.moe_unpermute(out, row_id_map, merging, map_type="index")
    y.backward(grad.to(device))
    results = []
    for dtype in (torch.float64, torch.float32):
        inp, p = leaf(x, dtype=dtype), leaf(probs, dtype=dtype)
        result = ref.unpermute(ref.permute(inp, rows, total)[0], rows, p)
        result.backward(grad.to(dtype))
        results.append((result, inp.grad, p.grad))
    for found, exact, same in zip((y, ours.grad, merging.grad), *results, strict=True):
        assert_as_good_as_torch(found, exact, same)


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 33000])
def test_maps_of_many_tiles(device, poison, tokens):
    mask = mask_of(tokens, 37, 3)
    made = op.make_map(mask.to(device), align_size=16)
    rows = ref.rows_of(mask, align_size=16)
    assert torch.equal(made.tokens_per_expert.cpu().long(), mask.sum(0))
    entries = made.row_id_map[:-2].cpu()
    assert torch.equal(entries[:, 0].long(), mask.sum(1))
    if tokens:
        assert torch.equal(entries[:, 1:7:2].long(), rows[mask].view(tokens, 3))
        assert torch.equal(entries[:, 2:8:2].long(), mask.nonzero()[:, 1].view(tokens, 3))
    index = torch.randint(0, 300, (tokens, 2)).int()
    made = op.make_map(index.to(device), map_type="index", num_experts=300)
    assert torch.equal(
        made.row_id_map[:-2, 1:5:2].cpu().long(), ref.rows_of(index, map_type="index")
    )
    counts = torch.bincount(index.flatten(), minlength=300)
    assert torch.equal(made.tokens_per_expert.cpu().long(), counts)


@pytest.mark.parametrize("dtype", [*FP8, torch.uint8, torch.int8])
def test_rows_of_bytes(device, poison, dtype):
    mask = mask_of(77, 6)
    for hidden in (16, 33, 130, 512):
        codes = torch.randint(0, 256, (77, hidden), dtype=torch.uint8)
        out, _ = moe.moe_permute(codes.view(dtype).to(device), mask.to(device), 200)
        assert out.dtype == dtype
        rows = ref.rows_of(mask, num_rows=200)
        assert_same_bits(out.view(torch.uint8), ref.permute(codes, rows, 200)[0])
        sizes, order = torch.tensor([30, 0, 40]), torch.tensor([2, 0, 1])
        chunks = moe.moe_sort_chunks_by_index(
            codes.view(dtype).to(device), sizes.to(device), order.to(device)
        )
        assert_same_bits(chunks.view(torch.uint8), ref.sort_chunks(codes, sizes, order))


def placed(rows, hidden, shift, dtype, device):
    """A matrix `shift` elements behind a multiple of 16 bytes, and what is around it."""
    around = torch.full((rows * hidden + 64,), 7, dtype=dtype, device=device)
    return around[16 + shift : 16 + shift + rows * hidden].view(rows, hidden), around


def assert_only_within(matrix, around, shift, expected):
    assert_same_bits(matrix, expected)
    edges = torch.cat([around[: 16 + shift], around[16 + shift + expected.numel() :]])
    assert torch.equal(edges, torch.full_like(edges, 7))


@pytest.mark.parametrize("hidden", [1, 24, 61, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_at_any_address(device, poison, dtype, hidden):
    """Wherever a matrix begins results have the same bits and nothing around it is written."""
    tokens, copies, ops = 9, 36, torch.ops.apex_te
    row_id_map = op.make_map(mask_of(tokens, 6, 3).to(device)).row_id_map
    x = torch.randint(0, 250, (tokens, hidden), device=device)
    x = x.to(dtype) if dtype == torch.uint8 else (x - 125).to(dtype) / 16
    permuted = op.permute(x, row_id_map, copies)[0]
    step = 16 // x.element_size()
    for shift in range(step):
        inp = placed(tokens, hidden, shift, dtype, device)[0].copy_(x)
        other = (3 * shift + 1) % step
        out, around = placed(copies, hidden, other, dtype, device)
        ops.moe_permute_rows(inp, None, row_id_map, out, None)
        assert_only_within(out, around, other, permuted)
    if dtype == torch.uint8:
        return
    probs = torch.rand(tokens, 6, device=device)
    merged = op.unpermute(permuted, row_id_map, probs)
    grads = op.unpermute_bwd(x, permuted, row_id_map, probs)
    for shift in range(step):
        other = (3 * shift + 1) % step
        inp = placed(copies, hidden, shift, dtype, device)[0].copy_(permuted)
        out, around = placed(tokens, hidden, other, dtype, device)
        ops.moe_unpermute_fwd(inp, probs, row_id_map, out, None, None)
        assert_only_within(out, around, other, merged)
        grad = placed(tokens, hidden, (shift + 1) % step, dtype, device)[0].copy_(x)
        out, around = placed(copies, hidden, other, dtype, device)
        grad_probs = torch.empty_like(probs)
        ops.moe_unpermute_bwd(grad, inp, probs, row_id_map, out, grad_probs)
        assert_only_within(out, around, other, grads[0])
        assert_same_bits(grad_probs, grads[1])


@in_pairs(kind=[torch.int32, torch.int64], chunks=[0, 1, 4, 64, 2048], dtype=DTYPES)
def test_sort_chunks(device, poison, dtype, chunks, kind):
    sizes = torch.randint(0, 2 * 3000 // max(chunks, 1) + 1, (chunks,))
    sizes[::3] = 0
    order = torch.randperm(chunks)
    rows = int(sizes.sum()) + 5
    x, probs = torch.randn(rows, 24).to(dtype), torch.rand(rows)
    ours, our_probs = leaf(x, device), leaf(probs, device)
    out, out_probs = moe.moe_sort_chunks_by_index_with_probs(
        ours, our_probs, sizes.to(device, kind), order.to(device, kind)
    )
    grad, grad_probs = torch.randn(x.shape).to(dtype), torch.randn(rows)
    torch.autograd.backward((out, out_probs), (grad.to(device), grad_probs.to(device)))
    plain, plain_probs = leaf(x), leaf(probs)
    expected = ref.sort_chunks(plain, sizes, order)
    expected_probs = ref.sort_chunks(plain_probs[:, None], sizes, order)[:, 0]
    torch.autograd.backward((expected, expected_probs), (grad, grad_probs))
    assert_same_bits([out, out_probs], [expected, expected_probs])
    assert_same_bits([ours.grad, our_probs.grad], [plain.grad, plain_probs.grad])


def test_gradient_past_the_copies_is_ignored(device):
    mask = mask_of(40, 5, 2)
    x = leaf(torch.randn(40, 8), device)
    out, row_id_map = moe.moe_permute(x, mask.to(device), 100)
    grad = torch.ones_like(out)
    grad[80:] = float("nan")
    out.backward(grad)
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    garbage = out.detach().clone()
    garbage[80:] = float("nan")
    y = moe.moe_unpermute(garbage.requires_grad_(), row_id_map)
    assert torch.equal(y, 2 * x)
    y.sum().backward()
    assert torch.equal(garbage.grad[80:], torch.zeros(20, 8, device=device))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_show(device, dtype, value):
    mask = mask_of(60, 6, 2)
    x = torch.randn(60, 136).to(dtype)
    x[7, 135] = value
    out, row_id_map = moe.moe_permute(x.to(device), mask.to(device), 120)
    y = moe.moe_unpermute(out, row_id_map).cpu()
    assert torch.equal(torch.isfinite(y), torch.isfinite(x))
    assert y[7, 135].isnan() == x[7, 135].isnan()
