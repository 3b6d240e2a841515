"""grouped_quantize against its reference, rows of groups, and groups of other tensors."""

from contextlib import nullcontext, suppress

import pytest
import torch
from checks import DTYPES, FP8, assert_same_bits, codes, in_pairs, needs_cuda, needs_memory
from group_layouts import LAYOUTS, forged, made, nan_behind, scales

from apex_te.ops import amax_scale_update, grouped_gemm, moe_permute, reference_codec
from apex_te.ops import grouped_quantize as op
from apex_te.ops.current_scale import current_scale
from apex_te.ops.reference_codec import decode_fp8
from apex_te.runtime import function


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


@in_pairs(
    fp8=FP8, dtype=DTYPES, shape=[(16, 32), (17, 9), (300, 160)], in_blocks=[False, True],
    wanted=[(True, True), (True, False), (False, True)], splits=[None, [3, 0, 1]],
)  # fmt: skip
def test_transposed_stack(device, poison, shape, dtype, fp8, in_blocks, wanted, splits):
    """A stack that is contiguous as [groups, cols, rows] is cast without a copy of it."""
    rows, cols = shape
    stack = (torch.randn(3, cols, rows) * 3).to(device, dtype).transpose(1, 2)
    assert op.lies_transposed(stack)
    assert not op.lies_transposed(stack.contiguous())
    groups = None if splits is None else made(8, splits, device)
    options = {"groups": groups, "rowwise": wanted[0], "columnwise": wanted[1]}
    results, scale = [], scales(3, device)
    for each in (stack, stack.contiguous()):
        if in_blocks:
            results.append(op.block_quantize_matrices(each, fp8, **options))
        else:
            amax = torch.zeros(3, device=device)
            out = op.quantize_matrices(each, scale, fp8, amax=amax, **options)
            results.append(out._replace(row_scale_inv=amax))
    used = [g for g in range(3) if splits is None or splits[g]]
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            found, expected = (t.view(torch.uint8)[used] for t in (found, expected))
            assert torch.equal(found, expected)


@in_pairs(
    fp8=FP8, dtype=DTYPES, shape=[(16, 32), (48, 9), (304, 160)], parts=[2, 3],
    splits=[None, [3, 0, 1]], offset=[0, 1],
)  # fmt: skip
def test_stacks_whose_rows_follow_one_another(
    device, poison, shape, parts, dtype, fp8, splits, offset
):
    """Bitwise as joined ones, wherever their memory begins."""
    size = 3 * shape[0] * shape[1]
    stacks = [
        (torch.randn(size + offset) * 3).to(device, dtype)[offset:].view(3, *shape)
        for _ in range(parts)
    ]
    groups = None if splits is None else made(8, splits, device)
    results = []
    for matrices in (stacks, torch.cat(stacks, 1)):
        amax = torch.zeros(3, device=device)
        scale = torch.tensor([0.5, 1.0, 3.0], device=device)
        out = op.quantize_matrices(matrices, scale, fp8, groups=groups, amax=amax)
        used = [g for g in range(3) if splits is None or splits[g]]
        results.append((codes(out.rowwise)[used], codes(out.columnwise)[used], amax, out.scale_inv))
    assert_same_bits(*results)


def test_stacks_that_are_refused():
    scale = torch.ones(2)
    for stacks, message in (
        ([torch.ones(2, 16, 8), torch.ones(2, 32, 8)], r"matrices\[1\] must have shape"),
        ([torch.ones(2, 8, 8)] * 2, "matrices must have a multiple of 16 rows in several stacks"),
    ):
        with pytest.raises(ValueError, match=message):
            op.quantize_matrices(stacks, scale, FP8[0])
    with pytest.raises(NotImplementedError, match="matrices must be at most 8 stacks, got 9"):
        op.quantize_matrices([torch.ones(2, 16, 8)] * 9, scale, FP8[0])
    with pytest.raises(ValueError, match="a multiple of 128 rows in several stacks, got 16"):
        op.block_quantize_matrices([torch.ones(2, 16, 8)] * 2, FP8[0])


