"""apex's FusedAdagrad, FusedNovoGrad, FusedLARS and FusedMixedPrecisionLamb, as plain steps."""

import copy
import math

import pytest
import torch
from checks import assert_as_good_as_torch

from apex_te.integrations.apex import optimizers
from apex_te.integrations.apex.contrib import optimizers as contrib
from apex_te.ops import multi_tensor_optim as op
from apex_te.optimizers import FusedLAMB

STEPS = 6


class Adagrad:
    """The steps of one parameter in the dtype of ``p``."""

    make = staticmethod(lambda p: optimizers.FusedAdagrad(p, lr=0.1, weight_decay=0.1))

    def __init__(self, p):
        self.p, self.h = p, torch.zeros_like(p)

    def step(self, g):
        self.p, self.h = op.reference_adagrad(self.p, g, self.h, lr=0.1, weight_decay=0.1)


class NovoGrad:
    make = staticmethod(
        lambda p: optimizers.FusedNovoGrad(p, lr=0.1, betas=(0.9, 0.8), weight_decay=0.1)
    )

    def __init__(self, p):
        self.p, self.m, self.v, self.steps = p, torch.zeros_like(p), None, 0

    def step(self, g):
        norm = g.norm().item()
        self.v = norm if self.v is None else math.sqrt(0.8 * self.v**2 + 0.2 * norm**2)
        self.steps += 1
        self.p, self.m = op.reference_novograd(
            self.p, g, self.m, self.v, lr=0.1, betas=(0.9, 0.8), weight_decay=0.1, step=self.steps
        )


class LARS:
    make = staticmethod(
        lambda p: optimizers.FusedLARS(
            p, lr=1.0, momentum=0.9, weight_decay=0.1, nesterov=True, trust_coefficient=0.1
        )
    )

    def __init__(self, p):
        self.p, self.m = p, torch.zeros_like(p)

    def step(self, g):
        self.p, self.m = op.reference_lars(
            self.p, g, self.m, g.norm().item(), self.p.norm().item(), lr=1.0, momentum=0.9,
            weight_decay=0.1, nesterov=True, trust_coefficient=0.1,
        )  # fmt: skip


KINDS = [Adagrad, NovoGrad, LARS]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def _params(device, dtype=torch.float32):
    shapes = [(5,), (33, 7), (2, 3, 4, 5)]
    made = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    made[-1] = made[-1].contiguous(memory_format=torch.channels_last)
    return [torch.nn.Parameter(p) for p in made]


def _set_grads(params, seed):
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape).to(p)


@kinds
def test_follows_plain_torch(device, kind):
    params = _params(device)
    wide = [kind(p.detach().cpu().double()) for p in params]
    narrow = [kind(p.detach().cpu().clone()) for p in params]
    optimizer = kind.make([{"params": params[:2]}, {"params": params[2:]}])
    for i in range(STEPS):
        _set_grads(params, i)
        for p, *others in zip(params, wide, narrow, strict=True):
            for other in others:
                other.step(p.grad.cpu().to(other.p.dtype))
        optimizer.step()
    flat = [torch.cat([t.detach().cpu().flatten() for t in tensors])
            for tensors in (params, [w.p for w in wide], [n.p for n in narrow])]  # fmt: skip
    assert_as_good_as_torch(*flat)


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "mixed"])
def test_states_and_resuming(device, kind, dtype):
    """16-bit state like apex's; training resumed from a state dict is the same, bit for bit."""
    params = _params(device, torch.float32 if dtype == "mixed" else dtype)
    if dtype == "mixed":
        params.append(torch.nn.Parameter(torch.randn(9, device=device).half()))
    optimizer = kind.make(params)
    for i in range(3):
        _set_grads(params, i)
        optimizer.step()
    assert all(value.dtype is p.dtype for p in params for value in optimizer.state[p].values())
    if kind is NovoGrad:
        count = sum(p.dtype is torch.float32 for p in params)
        norms = optimizer.param_groups[0]["exp_avg_sq"]
        assert [len(n) for n in norms] == [len(params) - count, count]
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = kind.make(others)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for i in range(3, 6):
        for tensors, each in ((params, optimizer), (others, resumed)):
            _set_grads(tensors, i)
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@kinds
def test_closures_gradients_and_refusals(device, kind):
    params = _params(device)
    optimizer = kind.make(params)
    before = params[0].detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = params[1].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state
    params[1].grad = torch.zeros_like(params[1]).to_sparse()
    with pytest.raises(RuntimeError, match=r"gradients must be dense.*SparseAdam"):
        optimizer.step()
    with pytest.raises(ValueError, match="weight_decay must be at least 0, got -1"):
        type(optimizer)(params, lr=0.1, weight_decay=-1)


