"""Fp8Padding and Fp8Unpadding: groups of rows filled up with zeros, and back."""

import pytest
import torch

from apex_te import fp8_autocast, recipe
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.grouped.padding import Fp8Padding, Fp8Unpadding

SPLITS = [3, 0, 16, 17, 1]


def reference(x, splits, align):
    parts = []
    for part in x.split(splits):
        parts += [part, x.new_zeros(-len(part) % align, x.shape[1])]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_pads_each_group_and_back(dtype, device):
    x = (torch.randn(sum(SPLITS), 6) * 9).to(device).to(dtype)
    out, splits = Fp8Padding(5)(x, SPLITS)
    assert splits == [16, 0, 16, 32, 16]
    assert out.dtype == dtype
    assert torch.equal(out, reference(x, SPLITS, 16))
    assert torch.equal(Fp8Unpadding(5)(out, SPLITS), x)


def test_gradients(device):
    x = torch.randn(sum(SPLITS), 6, dtype=torch.float64, device=device, requires_grad=True)
    pad, unpad = Fp8Padding(5, 4), Fp8Unpadding(5, 4)
    assert torch.autograd.gradcheck(lambda x: pad(x, SPLITS)[0], (x,))
    padded = pad(x.detach(), SPLITS)[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda p: unpad(p, SPLITS), (padded,))
    unpad(padded, SPLITS).sum().backward()
    ones = torch.ones(sum(SPLITS), 6, dtype=torch.float64, device=device)
    assert torch.equal(padded.grad, reference(ones, SPLITS, 4))


def test_alignment():
    x = torch.ones(sum(SPLITS), 2)
    assert Fp8Padding(5, 8)(x, SPLITS)[1] == [8, 0, 16, 24, 8]
    for scheme, expected in ((recipe.MXFP8Scaling(), 32), (recipe.BlockScaling(), 16)):
        with fp8_autocast(True, scheme):
            out, splits = Fp8Padding(5)(x, SPLITS)
            assert torch.equal(Fp8Unpadding(5)(out, SPLITS), x)
        assert splits == [-(-rows // expected) * expected for rows in SPLITS]
    aligned = torch.ones(48, 2)
    out, splits = Fp8Padding(2)(aligned, (16, 32))
    assert out is aligned
    assert splits == [16, 32]
    assert Fp8Unpadding(2)(aligned, (16, 32)) is aligned
    assert "num_gemms=5, align_size=8" in repr(Fp8Padding(5, 8))


def test_padding_around_a_grouped_linear_changes_nothing(device):
    module = GroupedLinear(5, 32, 16, device=device)
    x = torch.randn(sum(SPLITS), 32).to(device)
    scheme = recipe.CurrentScaling()
    with fp8_autocast(True, scheme), torch.no_grad():
        expected = module(x, SPLITS)
        out = Fp8Unpadding(5)(module(*Fp8Padding(5)(x, SPLITS)), SPLITS)
    assert torch.allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_compiles():
    pad, unpad = Fp8Padding(5), Fp8Unpadding(5)

    def both(x):
        out, _ = pad(x * 2, SPLITS)
        return unpad(out + 1, SPLITS)

    x = torch.randn(sum(SPLITS), 6, requires_grad=True)
    out = torch.compile(both, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(out, x * 2 + 1)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.parametrize("kind", [Fp8Padding, Fp8Unpadding])
def test_rejects(kind):
    name = kind.__name__
    with pytest.raises(TypeError, match=f"{name}: align_size must be an int or None, got str"):
        kind(2, "16")
    with pytest.raises(ValueError, match=f"{name}: align_size must be at least 1, got 0"):
        kind(2, 0)
    module, x = kind(2, 1), torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"inp must have shape \[5, features\].*got \[4, 3\]"):
        module(x, [2, 3])
    with pytest.raises(ValueError, match=r"got \[2, 2, 3\]"):
        module(torch.ones(2, 2, 3), [2, 2])
    with pytest.raises(ValueError, match=r"m_splits must be 2 counts of rows, got \[4\]"):
        module(x, [4])
    with pytest.raises(ValueError, match=r"m_splits must be 2 counts of rows, got \[5, -1\]"):
        module(x, [5, -1])
    with pytest.raises(TypeError, match="m_splits must be a list of ints, got Tensor"):
        module(x, torch.tensor([2, 2]))
    with pytest.raises(TypeError, match="m_splits must hold ints, got float"):
        module(x, [2.0, 2])