def test_more_matrices_than_a_launch_takes(device):
    matrices = [torch.full((2, 3), float(i), device=device) for i in range(300)]
    amax = torch.zeros(300, device=device)
    op.quantize_matrices(matrices, torch.ones(300, device=device), FP8[0], amax=amax)
    assert amax.tolist() == list(range(300))
    stacks = [torch.full((150, 16, 3), float(i), device=device) for i in (1, 2)]
    stacks[0] += torch.arange(150, device=device)[:, None, None]
    amax = torch.zeros(150, device=device)
    out = op.quantize_matrices(stacks, torch.ones(150, device=device), FP8[0], amax=amax)
    assert amax.tolist() == [max(i, 2) for i in range(1, 151)]
    joined = op.quantize_matrices(torch.cat(stacks, 1), torch.ones(150, device=device), FP8[0])
    assert_same_bits(codes(out.columnwise), codes(joined.columnwise))


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
        ("scale_inv", torch.ones(1), "scale_inv must be out.scale_inv or None if out is given"),
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


@pytest.mark.parametrize(("rows", "splits"), LAYOUTS, ids=lambda v: str(v)[:24])
@pytest.mark.parametrize("int64", [False, True])
def test_offsets(device, poison, rows, splits, int64):
    groups = made(rows, splits, device, int64)
    assert torch.equal(groups.table.cpu(), op.reference_table(torch.tensor(splits), rows))
    assert groups.column_ends[-1] <= groups.columns


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("fp8", FP8)
def test_scales_are_those_of_current_scaling(device, fp8, pow2):
    values = [3.0, 0.0, float("inf"), float("nan"), 1e-42, 0.01]
    amax = torch.tensor(values, device=device)
    scale, scale_inv = op.scales_of(amax, fp8, eps=0.1, pow2=pow2)
    for g, value in enumerate(values):
        one = current_scale(torch.tensor([[value]], device=device), fp8, eps=0.1, pow2=pow2)
        assert_same_bits([scale[g : g + 1], scale_inv[g : g + 1]], [one.scale, one.scale_inv])
        expected = reference_codec.scale_of(amax[g : g + 1].cpu(), torch.finfo(fp8).max, 0.1, pow2)
        assert scale[g].item() == expected.item()


@pytest.mark.parametrize(("margin", "pow2"), [(0, False), (2, False), (-1, True)])
def test_first_scales_are_those_of_an_update(device, margin, pow2):
    values = [3.0, 7.0, 0.0, float("inf"), float("nan"), 1e-42, 5.0]
    splits, flags = [1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]
    amax, due = torch.tensor(values, device=device), torch.tensor(flags, dtype=torch.int32)
    due = due.to(device)
    state = torch.full((2, 21), 5.0, device=device)
    scale, scale_inv = state[0, 1::3], state[1, 1::3]
    op.first_scales(
        amax, made(6, splits, device), due, scale, scale_inv, 448.0, margin=margin, pow2=pow2
    )
    assert due.tolist() == [0, 1, 0, 0, 0, 0, 0]
    expected, inverse = torch.full((2, 7), 5.0)
    history = torch.tensor(values)[None]
    amax_scale_update.amax_scale_update(
        [history], [expected], [inverse], [448.0], margin=margin, pow2=pow2
    )
    for g in range(7):
        taken = splits[g] and flags[g]
        assert scale[g].item() == (expected[g].item() if taken else 5)
        assert scale_inv[g].item() == (inverse[g].item() if taken else 5)
    assert (state[:, ::3] == 5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "splits"), LAYOUTS, ids=lambda v: str(v)[:24])
@pytest.mark.parametrize("cols", [16, 33])
def test_rows(device, rows, splits, cols, dtype):
    groups, total = made(rows, splits, device), sum(splits)
    x = nan_behind(torch.randn(rows, cols), splits).to(device, dtype)
    bias = torch.randn(len(splits), cols).to(device, dtype)
    for added in (None, bias):
        out = x.clone()
        op.finish_rows(out, groups, added)
        expected = x[:total]
        if added is not None:
            parts = zip(expected.split(splits), added, strict=True)
            expected = torch.cat([part + one for part, one in parts])
        assert_same_bits(out[:total], expected)
        assert not out[total:].any()
    sums = op.column_sums(x, groups)
    assert_same_bits(sums, op.column_sums(x, groups))
    for part, found in zip(x[:total].split(splits), sums.cpu(), strict=True):
        exact = part.double().cpu().sum(0)
        rounding = torch.finfo(dtype).eps * exact.abs() + 1e-6 * part.double().cpu().abs().sum(0)
        assert ((found.double() - exact).abs() <= rounding).all()
    matrices = torch.randn(len(splits), 3, cols).to(device, dtype)
    cleared = matrices.clone()
    op.zero_unused(cleared, groups)
    used = torch.tensor(splits) > 0
    assert_same_bits(cleared.cpu()[used], matrices.cpu()[used])
    assert not cleared.cpu()[~used].any()


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("offset", [0, 1])
def test_decode(device, poison, fp8, offset):
    every = torch.arange(256, dtype=torch.uint8).repeat(9)[offset:].view(fp8)
    found = op.decode(every.to(device))
    expected = decode_fp8(every).bfloat16()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.cpu().isnan(), expected.isnan())
    assert torch.equal(found.cpu().nan_to_num(7, 9, 11), expected.nan_to_num(7, 9, 11))
    assert op.decode(every[:0].to(device)).shape == (0,)
    storage = torch.zeros(len(every) + 1, dtype=torch.uint8, device=device)[1:].view(fp8)
    storage.view(torch.uint8).copy_(every.view(torch.uint8))
    assert_same_bits(op.decode(storage), found)
    assert op.decode(every[:48].view(2, 8, 3).to(device)).shape == (2, 8, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 16), (300, 33), (4, 3, 8), (0, 4)])