def test_novograd_wants_the_same_parameters(device):
    params = _params(device)
    optimizer = NovoGrad.make(params)
    _set_grads(params, 0)
    optimizer.step()
    params[0].grad = None
    with pytest.raises(ValueError, match="must stay the same, got 2 after 3"):
        optimizer.step()


@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize("init_zero", [False, True])
def test_novograd_norms(device, norm_type, init_zero):
    params = _params(device)
    optimizer = optimizers.FusedNovoGrad(
        params, betas=(0.9, 0.75), norm_type=norm_type, init_zero=init_zero
    )
    _set_grads(params, 0)
    optimizer.step()
    order = 2 if norm_type == 2 else math.inf
    first = torch.stack([torch.linalg.vector_norm(p.grad, order) for p in params])
    factor = (0.25 if norm_type == 0 else 0.5) if init_zero else 1.0
    torch.testing.assert_close(optimizer.param_groups[0]["exp_avg_sq"][1], first * factor)


def test_lars_skips_adapting_a_group(device):
    params, others = _params(device), _params(device)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p)
    optimizer = optimizers.FusedLARS([{"params": params, "is_skipped": True}], lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(others, lr=0.1, momentum=0.9)
    for i in range(3):
        _set_grads(params, i)
        _set_grads(others, i)
        optimizer.step()
        plain.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


LAMB = {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": 0.5}


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 0.5), (torch.bfloat16, 0.5), (torch.float32, 0.0)]
)
def test_mixed_precision_lamb_is_lamb(device, dtype, limit):
    params, others = _params(device, dtype), _params(device, dtype)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p)
    low = None if dtype is torch.float32 else dtype
    options = LAMB | {"max_grad_norm": limit}
    optimizer = optimizers.FusedMixedPrecisionLamb(params, **options, reduced_precision_dtype=low)
    plain = FusedLAMB(others, **options, master_weights=low is not None)
    for i in range(STEPS):
        _set_grads(params, i)
        _set_grads(others, i)
        optimizer.step()
        plain.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5 if low is None else 2**-8, atol=1e-6)
    group = optimizer.param_groups[0]
    assert group["step"].item() == STEPS
    assert group["lr"].dtype is torch.float32
    if low is not None:
        masters = optimizer.param_groups_full_precision[0]["params"]
        for p, master, q in zip(params, masters, others, strict=True):
            torch.testing.assert_close(master, plain.master_weight(q), rtol=1e-5, atol=1e-6)
            assert torch.equal(master.to(dtype), p)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    assert group["lr"].item() == pytest.approx(0.05)


