"""transducer_loss against autograd of its recursion in float64: packed and not, lengths, values."""

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits, in_pairs, needs_cuda

from apex_te.ops.transducer_joint import cells_of
from apex_te.ops.transducer_loss import (
    reference,
    transducer_loss,
    transducer_loss_bwd,
    transducer_loss_fwd,
)


def inputs(batch, frames, places, symbols, dtype=torch.float32, blank=0):
    """x, labels, and lengths, of which one sample has all and one no label and one frame."""
    x = (torch.randn(batch, frames, places, symbols) * 2).to(dtype)
    label = torch.randint(0, symbols, (batch, places - 1), dtype=torch.int32)
    f_len = torch.randint(1, frames + 1, (batch,), dtype=torch.int32)
    y_len = torch.randint(0, places, (batch,), dtype=torch.int32)
    f_len[0], y_len[0] = frames, places - 1
    if batch > 2:
        y_len[1], f_len[2] = 0, 1
    return x, label, f_len, y_len, blank


def packed(x, f_len, y_len):
    """The cells that count, their offsets and T."""
    offset = torch.cumsum(f_len.long() * (y_len + 1), 0)
    return x[cells_of(f_len, y_len + 1, *x.shape[1:3])], offset, x.shape[1]


def run(function, x, label, f_len, y_len, blank, is_packed, grad, **options):
    """The losses and the gradient of x."""
    pack = ()
    if is_packed:
        x, *pack = packed(x, f_len, y_len)
    leaf = x.clone().requires_grad_()
    loss = function(leaf, label, f_len, y_len, blank, *pack, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaf, grad)


@in_pairs(
    dtype=DTYPES, is_packed=[False, True], log_probs=[False, True], blank=[0, 2],
    symbols=[3, 8, 29, 64], sizes=[(5, 1, 1), (3, 6, 4), (4, 2, 9), (2, 12, 1), (2, 20, 12)],
)  # fmt: skip
def test_losses_and_gradients(device, poison, dtype, is_packed, log_probs, blank, symbols, sizes):
    x, label, f_len, y_len, _ = inputs(*sizes, symbols, dtype)
    if log_probs:
        x = x.float().log_softmax(-1).to(dtype)
    grad = (torch.rand(sizes[0]) * 2 - 0.5).to(dtype)  # also negative ones

    def reference_of(wide):
        args = x.to(wide), label, f_len, y_len, blank, is_packed, grad.to(wide)
        return run(reference, *args, log_probs=log_probs)

    moved = (t.to(device) for t in (x, label, f_len, y_len))
    ours = run(transducer_loss, *moved, blank, is_packed, grad.to(device), log_probs=log_probs)
    exact, same = reference_of(torch.float64), reference_of(torch.float32)
    assert ours[0].dtype is ours[1].dtype is dtype
    # Few numbers, of which torch may have the nearest by chance.
    torch.testing.assert_close(ours[0].cpu(), exact[0].to(dtype))
    assert_as_good_as_torch(ours[1], exact[1], same[1].to(dtype))


@pytest.mark.parametrize("is_packed", [False, True])
def test_fused_gradient_is_that_of_log_softmax(device, is_packed):
    """The op's three forms agree: logits, log-probabilities fused, and through autograd."""
    x, label, f_len, y_len, blank = inputs(3, 9, 5, 24)
    grad = torch.rand(3)
    moved = [t.to(device) for t in (x, label, f_len, y_len)]
    loss, dx = run(transducer_loss, *moved, blank, is_packed, grad.to(device))

    def chained(x, *args, **options):
        return transducer_loss(x.log_softmax(-1), *args, log_probs=True, **options)

    other, d_other = run(chained, *moved, blank, is_packed, grad.to(device))
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(dx, d_other, rtol=1e-4, atol=1e-6)
    cells, *pack = packed(*moved[:1], *moved[2:]) if is_packed else moved[:1]
    logs = cells.log_softmax(-1)
    alpha, beta, last = transducer_loss_fwd(logs, *moved[1:], blank, *pack)
    args = logs, grad.to(device), alpha, beta, *moved[1:], blank, *pack[:1]
    assert_same_bits(last, other)
    torch.testing.assert_close(transducer_loss_bwd(*args), dx, rtol=1e-4, atol=1e-6)
    assert torch.equal(transducer_loss_bwd(*args, fuse_softmax=False).ne(0).sum(-1) > 0,
                       logs.new_zeros(logs.shape[:-1]).ne(0) | dx.ne(0).any(-1))  # fmt: skip


def test_alpha_and_beta_meet(device):
    """On every diagonal they add up to the loss."""
    x, label, f_len, y_len, blank = inputs(2, 7, 6, 11)
    f_len[:], y_len[:] = 7, 5
    moved = [t.to(device) for t in (x.log_softmax(-1), label, f_len, y_len)]
    alpha, beta, loss = transducer_loss_fwd(*moved, blank)
    both = (alpha + beta).cpu()
    for diagonal in range(7 + 6 - 1):
        cells = [both[:, t, diagonal - t] for t in range(7) if 0 <= diagonal - t < 6]
        found = torch.stack(cells).logsumexp(0)
        torch.testing.assert_close(found, -loss.cpu(), rtol=1e-5, atol=1e-5)


