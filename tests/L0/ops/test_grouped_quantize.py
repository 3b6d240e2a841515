"""grouped_quantize against its plain-PyTorch reference, bit for bit, on each device."""

import pytest
import torch
from checks import DTYPES, FP8, assert_same_bits, codes, in_pairs, needs_cuda, needs_memory
from group_layouts import LAYOUTS, made, nan_behind, scales

from apex_te.ops import grouped_quantize as op


def assert_group_codes(out, groups, x, splits, scale, fp8, amax):
    """Codes, transposed codes, inverse scales and amaxes are those of the reference."""
    ends = [0, *groups.ends.tolist()]
    columns = [0, *groups.column_ends.tolist()]
    for g, expected in enumerate(op.reference(x.cpu(), splits, scale.cpu(), fp8)):
        rows, cols = slice(ends[g], ends[g + 1]), slice(columns[g], columns[g + 1])
        if out.rowwise is not None:
            assert torch.equal(codes(out.rowwise)[rows], codes(expected[0]))
            inverse = out.row_scale_inv.cpu()[rows]
            assert inverse.eq(1 / scale[g].cpu()).all()
        if out.columnwise is not None:
            assert torch.equal(codes(out.columnwise)[:, cols], codes(expected[1]))
        assert_same_bits(amax[g : g + 1], expected[2])
    assert torch.equal(out.scale_inv.cpu(), 1 / scale.cpu())


@pytest.mark.parametrize(
    ("rows", "splits"),
    [
        (10, [5, -1, 6]),
        (10, [5, 6]),
        (4, [2**31 - 1, 2**31 - 1]),
        (4, [2**62, 2**62, 2**62, 2**62]),
    ],
)
def test_splits_that_are_none_poison_everything(device, rows, splits):
    groups = made(rows, splits, device, True)
    assert torch.equal(groups.table.cpu(), op.reference_table(torch.tensor(splits), rows))
    x, count = torch.randn(rows, 16, device=device), len(splits)
    out = op.quantize_groups(x, groups, scales(count, device), FP8[0])
    assert out.scale_inv.isnan().all()
    given = op.quantize_groups(
        x, groups, scales(count, device), FP8[0], scale_inv=torch.ones(count, device=device)
    )
    assert given.scale_inv.isnan().all()
    assert not codes(out.columnwise)[:, : 16 * count].any()
    result = torch.zeros(rows, 16, device=device)
    op.finish_rows(result, groups)
    assert result.isnan().all()
    grads = torch.zeros(count, 4, 4, device=device)
    op.zero_unused(grads, groups)
    assert grads.isnan().all()
    assert op.column_sums(x, groups).isnan().all()


