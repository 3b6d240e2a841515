"""bias_gelu against PyTorch's formulas in float64, on each device."""

import pytest
import torch
from activation_cases import SHAPES, check_fp8
from checks import (
    DIMS,
    DTYPES,
    FP8,
    assert_adjacent_codes,
    assert_as_good_as_torch,
    assert_close_amax,
    assert_same_bits,
    in_pairs,
    needs_cuda,
    needs_memory,
    one,
)

from apex_te.ops import bias_gelu as op
from apex_te.ops.activation import reference_fp8
from apex_te.ops.bias_gelu import (
    bias_gelu,
    bias_gelu_bwd,
    bias_gelu_bwd_fp8,
    bias_gelu_fwd,
    bias_gelu_fwd_fp8,
)

FORMS = ["tanh", "erf"]


def inputs(shape, dtype, device):
    x, grad = (torch.randn(shape) * 2).to(dtype), torch.randn(shape).to(dtype)
    return x.to(device), torch.randn(shape[-1]).to(dtype).to(device), grad.to(device)


def reference(x, bias, grad, form):
    """Value and gradients of the reference in x's dtype; the bias' are zero without a bias."""
    x = x.detach().requires_grad_()
    b = torch.zeros_like(x[..., :0].sum(-1)) if bias is None else bias.detach().requires_grad_()
    y = op.reference(x, None if bias is None else b, form=form)
    if bias is None:
        (dx,) = torch.autograd.grad(y, x, grad)
        return y.detach(), dx, None
    dx, db = torch.autograd.grad(y, (x, b), grad)
    return y.detach(), dx, db


def both_references(x, bias, grad, form):
    exact = reference(x.double(), None if bias is None else bias.double(), grad.double(), form)
    return exact, reference(x, bias, grad, form)


def assert_forward_and_gradients(x, bias, grad, form):
    """The op against both precisions of the reference.

    The bound is that of the matrix and 512 more columns, which the op is not given: PyTorch's
    largest error in a few elements may be none.
    """
    leaves = x.detach().requires_grad_(), bias.detach().requires_grad_()
    y = bias_gelu(*leaves, form=form)
    y.backward(grad)
    more = inputs((*x.shape[:-1], 512), x.dtype, x.device)
    wide = [torch.cat([t, m], -1) for t, m in zip((x, bias, grad), more, strict=True)]
    exact, same_dtype = both_references(*wide, form)
    actual = (y.detach(), *(t.grad for t in leaves))
    for a, wanted, plain in zip(actual, exact, same_dtype, strict=True):
        assert_as_good_as_torch(torch.cat([a, plain[..., -512:]], -1), wanted, plain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fwd_bwd(device, poison, dtype, form):
    for shape in SHAPES:
        assert_forward_and_gradients(*inputs(shape, dtype, device), form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17])
def test_fwd_bwd_sizes(device, poison, rows, dtype):
    for cols in DIMS:
        assert_forward_and_gradients(*inputs((rows, cols), dtype, device), "tanh")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 264), (1, 31, 33)], ids=str)
def test_without_bias(device, poison, shape, dtype):
    x, _, grad = inputs(shape, dtype, device)
    exact, same_dtype = both_references(x, None, grad, "erf")
    x.requires_grad_()
    y = bias_gelu(x, form="erf")
    y.backward(grad)
    assert_as_good_as_torch(y, exact[0], same_dtype[0])
    assert_as_good_as_torch(x.grad, exact[1], same_dtype[1])
    x = x.detach()
    plain, with_sums = bias_gelu_bwd(grad, x), bias_gelu_bwd(grad, x, with_dbias=True)
    assert plain.dbias is None
    rounding = torch.finfo(dtype).eps * plain.input.double().abs().sum((0, 1))
    error = (with_sums.dbias.double() - plain.input.double().sum((0, 1))).abs()
    assert (error <= rounding + 1e-6).all()


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("cols", [8, 136, 129])
def test_dbias_of_many_rows(device, poison, rows, cols):
    x, bias, grad = inputs((rows, cols), torch.float32, device)
    more = inputs((rows, 512), torch.float32, device)  # as in assert_forward_and_gradients
    wide = [torch.cat([t, m], -1) for t, m in zip((x, bias, grad), more, strict=True)]
    exact, same_dtype = both_references(*wide, "tanh")
    in_fp8 = bias_gelu_bwd_fp8(grad, x, bias, one(1, device), FP8[1], with_dbias=True)
    for dbias in (bias_gelu_bwd(grad, x, bias, with_dbias=True).dbias, in_fp8.dbias):
        padded = torch.cat([dbias, same_dtype[2][-512:]])
        assert_as_good_as_torch(padded, exact[2], same_dtype[2])


