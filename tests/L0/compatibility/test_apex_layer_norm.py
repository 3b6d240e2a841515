"""apex's fused_layer_norm_cuda: forwards, backwards, mixed dtypes and the memory-efficient form."""

import pytest
import torch
from apex_te.compatibility.apex import fused_layer_norm_cuda as norm
from checks import DTYPES, assert_as_good_as_torch

EPS = 1e-5
LARGEST = 8.0
SHAPES = [((6, 7, 40), (40,)), ((5, 3, 4, 8), (4, 8)), ((70, 515), (515,)), ((9, 8), (9, 8))]
PAIRS = [(d, d) for d in DTYPES] + [
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


def formula(x, shape, gamma, beta, rms, dtype):
    """(y, mean, 1 / sqrt(variance + eps)) computed in ``dtype``, differentiable."""
    dims = tuple(range(-len(shape), 0))
    x = x.to(dtype)
    mean = torch.zeros_like(x) if rms else x.mean(dims, keepdim=True)
    invvar = torch.rsqrt((x - mean).square().mean(dims, keepdim=True) + EPS)
    y = (x - mean) * invvar
    if gamma is not None:
        y = y * gamma.to(dtype)
    if beta is not None:
        y = y + beta.to(dtype)
    return y, mean, invvar


def reference(x, shape, gamma, beta, dy, rms, dtype):
    """Outputs and gradients in ``dtype``."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, gamma, beta) if t is not None]
    weights = [*leaves[1:], None, None][:2]
    if gamma is None:
        weights = [None, None]
    y, mean, invvar = formula(leaves[0], shape, *weights, rms, dtype)
    grads = torch.autograd.grad(y, leaves, dy.to(dtype))
    return [y.detach(), mean.detach().flatten(), invvar.detach().flatten(), *grads]


def inputs(device, shape, normalized, x_dtype, w_dtype, affine, rms):
    x = torch.randn(shape).mul_(2).add_(0.5).clamp_(-LARGEST, LARGEST).to(x_dtype)
    gamma = beta = None
    if affine:
        gamma = (torch.randn(normalized) * 0.3 + 1).to(w_dtype)
        beta = None if rms else torch.randn(normalized).to(w_dtype)
    dy = torch.randn(shape).to(w_dtype)
    return [None if t is None else t.to(device) for t in (x, gamma, beta, dy)]


def check(*draws, has_mean=False):
    """Each draw's (actual, exact, same); the largest of a few errors would be an accident."""
    for i, outputs in enumerate(zip(*(zip(*draw, strict=True) for draw in draws), strict=True)):
        actual, exact, same = (
            torch.cat([t.reshape(-1).cpu() for t in tensors])
            for tensors in zip(*outputs, strict=True)
        )
        if i == 1 and has_mean:  # a mean, to the rounding of the values it is the sum of
            assert ((actual.double() - exact).abs() <= 2.0**-22 * LARGEST).all()
        else:
            assert_as_good_as_torch(actual, exact, same.to(actual.dtype))


@pytest.mark.cover(2)
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize(("shape", "normalized"), SHAPES, ids=str)
def test_affine(device, poison, shape, normalized, x_dtype, w_dtype, rms, memory_efficient):
    check(
        *(
            affine(device, shape, normalized, x_dtype, w_dtype, rms, memory_efficient)
            for _ in range(8)
        ),
        has_mean=not rms,
    )


def affine(device, shape, normalized, x_dtype, w_dtype, rms, memory_efficient):
    """What apex's autograd functions do, forward and backward: (actual, exact, same dtype)."""
    x, gamma, beta, dy = inputs(device, shape, normalized, x_dtype, w_dtype, True, rms)
    prefix = "rms_" if rms else ""
    suffix = "" if x_dtype is w_dtype else "_mixed_dtypes"
    weights = [gamma] if rms else [gamma, beta]
    forward = getattr(norm, f"{prefix}forward_affine{suffix}")
    out = forward(x, torch.Size(normalized), *weights, EPS)
    assert isinstance(out, list)
    output, *mean, invvar = out
    assert output.dtype is w_dtype
    assert invvar.shape == (x.numel() // gamma.numel(),)
    assert invvar.dtype is torch.float32
    saved = output if memory_efficient else x
    means = [] if rms else [None if memory_efficient else mean[0]]
    grads = getattr(norm, f"{prefix}backward_affine")(
        dy, *means, invvar, saved, normalized, *weights, EPS, memory_efficient
    )
    assert [g.dtype for g in grads] == [saved.dtype, *(w.dtype for w in weights)]
    assert [g.shape for g in grads] == [x.shape, *(w.shape for w in weights)]
    cpu = [None if t is None else t.cpu() for t in (x, gamma, beta, dy)]
    wide = torch.float64, torch.float32
    exact, same = (reference(cpu[0], normalized, *cpu[1:], rms, dtype) for dtype in wide)
    if rms:
        del exact[1], same[1]
    if memory_efficient:
        # What it works on is the rounded output; the exact gradients are those of that.
        count = len(out)
        exact[count:], same[count:] = (
            from_output(output.cpu(), invvar.cpu(), normalized, *cpu[1:], rms, d) for d in wide
        )
    return [*out, *grads], exact, same


def from_output(y, invvar, shape, gamma, beta, dy, rms, dtype):
    """apex's memory-efficient gradients in ``dtype``: what was normalised is (y - beta) / gamma."""
    rows = invvar.numel()
    y, dy = (t.to(dtype).reshape(rows, -1) for t in (y, dy))
    invvar = invvar.to(dtype).unsqueeze(1)
    weight = None if gamma is None else gamma.to(dtype).flatten()
    xhat = y if beta is None else y - beta.to(dtype).flatten()
    if weight is not None:
        magnitude = weight.abs().clamp(min=EPS)
        xhat = xhat / torch.where(weight >= 0, magnitude, -magnitude)
    d = dy if weight is None else dy * weight
    dx = d - xhat * (d * xhat).mean(1, keepdim=True)
    if not rms:
        dx = dx - d.mean(1, keepdim=True)
    found = [dx * invvar]
    if weight is not None:
        found.append((dy * xhat).sum(0))
        if not rms:
            found.append(dy.sum(0))
    return found


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_weights(device, poison, dtype, rms, memory_efficient):
    draws = (without_weights(device, dtype, rms, memory_efficient) for _ in range(8))
    check(*draws)


def without_weights(device, dtype, rms, memory_efficient):
    shape, normalized = SHAPES[1]
    x, _, _, dy = inputs(device, shape, normalized, dtype, dtype, False, rms)
    prefix = "rms_" if rms else ""
    output, *mean, invvar = getattr(norm, f"{prefix}forward")(x, normalized, EPS)
    saved = output if memory_efficient else x
    means = [] if rms else [None if memory_efficient else mean[0]]
    grad = getattr(norm, f"{prefix}backward")(
        dy, *means, invvar, saved, normalized, EPS, memory_efficient
    )
    assert grad.shape == x.shape
    found = []
    for wide in (torch.float64, torch.float32):
        y, _, inv, dx = reference(x.cpu(), normalized, None, None, dy.cpu(), rms, wide)
        if memory_efficient:
            rest = (normalized, None, None, dy.cpu(), rms, wide)
            (dx,) = from_output(output.cpu(), invvar.cpu(), *rest)
        found.append([y, inv, dx])
    return [output, invvar, grad], *found


def test_memory_efficient_clamps_gamma(device):
    """apex replaces |gamma| < epsilon by epsilon, of gamma's sign, where it divides."""
    draws = []
    for _ in range(100):
        x, dy = (torch.randn(6, 8, device=device) for _ in range(2))
        gamma, beta = torch.ones(8, device=device), torch.randn(8, device=device)
        gamma[:3] = torch.tensor([0.0, -1e-9, 1e-9])
        y, _, invvar = norm.forward_affine(x, (8,), gamma, beta, EPS)
        grads = norm.backward_affine(dy, None, invvar, y, (8,), gamma, beta, EPS, True)
        assert all(g.isfinite().all() for g in grads)
        cpu = [t.cpu() for t in (y, invvar, gamma, beta, dy)]
        draws.append(
            (
                grads,
                *(
                    from_output(*cpu[:2], (8,), *cpu[2:], False, d)
                    for d in (torch.float64, torch.float32)
                ),
            )
        )
    check(*draws)


class FusedLayerNormAffine(torch.autograd.Function):
    """What apex's function of that name does with the extension."""

    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps, memory_efficient):
        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        output, mean, invvar = norm.forward_affine(x, shape, weight, bias, eps)
        saved = (output, weight, bias, None, invvar)
        ctx.save_for_backward(*(saved if memory_efficient else (x, weight, bias, mean, invvar)))
        ctx.rest = shape, eps, memory_efficient
        return output

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, mean, invvar = ctx.saved_tensors
        shape, eps, memory_efficient = ctx.rest
        return *norm.backward_affine(
            grad.contiguous(), mean, invvar, x, shape, weight, bias, eps, memory_efficient
        ), None, None, None  # fmt: skip


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_a_layer_trains_as_torch_s(device, memory_efficient):
    torch_norm = torch.nn.LayerNorm(64, device=device)
    torch.nn.init.normal_(torch_norm.weight, 1.0, 0.1)
    weight, bias = (p.detach().clone().requires_grad_() for p in torch_norm.parameters())
    x = torch.randn(2, 9, 64, device=device).transpose(0, 1).requires_grad_()
    other = x.detach().clone().requires_grad_()
    out = FusedLayerNormAffine.apply(x, weight, bias, torch.Size([64]), 1e-5, memory_efficient)
    out.square().sum().backward()
    expected = torch_norm(other)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    for a, b in ((x, other), (weight, torch_norm.weight), (bias, torch_norm.bias)):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_bad_shapes_name_themselves(device):
    x = torch.randn(4, 6, device=device)
    weight = torch.ones(6, device=device)
    with pytest.raises(ValueError, match=r"input must end in normalized_shape \[5\]"):
        norm.forward(x, (5,), EPS)
    with pytest.raises(ValueError, match=r"normalized_shape \[\]"):
        norm.rms_forward(x, (), EPS)
    with pytest.raises(ValueError, match=r"beta must have shape \[6\], got \[5\]"):
        norm.forward_affine(x, (6,), weight, weight[:5], EPS)
    with pytest.raises(TypeError, match="float64"):
        norm.forward_affine(x.double(), (6,), weight.double(), weight.double(), EPS)


def test_no_rows(device):
    x = torch.empty(0, 6, device=device)
    weight = torch.ones(6, device=device)
    y, mean, invvar = norm.forward_affine(x, (6,), weight, weight, EPS)
    assert (y.shape, mean.shape, invvar.shape) == ((0, 6), (0,), (0,))
    grads = norm.backward_affine(y, mean, invvar, x, (6,), weight, weight, EPS, False)
    assert [g.tolist() for g in grads] == [[], [0.0] * 6, [0.0] * 6]