@in_pairs(fp8=FP8, dtype=DTYPES, cols=[16, 129])
@pytest.mark.parametrize(("rows", "splits"), LAYOUTS, ids=lambda v: str(v)[:24])
def test_fwd(device, poison, rows, splits, cols, dtype, fp8):
    x = nan_behind(torch.randn(rows, cols) * 30, splits).to(device, dtype)
    groups, scale = made(rows, splits, device), scales(len(splits), device)
    amax = torch.zeros(len(splits), device=device)
    out = op.quantize_groups(x, groups, scale, fp8, amax=amax)
    assert_group_codes(out, groups, x, splits, scale, fp8, amax)
    for rowwise, columnwise in ((True, False), (False, True), (False, False)):
        again = torch.zeros_like(amax)
        part = op.quantize_groups(
            x, groups, scale, fp8, rowwise=rowwise, columnwise=columnwise, amax=again
        )
        assert (part.rowwise is not None, part.columnwise is not None) == (rowwise, columnwise)
        assert_same_bits(again, amax)
        if rowwise or columnwise:
            assert_group_codes(part, groups, x, splits, scale, fp8, again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_16_bit_patterns(device, dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = (x if dtype is not torch.bfloat16 else x.view(torch.bfloat16)).reshape(256, 256)
    x = x.to(dtype).to(device)
    splits = [100, 60, 0, 96]
    groups, scale = made(256, splits, device), scales(4, device)
    amax = torch.zeros(4, device=device)
    out = op.quantize_groups(x, groups, scale, FP8[0], amax=amax)
    for g, expected in enumerate(op.reference(x.cpu(), splits, scale.cpu(), FP8[0])):
        begin = sum(splits[:g])
        assert torch.equal(codes(out.rowwise)[begin : begin + splits[g]], codes(expected[0]))
        found, wanted = amax[g].cpu(), expected[2][0]
        assert found == wanted or (found.isnan() and wanted.isnan())


def test_state_columns_and_accumulation(device):
    """Scales and amaxes may be columns of a module's state; amax keeps what is larger."""
    history = torch.zeros(3, 12, device=device)
    all_scales = torch.rand(12, device=device) + 1
    x = torch.randn(48, 32, device=device)
    splits = [16, 0, 20, 12]
    groups = made(48, splits, device)
    slots, scale = history[0, 1::3], all_scales[1::3]
    slots[3] = 1e6
    slots[0] = float("inf")
    x[20, 5] = float("nan")
    out = op.quantize_groups(x, groups, scale, FP8[0], amax=slots)
    assert torch.equal(out.scale_inv, 1 / scale)
    assert slots.tolist()[0] == float("inf")
    assert slots.tolist()[1] == 0
    assert slots[2].isnan()
    assert slots.tolist()[3] == 1e6
    assert history.count_nonzero() == 3


@in_pairs(
    fp8=FP8, dtype=DTYPES, shape=[(16, 32), (17, 9), (300, 160), (1, 1)], splits=[None, [3, 0, 1]]
)
def test_matrices(device, poison, shape, dtype, fp8, splits):
    matrices = [(torch.randn(shape) * 3).to(device, dtype) for _ in range(3)]
    groups = None if splits is None else made(8, splits, device)
    scale, amax = scales(3, device), torch.zeros(3, device=device)
    out = op.quantize_matrices(matrices, scale, fp8, groups=groups, amax=amax)
    for g, matrix in enumerate(matrices):
        if splits is not None and not splits[g]:
            assert amax[g] == 0
            continue
        ((expected, _, largest),) = op.reference(
            matrix.cpu(), [shape[0]], scale[g : g + 1].cpu(), fp8
        )
        assert torch.equal(codes(out.rowwise)[g], codes(expected))
        assert torch.equal(codes(out.columnwise)[g], codes(expected).t())
        assert_same_bits(amax[g : g + 1], largest)
    assert torch.equal(out.scale_inv, 1 / scale)


def test_more_matrices_than_a_launch_takes(device):
    matrices = [torch.full((2, 3), float(i), device=device) for i in range(300)]
    amax = torch.zeros(300, device=device)
    op.quantize_matrices(matrices, torch.ones(300, device=device), FP8[0], amax=amax)
    assert amax.tolist() == list(range(300))


def test_only_what_is_due(device):
    x = torch.randn(40, 16, device=device)
    splits, due = [10, 10, 0, 20], torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=device)
    groups, amax = made(40, splits, device), torch.zeros(4, device=device)
    op.quantize_groups(x, groups, amax, FP8[0], rowwise=False, columnwise=False, amax=amax, due=due)
    assert amax.tolist() == [x[:10].abs().max().item(), 0, 0, 0]
    matrices, amax = list(x.split(10)), torch.zeros(4, device=device)
    op.quantize_matrices(
        matrices, amax, FP8[0], groups=groups, rowwise=False, columnwise=False, amax=amax, due=due
    )
    assert amax.tolist() == [x[:10].abs().max().item(), 0, 0, 0]


def test_matrices_that_are_not_due_keep_what_they_have(device):
    matrices = list(torch.randn(3, 32, 48, device=device).bfloat16())
    scale, due = scales(3, device), torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    first = op.quantize_matrices(matrices, scale, FP8[0])
    before = [x.clone() for x in first[:3]]
    expected = op.quantize_matrices(matrices, 2 * scale, FP8[0])
    amax = torch.zeros(3, device=device)
    again = op.quantize_matrices(matrices, 2 * scale, FP8[0], amax=amax, due=due, out=first)
    assert again is first
    for now, was, new in zip(again[:3], before, expected[:3], strict=True):
        for g in range(3):
            assert_same_bits(now[g], (new if due[g] else was)[g])
    wanted = [matrix.abs().max().item() for matrix in matrices]
    assert amax.tolist() == [wanted[0], 0, wanted[2]]


def test_no_rows(device):
    groups = made(0, [0, 0], device)
    out = op.quantize_groups(
        torch.empty(0, 16, device=device), groups, torch.ones(2, device=device), FP8[0]
    )
    assert not codes(out.columnwise).any()
    assert torch.equal(out.scale_inv.cpu(), torch.ones(2))
    op.finish_rows(torch.empty(0, 16, device=device), groups)
    assert not op.column_sums(torch.empty(0, 16, device=device), groups).any()


def test_same_bits_on_devices_and_again(device):
    splits = [100, 0, 31, 300]
    x, scale = torch.randn(500, 264).bfloat16(), scales(4, "cpu")
    x = nan_behind(x, splits)
    results = []
    for where in (device, device, torch.device("cpu")):
        groups, amax = made(500, splits, where), torch.zeros(4, device=where)
        out = op.quantize_groups(x.to(where), groups, scale.to(where), FP8[1], amax=amax)
        last = groups.column_ends[-1]
        sums = op.column_sums(x.to(where), groups)
        results.append((out.rowwise[:431], out.columnwise[:, :last].contiguous(), amax, sums))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_rejects_groups_and_matrices():
    with pytest.raises(TypeError, match="splits must have dtype int32 or int64, got float32"):
        op.groups_of(torch.zeros(2), 4)
    with pytest.raises(NotImplementedError, match="groups must be 1 to 1023, got 1024"):
        op.groups_of(torch.zeros(1024, dtype=torch.int32), 4)
    with pytest.raises(NotImplementedError, match="groups must be 1 to 1023, got 0"):
        op.groups_of(torch.zeros(0, dtype=torch.int32), 4)
    with pytest.raises(NotImplementedError, match="rows must be from 0 to 2\\^31 - 1"):
        op.groups_of(torch.zeros(2, dtype=torch.int32), 2**31 - 2)
    with pytest.raises(ValueError, match=r"matrices\[1\] must have shape \[2, 2\]"):
        op.quantize_matrices([torch.zeros(2, 2), torch.zeros(2, 3)], torch.ones(2), FP8[0])
    one = [torch.randn(4, 8)], torch.ones(1), FP8[0]
    out = op.quantize_matrices(*one, columnwise=False)
    before = out.rowwise.clone()
    for name, value, message in (
        ("rowwise", False, "rowwise must be True or None for an out with that copy, got False"),
        ("columnwise", True, "columnwise must be False or None for an out without that copy, got"),
        ("scale_inv", torch.ones(1), "scale_inv must be out.scale_inv or None where out is given"),
    ):
        with pytest.raises(ValueError, match=f"quantize_matrices: {message}"):
            op.quantize_matrices([torch.ones(4, 8)], *one[1:], out=out, **{name: value})
    assert_same_bits(out.rowwise, before)
    for options in ({}, {"rowwise": True}, {"columnwise": False}, {"scale_inv": out.scale_inv}):
        out.rowwise.view(torch.uint8).fill_(1)
        assert op.quantize_matrices(*one, out=out, **options) is out
        assert_same_bits(out.rowwise, before)
    with pytest.raises(ValueError, match="table must have shape"):
        op.finish_rows(torch.zeros(4, 2), op.Groups(torch.zeros(6, dtype=torch.int32), 4, 2))


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(24)
    rows, cols, splits = 65552, 32784, [16, 65000, 20]
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    groups, amax = made(rows, splits, "cuda"), torch.zeros(3, device="cuda")
    scale = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    out = op.quantize_groups(x, groups, scale, FP8[0], amax=amax)
    for g, (begin, column) in enumerate([(0, 0), (60000, 60000), (65016, 65024)]):
        part = x[begin : begin + 16].cpu()
        expected = codes(op.reference(part, [16], scale[g : g + 1].cpu(), FP8[0])[0][0])
        assert torch.equal(codes(out.rowwise[begin : begin + 16]), expected)
        found = out.columnwise[:, column : column + 16].contiguous()
        assert torch.equal(codes(found).t(), expected)
    largest = max(p.abs().max().item() for p in x[16:65016].split(8192))
    assert amax[1].item() == largest
