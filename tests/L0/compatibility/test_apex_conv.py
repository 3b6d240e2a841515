"""apex's fused_conv_bias_relu and contrib.conv_bias_relu against plain PyTorch."""

import pytest
import torch
from apex_te.compatibility.apex import fused_conv_bias_relu as ext
from checks import DTYPES, assert_as_good_as_torch, needs_cuda
from torch.nn import functional as F

from apex_te.integrations.apex.contrib import conv_bias_relu as package


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    """Convolutions in fp32, where cuDNN would compute in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


FORMULAS = {
    "ConvBiasReLU": lambda conv, scale, bias, mask: torch.relu(conv + bias),
    "ConvBias": lambda conv, scale, bias, mask: conv + bias,
    "ConvBiasMaskReLU": lambda conv, scale, bias, mask: torch.relu((conv + bias) * mask),
    "ConvFrozenScaleBiasReLU": lambda conv, scale, bias, mask: torch.relu(conv * scale + bias),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_function(device, name, layout, dtype):
    """Output and the gradients of x, weight and bias, whose shape may be flat."""
    x, weight, scale, bias, mask, dy = (
        torch.randn(s).to(dtype).to(device)
        for s in ((2, 8, 9, 7), (16, 8, 3, 3), (16, 1, 1), (16,), (2, 16, 5, 4), (2, 16, 5, 4))
    )
    x, mask = x.to(memory_format=layout), (mask > 0).to(dtype)
    frozen = name == "ConvFrozenScaleBiasReLU"
    leaves = [t.requires_grad_() for t in ((x, weight) if frozen else (x, weight, bias))]
    extra = {"ConvBiasMaskReLU": (bias, mask), "ConvFrozenScaleBiasReLU": (scale, bias)}
    y = getattr(package, name)(x, weight, *extra.get(name, (bias,)), 1, 2)
    actual = [y, *torch.autograd.grad(y, leaves, dy)]
    results = []
    for wide in (torch.float64, dtype):
        cpu = [t.detach().cpu().to(wide).requires_grad_() for t in leaves]
        shaped = [t.detach().cpu().to(wide).view(-1, 1, 1) for t in (scale, bias)]
        if not frozen:
            shaped[1] = cpu[2].view(-1, 1, 1)
        conv = F.conv2d(cpu[0], cpu[1], padding=1, stride=2)
        out = FORMULAS[name](conv, *shaped, mask.cpu().to(wide))
        results.append([out.detach(), *torch.autograd.grad(out, cpu, dy.cpu().to(wide))])
    for a, exact, same in zip(actual, *results, strict=True):
        assert_as_good_as_torch(a, exact, same)


@needs_cuda
def test_autocast_computes_in_half():
    """As under apex's custom_fwd, also where autocast has another dtype."""
    x, weight, bias = (torch.randn(s, device="cuda") for s in ((1, 8, 4, 4), (8, 8, 3, 3), (8,)))
    weight.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y = package.ConvBiasReLU(x, weight, bias, 1, 1)
    assert y.dtype is torch.float16
    y.float().sum().backward()
    assert weight.grad.dtype is torch.float32


def test_extension_returns_lists(device):
    x, weight, flat = (torch.randn(s, device=device) for s in ((1, 8, 4, 4), (8, 8, 1, 1), (8,)))
    for bias in (flat, flat.view(1, 8, 1, 1)):
        (y,) = ext.forward([x, weight, bias], 0, 1)
        grads = ext.backward([x, weight, y, torch.ones_like(y)], 0, 1)
        assert [list(g.shape) for g in grads] == [[1, 8, 4, 4], [8, 8, 1, 1], [1, 8, 1, 1]]
        assert torch.equal(grads[2].flatten(), (y > 0).float().sum((0, 2, 3)))


def test_refuses(device):
    x, weight, bias = (torch.randn(s, device=device) for s in ((1, 8, 4, 4), (8, 8, 1, 1), (8,)))
    with pytest.raises(ValueError, match=r"fused_conv_bias_relu.forward: inputs must be 3 tensors"):
        ext.forward([x, weight], 0, 1)
    with pytest.raises(ValueError, match="bias must have 8 elements, got 7"):
        ext.forward([x, weight, bias[:7]], 0, 1)
    with pytest.raises(ValueError, match=r"weight \[K, C, R, S\], got \[1, 7, 4, 4\]"):
        ext.forward_no_relu([x[:, :7], weight, bias], 0, 1)
    with pytest.raises(ValueError, match="scale must have 8 elements, got 1"):
        ext.forward_cscale_cbias_relu([x, weight, bias[:1], bias], 0, 1)
