"""Products of operands with a scale for each row, against float64 products of their values."""

import pytest
import torch
from checks import in_pairs, sqnr

from apex_te.ops import fp8_gemm as one_scale
from apex_te.ops import rowwise_gemm as op
from apex_te.ops.row_quantize import row_quantize
from apex_te.ops.rowwise_gemm import rowwise_gemm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    (16, 16, 128), (144, 272, 384), (1, 16, 32), (7, 5, 3), (130, 250, 257), (64, 144, 144),
    (129, 48, 256), (8, 16, 0), (0, 16, 32),
]  # fmt: skip


def operand(rows, cols, dtype, device):
    """Codes and scales of rows whose sizes differ by powers of ten."""
    x = torch.randn(rows, cols) * 10.0 ** torch.randint(-2, 2, (rows, 1))
    return [t.to(device) for t in row_quantize(x, dtype, columnwise=False)[:2]]


@in_pairs(
    out_dtype=DTYPES,
    types=[(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    shape=SHAPES,
    added=["nothing", "bias", "c", "out", "no right scale"],
)
def test_values(device, poison, out_dtype, types, shape, added):
    m, n, k = shape
    (a, sa), (b, sb) = operand(m, k, types[0], device), operand(n, k, types[1], device)
    if added == "no right scale":
        sa, sb = sa / 57344, torch.ones_like(sb)  # float16 holds the result
    expected = op.reference(*(t.cpu() for t in (a, b, sa, sb)))
    size = expected.std().item() if m and k else 1.0
    more = {}
    if added == "bias":
        more["bias"] = (torch.randn(n, device=device) * size).to(one_scale.bias_dtype(out_dtype))
    elif added in ("c", "out"):
        more[added] = (torch.randn(m, n, device=device) * size).to(out_dtype)
    for each in more.values():
        expected = expected + each.double().cpu()
    if added == "out":
        more["accumulate"] = True
    found = rowwise_gemm(
        a, b, sa, None if added == "no right scale" else sb, out_dtype=out_dtype,
        use_split_accumulator=True, **more,
    )  # fmt: skip
    assert found.dtype is out_dtype
    assert found is more.get("out", found)
    # Tensor cores add up products at about 14 bits; cuBLASLt rounds them before it adds to `out`.
    floor = {torch.float32: 80 if device.type == "cpu" else 60, torch.bfloat16: 46,
             torch.float16: 52}[out_dtype]  # fmt: skip
    assert found.numel() == 0 or not expected.any() or sqnr(expected, found) >= floor


def test_three_products_of_a_linear_layer(device):
    """The weight's scales are folded into the gradient of dgrad, which reads its codes again."""
    x, w, dy = torch.randn(150, 256), torch.randn(128, 256), torch.randn(150, 128)
    w *= 10.0 ** torch.linspace(-2, 2, 128)[:, None]
    qx, qd = (row_quantize(t.to(device), E4M3, pad_columnwise=True) for t in (x, dy))
    qw = row_quantize(w.to(device), E4M3, columnwise=False)
    y = rowwise_gemm(qx.rowwise, qw.rowwise, qx.rowwise_scale_inv, qw.rowwise_scale_inv)
    folded = row_quantize(
        dy.to(device), E4M3, columnwise=False, column_scale=qw.rowwise_scale_inv[:, 0].clone()
    )
    codes = qw.rowwise.view(torch.uint8).t().contiguous().view(E4M3)
    dx = rowwise_gemm(folded.rowwise, codes, folded.rowwise_scale_inv, None)
    total = torch.zeros(128, 256, device=device)
    for _ in range(2):
        rowwise_gemm(
            qd.columnwise, qx.columnwise, qd.columnwise_scale_inv, qx.columnwise_scale_inv,
            out=total, accumulate=True,
        )  # fmt: skip
    assert sqnr(x @ w.t(), y) >= 28
    assert sqnr(dy @ w, dx) >= 25
    assert sqnr(2 * dy.t() @ x, total) >= 28


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"a_scale_inv": torch.ones(1)}, ValueError,
         r"a_scale_inv must be float32 \[6, 1\], got \[1\] of torch.float32"),
        ({"b_scale_inv": torch.ones(6, 1).half()}, ValueError,
         r"b_scale_inv must be float32 \[6, 1\], got \[6, 1\] of torch.float16"),
        ({"b": torch.zeros(6, 8).to(E4M3)}, ValueError, r"got \[6, 16\] and \[6, 8\]"),
        ({"accumulate": True}, ValueError, "out must be given with accumulate, got None"),
    ],
)  # fmt: skip
def test_rejects_bad_arguments(changes, error, text):
    codes, one = torch.zeros(6, 16).to(E4M3), torch.ones(6, 1)
    given = {"a": codes, "b": codes, "a_scale_inv": one, "b_scale_inv": one}
    with pytest.raises(error, match=f"^rowwise_gemm: .*{text}"):
        rowwise_gemm(**{**given, **changes})
