"""moe_permute as it is called: layouts, compiled, captured, unsynchronised, with bad arguments."""

import pytest
import torch
from checks import assert_as_good_as_torch, assert_same_bits, layouts, needs_cuda

from apex_te import permutation as moe
from apex_te.ops import moe_permute as op


def mask_of(tokens, experts, top_k):
    """Each token goes to top_k experts."""
    chosen = torch.rand(tokens, experts).topk(top_k, 1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


def leaf(x, device=None):
    return x.to(device or x.device).detach().clone().requires_grad_()


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
    with pytest.raises(ValueError, match=r"^moe_permute: routing_map must have 2 dimensions"):
        moe.moe_permute(x, mask[0])
    with pytest.raises(
        TypeError, match=r"routing_map must have dtype bool, uint8 or int32, got fl"
    ):
        moe.moe_permute(x, mask.float())
    with pytest.raises(TypeError, match=r"routing_map must have dtype int32, got bool"):
        moe.moe_permute(x, mask, map_type="index")
    with pytest.raises(ValueError, match=r"inp must have shape \[6, 4\], got \[5, 4\]"):
        moe.moe_permute(x[:5], mask, 18)
    with pytest.raises(ValueError, match=r"^moe_permute: inp must have 2 dimensions"):
        moe.moe_permute(x[0], mask, 18)
    with pytest.raises(TypeError, match=r"inp must have dtype float32, .*, got float64"):
        moe.moe_permute(x.double(), mask, 18)
    with pytest.raises(ValueError, match=r"num_out_tokens must be at least 0, got -2"):
        moe.moe_permute(x, mask, -2)
    with pytest.raises(ValueError, match=r"^moe_permute: num_experts must be None for a mask"):
        moe.moe_permute(x, mask, num_experts=3)
    with pytest.raises(NotImplementedError, match=r"num_experts must be at most 1024, got 1025"):
        moe.moe_permute(x, index, map_type="index", num_experts=1025)
    with pytest.raises(ValueError, match=r"probs must have shape \[6, 3\], got \[6, 2\]"):
        moe.moe_permute_with_probs(x, probs[:, :2], mask, 18)
    with pytest.raises(TypeError, match=r"probs must have dtype float32, got bfloat16"):
        moe.moe_permute_with_probs(x, probs.bfloat16(), mask, 18)
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
    with pytest.raises(TypeError, match=r"row_id_map must have dtype int32, got int64"):
        moe.moe_unpermute(out, row_id_map.long())
    with pytest.raises(ValueError, match=r"probs must have shape \[6, 3\], got \[3, 6\]"):
        moe.moe_unpermute(out, row_id_map, torch.rand(3, 6, device=device))
    with pytest.raises(TypeError, match=r"inp must have dtype float32, float16 or bfloat16"):
        moe.moe_unpermute(out.to(torch.uint8), row_id_map)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"inp must have a row for each of row_id_map, got 9"):
            moe.moe_unpermute(out[:9], row_id_map)


def test_errors_of_sort_chunks(device):
    x = torch.randn(6, 4, device=device)
    sizes, order = torch.tensor([2, 3, 1]).to(device), torch.tensor([2, 0, 1]).to(device)
    sort = moe.moe_sort_chunks_by_index
    with pytest.raises(ValueError, match=r"^moe_sort_chunks: inp must have 2 dimensions"):
        sort(x[0], sizes, order)
    with pytest.raises(TypeError, match=r"split_sizes must have dtype int32 or int64, got float32"):
        sort(x, sizes.float(), order)
    with pytest.raises(ValueError, match=r"sorted_index must have shape \[3\], got \[2\]"):
        sort(x, sizes, order[:2])
    with pytest.raises(NotImplementedError, match=r"split_sizes must have at most 2048 elements"):
        sort(x, sizes.repeat(700), order.repeat(700))
    with pytest.raises(ValueError, match=r"probs must have shape \[6\], got \[5\]"):
        moe.moe_sort_chunks_by_index_with_probs(x, x[:5, 0], sizes, order)
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
