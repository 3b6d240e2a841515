"""Optimizer state: bitwise resume, torch.optim's state, copies, and everything that is refused."""

import collections
import copy
import io
from functools import partial

import pytest
import torch
from checks import assert_same_bits
from optimizer_runs import copies, flat, give_grads, make_params, state_tensors, steps

from apex_te.optimizers import FusedAdam, FusedLAMB, FusedSGD

NARROW = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
CONFIGURATIONS = [
    (FusedAdam, torch.float32, {}),
    (FusedAdam, torch.bfloat16, {"master_weights": True}),
    (FusedAdam, torch.float32, {"capturable": True}),
    (FusedAdam, torch.float16, {**NARROW, "master_weights": True, "capturable": True}),
    (FusedLAMB, torch.bfloat16, {"master_weights": True, "exp_avg_dtype": torch.bfloat16}),
    (FusedSGD, torch.bfloat16, {"momentum": 0.9, "dampening": 0.1, "master_weights": True}),
    (FusedSGD, torch.float32, {"momentum": 0.9, "momentum_dtype": torch.bfloat16}),
    (FusedSGD, torch.float32, {}),
]


@pytest.mark.parametrize(("make", "dtype", "options"), CONFIGURATIONS)
def test_resume_is_bitwise(device, make, dtype, options):
    params = make_params(device, dtype)
    optimizer = make(params, lr=0.1, **options)
    steps(optimizer, params, 5)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    resumed = copies(params)
    other = make(resumed, lr=0.7, **options)
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert_same_bits(state_tensors(other), state_tensors(optimizer))
    dtypes = [t.dtype for t in state_tensors(other)]
    assert dtypes == [t.dtype for t in state_tensors(optimizer)]
    steps(optimizer, params, 5, first=5)
    steps(other, resumed, 5, first=5)
    assert_same_bits(resumed, params)
    assert_same_bits(state_tensors(other), state_tensors(optimizer))


def test_loading_copies_and_keeps_the_dtypes(device):
    params = make_params(device, torch.bfloat16)
    optimizer = FusedAdam(params, master_weights=True)
    steps(optimizer, params, 2)
    others = copies(params)
    other = FusedAdam(others, master_weights=True)
    other.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(others, params, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            a, b = other.state[mine][name], optimizer.state[theirs][name]
            assert a.dtype is torch.float32
            assert a.stride() == b.stride()
            assert a.numel() == 0 or a.data_ptr() != b.data_ptr()
    narrow = FusedAdam(copies(params), master_weights=True, **NARROW)
    narrow.load_state_dict(optimizer.state_dict())
    assert {s["exp_avg"].dtype for s in narrow.state.values()} == {torch.bfloat16}


def test_hooks_see_tensors(device):
    params = make_params(device)
    optimizer = FusedAdam(params)
    steps(optimizer, params, 1)
    seen = []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, saved: seen.append(saved["state"][0]["exp_avg"])
    )
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[params[0]]["exp_avg"])
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert [type(s) for s in seen] == [torch.Tensor] * 2


@pytest.mark.parametrize(
    ("make", "make_torch"),
    [
        (lambda p: FusedAdam(p, lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0)),
        (
            lambda p: FusedSGD(p, lr=0.1, momentum=0.9, dampening=0.5),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        ),
        (lambda p: FusedSGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    ],
)
def test_state_of_torch_optim_goes_both_ways(device, make, make_torch):
    theirs = make_params(device)
    ours = copies(theirs)
    source, target = make_torch(theirs), make(ours)
    for first in (0, 8):
        steps(source, theirs, 5, first)
        with torch.no_grad():
            for a, b in zip(ours, theirs, strict=True):
                a.copy_(b)
        target.load_state_dict(source.state_dict())
        steps(source, theirs, 3, first + 5)
        steps(target, ours, 3, first + 5)
        torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-5, atol=1e-6)
        # torch.optim keeps the very tensors that it loads.
        source.load_state_dict(copy.deepcopy(target.state_dict()))
        steps(source, theirs, 2, first + 40)
        steps(target, ours, 2, first + 40)
        torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for a, b in zip(ours, theirs, strict=True):
                b.copy_(a)


