"""apex.parallel and its batch normalisations on one rank, against torch's modules."""

import copy
import subprocess
import sys

import pytest
import torch
from checks import assert_as_good_as_torch, in_pairs

from apex_te.integrations.apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex_te.integrations.apex.contrib.groupbn import BatchNorm2d_NHWC
from apex_te.integrations.apex.parallel import (
    LARC,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    multiproc,
)

SHAPES = {"2d": (9, 8), "3d": (5, 8, 6), "4d": (3, 8, 4, 5), "5d": (2, 8, 3, 2, 2)}


def run(model, x, z=None, relu=False):
    """Result and gradients of a training step and an evaluation, in float64."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, z)]
    y = model(leaves[0]) if z is None else model(*leaves)
    (
        y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).to(y.device)
    ).sum().backward()
    found = [y, *(t.grad for t in leaves if t is not None)]
    return [t.detach() for t in found] + [p.grad for p in model.parameters()]


def check(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double().cpu(), b.double().cpu(), rtol=2e-5, atol=2e-5)


@in_pairs(shape=SHAPES, momentum=[0.1, None], affine=[True, False], tracks=[True, False])
def test_sync_batch_norm_is_batch_norm(device, shape, momentum, affine, tracks):
    options = {"momentum": momentum, "affine": affine, "track_running_stats": tracks}
    ours = SyncBatchNorm(8, **options).to(device)
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
    theirs = kind.get(len(SHAPES[shape]), torch.nn.BatchNorm3d)(8, **options).to(device)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for step in range(3):
        x = (torch.randn(SHAPES[shape]) * 3 + 1).to(device)
        for model in (ours, theirs):
            model.train(step < 2).zero_grad()
        check(run(ours, x), run(theirs, x))
        check(ours.state_dict().values(), theirs.state_dict().values())


@in_pairs(layout=["first", "last", "channels_last"], with_z=[False, True], relu=[False, True],
          dtype=[torch.float32, torch.float16, torch.bfloat16], train=[True, False])  # fmt: skip
def test_residual_and_relu_in_every_layout(device, layout, with_z, relu, dtype, train):
    x, z = (torch.randn(4, 8, 5, 3).to(dtype).to(device) for _ in range(2))
    ours = SyncBatchNorm(8, channel_last=layout == "last", fuse_relu=relu).to(device).train(train)
    theirs = torch.nn.BatchNorm2d(8).double().to(device).train(train)
    plain = torch.nn.BatchNorm2d(8).to(device).train(train)
    for model in (ours, theirs, plain):
        torch.nn.init.normal_(model.running_mean)
        model.running_mean.copy_(torch.linspace(-1, 1, 8))
        torch.nn.init.constant_(model.weight, 1.5)
        torch.nn.init.constant_(model.bias, 0.1)

    def laid(t):
        if layout == "last":
            return t.movedim(1, -1).contiguous()
        return t.to(memory_format=torch.channels_last) if layout == "channels_last" else t

    leaves = [laid(t).clone().requires_grad_() for t in (x, z)]
    y = ours(leaves[0], leaves[1] if with_z else None)
    assert y.stride() == leaves[0].stride()
    dy = torch.randn(y.shape).to(dtype).to(device)
    y.backward(dy)

    def torchs(model, wide):
        given = [t.to(wide).requires_grad_() for t in ((x, z) if with_z else (x,))]
        out = sum(given[1:], model(given[0]))
        out = out.relu() if relu else out
        out.backward((dy.movedim(-1, 1) if layout == "last" else dy).to(wide))
        return [out, *(t.grad for t in given)]

    found = [y, *(t.grad for t in leaves if t.grad is not None)]
    both = torchs(theirs, torch.float64), torchs(plain, torch.float32)
    for a, b, c in zip(found, *both, strict=True):
        a = a.movedim(-1, 1) if layout == "last" else a
        assert a.dtype is dtype
        assert_as_good_as_torch(a.contiguous(), b, c.to(dtype))


def test_sync_batch_norm_refuses():
    norm = SyncBatchNorm(4)
    with pytest.raises(ValueError, match=r"input must have 2 dimensions or more, got \[4\]"):
        norm(torch.randn(4))
    with pytest.raises(
        ValueError, match=r"more than 1 value per channel when training, got \[1, 4\]"
    ):
        norm(torch.randn(1, 4))
    assert norm.eval()(torch.randn(1, 4)).shape == (1, 4)
    assert create_syncbn_process_group(0) is None


def test_convert_syncbn_model():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, eps=1e-3, momentum=None),
        torch.nn.Sequential(torch.nn.InstanceNorm2d(8, affine=True), torch.nn.BatchNorm2d(8)),
    )  # fmt: skip
    model[2][1].eval()
    before, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    converted = convert_syncbn_model(model)
    assert converted is model
    assert [type(m).__name__ for m in (model[1], model[2][0], model[2][1])] == [
        "SyncBatchNorm", "InstanceNorm2d", "SyncBatchNorm",
    ]  # fmt: skip
    assert (model[1].eps, model[1].momentum) == (1e-3, None)
    assert model[1].training
    assert not model[2][1].training
    assert all(p is before[name] for name, p in model.named_parameters())
    check(model.state_dict().values(), state.values())
    alone = convert_syncbn_model(torch.nn.BatchNorm1d(5, affine=False, track_running_stats=False))
    assert isinstance(alone, SyncBatchNorm)
    assert alone.running_mean is None


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("with_z", [False, True])
def test_group_batch_norms_alone(device, channels_last, with_z):
    x, z = torch.randn(2, 4, 8, 5, 3, device=device)
    ours = BatchNorm2d_NHWC(8, fuse_relu=with_z, torch_channels_last=channels_last).to(device)
    theirs = torch.nn.BatchNorm2d(8).to(device)
    memory = torch.channels_last
    lay = (lambda t: t.to(memory_format=memory)) if channels_last else (
        lambda t: t.movedim(1, -1).contiguous()
    )  # fmt: skip
    y = ours(lay(x), lay(z)) if with_z else ours(lay(x))
    right = (theirs(x) + z).relu() if with_z else theirs(x)
    torch.testing.assert_close(
        y if channels_last else y.movedim(-1, 1), right, rtol=1e-5, atol=1e-5
    )
    other = GroupBatchNorm2d(8, 1).to(device)
    torch.testing.assert_close(
        other(x), torch.nn.BatchNorm2d(8).to(device)(x), rtol=1e-5, atol=1e-5
    )
    check(other.state_dict().values(), theirs.state_dict().values())
    with pytest.raises(ValueError, match="x must have 4 dimensions, got"):
        ours(x[0])
    if not with_z:
        with pytest.raises(ValueError, match="z must be None without fuse_relu"):
            ours(lay(x), lay(z))


def larc_by_hand(params, lr, decay, trust, clip, eps):
    """apex's rule in float64, for plain gradient descent."""
    stepped = []
    for p in params:
        w, g = p.detach().double(), p.grad.double()
        rate = trust * w.norm() / (g.norm() + decay * w.norm() + eps)
        if w.norm() != 0 and g.norm() != 0:
            g = (g + decay * w) * (min(rate / lr, 1) if clip else rate)
        stepped.append(w - lr * g)
    return stepped


