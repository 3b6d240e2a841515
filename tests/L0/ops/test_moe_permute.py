"""moe_permute against plain PyTorch, bit for bit but for sums; storage, compile and errors."""

import pytest
import torch
from checks import (
    DTYPES,
    FP8,
    assert_as_good_as_torch,
    assert_same_bits,
    in_pairs,
    layouts,
    needs_cuda,
)

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


def leaf(x, device=None, dtype=None):
    return x.to(device or x.device, dtype or x.dtype).detach().clone().requires_grad_()


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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_gather_rows(device, poison, dtype):
    x = torch.randn(7, 40).to(dtype)
    rows = torch.tensor([6, -1, 0, 0, 7, 3, 2**31 - 1, -(2**31), 1], dtype=torch.int32)
    wanted = torch.stack([x[i] if 0 <= i < 7 else torch.zeros(40).to(dtype) for i in rows.tolist()])
    given = x.to(device), rows.to(device)
    assert_same_bits(op.gather_rows(*given), wanted)
    assert op.gather_rows(given[0], given[1][:0]).shape == (0, 40)
    assert op.gather_rows(given[0][:0], given[1]).float().eq(0).all()
    with pytest.raises(ValueError, match=r"gather_rows: inp must have 2 dimensions, got shape"):
        op.gather_rows(given[0][0], given[1])
    with pytest.raises(TypeError, match="rows must have dtype int32, got int64"):
        op.gather_rows(given[0], given[1].long())


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


def test_gradients_that_are_not_asked_for(device):
    mask = mask_of(40, 5, 2).to(device)
    x, probs = torch.randn(40, 8, device=device), torch.rand(40, 5, device=device)
    for needs_x, needs_probs in ((True, False), (False, True)):
        inp, p = x.clone().requires_grad_(needs_x), probs.clone().requires_grad_(needs_probs)
        out, out_probs, row_id_map = moe.moe_permute_with_probs(inp, p, mask)
        (out.sum() + out_probs.sum()).backward()
        assert (inp.grad is None) != needs_x
        assert (p.grad is None) != needs_probs
        inp.grad = p.grad = None
        moe.moe_unpermute(out.detach().requires_grad_(), row_id_map, p).sum().backward()
        assert (p.grad is None) != needs_probs
    inp, p = x.clone().requires_grad_(), probs.clone().requires_grad_()
    moe.moe_permute_with_probs(inp, p, mask)[1].sum().backward()
    assert torch.equal(p.grad, mask.float())
    assert inp.grad is None
    sizes, order = torch.tensor([25, 15]).to(device), torch.tensor([1, 0]).to(device)
    p = torch.rand(40, device=device).requires_grad_()
    moe.moe_sort_chunks_by_index_with_probs(inp, p, sizes, order)[1][:3].sum().backward()
    assert p.grad.nonzero().flatten().tolist() == [25, 26, 27]


def test_layouts(device):
    mask = mask_of(33, 8, 3).to(device)
    x, probs = torch.randn(33, 24, device=device), torch.rand(33, 8, device=device)
    expected = moe.moe_permute_with_probs(x, probs, mask)
    merged = moe.moe_unpermute(expected[0], expected[2], probs)
    grad = torch.randn(33, 24, device=device)
    for name, view in layouts(x):
        for _, p in layouts(probs):
            out = moe.moe_permute_with_probs(view, p, mask)
            assert_same_bits(out[:2], expected[:2])
            assert_same_bits(moe.moe_unpermute(expected[0], out[2], p), merged)
        copies = dict(layouts(expected[0]))[name].detach().requires_grad_()
        moe.moe_unpermute(copies, expected[2], probs).backward(dict(layouts(grad))[name])
        plain = expected[0].detach().clone().requires_grad_()
        moe.moe_unpermute(plain, expected[2], probs).backward(grad)
        assert_as_good_as_torch(copies.grad, plain.grad.double(), plain.grad)
    assert_same_bits(moe.moe_permute(x, mask.t().contiguous().t())[0], moe.moe_permute(x, mask)[0])


def test_cpu_and_gpu_give_the_same_bits(device):
    mask = mask_of(200, 16, 4)
    x, probs = torch.randn(800, 300).bfloat16(), torch.rand(200, 16)
    row_id_map = op.make_map(mask).row_id_map
    expected = op.unpermute(x, row_id_map, probs)
    found = op.unpermute(x.to(device), op.make_map(mask.to(device)).row_id_map, probs.to(device))
    assert_same_bits(found, expected)


