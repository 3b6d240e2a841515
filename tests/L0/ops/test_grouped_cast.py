"""grouped_cast against the ops that it stands for, one after the other."""

import pytest
import torch
from checks import (
    DTYPES,
    FP8,
    assert_adjacent_codes,
    assert_same_bits,
    codes,
    in_pairs,
    needs_cuda,
    needs_memory,
)
from group_layouts import LAYOUTS, forged, made, nan_behind, scales
from swiglu_cases import ACTIVATIONS, CLAMPED

from apex_te.fp8.scheme.base import GroupRows, GroupSource
from apex_te.ops import grouped_cast as op
from apex_te.ops import grouped_quantize, moe_permute
from apex_te.ops.grouped_quantize import Groups
from apex_te.ops.swiglu import ClampedSwiglu, swiglu_bwd, swiglu_fwd

E4M3 = torch.float8_e4m3fn
UNEVEN = (800, [0, 1, 15, 16, 17, 127, 128, 129, 300])
layouts = pytest.mark.parametrize(("rows", "splits"), [UNEVEN, *LAYOUTS], ids=lambda v: str(v)[:24])
KINDS = ["gather", "gated", "gradient"]
NO_ROW = 2**31 - 1  # of tokens, behind the last group


def in_halves(x):
    return torch.cat((x[:, ::2], x[:, 1::2]), 1)


def powers(rows):
    """Factors whose products round to the product of the rounded factor."""
    return 2.0 ** torch.randint(0, 3, (rows,))


def factors(rows, kind, dtype):
    """``powers``; 1 where two ops would round a number below float16's normal ones twice."""
    return torch.ones(rows) if kind == "gated" and dtype is torch.float16 else powers(rows)


def source_of(
    kind, rows, cols, splits, dtype, device, factor=None, activation="silu", has_bias=False,
    interleaved=False,
):  # fmt: skip
    """A source; rows after the last group are NaN, or refer to rows that x does not have."""
    factor = None if factor is None else factor.to(device)
    if kind == "gather":
        tokens = rows // 2 + 3
        row_of = torch.randint(-1, tokens, (rows,), dtype=torch.int32)
        row_of[sum(splits) :] = NO_ROW
        x = torch.randn(tokens, cols) * 3
        return op.Gather(x.to(device, dtype), row_of.to(device), factor)
    x = nan_behind(torch.randn(rows, 2 * cols) * 2, splits).to(device, dtype)
    bias = torch.randn(len(splits), 2 * cols).to(device, dtype) if has_bias else None
    if kind == "gated":
        return op.Gated(x, factor, activation, bias, interleaved)
    grad = nan_behind(torch.randn(rows, cols), splits).to(device, dtype)
    return op.GatedGradient(grad, x, factor, activation, bias, interleaved)


def rows_of(source, groups=None):
    """The rows of a source, by other ops; of factors only powers of two."""

    def scaled(x):
        if source.factor is None:
            return x
        return (x.float() * source.factor[:, None]).to(x.dtype)

    if isinstance(source, op.Gather):
        row_of = source.row_of.long().clamp(max=len(source.x) - 1)
        return scaled(torch.where(row_of[:, None] < 0, 0, source.x[row_of.clamp(min=0)]))
    x = source.x
    if source.bias is not None:
        x = x.clone()
        grouped_quantize.finish_rows(x, groups, source.bias)
    if source.interleaved:
        x = in_halves(x)
    if isinstance(source, op.Gated):
        return scaled(swiglu_fwd(x, activation=source.activation))
    out = swiglu_bwd(scaled(source.grad), x, activation=source.activation).input
    return torch.stack(out.chunk(2, 1), 2).flatten(1) if source.interleaved else out


def layouts_of(t):
    """(name, tensor equal to t) one element behind an aligned address, and with gaps."""
    offset = t.new_empty(t.numel() + 1)[1:].view(t.shape)
    strided = t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2]
    return [("offset", offset.copy_(t)), ("strided", strided.copy_(t))]


