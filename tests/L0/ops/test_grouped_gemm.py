"""Products over groups whose sizes are on the device, of codes and of other dtypes."""

import pytest
import torch
from group_layouts import LAYOUTS, made

from apex_te.ops import grouped_gemm as op
from apex_te.ops.grouped_quantize import ALIGN, Groups
from apex_te.ops.reference_codec import decode_fp8
from tests.checks import assert_same_bits, needs_cuda, needs_memory

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]
NAN = 0x7F  # of both formats
# The products are float32 sums in any order, kept to some 14 bits in the matrix units, and rounded
# to bfloat16 twice where a GPU decodes codes.
ROUNDING, SUM = 2.0**-7, 2.0**-12


def codes(shape, dtype, spread=3.0):
    return (torch.randn(shape) * spread).to(dtype)


def exact(a):
    return decode_fp8(a).double()


def assert_close(actual, expected, magnitude):
    """Within a rounding of the result and of the sum of all magnitudes."""
    actual = actual.double().cpu()
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert ((actual - expected).abs() <= ROUNDING * expected.abs() + SUM * magnitude).all()


def columns_of(splits):
    return [max(ALIGN, -(-count // ALIGN) * ALIGN) for count in splits]


def multiply(device, rows, splits, n, k, pair, fast, bad=()):
    """Operands with NaN in the groups `bad` and behind the last; what `op` makes of them."""
    a, b = codes((rows, k), pair[0]), codes((len(splits), n, k), pair[1])
    of_a, of_b = torch.rand(rows) + 0.5, torch.rand(len(splits)) + 0.5
    begin = 0
    for g, count in enumerate(splits):
        if g in bad:
            a.view(torch.uint8)[begin : begin + count] = NAN
            b.view(torch.uint8)[g] = NAN
        begin += count
    a.view(torch.uint8)[begin:] = NAN
    groups = made(rows, splits, device)
    placed = [t.to(device) for t in (a, of_a, b, of_b)]
    return (a, of_a, b, of_b), op.scaled_multiply_groups(*placed, groups, fast)


def assert_multiplied(operands, out, splits, bad=()):
    a, of_a, b, of_b = operands
    begin = 0
    for g, count in enumerate(splits):
        rows = slice(begin, begin + count)
        begin += count
        if g in bad:
            assert torch.isnan(out[rows]).all()
            continue
        factor = (of_a[rows] * of_b[g]).double()[:, None]
        x, w = exact(a[rows]), exact(b[g]).t()
        assert_close(out[rows], x @ w * factor, x.abs() @ w.abs() * factor)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize(("rows", "splits"), LAYOUTS[:-1], ids=lambda v: str(v)[:24])
def test_multiply(device, poison, rows, splits, pair, fast):
    operands, out = multiply(device, rows, splits, 48, 80, pair, fast)
    assert out.dtype is torch.bfloat16
    assert_multiplied(operands, out, splits)


@pytest.mark.cover(1)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("n", "k"), [(8, 16), (264, 128), (256, 144), (520, 512), (1000, 1040)])
def test_multiply_any_sizes(device, poison, n, k, fast):
    splits = [130, 0, 1, 300, 257]
    operands, out = multiply(device, 700, splits, n, k, (E5M2, E4M3), fast)
    assert_multiplied(operands, out, splits)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("n", "k"), [(20, 32), (24, 40)])
def test_multiply_sizes_without_a_kernel(device, n, k, fast):
    """Codes are decoded where their rows begin anywhere."""
    splits = [5, 0, 16, 3]
    operands, out = multiply(device, 30, splits, n, k, (E5M2, E4M3), fast)
    assert_multiplied(operands, out, splits)


@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
def test_multiply_keeps_nan_in_its_group(device, pair):
    splits = [37, 5, 90, 130, 16]
    for fast in (True, False):
        operands, out = multiply(device, 300, splits, 40, 144, pair, fast, bad=(1, 3))
        assert_multiplied(operands, out, splits, bad=(1, 3))


def test_multiply_leaves_other_rows_alone(device):
    """The kernel does not write them; the other way has no values for them."""
    if not op.has_grouped_fp8(device):
        pytest.skip("no kernel for this device")
    a, b = codes((64, 32), E4M3).to(device), codes((2, 32, 32), E4M3).to(device)
    out = torch.full((64, 32), 7.0, dtype=torch.bfloat16, device=device)
    ones = torch.ones(64, device=device)
    op._multiply(a, ones, b, ones[:2], made(64, [5, 8], device).ends, out, False)
    assert (out[13:] == 7).all()
    assert not (out[:13] == 7).all()


def contract(device, splits, m, n, pair, fast, bad=()):
    columns = columns_of(splits)
    total = sum(columns) + 3 * ALIGN
    a, b = codes((m, total), pair[0]), codes((n, total), pair[1])
    of_a, of_b = torch.rand(len(splits)) + 0.5, torch.rand(len(splits)) + 0.5
    begin = 0
    for g, count in enumerate(splits):
        for t in (a, b):
            t.view(torch.uint8)[:, begin + count : begin + columns[g]] = 0
            if g in bad:
                t.view(torch.uint8)[:, begin : begin + count] = NAN
        begin += columns[g]
    for t in (a, b):
        t.view(torch.uint8)[:, begin:] = NAN
    ends = torch.tensor(columns, dtype=torch.int32, device=device).cumsum(0).to(torch.int32)
    placed = [t.to(device) for t in (a, of_a, b, of_b)]
    return (a, of_a, b, of_b), op.scaled_contract_groups(*placed, ends, fast)


def assert_contracted(operands, out, splits, bad=()):
    a, of_a, b, of_b = operands
    begin = 0
    for g, columns in enumerate(columns_of(splits)):
        own = slice(begin, begin + columns)
        begin += columns
        if g in bad and splits[g]:
            assert torch.isnan(out[g]).all()
            continue
        factor = (of_a[g] * of_b[g]).double()
        x, y = exact(a[:, own]), exact(b[:, own]).t()
        assert_close(out[g], x @ y * factor, x.abs() @ y.abs() * factor)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize(("rows", "splits"), LAYOUTS[:-1], ids=lambda v: str(v)[:24])
def test_contract(device, poison, rows, splits, pair, fast):
    """Groups of 0 have columns of zeros; what is behind the last is NaN."""
    operands, out = contract(device, splits, 48, 40, pair, fast)
    assert out.dtype is torch.bfloat16
    assert_contracted(operands, out, splits)


@pytest.mark.cover(1)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (128, 256), (129, 264), (300, 520), (513, 1000)])
def test_contract_any_sizes(device, poison, m, n, fast):
    splits = [128, 0, 16, 300, 1000, 97]
    operands, out = contract(device, splits, m, n, (E5M2, E4M3), fast)
    assert_contracted(operands, out, splits)


