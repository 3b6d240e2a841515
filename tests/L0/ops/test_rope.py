"""rope against the formula in float64 and in its own dtype, on each device."""

import math

import pytest
import torch
from checks import (
    DTYPES,
    assert_as_good_as_torch,
    assert_runs_in_graph_and_on_stream,
    assert_same_bits,
    in_pairs,
    needs_cuda,
    needs_memory,
)

from apex_te.ops import rope as op
from apex_te.ops.rope import rope

# layout, shape of x, rotary_dim
CASES = [
    ("sbhd", (1, 1, 1, 2), 2),
    ("sbhd", (7, 3, 5, 16), 16),
    ("bshd", (2, 17, 3, 24), 12),
    ("sbhd", (129, 2, 4, 128), 128),
    ("bshd", (3, 127, 8, 64), 64),
    ("sbhd", (16, 2, 3, 192), 64),
    ("bshd", (1, 15, 40, 256), 96),
    ("sbhd", (33, 1, 9, 80), 80),
    ("bshd", (2, 8, 3, 129), 128),
    ("sbhd", (2, 3, 1, 4095), 3584),
    ("sbhd", (3, 1, 130, 8), 0),
    ("thd", (70, 3, 64), 64),
    ("thd", (130, 5, 40), 16),
    ("thd", (1000, 1, 16), 16),
]


def angles(rows, dim, interleaved=False, scale=1.0):
    """[rows, dim] of the usual rotary angles, each for both elements of its pair."""
    inverse = scale * 10000.0 ** (-torch.arange(0, dim, 2) / max(dim, 1))
    pairs = torch.arange(rows).float()[:, None] * inverse
    return pairs.repeat_interleave(2, 1) if interleaved else torch.cat((pairs, pairs), 1)


def packed(tokens, device, first=0):
    """cu_seqlens of sequences of odd lengths, an empty one among them."""
    ends = [first, first + (tokens - first) // 3, first + (tokens - first) // 3, tokens]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def check(x, device, **options):
    """Forward and gradient of x (on the CPU) against the formula in float64 and in x's dtype."""
    grad = torch.randn(x.shape).to(x.dtype)
    tensors = {k: v for k, v in options.items() if isinstance(v, torch.Tensor)}
    ours = x.clone().to(device).requires_grad_()
    out = rope(ours, **options | {k: v.to(device) for k, v in tensors.items()})
    out.backward(grad.to(device))
    plain = x.clone().requires_grad_()
    same = op.reference(plain, **options)
    same.backward(grad)
    exact_x = x.double().requires_grad_()
    exact = op.reference(exact_x, **options)
    exact.backward(grad.double())
    assert out.is_contiguous()
    assert_as_good_as_torch(out, exact, same)
    assert_as_good_as_torch(ours.grad, exact_x.grad, plain.grad)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "shape", "dim"), CASES, ids=str)
def test_fwd_and_bwd(device, poison, layout, shape, dim, dtype, interleaved):
    tokens = shape[1] if layout == "bshd" else shape[0]
    check(
        torch.randn(shape).to(dtype),
        device,
        freqs=angles(tokens + 5, dim, interleaved),
        rotary_dim=dim,
        layout=layout,
        interleaved=interleaved,
        start=5,
        cu_seqlens=packed(tokens, "cpu") if layout == "thd" else None,
    )


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, 1e5, 1e9, 1e30])
def test_angles_of_any_size(device, scale):
    freqs = torch.cat([(torch.rand(64, 32) - 0.5) * scale] * 2, 1)
    x = torch.randn(64, 1, 2, 64)
    check(x, device, freqs=freqs)
    # Far better than the formula's own error where that is large: a rotation keeps lengths.
    out = rope(x.to(device), freqs.to(device)).cpu().double()
    exact = op.reference(x.double(), freqs)
    assert (out - exact).abs().max() <= 4 * 2.0**-24 * x.abs().max() * math.sqrt(2)


@pytest.mark.parametrize("angle", [float("nan"), float("inf"), -float("inf")])
def test_angle_that_is_not_finite_gives_nan(device, angle):
    freqs = angles(4, 8)
    freqs[2, 1] = angle
    out = rope(torch.randn(4, 1, 1, 8, device=device), freqs.to(device)).cpu()
    expected = torch.zeros(4, 8, dtype=torch.bool)
    expected[2, [1, 5]] = True
    assert torch.equal(out.isnan().reshape(4, 8), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 9, 31, 40])
def test_value_that_is_not_finite_shows(device, value, at):
    x = torch.randn(6, 2, 3, 48)
    x[3, 1, 2, at] = value
    out = rope(x.to(device), angles(6, 32).to(device)).cpu()
    pair = [at, (at + 16) % 32] if at < 32 else [at]
    finite = torch.ones_like(x, dtype=torch.bool)
    finite[3, 1, 2, pair] = False
    assert torch.equal(out.isfinite(), finite)