@pytest.mark.parametrize("passed", [False, True])
def test_mixed_precision_lamb_and_a_scaler(device, passed):
    """The scaler's scale is divided out, and a step with an infinity is skipped and not counted."""
    params, others = _params(device), _params(device)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p)
    scaled = optimizers.FusedMixedPrecisionLamb(params, **LAMB)
    plain = optimizers.FusedMixedPrecisionLamb(others, **LAMB)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    scaler.scale(torch.zeros((), device=device))
    for i in range(3):
        _set_grads(params, i)
        _set_grads(others, i)
        for p in params:
            p.grad *= scaler.get_scale()
        if i == 1:
            params[1].grad[0, 0] = math.inf
        if passed:
            scaled.step(grad_scaler=scaler)
            scaler._per_optimizer_states[id(scaled)]["stage"] = (
                torch.amp.grad_scaler.OptState.STEPPED
            )
        else:
            scaler.step(scaled)
        scaler.update()
        if i != 1:
            plain.step()
    assert scaled.param_groups[0]["step"].item() == 2
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    state = copy.deepcopy(scaled.state_dict())
    again = optimizers.FusedMixedPrecisionLamb(others, **LAMB)
    again.load_state_dict(state)
    assert again.param_groups[0]["step"].item() == 2
    for i in (3, 4):
        for tensors, each in ((params, scaled), (others, again)):
            _set_grads(tensors, i)
            each.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def _contrib_adam(p, g, m, v, step, inside):
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    root = (v + 1e-4).sqrt() if inside else v.sqrt() + 1e-4
    size = 0.01 * math.sqrt(1 - 0.95**step) / (1 - 0.9**step)
    return p - size * (m / root + 0.1 * p), m, v


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_fp16_optimizer_with_contrib_adam(device, inside, max_norm):
    """float32 weights follow the formula; the model's are their rounded values."""
    params = _params(device, torch.float16)
    weights = [p.detach().double().cpu() for p in params]
    state = [[torch.zeros_like(w), torch.zeros_like(w)] for w in weights]
    inner = contrib.FusedAdam(
        params, lr=0.01, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, eps_inside_sqrt=inside,
        max_grad_norm=max_norm,
    )  # fmt: skip
    optimizer = contrib.FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    steps = 0
    for i in range(5):
        optimizer.zero_grad()
        torch.manual_seed(i)
        factors = [torch.randn(p.shape).to(p) / 128 for p in params]
        loss = sum((p.float() * c.float()).sum() for p, c in zip(params, factors, strict=True))
        optimizer.backward(loss * 2**30 if i == 2 else loss)
        optimizer.step()
        if i == 2:
            assert optimizer.cur_scale == 2.0**15
            continue
        steps += 1
        grads = [c.double().cpu() for c in factors]
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])).item()
        clip = max(1.0, norm / max_norm) if max_norm else 1.0
        for k, g in enumerate(grads):
            weights[k], *state[k] = _contrib_adam(weights[k], g / clip, *state[k], steps, inside)
    for p, master, w in zip(params, optimizer.fp32_groups[0], weights, strict=True):
        torch.testing.assert_close(master.detach().cpu().double(), w, rtol=1e-5, atol=1e-5)
        assert torch.equal(master.half(), p)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = contrib.FP16_Optimizer(contrib.FusedAdam(others, lr=0.5), verbose=False)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.optimizer.eps_mode = inner.eps_mode
    for tensors, each in ((params, optimizer), (others, again)):
        _set_grads(tensors, 9)
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    with pytest.raises(NotImplementedError, match="dynamic_loss_args must be None"):
        contrib.FP16_Optimizer(inner, dynamic_loss_args={})


@pytest.mark.parametrize("nesterov", [False, True])
def test_fp16_optimizer_with_contrib_sgd(device, nesterov):
    params, others = _params(device, torch.float16), _params(device)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p)
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    optimizer = contrib.FP16_Optimizer(contrib.FusedSGD(params, **options), static_loss_scale=64.0)
    plain = torch.optim.SGD(others, **options)
    for i in range(4):
        _set_grads(params, i)
        for p, q in zip(params, others, strict=True):
            q.grad = p.grad.float()
            p.grad *= 64
        optimizer.step()
        plain.step()
    for p, master, q in zip(params, optimizer.fp32_groups[0], others, strict=True):
        torch.testing.assert_close(master, q, rtol=1e-5, atol=1e-5)
        assert torch.equal(master.half(), p)


def test_contrib_adam_takes_grads_in_several_ways(device):
    runs = []
    for way in ("own", "lists", "list", "generator"):
        torch.manual_seed(1)
        params = _params(device)
        optimizer = contrib.FusedAdam(params, lr=0.1)
        for i in range(2):
            _set_grads(params, i)
            grads = [p.grad for p in params]
            if way != "own":
                for p in params:
                    p.grad = None
            given = {"own": None, "lists": [grads], "list": grads, "generator": iter_of(grads)}
            optimizer.step(grads=given[way])
        runs.append(params)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    with pytest.raises(ValueError, match="grads must have 3 entries, got 2"):
        optimizer.step(grads=[torch.ones(1)] * 2)
    assert contrib.FusedLAMB is FusedLAMB


def iter_of(grads):
    return (g for g in grads)
