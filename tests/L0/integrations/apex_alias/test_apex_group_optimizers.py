"""apex's FusedAdam, FusedLAMB and FusedSGD: apex_te's steps, with apex's attributes and state."""

import copy

import pytest
import torch
from apex_te.compatibility.apex import amp_C
from checks import assert_same_bits

from apex_te import optimizers as own
from apex_te.integrations.apex import optimizers

OPTIONS = {
    "FusedAdam": {"lr": 0.01, "weight_decay": 0.1},
    "FusedLAMB": {"lr": 0.01, "max_grad_norm": 0.5},
    "FusedSGD": {"lr": 0.01, "momentum": 0.9, "wd_after_momentum": True, "weight_decay": 0.1},
}


def params(device, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n).to(device, dtype)) for n in (3, 65, 300)]


def set_grads(many, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in many:
        param.grad = torch.randn(param.shape, generator=generator).to(param)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_apex_te(name, dtype, device):
    ours, theirs = params(device, dtype), params(device, dtype)
    mine = getattr(optimizers, name)(ours, **OPTIONS[name])
    plain = getattr(own, name)(theirs, **OPTIONS[name])
    for seed in range(4):
        for many, optimizer in ((ours, mine), (theirs, plain)):
            set_grads(many, seed)
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours, theirs, strict=True):
        assert_same_bits(a.detach(), b.detach())
    keys = {"momentum_buffer"} if name == "FusedSGD" else {"exp_avg", "exp_avg_sq"}
    assert all(set(state) == keys for state in mine.state.values())
    assert mine.param_groups[0].get("step") == (None if name == "FusedSGD" else 4)


@pytest.mark.parametrize("name", OPTIONS)
def test_state_dicts_resume_bitwise_and_load_apex_te_s(name, device):
    ours = params(device)
    optimizer = getattr(optimizers, name)(ours, **OPTIONS[name])
    plain = getattr(own, name)(params(device), **OPTIONS[name])
    for each in (optimizer, plain):
        for seed in range(3):
            set_grads(each.param_groups[0]["params"], seed)
            each.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for source in (saved, plain.state_dict()):
        twins = [torch.nn.Parameter(p.detach().clone()) for p in ours]
        other = getattr(optimizers, name)(twins, **OPTIONS[name])
        other.load_state_dict(source)
        before = [p.detach().clone() for p in ours], copy.deepcopy(optimizer.state_dict())
        for each in (optimizer, other):
            set_grads(each.param_groups[0]["params"], 9)
            each.step()
        for a, b in zip(ours, twins, strict=True):
            assert_same_bits(a.detach(), b.detach())
        with torch.no_grad():
            for param, value in zip(ours, before[0], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(before[1])


def is_of_amp_c(function, name):
    """By name and file: another test may have imported the module anew."""
    return (function.__name__, function.__code__.co_filename) == (name, amp_C.__file__)


def test_attributes_that_programs_use(device):
    adam = optimizers.FusedAdam(params(device))
    assert is_of_amp_c(adam.multi_tensor_adam, "multi_tensor_adam")
    assert adam._dummy_overflow_buf.tolist() == [0]
    assert adam._dummy_overflow_buf.dtype is torch.int32
    assert adam._dummy_overflow_buf.device.type == torch.device(device).type
    lamb = optimizers.FusedLAMB(params(device))
    assert is_of_amp_c(lamb.multi_tensor_l2norm, "multi_tensor_l2norm")
    sgd = optimizers.FusedSGD(params(device), 0.1, 0.9, 0.0, 0.0, True, False, False, True)
    assert is_of_amp_c(sgd.multi_tensor_sgd, "multi_tensor_sgd")
    assert (sgd.most_recent_scale, sgd.scale_set_by_backward) == (1.0, False)
    assert (sgd.materialize_master_grads, sgd.set_grad_none) == (False, True)
    with pytest.raises(TypeError, match="lr"):
        optimizers.FusedSGD(params(device))
    with pytest.raises(RuntimeError, match="amsgrad must be False"):
        optimizers.FusedAdam(params(device), amsgrad=True)
    with pytest.raises(TypeError, match="step has no argument 'grads'"):
        adam.step(grads=[])


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB"])
def test_skipped_steps_are_not_counted(name, device):
    ours = params(device)
    optimizer = getattr(optimizers, name)(ours, **OPTIONS[name])
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=4.0)
    for seed in range(3):
        set_grads(ours, seed)
        if seed == 1:
            ours[0].grad[0] = float("nan")
        scaler.scale(torch.ones((), device=device))
        scaler.step(optimizer)
        scaler.update()
    assert float(optimizer.param_groups[0]["step"]) == 2
    assert all(bool(p.isfinite().all()) for p in ours)