@in_pairs(
    interleaved=[False, True],
    layout=["sbhd", "bshd", "thd"],
    starts_dtype=[torch.int32, torch.int64],
)
def test_starts_of_each_sequence(device, layout, interleaved, starts_dtype):
    shape = (
        (60, 2, 32) if layout == "thd" else (3, 20, 2, 32) if layout == "bshd" else (20, 3, 2, 32)
    )
    check(
        torch.randn(shape),
        device,
        freqs=angles(100, 32, interleaved),
        layout=layout,
        interleaved=interleaved,
        start=7,
        starts=torch.tensor([0, 50, 11], dtype=starts_dtype),
        cu_seqlens=packed(60, "cpu") if layout == "thd" else None,
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_every_kind_give_the_same(device, interleaved):
    x = torch.randn(40, 2, 3, 64, device=device).bfloat16()
    freqs = angles(40, 32, interleaved).to(device)
    pairs = freqs[:, ::2] if interleaved else freqs[:, :16]
    options = {"interleaved": interleaved, "rotary_dim": 32}
    expected = rope(x, freqs, **options)
    assert_same_bits(rope(x, freqs[:, None, None], **options), expected)
    assert_same_bits(rope(x, pairs, **options), expected)
    exact = op.reference(x.double(), freqs, **options)
    for table in (freqs, pairs):
        tables = {"cos": table.cos(), "sin": table.sin()}
        out = rope(x, **tables, **options)
        assert_as_good_as_torch(out, exact, op.reference(x, **tables, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_tables_in_half_precision(device, dtype, x_dtype):
    """Angles in bf16 rotate as their values in fp32 do: no other rounding is added."""
    x = torch.randn(5, 2, 3, 8, device=device, dtype=x_dtype, requires_grad=True)
    freqs = (torch.rand(9, 1, 1, 8, device=device) * 9).to(dtype)
    cos, sin = (freqs.float().cos().to(dtype), freqs.float().sin().to(dtype))
    for low, high in (
        ({"freqs": freqs}, {"freqs": freqs.float()}),
        ({"cos": cos, "sin": sin}, {"cos": cos.float(), "sin": sin.float()}),
        ({"cos": cos, "sin": sin.float()}, {"cos": cos.float(), "sin": sin.float()}),
    ):
        found = [rope(x, **tables) for tables in (low, high)]
        assert found[0].dtype == x_dtype
        assert torch.equal(*found)
        assert torch.equal(*(torch.autograd.grad(y.float().square().sum(), x)[0] for y in found))


def test_positions_outside(device):
    """Outside the table NaN; tokens of no sequence come back as they are."""
    x = torch.randn(12, 2, 20, device=device)
    cu = torch.tensor([2, 6, 9], dtype=torch.int32, device=device)
    out = rope(x, angles(3, 16).to(device), layout="thd", cu_seqlens=cu)
    is_nan = torch.zeros(12, dtype=torch.bool)
    is_nan[5] = True  # the fourth token of the first sequence
    assert torch.equal(out[..., :16].isnan().all(-1).all(-1).cpu(), is_nan)
    assert not out[..., 16:].isnan().any()
    assert torch.equal(out[:2], x[:2])
    assert torch.equal(out[9:], x[9:])
    starts = torch.tensor([-1, 0], dtype=torch.int32, device=device)
    out = rope(x.view(6, 2, 4, 10), angles(6, 10).to(device), starts=starts)
    assert out[0, 0].isnan().all()
    assert not out[1:].isnan().any()
    assert not out[0, 1].isnan().any()


@pytest.mark.parametrize("far", [2**63 - 1, -(2**63), 2**62, -(2**62)])
def test_positions_that_are_no_numbers(device, far):
    """A sum that wraps must not become a position, nor what marks a token of no sequence."""
    x = torch.randn(6, 2, 4, 10, device=device)
    starts = torch.tensor([far, 0], device=device)
    out = rope(x, angles(6, 10).to(device), starts=starts)
    assert out[:, 0].isnan().all()
    assert torch.equal(out[:, 1], rope(x, angles(6, 10).to(device))[:, 1])
    with pytest.raises(ValueError, match=r"rope_fwd: start must be at least 0 and leave"):
        rope(x, angles(6, 10).to(device), starts=starts, start=2**63 - 1)


@pytest.mark.parametrize("trial", range(20))
def test_cu_seqlens_of_another_tensor(device, trial):
    """No reads beyond the table: every token is rotated, NaN or as it was."""
    generator = torch.Generator().manual_seed(trial)
    most = 2**31 if trial % 2 else 30
    cu = torch.randint(-most, most, (5,), generator=generator).to(device, torch.int32)
    x = torch.ones(12, 2, 16, device=device)
    table = torch.full((30, 16), float("inf"), device=device)
    table[10:20] = 0.0  # what lies around gives NaN, as does a position outside
    out = rope(x, table[10:20], layout="thd", cu_seqlens=cu)
    assert (out.isnan() | (out == 1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_strided_inputs_are_read_in_place(device, dtype, interleaved):
    qkv = torch.randn(30, 2, 4, 3 * 64, device=device).to(dtype)
    freqs = angles(30, 64, interleaved).to(device)
    storage = torch.randn(30 * 2 * 4 * 64 + 1, device=device).to(dtype)
    views = [
        *qkv.split(64, -1),
        qkv[..., 3:67],
        qkv.transpose(0, 1)[..., :64].contiguous().transpose(0, 1),
        qkv[:1, ..., :64].expand(30, 2, 4, 64),
        qkv.transpose(1, 2)[..., ::3],
        storage[1:].view(30, 2, 4, 64),
    ]
    for x in views:
        out = rope(x, freqs, interleaved=interleaved)
        assert_same_bits(out, rope(x.contiguous(), freqs, interleaved=interleaved))
        by_batch = rope(x.transpose(0, 1), freqs, interleaved=interleaved, layout="bshd")
        assert_same_bits(by_batch.transpose(0, 1), out)


@pytest.mark.parametrize("interleaved", [False, True])
def test_inplace(device, interleaved):
    freqs = angles(30, 48, interleaved).to(device)
    qkv = torch.randn(30, 2, 4, 3 * 64, device=device)
    before = qkv.clone()
    query = qkv[..., 64:128]
    version = query._version
    out = rope(query, freqs, interleaved=interleaved, inplace=True)
    assert out.data_ptr() == query.data_ptr()
    assert query._version > version
    assert_same_bits(query, rope(before[..., 64:128], freqs, interleaved=interleaved))
    assert torch.equal(qkv[..., :64], before[..., :64])
    assert torch.equal(qkv[..., 128:], before[..., 128:])
    leaf = torch.randn(30, 2, 4, 64, device=device, requires_grad=True)
    rope(leaf * 2, freqs, interleaved=interleaved, inplace=True).square().sum().backward()
    # The square of a rotation's length does not depend on the angle.
    torch.testing.assert_close(leaf.grad, 8 * leaf.detach(), rtol=1e-5, atol=1e-5)


def test_bwd_of_expanded_and_strided_gradients(device):
    freqs = angles(20, 32).to(device)
    x = torch.randn(20, 2, 3, 32, device=device, requires_grad=True)
    (by_sum,) = torch.autograd.grad(rope(x, freqs).sum(), x)
    (expected,) = torch.autograd.grad(rope(x, freqs), x, torch.ones_like(x))
    assert_same_bits(by_sum, expected)
    grad = torch.randn(2, 20, 3, 32, device=device).transpose(0, 1)
    (strided,) = torch.autograd.grad(rope(x, freqs), x, grad)
    (dense,) = torch.autograd.grad(rope(x, freqs), x, grad.contiguous())
    assert_same_bits(strided, dense)


def test_bwd_of_bwd():
    freqs = angles(5, 8)
    x, y, z = (torch.randn(5, 1, 2, 8) for _ in range(3))
    grad = y.clone().requires_grad_()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(rope(x, freqs), x, grad, create_graph=True)
    (ddy,) = torch.autograd.grad(dx, grad, z)
    assert_same_bits(ddy, rope(z, freqs))


def test_thd_without_sequences(device):
    x = torch.randn(3, 2, 8, device=device)
    cu = torch.zeros(1, dtype=torch.int32, device=device)
    assert torch.equal(rope(x, angles(4, 8).to(device), layout="thd", cu_seqlens=cu), x)


def test_compiled_in_place(device):
    x, freqs = torch.randn(6, 2, 3, 16, device=device, requires_grad=True), angles(6, 16).to(device)

    def call(x, freqs):
        return rope(x * 2, freqs, interleaved=True), rope(x * 2, freqs, inplace=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, actual = call(x, freqs), compiled(x, freqs)
    assert_same_bits(actual, expected)
    grad = torch.randn_like(x)
    assert_same_bits(
        torch.autograd.grad(actual, x, (grad, grad)), torch.autograd.grad(expected, x, (grad, grad))
    )


@needs_cuda
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_graph_and_side_stream(layout):
    shape = (300, 3, 64) if layout == "thd" else (20, 20, 3, 64)
    freqs = angles(300, 64).cuda()
    cu_seqlens = packed(300, "cuda") if layout == "thd" else None

    def call(x):
        return rope(x, freqs, layout=layout, cu_seqlens=cu_seqlens)

    assert_runs_in_graph_and_on_stream(call, [torch.randn(shape, device="cuda").bfloat16()])


@needs_cuda
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_more_than_2_to_31_elements(layout):
    needs_memory(12)
    shape = (65552, 2, 128, 128) if layout == "sbhd" else (2, 65552, 128, 128)  # 2.148e9 elements
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    freqs = angles(65552, 128)
    out = rope(x, freqs.cuda(), layout=layout)
    axis = 0 if layout == "sbhd" else 1
    for begin in (0, 32767, 65552 - 4):
        part = x.narrow(axis, begin, 4).cpu()
        exact = op.reference(part.double(), freqs, layout=layout, start=begin)
        same = op.reference(part, freqs, layout=layout, start=begin)
        assert_as_good_as_torch(out.narrow(axis, begin, 4), exact, same)
