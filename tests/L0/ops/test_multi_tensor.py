"""multi_tensor's reductions and maps over lists with empty, odd, misaligned and many tensors."""

import pytest
import torch
from checks import (
    DTYPES,
    FP8,
    assert_as_good_as_torch,
    assert_close_amax,
    assert_same_bits,
    codes,
    layouts,
    needs_cuda,
    needs_memory,
)
from tensor_lists import MIXED, flags, ones, tensors

from apex_te.ops import multi_tensor as op
from apex_te.runtime import scratch_sizes, tensor_list


@pytest.mark.parametrize("dtype", [*DTYPES, MIXED])
def test_amax(device, dtype):
    xs = tensors(device, dtype, factor=30)
    found = op.amax(xs)
    assert_same_bits(found, op.reference_amax(xs))
    out = found * 2
    out[3] = 0
    assert op.amax(xs, out=out) is out
    expected = found * 2
    expected[3] = found[3]
    assert_same_bits(out, expected)


@pytest.mark.parametrize("position", [0, 7, 8191, 16383, 16384, 20479, 20480, 33000])
@pytest.mark.parametrize("value", [-1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_planted_value_is_found(device, dtype, position, value):
    xs = tensors(device, dtype, [5, 33001, 0])
    xs[1][position] = value
    assert_close_amax(op.amax(xs), op.reference_amax(xs), ulps=0)
    total, norms = op.l2norm(xs, per_tensor=True)
    finite = abs(value) < float("inf")
    assert torch.isfinite(total) == torch.isfinite(norms[1]) == finite
    assert torch.isfinite(norms[0])
    for flag in flags(device):
        op.scale(xs, [torch.empty_like(x) for x in xs], 0.5, found_inf=flag)
        assert flag.item() == (not finite)


@pytest.mark.parametrize("dtype", [*DTYPES, MIXED])
def test_l2norm(device, poison, dtype):
    xs = tensors(device, dtype)
    total, norms = op.l2norm(xs, per_tensor=True)
    exact_total, exact = op.reference_l2norm([x.cpu().double() for x in xs])
    torch_total, torch_norms = op.reference_l2norm(xs)
    assert_as_good_as_torch(norms, exact, torch_norms)
    assert_as_good_as_torch(total, exact_total, torch_total)
    assert_same_bits(op.l2norm(xs), total)


@pytest.mark.parametrize("out_dtype", [*DTYPES, MIXED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(device, dtype, out_dtype):
    xs = tensors(device, dtype)
    outs = [torch.full_like(t, float("nan")) for t in tensors(device, out_dtype)]
    flag = flags(device)[0]
    op.scale(xs, outs, 0.37, found_inf=flag)
    for x, out in zip(xs, outs, strict=True):
        same_dtype = (x.float() * 0.37).to(out.dtype)
        assert_as_good_as_torch(out, x.cpu().double() * 0.37, same_dtype)
    assert flag.item() == 0
    again = [torch.empty_like(t) for t in outs]
    op.scale(xs, again, torch.tensor([0.37], device=device))
    assert_same_bits(again, outs)
    op.scale(outs, outs, 2.0)
    assert_same_bits(outs, [t * 2 for t in again])


@pytest.mark.parametrize("factor", [1.0, 0.37, 3.3e38, float("nan")])
def test_scale_all_bf16_patterns(device, factor):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)
    for values in (x, x[1:]):
        op.scale([values], [out := torch.empty_like(values)], factor)
        expected = (values.float() * factor).bfloat16()
        expected.view(torch.int16)[torch.isnan(expected)] = 0x7FFF
        assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_axpby(device, dtype):
    xs, ys = tensors(device, dtype), tensors(device, MIXED)
    outs = [torch.full_like(t, float("nan")) for t in xs]
    op.axpby(xs, ys, outs, 1.7, -0.3)
    for x, y, out in zip(xs, ys, outs, strict=True):
        exact = op.reference_axpby(x.cpu().double(), y.cpu().double(), 1.7, -0.3)
        assert_as_good_as_torch(out, exact, op.reference_axpby(x, y, 1.7, -0.3))
    kept = [y.clone() for y in ys]
    op.axpby(xs, ys, ys, 1.0, 1.0)
    assert_same_bits(
        ys, [op.reference_axpby(y, x, 1.0, 1.0) for x, y in zip(xs, kept, strict=True)]
    )


@pytest.mark.parametrize("check", ["result", "x", "y"])
@pytest.mark.parametrize("bad", ["x", "y", "overflow"])
def test_axpby_checks_what_is_asked_for(device, check, bad):
    xs, ys = tensors(device, torch.float16), tensors(device, torch.float16)
    if bad == "overflow":
        xs[4][3], ys[4][3] = 60000, 60000
    else:
        (xs if bad == "x" else ys)[4][3] = float("inf")
    for flag in flags(device):
        op.axpby(xs, ys, [torch.empty_like(x) for x in xs], 1.0, 1.0, check=check, found_inf=flag)
        assert flag.item() == (check in ("result", bad))


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 65519.0), (torch.bfloat16, 3.39e38)])
def test_flag_follows_the_stored_result(device, dtype, value):
    """The float32 product is finite; what counts is whether its rounding is."""
    for n in (1, 8, 4096, 16385):
        x = torch.zeros(n, device=device)
        x[n - 1] = value
        for factor in (1.0, 1.0001, 1.004):
            out = torch.empty(n, dtype=dtype, device=device)
            flag = flags(device)[1]
            op.scale([x], [out], factor, found_inf=flag)
            assert flag.item() == (not torch.isfinite(out).all())
        assert flag.item() == 1


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", [*DTYPES, MIXED])
def test_quantize(device, poison, dtype, fp8):
    xs = tensors(device, dtype, factor=100)
    scales = [torch.tensor([0.1 * (i + 1)], device=device) for i in range(len(xs))]
    amaxes, inverses = ones(len(xs), device, 0.5), ones(len(xs), device, 9)
    out = op.quantize(xs, scales, fp8, amaxes=amaxes, scale_invs=inverses)
    for x, s, q in zip(xs, scales, out, strict=True):
        assert torch.equal(codes(q), codes(op.reference_quantize(x.cpu(), s.cpu(), fp8)))
    assert_same_bits(torch.cat(amaxes), op.reference_amax(xs).clamp(min=0.5))
    assert_same_bits(inverses, [1 / s for s in scales])
    alone = op.quantize(xs, scales, fp8)
    assert all(torch.equal(codes(a), codes(b)) for a, b in zip(alone, out, strict=True))