def assert_same_cast(found, expected, groups, total, in_blocks=False):
    """Two outputs are equal where the groups are."""
    last = int(groups.column_ends[-1])
    if expected.rowwise is not None:
        assert torch.equal(codes(found.rowwise)[:total], codes(expected.rowwise)[:total])
        scale_inv = [o.row_scale_inv[..., :total].contiguous() for o in (found, expected)]
        assert_same_bits(scale_inv[:1], scale_inv[1:])
    if expected.columnwise is not None:
        assert torch.equal(codes(found.columnwise)[:, :last], codes(expected.columnwise)[:, :last])
    if not in_blocks:
        assert_same_bits([found.scale_inv], [expected.scale_inv])
        return
    if expected.columnwise is None:
        return
    begins, rows = [0, *groups.column_ends.tolist()], [0, *groups.ends.tolist()]
    for g, begin in enumerate(begins[:-1]):
        line = begin // 128 + g
        lines = slice(line, line + max(1, -(-(rows[g + 1] - rows[g]) // 128)))
        assert_same_bits([found.scale_inv[lines]], [expected.scale_inv[lines]])


@in_pairs(
    kind=KINDS, cols=[16, 136, 256, 20], dtype=DTYPES, fp8=FP8, has_factor=[False, True],
    has_bias=[False, True],
)  # fmt: skip
@layouts
def test_one_scale_a_group(
    device, poison, rows, splits, kind, cols, dtype, fp8, has_factor, has_bias
):
    # Without vectors, gated rows with factors are computed in float32, on a GPU by finer functions.
    has_factor = has_factor and (kind == "gather" or cols % 8 == 0)
    factor = factors(rows, kind, dtype) if has_factor else None
    source = source_of(kind, rows, cols, splits, dtype, device, factor, has_bias=has_bias)
    groups, scale = made(rows, splits, device), scales(len(splits), device)
    given = rows_of(source, groups)
    for rowwise, columnwise in ((True, True), (True, False), (False, True), (False, False)):
        wanted = {"rowwise": rowwise, "columnwise": columnwise}
        amaxes = [torch.zeros(len(splits), device=device) for _ in range(2)]
        found = op.quantize_source(source, groups, scale, fp8, amax=amaxes[0], **wanted)
        expected = grouped_quantize.quantize_groups(
            given, groups, scale, fp8, amax=amaxes[1], **wanted
        )
        assert_same_bits(amaxes[:1], amaxes[1:])
        if rowwise or columnwise:
            assert_same_cast(found, expected, groups, sum(splits))


@in_pairs(
    kind=KINDS, cols=[128, 256, 384], dtype=DTYPES, fp8=FP8, has_factor=[False, True],
    wanted=[(True, True), (True, False), (False, True)],
    options=[{}, {"pow2": False}, {"eps": 2.0}, {"scales": "server"}], has_bias=[False, True],
)  # fmt: skip
@layouts
def test_blocks(
    device, poison, rows, splits, kind, cols, dtype, fp8, has_factor, wanted, options, has_bias
):
    factor = factors(rows, kind, dtype) if has_factor else None
    source = source_of(kind, rows, cols, splits, dtype, device, factor, has_bias=has_bias)
    groups = made(rows, splits, device)
    options = {**options, "rowwise": wanted[0], "columnwise": wanted[1]}
    found = op.block_quantize_source(source, groups, fp8, **options)
    given = rows_of(source, groups)
    expected = grouped_quantize.block_quantize_groups(given, groups, fp8, **options)
    assert_same_cast(found, expected, groups, sum(splits), in_blocks=True)


@pytest.mark.parametrize("cols", [16, 136, 300, 7])
@pytest.mark.parametrize("kind", ["gather", "gated"])
def test_blocks_of_other_columns(device, poison, kind, cols):
    rows, splits = UNEVEN
    source = source_of(kind, rows, cols, splits, torch.bfloat16, device)
    groups = made(rows, splits, device)
    found = op.block_quantize_source(source, groups, E4M3)
    expected = grouped_quantize.block_quantize_groups(rows_of(source), groups, E4M3)
    assert_same_cast(found, expected, groups, sum(splits), in_blocks=True)


@pytest.mark.cover(3)
@in_pairs(
    activation=ACTIVATIONS, dtype=DTYPES, kind=KINDS[1:], in_blocks=[False, True],
    has_bias=[False, True],
)  # fmt: skip
def test_activations(device, poison, activation, dtype, kind, in_blocks, has_bias):
    splits = [40, 0, 77]
    source = source_of(
        kind, 128, 128, splits, dtype, device, activation=activation, has_bias=has_bias
    )
    groups = made(128, splits, device)
    given = rows_of(source, groups)
    if in_blocks:
        found = op.block_quantize_source(source, groups, E4M3)
        expected = grouped_quantize.block_quantize_groups(given, groups, E4M3)
    else:
        scale = scales(3, device)
        found = op.quantize_source(source, groups, scale, E4M3)
        expected = grouped_quantize.quantize_groups(given, groups, scale, E4M3)
    assert_same_cast(found, expected, groups, 117, in_blocks)


@in_pairs(
    dtype=DTYPES, kind=KINDS[1:], cols=[128, 384, 136, 72, 20], in_blocks=[False, True],
    has_bias=[False, True], activation=[*CLAMPED, "gelu"], has_factor=[False, True],
)  # fmt: skip
@layouts
def test_interleaved(
    device, poison, rows, splits, dtype, kind, cols, in_blocks, has_bias, activation, has_factor
):
    """Gates and ups that alternate, and their gradients in this order."""
    cols = cols // 128 * 128 or 128 if in_blocks and kind == "gradient" else cols
    by_ops = activation == "gelu" or not has_bias
    factor = factors(rows, kind, dtype) if has_factor and cols % 8 == 0 else None
    if by_ops and device.type == "cuda":  # which compute factors by finer functions on a GPU
        factor = None
    source = source_of(
        kind, rows, cols, splits, dtype, device, factor, activation, has_bias, interleaved=True
    )
    groups, scale = made(rows, splits, device), scales(len(splits), device)
    grads, halves = {}, source._replace(interleaved=False)
    if kind == "gradient":
        x = in_halves(source.x)
        if by_ops:  # whose sums have another order
            x = dict(layouts_of(x))["offset"]
        halves = halves._replace(x=x)
        grads = {"factor_grad": torch.empty(rows, device=device)}
        if has_bias:
            halves = halves._replace(bias=in_halves(source.bias))
            grads["bias_grad"] = torch.empty_like(source.bias)
    wanted = {key: torch.empty_like(t) for key, t in grads.items()}
    given = rows_of(source, groups)
    if in_blocks:
        found = op.block_quantize_source(source, groups, E4M3, **grads)
        expected = grouped_quantize.block_quantize_groups(given, groups, E4M3)
    else:
        found = op.quantize_source(source, groups, scale, E4M3, **grads)
        expected = grouped_quantize.quantize_groups(given, groups, scale, E4M3)
    assert_same_cast(found, expected, groups, sum(splits), in_blocks)
    if grads:
        op.quantize_source(halves, groups, scale, E4M3, **wanted)
        if has_bias:
            grads["bias_grad"] = in_halves(grads["bias_grad"])
        assert_same_bits(list(grads.values()), list(wanted.values()))


def exact_rows(source):
    """The rows of a gated source or gradient in float64, and the gradient of its factor."""
    x = source.x.double()
    gate, up = x.chunk(2, -1)
    s, by = gate.sigmoid(), source.factor.double()[:, None]
    if isinstance(source, op.Gated):
        return gate * s * up * by, None
    grad = source.grad.double()
    rows = torch.cat([grad * by * up * s * (1 + gate * (1 - s)), grad * by * gate * s], 1)
    return rows, (grad * gate * s * up).sum(1)


@in_pairs(kind=KINDS[1:], dtype=DTYPES, cols=[64, 200], fp8=FP8)
def test_any_factors(device, poison, kind, dtype, cols, fp8):
    """Products with the factor are rounded once."""
    splits, scale = [100, 56], torch.full((2,), 8.0, device=device)
    source = source_of(kind, 160, cols, splits, dtype, device, torch.rand(160))
    groups = made(160, splits, device)
    found = op.quantize_source(source, groups, scale, fp8)
    exact = exact_rows(source)[0].to(dtype)
    expected = grouped_quantize.quantize_groups(exact, groups, scale, fp8)
    assert_adjacent_codes(found.rowwise[:156], expected.rowwise[:156], 200)


@in_pairs(dtype=DTYPES, cols=[128, 200, 384, 9, 8], has_factor=[False, True])
def test_gradient_of_factors(device, poison, dtype, cols, has_factor):
    rows, splits = 400, [3, 0, 290, 17]
    factor = torch.rand(rows) if has_factor else None
    source = source_of("gradient", rows, cols, splits, dtype, device, factor)
    groups, scale = made(rows, splits, device), scales(4, device)
    found = [torch.full((rows,), 7.0, device=device) for _ in range(3)]
    for each in found[:2]:
        op.quantize_source(source, groups, scale, E4M3, factor_grad=each)
    assert_same_bits(found[:1], found[1:2])
    total = sum(splits)
    assert not found[0][total:].any()
    ones = source._replace(factor=torch.ones(rows, device=device))
    exact = exact_rows(ones)[1][:total]
    magnitude = (source.grad.double() * swiglu_fwd(source.x.double().float())).abs().sum(1)
    assert ((found[0][:total] - exact).abs() <= 1e-5 * magnitude[:total]).all()
    if cols % 128 == 0:
        op.block_quantize_source(source, groups, E4M3, factor_grad=found[2])
        assert_same_bits(found[:1], found[2:])


@in_pairs(
    dtype=DTYPES, cols=[128, 200, 384, 9], in_blocks=[False, True], activation=ACTIVATIONS,
    has_factor=[False, True],
)  # fmt: skip
@layouts
def test_gradient_of_biases(
    device, poison, rows, splits, dtype, cols, in_blocks, activation, has_factor
):
    """The sums of the rounded rows in float32, rounded; the same bits each time."""
    cols = cols // 128 * 128 or 128 if in_blocks else cols
    factor = powers(rows) if has_factor and cols % 8 == 0 else None  # as in test_one_scale_a_group
    source = source_of("gradient", rows, cols, splits, dtype, device, factor, activation, True)
    groups, scale = made(rows, splits, device), torch.ones(len(splits), device=device)
    shape = len(splits), 2 * cols
    found = [torch.full(shape, 7.0, dtype=dtype, device=device) for _ in range(2)]
    for each in found:
        if in_blocks:
            op.block_quantize_source(source, groups, E4M3, bias_grad=each, columnwise=False)
        else:
            op.quantize_source(source, groups, scale, E4M3, bias_grad=each)
    assert_same_bits(found[:1], found[1:])
    given = rows_of(source, groups).double()
    for g, part in enumerate(given[: sum(splits)].split(splits)):
        exact, error = part.sum(0), 1e-5 * part.abs().sum(0)  # of sums in float32
        low, high = (exact - error).to(dtype), (exact + error).to(dtype)
        assert ((low <= found[0][g]) & (found[0][g] <= high)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_row_and_group(device, kind, in_blocks, value):
    rows, splits = 96, [20, 30, 0, 40]
    source = source_of(kind, rows, 128, splits, torch.bfloat16, device)
    groups, scale = made(rows, splits, device), scales(4, device)
    row = 25
    if kind == "gather":
        source.row_of[row] = 5
        source.row_of[:row][source.row_of[:row] == 5] = 6
        source.row_of[row + 1 :][source.row_of[row + 1 :] == 5] = 6
    x = source.x.clone()
    x[5 if kind == "gather" else row, 3] = value
    broken = source._replace(x=x)
    results = []
    for each in (source, broken):
        amax = torch.zeros(4, device=device)
        if in_blocks:
            out = op.block_quantize_source(each, groups, E4M3)
        else:
            out = op.quantize_source(each, groups, scale, E4M3, amax=amax)
        results.append((codes(out.rowwise)[: sum(splits)], amax.cpu()))
    (before, amax), (after, new_amax) = results
    assert (before != after).any(1).nonzero().flatten().tolist() == [row]
    if not in_blocks:
        assert not new_amax[1].isfinite()
        assert_same_bits([new_amax[[0, 2, 3]]], [amax[[0, 2, 3]]])


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_due(device, kind):
    rows, splits = 96, [20, 30, 0, 40]
    source = source_of(kind, rows, 64, splits, torch.bfloat16, device)
    groups, amax = made(rows, splits, device), torch.zeros(4, device=device)
    due = torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=device)
    op.quantize_source(
        source, groups, amax, E4M3, rowwise=False, columnwise=False, amax=amax, due=due
    )
    assert amax.tolist() == [rows_of(source)[:20].abs().max().item(), 0, 0, 0]


@pytest.mark.parametrize("row", [-2, 51, NO_ROW])
def test_rows_that_x_does_not_have(device, row):
    rows, splits = 96, [20, 30, 0, 40]
    source = source_of("gather", rows, 64, splits, torch.bfloat16, device, torch.rand(rows))
    source.row_of[33] = row
    groups, scale = made(rows, splits, device), scales(4, device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"row_of must hold rows of x or -1, got {row}"):
            op.quantize_source(source, groups, scale, E4M3)
        return
    out = op.quantize_source(source, groups, scale, E4M3)
    is_nan = (codes(out.rowwise)[:90] == 0x7F).all(1)
    assert is_nan.nonzero().flatten().tolist() == [33]


@pytest.mark.parametrize("kind", KINDS)
def test_splits_that_are_none(device, kind):
    source = source_of(kind, 10, 128, [10], torch.bfloat16, device)
    groups = made(10, [5, -1, 6], device)
    out = op.quantize_source(source, groups, scales(3, device), E4M3)
    assert out.scale_inv.isnan().all()
    op.block_quantize_source(source, groups, E4M3)


def guarded(like):
    """A tensor like another one inside of a buffer of 7s, and what checks that these are left."""
    size = like.numel() * like.element_size()
    buffer = torch.full((size + 8192,), 7, dtype=torch.uint8, device=like.device)
    inside = buffer[4096 : 4096 + size].view(like.dtype).view(like.shape)

    def check():
        assert (buffer[:4096] == 7).all()
        assert (buffer[4096 + size :] == 7).all()

    return inside, check


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_forged_tables(kind, interleaved):
    """Whatever a table says, what is read and written exists."""
    device = torch.device("cuda")
    source = source_of(
        kind, 16, 128, [16, 0], torch.bfloat16, device, torch.ones(16), ClampedSwiglu(), True,
        interleaved,
    )  # fmt: skip
    args = op._arguments("test", source, made(16, [16, 0], device), None, None)[0]
    if kind == "gradient":
        lines, check_lines = guarded(torch.zeros(3, 256, device=device))
        args = args._replace(partials=torch.zeros(1, 16, device=device), lines=lines)
    shape = (16, 256 if kind == "gradient" else 128)
    for values in forged():
        table = torch.tensor(values, dtype=torch.int32, device=device)
        groups, amax = Groups(table, 16, 2), torch.zeros(2, device=device)
        one, blocks = (
            grouped_quantize.allocate("test", amax, shape, groups, E4M3, True, True, None),
            grouped_quantize.allocate_blocks("test", amax, shape, groups, E4M3, True, True),
        )
        (one, checks), (blocks, more) = (zip(*map(guarded, o), strict=True) for o in (one, blocks))
        row, col, scale_inv, of_rows = one
        op._cast(*args, table, scales(2, device), scale_inv, row, col, of_rows, amax, None, False)
        row, col, col_scales, row_scales = blocks
        op._block_cast(*args, table, row, row_scales, col, col_scales, 1, 0.0, 1)
        assert not amax.isnan().any()
        for check in (*checks, *more, *([check_lines] if kind == "gradient" else ())):
            check()


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_run(kind):
    """The kernels, not the ops that they stand for, compute what they take."""
    device = torch.device("cuda")
    for activation, interleaved in (("gelu", False), (ClampedSwiglu(), False), (CLAMPED[0], True)):
        source = source_of(
            kind, 64, 128, [64], torch.bfloat16, device, None, activation, True, interleaved
        )
        args = op._arguments("test", source, made(64, [64], device), None, None)[0]
        assert op._has_kernel(args)
        assert not op._has_kernel(args._replace(x=args.x.cpu()))


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_more_elements_than_int32_counts(kind):
    needs_memory(40)
    rows, cols, splits = 1 << 18, 8448, [17, (1 << 18) - 17]
    device = torch.device("cuda")
    x = torch.zeros(rows, cols if kind == "gather" else 2 * cols, device=device).bfloat16()
    x[-1] = 2
    if kind == "gather":
        row_of = torch.arange(rows, device=device, dtype=torch.int32)
        source, expected = op.Gather(x, row_of), 2.0
    elif kind == "gated":
        source, expected = op.Gated(x, activation="relu"), 4.0
    else:
        grad = torch.ones(rows, cols, device=device).bfloat16()
        source, expected = op.GatedGradient(grad, x, activation="relu"), 2.0
    groups, scale = made(rows, splits, device), torch.ones(2, device=device)
    out = op.quantize_source(source, groups, scale, E4M3)
    assert (out.rowwise[-1].float() == expected).all()
    assert not codes(out.rowwise[:-1:4096]).any()
    column = int(groups.column_ends[0]) + splits[1] - 1
    assert (out.columnwise[:, column].float() == expected).all()
    blocks = op.block_quantize_source(source, groups, E4M3)
    last = blocks.rowwise[-1].float() * blocks.row_scale_inv[:, rows - 1].repeat_interleave(128)
    assert (last == expected).all()


@pytest.mark.parametrize("top_k", [1, 8])
def test_permutation_and_its_gradients(device, top_k):
    """Casts by the map's other direction are casts of what moe_permute makes."""
    tokens, hidden, experts = 150, 64, 9
    indices = torch.rand(tokens, experts).topk(top_k).indices.int()
    indices[3, 0] = -1
    rows = tokens * top_k + 5
    x, probs = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, top_k)
    indices, x, probs = (t.to(device) for t in (indices, x, probs))
    route = moe_permute.make_map(indices, map_type="index", num_experts=experts)
    permuted, of_rows = moe_permute.permute(x, route.row_id_map, rows, probs)
    row_of, _ = moe_permute.tokens_of_rows(route.row_id_map, rows)
    groups = grouped_quantize.groups_of(route.tokens_per_expert, rows)
    total, scale = tokens * top_k - 1, scales(experts, device)
    assert (row_of[total:] == -1).all()
    grads, _ = moe_permute.unpermute_bwd(x, permuted, route.row_id_map, probs)
    for source, given in ((op.Gather(x, row_of), permuted), (op.Gather(x, row_of, of_rows), grads)):
        found = op.quantize_source(source, groups, scale, E4M3)
        expected = grouped_quantize.quantize_groups(given, groups, scale, E4M3)
        assert_same_cast(found, expected, groups, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeats", [1, 4])
def test_amax_of_rows_that_are_gathered_several_times(device, dtype, repeats):
    """Schemes measure each row of x once; the groups' values are those of all of their rows."""
    x = torch.randn(60, 72).to(device, dtype)
    x[5, 7], x[11, 70], x[12] = float("nan"), float("inf"), 0
    index = torch.randperm(60).repeat(repeats).int().to(device)
    index[::9] = -1
    splits = [0, 7 * repeats, 1, 50 * repeats, 0]
    groups = made(60 * repeats, splits, device)
    amax = torch.zeros(len(splits), device=device)
    GroupSource(op.Gather(x, index), groups).measure(amax, E4M3)
    rows = torch.where(index[:, None] < 0, 0, x[index.clamp(min=0).long()])
    expected = torch.zeros_like(amax)
    GroupRows(rows.to(dtype), groups).measure(expected, E4M3)
    assert_same_bits(amax.nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [256, 20])
def test_same_bits_again_and_of_gathers_on_devices(device, kind, cols):
    rows, splits = UNEVEN
    source = source_of(kind, rows, cols, splits, torch.float16, device, torch.rand(rows))
    scale, total = scales(len(splits), device), sum(splits)
    results = []
    for where in (device, device, torch.device("cpu") if kind == "gather" else device):
        own = source._make(t.to(where) if isinstance(t, torch.Tensor) else t for t in source)
        groups, amax = made(rows, splits, where), torch.zeros(len(splits), device=where)
        out = op.quantize_source(own, groups, scale.to(where), E4M3, amax=amax)
        last = int(groups.column_ends[-1])
        results.append((out.rowwise[:total], out.columnwise[:, :last].contiguous(), amax))
        if cols % 128 == 0:
            out = op.block_quantize_source(own, groups, E4M3)
            scale_inv = out.row_scale_inv[:, :total].contiguous()
            columnwise = out.columnwise[:, :last].contiguous()
            results[-1] = (*results[-1], out.rowwise[:total], columnwise, scale_inv)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_storage(device, kind, dtype):
    """Offsets that vectors do not fit, and strides, give the same bits."""
    splits = [40, 0, 77]
    factor = powers(128) if kind == "gather" else None
    source = source_of(kind, 128, 128, splits, dtype, device, factor)
    groups, scale = made(128, splits, device), scales(3, device)
    expected = op.quantize_source(source, groups, scale, E4M3)
    tensors = [t for t in source if isinstance(t, torch.Tensor)]
    stored = [dict(layouts_of(t)) for t in tensors]
    for name in ("offset", "strided"):
        others = iter(each[name] for each in stored)
        found = op.quantize_source(
            source._make(next(others) if isinstance(t, torch.Tensor) else t for t in source),
            groups, scale, E4M3,
        )  # fmt: skip
        assert_same_cast(found, expected, groups, 117)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_no_columns(device, kind):
    for rows, cols in ((0, 128), (40, 0)):
        splits = [0, rows]
        source = source_of(kind, rows, cols, splits, torch.bfloat16, device)
        groups, scale = made(rows, splits, device), scales(2, device)
        found = op.quantize_source(source, groups, scale, E4M3)
        expected = grouped_quantize.quantize_groups(rows_of(source), groups, scale, E4M3)
        assert_same_cast(found, expected, groups, rows)
        op.block_quantize_source(source, groups, E4M3)


def test_no_tokens(device):
    row_of = torch.full((20,), -1, dtype=torch.int32, device=device)
    source = op.Gather(torch.zeros(0, 32, device=device), row_of)
    out = op.quantize_source(source, made(20, [20], device), scales(1, device), E4M3)
    assert not codes(out.rowwise).any()


def test_refuses():
    x, grad, row_of = torch.zeros(8, 32), torch.zeros(8, 16), torch.zeros(8, dtype=torch.int32)
    groups, scale = made(8, [8], "cpu"), torch.ones(1)
    nine = torch.zeros(9)
    for source, error, message in (
        (x, TypeError, "source must be a Gather, Gated or GatedGradient, got Tensor"),
        (op.Gather(x[0], row_of), ValueError, r"x must have 2 dimensions, got shape \[32\]"),
        (op.Gather(x, row_of.long()), TypeError, "row_of must have dtype int32, got int64"),
        (op.Gather(x, row_of[None]), ValueError, r"row_of must have shape \[8\], got \[1, 8\]"),
        (op.Gather(x, row_of, nine), ValueError, r"factor must have shape \[8\], got \[9\]"),
        (op.Gated(x, nine[:8].double()), TypeError, "factor must have dtype float32, got float64"),
        (op.Gated(x[:, :31]), ValueError, "x must have an even number of columns, got 31"),
        (op.Gated(x, activation="tanh"), ValueError, "activation must be one of silu, .*'tanh'"),
        (op.Gated(x, bias=x), ValueError, r"bias must have shape \[1, 32\], got \[8, 32\]"),
        (op.Gated(x, bias=x.half()), TypeError, "bias must have dtype float32, got float16"),
        (op.GatedGradient(grad[:, :15], x), ValueError, r"grad must have shape \[8, 16\], got"),
        (op.GatedGradient(grad.half(), x), TypeError, "grad must have dtype float32, got float16"),
    ):
        with pytest.raises(error, match="grouped_cast.quantize_source: " + message):
            op.quantize_source(source, groups, scale, E4M3)
        with pytest.raises(error, match="grouped_cast.block_quantize_source: " + message):
            op.block_quantize_source(source, groups, E4M3)
    written = torch.zeros(8)
    with pytest.raises(ValueError, match="factor_grad must be None without a GatedGradient"):
        op.quantize_source(op.Gated(x), groups, scale, E4M3, factor_grad=written)
    with pytest.raises(ValueError, match="factor_grad must be None with due"):
        op.quantize_source(
            op.GatedGradient(grad, x), groups, scale, E4M3, factor_grad=written, due=row_of[:1]
        )
    for source in (op.Gated(x, bias=x[:1]), op.GatedGradient(grad, x)):
        with pytest.raises(ValueError, match="bias_grad must be None without a GatedGradient with"):
            op.quantize_source(source, groups, scale, E4M3, bias_grad=x[:1].clone())
    with pytest.raises(ValueError, match="bias_grad must be None with due"):
        op.quantize_source(
            op.GatedGradient(grad, x, bias=x[:1]), groups, scale, E4M3, bias_grad=x[:1].clone(),
            due=row_of[:1],
        )  # fmt: skip
    with pytest.raises(ValueError, match="grad must have a multiple of 128 columns, got 16"):
        op.block_quantize_source(op.GatedGradient(grad, x), groups, E4M3)
    with pytest.raises(ValueError, match="groups must be of 8 rows, got groups of 4 rows"):
        op.quantize_source(op.Gated(x), made(4, [4], "cpu"), scale, E4M3)
