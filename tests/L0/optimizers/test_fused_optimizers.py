"""FusedAdam, FusedLAMB and FusedSGD: their numbers against torch.optim and float64."""

import pytest
import torch
from checks import assert_as_good_as_torch, assert_same_bits
from optimizer_runs import copies, flat, give_grads, make_params, steps
from quantized_param import QuantizedParam

from apex_te.ops import multi_tensor_optim
from apex_te.optimizers import FusedAdam, FusedLAMB, FusedSGD, _bucket

ADAM = {"lr": 0.0625, "weight_decay": 0.1}
PAIRS = {
    "adamw": (lambda p, **o: FusedAdam(p, **ADAM, **o), lambda p: torch.optim.AdamW(p, **ADAM)),
    "adam": (
        lambda p, **o: FusedAdam(p, adam_w_mode=False, betas=(0.8, 0.95), eps=1e-4, **ADAM, **o),
        lambda p: torch.optim.Adam(p, betas=(0.8, 0.95), eps=1e-4, **ADAM),
    ),
    "sgd": (
        lambda p, **o: FusedSGD(p, lr=0.125, weight_decay=0.1, **o),
        lambda p: torch.optim.SGD(p, lr=0.125, weight_decay=0.1),
    ),
    "nesterov": (
        lambda p, **o: FusedSGD(p, lr=0.125, momentum=0.9, nesterov=True, **o),
        lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.9, nesterov=True),
    ),
    "dampening": (
        lambda p, **o: FusedSGD(p, lr=0.125, momentum=0.9, dampening=0.3, **o),
        lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.9, dampening=0.3),
    ),
}
ALL = [FusedAdam, FusedLAMB, FusedSGD]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_follows_torch_over_many_steps(device, name, capturable):
    """One parameter starts late and pauses: each counts its own steps."""
    make, make_torch = PAIRS[name]
    ours = make_params(device)
    theirs, exact = copies(ours), copies(ours, torch.float64)
    optimizers = [make(ours, capturable=capturable), make_torch(theirs), make_torch(exact)]
    for i in range(50):
        give_grads([ours, theirs, exact], i, leave_out=(2,) if i < 3 or i % 7 == 0 else ())
        for optimizer in optimizers:
            optimizer.step()
    assert_as_good_as_torch(flat(ours), flat(exact), flat(theirs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_master_weights_follow_float32_training(device, name, dtype):
    make, make_torch = PAIRS[name]
    ours = make_params(device, dtype)
    theirs, exact = copies(ours, torch.float32), copies(ours, torch.float64)
    optimizer = make(ours, master_weights=True)
    others = make_torch(theirs), make_torch(exact)
    for i in range(20):
        give_grads([ours, theirs, exact], i)
        for each in (optimizer, *others):
            each.step()
    masters = [optimizer.state[p]["master_param"] for p in ours]
    assert {m.dtype for m in masters} == {torch.float32}
    assert_as_good_as_torch(flat(masters), flat(exact), flat(theirs))
    assert_same_bits(ours, [m.to(dtype) for m in masters])


def test_float32_parameters_are_their_own_masters(device):
    params = [torch.ones(3, device=device), torch.ones(4, dtype=torch.bfloat16, device=device)]
    params = [p.requires_grad_() for p in params]
    optimizer = FusedAdam(params, master_weights=True)
    assert optimizer.master_weight(params[0]) is None
    assert optimizer.master_weight(params[1]).dtype is torch.float32
    give_grads([params], 0)
    optimizer.step()
    assert [("master_param" in optimizer.state[p]) for p in params] == [False, True]


@pytest.mark.parametrize("wide", [1 << 25, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "narrow"),
    [
        (FusedAdam, {"exp_avg_dtype": torch.bfloat16}),
        (FusedAdam, {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}),
        (FusedLAMB, {"exp_avg_sq_dtype": torch.bfloat16, "max_grad_norm": 0.0}),
        (FusedSGD, {"momentum_dtype": torch.bfloat16, "momentum": 0.9}),
    ],
)
def test_bfloat16_moments(device, monkeypatch, make, narrow, dtype, wide):
    """The same bits as float32 moments that are rounded to bfloat16 after each step."""
    monkeypatch.setattr(_bucket, "WIDE_ELEMENTS", wide)
    ours = make_params(device, dtype)
    other = copies(ours)
    optimizer = make(ours, lr=0.1, **narrow)
    options = {n: v for n, v in narrow.items() if v is not torch.bfloat16}
    wide_optimizer = make(other, lr=0.1, **options)
    names = [n.removesuffix("_dtype") for n, v in narrow.items() if v is torch.bfloat16]
    names = ["momentum_buffer" if n == "momentum" else n for n in names]
    for i in range(6):
        steps(optimizer, ours, 1, i)
        steps(wide_optimizer, other, 1, i)
        for state in wide_optimizer.state.values():
            for name in names:
                state[name].copy_(state[name].bfloat16())
    assert_same_bits(ours, other)
    for param, twin in zip(ours, other, strict=True):
        for name in names:
            assert optimizer.state[param][name].dtype is torch.bfloat16
            assert torch.equal(
                optimizer.state[param][name].float(), wide_optimizer.state[twin][name]
            )


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_lamb(device, adam_w_mode):
    """Two groups, whose gradients are clipped by one norm, against the reference in float64."""
    params = make_params(device)
    exact = [p.detach().double() for p in params]
    groups = [{"params": params[:3], "weight_decay": 0.0, "lr": 0.25}, {"params": params[3:]}]
    optimizer = FusedLAMB(
        groups, lr=0.125, betas=(0.8, 0.9), weight_decay=0.1, adam_w_mode=adam_w_mode,
        grad_averaging=False, max_grad_norm=2.0, use_nvlamb=True,
    )  # fmt: skip
    runs = {torch.float64: exact, torch.float32: [p.detach().clone() for p in params]}
    moments = {d: [[torch.zeros_like(p)] * 2 for p in ps] for d, ps in runs.items()}
    for i in range(1, 6):
        give_grads([params], i)
        norm = torch.linalg.vector_norm(flat([p.grad for p in params], torch.float64)).item()
        for dtype, run in runs.items():
            for k, param in enumerate(params):
                run[k], *moments[dtype][k] = multi_tensor_optim.reference_lamb(
                    run[k], param.grad.to(dtype), *moments[dtype][k], step=i,
                    lr=0.25 if k < 3 else 0.125, betas=(0.8, 0.9), adamw=adam_w_mode,
                    weight_decay=0.0 if k < 3 else 0.1, grad_averaging=False, nvlamb=True,
                    clip=min(1.0, 2.0 / norm),
                )  # fmt: skip
        optimizer.step()
    assert_as_good_as_torch(flat(params), flat(runs[torch.float64]), flat(runs[torch.float32]))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (FusedAdam, {"betas": (0.5, 0.5)}),
        (FusedAdam, {"eps": 0.1}),
        (FusedAdam, {"bias_correction": False}),
        (FusedAdam, {"weight_decay": 0.5}),
        (FusedAdam, {"weight_decay": 0.5, "adam_w_mode": False}),
        (FusedLAMB, {"max_grad_norm": 1e-3, "eps": 0.1}),
        (FusedLAMB, {"grad_averaging": False}),
        (FusedLAMB, {"weight_decay": 0.0}),
        (FusedLAMB, {"weight_decay": 0.0, "use_nvlamb": True}),
        (FusedLAMB, {"bias_correction": False, "eps": 0.1}),
        (FusedSGD, {"momentum": 0.9, "dampening": 0.5}),
        (FusedSGD, {"momentum": 0.9}),
        (FusedSGD, {"weight_decay": 0.5}),
        (FusedSGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_every_option_counts(make, option):
    """An option given for the second group changes it as if the whole optimizer had it."""
    results = []
    whole = {"adam_w_mode", "max_grad_norm", "use_nvlamb"} & option.keys()
    for groups, defaults in (([{}, {}], {}), ([{}, option], {}), ([{}, {}], option)):
        if whole and groups[1]:
            continue
        params = make_params("cpu")
        halves = params[:5], params[5:]
        optimizer = make(
            [{"params": h, **g} for h, g in zip(halves, groups, strict=True)], lr=0.1, **defaults
        )
        for i in range(4):
            steps(optimizer, params, 1, i)
        results.append(flat(params[5:]))
    assert not torch.equal(results[0], results[-1])
    assert torch.equal(results[1], results[-1])


@pytest.mark.parametrize("capturable", [False, True])
def test_learning_rate_schedule(device, capturable):
    ours = make_params(device)
    theirs = copies(ours)
    optimizers = FusedSGD(ours, lr=0.5, capturable=capturable), torch.optim.SGD(theirs, lr=0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in optimizers]
    for i in range(6):
        give_grads([ours, theirs], i)
        for each in (*optimizers, *schedules):
            each.step()
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-6, atol=1e-6)
    assert float(optimizers[0].param_groups[0]["lr"]) == 0.0625


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learning_rate_as_a_tensor(device, dtype):
    results = []
    for lr in (0.25, torch.tensor(0.25, dtype=dtype), torch.tensor([0.25], device=device)):
        params = make_params(device)
        steps(FusedAdam(params, lr=lr), params, 3)
        results.append(flat(params))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_parameters_without_plain_storage(device):
    """FP8 parameters: the master starts at the value before quantization, copy_ requantizes."""
    value = torch.randn(4, 6, device=device)
    param, plain = QuantizedParam(value.bfloat16()), value.bfloat16().float().requires_grad_()
    optimizer = FusedAdam([param], lr=0.1, master_weights=True)
    other = FusedAdam([plain], lr=0.1)
    for i in range(3):
        give_grads([[plain]], i)
        param.grad = plain.grad.clone().bfloat16()
        plain.grad = param.grad.float()
        optimizer.step()
        other.step()
    assert_same_bits(optimizer.state[param]["master_param"], plain)
    assert torch.equal(param.codes, QuantizedParam.quantize(plain))
    assert param.copies == 3
    assert param.kept is None
    without = FusedAdam([param])  # whose parameters a framework may still replace
    with pytest.raises(ValueError, match="master_weights must be True for parameters of type Quan"):
        without.step()


def test_a_flattened_view_of_an_fp8_weight_is_refused(device):
    param = QuantizedParam(torch.randn(24, device=device).bfloat16())
    param.grad = torch.ones_like(param.kept).bfloat16()
    optimizer = FusedAdam([param], master_weights=True)
    with pytest.raises(NotImplementedError, match="not flattened views of them"):
        optimizer.step()


def test_a_gradient_in_the_master_takes_the_place_of_the_parameters(device):
    params = [torch.ones(5, dtype=torch.bfloat16, device=device).requires_grad_()]
    optimizer = FusedSGD(params, lr=1.0, master_weights=True)
    master = optimizer.master_weight(params[0])
    master.grad = torch.full_like(master, 0.001)
    optimizer.step()
    assert torch.equal(master, torch.full_like(master, 1.0) - 0.001)
    assert torch.equal(params[0].detach(), master.bfloat16())
    optimizer.zero_grad()
    assert master.grad is None


def test_closure_and_zero_grad(device):
    param = torch.ones(3, device=device, requires_grad=True)

    def closure():
        assert torch.is_grad_enabled()
        loss = (param * 2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert FusedSGD([param], lr=0.5).step(closure).item() == 6.0
    assert torch.equal(param.detach(), torch.zeros(3, device=device))
    FusedSGD([param], set_grad_none=False).zero_grad()
    assert torch.equal(param.grad, torch.zeros(3, device=device))
    FusedSGD([param]).zero_grad()
    assert param.grad is None


def test_gradients_of_any_layout(device):
    x = torch.randn(4, 6, device=device)
    params = [x.clone().requires_grad_() for _ in range(3)]
    grad = torch.randn(6, 4, device=device).t()
    params[0].grad, params[1].grad = grad, grad.contiguous()
    params[2].grad = torch.randn(4, 1, device=device).expand(4, 6)
    FusedAdam(params).step()
    assert torch.equal(params[0], params[1])
    assert not torch.equal(params[2].detach(), x)


def test_storage_may_be_replaced_between_steps(device):
    for make in ALL:
        params, other = make_params(device), make_params(device)
        optimizers = make(params, lr=0.1), make(other, lr=0.1)
        for i in range(3):
            for optimizer, each in zip(optimizers, (params, other), strict=True):
                steps(optimizer, each, 1, i)
            for param in params:
                param.data = param.data.clone()
        assert_same_bits(params, other)


def test_nothing_to_do():
    param = torch.ones(3, requires_grad=True)
    for make in ALL:
        optimizer = make([param])
        assert optimizer.step() is None
        assert not optimizer.state
        optimizer.add_param_group({"params": [torch.zeros(0, requires_grad=True)]})
        optimizer.param_groups[1]["params"][0].grad = torch.zeros(0)
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3))


def fma(a, b, c):
    """a * b + c of float32, rounded once."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    c_part = total - product
    rest = (product - (total - c_part)) + (c - c_part)
    # To odd: the last digit tells that something follows, so that a tie is one.
    is_even = total.view(torch.int64) % 2 == 0
    odd = torch.nextafter(total, torch.copysign(torch.full_like(rest, torch.inf), rest))
    return torch.where((rest != 0) & is_even, odd, total).float()


def torch_s_fused_sgd(
    p, g, m, first, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False
):
    """(p, m) in float32 after the step of torch's CUDA kernel: its CPU kernel leaves p as it is."""
    lr, momentum, dampening, weight_decay = (
        torch.tensor(v, device=p.device) for v in (lr, momentum, dampening, weight_decay)
    )
    if weight_decay:
        g = fma(weight_decay, p, g)
    if momentum:
        m = g if first else fma(1 - dampening, g, momentum * m)
        g = fma(momentum, m, g) if nesterov else m
    return fma(-lr, g, p), m


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.3},
    ],
)
def test_sgd_is_torch_s_to_an_ulp(device, dtype, options):
    """Each step from the same state, also where most of a parameter's digits cancel."""
    param = torch.nn.Parameter(torch.randn(50_000, device=device).to(dtype))
    other = torch.nn.Parameter(param.detach().clone())
    optimizer = FusedSGD([param], lr=0.1, **options)
    theirs = torch.optim.SGD([other], lr=0.1, fused=True, **options)
    buffer = None
    for i in range(4):
        param.grad = torch.randn(50_000, device=device).to(dtype)
        other.grad = param.grad.clone()
        expected, buffer = torch_s_fused_sgd(
            param.detach().float(), param.grad.float(), buffer, i == 0, 0.1, **options
        )
        optimizer.step()
        assert torch.equal(param.detach(), expected.to(dtype))
        if device.type == "cuda":
            theirs.step()
            assert_within_an_ulp(param.detach(), other.detach())
            if buffer is not None:  # torch keeps it in the parameter's dtype
                buffer = theirs.state[other]["momentum_buffer"].float()
                optimizer.state[param]["momentum_buffer"].copy_(buffer)
        with torch.no_grad():
            other.copy_(param)