@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
def test_contract_keeps_nan_in_its_group(device, pair):
    splits = [16, 128, 40, 16, 300, 64, 1]
    for bad in ((1, 3, 5), (0, 2, 4, 6)):
        for fast in (True, False):
            operands, out = contract(device, splits, 40, 264, pair, fast, bad)
            assert_contracted(operands, out, splits, bad)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (130, 264), (300, 520)])
def test_contract_wide_keeps_float32(device, poison, m, n, fast):
    """A sum of 257 ones is no bfloat16; on sm_100, whose product is torch's, it becomes one."""
    if device.type == "cuda" and not op.has_grouped_fp8(device):
        pytest.skip("the device's grouped product is rounded to bfloat16")
    splits = [257, 0, 16, 515]
    columns = columns_of(splits)
    a, b = torch.zeros(m, sum(columns)), torch.zeros(n, sum(columns))
    begin = 0
    for count, width in zip(splits, columns, strict=True):
        a[:, begin : begin + count] = b[:, begin : begin + count] = 1
        begin += width
    ends = torch.tensor(columns, dtype=torch.int32, device=device).cumsum(0).to(torch.int32)
    ones = torch.ones(4, device=device)
    codes = [t.to(device).to(E4M3) for t in (a, b)]
    out = op.scaled_contract_groups(codes[0], ones, codes[1], ones, ends, fast, True)
    assert out.dtype is torch.float32
    expected = torch.tensor(splits).float()[:, None, None].expand(4, m, n)
    assert torch.equal(out.cpu(), expected)
    before = torch.randint(100, (4, m, n)).float()
    target = before.clone().to(device)
    op.scaled_contract_groups(codes[0], ones, codes[1], ones, ends, fast, True, target, True)
    assert torch.equal(target.cpu(), before + expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_contract_values_wide(device, dtype):
    """Sums that float16 has no number for, of sizes that torch's grouped product does not take."""
    groups = made(80, [64, 0, 13], device)
    a = torch.full((20, 80), 20.0, dtype=dtype, device=device)
    b = torch.full((80, 12), 100.0, dtype=dtype, device=device)
    out = op.contract_groups(a, b, groups, True)
    assert out.dtype is torch.float32
    for g, count in ((0, 64), (2, 13)):
        assert (out[g] == 2000.0 * count).all()


def test_scaled_sums_are_rounded_once(device):
    """Sums of small integers are exact, and those times the scales are rounded to bfloat16."""
    splits, n, k = [48, 0, 80], 64, 256
    groups = made(sum(splits), splits, device)
    a, x, y = (torch.randint(-3, 4, shape).float() for shape in ((128, k), (n, 128), (k, 128)))
    b, scales = torch.randint(-3, 4, (3, n, k)).float(), torch.rand(3) + 0.5
    a_scale, group = torch.rand(128) + 0.5, torch.arange(3).repeat_interleave(torch.tensor(splits))
    out = op.scaled_multiply_groups(
        *(t.to(device) for t in (a.to(E4M3), a_scale, b.to(E4M3), scales)), groups, False
    )
    sums = torch.stack([b[g] @ row for g, row in zip(group.tolist(), a, strict=True)])
    expected = (sums * (a_scale * scales[group])[:, None]).bfloat16()
    assert_same_bits(out, expected.to(device))
    codes_of = [t.to(E4M3).to(device) for t in (x, y)]
    out = op.scaled_contract_groups(
        codes_of[0], scales.to(device), codes_of[1], scales.flip(0).to(device),
        torch.tensor([48, 64, 128], dtype=torch.int32, device=device), False,
    )  # fmt: skip
    for g, (begin, end) in enumerate([(0, 48), (48, 64), (64, 128)]):
        sums = x[:, begin:end] @ y[:, begin:end].t()
        assert_same_bits(out[g], (sums * (scales[g] * scales[2 - g])).bfloat16().to(device))


def test_many_groups(device):
    splits = [k % 3 for k in range(1023)]
    operands, out = multiply(device, 1100, splits, 16, 32, (E4M3, E4M3), True)
    assert_multiplied(operands, out, splits)
    operands, out = contract(device, splits, 16, 16, (E5M2, E4M3), False)
    assert_contracted(operands, out, splits)


def test_no_rows(device):
    out = multiply(device, 16, [0, 0], 16, 32, (E4M3, E4M3), True)[1]
    assert out.shape == (16, 16)
    empty = Groups(made(16, [0, 0], device).table, 0, 2)
    a, b = codes((0, 32), E4M3).to(device), codes((2, 16, 32), E4M3).to(device)
    ones = torch.ones(2, device=device)
    assert op.scaled_multiply_groups(a, ones[:0], b, ones, empty, True).shape == (0, 16)


def test_unusable_scales_show(device):
    """Splits that are no partition: the scales that come with them are NaN."""
    a, b = codes((16, 32), E4M3).to(device), codes((16, 32), E4M3).to(device)
    nan = torch.full((2,), float("nan"), device=device)
    ends = torch.tensor([16, 32], dtype=torch.int32, device=device)
    assert torch.isnan(op.scaled_contract_groups(a, nan, b, nan, ends, True)).all()


@needs_cuda
class TestKernel:
    """Tests of the kernel for sm_90 alone, which no other device runs."""

    device = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def _has_kernel(self):
        if not op.has_grouped_fp8(self.device):
            pytest.skip("no kernel for this GPU")

    def operands(self, rows=300, n=264, k=400, groups=3):
        a, b = codes((rows, k), E5M2).cuda(), codes((groups, n, k), E4M3).cuda()
        return a, torch.ones(rows, device="cuda"), b, torch.ones(groups, device="cuda")

    @pytest.mark.parametrize("pair", PAIRS, ids=str)
    def test_codes_are_multiplied_as_they_are(self, pair):
        a, b = codes((32, 48), pair[0]).cuda(), codes((2, 16, 48), pair[1]).cuda()
        assert op.multiplies_codes(a, b)
        assert op.multiplies_codes(a, b[0])
        assert not op.multiplies_codes(a[:, :40].contiguous(), b[:, :, :40].contiguous())
        assert not op.multiplies_codes(a, b[:, :12].contiguous())
        shifted = a.view(-1)[1:1489].view(31, 48)
        assert op.multiplies_codes(shifted, b)
        one = torch.ones(31, device="cuda"), b, torch.ones(2, device="cuda")
        groups = made(31, [20, 11], self.device)
        expected = op.scaled_multiply_groups(shifted.clone(), *one, groups, True)
        assert torch.equal(op.scaled_multiply_groups(shifted, *one, groups, True), expected)
        assert not op.multiplies_codes(a.bfloat16(), b)

    def test_split_sums_are_float32(self):
        """Sums of positive products, each too small for the matrix units beside their sum."""
        k = 1 << 16
        a = torch.full((128, k), 1.0625).to(E4M3).cuda()
        b = torch.full((1, 256, k), 1.0).to(E5M2).cuda()
        ones = torch.ones(128, device="cuda")
        groups = made(128, [128], self.device)
        out = op.scaled_multiply_groups(a, ones, b, ones[:1], groups, False)
        expected = exact(a[:1].cpu()).sum()
        assert ((out.double().cpu() / expected - 1).abs() <= 2.0**-8).all()
        out = op.scaled_contract_groups(a, ones[:1], b[0], ones[:1], groups.ends * 0 + k, False)
        assert ((out.double().cpu() / expected - 1).abs() <= 2.0**-8).all()

    @pytest.mark.parametrize("fast", [True, False])
    def test_nothing_waits_and_graphs(self, fast):
        """Captured once, replayed with other groups."""
        a, of_a, b, of_b = self.operands()
        at, bt = codes((264, 480), E5M2).cuda(), codes((136, 480), E4M3).cuda()
        layouts = [[100, 0, 150], [16, 200, 17], [0, 0, 300]]
        tables = [made(300, splits, self.device) for splits in layouts]
        static = Groups(tables[0].table.clone(), 300, 3)

        def run(groups):
            out = op.scaled_multiply_groups(a, of_a, b, of_b, groups, fast)
            grad = op.scaled_contract_groups(at, of_b, bt, of_b, groups.column_ends, fast)
            return out, grad

        run(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(static)
            with torch.cuda.graph(graph):
                captured = run(static)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for splits, groups in zip(layouts, tables, strict=True):
            static.table.copy_(groups.table)
            graph.replay()
            expected = run(groups)
            used = sum(splits)
            assert_same_bits(captured[0][:used], expected[0][:used])
            assert_same_bits(captured[1], expected[1])

    @pytest.mark.parametrize("fast", [True, False])
    def test_repeatable(self, fast):
        a, of_a, b, of_b = self.operands(3000, 1032, 2000, 5)
        groups = made(3000, [1000, 3, 0, 1200, 797], self.device)
        first = op.scaled_multiply_groups(a, of_a, b, of_b, groups, fast)
        for _ in range(5):
            again = op.scaled_multiply_groups(a, of_a, b, of_b, groups, fast)
            assert_same_bits(again, first)

    def test_more_than_2_31_elements(self):
        needs_memory(20)
        rows, n, k = (1 << 20) + 40, 2064, 16
        splits = [rows // 2, rows - rows // 2]
        a, b = codes((rows, k), E5M2).cuda(), codes((2, n, k), E4M3).cuda()
        ones = torch.ones(rows, device="cuda")
        groups = made(rows, splits, self.device)
        out = op.scaled_multiply_groups(a, ones, b, ones[:2], groups, True)
        x, w = exact(a[-300:].cpu()), exact(b[1].cpu()).t()
        assert_close(out[-300:], x @ w, x.abs() @ w.abs())
        m, n, count = 8192, 8192, 34
        ends = torch.arange(1, count + 1, dtype=torch.int32, device="cuda") * ALIGN
        a, b = codes((m, count * ALIGN), E5M2).cuda(), codes((n, count * ALIGN), E4M3).cuda()
        del out
        out = op.scaled_contract_groups(a, ones[:count], b, ones[:count], ends, True)
        x, w = exact(a[-300:, -ALIGN:].cpu()), exact(b[:, -ALIGN:].cpu()).t()
        assert_close(out[-1, -300:], x @ w, x.abs() @ w.abs())

    def test_errors(self):
        a, of_a, b, of_b = self.operands(rows=16, n=16, k=32, groups=2)
        ends = torch.tensor([8, 16], dtype=torch.int32, device="cuda")
        out = torch.empty(16, 16, dtype=torch.bfloat16, device="cuda")
        good = {"a": a, "a_scale_inv": of_a, "b": b, "b_scale_inv": of_b, "ends": ends, "out": out}
        cases = [
            (TypeError, "a must have dtype", {"a": a.view(torch.uint8)}),
            (TypeError, "ends must have dtype int32", {"ends": ends.long()}),
            (TypeError, "out must have dtype bfloat16", {"out": out.half()}),
            (ValueError, r"a_scale_inv must have shape \[16\]", {"a_scale_inv": of_a[:8]}),
            (ValueError, r"b_scale_inv must have shape \[2\]", {"b_scale_inv": of_b[:1]}),
            (ValueError, r"b must have shape \[2, 16, 32\]", {"b": b[:, :, :16].contiguous()}),
            (ValueError, "a must be contiguous", {"a": codes((16, 64), E5M2).cuda()[:, ::2]}),
            (ValueError, r"out must have shape \[16, 16\]", {"out": out[:8]}),
            (NotImplementedError, "ends must have 1 to 1023", {"ends": ends[:0]}),
            (NotImplementedError, "N must be a multiple of 8, got 12",
             {"b": b[:, :12].contiguous(), "out": out[:, :12].contiguous()}),
            (NotImplementedError, "K must be a multiple of 16, got 24",
             {"a": a[:, :24].contiguous(), "b": b[:, :, :24].contiguous()}),
        ]  # fmt: skip
        for kind, text, changed in cases:
            with pytest.raises(kind, match=f"grouped_gemm_multiply: {text}"):
                op._multiply(*{**good, **changed}.values(), True)
        with pytest.raises(ValueError, match=r"grouped_gemm_contract: b must have shape"):
            op._contract(a, of_b, codes((16, 48), E4M3).cuda(), of_b, ends, out[None], True, False)

    @pytest.mark.parametrize("fast", [True, False])
    def test_in_torch_compile(self, fast):
        a, of_a, b, of_b = self.operands()
        groups = made(300, [100, 0, 200], self.device)

        def run(a, of_a, b, of_b, ends):
            out = torch.empty((300, 264), dtype=torch.bfloat16, device="cuda")
            op._multiply(a, of_a, b, of_b, ends, out, not fast)
            return out

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        arguments = (a, of_a, b, of_b, groups.ends)
        assert_same_bits(compiled(*arguments), run(*arguments))
        arguments = (*arguments, run(*arguments), not fast)
        # Its other checks multiply FP8 tensors, which torch cannot.
        checks = ("test_autograd_registration", "test_faketensor")
        registered = torch.ops.apex_te.grouped_gemm_multiply
        torch.library.opcheck(registered, arguments, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [48, 20])
def test_high_precision(device, dtype, k):
    splits, rows, n = [5, 0, 16, 3], 40, 24
    a, b = torch.randn(rows, k).to(dtype), torch.randn(4, n, k).to(dtype)
    a[24:] = float("nan")
    groups = made(rows, splits, device)
    out = op.multiply_groups(a.to(device), b.to(device), groups)
    grad = op.contract_groups(a.t().to(device), out, groups)
    begin = 0
    for g, count in enumerate(splits):
        x = a[begin : begin + count].double()
        y = out[begin : begin + count].double().cpu()
        assert_close(y, x @ b[g].double().t(), x.abs() @ b[g].double().abs().t())
        if count:
            assert_close(grad[g], x.t() @ y, x.abs().t() @ y.abs())
        begin += count
