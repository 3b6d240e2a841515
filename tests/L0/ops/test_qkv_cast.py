"""qkv_cast against its plain-PyTorch reference, bit for bit, on each device."""

import pytest
import torch
from checks import codes, in_pairs, one

from apex_te.ops import qkv_cast as op
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.qkv_cast import qkv_cast_grad, qkv_cast_weight

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (groups, repeats, size, columns)
WEIGHTS = [
    (2, 4, 16, 64),
    (1, 1, 3, 7),
    (8, 4, 128, 96),
    (3, 2, 5, 33),
    (2, 3, 8, 40),
    (1, 6, 1, 9),
]
# (tokens, groups, repeats, size)
GRADS = [
    ((3, 5), 2, 4, 16), ((7,), 1, 1, 3), ((130, 2), 2, 4, 32), ((300,), 2, 1, 24), ((17,), 3, 2, 5),
    ((257, 3), 1, 2, 128), ((2, 600), 2, 2, 8), ((1, 9), 2, 3, 8), ((9, 1), 2, 3, 8),
    ((0,), 2, 2, 8), ((0, 3), 2, 2, 8), ((3, 0), 2, 2, 8),
]  # fmt: skip


def heads(tokens, groups, repeats, size, dtype, device):
    def make(count):
        return (torch.randn(*tokens, count, size) * 20).to(dtype).to(device)

    return make(groups * repeats) if repeats else None, make(groups), make(groups)


def strided(x, kind):
    """``x`` with other strides: in a wider tensor, or with the dimensions of tokens swapped."""
    if x is None or kind == "dense":
        return x
    if kind == "wide":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype)
        wide = wide.to(x.device)
        out = wide[..., 8:]
        out.copy_(x)
        return out
    if kind == "heads first":
        return x.movedim(-2, 0).contiguous().movedim(0, -2)
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@in_pairs(fp8=[E4M3, E5M2], dtype=DTYPES, columnwise=[False, True], shape=WEIGHTS)
def test_weight(device, poison, shape, columnwise, dtype, fp8):
    groups, repeats, size, cols = shape
    weight = (torch.randn(groups * (repeats + 2) * size, cols) * 30).to(dtype)
    order = {"repeats": repeats, "groups": groups}
    amax = one(0, device)
    out = qkv_cast_weight(
        weight.to(device), one(7.3, device), fp8, columnwise=columnwise, amax=amax, **order
    )
    expected = op.reference_weight(weight, one(7.3, "cpu"), fp8, **order)
    assert torch.equal(codes(out.rowwise), codes(expected.rowwise))
    if columnwise:
        assert torch.equal(codes(out.columnwise), codes(expected.columnwise))
    else:
        assert out.columnwise is None
    assert amax.item() == weight.float().abs().max().item()
    assert out.scale_inv.item() == (1 / one(7.3, "cpu")).item()


@in_pairs(
    fp8=[E4M3, E5M2], dtype=DTYPES, kind=["dense", "wide", "heads first", "swapped"], shape=GRADS
)
def test_grad(device, poison, shape, kind, dtype, fp8):
    tokens, groups, repeats, size = shape
    if kind == "swapped" and len(tokens) == 1:
        kind = "heads first"
    for interleaved in (True, False):
        for with_queries in (True, False):
            parts = heads(tokens, groups, repeats if with_queries else 0, size, dtype, "cpu")
            given = [strided(None if p is None else p.to(device), kind) for p in parts]
            amax = one(0, device)
            out = qkv_cast_grad(
                *given, one(7.3, device), fp8, interleaved=interleaved, amax=amax, with_dbias=True
            )
            expected_amax = one(0, "cpu")
            expected = op.reference_grad(
                *parts, one(7.3, "cpu"), fp8, interleaved=interleaved, amax=expected_amax
            )
            for made, wanted in zip(out.output[:2], expected.output[:2], strict=True):
                assert torch.equal(codes(made), codes(wanted))
            assert torch.equal(amax.cpu(), expected_amax)
            assert torch.equal(out.output.scale_inv.cpu(), expected.output.scale_inv)
            check_sums(out.dbias, parts, interleaved, dtype, device)


def joined(parts, interleaved):
    """The matrix [tokens, features] of heads."""
    present = [p for p in parts if p is not None]
    groups = present[-1].shape[-2]
    if interleaved:
        present = [p.unflatten(-2, (groups, -1)) for p in present]
    whole, tokens = torch.cat(present, -2), parts[1].shape[:-2]
    return whole.reshape(tokens.numel(), whole.shape[len(tokens) :].numel())