def compiled(function, device):
    backend = "aot_eager" if device.type == "cpu" else "inductor"
    return torch.compile(function, fullgraph=True, backend=backend)


def test_compiles(device):
    mask = mask_of(48, 6, 2).to(device)
    x, probs = torch.randn(48, 16, device=device), torch.rand(48, 6, device=device)
    counts = mask.sum(0)
    sizes, order = torch.tensor([30, 66]).to(device), torch.tensor([1, 0]).to(device)

    def layer(inp, p):
        out, out_probs, row_id_map, pads, padded = moe.moe_permute_and_pad_with_probs(
            inp, p, mask, counts, 16, 192
        )
        again, index_map = moe.moe_permute(
            inp, torch.arange(96, device=inp.device, dtype=torch.int32).view(48, 2) % 6,
            map_type="index", num_experts=6,
        )  # fmt: skip
        again = moe.moe_sort_chunks_by_index(again, sizes, order)
        y = moe.moe_unpermute(out * out_probs[:, None], row_id_map, p, pad_offsets=pads)
        return y + moe.moe_unpermute(again, index_map), padded

    results = []
    for run in (layer, compiled(layer, device)):
        inp, p = leaf(x), leaf(probs)
        y, padded = run(inp, p)
        y.backward(x)
        results.append((y.detach(), padded, inp.grad, p.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@needs_cuda
def test_nothing_waits_for_the_gpu():
    mask = mask_of(256, 16, 2).cuda()
    x, probs = leaf(torch.randn(256, 64), "cuda"), leaf(torch.rand(256, 16), "cuda")
    counts, sizes = mask.sum(0), torch.tensor([100, 300, 112]).cuda()
    order = torch.tensor([2, 0, 1]).cuda()
    index = torch.randint(0, 16, (256, 2), device="cuda", dtype=torch.int32)
    grad = torch.randn_like(x)

    def step():
        out, out_probs, row_id_map, pads, _ = moe.moe_permute_and_pad_with_probs(
            x, probs, mask, counts, 16, 1024
        )
        y = moe.moe_unpermute(out * out_probs[:, None], row_id_map, probs, pad_offsets=pads)
        again, index_map = moe.moe_permute(x, index, map_type="index", num_experts=16)
        again = moe.moe_sort_chunks_by_index(again, sizes, order)
        (y + moe.moe_unpermute(again, index_map, map_type="index")).backward(grad)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_what_does_not_fit_shows_on_the_gpu():
    """Where the CPU raises: an index that is no expert, rows that a matrix has not."""
    index = torch.tensor([[0, 1], [2, 7], [1, 0]], dtype=torch.int32, device="cuda")
    x = torch.randn(3, 8, device="cuda")
    out, row_id_map = moe.moe_permute(x, index, map_type="index", num_experts=3)
    y = moe.moe_unpermute(out, row_id_map, map_type="index")
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], 2 * x[[0, 2]])
    y = moe.moe_unpermute(out[:4], row_id_map, map_type="index")
    assert y.isnan().any()
    sizes, order = torch.tensor([2, 9]).cuda(), torch.tensor([1, 5]).cuda()
    assert moe.moe_sort_chunks_by_index(x, sizes, order).isfinite().all()