@in_pairs(clip=[True, False], decay=[0.0, 0.1], lr=[0.5, 1e-3])
def test_larc(device, clip, decay, lr):
    params = [torch.nn.Parameter(torch.randn(n, 3, device=device)) for n in (4, 1, 7, 2)]
    for p in params[:3]:
        p.grad = torch.randn_like(p)
    params[1].data.zero_()
    inner = torch.optim.SGD(params[:3], lr=lr, weight_decay=decay)
    inner.add_param_group({"params": params[3:]})  # without gradients
    optimizer = LARC(inner, trust_coefficient=0.1, clip=clip)
    expected = larc_by_hand(params[:3], lr, decay, 0.1, clip, 1e-8)
    optimizer.step()
    for p, right in zip(params, expected, strict=False):
        torch.testing.assert_close(p.detach().double(), right, rtol=1e-6, atol=1e-7)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [decay, decay]
    assert optimizer.state is inner.state
    optimizer.zero_grad()
    assert params[0].grad is None
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert repr(optimizer) == repr(inner)


def test_larc_gives_back_weight_decay_after_an_error():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = LARC(torch.optim.SGD([p], lr=0.1, weight_decay=0.5))

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_multiproc(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(sys.argv[-1] == '1')\n")
    done = subprocess.run(
        [sys.executable, multiproc.__file__, str(script), "--world-size", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout == "['--world-size', '2', '--rank', '0']\n"
    assert (tmp_path / "GPU_1.log").read_text() == "['--world-size', '2', '--rank', '1']\n"
