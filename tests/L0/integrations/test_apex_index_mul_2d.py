"""apex's fused_index_mul_2d and its package, as a model of forces trains with them."""

import pytest
import torch
from apex_te.compatibility.apex import fused_index_mul_2d
from checks import DTYPES, assert_same_bits

from apex_te.integrations.apex.contrib.index_mul_2d import index_mul_2d


@pytest.mark.parametrize("kind", ["float", "half"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extension(device, dtype, kind):
    """What apex's autograd functions pass, and what autograd makes of torch's formula."""
    names = ("forward", "backward", "backward_backward")
    forward, backward, second = (getattr(fused_index_mul_2d, f"{kind}_{name}") for name in names)
    in1, d1 = torch.randn(2, 30, 64, device=device).to(dtype)
    in2, dout, d2 = torch.randn(3, 100, 64, device=device).to(dtype)
    index = torch.randint(30, (100,), device=device)
    leaves = [t.clone().requires_grad_() for t in (in1, in2, dout)]
    expected = index_mul_2d(*leaves[:2], index)
    grads = torch.autograd.grad(expected, leaves[:2], leaves[2], create_graph=True)
    seconds = torch.autograd.grad(grads, leaves, (d1, d2))
    out, d_dout, g2 = (torch.empty_like(in2) for _ in range(3))
    assert forward(out, in1, in2, index) is None
    assert_same_bits(out, expected)
    g1 = torch.zeros_like(in1)
    assert backward(g1, g2, dout, in1, in2, index) is None
    assert_same_bits((g1, g2), grads)
    assert second(d_dout, g1.zero_(), g2, dout, d1, d2, in1, in2, index) is None
    assert_same_bits((g1, g2, d_dout), seconds)


def train(multiply, device, steps=20):
    """Losses of energies and of forces, their gradients, of a small model of atoms and edges."""
    torch.manual_seed(5)
    atoms = torch.nn.Linear(4, 16).to(device)
    edges = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh()).to(device)
    place = torch.randn(10, 3, device=device)
    kinds, forces = torch.randn(10, 4, device=device), torch.randn(10, 3, device=device)
    first, second = torch.randint(10, (2, 60), device=device)
    optimizer = torch.optim.Adam([*atoms.parameters(), *edges.parameters()], lr=0.02)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = place.clone().requires_grad_()
        energy = multiply(atoms(kinds), edges(x[first] - x[second]), second).square().sum()
        (found,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = (found + forces).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_forces_train_as_with_torch(device):
    ours = train(index_mul_2d, device)
    expected = train(lambda a, b, index: a[index] * b, device)
    assert ours == pytest.approx(expected, rel=1e-4)
    assert ours[-1] < 0.8 * ours[0]
