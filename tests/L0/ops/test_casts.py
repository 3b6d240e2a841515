"""Casts of a matrix: their references, bit for bit, padded or not, on each device."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from checks import DTYPES, assert_same_bits, codes, in_pairs, needs_cuda, on_gpus, one, spread

from apex_te.ops import block_quantize as blocks
from apex_te.ops import cast_transpose as given
from apex_te.ops import current_scale as current
from apex_te.ops import hif8
from apex_te.ops import mx_quantize as mx
from apex_te.ops import row_quantize as rows_of
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.mx_quantize import mx_quantize
from apex_te.ops.row_quantize import row_quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [
    (1, 1), (3, 7), (8, 15), (16, 33), (33, 131), (17, 128), (127, 129), (129, 1288), (257, 264),
    (9, 4095),
    *on_gpus(
        (15, 8), (129, 1000), (16, 16), (31, 32), (128, 128), (256, 384), (254, 264),
        (1000, 3), (17, 3584), (144, 3584), (272, 3584), (33, 4095), (1, 8192),
    ),
]  # fmt: skip
NAN, INF = float("nan"), float("inf")


def scaled(cast, value):
    """The cast, or its reference, with a scale of this value."""
    return lambda x, *args, **options: cast(x, one(value, x.device), *args, **options)


def of_amax(cast, value):
    """The cast, or its reference, with an amax of this value."""
    return lambda x, *args, **options: cast(x, *args, amax=one(value, x.device), **options)


def with_column_scale(cast):
    """The cast, or its reference, with scales of columns that differ by powers of ten."""

    def call(x, *args, **options):
        scale = 10.0 ** (torch.arange(x.shape[1]) % 7 - 3) / 3  # whose bits differ by device
        return cast(x, *args, column_scale=scale.to(x.device), **options)

    return call


def with_scale(fp8):
    casts = scaled(given.cast_transpose, 7.3), scaled(given.reference, 7.3)
    return *casts, {"fp8_dtype": fp8}


# An op, its reference, and options of both.
CASTS = {
    "E4M3": with_scale(E4M3),
    "E5M2": with_scale(E5M2),
    "E4M3 by amax": (current.current_scale, current.reference, {"fp8_dtype": E4M3}),
    "E5M2 by amax": (current.current_scale, current.reference, {"fp8_dtype": E5M2}),
    "E4M3 by amax, pow2": (
        current.current_scale, current.reference, {"fp8_dtype": E4M3, "pow2": True}),
    "block 1x128": (block_quantize, blocks.reference, {"fp8_dtype": E4M3, "block_rows": 1}),
    "block 128x128": (block_quantize, blocks.reference, {"fp8_dtype": E5M2, "block_rows": 128}),
    "block of any scale": (
        block_quantize, blocks.reference, {"fp8_dtype": E4M3, "pow2": False, "eps": 0.01}),
    "block 128x128 of any scale": (
        block_quantize, blocks.reference,
        {"fp8_dtype": E4M3, "block_rows": 128, "pow2": False, "eps": 0.01}),
    "block of a server's scale": (
        block_quantize, blocks.reference, {"fp8_dtype": E4M3, "scales": "server"}),
    "block 128x128 of a server's scale": (
        block_quantize, blocks.reference,
        {"fp8_dtype": E5M2, "block_rows": 128, "scales": "server", "eps": 0.01}),
    "row": (row_quantize, rows_of.reference, {"fp8_dtype": E4M3}),
    "row E5M2, eps": (row_quantize, rows_of.reference, {"fp8_dtype": E5M2, "eps": 0.01}),
    "row pow2": (row_quantize, rows_of.reference, {"fp8_dtype": E4M3, "scales": "pow2"}),
    "row of any scale": (row_quantize, rows_of.reference, {"fp8_dtype": E5M2, "scales": "fp32"}),
    "row of columns that are scaled": (
        with_column_scale(row_quantize), with_column_scale(rows_of.reference),
        {"fp8_dtype": E4M3}),
    "mx": (mx_quantize, mx.reference, {"fp8_dtype": E4M3}),
    "mx E5M2": (mx_quantize, mx.reference, {"fp8_dtype": E5M2}),
    "mx floor": (mx_quantize, mx.reference, {"fp8_dtype": E5M2, "rounding": "floor"}),
    "mx floor E4M3": (mx_quantize, mx.reference, {"fp8_dtype": E4M3, "rounding": "floor"}),
    "hif8": (hif8.quantize_current, hif8.reference_quantize_current, {}),
    "hif8 of 224, pow2": (
        hif8.quantize_current, hif8.reference_quantize_current, {"target": 224.0, "pow2": True}),
    "hif8 of a scale": (scaled(hif8.quantize, 0.4), scaled(hif8.reference_quantize, 0.4), {}),
}  # fmt: skip
RECORDING = ("E4M3", "E5M2", "hif8 of a scale")  # and blocks: casts that record an amax


def expected_of(reference, x, options, padded=True):
    """The tensors of the reference by name, the columnwise copy followed by zeros if padded."""
    made = reference(x, **options)._asdict()
    column = made["columnwise"]
    if padded:
        made["columnwise"] = F.pad(codes(column), (0, -x.shape[0] % 16)).view(column.dtype)
    return made


def assert_is(actual, expected, without=None):
    for name, tensor in expected.items():
        found = getattr(actual, name)
        if without and name.startswith(without):
            assert found is None
        elif name not in ("amax", "dbias") or found is not None:
            assert found.shape == tensor.shape
            assert_same_bits(found, tensor)


@in_pairs(padded=[False, True], cast=CASTS, dtype=DTYPES, shape=SHAPES)
def test_equals_the_reference(device, poison, cast, dtype, shape, padded):
    """Both copies and each alone; the padding is zeros."""
    run, reference, options = CASTS[cast]
    x = spread(shape, dtype)
    expected = expected_of(reference, x, options, padded)
    x, pad = x.to(device), {"pad_columnwise": True} if padded else {}
    recorded = {"amax": one(0, device)} if cast in RECORDING or "block" in cast else {}
    assert_is(run(x, **pad, **options, **recorded), expected)
    assert_is(run(x, rowwise=False, **pad, **options), expected, "rowwise")
    assert_is(run(x, columnwise=False, **pad, **options), expected, "columnwise")
    if recorded:
        largest = x.float().abs().max().item()
        assert recorded["amax"].item() == largest
        if "hif8" not in cast:
            recorded["amax"].zero_()
            run(x, rowwise=False, columnwise=False, **options, **recorded)
            assert recorded["amax"].item() == largest


def numbers(kind):
    """A matrix of every number of 16 bits, or of any of 32, with what their blocks need beside."""
    if kind.startswith("float32"):
        bits = torch.randint(-(2**31), 2**31, (256, 512)).int()
        if kind.endswith("row"):  # one exponent, so that the codes use the whole range
            bits = (bits & -0x7F800001) | (bits[:, :1] & 0x7F800000)
        return bits.view(torch.float32)
    every = torch.arange(65536, dtype=torch.int32).short().reshape(512, 128)
    every = every.view(getattr(torch, kind.partition(" ")[0]))
    if kind.endswith("1"):
        every = torch.where(every.abs() <= 1, every, 1)
        every[:, ::32] = 1
    return every


NUMBERS = [
    "float16", "bfloat16", "float16 beside a 1", "bfloat16 beside a 1", "float32",
    "float32 in a row",
]  # fmt: skip
OF_NUMBERS = CASTS | {
    f"{str(fp8)[6:]} of {value}": (
        scaled(given.cast_transpose, value), scaled(given.reference, value), {"fp8_dtype": fp8})
    for fp8, value in itertools.product((E4M3, E5M2), (1.0, 2.0**-12, 1.7e4))
} | {
    f"{str(fp8)[6:]} of an amax of {value}": (
        of_amax(current.current_scale, value), of_amax(current.reference, value),
        {"fp8_dtype": fp8})
    for fp8, value in itertools.product((E4M3, E5M2), (1.0, 3e-5, 700.0, 6e4))
} | {
    f"hif8 of {value}, not saturated": (
        scaled(hif8.quantize, value), scaled(hif8.reference_quantize, value), {"saturate": False})
    for value in (1.0, 3.7, 2.0**-9, 1.7e4)
}  # fmt: skip


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("cast", OF_NUMBERS)
def test_every_number(device, cast, kind):
    run, reference, options = OF_NUMBERS[cast]
    x = numbers(kind)
    if "by amax" in cast or cast in ("hif8", "hif8 of 224, pow2"):
        x = torch.where(x.isfinite(), x, 0)
    assert_is(run(x.to(device), **options), expected_of(reference, x, options, padded=False))


@pytest.mark.parametrize("value", [NAN, INF, -1e30])
@pytest.mark.parametrize("rows", [17, 129, 250])
@pytest.mark.parametrize("cast", CASTS)
def test_padding_is_zeros_beside_any_value(device, poison, cast, rows, value):
    run, reference, options = CASTS[cast]
    x = torch.randn(rows, 72)
    x[-1, 5] = x[0, 70] = value
    expected = expected_of(reference, x, options)
    assert_is(run(x.to(device), pad_columnwise=True, **options), expected)


@pytest.mark.parametrize("scale", [NAN, INF, 0.0])
def test_padding_is_zeros_at_any_scale(device, poison, scale):
    x = torch.randn(250, 136, device=device)
    out = hif8.quantize(x, torch.full((1,), scale, device=device), pad_columnwise=True)
    assert not out.columnwise[:, 250:].any()


@pytest.mark.parametrize("cast", CASTS)
def test_misaligned_matrices(device, poison, cast):
    run, reference, options = CASTS[cast]
    flat = torch.randn(1 + 130 * 136).bfloat16()
    expected = expected_of(reference, flat[1:].view(130, 136), options)
    out = run(flat.to(device)[1:].view(130, 136), pad_columnwise=True, **options)
    assert_is(out, expected)


@pytest.mark.parametrize("cast", ["block 1x128", "block 128x128", "row", "mx"])
def test_given_outputs_may_be_padded(device, cast):
    run, _, options = CASTS[cast]
    x = torch.randn(130, 136, device=device)
    out = run(x, pad_columnwise=True, **options)
    for tensor in out:
        tensor.view(torch.uint8).fill_(0x55)
    again = run(x, out=out, **options)
    assert again.columnwise is out.columnwise
    assert_same_bits(out, run(x, pad_columnwise=True, **options))
    wrong = out._replace(columnwise=out.columnwise[:, :140].contiguous())
    with pytest.raises(ValueError, match=r"columnwise must have shape \[136, 130\]"):
        run(x, out=wrong, **options)


def test_given_outputs_of_hif8_may_be_padded(device):
    x = torch.randn(130, 136, device=device)
    out = torch.full((136, 144), 0x55, dtype=torch.uint8, device=device)
    assert hif8.quantize_current(x, out_columnwise=out).columnwise is out
    assert_same_bits([out], [hif8.quantize_current(x, pad_columnwise=True).columnwise])


@pytest.mark.parametrize("rows", [1, 3, 4, 126, 127, 129, 254])
def test_rows_behind_a_rowwise_copy_of_1x128_blocks_are_zeros(device, poison, rows):
    for cols in (256, 131):
        out = block_quantize(torch.randn(rows, cols, device=device), E4M3)
        stored = -(-rows // 4) * 4
        assert out.rowwise.shape == (rows, cols)
        assert out.rowwise.untyped_storage().nbytes() == stored * cols
        data = out.rowwise.view(torch.uint8)
        assert not data.as_strided((stored - rows, cols), (cols, 1), rows * cols).any()


@needs_cuda
@pytest.mark.parametrize(
    "shape", [(16383, 2048), (16370, 2048), (8190, 3584), (4095, 8192)], ids=str
)
def test_scales_of_large_mx_matrices(poison, shape):
    """They leave in two steps, although the last tile of a column is short."""
    x = (4 * torch.randn(shape, device="cuda")).exp().bfloat16()
    parts = [mx_quantize(rows) for rows in x.split(2048)]
    joined = [
        torch.cat([part[i].view(torch.uint8) for part in parts], dim=i // 2) for i in range(4)
    ]
    joined[2] = F.pad(joined[2], (0, -shape[0] % 16))
    for options in ({}, {"rowwise": False}, {"columnwise": False}):
        made = mx_quantize(x, pad_columnwise=True, **options)
        for out, expected in zip(made, joined, strict=True):
            assert out is None or torch.equal(out.view(torch.uint8), expected)


@needs_cuda
@pytest.mark.parametrize("shape", [(4099, 8008), (4096, 8190)], ids=str)
def test_columns_of_matrices_larger_than_a_cache(poison, shape):
    """Alone they are cast in slabs, and are rows of the transpose."""
    x = (4 * torch.randn(shape, device="cuda")).exp().bfloat16()
    transpose = row_quantize(x.t().contiguous(), E4M3, columnwise=False)
    for options in ({}, {"rowwise": False}):
        made = row_quantize(x, E4M3, **options)
        assert_same_bits(
            [made.columnwise, made.columnwise_scale_inv],
            [transpose.rowwise, transpose.rowwise_scale_inv],
        )