def check_sums(dbias, parts, interleaved, dtype, device):
    """Sums are near the exact ones, and those of cast_transpose bit for bit."""
    x = joined(parts, interleaved)
    exact = x.double().sum(0)
    rounding = torch.finfo(dtype).eps * exact.abs() + 1e-6 * x.double().abs().sum(0)
    assert ((dbias.cpu().double() - exact).abs() <= rounding).all()
    whole = cast_transpose(x.to(device), one(1, device), E4M3, with_dbias=True)
    assert torch.equal(dbias, whole.dbias)


@in_pairs(scale=[7.3, float("nan"), float("inf")], rows=[1, 15, 16, 17, 255, 257, 300], size=[8, 5])
def test_padded_columnwise(device, poison, rows, size, scale):
    parts = heads((rows,), 2, 3, size, torch.bfloat16, device)
    parts[0][0, 0, 0] = float("nan")
    out = qkv_cast_grad(
        *parts, one(scale, device), E5M2, interleaved=True, rowwise=False, pad_columnwise=True
    )
    length = rows + -rows % 16
    assert out.output.columnwise.shape == (10 * size, length)
    assert out.output.rowwise is None
    plain = qkv_cast_grad(*parts, one(scale, device), E5M2, interleaved=True)
    made = codes(out.output.columnwise)
    assert torch.equal(made[:, :rows], codes(plain.output.columnwise))
    assert not made[:, rows:].any()


@pytest.mark.parametrize("place", ["queries", "keys", "values"])
@pytest.mark.parametrize("value", [-1e6, float("inf"), float("nan")])
def test_grad_amax_finds_planted_value(device, place, value):
    parts = dict(
        zip(("queries", "keys", "values"), heads((260,), 2, 2, 16, torch.float32, device),
            strict=True)
    )  # fmt: skip
    parts[place][259, 1, 15] = value
    amax = one(2.0, device)
    out = qkv_cast_grad(
        *parts.values(), one(1, device), E5M2, interleaved=True, rowwise=False, columnwise=False,
        amax=amax,
    )  # fmt: skip
    assert out.output.rowwise is None
    assert out.output.columnwise is None
    if value != value:
        assert torch.isnan(amax).all()
    else:
        assert amax.item() == abs(value)


def test_grad_of_expanded_heads(device):
    """Gradients of a sum are one element with strides of 0."""
    parts = [torch.ones(1, 1, 1, 1, device=device).expand(4, 3, n, 8) for n in (4, 2, 2)]
    out = qkv_cast_grad(*parts, one(1, device), E4M3, interleaved=True)
    assert torch.equal(out.output.rowwise.float(), torch.ones(12, 64, device=device))


def test_weight_noop(device):
    weight = torch.randn(16, 8, device=device)
    order = {"repeats": 2, "groups": 1, "columnwise": True}
    out = qkv_cast_weight(weight, one(1, device), E4M3, **order)
    kept = [t.clone() for t in out]
    amax = one(0, device)
    for noop in (1, 0):
        qkv_cast_weight(
            weight * 3, one(2, device), E4M3, **order, amax=amax, scale_inv=out.scale_inv,
            noop=torch.tensor([noop], dtype=torch.int32, device=device),
            out_rowwise=out.rowwise, out_columnwise=out.columnwise,
        )  # fmt: skip
        same = [torch.equal(codes(a), codes(b)) for a, b in zip(out, kept, strict=True)]
        assert same == [bool(noop)] * 3
        assert (amax.item() == 0) == bool(noop)


def test_large(device):
    """More than one tile in each direction, at sizes of a model."""
    weight = torch.randn(768, 1024, device=device).bfloat16()
    order = {"repeats": 4, "groups": 2}
    both = qkv_cast_weight(weight, one(3, device), E4M3, columnwise=True, **order)
    expected = op.reference_weight(weight.cpu(), one(3, "cpu"), E4M3, **order)
    assert torch.equal(codes(both.rowwise), codes(expected.rowwise))
    assert torch.equal(codes(both.columnwise), codes(expected.columnwise))


def test_rejects(device):
    weight = torch.randn(20, 8, device=device)
    with pytest.raises(ValueError, match=r"weight must have a multiple of \(repeats \+ 2\)"):
        qkv_cast_weight(weight, one(1, device), E4M3, repeats=1, groups=3)
    q, k, v = heads((4,), 2, 2, 8, torch.float32, device)
    with pytest.raises(ValueError, match="queries must have a multiple of the 2 heads of keys"):
        qkv_cast_grad(q[:, :3], k, v, one(1, device), E4M3, interleaved=True)
    with pytest.raises(ValueError, match="keys must have 3 or 4 dimensions"):
        qkv_cast_grad(q, k[0], v, one(1, device), E4M3, interleaved=True)