@pytest.mark.parametrize(("make", "dtype", "options"), CONFIGURATIONS)
def test_deepcopy_goes_on_alike(make, dtype, options):
    params = make_params("cpu", dtype)
    optimizer = make(params, lr=0.1, **options)
    steps(optimizer, params, 3)
    for param in params:
        param.grad = None
    twin_params, twin = copy.deepcopy((params, optimizer))
    steps(optimizer, params, 3, first=3)
    before = [p.detach().clone() for p in twin_params]
    assert not torch.equal(flat(before), flat(params))
    steps(twin, twin_params, 3, first=3)
    assert_same_bits(twin_params, params)
    assert_same_bits(state_tensors(twin), state_tensors(optimizer))


@pytest.mark.parametrize("capturable", [False, True])
def test_each_parameter_counts_its_own_steps(device, capturable):
    params = make_params(device)
    optimizer = FusedAdam(params, capturable=capturable)
    for i in range(6):
        give_grads([params], i, leave_out=(0, 2) if i == 1 else (2,) if i > 3 else ())
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [5, 6, 3, 6, 6, 6]
    kinds = {isinstance(optimizer.state[p]["step"], torch.Tensor) for p in params}
    assert kinds == {capturable}
    if capturable:
        assert {optimizer.state[p]["step"].device for p in params} == {params[0].device}


RESETS = {
    "clear": lambda o: o.state.clear(),
    "another mapping": lambda o: setattr(o, "state", collections.defaultdict(dict)),
    "other dicts": lambda o: o.state.update({p: {} for p in o.state}),
    "emptied dicts": lambda o: [state.clear() for state in o.state.values()],
}


@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
@pytest.mark.parametrize(("make", "dtype", "options"), CONFIGURATIONS)
def test_training_begins_anew_without_the_state(device, make, dtype, options, reset):
    params = make_params(device, dtype)
    optimizer = make(params, lr=0.1, **options)
    steps(optimizer, params, 2)
    fresh = copies(params)
    other = make(fresh, lr=0.1, **options)
    reset(optimizer)
    steps(optimizer, params, 2)
    steps(other, fresh, 2)
    assert_same_bits(params, fresh)
    assert_same_bits(state_tensors(optimizer), state_tensors(other))


@pytest.mark.parametrize(("make", "dtype", "options"), CONFIGURATIONS)
def test_state_that_was_moved_away_and_back_is_what_steps_update(device, make, dtype, options):
    params = make_params(device, dtype)
    optimizer = make(params, lr=0.1, **options)
    steps(optimizer, params, 2)
    others = copies(params)
    other = make(others, lr=0.1, **options)
    other.load_state_dict(optimizer.state_dict())
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                state[name] = value.cpu().clone().to(device)
    steps(optimizer, params, 2, first=2)
    steps(other, others, 2, first=2)
    assert_same_bits(params, others)
    assert_same_bits(state_tensors(optimizer), state_tensors(other))


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16, torch.uint8])
def test_state_put_in_by_hand_counts(device, narrow):
    params, others = make_params(device), make_params(device)
    fused = FusedAdam(params, lr=0.1, exp_avg_dtype=narrow)
    plain = FusedAdam(others, lr=0.1, exp_avg_dtype=narrow)
    for optimizer, mine in ((fused, params), (plain, others)):
        steps(optimizer, mine, 2)
    for param, other in zip(params, others, strict=True):
        number = torch.ones_like(param, memory_format=torch.contiguous_format).detach()
        fused.state[param] |= {"exp_avg": number, "step": 40}
        plain.set_scaled_state(other, "exp_avg", number)
        plain.state[other]["step"] = 40
    for optimizer, mine in ((fused, params), (plain, others)):
        steps(optimizer, mine, 2, first=2)
    assert_same_bits(params, others)
    counts = [[o.state[p]["step"] for p in mine] for o, mine in ((fused, params), (plain, others))]
    assert counts[0] == counts[1]
    assert max(counts[0]) == 42
    expected = [torch.float8_e4m3fn if narrow is torch.uint8 else narrow] * len(params)
    assert [fused.state[p]["exp_avg"].dtype for p in params] == expected


