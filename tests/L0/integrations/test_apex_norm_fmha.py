"""apex's GroupNorm and FMHA against plain PyTorch."""

from types import SimpleNamespace

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch
from torch.nn import functional as F

from apex_te.integrations.apex.contrib.fmha import FMHA, FMHAFun
from apex_te.integrations.apex.contrib.group_norm import GroupNorm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["", "silu", "Swish"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_group_norm(device, layout, affine, act, dtype):
    """Output in the input's layout, and all gradients."""
    module = GroupNorm(4, 32, affine=affine, act=act, device=device, dtype=dtype)
    x, dy = (torch.randn(2, 32, 5, 6).to(dtype) for _ in range(2))
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape).to(p))
    leaf = x.to(device).to(memory_format=layout).requires_grad_()
    y = module(leaf)
    assert y.dtype is dtype
    assert y.is_contiguous(memory_format=layout)
    actual = [y, *torch.autograd.grad(y, [leaf, *module.parameters()], dy.to(device))]
    results = []
    for wide in (torch.float64, dtype):
        tensors = [x, *(p.detach().cpu() for p in module.parameters())]
        tensors = [t.to(wide).requires_grad_() for t in tensors]
        out = F.group_norm(tensors[0], 4, *(tensors[1:] or (None, None)), 1e-5)
        out = F.silu(out) if act else out
        results.append([out.detach(), *torch.autograd.grad(out, tensors, dy.to(wide))])
    for a, exact, same in zip(actual, *results, strict=True):
        assert_as_good_as_torch(a, exact, same)


def test_group_norm_of_another_dtype(device):
    """The parameters' dtype computes, the input's comes out."""
    module = GroupNorm(2, 8, device=device)
    x = torch.randn(3, 8, 7).to(torch.bfloat16).to(device)
    expected = F.group_norm(x.float(), 2, module.weight, module.bias).bfloat16()
    assert torch.equal(module(x), expected)
    assert set(module.state_dict()) == {"weight", "bias"}
    assert "act=silu" in repr(GroupNorm(2, 8, act="silu"))
    module.reset_parameters()
    assert (module.weight == 1).all()


def test_group_norm_refuses():
    with pytest.raises(ValueError, match="num_channels must be a multiple of num_groups, 3, got 8"):
        GroupNorm(3, 8)
    with pytest.raises(ValueError, match="act must be '', 'silu' or 'swish', got 'relu'"):
        GroupNorm(2, 8, act="ReLU")(torch.ones(1, 8))


def config(p=0.0, heads=4, hidden=64):
    return SimpleNamespace(
        attention_probs_dropout_prob=p, num_attention_heads=heads, hidden_size=hidden
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(5, 1, 9, 3), (16,), (7, 7)], ids=str)
def test_fmha(device, lengths, dtype):
    """Each sequence attends to itself alone; output and gradient, in training without dropout."""
    tokens = sum(lengths)
    qkv, dy = (torch.randn(tokens, n).to(dtype) for n in (3 * 64, 64))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    module = FMHA(config())
    assert module.state_dict() == {}
    leaf = qkv.to(device).requires_grad_()
    y = module(leaf, ends.to(device), max(lengths))
    assert y.shape == (tokens, 64)
    actual = [y, torch.autograd.grad(y, leaf, dy.to(device))[0]]
    results = []
    for wide, where in ((torch.float64, "cpu"), (dtype, device)):
        x = qkv.to(where, wide).requires_grad_()
        parts = []
        for part in x.view(tokens, 3, 4, 16).split(lengths):
            q, k, v = part.permute(1, 2, 0, 3)
            if wide is torch.float64:
                y = torch.softmax(q @ k.mT / 4, -1) @ v
            else:  # by a fused kernel, as exact as ours may be
                y = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
            parts.append(y.transpose(0, 1).flatten(1))
        out = torch.cat(parts)
        results.append([out.detach(), torch.autograd.grad(out, x, dy.to(where, wide))[0]])
    for a, exact, same in zip(actual, *results, strict=True):
        assert_as_good_as_torch(a, exact, same)


def test_fmha_drops_in_training_alone(device):
    module = FMHA(config(p=0.3))
    qkv = torch.randn(12, 192, device=device)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    plain = FMHA(config())(qkv, ends, 7)
    assert torch.equal(module(qkv, ends, 7, is_training=False), plain)
    dropped = module(qkv, ends, 7)
    assert not torch.equal(dropped, plain)
    with torch.no_grad():
        mean = torch.stack([module(qkv, ends, 7) for _ in range(400)]).mean(0)
    assert (mean - plain).abs().max() < 0.2 * plain.abs().max()
    shaped = FMHAFun.apply(qkv.view(-1, 3, 4, 16), ends, 0.3, 7, False, False)
    assert torch.equal(shaped.reshape(12, 64), plain)


def test_fmha_refuses():
    with pytest.raises(ValueError, match=r"hidden_size must be divisible by config.num_attention"):
        FMHA(config(heads=5))