@needs_cuda
def test_more_than_2_31_elements():
    tokens, hidden = 20000, 57344
    x = torch.randint(-128, 128, (tokens, hidden), device="cuda", dtype=torch.int8)
    mask = torch.zeros(tokens, 4, dtype=torch.bool, device="cuda")
    mask[:, 1] = mask[::2, 3] = mask[1::2, 0] = True
    out, row_id_map = moe.moe_permute(x, mask, 2 * tokens + 7)
    assert torch.equal(out[: tokens // 2], x[1::2])
    assert torch.equal(out[tokens // 2 : 3 * tokens // 2], x)
    assert torch.equal(out[3 * tokens // 2 : 2 * tokens], x[::2])
    assert not out[2 * tokens :].any()
    del out
    half = torch.randn(2 * tokens + 7, hidden, device="cuda").bfloat16()
    y = moe.moe_unpermute(half, row_id_map)
    expected = half[tokens // 2 :][:tokens][1::2].float() + half[: tokens // 2].float()
    assert torch.equal(y[1::2], expected.bfloat16())


def test_errors_of_permute(device):
    x, mask = torch.randn(6, 4, device=device), torch.ones(6, 3, device=device, dtype=torch.bool)
    index = torch.zeros(6, 2, device=device, dtype=torch.int32)
    probs = torch.rand(6, 3, device=device)
    with pytest.raises(ValueError, match=r"^moe_permute: map_type must be 'mask' or 'index', got"):
        moe.moe_permute(x, mask, map_type="rows")
    with pytest.raises(TypeError, match=r"routing_map must have dtype int32, got bool"):
        moe.moe_permute(x, mask, map_type="index")
    with pytest.raises(ValueError, match=r"num_out_tokens must be at least 0, got -2"):
        moe.moe_permute(x, mask, -2)
    with pytest.raises(ValueError, match=r"^moe_permute: num_experts must be None for a mask"):
        moe.moe_permute(x, mask, num_experts=3)
    with pytest.raises(NotImplementedError, match=r"num_experts must be at most 1024, got 1025"):
        moe.moe_permute(x, index, map_type="index", num_experts=1025)
    with pytest.raises(TypeError, match=r"probs must have dtype float32 or bfloat16, got float16"):
        moe.moe_permute_with_probs(x.bfloat16(), probs.half(), mask, 18)
    counts = mask.sum(0)
    with pytest.raises(ValueError, match=r"align_size must be an int of at least 1, got 0"):
        moe.moe_permute_and_pad_with_probs(x, probs, mask, counts, 0)
    with pytest.raises(TypeError, match=r"tokens_per_expert must have dtype int32 or int64"):
        moe.moe_permute_and_pad_with_probs(x, probs, mask, counts.float(), 16)
    with pytest.raises(ValueError, match=r"tokens_per_expert must have shape \[3\], got \[2\]"):
        moe.moe_permute_and_pad_with_probs(x, probs, mask, counts[:2], 16)
    with pytest.raises(ValueError, match=r"tokens_per_expert must be the counts of routing_map"):
        moe.moe_permute_and_pad_with_probs(x, probs, mask, counts + 1, 16)
    with pytest.raises(ValueError, match=r"tokens_per_expert must be on a device that holds"):
        moe.moe_permute_and_pad_with_probs(x, probs, mask, counts.to("meta"), 16)
    codes = x.to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(TypeError, match=r"inp must have dtype float32, float16 or bfloat16 to hav"):
        moe.moe_permute(codes, mask, 18)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"routing_map must hold experts below 2, got 2"):
            moe.moe_permute(x, index + 2, map_type="index", num_experts=2)


class OnAGPU(torch.Tensor):
    """A tensor that says it is on a GPU, with its values on the host."""

    @staticmethod
    def __new__(cls, values):
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device="cuda:0"
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [a.values if isinstance(a, cls) else a for a in args]
        return func(*args, **(kwargs or {}))


def test_counts_on_a_gpu_are_checked_for_tokens_on_the_host():
    x, probs = torch.randn(6, 4), torch.rand(6, 3)
    mask = torch.ones(6, 3, dtype=torch.bool)
    expected = moe.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 16)
    found = moe.moe_permute_and_pad_with_probs(x, probs, mask, OnAGPU(mask.sum(0)), 16)
    for i in (0, 1, 3, 4):  # the map has entries that nothing reads
        assert_same_bits(found[i], expected[i])
    with pytest.raises(ValueError, match=r"tokens_per_expert must be the counts of routing_map"):
        moe.moe_permute_and_pad_with_probs(x, probs, mask, OnAGPU(mask.sum(0) + 1), 16)


@needs_cuda
def test_counts_on_the_gpu_and_tokens_on_the_host():
    x, probs = torch.randn(6, 4), torch.rand(6, 3)
    mask = torch.ones(6, 3, dtype=torch.bool)
    counts = mask.sum(0).cuda()
    assert moe.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)[0].shape == (48, 4)
    with pytest.raises(ValueError, match=r"tokens_per_expert must be the counts of routing_map"):
        moe.moe_permute_and_pad_with_probs(x, probs, mask, counts + 1, 16)


def test_errors_of_unpermute(device):
    x, mask = torch.randn(6, 4, device=device), torch.ones(6, 3, device=device, dtype=torch.bool)
    out, row_id_map = moe.moe_permute(x, mask)
    pads = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^moe_unpermute: map_type must be 'mask' or 'index'"):
        moe.moe_unpermute(out, row_id_map, map_type="")
    with pytest.raises(ValueError, match=r"restore_shape must be \[6, 4\], got \[5, 4\]"):
        moe.moe_unpermute(out, row_id_map, restore_shape=(5, 4))
    with pytest.raises(ValueError, match=r"pad_offsets must be those of moe_permute_and_pad"):
        moe.moe_unpermute(out, row_id_map, pad_offsets=pads)
    with pytest.raises(TypeError, match=r"inp must have dtype float32, float16 or bfloat16"):
        moe.moe_unpermute(out.to(torch.uint8), row_id_map)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"inp must have a row for each of row_id_map, got 9"):
            moe.moe_unpermute(out[:9], row_id_map)


def test_errors_of_sort_chunks(device):
    x = torch.randn(6, 4, device=device)
    sizes, order = torch.tensor([2, 3, 1]).to(device), torch.tensor([2, 0, 1]).to(device)
    sort = moe.moe_sort_chunks_by_index
    with pytest.raises(NotImplementedError, match=r"split_sizes must have at most 2048 elements"):
        sort(x, sizes.repeat(700), order.repeat(700))
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"split_sizes must be counts of the 6 rows of inp"):
            sort(x, sizes + 1, order)
        with pytest.raises(ValueError, match=r"split_sizes must be counts .* got -1 at 0"):
            sort(x, sizes - 3, order)
        with pytest.raises(ValueError, match=r"sorted_index must hold each chunk once, got 0 at 1"):
            sort(x, sizes, order * 0)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_permute_and_count_is_permute_with_counts(device, kind):
    """A negative index makes no copy and is not counted."""
    index = torch.stack([torch.randperm(7)[:3] for _ in range(50)]).to(device, kind)
    index[4, 1] = index[9, 0] = -1
    inp = torch.randn(50, 24, device=device, requires_grad=True)
    expected, _ = moe.moe_permute(inp, index, map_type="index", num_experts=7)
    out, counts, row_id_map = moe.moe_permute_and_count(inp, index, 7)
    assert_same_bits(out, expected)
    assert counts.dtype is torch.int32
    assert counts.tolist() == [int((index == expert).sum()) for expert in range(7)]
    dy, probs = torch.randn_like(out), torch.rand(50, 3, device=device)
    grads = [torch.autograd.grad(t, inp, dy)[0] for t in (out, expected)]
    assert_same_bits(*grads)
    back = moe.moe_unpermute(out, row_id_map, probs, map_type="index")
    weights = (probs * (index >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(back, inp * weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("map_type", "align_size"), [("index", None), ("mask", None), ("mask", 16)]
)
@pytest.mark.parametrize("tokens", [0, 1, 33, 500])
def test_tokens_of_rows_are_the_map_of_a_gather(device, poison, map_type, align_size, tokens):
    mask = torch.rand(tokens, 40) < 0.2
    routing = mask if map_type == "mask" else torch.where(mask, torch.arange(40), -1)[:, :9]
    route = op.make_map(
        routing.to(device), map_type=map_type, num_experts=40, align_size=align_size
    )
    for rows in (int(route.padded_tokens_per_expert.sum()) + 70, 50, 0):
        numbers = torch.arange(1.0, tokens + 1, device=device)[:, None]
        for dtype in (torch.float32, torch.bfloat16):
            probs = torch.rand(routing.shape, device=device).to(dtype)
            expected = op.permute(numbers.to(dtype), route.row_id_map, rows, probs)[1]
            tokens_of, _ = op.permute(numbers, route.row_id_map, rows)
            found, permuted = op.tokens_of_rows(route.row_id_map, rows, probs)
            assert found.dtype is torch.int32
            assert torch.equal(found + 1, tokens_of[:, 0].int())
            assert_same_bits(permuted, expected)
            again, nothing = op.tokens_of_rows(route.row_id_map, rows)
            assert_same_bits(again, found)
            assert nothing is None
    with pytest.raises(ValueError, match="num_rows must be at least 0, got -1"):
        op.tokens_of_rows(route.row_id_map, -1)
    if tokens:
        with pytest.raises(ValueError, match="probs"):
            op.tokens_of_rows(route.row_id_map, 5, probs[1:])