def test_given_master_weights_stay_when_the_state_is_cleared():
    (param,) = copies([torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))])
    master = torch.full((4,), 1.001)
    optimizer = FusedAdam([param], lr=0.1, master_weights=[master])
    steps(optimizer, [param], 1)
    optimizer.state.clear()
    steps(optimizer, [param], 1)
    assert optimizer.master_weight(param) is master
    assert torch.equal(master.bfloat16(), param)


def test_a_grad_scaler_that_saw_no_gradient_changes_nothing():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert torch.equal(param, torch.ones(4))
    assert not optimizer.state


def test_other_parameters_of_the_same_number():
    params = [torch.ones(3, requires_grad=True) for _ in range(2)]
    optimizer = FusedSGD(params, lr=1.0)
    for i in (0, 1, 0):
        params[i].grad, params[1 - i].grad = torch.ones(3), None
        optimizer.step()
    assert [p[0].item() for p in params] == [-1.0, 0.0]


def test_master_weights_from_now_on():
    params = make_params("cpu", torch.bfloat16)
    optimizer = FusedAdam(params)
    steps(optimizer, params, 2)
    optimizer.enable_master_weights()
    steps(optimizer, params, 1)
    masters = [optimizer.state[p]["master_param"] for p in params]
    assert_same_bits([m.bfloat16() for m in masters], params)
    assert not torch.equal(flat(masters), flat(params, torch.float32))
    assert optimizer.state[params[0]]["step"] == 3


def test_add_param_group(device):
    params = make_params(device)
    one, two = FusedAdam(params[:3]), FusedAdam(copies(params[:3]))
    steps(one, params[:3], 2)
    one.add_param_group({"params": params[3:], "lr": 0.5})
    assert one.param_groups[1]["lr"] == 0.5
    steps(one, params, 1, first=2)
    assert one.state[params[3]]["step"] == 1
    with pytest.raises(ValueError, match=r"must have groups of \[3\] parameters, got \[3, 3\]"):
        two.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="lr must be at least 0, got -1"):
        one.add_param_group({"params": [torch.ones(2)], "lr": -1})
    assert len(one.param_groups) == 2


REFUSED = [
    (FusedAdam, {"lr": -1.0}, ValueError, "FusedAdam: lr must be at least 0, got -1.0"),
    (FusedAdam, {"lr": float("nan")}, ValueError, "FusedAdam: lr must be at least 0, got nan"),
    (FusedAdam, {"eps": -1.0}, ValueError, "FusedAdam: eps must be at least 0, got -1.0"),
    (FusedLAMB, {"weight_decay": -1.0}, ValueError, "FusedLAMB: weight_decay must be at least 0"),
    (FusedAdam, {"betas": (0.9, 1.0)}, ValueError, "betas must be at least 0 and below 1, got 1.0"),
    (FusedAdam, {"betas": (0.9,)}, ValueError, "betas must be a tuple of two floats, got (0.9,)"),
    (FusedAdam, {"betas": (0.9, None)}, TypeError, "betas must be a float, got NoneType"),
    (FusedAdam, {"lr": "0.1"}, TypeError, "FusedAdam: lr must be a float, got str"),
    (FusedAdam, {"eps": torch.ones(1)}, TypeError, "eps must be a float, got Tensor"),
    (FusedLAMB, {"weight_decay": None}, TypeError, "weight_decay must be a float, got NoneType"),
    (FusedSGD, {"momentum": "0"}, TypeError, "FusedSGD: momentum must be a float, got str"),
    (FusedSGD, {"dampening": None}, TypeError, "FusedSGD: dampening must be a float, got NoneTy"),
    (FusedAdam, {"amsgrad": True}, NotImplementedError, "FusedAdam: amsgrad must be False"),
    (FusedLAMB, {"amsgrad": True}, NotImplementedError, "FusedLAMB: amsgrad must be False"),
    (FusedLAMB, {"max_grad_norm": -1.0}, ValueError, "FusedLAMB: max_grad_norm must be at least 0"),
    (FusedSGD, {"momentum": -0.1}, ValueError, "FusedSGD: momentum must be at least 0, got -0.1"),
    (FusedSGD, {"nesterov": True}, ValueError, "FusedSGD: nesterov must be False without momentum"),
    (
        FusedAdam,
        {"exp_avg_dtype": torch.int8},
        TypeError,
        "FusedAdam: exp_avg_dtype must be torch.float32 or torch.bfloat16 or torch.float16 or "
        "torch.uint8, got torch.int8",
    ),
    (FusedLAMB, {"exp_avg_dtype": torch.float16}, TypeError,
     "FusedLAMB: exp_avg_dtype must be torch.float32 or torch.bfloat16, got torch.float16"),
    (FusedSGD, {"momentum_dtype": torch.int8}, TypeError,
     "FusedSGD: momentum_dtype must be torch.float32 or torch.bfloat16, got torch.int8"),
    (FusedAdam, {"master_weight_dtype": torch.bfloat16}, TypeError,
     "FusedAdam: master_weight_dtype must be torch.float32 or torch.float16, got torch.bfloat16"),
    (FusedSGD, {"master_weight_dtype": torch.float16}, TypeError,
     "FusedSGD: master_weight_dtype must be torch.float32, got torch.float16"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "error", "message"), REFUSED)
