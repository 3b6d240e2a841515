"""Linear against torch.nn.Linear: values, gradients, shapes, dtypes, arguments."""

import math

import pytest
import torch

from apex_te import Linear, fp8_autocast
from apex_te.ops.product_count import fp8_gemm_count
from apex_te.recipe import DelayedScaling, Format

HYBRID = DelayedScaling(amax_history_len=4)


def sqnr(reference, actual):
    reference, actual = reference.detach().double(), actual.detach().double()
    return 20 * math.log10(reference.norm() / (reference - actual).norm())


def twin(module):
    """torch.nn.Linear with the same parameters, in fp32."""
    plain = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None)
    plain.load_state_dict({k: v.float().cpu() for k, v in module.named_parameters()})
    return plain


def run(module, x, grad, recipe=HYBRID, enabled=True, **kwargs):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with fp8_autocast(enabled, recipe):
        out = module(x, **kwargs)
    out.backward(grad)
    return out.detach(), x.grad


def check_floors(module, x, grad, recipe=HYBRID):
    for _ in range(2):  # the second region has its scales
        out, dx = run(module, x, grad, recipe)
    plain = twin(module)
    x32 = x.float().cpu().requires_grad_()
    expected = plain(x32)
    expected.backward(grad.float().cpu())
    assert out.dtype == x.dtype
    assert dx.dtype == x.dtype
    assert sqnr(expected, out.cpu()) >= 25
    assert sqnr(x32.grad, dx.cpu()) >= 17
    assert sqnr(plain.weight.grad, module.weight.grad.cpu()) >= 17
    if module.bias is not None:
        assert sqnr(plain.bias.grad, module.bias.grad.cpu()) >= 30
        assert module.bias.grad.dtype == module.bias.dtype
    assert module.weight.grad.dtype == module.weight.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
@pytest.mark.parametrize("bias", [True, False])
def test_sqnr_floors(dtype, fp8_format, bias, device):
    recipe = DelayedScaling(fp8_format=fp8_format, amax_history_len=4)
    module = Linear(64, 48, bias, params_dtype=dtype, device=device)
    x = torch.randn(32, 64).to(device).to(dtype)
    check_floors(module, x, torch.randn(32, 48).to(device).to(dtype), recipe)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 5, 64), (2, 1, 4, 64)])
def test_leading_dimensions(shape, device):
    module = Linear(64, 16, device=device)
    x = torch.randn(shape).to(device)
    check_floors(module, x, torch.randn(*shape[:-1], 16).to(device))
    with fp8_autocast(True, HYBRID):
        assert module(x).shape == (*shape[:-1], 16)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 3), (17, 129), (127, 15)])
def test_odd_sizes(k, n, device):
    module = Linear(k, n, device=device)
    check_floors(module, torch.randn(9, k).to(device), torch.randn(9, n).to(device))


def test_non_contiguous_input_and_gradient(device):
    module = Linear(32, 16, device=device)
    wide, dy = torch.randn(32, 24).to(device), torch.randn(16, 24).to(device)
    strided = run(module, wide.t(), dy.t()), module.weight.grad.clone()
    module.fp8_state.reset()
    packed = run(module, wide.t().contiguous(), dy.t().contiguous()), module.weight.grad
    assert torch.equal(strided[0][0], packed[0][0])
    assert torch.equal(strided[0][1], packed[0][1])
    assert torch.equal(strided[1], packed[1])


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
@pytest.mark.parametrize("enabled", [True, False])
def test_zero_tokens(shape, enabled, device):
    module = Linear(16, 32, device=device)
    x, dy = torch.empty(shape, device=device), torch.empty(*shape[:-1], 32, device=device)
    out, dx = run(module, x, dy, enabled=enabled)
    assert out.shape == dy.shape
    assert dx.shape == x.shape
    assert module.weight.grad.eq(0).all()
    assert module.bias.grad.eq(0).all()


def test_three_fp8_gemms_per_step(device):
    module = Linear(16, 32, device=device)
    before = fp8_gemm_count()
    run(module, torch.randn(4, 16).to(device), torch.randn(4, 32).to(device))
    assert fp8_gemm_count() - before == 3
    run(module, torch.randn(4, 16).to(device), torch.randn(4, 32).to(device), enabled=False)
    assert fp8_gemm_count() - before == 3


