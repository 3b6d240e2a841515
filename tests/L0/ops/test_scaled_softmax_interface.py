"""scaled_softmax's storage, errors, autograd, torch.compile, graphs and sizes."""

import pytest
import torch
from checks import assert_same_bits, needs_cuda, needs_memory
from scaled_softmax_cases import random_mask
from torch._dynamo.testing import CompileCounterWithBackend

from apex_te.ops.scaled_softmax import scaled_softmax, scaled_softmax_bwd, scaled_softmax_fwd


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0), (1, 1), (3, 2), (8, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offset_storage(device, dtype, offsets):
    """Input and output at other alignments; nothing outside the output is written."""

    def at(offset, values):
        flat = torch.full((values.numel() + 16,), 7.0, dtype=dtype, device=device)
        view = flat[offset : offset + values.numel()].view(values.shape)
        view.copy_(values)
        return flat, view

    x = torch.randn(1, 3, 5, 136).to(dtype).to(device)
    expected = scaled_softmax_fwd(x, 0.5)
    _, source = at(offsets[0], x)
    flat, target = at(offsets[1], x)
    assert scaled_softmax_fwd(source, 0.5, out=target) is target
    rtol = 4 * torch.finfo(dtype).eps
    assert torch.allclose(target, expected, rtol=rtol, atol=0)
    assert (flat[: offsets[1]] == 7).all()
    assert (flat[offsets[1] + x.numel() :] == 7).all()
    y = expected
    _, source = at(offsets[0], x)
    flat, target = at(offsets[1], x)
    scaled_softmax_bwd(source, y, 0.5, out=target)
    expected = scaled_softmax_bwd(x, y, 0.5)
    assert torch.allclose(target, expected, rtol=rtol, atol=1e-6)
    assert (flat[: offsets[1]] == 7).all()
    assert (flat[offsets[1] + x.numel() :] == 7).all()


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