def test_rejects_options(make, options, error, message):
    with pytest.raises(error) as raised:
        make([torch.ones(2, requires_grad=True)], **options)
    assert message in str(raised.value)


def test_rejects_parameters_and_gradients():
    with pytest.raises(TypeError, match=r"params must be torch.float32 or .* got torch.float64"):
        FusedAdam([torch.ones(2, dtype=torch.float64, requires_grad=True)])
    param = torch.ones(4, 2, requires_grad=True)
    optimizer = FusedSGD([param])
    param.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(NotImplementedError) as raised:
        optimizer.step()
    assert str(raised.value) == (
        "FusedSGD: gradients must be dense, got one of layout torch.sparse_coo"
    )
    param.grad = None
    with pytest.raises(TypeError, match="step has no argument 'scale'"):
        optimizer.step(scale=2.0)
    sliced = torch.ones(4, 4)[:, :2].requires_grad_()
    sliced.grad = torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"params\[0\] must be contiguous, got strides \[4, 1\]"):
        FusedSGD([sliced]).step()


def test_rejects_states():
    params = make_params("cpu", torch.bfloat16)
    with_masters = FusedAdam(params, master_weights=True)
    steps(with_masters, params, 1)
    plain = FusedAdam(copies(params))
    with pytest.raises(ValueError, match="state_dict must be without master weights"):
        plain.load_state_dict(with_masters.state_dict())
    saved = with_masters.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(6)
    with pytest.raises(ValueError, match=r"exp_avg must have shape \[5\], got \[6\]"):
        FusedAdam(copies(params), master_weights=True).load_state_dict(saved)
    del saved["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="state_dict must have exp_avg, got"):
        FusedAdam(copies(params), master_weights=True).load_state_dict(saved)
    others = make_params("cpu")
    amsgrad = torch.optim.AdamW(others, amsgrad=True)
    steps(amsgrad, others, 1)
    with pytest.raises(ValueError, match="state_dict must be without amsgrad, got its state"):
        FusedAdam(copies(others)).load_state_dict(amsgrad.state_dict())


def test_a_missing_master_is_made_from_its_parameter():
    params = make_params("cpu", torch.bfloat16)
    source = FusedAdam(params)
    steps(source, params, 1)
    others = copies(params)
    target = FusedAdam(others, master_weights=True)
    target.load_state_dict(source.state_dict())
    masters = [target.master_weight(p) for p in others]
    assert_same_bits([m.bfloat16() for m in masters], params)


WRONG_STATES = {
    "shape": lambda s: s["state"][5].update(exp_avg_sq=torch.ones(7)),
    "missing": lambda s: s["state"][5].pop("exp_avg"),
    "amsgrad": lambda s: s["state"][5].update(max_exp_avg_sq=torch.ones(40, 70)),
    "step": lambda s: s["state"][5].update(step=float("nan")),
    "option": lambda s: s["param_groups"][0].update(lr=-1.0),
    "betas": lambda s: s["param_groups"][0].update(betas=(0.9, 2.0)),
}


@pytest.mark.parametrize("what", WRONG_STATES)
@pytest.mark.parametrize("capturable", [False, True])
def test_a_refused_state_leaves_the_optimizer_as_it_was(what, capturable, device):
    """It goes on, bit by bit, as one that was never asked."""
    options = {"lr": 0.1, "master_weights": True, "capturable": capturable}
    params = make_params(device, torch.bfloat16)
    optimizer = FusedAdam(params, **options)
    others = copies(params)
    other = FusedAdam(others, **options)
    steps(optimizer, params, 3)
    steps(other, others, 3)
    source = FusedAdam(copies(params), lr=0.3, master_weights=True)
    steps(source, source.param_groups[0]["params"], 2)
    saved = copy.deepcopy(source.state_dict())
    WRONG_STATES[what](saved)
    before = [t.clone() for t in state_tensors(optimizer)]
    with pytest.raises(ValueError, match=r"FusedAdam: |NaN"):
        optimizer.load_state_dict(saved)
    assert_same_bits(state_tensors(optimizer), before)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    steps(optimizer, params, 3, first=3)
    steps(other, others, 3, first=3)
    assert_same_bits(params, others)
    assert_same_bits(state_tensors(optimizer), state_tensors(other))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "make", [FusedAdam, FusedLAMB, partial(FusedSGD, momentum=0.9, dampening=0.1)]
)
def test_a_step_that_fails_is_not_counted(make, capturable, scaled):
    """A gradient that the op refuses leaves parameters and step counts as they were."""
    params, others = ([torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)] for _ in range(2))
    optimizer, other = (make(p, lr=0.1, capturable=capturable) for p in (params, others))
    for one in (optimizer, other):
        if scaled:
            one.grad_scale, one.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    for step in range(3):
        for p in (*params, *others):
            p.grad = torch.full((4, 3), step + 1.0)
        other.step()
        if step:
            good = params[1].grad
            params[1].grad = torch._neg_view(-good)
            with pytest.raises(TypeError, match=r"\[1\] must be resolved"):
                optimizer.step()
            params[1].grad = good
        optimizer.step()
    assert optimizer.state[params[0]]["step"] == other.state[others[0]]["step"] == 3
    assert all(map(torch.equal, params, others))


