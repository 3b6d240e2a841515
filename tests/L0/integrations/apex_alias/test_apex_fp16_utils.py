"""``apex.fp16_utils``: conversions, copies to master weights, and FP16_Optimizer in training."""

import copy

import pytest
import torch
from checks import assert_same_bits

from apex_te.integrations.apex import fp16_utils
from apex_te.integrations.apex.optimizers import FusedAdam


def make(device):
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.BatchNorm1d(6, affine=False)
    ).to(device)


def test_conversions_keep_affine_batch_norms(device):
    half = torch.float16

    def dtypes(net):
        return [t.dtype for t in net.state_dict().values() if t.is_floating_point()]

    converted = fp16_utils.convert_network(make(device), half)
    expected = [half, half, *[torch.float32] * 4, half, half]
    assert dtypes(converted) == expected
    sequence = fp16_utils.network_to_half(make(device))
    assert isinstance(sequence[0], fp16_utils.tofp16)
    assert dtypes(sequence) == expected
    assert fp16_utils.tofp16()(torch.ones(2, device=device)).dtype is half
    model = fp16_utils.FP16Model(torch.nn.Linear(6, 6).to(device))
    x = torch.randn(4, 6, device=device)
    assert_same_bits(model(x).detach(), model.network(x.half()).detach())
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    fp16_utils.convert_module(module, half)
    assert dtypes(module) == [torch.float32] * 2  # its own parameters only
    assert fp16_utils.to_python_float(torch.tensor([2.5])) == 2.5
    assert fp16_utils.to_python_float([2.5]) == 2.5


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_copies_between_parameters_and_master_weights(flat, missing, device):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)).to(device).half()
    model[1].bias.requires_grad_(False)
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert [p.shape for p in params] == [p.shape for p in list(model.parameters())[:3]]
    assert all(m.dtype is torch.float32 and m.is_leaf and m.requires_grad for m in masters)
    for i, param in enumerate(params):
        param.grad = None if missing and i == 1 else torch.randn_like(param)
    for _ in range(2):
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        if flat:
            expected = torch.cat([part.reshape(-1) for part in parts]).float()
            assert_same_bits(masters[0].grad, expected)
        else:
            for master, param in zip(masters, params, strict=True):
                assert (master.grad is None) == (param.grad is None)
                if param.grad is not None:
                    assert_same_bits(master.grad, param.grad.float())
    with torch.no_grad():
        for master in masters:
            master.add_(1 / 3)
    expected = torch.cat([m.detach().reshape(-1) for m in masters]).half()
    fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    assert_same_bits(torch.cat([p.detach().reshape(-1) for p in params]), expected)
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).half())
    with pytest.raises(TypeError, match="parameters of one dtype with flat_master=True"):
        fp16_utils.prep_param_lists(mixed, flat_master=True)


def test_dynamic_loss_scaler(device):
    """The scale by hand: halved at an overflow, doubled every third step without one."""
    scaler = fp16_utils.DynamicLossScaler(init_scale=16, scale_factor=2.0, scale_window=3)
    param = torch.nn.Parameter(torch.ones(3, device=device))
    expected = [16, 16, 32, 16, 16, 16, 32, 16, 8, 4, 2, 1, 1]
    for i, after in enumerate(expected):
        overflows = i == 3 or i > 6
        param.grad = torch.full_like(param, float("inf") if overflows else 1.0)
        assert scaler.has_overflow([param, torch.nn.Parameter(torch.ones(1))]) is overflows
        scaler.update_scale(overflows)
        assert scaler.loss_scale == after, i
    fixed = fp16_utils.LossScaler(8)
    assert not fixed.has_overflow([param])
    fixed.update_scale(True)
    param.grad = None
    fixed.backward(param.sum())
    assert bool((param.grad == 8).all())
    assert fixed.scale_gradient(None, (param.grad, None), None)[0][0] == 64


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, 0.01),
}


def train(model, optimizer, steps, device, overflow_at=None, clip=None, parts=1):
    losses = []
    for i in steps:
        optimizer.zero_grad()
        for part in range(parts):
            generator = torch.Generator().manual_seed(10 * i + part)
            x = torch.randn(8, 6, generator=generator).to(device).half()
            loss = model(x).float().square().mean() * (1e30 if i == overflow_at else 1)
            optimizer.backward(loss, update_master_grads=parts == 1)
            losses.append(loss.item())
        if parts > 1:
            optimizer.update_master_grads()
        if clip is not None:
            optimizer.clip_master_grads(clip)
        optimizer.step()
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("parts", [1, 2])
def test_training_is_float32_masters_written_out(kind, dynamic, clip, parts, device):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 6).to(device).half()
    twin = copy.deepcopy(model)
    optimizer = fp16_utils.FP16_Optimizer(
        OPTIMIZERS[kind](model.parameters()), static_loss_scale=128.0, dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 128.0}, verbose=False,
    )  # fmt: skip
    assert optimizer.loss_scale == 128.0
    masters = [p.detach().float().requires_grad_() for p in twin.parameters()]
    plain = OPTIMIZERS[kind](masters)
    losses = train(model, optimizer, range(6), device, clip=clip, parts=parts)
    expected = []
    for i in range(6):
        twin.zero_grad()
        for part in range(parts):
            generator = torch.Generator().manual_seed(10 * i + part)
            x = torch.randn(8, 6, generator=generator).to(device).half()
            loss = twin(x).float().square().mean()
            (loss * 128).backward()
            expected.append(loss.item())
        for param, master in zip(twin.parameters(), masters, strict=True):
            master.grad = param.grad.float() / 128
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        plain.step()
        with torch.no_grad():
            for param, master in zip(twin.parameters(), masters, strict=True):
                param.copy_(master)
    assert losses == expected
    for ours, theirs in zip(optimizer.fp32_from_fp16_groups[0], masters, strict=True):
        assert_same_bits(ours.detach(), theirs.detach())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_overflow_skips_a_step_and_resuming_is_bitwise(kind, device):
    def prepared():
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 6).to(device).half()
        optimizer = OPTIMIZERS[kind](model.parameters())
        return model, fp16_utils.FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False)

    model, optimizer = prepared()
    train(model, optimizer, range(2), device)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, [2], device, overflow_at=2)
    assert optimizer.overflow
    assert optimizer.loss_scale == 2.0**15
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(3, 6), device)
    assert not optimizer.overflow
    grads = optimizer.inspect_master_grad_data()[0]
    assert_same_bits(grads[0], optimizer.param_groups[0]["params"][0].grad)
    twin, other = prepared()
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(twin, other, range(3, 6), device)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(ours.detach(), theirs.detach())
    with pytest.raises(RuntimeError, match="closure must be None with dynamic_loss_scale=True"):
        optimizer.step(lambda: None)


def test_a_closure_sees_the_current_weights(device):
    """LBFGS evaluates several times in a step."""
    model = torch.nn.Linear(6, 1).to(device).half()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    optimizer = fp16_utils.FP16_Optimizer(inner, static_loss_scale=4.0)
    x = torch.randn(8, 6, device=device).half()
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        optimizer.backward(loss)
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(losses) > 1
    assert losses[-1] < losses[0]
    optimizer.loss_scale = 8.0
    assert optimizer.loss_scale == 8.0
    assert optimizer.state is inner.state
    assert optimizer.param_groups is inner.param_groups
    with pytest.raises(TypeError, match=r"init_optimizer must be a torch.optim.Optimizer"):
        fp16_utils.FP16_Optimizer(model)
