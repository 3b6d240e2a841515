"""apex's transducer extensions and modules against the ops, and a small RNN-T that trains."""

import itertools

import pytest
import torch
from apex_te.compatibility.apex import transducer_joint_cuda, transducer_loss_cuda
from checks import DTYPES, assert_same_bits

from apex_te.integrations.apex.contrib.transducer import TransducerJoint, TransducerLoss
from apex_te.ops import transducer_joint as joint_op
from apex_te.ops import transducer_loss as loss_op


def batch(device, dtype=torch.float32):
    """f, g, labels, lengths of frames and labels."""
    f, g = torch.randn(3, 10, 24).to(dtype), torch.randn(3, 5, 24).to(dtype)
    label = torch.randint(1, 24, (3, 4), dtype=torch.int32)
    f_len, y_len = torch.tensor([10, 7, 1]).int(), torch.tensor([4, 0, 2]).int()
    return [t.to(device) for t in (f, g, label, f_len, y_len)]


def packing(f_len, g_len):
    offset = torch.cumsum(f_len.long() * g_len, 0)
    return offset, int(offset[-1])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_joint_extension(device, dtype, is_packed):
    f, g, _, f_len, y_len = batch(device, dtype)
    g_len = y_len + 1
    offset, rows = packing(f_len, g_len)
    pack = (offset, rows) if is_packed else ()
    given = offset if is_packed else torch.empty(0, dtype=torch.int64, device=device)
    for relu, p in itertools.product((False, True), (0.0, 0.5, 1.0)):
        args = f, g, f_len, g_len, given, rows, 1, is_packed, relu, p > 0, p, 4
        torch.manual_seed(4)
        found = transducer_joint_cuda.forward(*args)
        torch.manual_seed(4)
        leaves = [t.clone().requires_grad_() for t in (f, g)]
        expected = joint_op.transducer_joint(*leaves, f_len, g_len, *pack, relu=relu, p=p)
        assert len(found) == 1 + (relu or p > 0)
        assert_same_bits(found[0], expected)
        grad = torch.randn_like(expected)
        scale = joint_op.keep_scale(p)
        ours = transducer_joint_cuda.backward(
            [grad, *found[1:]], f_len, g_len, given, 10, 5, is_packed, scale
        )
        assert isinstance(ours, list)
        assert_same_bits(ours, torch.autograd.grad(expected, leaves, grad))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_extension_and_module(device, dtype, is_packed, fuse):
    """What apex's module passes to the extension, and ours."""
    _, _, label, f_len, y_len = batch(device)
    x = torch.randn(3, 10, 5, 24).to(device, dtype)
    offset, _ = packing(f_len, y_len + 1)
    if is_packed:
        x = x[joint_op.cells_of(f_len, y_len + 1, 10, 5)]
    leaf = x.clone().requires_grad_()
    logs = leaf.log_softmax(-1)
    alpha, beta, loss = transducer_loss_cuda.forward(
        logs, label, f_len, y_len, offset, 10, 0, 1, is_packed
    )
    grad = torch.rand(3, device=device).to(dtype)
    dx = transducer_loss_cuda.backward(
        logs.detach(), grad, alpha, beta, f_len, y_len, label, offset, 10, 0, 1, fuse, is_packed
    )
    if not fuse:
        (dx,) = torch.autograd.grad(logs, leaf, dx)
    debug = []
    module = TransducerLoss(fuse_softmax_backward=fuse, packed_input=is_packed)
    found = module(leaf, label, f_len, y_len, 0, offset, 10, debug)
    (ours,) = torch.autograd.grad(found, leaf, grad)
    counts = joint_op.cells_of(f_len, y_len + 1, 10, 5)
    assert_same_bits([t[counts] for t in debug], [t[counts] for t in (alpha, beta)])
    assert found.dtype is dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(found, loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours, dx, rtol=4 * tolerance, atol=tolerance)


@pytest.mark.parametrize("is_packed", [False, True])
def test_joint_module(device, is_packed):
    f, g, _, f_len, y_len = batch(device)
    offset, rows = packing(f_len, y_len + 1)
    module = TransducerJoint(is_packed, relu=True, dropout=True, dropout_prob=0.5, probe_mask=True)
    args = f, g, f_len, y_len + 1, offset, rows
    out = module(*args)
    (mask,) = module.mask_probe
    counts = joint_op.cells_of(f_len, y_len + 1, 10, 5)
    rows_of = (lambda t: t) if is_packed else (lambda t: t[counts])
    assert torch.equal(rows_of(mask).bool(), rows_of(out) > 0)
    sums = (f[:, :, None] + g[:, None])[counts].relu()
    torch.testing.assert_close(rows_of(out), sums * rows_of(mask) * 2)
    module.eval()
    assert_same_bits(rows_of(module(*args)), sums)


def test_refuses():
    f, g, label, f_len, y_len = batch("cpu")
    with pytest.raises(NotImplementedError, match="opt must be 1 for ReLU and dropout, got 0"):
        TransducerJoint(relu=True, opt=0)
    with pytest.raises(ValueError, match="batch_offset and packed_batch must be given"):
        TransducerJoint(pack_output=True)(f, g, f_len, y_len + 1)
    with pytest.raises(ValueError, match="batch_offset and max_f_len must be given"):
        TransducerLoss(packed_input=True)(f[0], label, f_len, y_len, 0)
    with pytest.raises(ValueError, match="input must have 1 or 2 tensors, got 0"):
        transducer_joint_cuda.backward([], f_len, y_len, f_len, 10, 5, False, 1.0)


def train(joint, loss, device, steps=20):
    """Losses of a small RNN-T whose joint and loss are given, on samples of several lengths."""
    torch.manual_seed(1)
    encoder, predictor = torch.nn.GRU(8, 24, batch_first=True), torch.nn.Embedding(12, 24)
    out = torch.nn.Linear(24, 12)
    model = torch.nn.ModuleList([encoder, predictor, out]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    sounds = torch.randn(4, 12, 8, device=device)
    label = torch.randint(1, 12, (4, 5), dtype=torch.int32, device=device)
    f_len = torch.tensor([12, 9, 6, 12], dtype=torch.int32, device=device)
    y_len = torch.tensor([5, 3, 0, 2], dtype=torch.int32, device=device)
    offset, rows = packing(f_len, y_len + 1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        f = encoder(sounds)[0]
        g = predictor(torch.nn.functional.pad(label, (1, 0)).long()).cumsum(1)
        total = loss(out(joint(f, g, f_len, y_len + 1, offset, rows)), label, f_len, y_len, offset)
        total = total.mean()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_an_rnn_t_trains_as_with_torch(device, is_packed, fuse):
    joint = TransducerJoint(pack_output=is_packed, relu=True).to(device)
    module = TransducerLoss(fuse_softmax_backward=fuse, packed_input=is_packed)
    ours = train(
        joint, lambda x, label, f_len, y_len, offset: module(x, label, f_len, y_len, 0, offset, 12),
        device,
    )  # fmt: skip

    def plain_joint(f, g, *_):
        return (f[:, :, None] + g[:, None]).relu()

    def plain_loss(x, label, f_len, y_len, _):
        return loss_op.reference(x, label, f_len, y_len)

    expected = train(plain_joint, plain_loss, device)
    assert ours == pytest.approx(expected, rel=1e-3)
    assert ours[-1] < 0.8 * ours[0]
