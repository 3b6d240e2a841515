"""jit_op against its reference in float64 and in its own dtype."""

import pytest
import torch
from checks import (
    DIMS,
    DTYPES,
    assert_as_good_as_torch,
    # if cuda
    assert_runs_in_graph_and_on_stream,
    # end
    assert_same_bits,
    layouts,
    # if cuda
    needs_cuda,
    # end
)

from apex_te.ops import jit_op as op

# if cpu


@pytest.fixture
def device():
    return torch.device("cpu")


# end


def value_and_gradient(call, x, grad, scale):
    x = x.detach().requires_grad_()
    y = call(x, scale)
    (dx,) = torch.autograd.grad(y, x, grad)
    return y.detach(), dx


def assert_like_reference(x, scale):
    """The bound is that of x and 2048 more values, which the op is not given: PyTorch's largest
    error in a few elements may be none."""
    grad = torch.randn_like(x)
    actual = value_and_gradient(op.jit_op, x, grad, scale)
    more = [torch.randn(2048, device=x.device).to(x.dtype) for _ in range(2)]
    x, grad = torch.cat([x.reshape(-1), 3 * more[0]]), torch.cat([grad.reshape(-1), more[1]])
    exact = value_and_gradient(op.reference, x.double(), grad.double(), scale)
    same_dtype = value_and_gradient(op.reference, x, grad, scale)
    for result, wanted, plain in zip(actual, exact, same_dtype, strict=True):
        padded = torch.cat([result.reshape(-1), plain[-2048:]])
        assert_as_good_as_torch(padded, wanted, plain)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fwd_and_bwd(device, poison, dtype, scale):
    for shape in [*((size,) for size in DIMS), (), (3, 7), (2, 5, 129)]:
        assert_like_reference((3 * torch.randn(shape, device=device)).to(dtype), scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(device, dtype):
    x, grad = (torch.randn(80, 96, device=device).to(dtype) for _ in range(2))
    y, dx = op.jit_op_fwd(x), op.jit_op_bwd(grad, x)
    for (name, view), (_, grad_view) in zip(layouts(x), layouts(grad), strict=True):
        assert torch.equal(op.jit_op_fwd(view), y), name
        assert torch.equal(op.jit_op_bwd(grad_view, view), dx), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinities(device, dtype):
    x = torch.randn(1000, device=device).to(dtype)
    x[[3, 500, 999]] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device).to(dtype)
    y = op.jit_op_fwd(x)
    assert torch.equal(torch.isnan(y), ~torch.isfinite(x))


def test_empty(device):
    x = torch.empty(0, 5, device=device)
    assert op.jit_op_fwd(x).shape == (0, 5)
    assert op.jit_op_bwd(x, x).shape == (0, 5)


def test_writes_given_output(device):
    x, grad = torch.randn(100, device=device), torch.randn(100, device=device)
    y, dx = op.jit_op_fwd(x), op.jit_op_bwd(grad, x)
    version = x._version
    assert op.jit_op_bwd(grad, x, out=grad) is grad
    assert op.jit_op_fwd(x, out=x) is x
    assert x._version > version
    assert_same_bits([x, grad], [y, dx])


def test_rejects_bad_arguments(device):
    x = torch.randn(6, 4, device=device)
    with pytest.raises(TypeError, match="x must have dtype float32, float16 or bfloat16, got"):
        op.jit_op_fwd(x.double())
    with pytest.raises(TypeError, match="y must have dtype float32, got float16"):
        op.jit_op_fwd(x, out=x.half())
    with pytest.raises(ValueError, match=r"dy must have x's shape \[6, 4\], got \[4, 6\]"):
        op.jit_op_bwd(x.view(4, 6), x)
    for scale in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="scale must be finite and at least 0, got"):
            op.jit_op_fwd(x, scale)


def test_opcheck_and_compile(device):
    x, grad = torch.randn(17, 5, device=device), torch.randn(17, 5, device=device)
    ops, out = torch.ops.apex_te, torch.empty_like(x)
    torch.library.opcheck(ops.jit_op_fwd, (x, out, 0.5))
    torch.library.opcheck(ops.jit_op_bwd, (grad, x, out, 0.5))
    compiled = torch.compile(op.jit_op, fullgraph=True, backend="aot_eager")
    assert_same_bits(
        value_and_gradient(compiled, x, grad, 0.5),
        value_and_gradient(op.jit_op, x, grad, 0.5),
    )


# if cuda


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_on_both_devices(dtype):
    x, grad = (3 * torch.randn(5000)).to(dtype), torch.randn(5000).to(dtype)
    actual = op.jit_op_fwd(x.cuda(), 0.7)
    assert_same_bits(actual, op.jit_op_fwd(x, 0.7))
    actual = op.jit_op_bwd(grad.cuda(), x.cuda(), 0.7)
    assert_same_bits(actual, op.jit_op_bwd(grad, x, 0.7))


@pytest.mark.cuda
@needs_cuda
def test_graph_and_stream():
    inputs = [torch.randn(2, 1000, device="cuda").bfloat16() for _ in range(2)]
    assert_runs_in_graph_and_on_stream(op.jit_op_bwd, inputs)


@pytest.mark.cuda
@needs_cuda
def test_more_elements_than_32_bits_count():
    size = 2**31 + 2**20 + 5
    if torch.cuda.mem_get_info()[0] < 12 * size:
        pytest.skip("needs 26 GB of GPU memory")
    x = torch.randn(2**20 + 5, device="cuda").bfloat16()
    large = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    large[-x.numel() :] = x
    y = op.jit_op_fwd(large)
    assert torch.equal(y[-x.numel() :], op.jit_op_fwd(x))
    assert not y[: -x.numel()].any()


# end