def assert_within_an_ulp(a, b):
    kind = torch.int32 if a.dtype is torch.float32 else torch.int16
    a, b = (t.view(kind).long() for t in (a, b))
    lowest = torch.iinfo(kind).min
    a, b = (torch.where(t < 0, lowest - t, t) for t in (a, b))  # in order of value
    assert (a - b).abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "dampening": 0.3, "capturable": True},
    ],
)
def test_weight_decay_behind_the_momentum(device, options, masters, dtype):
    params = make_params(device, dtype)
    exact = [p.detach().double() for p in params]
    buffers = [None] * len(exact)
    optimizer = FusedSGD(
        params, lr=0.1, weight_decay=0.2, wd_after_momentum=True, master_weights=masters, **options
    )
    momentum, dampening = options.get("momentum", 0.0), options.get("dampening", 0.0)
    for i in range(4):
        give_grads([params], i)
        skipped = i == 2
        optimizer.found_inf = torch.full((1,), float(skipped), device=device) if i > 1 else None
        optimizer.step()
        for j, (value, param) in enumerate(zip(exact, params, strict=True)):
            if skipped:
                continue
            grad = update = param.grad.double()
            if momentum:
                old = buffers[j]
                buffers[j] = grad if old is None else momentum * old + (1 - dampening) * grad
                look = options.get("nesterov")
                update = grad + momentum * buffers[j] if look else buffers[j]
            value -= 0.1 * (update + 0.2 * value)
            if not masters:
                value.copy_(value.to(dtype))
    for value, param in zip(exact, params, strict=True):
        rounding = 2**-7 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(param.detach().double(), value, rtol=rounding, atol=rounding)
        master = optimizer.master_weight(param)
        if master is not None:
            torch.testing.assert_close(master.double(), value, rtol=1e-6, atol=1e-6)
