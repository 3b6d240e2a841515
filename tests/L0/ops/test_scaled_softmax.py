"""scaled_softmax against the formula in float64 and in its own dtype; storage and sizes."""

import pytest
import torch
from checks import DTYPES, assert_same_bits, needs_cuda, needs_memory
from scaled_softmax_cases import check, hidden_of, random_mask
from torch._dynamo.testing import CompileCounterWithBackend

from apex_te.ops.scaled_softmax import scaled_softmax, scaled_softmax_bwd, scaled_softmax_fwd

SHAPES = [
    (1, 1, 1, 1), (2, 3, 7, 3), (1, 2, 17, 8), (2, 1, 16, 15), (2, 3, 8, 16), (3, 5, 3, 17),
    (2, 2, 9, 127), (2, 2, 8, 128), (1, 3, 129, 129), (1, 2, 5, 264), (1, 1, 9, 1000),
    (1, 2, 4, 2048), (1, 1, 4, 3584), (1, 1, 3, 4095), (1, 1, 2, 16384),
]  # fmt: skip
CAUSAL_SHAPES = [
    (2, 3, 1, 1), (2, 2, 7, 7), (1, 2, 64, 64), (2, 1, 129, 129), (1, 1, 264, 264),
    (1, 2, 7, 40), (1, 1, 3, 3584), (1, 2, 5, 2047), (2, 2, 40, 7), (1, 2, 33, 24),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fwd_and_bwd(device, poison, shape, dtype):
    check((torch.randn(shape) * 3).to(dtype), 0.7, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masked(device, poison, shape, dtype):
    x = (torch.randn(shape) * 3).to(dtype)
    check(x, 0.125, random_mask(shape[0], 1, *shape[2:]), device=device)


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (1, 2, 0, 4), (1, 2, 4, 0)], ids=str)
def test_without_elements(device, shape):
    x = torch.randn(shape, device=device)
    for causal in (None, "bottom_right"):
        y = scaled_softmax_fwd(x, 0.5, causal=causal)
        assert scaled_softmax_bwd(y, y, 0.5, causal=causal).shape == y.shape == shape


@pytest.mark.parametrize("cols", [40, 37])
@pytest.mark.parametrize("broadcast", range(8))
def test_mask_broadcasts(device, broadcast, cols):
    extents = [1 if broadcast >> i & 1 else n for i, n in enumerate((2, 3, 6))]
    check(torch.randn(2, 3, 6, cols).bfloat16(), 0.3, random_mask(*extents, cols), device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CAUSAL_SHAPES, ids=str)
def test_bottom_right(device, poison, shape, dtype):
    check((torch.randn(shape) * 3).to(dtype), 1.3, causal="bottom_right", device=device)


@pytest.mark.parametrize("size", [1, 8, 17, 129, 264, 1000])
def test_upper_left(device, poison, size):
    x = torch.randn(2, size, size).half()
    y, _ = check(x, 0.5, causal="upper_left", device=device)
    assert_same_bits(y, scaled_softmax_fwd(x.to(device), 0.5, causal="bottom_right"))


@pytest.mark.parametrize("size", [24, 25])
def test_mask_and_causal(device, size):
    x, mask = torch.randn(2, 3, size, size), random_mask(2, 1, 1, size)
    check(x, 0.5, mask, causal="upper_left", device=device)


@pytest.mark.parametrize("cols", [16, 19, 2048])
def test_three_dimensions(device, cols):
    x, mask = torch.randn(6, 5, cols).bfloat16(), random_mask(6, 1, cols)
    y, _ = check(x, 0.4, mask, device=device)
    as_four = scaled_softmax_fwd(
        x.to(device).unsqueeze(1), 0.4, mask.to(device).unsqueeze(1)
    ).squeeze(1)
    assert_same_bits(y, as_four)


