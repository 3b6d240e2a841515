"""index_mul_2d against its formula in float64: forward, gradients and gradients of gradients."""

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits, in_pairs, needs_cuda

from apex_te.ops.index_mul_2d import index_mul_2d, index_mul_2d_bwd, index_mul_2d_fwd, reference

# Which row each of some places takes: by chance, one for all, few with long runs, none twice.
INDICES = {
    "random": lambda rows, places: torch.randint(rows, (places,)),
    "one": lambda rows, places: torch.full((places,), rows // 2),
    "few": lambda rows, places: torch.arange(places) * 5 // max(places, 1) % rows,
    "permutation": lambda rows, places: torch.randperm(max(rows, places))[:places] % rows,
}


def inputs(rows, places, cols, dtype, kind):
    in1, in2 = torch.randn(rows, cols).to(dtype), torch.randn(places, cols).to(dtype)
    return in1, in2, INDICES[kind](rows, places)


@in_pairs(
    dtype=DTYPES, kind=list(INDICES), cols=[1, 7, 8, 64, 128, 200, 264, 520],
    sizes=[(1, 1), (3, 31), (50, 32), (17, 33), (400, 1000), (5, 700)],
)  # fmt: skip
def test_gradients_twice(device, poison, dtype, kind, cols, sizes):
    in1, in2, index = inputs(*sizes, cols, dtype, kind)
    dout, d1, d2 = torch.randn_like(in2), torch.randn_like(in1), torch.randn_like(in2)

    def run(function, wide, device):
        moved = [t.to(wide).to(device).requires_grad_() for t in (in1, in2, dout)]
        more = [t.to(wide).to(device) for t in (d1, d2)]
        out = function(*moved[:2], index.to(device))
        grads = torch.autograd.grad(out, moved[:2], moved[2], create_graph=True)
        second = torch.autograd.grad(grads, moved, more)
        return [t.detach() for t in (out, *grads, *second)]

    ours = run(index_mul_2d, dtype, device)
    exact = run(reference, torch.float64, "cpu")
    same = [t.to(dtype) for t in run(reference, torch.float32, "cpu")]
    for a, b, c in zip(ours, exact, same, strict=True):
        assert a.dtype is dtype
        assert_as_good_as_torch(a, b, c)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_in_float32_and_rounded_once(device, dtype):
    in1, in2, index = inputs(4, 5000, 16, dtype, "random")
    dout = torch.randn_like(in2)
    moved = [t.to(device) for t in (dout, in1, in2, index)]
    din1, _ = index_mul_2d_bwd(*moved)
    exact = torch.zeros(4, 16).double().index_add_(0, index, (dout.double() * in2.double()))
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-4}
    torch.testing.assert_close(din1.cpu().double(), exact, **tolerance)


def test_adds_to_what_is_given(device):
    in1, in2, index = (t.to(device) for t in inputs(20, 90, 24, torch.float32, "random"))
    dout, start = torch.randn_like(in2), torch.randn_like(in1)
    sums, din2 = index_mul_2d_bwd(dout, in1, in2, index)
    given, out = start.clone(), torch.empty_like(in2)
    found = index_mul_2d_bwd(dout, in1, in2, index, din1=given, out=out)
    assert found[0] is given
    assert found[1] is out
    assert_same_bits(found, (start + sums, din2))
    assert torch.equal(din2, dout * in1[index])
    assert not sums[~torch.isin(torch.arange(20, device=device), index)].any()


def test_two_products(device):
    in1, in2, index = (t.to(device) for t in inputs(20, 90, 24, torch.float32, "random"))
    more1, more2 = torch.randn_like(in1), torch.randn_like(in2)
    expected = in1.double()[index] * in2 + more1.double()[index] * more2
    found = index_mul_2d_fwd(in1, in2, index, more1, more2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    other = in2.clone()
    assert index_mul_2d_fwd(in1, other, index, out=other) is other
    assert torch.equal(other, in1[index] * in2)


@pytest.mark.parametrize("sizes", [(5, 0, 8), (0, 0, 8), (5, 6, 0)])
def test_empty(device, sizes):
    in1, in2 = torch.randn(sizes[0], sizes[2]), torch.randn(sizes[1], sizes[2])
    leaves = [t.to(device).requires_grad_() for t in (in1, in2)]
    index = torch.zeros(sizes[1], dtype=torch.int64, device=device)
    out = index_mul_2d(*leaves, index)
    assert out.shape == in2.shape
    out.sum().backward()
    assert not leaves[0].grad.any()
    assert leaves[1].grad.shape == in2.shape


@pytest.mark.cuda
@needs_cuda
def test_places_outside_are_nan_on_the_gpu():
    in1, in2, index = (t.cuda() for t in inputs(20, 90, 24, torch.float32, "random"))
    clean = index_mul_2d_bwd(in2[2:], in1, in2[2:], index[2:])
    index[0], index[1] = -5, 1 << 33
    assert index_mul_2d(in1, in2, index)[:2].isnan().all()
    din1, din2 = index_mul_2d_bwd(in2, in1, in2, index)
    assert din2[:2].isnan().all()
    torch.testing.assert_close((din1, din2[2:]), clean)


def test_rejects():
    in1, in2, index = inputs(5, 9, 8, torch.float32, "random")
    cases = [
        ((in1, in2, index[:3]), ValueError, r"index must have shape \[9\], got \[3\]"),
        ((in1, in2, index.int()), TypeError, "index must have dtype int64, got int32"),
        ((in1, in2.half(), index), TypeError, "in2 must have dtype float32, got float16"),
        ((in1, in2[:, :4], index), ValueError, r"in2 must have shape \[9, 8\], got \[9, 4\]"),
        ((in1, in2, index + 5), ValueError, r"index\[0\] must be in \[0, 5\)"),
        ((in1.double(), in2, index), TypeError, "in1 must have dtype .*got float64"),
    ]
    for args, error, text in cases:
        with pytest.raises(error, match=text):
            index_mul_2d(*args)
    with pytest.raises(ValueError, match="more2 must be given with more1"):
        index_mul_2d_fwd(in1, in2, index, in1)