def test_quantize_larger_than_a_cache(device):
    """On a CPU such codes go past the caches, where they are aligned to their lines."""
    xs = [torch.randn(n, device=device).bfloat16() for n in (2**22 + 77, 2**22)]
    storage = torch.zeros(2**22 + 2, dtype=torch.uint8, device=device)
    outputs = [torch.empty_like(xs[0], dtype=FP8[0]), storage[1:-1].view(FP8[0])]
    op.quantize(xs, ones(2, device, 3.0), outputs=outputs)
    for x, q in zip(xs, outputs, strict=True):
        expected = op.reference_quantize(x.cpu(), torch.full((1,), 3.0), FP8[0])
        assert torch.equal(codes(q), codes(expected))
    assert not storage[[0, -1]].any()


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantize_all_16_bit_patterns(device, dtype, fp8):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    xs = [x.to(device), x[1:].to(device)]
    for value in (1.0, 2.0**-12, 1.7e4):
        scales = ones(2, device, value)
        out = op.quantize(xs, scales, fp8)
        for source, q in zip((x, x[1:]), out, strict=True):
            expected = op.reference_quantize(source, scales[0].cpu(), fp8)
            assert torch.equal(codes(q), codes(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_layouts(device, dtype):
    """Offset, sliced, strided and transposed inputs; offset outputs."""
    x = torch.randn(129, 77).to(dtype).to(device)
    named = layouts(x)
    xs = [t for _, t in named]
    assert_same_bits(op.amax(xs), op.amax([x]).repeat(len(xs)))
    _, norms = op.l2norm(xs, per_tensor=True)
    assert_as_good_as_torch(
        norms, op.reference_l2norm([t.cpu().double() for t in xs])[1], op.reference_l2norm(xs)[1]
    )
    flat = torch.zeros(x.numel() + 9, dtype=dtype, device=device)
    for offset in (1, 2, 3, 5):
        out = flat.zero_()[offset : offset + x.numel()].view(x.shape)
        op.scale([x.t().contiguous().t()], [out], 3.0)
        assert_same_bits(out, (x.float() * 3).to(dtype))
        op.axpby([x], [named[0][1]], [out], 1.0, 0.0)
        assert_same_bits(out, x)
        assert flat[:offset].count_nonzero() == flat[offset + x.numel() :].count_nonzero() == 0
    bytes_ = torch.zeros(x.numel() + 9, dtype=torch.uint8, device=device).view(FP8[0])
    for offset in (1, 4):
        out = bytes_[offset : offset + x.numel()].view(x.shape)
        op.quantize([x], ones(1, device), outputs=[out])
        assert torch.equal(codes(out), codes(op.quantize(xs[:1], ones(1, device))[0]))
    assert_same_bits(op.amax([x[:1].expand(50, 77)]), op.amax([x[:1]]))


def test_lists_longer_than_one_launch(device):
    """The last tensors of each launch, and an empty one at the very end, count."""
    count = 3300
    sizes = [(i * 7) % 23 for i in range(count - 1)] + [0]
    xs = [x.to(device) for x in torch.randn(sum(sizes)).split(sizes)]
    assert_same_bits(op.amax(xs), op.reference_amax(xs))
    total, norms = op.l2norm(xs, per_tensor=True)
    exact_total, exact = op.reference_l2norm([x.cpu().double() for x in xs])
    assert_as_good_as_torch(norms, exact, op.reference_l2norm(xs)[1])
    assert_as_good_as_torch(total, exact_total, op.reference_l2norm(xs)[0])
    outs = [torch.full_like(x, float("nan")) for x in xs]
    op.scale(xs, outs, 2.0)
    assert_same_bits(torch.cat(outs), torch.cat(xs) * 2)
    op.axpby(xs, outs, outs, 1.0, 1.0)
    assert_same_bits(torch.cat(outs), torch.cat(xs) + torch.cat(xs) * 2)
    scales, inverses = ones(count, device, 4.0), ones(count, device, 0.0)
    quantized = op.quantize(xs, scales, scale_invs=inverses)
    expected = op.reference_quantize(torch.cat(xs).cpu(), scales[0].cpu(), FP8[0])
    assert torch.equal(torch.cat([codes(q) for q in quantized]), codes(expected))
    assert (torch.cat(inverses) == 0.25).all()


def test_scratch_that_splits_a_float64_is_refused(device):
    x, words = ones(1, device)[0], scratch_sizes.list_words(1, 1)
    scratch = torch.zeros(words + 1, device=device)
    refused = "multi_tensor_l2norm: workspace must be aligned to 8 bytes"
    with pytest.raises(ValueError, match=refused):
        op._l2norm([x], torch.zeros((), device=device), None, scratch[1:])


def test_prepared_lists_give_the_same(device):
    xs = tensors(device, MIXED)
    prepared = tensor_list(xs)
    assert_same_bits(op.amax(prepared), op.amax(xs))
    assert_same_bits(op.l2norm(prepared), op.l2norm(xs))
    outs = [torch.empty_like(x) for x in xs]
    op.scale(prepared, tensor_list(outs), 2.0)
    assert_same_bits(outs, [x * 2 for x in xs])
    op.quantize(prepared, tensor_list(ones(len(xs), device)))


def test_empty_lists():
    assert op.amax([]).shape == (0,)
    assert op.l2norm([]).item() == 0
    assert [t.numel() for t in op.l2norm([], per_tensor=True)] == [1, 0]
    op.scale([], [], 1.0)
    op.axpby([], [], [], 1.0, 1.0)
    assert op.quantize([], []) == []


def test_only_empty_tensors(device):
    xs = [torch.empty(0, 5, device=device), torch.empty(3, 0, device=device)]
    assert op.amax(xs).tolist() == [0, 0]
    total, norms = op.l2norm(xs, per_tensor=True)
    assert [total.item(), *norms.tolist()] == [0, 0, 0]
    op.scale(xs, xs, 2.0)
    assert [q.shape for q in op.quantize(xs, ones(2, device))] == [(0, 5), (3, 0)]


def test_rejects():
    x = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"tensors\[1\] must be a torch.Tensor, got float"):
        op.amax([x, 1.0])
    with pytest.raises(ValueError, match=r"outputs\[0\] must be contiguous, got strides"):
        op.scale([x], [x.t()], 1.0)
    with pytest.raises(TypeError, match="fp8_dtype must be float8_e4m3fn or"):
        op.quantize([x], [x], torch.int8)
    with pytest.raises(ValueError, match="check must be 'result', 'x' or 'y', got 'z'"):
        op.axpby([x], [x], [x], 1.0, 1.0, check="z")


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(24)
    n = 2**31 + 12345
    big = torch.empty(n, dtype=torch.bfloat16, device="cuda").normal_()
    xs = [torch.randn(100, device="cuda"), big, torch.randn(7, device="cuda")]
    big[-1] = 77
    assert op.amax(xs)[1].item() == 77
    _, norms = op.l2norm(xs, per_tensor=True)
    parts = [part.double().square().sum() for part in big.split(2**27)]
    exact = torch.stack(parts).sum().sqrt().item()
    assert abs(norms[1].item() / exact - 1) < 1e-6
    out = torch.empty_like(big)
    op.scale([big], [out], 2.0)
    assert torch.equal(out[-30_000:], big[-30_000:] * 2)
    assert torch.equal(out[2**31 - 9 : 2**31 + 9], big[2**31 - 9 : 2**31 + 9] * 2)
    one = ones(1, "cuda")
    quantized = op.quantize([big], one)[0]
    for part in (slice(0, 1000), slice(2**31 - 500, 2**31 + 500), slice(n - 1000, n)):
        expected = op.reference_quantize(big[part].cpu(), one[0].cpu(), FP8[0])
        assert torch.equal(codes(quantized[part]), codes(expected))
