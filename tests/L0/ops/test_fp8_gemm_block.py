"""Block-scaled matrix products against the float64 product of the dequantized operands."""

import pytest
import torch
from checks import assert_same_bits, in_pairs, needs_cuda, sqnr

from apex_te.ops import block_quantize as blocks
from apex_te.ops import fp8_gemm as op
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.fp8_gemm import block_scaled_gemm
from apex_te.runtime import function

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODES = [(1, 128), (1, 1), (128, 1)]
SHAPES = [
    (16, 16, 128), (144, 272, 384), (1, 16, 32), (7, 5, 3), (130, 250, 257), (64, 144, 144),
    (20, 272, 400), (129, 48, 256), (254, 272, 400), (255, 16, 128),
]  # fmt: skip


def operand(rows, cols, dtype, block_rows, device):
    """Codes, scales and what they stand for in float64; the size changes from block to block."""
    sizes = 10.0 ** torch.randint(-1, 2, (-(-rows // 32), -(-cols // 128)))
    sizes = sizes.repeat_interleave(32, 0).repeat_interleave(128, 1)[:rows, :cols]
    x = torch.randn(rows, cols) * sizes
    codes, scale_inv = block_quantize(
        x, dtype, block_rows=block_rows, columnwise=False, pow2=False
    )[:2]
    exact = blocks.reference_dequantize(codes, scale_inv, block_rows=block_rows).double()
    return codes.to(device), scale_inv.to(device), exact


@in_pairs(
    out_dtype=[torch.float32, torch.bfloat16, torch.float16],
    types=[(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    shape=SHAPES,
    mode=MODES,
)
def test_fwd(device, poison, mode, shape, types, out_dtype):
    m, n, k = shape
    a, sa, exact_a = operand(m, k, types[0], mode[0], device)
    b, sb, exact_b = operand(n, k, types[1], mode[1], device)
    out = block_scaled_gemm(
        a, b, sa, sb, a_block_rows=mode[0], b_block_rows=mode[1], out_dtype=out_dtype
    )
    assert out.dtype is out_dtype
    # Tensor cores add up to 128 products at about 14 bits; the rest is the output's rounding.
    exact = 80 if device.type == "cpu" else 60
    floor = {torch.float32: exact, torch.bfloat16: 48, torch.float16: 55}[out_dtype]
    assert sqnr(exact_a @ exact_b.t(), out) >= floor


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("shape", [(256, 384, 512), (20, 272, 400), (130, 250, 257)], ids=str)
def test_accumulate_and_bias(device, mode, shape):
    m, n, k = shape
    a, sa, exact_a = operand(m, k, E4M3, mode[0], device)
    b, sb, exact_b = operand(n, k, E4M3, mode[1], device)
    exact = exact_a @ exact_b.t()
    start = torch.randn(m, n, device=device) * exact.std()
    out = start.clone()
    options = {"a_block_rows": mode[0], "b_block_rows": mode[1]}
    result = block_scaled_gemm(a, b, sa, sb, out=out, accumulate=True, **options)
    assert result is out
    floor = 80 if device.type == "cpu" else 60
    assert sqnr(exact + start.double().cpu(), out) >= floor
    bias = (torch.randn(n, device=device) * exact.std()).bfloat16()
    biased = block_scaled_gemm(a, b, sa, sb, bias=bias, **options)
    assert sqnr(exact + bias.double().cpu(), biased) >= 48


@in_pairs(
    mode=MODES,
    out_dtype=[torch.float32, torch.bfloat16, torch.float16],
    shape=[(256, 384, 512), (20, 272, 400), (130, 250, 257), (8, 16, 0)],
)
def test_a_tensor_is_added_before_the_one_rounding(device, poison, mode, shape, out_dtype):
    m, n, k = shape
    a, sa, exact_a = operand(m, k, E4M3, mode[0], device)
    b, sb, exact_b = operand(n, k, E4M3, mode[1], device)
    exact = exact_a @ exact_b.t()
    c = (torch.randn(m, n) * max(exact.std().item(), 1.0)).to(device, out_dtype)
    bias = torch.randn(n, device=device).bfloat16()
    options = {"a_block_rows": mode[0], "b_block_rows": mode[1], "out_dtype": out_dtype}
    options["bias"] = bias
    out = block_scaled_gemm(a, b, sa, sb, c=c, **options)
    expected = exact + bias.double().cpu() + c.double().cpu()
    exact_floor = 80 if device.type == "cpu" else 60
    floor = {torch.float32: exact_floor, torch.bfloat16: 48, torch.float16: 55}[out_dtype]
    assert sqnr(expected, out) >= floor
    apart = block_scaled_gemm(a, b, sa, sb, **options) + c
    if k and out_dtype is not torch.float32:  # one rounding instead of two
        assert sqnr(expected, out) > sqnr(expected, apart)


def test_three_products_of_a_linear_layer(device):
    x, w, dy = torch.randn(160, 256), torch.randn(128, 256), torch.randn(160, 128)
    qx, qd = (block_quantize(t.to(device), E4M3) for t in (x, dy))
    qw = block_quantize(w.to(device), E4M3, block_rows=128)
    y = block_scaled_gemm(qx.rowwise, qw.rowwise, qx.rowwise_scale_inv, qw.rowwise_scale_inv)
    dx = block_scaled_gemm(qd.rowwise, qw.columnwise, qd.rowwise_scale_inv, qw.columnwise_scale_inv)
    total = torch.zeros(128, 256, device=device)
    for _ in range(2):
        block_scaled_gemm(
            qd.columnwise, qx.columnwise, qd.columnwise_scale_inv, qx.columnwise_scale_inv,
            b_block_rows=1, out=total, accumulate=True,
        )  # fmt: skip
    assert sqnr(x @ w.t(), y) >= 25
    assert sqnr(dy @ w, dx) >= 25
    assert sqnr(2 * dy.t() @ x, total) >= 25


@pytest.fixture
def in_fours(device, monkeypatch):
    """Has the CPU, too, compute rows in fours, as cuBLASLt does."""
    if device.type == "cpu":
        monkeypatch.setattr(op, "_run_block_cuda", op._run_block_cpu)
        monkeypatch.setattr(op, "_run_block_cpu", op._run_block_rows)


def products(calls, monkeypatch):
    """Appends rows and address of a and of out of each of cuBLASLt's products to `calls`."""
    run = op._run_block_cuda

    def counted(operands, out, *rest):
        calls.append((operands[0].shape[0], operands[0].data_ptr(), out.shape[0], out.data_ptr()))
        run(operands, out, *rest)

    monkeypatch.setattr(op, "_run_block_cuda", counted)


@pytest.mark.parametrize("rows", [1, 15, 17, 33, 129, 254, 255, 257])
def test_rows_that_are_no_multiple_of_4(device, poison, in_fours, monkeypatch, rows):
    x = torch.randn(rows, 256, device=device)
    stored = -(-rows // 4) * 4
    wanted = block_quantize(torch.cat([x, x.new_zeros(stored - rows, 256)]), E4M3)
    a = block_quantize(x, E4M3)
    b = block_quantize(torch.randn(48, 256, device=device), E4M3, block_rows=128)
    bias = torch.randn(48, device=device)
    operands = (a.rowwise, b.rowwise, a.rowwise_scale_inv, b.rowwise_scale_inv)
    of_wanted = (wanted.rowwise, b.rowwise, wanted.rowwise_scale_inv, b.rowwise_scale_inv)
    expected = block_scaled_gemm(*of_wanted, bias=bias)[:rows]
    calls = []
    products(calls, monkeypatch)
    monkeypatch.setattr(op.F, "pad", None)  # no copy of an operand
    out = block_scaled_gemm(*operands, bias=bias)
    assert_same_bits(out, expected)
    assert out.shape == (rows, 48)
    assert out._base is None
    if device.type == "cuda":
        assert calls == [(stored, a.rowwise.data_ptr(), stored, out.data_ptr())]


@pytest.mark.parametrize("accumulate", [False, True])
def test_given_output_of_rows_that_are_no_multiple_of_4(device, in_fours, accumulate):
    """Rows of a larger matrix: those behind keep their values."""
    a, sa, exact_a = operand(129, 256, E4M3, 1, device)
    b, sb, exact_b = operand(48, 256, E4M3, 128, device)
    whole = torch.ones(140, 48, device=device)
    block_scaled_gemm(a, b, sa, sb, out=whole[:129], accumulate=accumulate)
    assert whole[129:].eq(1).all()
    assert sqnr(exact_a @ exact_b.t() + accumulate, whole[:129]) >= 60


@pytest.mark.parametrize("first", [0, 4, 125])
def test_some_rows_of_a_matrix(device, in_fours, first):
    """The rows behind them are in the operand's storage, but not in the product."""
    codes, _, _ = operand(140, 256, E4M3, 1, device)
    codes[first + 15 :].view(torch.uint8).fill_(0x7F)  # NaN
    b, sb, exact_b = operand(48, 256, E4M3, 128, device)
    part = codes[first : first + 15]
    out = block_scaled_gemm(part, b, torch.ones(2, 16, device=device), sb)
    assert sqnr(part.cpu().double() @ exact_b.t(), out) >= 48


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 32, 0)], ids=str)
def test_fwd_empty(device, poison, shape):
    m, n, k = shape
    a, sa, _ = operand(m, k, E4M3, 1, device)
    b, sb, _ = operand(n, k, E4M3, 128, device)
    bias = torch.randn(n, device=device).bfloat16()
    out = block_scaled_gemm(a, b, sa, sb, bias=bias)
    assert torch.equal(out.cpu(), bias.cpu().expand(m, n))


def test_nan_reaches_its_row(device):
    x = torch.randn(32, 256)
    x[3, 200] = float("nan")
    qx = block_quantize(x.to(device), E4M3)
    qw = block_quantize(torch.randn(16, 256, device=device), E4M3, block_rows=128)
    out = block_scaled_gemm(qx.rowwise, qw.rowwise, qx.rowwise_scale_inv, qw.rowwise_scale_inv)
    assert out[3].isnan().all()
    assert out.isnan().sum() == 16


def test_misaligned_and_repeatable(device):
    a, sa, exact_a = operand(48, 256, E4M3, 1, device)
    b, sb, exact_b = operand(64, 256, E4M3, 128, device)
    flat = torch.empty(a.numel() + 1, dtype=torch.uint8, device=device)
    flat[1:] = a.view(torch.uint8).reshape(-1)
    out = block_scaled_gemm(flat[1:].view(E4M3).view(48, 256), b, sa, sb)
    assert sqnr(exact_a @ exact_b.t(), out) >= 48
    assert_same_bits(block_scaled_gemm(a, b, sa, sb), block_scaled_gemm(a, b, sa, sb))


def test_rejects(device):
    a, sa, _ = operand(16, 256, E4M3, 1, device)
    b, sb, _ = operand(32, 256, E4M3, 128, device)
    with pytest.raises(ValueError, match=r"block_scaled_gemm: a and b must be \[M, K\]"):
        block_scaled_gemm(a, b[:, :16], sa, sb)
    with pytest.raises(ValueError, match="out must be given with accumulate"):
        block_scaled_gemm(a, b, sa, sb, accumulate=True)
    with pytest.raises(NotImplementedError, match="one of a_block_rows and b_block_rows must be 1"):
        block_scaled_gemm(a, b, sa, sb, a_block_rows=128)
    with pytest.raises(ValueError, match="b_block_rows must be 1 or 128, got 64"):
        block_scaled_gemm(a, b, sa, sb, b_block_rows=64)
    with pytest.raises(NotImplementedError, match="one of a and b must have dtype float8_e4m3fn"):
        block_scaled_gemm(a.view(E5M2), b.view(E5M2), sa, sb)
    with pytest.raises(TypeError, match="must have dtype float8_e4m3fn"):
        block_scaled_gemm(a.float(), b, sa, sb)


@needs_cuda
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_equals_scaled_mm(mode):
    """Block-scaled products agree with torch's to 100 dB, as both call cuBLASLt."""
    from torch.nn.functional import ScalingType, scaled_mm

    a, sa, _ = operand(256, 512, E4M3, mode[0], "cuda")
    b, sb, _ = operand(384, 512, E4M3, mode[1], "cuda")
    types = [ScalingType.BlockWise1x128 if r == 1 else ScalingType.BlockWise128x128 for r in mode]
    peer = scaled_mm(a, b.t(), sa.t(), types[0], sb.t(), types[1], output_dtype=torch.float32)
    out = block_scaled_gemm(
        a, b, sa, sb, a_block_rows=mode[0], b_block_rows=mode[1], out_dtype=torch.float32
    )
    assert sqnr(peer, out) >= 100


@needs_cuda
def test_tuned_product_is_right(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("APEX_TE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(op.gemm_tuning, "_tables", {})
    a, sa, exact_a = operand(256, 512, E4M3, 1, "cuda")
    b, sb, exact_b = operand(384, 512, E4M3, 128, "cuda")
    block_scaled_gemm(a, b, sa, sb)
    monkeypatch.setattr(op.gemm_tuning, "is_active", True)
    assert sqnr(exact_a @ exact_b.t(), block_scaled_gemm(a, b, sa, sb)) >= 48
    assert "blocks=(1, 128)" in next((tmp_path / "gemm").glob("*.json")).read_text()


@pytest.mark.parametrize(
    ("k", "slice", "message"),
    [
        (2**63 - 1, 0, r"a_scale_inv must have shape \[72057594037927936, 4\]"),
        (0, 0, "k must be at least 1, got 0"),
        (-(2**63), 0, "k must be at least 1, got -9223372036854775808"),
        (256, 2, "slice must be from 0 to 1, got 2"),
    ],
)
def test_any_extent_of_a_slice_is_refused(k, slice, message):
    product, total = torch.zeros(4, 4), torch.zeros(4, 4)
    scales = torch.ones(2, 4)
    with pytest.raises(ValueError, match=f"fp8_block_accumulate: {message}"):
        function("fp8_gemm", "fp8_block_accumulate")(product, scales, scales, total, 1, 1, k, slice)