def test_an_expanded_gradient_that_is_unscaled_is_refused_before_the_step():
    param = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = FusedAdam([param], lr=0.1)
    param.grad = torch.ones(()).expand(4, 3)
    optimizer.step()
    before = param.detach().clone()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"adam: grads\[0\] must not be expanded if it is unsc"):
        optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize("make", [FusedAdam, FusedLAMB, lambda p: FusedSGD(p, lr=0.1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_parameters_that_share_memory_are_refused_before_the_step(make, groups):
    whole = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    part = torch.nn.Parameter(whole.detach()[2:6])
    beside = torch.nn.Parameter(torch.ones(3))
    params = [beside, whole, part]
    optimizer = make(params if groups == 1 else [{"params": params[:2]}, {"params": params[2:]}])
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"share no memory .* with 8 bytes in common"):
            optimizer.step()
    assert whole.eq(0).all()
    part.data = part.detach().clone()
    optimizer.step()
    assert whole.lt(0).all()
    assert beside.lt(1).all()


def test_parameters_side_by_side_in_one_memory_are_taken():
    memory = torch.zeros(9)
    parts = [memory[:4], memory[4:4], memory[2:2], memory[4:].view(5, 1), memory[9:]]
    params = [torch.nn.Parameter(part) for part in parts]
    for param in params:
        param.grad = torch.ones_like(param)
    FusedAdam(params).step()
    assert memory.lt(0).all()
