"""Groups of another matrix: refused where they are known, never read or written beyond memory."""

from contextlib import nullcontext, suppress

import pytest
import torch
from group_layouts import made, scales

from apex_te.ops import grouped_gemm, moe_permute
from apex_te.ops import grouped_quantize as op
from apex_te.runtime import function

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


def forged():
    """Tables of groups [ends, column ends, used, bad] that are none of 16 rows."""
    tables = [
        [4000, 8000, 4000, 8000, 1, 1, 0],
        [8, 4000, 16, 4000, 1, 1, 0],
        [-4000, 16, 16, 32, 1, 1, 0],
        [16, 8, 16, 32, 1, 1, 0],
        [8, 16, 4000, 8000, 1, 1, 0],
        [8, 16, -16, 16, 1, 1, 0],
        [2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 1, 1, 0],
        [-(2**31), -(2**31), -(2**31), -(2**31), 1, 1, 0],
    ]
    generator = torch.Generator().manual_seed(5)
    for _ in range(100):
        large = torch.randint(-(2**31), 2**31, (6,), generator=generator)
        small = torch.randint(-40, 60, (6,), generator=generator)
        choice = torch.randint(0, 2, (6,), generator=generator).bool()
        tables.append([*torch.where(choice, large, small).tolist(), 0])
    return tables


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
