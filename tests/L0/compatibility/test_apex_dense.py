"""apex's dense layers, MLP and weight-gradient accumulation against plain PyTorch."""

from itertools import pairwise

import pytest
import torch
from apex_te.compatibility.apex import fused_dense_cuda, fused_weight_gradient_mlp_cuda, mlp_cuda
from checks import DTYPES, assert_as_good_as_torch

ACTIVATIONS = {0: lambda x: x, 1: torch.relu, 2: torch.sigmoid}


def make(device, dtype, *shapes, scale=0.3):
    return [(torch.randn(s) * scale).to(dtype).to(device) for s in shapes]


def run(formula, tensors, dy, wide):
    """[output, gradients of the tensors] of ``formula``, computed in ``wide`` on the CPU."""
    leaves = [t.detach().cpu().to(wide).requires_grad_() for t in tensors]
    y = formula(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.cpu().to(wide))]


def check(actual, formula, tensors, dy, dtype):
    exact, same = (run(formula, tensors, dy, wide) for wide in (torch.float64, dtype))
    for a, e, s in zip(actual, exact, same, strict=True):
        assert_as_good_as_torch(a, e, s)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_bias(device, dtype):
    """apex's FusedDense: forward, then backward from what it saved."""
    x, weight, bias, dy = make(device, dtype, (13, 24), (17, 24), 17, (13, 17))
    y = fused_dense_cuda.linear_bias_forward(x, weight, bias.t())
    grads = fused_dense_cuda.linear_bias_backward(x, weight, dy)
    assert isinstance(grads, list)
    check([y, *grads], torch.nn.functional.linear, [x, weight, bias], dy, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gelu_linear(device, dtype):
    """apex's FusedDenseGeluDense: the order of results and of gradients."""
    x, w1, b1, w2, b2, dy = make(device, dtype, (13, 24), (40, 24), 40, (17, 40), 17, (13, 17))
    output1, y, gelu_in = fused_dense_cuda.linear_gelu_linear_forward(x, w1, b1, w2, b2)
    torch.testing.assert_close(gelu_in, torch.nn.functional.linear(x, w1, b1))
    expected = torch.nn.functional.gelu(gelu_in.double(), approximate="tanh")
    same = torch.nn.functional.gelu(gelu_in, approximate="tanh")
    assert_as_good_as_torch(output1, expected, same)
    grads = fused_dense_cuda.linear_gelu_linear_backward(x, gelu_in, output1, w1, w2, dy)

    def formula(x, w1, b1, w2, b2):
        hidden = torch.nn.functional.gelu(torch.addmm(b1, x, w1.t()), approximate="tanh")
        return torch.addmm(b2, hidden, w2.t())

    check([y, *grads], formula, [x, w1, b1, w2, b2], dy, dtype)


def mlp(activation, use_bias, x, *parameters):
    layers = len(parameters) // (2 if use_bias else 1)
    for i in range(layers):
        x = x @ parameters[i].t()
        if use_bias:
            x = x + parameters[layers + i]
        x = ACTIVATIONS[activation](x)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("use_bias", [0, 1])
@pytest.mark.parametrize("sizes", [(24, 17, 40, 9), (24, 9)], ids=str)
def test_mlp(device, poison, sizes, use_bias, activation, dtype):
    """apex's MlpFunction: what forward returns goes back whole, the gradients in inputs' order."""
    shapes = [(13, sizes[0]), *((b, a) for a, b in pairwise(sizes))]
    shapes += [(b,) for b in sizes[1:]] if use_bias else []
    inputs = make(device, dtype, *shapes)
    (dy,) = make(device, dtype, (13, sizes[-1]))
    for t in inputs:
        t.requires_grad_()
    outputs = mlp_cuda.forward(use_bias, activation, tuple(inputs))
    assert len(outputs) == 2
    grads = mlp_cuda.backward(use_bias, activation, dy, outputs, tuple(inputs))
    check(
        [outputs[0], *grads], lambda *t: mlp(activation, use_bias, *t), inputs, dy, dtype
    )  # fmt: skip
    plain = [inputs[0].detach(), *inputs[1:]]
    again = mlp_cuda.backward(use_bias, activation, dy, outputs, plain)
    assert again[0] is None
    assert all(torch.equal(a, b) for a, b in zip(again[1:], grads[1:], strict=True))


def test_mlp_refuses(device):
    x, w = make(device, torch.float32, (3, 4), (5, 4))
    with pytest.raises(ValueError, match=r"activation must be 0 \(none\), 1 \(ReLU\) or 2"):
        mlp_cuda.forward(0, 3, [x, w])
    with pytest.raises(ValueError, match="x, n weights and n biases, got 4 tensors"):
        mlp_cuda.forward(1, 1, [x, w, w, w])
    with pytest.raises(ValueError, match="d_output must have 2 dimensions"):
        fused_dense_cuda.linear_bias_backward(x, w, x[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(70,), (7, 10)], ids=str)
def test_wgrad_accum_fp32(device, dtype, lead):
    x, dy = make(device, dtype, (*lead, 24), (*lead, 17), scale=1.0)
    main_grad = torch.randn(17, 24, device=device)
    before = main_grad.clone()
    assert fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, dy, main_grad) is None
    rows = [t.cpu().reshape(70, -1) for t in (x, dy)]
    exact, same = (
        before.cpu().to(d) + rows[1].to(d).t() @ rows[0].to(d)
        for d in (torch.float64, torch.float32)
    )
    assert_as_good_as_torch(main_grad, exact, same)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wgrad_accum_fp16(device, dtype):
    x, dy, main_grad = make(device, dtype, (70, 24), (70, 17), (17, 24), scale=1.0)
    before = main_grad.cpu().clone()
    fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(x, dy, main_grad)
    exact = before.double() + dy.cpu().double().t() @ x.cpu().double()
    assert_as_good_as_torch(main_grad, exact, before + dy.cpu().t() @ x.cpu())


def test_wgrad_refuses(device):
    x, dy = make(device, torch.bfloat16, (70, 24), (70, 17))
    wide, low = torch.zeros(17, 24, device=device), torch.zeros(17, 24, device=device).half()
    fp32 = fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    fp16 = fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16
    with pytest.raises(TypeError, match=r"d_weight must be float32, got torch.float16"):
        fp32(x, dy, low)
    with pytest.raises(TypeError, match=r"d_weight must be float16 or bfloat16 as input is"):
        fp16(x, dy, low)
    with pytest.raises(TypeError, match=r"d_output must be torch.bfloat16 as input is"):
        fp32(x, dy.float(), wide)
    with pytest.raises(ValueError, match=r"d_weight must have shape \[17, 24\], got \[24, 17\]"):
        fp32(x, dy, wide.t())
    with pytest.raises(ValueError, match="d_output must have shape"):
        fp32(x, dy[:60], wide)