@pytest.mark.parametrize("cols", [20000, 20001, 32776, 40001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_many_warps_and_longer_than_registers_hold(device, dtype, cols):
    x = (torch.randn(1, 1, 3, cols) * 2).to(dtype)
    check(x, 1.0, device=device)
    check(x, 1.0, random_mask(1, 1, 1, cols), causal="bottom_right", device=device)


def test_large_values(device):
    x = torch.tensor([[[3e38, -3e38, 2.9e38], [1e4, 1e4 - 1, 1e4 - 2], [-1e30, -1e30, -1e30]]])
    y, _ = check(x, 1.0, device=device)
    assert y.cpu()[0, 0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("scale", [-0.5, -1.0, 0.0])
@pytest.mark.parametrize("cols", [24, 33])
def test_negative_and_zero_scale(device, scale, cols):
    x = torch.randn(2, 2, 5, cols)
    for dtype in DTYPES:
        check(x.to(dtype), scale, random_mask(2, 1, 5, cols), device=device)
    check(x[..., :5].contiguous(), scale, causal="upper_left", device=device)


@pytest.mark.parametrize("cols", [64, 61, 4096])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_hidden_elements_have_no_influence(device, cols, causal):
    x, dy = torch.randn(2, 2, 6, cols, device=device), torch.randn(2, 2, 6, cols, device=device)
    mask = random_mask(2, 1, 6, cols).to(device)
    mask[:, :, 2] = True
    hidden = hidden_of(x, mask, causal).to(device)
    y = scaled_softmax_fwd(x, 0.5, mask, causal=causal)
    dx = scaled_softmax_bwd(dy, y, 0.5, causal=causal)
    for garbage in (float("nan"), float("inf"), -float("inf"), 3e38):
        dirty = x.masked_fill(hidden, garbage)
        assert_same_bits(scaled_softmax_fwd(dirty, 0.5, mask, causal=causal), y)
        dirty = dy.masked_fill(hidden, garbage)
        assert_same_bits(scaled_softmax_bwd(dirty, y, 0.5, causal=causal), dx)


@pytest.mark.parametrize("cols", [8, 9, 520, 521, 3000, 40000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fully_masked_rows_are_zero(device, poison, dtype, cols):
    x = torch.randn(2, 2, 4, cols, device=device).to(dtype)
    mask = torch.zeros(2, 1, 4, cols, dtype=torch.bool, device=device)
    mask[:, :, 1] = True
    x[:, :, 1] = float("nan")
    x[:, :, 3] = -float("inf")
    x.requires_grad_()
    y = scaled_softmax(x, 2.0, mask)
    y.backward(torch.randn_like(y))
    for row in (1, 3):
        assert not y[:, :, row].any()
        assert not x.grad[:, :, row].any()
    for row in (0, 2):
        sums = y[:, :, row].float().sum(-1)
        assert ((sums - 1).abs() < 1e-2).all()


@pytest.mark.parametrize("cols", [8, 30, 1000, 4096, 40000])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("nan")])
def test_nan_rule(device, poison, cols, value):
    x = torch.randn(1, 2, 3, cols, device=device)
    clean = scaled_softmax_fwd(x, 0.5)
    mask = random_mask(1, 1, 3, cols).to(device)
    mask[..., cols // 2] = False
    mask[..., 0] = True
    dy = torch.randn_like(x)
    x[0, 1, 1, cols // 2] = value
    for given, causal in ((None, None), (mask, None), (mask, "bottom_right")):
        y = scaled_softmax_fwd(x, 0.5, given, causal=causal)
        dx = scaled_softmax_bwd(dy, y, 0.5, causal=causal)
        hidden = hidden_of(x, given, causal).to(device)
        if causal is not None and hidden[0, 1, 1, cols // 2]:
            continue
        for result in (y, dx):
            assert torch.isnan(result[0, 1, 1][~hidden[0, 1, 1]]).all()
            assert not result[0, 1, 1][hidden[0, 1, 1]].any()
            assert torch.isfinite(result[0, 0]).all()
            assert torch.isfinite(result[0, 1, [0, 2]]).all()
    assert_same_bits(scaled_softmax_fwd(x, 0.5)[0, 0], clean[0, 0])
    # In the gradient's row alone, too.
    y = clean.clone()
    dy[0, 0, 2, cols - 1] = value
    dx = scaled_softmax_bwd(dy, y, 0.5)
    assert not torch.isfinite(dx[0, 0, 2]).any()
    assert torch.isfinite(dx[0, 0, :2]).all()


def test_minus_infinity_is_hidden(device):
    x = torch.randn(1, 2, 5, 70)
    mask = random_mask(1, 2, 5, 70)
    masked = scaled_softmax_fwd(x.to(device), 0.7, mask.to(device))
    assert_same_bits(scaled_softmax_fwd(x.masked_fill(mask, -torch.inf).to(device), 0.7), masked)


def test_mask_layouts(device):
    x = torch.randn(2, 3, 16, 24, device=device)
    mask = random_mask(2, 1, 16, 24).to(device)
    y = scaled_softmax_fwd(x, 0.5, mask)
    wide = random_mask(2, 2, 17, 49).to(device)
    wide[:, 1:, 1:, 1:25] = mask
    flat = torch.zeros(mask.numel() + 1, dtype=torch.bool, device=device)
    flat[1:] = mask.reshape(-1)
    strided = torch.zeros(2, 1, 16, 48, dtype=torch.bool, device=device)
    strided[..., ::2] = mask
    for view in (
        wide[:, 1:, 1:, 1:25],
        mask.expand(2, 3, 16, 24),
        flat[1:].view(mask.shape),
        strided[..., ::2],
        mask.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert torch.allclose(scaled_softmax_fwd(x, 0.5, view), y, rtol=2e-6, atol=0)
    queries = random_mask(2, 1, 16, 1).to(device)
    assert_same_bits(
        scaled_softmax_fwd(x, 0.5, queries),
        scaled_softmax_fwd(x, 0.5, queries.expand(2, 1, 16, 24)),
    )


@pytest.mark.parametrize("cols", [64, 33, 40000])
def test_bwd_in_place(device, cols):
    dy = torch.randn(1, 2, 7, cols, device=device).bfloat16()
    y = scaled_softmax_fwd(torch.randn_like(dy), 0.5, causal="bottom_right")
    expected = scaled_softmax_bwd(dy, y, 0.5, causal="bottom_right")
    version = dy._version
    assert scaled_softmax_bwd(dy, y, 0.5, causal="bottom_right", out=dy) is dy
    assert dy._version > version
    assert_same_bits(dy, expected)


def test_saves_only_its_output():
    x = torch.randn(2, 2, 8, 8, requires_grad=True)
    y = scaled_softmax(x, 0.5, random_mask(2, 1, 8, 8))
    (saved,) = y.grad_fn.saved_tensors
    assert saved.data_ptr() == y.data_ptr()
    y.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_compile_with_dynamic_shapes(causal):
    def function(x):
        return scaled_softmax(x, 0.5, causal=causal)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for queries, cols in ((8, 12), (24, 31), (5, 130)):
        x = torch.randn(2, 3, queries, cols)
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        assert_same_bits(compiled(ours), function(theirs))
        compiled(ours).square().sum().backward()
        function(theirs).square().sum().backward()
        assert_same_bits(ours.grad, theirs.grad)
    assert counter.frame_count == 1


@needs_cuda
@pytest.mark.parametrize("cols", [8200, 8193])
def test_more_than_2_to_31_elements(cols):
    needs_memory(24)
    rows = 2**31 // cols + 70
    x = torch.empty(1, rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    mask = torch.zeros(1, 1, cols, dtype=torch.bool, device="cuda")
    mask[..., ::3] = True
    y = scaled_softmax_fwd(x, 0.5, mask)
    dx = scaled_softmax_bwd(x, y, 0.5)
    for begin in (0, rows // 2, rows - 9):
        part = x[:, begin : begin + 9].clone()
        expected = scaled_softmax_fwd(part, 0.5, mask)
        # Odd rows may lie elsewhere between 16-byte boundaries and be summed in another order.
        torch.testing.assert_close(y[:, begin : begin + 9], expected, rtol=1e-2, atol=1e-7)
        torch.testing.assert_close(
            dx[:, begin : begin + 9], scaled_softmax_bwd(part, expected, 0.5), rtol=2e-2, atol=1e-7
        )
    del mask, dx, y
    x = x[:, : 2**16].reshape(-1)[: 2**29].view(2, 2**14, 2**14)
    y = scaled_softmax_fwd(x, 0.5, causal="upper_left")
    assert_same_bits(y[1, -1], scaled_softmax_fwd(x[1:, -1:], 0.5)[0, 0])


@needs_cuda
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("cols", [8192, 8193])
def test_heads_take_turns_over_a_large_mask(cols, batches):
    x = torch.randn(2, 3, 1030, cols, device="cuda").bfloat16()
    mask = torch.rand(batches, 1, 1030, cols, device="cuda") < 0.3
    y = scaled_softmax_fwd(x, 0.5, mask)
    for batch in range(2):
        of_batch = mask[batch % batches]
        for head in range(3):
            alone = scaled_softmax_fwd(x[batch, head : head + 1].clone(), 0.5, of_batch)
            torch.testing.assert_close(y[batch, head : head + 1], alone, rtol=1e-2, atol=1e-7)
