"""apex's focal_loss_cuda and its package, as a detector trains with them."""

import pytest
import torch
import torch.nn.functional as F
from apex_te.compatibility.apex import focal_loss_cuda
from checks import DTYPES, assert_same_bits

from apex_te.integrations.apex.contrib.focal_loss import FocalLoss, focal_loss
from apex_te.ops import focal_loss as op


def sigmoid_focal_loss(logits, target, alpha, gamma):
    """The loss that detectors sum, of labels of 0 and 1."""
    p, ce = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    right = p * target + (1 - p) * (1 - target)
    return (alpha * target + (1 - alpha) * (1 - target)) * (1 - right) ** gamma * ce


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extension(device, dtype, smoothing):
    """The function that apex's Python makes of it."""
    logits = (torch.randn(2, 30, 96) * 3).to(device, dtype)
    target = torch.randint(-2, 91, (2, 30), device=device)
    count, factor = torch.tensor([11.0], device=device), torch.tensor(2.0, device=device)
    args = logits, target, count, 91, 0.24, 2.0, smoothing
    found = focal_loss_cuda.forward(*args)
    assert isinstance(found, list)
    loss, partial = found
    assert focal_loss_cuda.backward(factor, partial, count) is partial
    leaf = logits.clone().requires_grad_()
    ours = focal_loss(leaf, *args[1:])
    (ours * factor).backward()
    assert_same_bits(loss, ours)
    eps = torch.finfo(dtype).eps  # of the extension's two roundings
    torch.testing.assert_close(partial, leaf.grad, rtol=1.5 * eps, atol=1e-7)
    assert_same_bits(FocalLoss.apply(*args), loss)
    expected = op.reference(logits.double(), target, count.double(), *args[3:])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_refuses():
    logits, target, count = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64), torch.ones(1)
    with pytest.raises(ValueError, match=r"target must have shape \[4\], got \[3\]"):
        focal_loss_cuda.forward(logits, target[:3], count, 8, 0.25, 2.0, 0.0)
    with pytest.raises(TypeError, match="float64"):
        focal_loss(logits.double(), target, count, 8, 0.25, 2.0)


def train(loss_of, device, steps=20):
    """Losses of a small head over two levels of anchors, of which some are ignored."""
    torch.manual_seed(3)
    head = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 2 * 12, 1)
    ).to(device)
    torch.nn.init.constant_(head[2].bias, -2.0)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.2, momentum=0.9)
    levels = [torch.randn(2, 8, n, n, device=device) for n in (8, 4)]
    targets = [torch.randint(-2, 10, (2, n, n, 2), device=device) for n in (8, 4)]
    count = sum((t >= 0).sum() for t in targets).float().reshape(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for x, target in zip(levels, targets, strict=True):
            logits = head(x).permute(0, 2, 3, 1).reshape(*target.shape, 12)
            total = total + loss_of(logits, target, count, 10, 0.25, 2.0)
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


def test_a_detector_trains_as_with_torch(device):
    def plain(logits, target, count, num_classes, alpha, gamma):
        kept = target != -2
        labels = F.one_hot(target[kept].clamp(min=0), num_classes) * (target[kept] >= 0)[:, None]
        chosen = logits[kept][:, :num_classes]
        return sigmoid_focal_loss(chosen, labels.float(), alpha, gamma).sum() / count

    ours, expected = train(focal_loss, device), train(plain, device)
    assert ours == pytest.approx(expected, rel=1e-4)
    assert ours[-1] < 0.8 * ours[0]