def test_scale_rows(device, dtype, shape):
    x, factor = torch.randn(shape).to(device, dtype), torch.rand(shape[0], device=device)
    out = x.clone()
    op.scale_rows(out, factor)
    wide = factor.view(-1, *[1] * (len(shape) - 1))
    assert_same_bits(out, (x.float() * wide).to(dtype))


E4M3 = torch.float8_e4m3fn
ROWS, COLS = 16, 256


def guarded(rows, cols, device, dtype=torch.float32):
    """A matrix of ones inside of a buffer of NaN, and what checks that the NaN are left."""
    buffer = torch.full((3 * rows + 8, cols), float("nan"), dtype=dtype, device=device)
    inside = buffer[rows + 4 : 2 * rows + 4]
    inside.fill_(1.0)

    def check():
        assert buffer[: rows + 4].isnan().all()
        assert buffer[2 * rows + 4 :].isnan().all()

    return inside, check


def test_python_knows_the_rows(device):
    groups = made(8000, [4000, 4000], device)
    x = torch.randn(ROWS, COLS, device=device)
    ones = torch.ones(2, device=device)
    expected = r"groups must be of 16 rows, got groups of 8000 rows"
    with pytest.raises(ValueError, match="grouped_quantize: " + expected):
        op.quantize_groups(x, groups, ones, E4M3)
    with pytest.raises(ValueError, match="grouped_finish: " + expected):
        op.finish_rows(x, groups, torch.zeros(2, COLS, device=device))
    with pytest.raises(ValueError, match="grouped_sum: " + expected):
        op.column_sums(x, groups)
    weight = torch.randn(2, 32, COLS, device=device)
    with pytest.raises(ValueError, match="multiply_groups: " + expected):
        grouped_gemm.multiply_groups(x, weight, groups)
    with pytest.raises(ValueError, match="scaled_multiply_groups: " + expected):
        grouped_gemm.scaled_multiply_groups(
            x.to(E4M3), torch.ones(ROWS, device=device), weight.to(E4M3), ones, groups, True
        )
    with pytest.raises(ValueError, match="contract_groups: " + expected):
        grouped_gemm.contract_groups(x.t(), x, groups)


def test_operands_of_other_groups(device):
    groups = made(ROWS, [8, 8], device)
    x = torch.randn(ROWS, COLS, device=device)
    with pytest.raises(ValueError, match=r"multiply_groups: a and b must be .* \[2, N, K\], got"):
        grouped_gemm.multiply_groups(x, torch.randn(3, 32, COLS, device=device), groups)
    with pytest.raises(ValueError, match=r"multiply_groups: a and b must be"):
        grouped_gemm.multiply_groups(x, torch.randn(2, 32, COLS - 1, device=device), groups)
    with pytest.raises(ValueError, match=r"contract_groups: a and b must be \[M, rows\]"):
        grouped_gemm.contract_groups(x, x, groups)