def test_without_fp8_it_is_torch_linear():
    module, x, dy = Linear(16, 32), torch.randn(4, 16), torch.randn(4, 32)
    out, dx = run(module, x, dy, enabled=False)
    plain = twin(module)
    x = x.clone().requires_grad_()
    expected = plain(x)
    expected.backward(dy)
    assert torch.equal(out, expected)
    assert torch.equal(dx, x.grad)
    assert torch.equal(module.weight.grad, plain.weight.grad)
    assert isinstance(module, torch.nn.Linear)
    assert not module.fp8_state.allocated


def saved_tensors(module, x):
    saved = []
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with pack, fp8_autocast(True, HYBRID):
        module(x)
    return saved


def test_saves_of_the_input_only_its_fp8_transpose():
    module, x = Linear(16, 32), torch.randn(4, 16, requires_grad=True)
    saved = [(tuple(t.shape), t.dtype) for t in saved_tensors(module, x)]
    assert saved == [
        ((16, 16), torch.float8_e4m3fn), ((1,), torch.float32), ((32, 16), torch.float32),
    ]  # fmt: skip
    module.weight.requires_grad_(False)
    assert [t is module.weight for t in saved_tensors(module, x)] == [True]
    module.weight.requires_grad_(True)
    saved = saved_tensors(module, x.detach())
    assert [tuple(t.shape) for t in saved] == [(16, 16), (1,)]


def test_frozen_weight_and_bias_only():
    module = Linear(16, 32)
    module.weight.requires_grad_(False)
    x, dy = torch.randn(8, 16), torch.randn(8, 32)
    _, dx = run(module, x, dy)
    assert module.weight.grad is None
    assert torch.allclose(module.bias.grad, dy.sum(0), atol=1e-5)
    assert dx is not None
    with fp8_autocast(True, HYBRID):
        out = module(x)  # only the bias learns
    module.zero_grad()
    out.backward(dy)
    assert torch.allclose(module.bias.grad, dy.sum(0), atol=1e-5)


def test_high_precision_wgrad():
    recipe = DelayedScaling(override_linear_precision=(False, False, True))
    module = Linear(64, 32)
    x, dy = torch.randn(16, 64), torch.randn(16, 32)
    before = fp8_gemm_count()
    run(module, x, dy, recipe)
    assert fp8_gemm_count() - before == 2
    assert torch.allclose(module.weight.grad, dy.t() @ x, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [True, False])
def test_torch_autocast(dtype, fp8):
    if dtype is torch.float16 and not fp8:
        pytest.skip("needs an FP16 matmul")
    module = Linear(32, 16)
    x = torch.randn(8, 32, requires_grad=True)
    for _ in range(2):
        with torch.autocast("cpu", dtype), fp8_autocast(fp8, HYBRID):
            out = module(x)
            out.float().sum().backward()  # inside autocast: our maths keep their dtypes
    assert out.dtype == dtype
    assert x.grad.dtype == torch.float32
    assert module.weight.grad.dtype == torch.float32
    expected = torch.nn.functional.linear(x, module.weight, module.bias)
    assert sqnr(expected.detach(), out.detach()) >= 25
    with torch.autocast("cpu", dtype), fp8_autocast(fp8, HYBRID):
        assert module(x.to(dtype)).dtype == dtype


def test_output_can_be_changed_in_place():
    module = Linear(16, 16)
    for shape in ((4, 16), (2, 2, 16), (16,)):
        with fp8_autocast(True, HYBRID):
            out = module(torch.randn(shape))
        torch.relu_(out).sum().backward()
    assert module.weight.grad is not None