@in_pairs(fp8=FP8, dtype=DTYPES, layout=["both", "rowwise", "columnwise"])
def test_fp8(device, poison, dtype, fp8, layout):
    wanted = {"rowwise": layout != "columnwise", "columnwise": layout != "rowwise"}
    for index, shape in enumerate([*SHAPES, (144, 264), (72, 264)]):
        x, bias, grad = inputs(shape, dtype, device)
        x[0, 0], grad[0, 0] = 9, 9  # the largest result: not one in which digits cancel
        bias = bias if index != 4 else None
        form, scale, amax = FORMS[index % 2], 7.3, one(0, device)
        exact, same_dtype = both_references(x, bias, grad, form)
        out = bias_gelu_fwd_fp8(x, bias, one(scale, device), fp8, form=form, amax=amax, **wanted)
        assert [t is None for t in out[:2]] == [layout == "columnwise", layout == "rowwise"]
        check_fp8(out, amax, exact[0], scale, fp8)
        amax, has_bias = one(0, device), bias is not None
        grads = bias_gelu_bwd_fp8(
            grad, x, bias, one(scale, device), fp8, form=form, amax=amax, with_dbias=has_bias,
            **wanted,
        )  # fmt: skip
        check_fp8(grads.output, amax, exact[1], scale, fp8)
        if has_bias:
            assert_as_good_as_torch(grads.dbias, exact[2], same_dtype[2])


@pytest.mark.parametrize("form", FORMS)
def test_fp8_rate_of_differing_codes(device, form):
    x, bias, grad = inputs((512, 1024), torch.bfloat16, device)
    exact = reference(x.double(), bias.double(), grad.double(), form)
    for fp8 in FP8:
        scale, amax = torch.finfo(fp8).max / 16, one(0, device)
        out = bias_gelu_fwd_fp8(x, bias, one(scale, device), fp8, form=form, amax=amax)
        check_fp8(out, amax, exact[0], scale, fp8)
        amax = one(0, device)
        grads = bias_gelu_bwd_fp8(grad, x, bias, one(scale, device), fp8, form=form, amax=amax)
        check_fp8(grads.output, amax, exact[1], scale, fp8)


@pytest.mark.parametrize("rows", [48, 65, 200])
def test_fp8_amax_is_of_existing_rows(device, rows):
    """A tile's rows past the end would hold gelu(bias), which is larger than every result here."""
    x = torch.full((rows, 128), -20.0, device=device).bfloat16()
    bias = torch.full((128,), 19.0, device=device).bfloat16()
    for layout in ({}, {"columnwise": False}):
        amax = one(0, device)
        bias_gelu_fwd_fp8(x, bias, one(1, device), FP8[0], amax=amax, **layout)
        expected = op.reference(torch.tensor(-1.0).double()).abs().float()
        assert_close_amax(amax, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["x", "bias", "grad"])
def test_nan_and_inf_spread(device, value, where):
    x, bias, grad = inputs((80, 128), torch.bfloat16, device)
    {"x": x[70], "bias": bias, "grad": grad[70]}[where][9] = value
    y = bias_gelu_fwd(x, bias)
    grads = bias_gelu_bwd(grad, x, bias, with_dbias=True)
    assert not torch.isfinite(grads.input[70, 9])
    assert not torch.isfinite(grads.dbias[9])
    assert torch.isfinite(grads.dbias).sum() == 127
    assert torch.isfinite(y[70, 9]) == (where == "grad")
    amax = one(0, device)
    bias_gelu_bwd_fp8(grad, x, bias, one(1, device), FP8[0], amax=amax)
    assert not torch.isfinite(amax).any()


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(30)
    rows, cols = 65552, 32784  # 2.149e9 elements
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    bias = torch.randn(cols, device="cuda").bfloat16()
    y = bias_gelu_fwd(x, bias)
    grads = bias_gelu_bwd_fp8(y, x, bias, one(2, "cuda"), FP8[0], with_dbias=True)
    sums = torch.zeros(cols, dtype=torch.float64, device="cuda")
    for begin in range(0, rows, 4096):
        part = slice(begin, begin + 4096)
        sums += reference(x[part].float(), bias.float(), y[part].float(), "tanh")[1].double().sum(0)
    assert ((grads.dbias.double() - sums).abs() <= 0.01 * sums.abs() + 0.1).all()
    for begin in (0, rows // 2, rows - 16):
        part = slice(begin, begin + 16)
        exact, same_dtype = both_references(x[part], bias, y[part], "tanh")
        assert_as_good_as_torch(y[part], exact[0], same_dtype[0])
        expected, _ = reference_fp8(exact[1].cpu(), one(2), FP8[0])
        assert_adjacent_codes(grads.output.rowwise[part], expected.rowwise)
        assert_adjacent_codes(grads.output.columnwise[:, part].contiguous(), expected.columnwise)


@needs_cuda
def test_more_row_tiles_than_a_grid_has_rows():
    """Only the last rows have a gradient: dbias is theirs, added in the same order."""
    first, rows = 65536 * 128, 208
    x = torch.randn(first + rows, 8, device="cuda").bfloat16()
    bias, grad = x[0].clone(), torch.zeros_like(x)
    grad[first:].normal_()
    grads = bias_gelu_bwd(grad, x, bias, with_dbias=True)
    expected = bias_gelu_bwd(grad[first:], x[first:], bias, with_dbias=True)
    assert_same_bits([grads.input[first:], grads.dbias], expected)
    assert not grads.input[:first].any()
