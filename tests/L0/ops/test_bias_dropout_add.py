"""bias_dropout_add against the formula in float64 and in its own dtype, on each device."""

import pytest
import torch
from checks import assert_as_good_as_torch, assert_same_bits, in_pairs, needs_cuda, needs_memory

from apex_te.ops import bias_dropout_add as op
from apex_te.ops.bias_dropout_add import bias_dropout_add

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [(F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)]  # of x and residual
SHAPES = [
    (1, 1), (3, 7), (7, 8), (8, 15), (16, 16), (17, 127), (127, 128), (128, 129), (129, 1000),
    (300, 256), (5, 3584), (2, 4095), (2, 3, 8192),
]  # fmt: skip


def seed_of(value, device):
    return torch.tensor([value], dtype=torch.int64, device=device)


def run(x, bias, residual, p, seed, grad, function=bias_dropout_add):
    """Output and gradients of clones; a bias of None has none."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, bias, residual)]
    out = function(*leaves, p, seed=seed)
    out.backward(grad)
    return [out, *(t.grad for t in leaves if t is not None)]


def check(x, bias, residual, p, seed, device):
    grad = torch.randn(residual.shape).to(residual.dtype)
    moved = [None if t is None else t.to(device) for t in (x, bias, residual)]
    ours = run(*moved, p, seed.to(device), grad.to(device))
    doubles = [None if t is None else t.double() for t in (x, bias, residual)]
    exact = run(*doubles, p, seed, grad.double(), op.reference)
    same = run(x, bias, residual, p, seed, grad, op.reference)
    for a, b, c in zip(ours, exact, same, strict=True):
        assert_as_good_as_torch(a, b, c)


@in_pairs(p=[0.0, 0.1, 1.0], dtypes=DTYPES, shape=SHAPES)
def test_fwd_and_bwd(device, poison, shape, dtypes, p):
    x, residual = torch.randn(shape).to(dtypes[0]), torch.randn(shape).to(dtypes[1])
    bias = torch.randn(shape[-1]).to(dtypes[0])
    check(x, bias, residual, p, seed_of(7, "cpu"), device)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_bias_of_float32_and_none(device, poison, dtype, p):
    x, residual = torch.randn(40, 72).to(dtype), torch.randn(40, 72).to(dtype)
    check(x, torch.randn(72), residual, p, seed_of(3, "cpu"), device)
    check(x, None, residual, p, seed_of(3, "cpu"), device)


def test_p_of_0_and_1_and_eval(device):
    x, residual = torch.randn(64, 72, device=device), torch.randn(64, 72, device=device)
    bias = torch.randn(72, device=device)
    assert torch.equal(bias_dropout_add(x, bias, residual, 1.0), residual)
    plain = residual + (x + bias)
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.0), plain)
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.7, training=False), plain)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["x", "bias", "residual"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_value_that_is_not_finite_shows(device, name, value, p):
    """Also where it is dropped."""
    tensors = {"x": torch.randn(20, 40), "bias": torch.randn(40), "residual": torch.randn(20, 40)}
    tensors[name][..., 9] = value
    tensors = {k: v.to(device) for k, v in tensors.items()}
    out = bias_dropout_add(**tensors, p=p, seed=seed_of(0, device))
    assert not out[:, 9].isfinite().any()
    assert out[:, :9].isfinite().all()
    assert out[:, 10:].isfinite().all()
    leaves = {k: v.clone().requires_grad_() for k, v in tensors.items()}
    grad = torch.ones(20, 40, device=device)
    grad[3, 5] = value
    bias_dropout_add(**leaves, p=p, seed=seed_of(0, device)).backward(grad)
    assert not leaves["x"].grad[3, 5].isfinite()
    assert not leaves["residual"].grad[3, 5].isfinite()
    assert not leaves["bias"].grad[5].isfinite()
    assert leaves["bias"].grad[:5].isfinite().all()


def test_only_the_wanted_gradients(device):
    x, bias, residual = (torch.randn(s, device=device) for s in ((9, 16), (16,), (9, 16)))
    for p in (0.0, 0.5):
        seed = seed_of(2, device)
        expected = run(x, bias, residual, p, seed, x)[1:]
        for i in range(3):
            tensors = [x.clone(), bias.clone(), residual.clone()]
            tensors[i].requires_grad_()
            bias_dropout_add(*tensors, p, seed=seed).backward(x)
            assert_same_bits(tensors[i].grad, expected[i])


def test_repeatable_and_equal_on_devices(device):
    x, residual, grad = (torch.randn(1000, 264).bfloat16() for _ in range(3))
    bias = torch.randn(264).bfloat16()
    moved = [t.to(device) for t in (x, bias, residual)]
    first = run(*moved, 0.3, seed_of(4, device), grad.to(device))
    assert_same_bits(run(*moved, 0.3, seed_of(4, device), grad.to(device)), first)
    assert_same_bits(run(x, bias, residual, 0.3, seed_of(4, "cpu"), grad), first)


def test_compiled_it_draws_anew(device):
    x = torch.ones(24, 32, device=device).requires_grad_()
    compiled = torch.compile(bias_dropout_add, fullgraph=True, backend="aot_eager")
    drawn = [compiled(x, None, torch.zeros_like(x), 0.5) for _ in range(2)]
    assert not torch.equal(*drawn)
    for out in drawn:
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(x))
        assert_same_bits(dx, out)


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(26)
    rows, cols = 65552, 32784  # 2.149e9 elements
    x, residual = (
        torch.empty(rows, cols, dtype=BF16, device="cuda").normal_().requires_grad_()
        for _ in range(2)
    )
    seed = seed_of(6, "cuda")
    out = bias_dropout_add(x, None, residual, 0.25, seed=seed)
    (dx,) = torch.autograd.grad(out, x, residual)
    last = slice(rows - 16, rows)
    kept = op.keep_mask(seed, rows, 8, 0.25)[last]
    scale = 65536 / (65536 - op.drop_threshold(0.25))
    exact = residual[last, :8].double() + x[last, :8].double() * kept * scale
    assert torch.equal(out[last, :8], exact.float().to(BF16))
    assert torch.equal(dx[last, :8], (residual[last, :8].double() * kept * scale).float().to(BF16))
    # The end of a row: its last 8 columns are vector 4097.
    vec = torch.tensor(cols // 8 - 1, device="cuda")
    row = torch.arange(rows, device="cuda")[last]
    counter = (vec.expand(16), row, row * 0, row * 0)
    words = torch.stack(op.philox4x32(counter, (seed, seed * 0)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).reshape(16, 8)
    assert torch.equal(dx[last, -8:] != 0, (halves >= 16384) & (residual[last, -8:] != 0))