def test_repeatable():
    module, x, dy = Linear(64, 32), torch.randn(16, 64), torch.randn(16, 32)
    run(module, x, dy)
    first = *run(module, x, dy), module.weight.grad.clone(), module.bias.grad.clone()
    second = *run(module, x, dy), module.weight.grad, module.bias.grad
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_return_bias():
    module, x = Linear(16, 8, return_bias=True), torch.randn(4, 16)
    torch.nn.init.ones_(module.bias)
    for fp8 in (True, False):
        with fp8_autocast(fp8, HYBRID):
            out, bias = module(x)
        assert torch.equal(bias, module.bias)
        assert sqnr((x @ module.weight.t()).detach(), out.detach()) > 20
    out, bias = Linear(16, 8, False, return_bias=True)(x)
    assert bias.numel() == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x)[1].dtype == torch.bfloat16


def test_weight_passed_in():
    owner = Linear(16, 8)
    borrower = Linear(16, 8, skip_weight_param_allocation=True)
    assert list(borrower.parameters()) == []
    x, dy = torch.randn(4, 16), torch.randn(4, 8)
    out, dx = run(owner, x, dy)
    grads = owner.weight.grad, owner.bias.grad
    owner.zero_grad()
    other, other_dx = run(borrower, x, dy, weight=owner.weight, bias=owner.bias)
    assert torch.equal(out, other)
    assert torch.equal(dx, other_dx)
    assert torch.equal(grads[0], owner.weight.grad)
    assert torch.equal(grads[1], owner.bias.grad)
    with pytest.raises(ValueError, match="weight must be passed to forward"):
        borrower(x)
    with pytest.raises(ValueError, match="bias must be passed to forward"):
        borrower(x, owner.weight)
    with pytest.raises(ValueError, match=r"weight must have shape \[8, 16\], got \[16, 8\]"):
        borrower(x, owner.weight.t(), owner.bias)
    with pytest.raises(TypeError, match="weight must be a tensor, got int"):
        borrower(x, 3)


def test_parametrized_weight():
    module = torch.nn.utils.parametrizations.weight_norm(Linear(16, 8))
    run(module, torch.randn(4, 16), torch.randn(4, 8))
    assert all(p.grad is not None for p in module.parameters())


def test_default_and_custom_initialisation():
    module = Linear(256, 256)
    assert abs(module.weight.std().item() - 0.023) < 0.001
    assert module.bias.eq(0).all()
    assert Linear(4, 4, init_method=torch.nn.init.ones_).weight.eq(1).all()
    assert Linear(4, 4, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert "in_features=4, out_features=6, bias=False" in repr(Linear(4, 6, False))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"sequence_parallel": 1}, TypeError, "sequence_parallel must be a bool, got int"),
        ({"tp_group": object()}, TypeError, "tp_group must be a .*ProcessGroup, got object"),
        ({"tp_size": 0}, ValueError, "tp_size must be at least 1, got 0"),
        ({"parallel_mode": "Row", "tp_size": 3}, ValueError, "in_features must be a multiple of"),
        ({"parallel_mode": "both"}, ValueError, "parallel_mode must be .* got 'both'"),
        ({"get_rng_state_tracker": 3}, TypeError, "get_rng_state_tracker must be a callable"),
        ({"dtype": torch.half, "params_dtype": torch.float}, ValueError, "dtype must equal"),
    ],
)
def test_rejects_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        Linear(4, 4, **kwargs)


@pytest.mark.parametrize("fp8", [True, False])
def test_rejects_inputs(fp8):
    module = Linear(16, 8)
    with fp8_autocast(fp8, HYBRID):
        with pytest.raises(TypeError, match=r"inp must have the dtype .* torch.float32, got"):
            module(torch.ones(4, 16, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match=r"last dimension of 16, got \[4, 15\]"):
            module(torch.ones(4, 15))
        with pytest.raises(ValueError, match=r"last dimension of 16, got \[\]"):
            module(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"tp_group must be a .*ProcessGroup"):
        module.set_tensor_parallel_group(object())


def test_double_precision_is_refused_in_fp8_only():
    module = Linear(16, 8).double()
    x = torch.ones(4, 16, dtype=torch.float64)
    assert module(x).dtype == torch.float64
    with fp8_autocast(True, HYBRID), pytest.raises(TypeError, match="x must"):
        module(x)


def test_double_backward_raises():
    module, x = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    with fp8_autocast(True, HYBRID):
        out = module(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
