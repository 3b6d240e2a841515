"""focal_loss against its formula in float64: smoothing, padding, ignored rows, extremes."""

import pytest
import torch
from checks import (
    DTYPES,
    assert_as_good_as_torch,
    assert_portable_gives_same_bits,
    assert_same_bits,
    in_pairs,
    needs_cuda,
    needs_memory,
)

from apex_te.ops.focal_loss import (
    focal_loss,
    focal_loss_bwd,
    focal_loss_fwd,
    focal_loss_scale,
    reference,
)


def inputs(shape, device="cpu", dtype=torch.float32):
    logits = (torch.randn(shape) * 4).to(dtype)
    target = torch.randint(-2, max(shape[-1], 1), shape[:-1])
    return logits.to(device), target.to(device), torch.tensor([7.0], device=device)


def run(function, logits, *rest):
    """A loss and the gradient of its threefold."""
    leaf = logits.clone().requires_grad_()
    loss = function(leaf, *rest)
    (grad,) = torch.autograd.grad(loss * 3, leaf)
    return loss.detach(), grad


@in_pairs(
    dtype=DTYPES, gamma=[0.0, 1.5, 2.0], smoothing=[0.0, 0.2], padding=[0, 3], alpha=[0.25, 0.7],
    shape=[(1, 5), (7, 8), (300, 96), (2, 9, 11, 90), (100, 129), (3, 8200), (0, 8)],
)  # fmt: skip
def test_loss_and_gradient(device, poison, shape, dtype, gamma, smoothing, padding, alpha):
    logits, target, count = inputs(shape, dtype=dtype)
    options = shape[-1] - padding, alpha, gamma, smoothing
    loss, grad = run(focal_loss, *(t.to(device) for t in (logits, target, count)), *options)
    exact_loss, exact = run(reference, logits.double(), target, count.double(), *options)
    _, same = run(reference, logits, target, count.to(dtype), *options)
    assert loss.dtype is torch.float32
    assert grad.dtype is dtype
    # Terms within some ulp, whose float32 sums are added in double.
    torch.testing.assert_close(loss.cpu().double(), exact_loss, rtol=1e-6, atol=0)
    assert_as_good_as_torch(grad, exact, same)
    assert not grad[..., options[0] :].any()
    assert not grad[target == -2].any()


def test_all_classes_by_default(device):
    args = inputs((20, 16), device)
    assert_same_bits(focal_loss(*args), focal_loss(*args, 16, 0.25, 2.0, 0.0))


def test_targets_outside_the_classes_have_background_alone(device):
    logits, target, count = inputs((30, 16), device)
    background = run(focal_loss, logits, torch.full_like(target, -1), count, 12)
    for other in (12, 15, 16, -3, 1 << 40):
        found = run(focal_loss, logits, torch.full_like(target, other), count, 12)
        assert_same_bits(found, background)


def test_equal_logits_of_a_prior(device):
    """As a detector begins: small losses whose rounding errors all have one sign."""
    logits = torch.full((4096, 80), -4.59512, device=device)
    target = torch.full((4096,), -1, device=device)
    loss = focal_loss(logits, target, torch.ones(1, device=device), gamma=0.0)
    exact = reference(logits.double(), target, torch.ones(1, device=device).double(), gamma=0.0)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_large_logits(device, gamma):
    """Nothing overflows, and what is certain costs nothing."""
    logits = torch.tensor([[90.0, -90.0, 300.0, -300.0, 3e4, -3e4]], device=device)
    target, count = torch.tensor([-1], device=device), torch.ones(1, device=device)
    for each in (-1, 0, 1, 5):
        found = run(focal_loss, logits, target.fill_(each), count, None, 0.25, gamma)
        exact = run(reference, logits.double(), target, count.double(), None, 0.25, gamma)
        torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-6, atol=1e-30)


def test_nan_shows_and_ignored_rows_hide_it(device):
    logits, target, count = inputs((9, 16), device)
    target[:] = -1
    logits[4, 3] = torch.nan
    loss, grad = run(focal_loss, logits, target, count)
    assert loss.isnan()
    assert grad.isnan().nonzero().tolist() == [[4, 3]]
    target[4] = -2
    loss, grad = run(focal_loss, logits, target, count)
    assert loss.isfinite()
    assert not grad[4].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_made_with_the_loss(device, dtype):
    logits, target, count = inputs((50, 24), device, dtype)
    loss, grad = focal_loss_fwd(logits, target, count, 20)
    alone, none = focal_loss_fwd(logits, target, count, 20, with_grad=False)
    assert none is None
    assert_same_bits(alone, loss)
    assert_same_bits(grad, focal_loss_bwd(logits, target, count, count.clone(), 20))
    made = (grad.float() * (torch.tensor(3.0, device=device) / count)).to(dtype)
    assert focal_loss_scale(grad, torch.tensor(3.0, device=device), count) is grad
    assert_same_bits(grad, made)


def test_every_instruction_set_gives_the_same_bits():
    assert_portable_gives_same_bits(
        """
import torch
from apex_te.ops.focal_loss import focal_loss_fwd
def run():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits, target = torch.randn(300, 90).to(dtype), torch.randint(-2, 90, (300,))
        yield from focal_loss_fwd(logits, target, torch.ones(1), 87, 0.25, 1.5, 0.1)
"""
    )


@pytest.mark.cuda
@needs_cuda
def test_beyond_32_bits():
    needs_memory(20)
    rows, cols = (1 << 22) + 3, 1023
    logits = torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda")
    target = torch.randint(-2, cols, (rows,), device="cuda")
    count = torch.ones(1, device="cuda")
    _, grad = focal_loss_fwd(logits, target, count)
    _, last = focal_loss_fwd(logits[-50:].clone(), target[-50:].clone(), count)
    assert_same_bits(grad[-50:], last)


def test_rejects():
    logits, target, count = inputs((6, 8))
    cases = [
        ((logits, target[:5], count), ValueError, r"target must have shape \[6\], got \[5\]"),
        ((logits, target.int(), count), TypeError, "target must have dtype int64, got int32"),
        ((logits, target, count.double()), TypeError, "num_positives must have dtype float32"),
        ((logits.double(), target, count), TypeError, "logits must have dtype .*got float64"),
        ((logits, target, count, 9), ValueError, "num_classes must be from 0 to 8, got 9"),
        ((logits, target, count, 8, 0.25, -1.0), ValueError, "gamma must be at least 0"),
        ((logits, target, count, 8, 0.25, 2.0, 1.1), ValueError, r"label_smoothing must be in"),
        ((logits[0, 0], target, count), ValueError, "logits must have at least 1 dimension"),
    ]
    for args, error, text in cases:
        with pytest.raises(error, match=text):
            focal_loss(*args)
    with pytest.raises(ValueError, match="grad_output must have one element"):
        focal_loss_scale(logits, target[:2].float(), count)


def test_gradient_of_the_count(device):
    """What divides the loss may be computed from parameters, too."""
    args = inputs((20, 16), device)
    found, expected = (
        torch.autograd.grad(function(*given), given[2])[0]
        for function, given in (
            (focal_loss, (*args[:2], args[2].clone().requires_grad_())),
            (reference, (args[0].double(), args[1], args[2].double().requires_grad_())),
        )
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
