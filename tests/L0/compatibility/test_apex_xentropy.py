"""apex's xentropy_cuda against its formula, and through what apex's loss function does with it."""

import pytest
import torch
from apex_te.compatibility.apex import xentropy_cuda
from checks import DTYPES, assert_as_good_as_torch, assert_error_as_torch


def formula(logits, labels, smoothing):
    """(losses, log of the sum of exponentials) in the logits' dtype, differentiable."""
    total = torch.logsumexp(logits, 1)
    picked = total - logits.gather(1, labels[:, None]).squeeze(1)
    return (total - logits.mean(1)) * smoothing + picked * (1 - smoothing), total


class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    """What apex's function of that name does with the extension."""

    @staticmethod
    def forward(ctx, logits, labels, smoothing, padding_idx, half_to_float):
        losses, total = xentropy_cuda.forward(logits, labels, smoothing, half_to_float)
        losses.masked_fill_(labels == padding_idx, 0)
        ctx.save_for_backward(logits, total, labels)
        ctx.rest = smoothing, padding_idx
        return losses

    @staticmethod
    def backward(ctx, grad_loss):
        logits, total, labels = ctx.saved_tensors
        smoothing, padding_idx = ctx.rest
        grad_loss = grad_loss.contiguous().masked_fill(labels == padding_idx, 0)
        grad = xentropy_cuda.backward(grad_loss, logits, total, labels, smoothing)
        return grad, None, None, None, None


def inputs(device, dtype, rows=400, classes=101):
    logits = (torch.randn(rows, classes) * 3).to(dtype).to(device)
    return logits, torch.randint(classes, (rows,), device=device)


@pytest.mark.parametrize("half_to_float", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward(device, poison, dtype, smoothing, half_to_float):
    if half_to_float and dtype is torch.float32:
        pytest.skip("float32 logits have nothing to widen")
    logits, labels = inputs(device, dtype)
    found = xentropy_cuda.forward(logits, labels, smoothing, half_to_float)
    assert isinstance(found, list)
    losses, total = found
    assert losses.dtype is torch.float32
    assert total.dtype is (torch.float32 if half_to_float else dtype)
    grad_loss = torch.rand(len(labels), device=device)
    grad = xentropy_cuda.backward(grad_loss, logits, total, labels, smoothing)
    expected = []
    for wide, result in ((torch.float64, torch.float64), (torch.float32, dtype)):
        leaf = logits.cpu().to(wide).requires_grad_()
        loss, sums = formula(leaf, labels.cpu(), smoothing)
        (dx,) = torch.autograd.grad(loss, leaf, grad_loss.cpu().to(wide))
        if wide is torch.float32:
            # Derived from the rounded loss, as the extension's is.
            picked = leaf.gather(1, labels.cpu()[:, None]).squeeze(1)
            sums = loss + (1 - smoothing) * picked + smoothing * leaf.mean(1)
        expected.append((loss.detach(), sums.detach(), dx.to(result)))
    exact, same = expected
    assert_as_good_as_torch(losses, exact[0], same[0])
    assert_as_good_as_torch(total, exact[1], same[1].to(total.dtype))
    assert_as_good_as_torch(grad, exact[2], same[2])
    if dtype is not torch.float32:  # rounded once
        assert_error_as_torch(grad, exact[2], exact[2].to(dtype))


@pytest.mark.parametrize("padding_idx", [0, -100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_apex_s_loss(device, smoothing, padding_idx):
    """The loss function's sequence, masked rows included."""
    logits, labels = inputs(device, torch.float32)
    labels[::5] = padding_idx
    logits.requires_grad_()
    other = logits.detach().clone().requires_grad_()
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding_idx, False)
    expected = torch.nn.functional.cross_entropy(
        other, labels, ignore_index=padding_idx, label_smoothing=smoothing, reduction="none"
    )
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)
    assert not logits.grad[::5].any()


def test_logits_that_are_not_finite(device):
    logits, labels = inputs(device, torch.float32, rows=3)
    labels[:] = 1
    logits[0, 0] = -torch.inf
    logits[1, 1] = -torch.inf
    logits[2, 5] = torch.nan
    losses, total = xentropy_cuda.forward(logits, labels, 0.0, False)
    exact = torch.logsumexp(logits[0].double(), 0).float()
    torch.testing.assert_close(total[0], exact)
    assert losses[1] == torch.inf
    assert total[1:].isnan().all()
    assert losses[2].isnan()


def test_xentropy_refuses(device):
    logits, labels = inputs(device, torch.float32)
    with pytest.raises(TypeError, match="half_to_float needs float16 or bfloat16 input"):
        xentropy_cuda.forward(logits, labels, 0.0, True)
    with pytest.raises(ValueError, match=r"labels \[rows\], got \[400, 101\] and \[399\]"):
        xentropy_cuda.forward(logits, labels[:399], 0.0, False)
    with pytest.raises(ValueError, match=r"grad_loss must have shape \[400\], got \[1\]"):
        xentropy_cuda.backward(labels[:1].float(), logits, logits[:, 0], labels, 0.0)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="target"):
            xentropy_cuda.forward(logits, labels + 101, 0.0, False)