def is_partition(table):
    ends, columns = [0, *table[:2]], [0, *table[2:4]]
    return all(
        ends[g] <= ends[g + 1] <= ROWS
        and columns[g + 1] - columns[g] == max(16, -(-(ends[g + 1] - ends[g]) // 16) * 16)
        for g in range(2)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forged_tables(device, dtype):
    """The CPU refuses them; the GPU, which is not waited for, stays within the matrix."""
    for values in forged():
        assert not is_partition(values)
        table = torch.tensor(values, dtype=torch.int32, device=device)
        groups = op.Groups(table, ROWS, 2)
        x, check = guarded(ROWS, COLS, device, dtype)
        bias = torch.ones(2, COLS, dtype=dtype, device=device)
        amax = torch.zeros(2, device=device)
        if device.type == "cpu":
            expected = r"table must be of groups in 16 rows, got group \d in rows"
            with pytest.raises(ValueError, match="grouped_quantize: " + expected):
                op.quantize_groups(x, groups, scales(2, device), E4M3)
            with pytest.raises(ValueError, match="grouped_sum: " + expected):
                op.column_sums(x, groups)
            for added in (None, bias):
                with pytest.raises(ValueError, match="grouped_finish: " + expected):
                    op.finish_rows(x, groups, added)
            continue
        op.quantize_groups(x, groups, scales(2, device), E4M3, amax=amax)
        assert not amax.isnan().any()  # nothing beyond x was read
        assert not op.column_sums(x, groups).isnan().any()
        op.finish_rows(x, groups, bias)
        op.finish_rows(x, groups)
        check()


@pytest.mark.cuda
@pytest.mark.parametrize("wide", [False, True])
def test_forged_ends_of_products(wide):
    """The kernels of FP8 data cut ends to the matrix."""
    ones = torch.ones(2, device="cuda")
    codes = torch.ones(32, ROWS, device="cuda").to(E4M3)
    for values in forged():
        table = torch.tensor(values, dtype=torch.int32, device="cuda")
        out = grouped_gemm.scaled_contract_groups(codes, ones, codes, ones, table[:2], False, wide)
        total = out.sum(0)
        assert total.min() >= 0
        assert total.max() <= ROWS
        a = torch.ones(ROWS, 32, device="cuda").to(E4M3)
        b = torch.ones(2, 16, 32, device="cuda").to(E4M3)
        grouped_gemm.scaled_multiply_groups(
            a, torch.ones(ROWS, device="cuda"), b, ones, op.Groups(table, ROWS, 2), False
        )
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forged_row_maps(device, dtype):
    """Of moe_permute: entries that are no rows or columns are left out, or give NaN or an error."""
    generator = torch.Generator().manual_seed(6)
    refused = suppress(ValueError) if device.type == "cpu" else nullcontext()
    tokens, width = 8, 3
    for trial in range(100):
        most = 2**31 if trial % 2 else 40
        entries = torch.randint(-most, most, (tokens + 2, 1 + 2 * width), generator=generator)
        row_id_map = entries.to(device, torch.int32)
        x, check = guarded(tokens, COLS, device, dtype)
        probs = torch.ones(tokens, width, device=device)
        moe_permute.permute(x, row_id_map, ROWS, probs)
        permuted, check_permuted = guarded(ROWS, COLS, device, dtype)
        grad_probs = torch.ones(ROWS, device=device)
        calls = (
            lambda m=row_id_map, y=permuted, p=probs: moe_permute.unpermute(y, m, p),
            lambda m=row_id_map, y=permuted, g=grad_probs: moe_permute.permute_bwd(y, m, g),
            lambda m=row_id_map, y=permuted, x=x, p=probs: moe_permute.unpermute_bwd(x, y, m, p),
        )
        for call in calls:
            with refused:
                call()
        chunk_map = torch.randint(-most, most, (2, ROWS), generator=generator)
        moe_permute.sort_chunks(permuted, chunk_map.to(device, torch.int32), grad_probs)
        check()
        check_permuted()


def test_row_maps_of_other_tokens(device):
    mask = torch.ones(8, 3, dtype=torch.bool, device=device)
    made_map = moe_permute.make_map(mask).row_id_map
    x = torch.randn(9, COLS, device=device)
    with pytest.raises(ValueError, match=r"inp must have shape \[8, 256\], got \[9, 256\]"):
        moe_permute.permute(x, made_map, 24)
    chunk_map = moe_permute.make_chunk_map(
        torch.tensor([4, 4], device=device), torch.tensor([1, 0], device=device), 8
    )
    with pytest.raises(ValueError, match=r"chunk_map must have shape \[2, 9\], got \[2, 8\]"):
        moe_permute.sort_chunks(x, chunk_map)


@pytest.mark.parametrize("rows", [-(2**63), -1, 2**31 - 48, 2**31, 2**63 - 49, 2**63 - 1])
def test_rows_without_a_table_are_refused(device, rows):
    splits = torch.tensor([16, 16], dtype=torch.int32, device=device)
    table = torch.full((7,), 9, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match=f"rows must be from 0 .* got {rows}"):
        function("grouped_quantize", "grouped_offsets")(splits, table, rows)
    assert table.tolist() == [9] * 7
