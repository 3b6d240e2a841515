"""Block scaling of groups whose sizes are on the device: casts and products."""

import pytest
import torch
from group_layouts import LAYOUTS, made, nan_behind

from apex_te.ops import grouped_gemm, grouped_quantize
from apex_te.ops.block_quantize import block_dequantize, block_quantize
from apex_te.ops.grouped_quantize import ALIGN
from tests.checks import assert_same_bits, needs_cuda

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
layouts = pytest.mark.parametrize(("rows", "splits"), LAYOUTS, ids=lambda v: str(v)[:24])
# A product is rounded to bfloat16. The matrix units cut each of 32 products off at 2^-13 of the
# largest: 2^-11 of the sum of normally distributed ones.
ROUNDING, SUM = 2.0**-8, 2.0**-11


def columns_of(count):
    return max(ALIGN, -(-count // ALIGN) * ALIGN)


def assert_cast(out, x, splits, dtype, **options):
    """Each group as block_quantize casts it, with zeros up to its last column."""
    begin = column = 0
    for g, count in enumerate(splits):
        own = block_quantize(x[begin : begin + count], dtype, **options)
        rows, width = slice(begin, begin + count), columns_of(count)
        line = column // 128 + g
        if out.rowwise is not None:
            assert_same_bits([out.rowwise[rows]], [own.rowwise])
            scales = own.rowwise_scale_inv[:, :count].contiguous()
            assert_same_bits([out.row_scale_inv[:, rows].contiguous()], [scales])
        if out.columnwise is not None:
            data = out.columnwise.view(torch.uint8)[:, column : column + width]
            assert torch.equal(data[:, :count], own.columnwise.view(torch.uint8))
            assert not data[:, count:].any()
            scales = own.columnwise_scale_inv
            if options.get("columnwise_block_rows") == 128:  # each column has that of its block
                tiles = scales[:, : -(-count // 128)].t().repeat_interleave(128, 1)[:, : x.shape[1]]
                scales = torch.nn.functional.pad(tiles, (0, -x.shape[1] % 4), value=1.0)
            lines = max(1, len(scales))
            found = out.scale_inv[line : line + lines]
            if count:
                assert_same_bits([found], [scales.contiguous()])
            else:
                assert (found == 1).all()
        begin, column = begin + count, column + width


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("cols", [128, 40, 300, 1])
@layouts
def test_rows(device, poison, rows, splits, cols, block_rows):
    x = nan_behind(torch.randn(rows, cols, device=device) * 3, splits)
    options = {"columnwise_block_rows": block_rows}
    out = grouped_quantize.block_quantize_groups(x, made(rows, splits, device), E4M3, **options)
    assert_cast(out, x, splits, E4M3, **options)


@pytest.mark.parametrize("copies", [(True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{"pow2": False}, {"eps": 2.0}, {"scales": "server"},
     {"scales": "server", "columnwise_block_rows": 128}],
)  # fmt: skip
def test_options_of_rows(device, poison, copies, dtype, options):
    splits = [130, 0, 5, 257]
    x = torch.randn(400, 264, device=device).to(dtype)
    x[3, 4], x[140, 5] = float("inf"), float("nan")
    rowwise, columnwise = copies
    out = grouped_quantize.block_quantize_groups(
        x, made(400, splits, device), E5M2, rowwise=rowwise, columnwise=columnwise, **options
    )
    assert (out.rowwise is not None, out.columnwise is not None) == copies
    assert_cast(out, x, splits, E5M2, **options)


@pytest.mark.parametrize("shape", [(128, 256), (16, 48), (300, 200), (1, 130)])
@pytest.mark.parametrize("scales", ["pow2", "fp32", "server"])
def test_matrices(device, poison, shape, scales):
    matrices = [torch.randn(shape, device=device).bfloat16() for _ in range(5)]
    groups = made(40, [0, 7, 1, 16, 0], device)
    for given in (None, groups):
        out = grouped_quantize.block_quantize_matrices(matrices, E4M3, groups=given, scales=scales)
        for g, matrix in enumerate(matrices):
            if given is not None and g in (0, 4):
                continue
            own = block_quantize(matrix, E4M3, block_rows=128, scales=scales)
            found = out.rowwise[g], out.row_scale_inv[g], out.columnwise[g], out.scale_inv[g]
            assert_same_bits(found, own)


@pytest.mark.parametrize("count", [3, 150])
def test_stacks_whose_rows_follow_one_another(device, poison, count):
    stacks = [torch.randn(count, 128, 48).to(device).bfloat16() for _ in range(2)]
    found = grouped_quantize.block_quantize_matrices(stacks, E4M3)
    assert_same_bits(found, grouped_quantize.block_quantize_matrices(torch.cat(stacks, 1), E4M3))


def exact(x, dtype, block_rows=1):
    """x as its cast stands for it, in float64."""
    q = block_quantize(x, dtype, block_rows=block_rows)
    scales = q.rowwise_scale_inv
    return block_dequantize(q.rowwise, scales, block_rows=block_rows, dtype=torch.float32).double()


def assert_close(actual, expected, magnitude, rounding=ROUNDING):
    actual, expected, magnitude = actual.double().cpu(), expected.cpu(), magnitude.cpu()
    assert torch.isfinite(actual).all()
    assert ((actual - expected).abs() <= rounding * expected.abs() + SUM * magnitude).all()


def spread(rows, cols):
    """Values whose rows, and blocks of columns, differ by powers of two."""
    blocks = torch.randint(-3, 4, (1, -(-cols // 128))).repeat_interleave(128, 1)[:, :cols]
    return torch.randn(rows, cols) * 2.0 ** torch.randint(-6, 7, (rows, 1)) * 2.0**blocks


@pytest.mark.parametrize(("n", "k"), [(48, 80), (8, 16), (264, 128), (1000, 1040), (400, 272)])
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize(
    ("rows", "splits"),
    [(700, [130, 0, 1, 300, 257]), *(case for case in LAYOUTS if case[0] < 1000)],
    ids=lambda v: str(v)[:24],
)
def test_multiply(device, poison, rows, splits, n, k, pair):
    if n > 48 and rows != 700:
        pytest.skip("one layout for each large size")
    a, b = spread(rows, k).to(device), [spread(n, k).to(device) for _ in splits]
    a = nan_behind(a, splits)
    groups = made(rows, splits, device)
    x = grouped_quantize.block_quantize_groups(a, groups, pair[0], columnwise=False)
    w = grouped_quantize.block_quantize_matrices(b, pair[1], columnwise=False)
    out = grouped_gemm.block_multiply_groups(
        x.rowwise, x.row_scale_inv, w.rowwise, w.row_scale_inv, groups
    )
    assert out.dtype is torch.bfloat16
    begin = 0
    for g, count in enumerate(splits):
        own = slice(begin, begin + count)
        begin += count
        if count:
            left, right = exact(a[own], pair[0]), exact(b[g], pair[1], 128).t()
            assert_close(out[own], left @ right, left.abs() @ right.abs())


@pytest.mark.parametrize(("m", "n"), [(48, 40), (1, 8), (129, 264), (300, 520), (256, 256)])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize(
    ("rows", "splits"),
    [(1600, [128, 0, 16, 300, 1000, 97]), *(case for case in LAYOUTS if case[0] < 1000)],
    ids=lambda v: str(v)[:24],
)
def test_contract(device, poison, rows, splits, m, n, wide, block_rows):
    if m > 48 and rows != 1600:
        pytest.skip("one layout for each large size")
    a, b = (spread(width, rows).t().contiguous().to(device) for width in (m, n))
    a, b = nan_behind(a, splits), nan_behind(b, splits)
    groups = made(rows, splits, device)
    x = grouped_quantize.block_quantize_groups(a, groups, E5M2, rowwise=False)
    y = grouped_quantize.block_quantize_groups(
        b, groups, E4M3, rowwise=False, columnwise_block_rows=block_rows
    )
    out = grouped_gemm.block_contract_groups(
        x.columnwise, x.scale_inv, y.columnwise, y.scale_inv, groups, wide, b_block_rows=block_rows
    )
    assert out.dtype is (torch.float32 if wide else torch.bfloat16)
    begin = 0
    for g, count in enumerate(splits):
        own = slice(begin, begin + count)
        begin += count
        if not count:
            assert not out[g].any()
            continue
        left = exact(a[own].t().contiguous(), E5M2)
        right = exact(b[own].t().contiguous(), E4M3, block_rows).t()
        rounding = 2.0**-20 if wide else ROUNDING
        assert_close(out[g], left @ right, left.abs() @ right.abs(), rounding)


def test_nan_stays_in_its_group(device):
    splits = [37, 5, 90, 130, 16]
    a, b = torch.randn(300, 144), [torch.randn(40, 144) for _ in splits]
    a[40], b[3][:] = float("nan"), float("nan")
    a, b = a.to(device), [w.to(device) for w in b]
    groups = made(300, splits, device)
    x = grouped_quantize.block_quantize_groups(a, groups, E4M3)
    w = grouped_quantize.block_quantize_matrices(b, E4M3)
    out = grouped_gemm.block_multiply_groups(
        x.rowwise, x.row_scale_inv, w.rowwise, w.row_scale_inv, groups
    )
    bad = torch.isnan(out[:278]).all(1).cpu()
    assert bad.nonzero().flatten().tolist() == [40, *range(132, 262)]
    assert not torch.isnan(out[:278][~bad]).any()
    grads = grouped_gemm.block_contract_groups(
        x.columnwise, x.scale_inv, x.columnwise, x.scale_inv, groups
    )
    assert torch.isnan(grads).flatten(1).any(1).tolist() == [False, True, False, False, False]


@needs_cuda
def test_more_elements_than_int32_counts():
    """Offsets of rows and of stacked weights pass 2^31."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("not enough memory")
    rows, k, splits = 1 << 19, 4224, [1 << 19]
    a = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
    a[-1] = 1
    groups = made(rows, splits, torch.device("cuda"))
    x = grouped_quantize.block_quantize_groups(a, groups, E4M3)
    w = grouped_quantize.block_quantize_matrices([torch.ones(8, k, device="cuda")], E4M3)
    out = grouped_gemm.block_multiply_groups(
        x.rowwise, x.row_scale_inv, w.rowwise, w.row_scale_inv, groups
    )
    assert (out[-1] == k).all()
    assert not out[:-1].any()
    grad = grouped_gemm.block_contract_groups(
        x.columnwise[:8], x.scale_inv[:, :8].contiguous(), x.columnwise, x.scale_inv, groups
    )
    assert (grad == 1).all()