def test_known_probabilities(device):
    """Equal probabilities: the number of alignments times the probability of one."""
    x = torch.zeros(1, 4, 3, 5, device=device)
    label = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    lengths = [torch.tensor([n], dtype=torch.int32, device=device) for n in (4, 2)]
    loss = transducer_loss(x, label, *lengths)
    # 2 labels among 3 steps to the next frame and one behind: 10 ways of 6 steps of 1 / 5 each.
    expected = -(torch.tensor(10.0).log() - 6 * torch.tensor(5.0).log())
    torch.testing.assert_close(loss.cpu(), expected[None])


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_does_not_count_is_not_read(device, is_packed):
    """Its gradient is 0 although it is NaN; labels behind the length may be anything."""
    x, label, f_len, y_len, blank = inputs(4, 8, 5, 16)
    counts, grad = cells_of(f_len, y_len + 1, 8, 5), torch.rand(4)
    moved = [t.to(device) for t in (x, label, f_len, y_len)]
    clean = run(transducer_loss, *moved, blank, is_packed, grad.to(device))
    x[~counts] = torch.nan
    label[torch.arange(4) >= y_len[:, None]] = -1
    moved = [t.to(device) for t in (x, label, f_len, y_len)]
    loss, dx = run(transducer_loss, *moved, blank, is_packed, grad.to(device))
    assert_same_bits(loss, clean[0])
    assert_same_bits(dx, clean[1])
    assert is_packed or not dx.cpu()[~counts].any()


def test_impossible_labels_cost_infinity(device):
    x, label, f_len, y_len, blank = inputs(2, 5, 3, 8)
    logs = x.log_softmax(-1)
    logs[1, ..., int(label[1, 0])] = -torch.inf
    y_len[:] = 2
    moved = [t.to(device) for t in (logs, label, f_len, y_len)]
    loss = transducer_loss(*moved, blank, log_probs=True)
    assert loss[0].isfinite()
    assert loss[1] == torch.inf


def test_long_samples(device):
    """Losses of hundreds, whose gradients are still probabilities."""
    x, label, f_len, y_len, blank = inputs(1, 300, 70, 12)
    moved = [t.to(device) for t in (x, label, f_len, y_len)]
    loss, dx = run(transducer_loss, *moved, blank, False, torch.ones(1, device=device))
    assert loss.item() > 300
    # Each cell's gradients sum to 0, and blank's of the last frame's end to minus 1 and its part.
    assert dx.sum(-1).abs().max() < 1e-3
    end = dx[0, -1, -1, blank] - x.to(device)[0, -1, -1].softmax(-1)[blank]
    torch.testing.assert_close(end.item(), -1.0, rtol=1e-2, atol=0)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("places", [31, 33, 300, 1025, 2100])
def test_lattices_of_any_width(places):
    """More places than threads, and sizes around a warp; the CPU's results are those expected."""
    x, label, f_len, y_len, blank = inputs(3, 9, places, 5)
    grad = torch.rand(3)
    expected = run(transducer_loss, x, label, f_len, y_len, blank, False, grad)
    moved = [t.cuda() for t in (x, label, f_len, y_len)]
    found = run(transducer_loss, *moved, blank, False, grad.cuda())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
@needs_cuda
def test_invalid_labels_are_nan_on_the_gpu():
    x, label, f_len, y_len, blank = (t.cuda() if isinstance(t, torch.Tensor) else t
                                     for t in inputs(3, 6, 4, 8))  # fmt: skip
    y_len[:] = 3
    label[1, 0] = 8
    loss = transducer_loss(x, label, f_len, y_len, blank)
    assert loss.isnan().tolist() == [False, True, False]


def test_repeats_its_bits(device):
    x, label, f_len, y_len, blank = inputs(4, 60, 20, 64, torch.bfloat16)
    moved = [t.to(device) for t in (x, label, f_len, y_len)]
    grad = torch.rand(4).bfloat16().to(device)
    first = run(transducer_loss, *moved, blank, True, grad)
    for _ in range(3):
        assert_same_bits(run(transducer_loss, *moved, blank, True, grad), first)


@pytest.mark.parametrize("is_packed", [False, True])
def test_empty(device, is_packed):
    x, label, f_len, y_len, blank = (t.to(device) if isinstance(t, torch.Tensor) else t
                                     for t in inputs(1, 3, 2, 8))  # fmt: skip
    none = x[:0], label[:0], f_len[:0], y_len[:0]
    loss, dx = run(transducer_loss, *none, blank, is_packed, x.new_empty(0))
    assert loss.shape == (0,)
    assert not dx.numel()


def test_rejects():
    x, label, f_len, y_len, _ = inputs(3, 7, 5, 8)
    rows, offset, frames = packed(x, f_len, y_len)
    cases = [
        ((x, label[:, :3], f_len, y_len), ValueError, r"x must have shape"),
        ((x, label.long(), f_len, y_len), TypeError, "label must have dtype int32, got int64"),
        ((x, label[0], f_len, y_len), ValueError, "label must have 2 dimensions"),
        ((x, label, f_len * 0, y_len), ValueError, r"f_len\[0\] must be from 1 to 7, got 0"),
        ((x, label, f_len, y_len + 1), ValueError, r"y_len\[0\] must be from 0 to 4, got 5"),
        ((x, label + 8, f_len, y_len), ValueError, r"label\[0, 0\] must be in \[0, 8\)"),
        ((x, label, f_len, y_len, 8), ValueError, r"blank must be in \[0, 8\), got 8"),
        ((x, label, f_len, y_len, -1), ValueError, r"blank must be in \[0, 8\), got -1"),
        ((x.double(), label, f_len, y_len), TypeError, "float64"),
        ((rows, label, f_len, y_len, 0, offset), ValueError, "max_f_len must be given"),
        ((rows, label, f_len, y_len, 0, offset - 1, frames), ValueError, r"batch_offset\[0\]"),
        ((rows, label, f_len, y_len), ValueError, "x must have 4 dimensions"),
    ]
    for args, error, text in cases:
        with pytest.raises(error, match=text):
            transducer_loss(*args)
