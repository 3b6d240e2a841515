"""FusedAdam with state of 16 and 8 bits, halves of master weights and decoupled gradients."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from checks import assert_same_bits
from optimizer_runs import copies, give_grads, make_params, state_tensors, steps
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from apex_te.optimizers import FusedAdam

EXPONENTS = {torch.float16: 15, torch.float8_e4m3fn: 8}
STORED = {torch.uint8: torch.float8_e4m3fn}


def rounded(x, dtype):
    """Rounds numbers to a state dtype, scaled by a power of two for the whole tensor."""
    dtype = STORED.get(dtype, dtype)
    if dtype not in EXPONENTS or not x.numel():
        return x.to(dtype).to(x.dtype)
    amax = float(x.abs().max())
    scale = 1.0
    while amax / scale > 2.0 ** EXPONENTS[dtype]:
        scale *= 2
    while scale > 2.0**-126 and amax / (scale / 2) <= 2.0 ** EXPONENTS[dtype]:
        scale /= 2
    return (x / scale).float().to(dtype).to(x.dtype) * scale


MOMENTS = [
    (torch.float16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float16, torch.float16),
    (torch.uint8, torch.float16),
    (torch.uint8, torch.uint8),
    (torch.bfloat16, torch.float16),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "second"), MOMENTS)
@pytest.mark.parametrize("elements", [1 << 25, 500])
def test_moments_have_the_bits_of_rounded_float32_moments(
    device, monkeypatch, first, second, dtype, elements
):
    from apex_te.optimizers import _bucket

    monkeypatch.setattr(_bucket, "WIDE_ELEMENTS", elements)
    ours = make_params(device, dtype)
    theirs = copies(ours)
    narrow = {"exp_avg": first, "exp_avg_sq": second}
    optimizer = FusedAdam(ours, lr=0.01, **{f"{n}_dtype": d for n, d in narrow.items()})
    wide = FusedAdam(theirs, lr=0.01)
    for i in range(5):
        for one, params in ((optimizer, ours), (wide, theirs)):
            steps(one, params, 1, first=i)
        for state in wide.state.values():
            for name, kind in narrow.items():
                state[name].copy_(rounded(state[name], kind))
        for mine, other in zip(ours, theirs, strict=True):
            if mine not in optimizer.state:
                continue
            for name, kind in narrow.items():
                assert optimizer.state[mine][name].dtype is STORED.get(kind, kind)
                number = optimizer.get_unscaled_state(mine, name)
                assert torch.equal(number, wide.state[other][name])
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float16_master_weights(device, dtype):
    ours = make_params(device, dtype)
    theirs = copies(ours)
    optimizer = FusedAdam(ours, lr=0.01, master_weights=True, master_weight_dtype=torch.float16)
    wide = FusedAdam(theirs, lr=0.01, master_weights=True)
    for i in range(5):
        for one, params in ((optimizer, ours), (wide, theirs)):
            steps(one, params, 1, first=i)
        for state in wide.state.values():
            state["master_param"].copy_(rounded(state["master_param"], torch.float16))
    assert_same_bits(ours, theirs)
    assert optimizer.state[ours[0]]["master_param"].dtype is torch.float16
    assert optimizer.master_weight(ours[0]) is None


def exact_adam(value, grads, kinds, lr, decay, adamw):
    """Adam in float64, with moments that are rounded after each step."""
    value, m, v = value.double(), torch.zeros_like(value).double(), torch.zeros_like(value).double()
    for i, grad in enumerate(grads, 1):
        g = grad.double()
        if adamw:
            value = value * (1 - lr * decay)
        else:
            g = g + decay * value
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        hat = (v / (1 - 0.99**i)).sqrt() + 1e-8
        value = value - lr * (m / (1 - 0.9**i)) / hat
        m, v = rounded(m, kinds[0]), rounded(v, kinds[1])
    return value


@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("kinds", [(torch.float32, torch.float32), *MOMENTS])
def test_against_adam_in_float64(device, kinds, decoupled, adamw):
    value = torch.randn(400, device=device)
    grads = [torch.randn(400, device=device) * (i + 1) for i in range(8)]
    param = value.clone().requires_grad_()
    optimizer = FusedAdam(
        [param], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, adam_w_mode=adamw,
        exp_avg_dtype=kinds[0], exp_avg_sq_dtype=kinds[1], use_decoupled_grad=decoupled,
    )  # fmt: skip
    for grad in grads:
        setattr(param, "decoupled_grad" if decoupled else "grad", grad.clone())
        optimizer.step()
    exact = exact_adam(value, grads, kinds, 1e-2, 0.1, adamw)
    error = (param.detach().double() - exact).abs() / (1 + exact.abs())
    # A number next to the middle of two stored ones may go to the other of them: rare, and small.
    assert float(error.median()) < 1e-6
    limit = 1e-6 if kinds == (torch.float32, torch.float32) else 2e-3
    assert float(error.max()) < limit


# Low halves of master weights.


def halves_of(optimizer, param):
    """The master weight that parameter and remainder make together."""
    high = param.detach().view(torch.int16).to(torch.int64) << 16
    low = optimizer.state[param]["master_param"].to(torch.int64)
    bits = (high + low) & 0xFFFFFFFF
    bits = torch.where(bits >= 2**31, bits - 2**32, bits)
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("more", [{}, {"exp_avg_dtype": torch.float16}])
def test_remainders_make_the_master_weights(device, more):
    ours = [*make_params(device, torch.bfloat16), torch.ones(3, device=device).requires_grad_()]
    half = torch.randn(7, device=device, dtype=torch.float16).requires_grad_()
    ours.append(half)  # has a whole master weight
    theirs = copies(ours)
    options = {"lr": 1e-3, "weight_decay": 0.01, "master_weights": True, **more}
    optimizer = FusedAdam(ours, store_param_remainders=True, **options)
    wide = FusedAdam(theirs, **options)
    for i in range(20):
        give_grads([ours, theirs], i)
        optimizer.step()
        wide.step()
        for mine, other in zip(ours, theirs, strict=True):
            if mine.dtype is torch.bfloat16:
                master = wide.state[other]["master_param"]
                assert_same_bits(halves_of(optimizer, mine), master)
                is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
                assert torch.equal(mine[~is_tie], other[~is_tie])
            else:
                assert torch.equal(mine, other)
    assert optimizer.state[ours[0]]["master_param"].dtype is torch.int16
    assert optimizer.state[half]["master_param"].dtype is torch.float32
    assert optimizer.master_weight(ours[0]) is None


def test_whole_and_half_master_weights_load_into_each_other():
    params = make_params("cpu", torch.bfloat16)
    optimizer = FusedAdam(params, lr=0.1, master_weights=True, store_param_remainders=True)
    steps(optimizer, params, 3)
    others = copies(params)
    whole = FusedAdam(others, lr=0.1, master_weights=True)
    whole.load_state_dict(optimizer.state_dict())
    for mine, other in zip(params, others, strict=True):
        assert_same_bits(whole.state[other]["master_param"], halves_of(optimizer, mine))
    again = copies(params)
    back = FusedAdam(again, lr=0.1, master_weights=True, store_param_remainders=True)
    back.load_state_dict(whole.state_dict())
    assert_same_bits(state_tensors(back), state_tensors(optimizer))
    with torch.no_grad():
        again[0].add_(1)
    with pytest.raises(ValueError, match="master_param must round to its parameter"):
        back.load_state_dict(whole.state_dict())


# Decoupled gradients.


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoupled_gradients_have_a_dtype_of_their_own(device, dtype, grad_dtype):
    ours = make_params(device, dtype)
    theirs = copies(ours)
    optimizer = FusedAdam(ours, lr=0.1, master_weights=True, use_decoupled_grad=True)
    other = FusedAdam(theirs, lr=0.1, master_weights=True)
    generator = torch.Generator().manual_seed(3)
    for i in range(4):
        for j, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
            grad = torch.randn(mine.shape, generator=generator).to(device, grad_dtype)
            mine.grad = torch.full_like(mine, 9.0)  # is not read
            mine.decoupled_grad = None if (i, j) == (2, 1) else grad
            if dtype is torch.bfloat16:
                other.master_weight(their).grad = None if (i, j) == (2, 1) else grad.float()
            else:
                their.grad = None if (i, j) == (2, 1) else grad.float()
        optimizer.step()
        other.step()
    assert_same_bits(ours, theirs)
    assert int(optimizer.state[ours[1]]["step"]) == 3


@pytest.mark.parametrize("capturable", [False, True])
def test_torch_loads_into_an_optimizer_of_decoupled_gradients(capturable):
    """A new one has the state to load into, which torch makes by a step with ``grad`` alone."""

    def made():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
        model.bias.requires_grad_(False)
        options = {"master_weights": True, "use_decoupled_grad": True, "capturable": capturable}
        return model, FusedAdam(model.parameters(), lr=0.1, **options)

    def step(model, optimizer, value):
        model.weight.decoupled_grad = torch.full_like(model.weight, value)
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, optimizer, 0.5)
    saved = get_state_dict(model, optimizer)
    resumed, loaded = made()
    state = get_optimizer_state_dict(resumed, loaded)
    assert {name: set(own) for name, own in state["state"].items()} == {
        name: set(own) for name, own in saved[1]["state"].items()
    }
    assert torch.equal(resumed.weight, made()[0].weight)
    set_state_dict(resumed, loaded, model_state_dict=saved[0], optim_state_dict=saved[1])
    for own in ((model, optimizer), (resumed, loaded)):
        step(*own, -0.25)
    assert torch.equal(resumed.weight, model.weight)
    for name, value in optimizer.state[model.weight].items():
        assert torch.equal(*map(torch.as_tensor, (loaded.state[resumed.weight][name], value)))


def test_a_first_step_without_gradients_makes_no_state():
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = FusedAdam([param], lr=0.1, use_decoupled_grad=True)
    optimizer.step()
    assert not optimizer.state
    assert param.eq(1.0).all()


def test_zero_grad_covers_decoupled_gradients():
    param = torch.ones(3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)  # has never had one
    optimizer = FusedAdam([param, other], use_decoupled_grad=True)
    param.decoupled_grad, param.grad = torch.ones(3), torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert not param.decoupled_grad.any()
    optimizer.zero_grad()
    assert param.decoupled_grad is None
    assert param.grad is None
    optimizer.step()


def test_a_grad_scaler_is_refused_with_decoupled_gradients():
    param = torch.ones(3, requires_grad=True)
    optimizer = FusedAdam([param], use_decoupled_grad=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    param.decoupled_grad = torch.ones(3)
    with pytest.raises(NotImplementedError, match="grad_scaler must be None with use_decoupled"):
        scaler.step(optimizer)
    with pytest.raises(NotImplementedError, match="grad_scaler must be None with use_decoupled"):
        optimizer.step(grad_scaler=scaler)


# Products of the options.

STATES = {
    "float32": {},
    "bfloat16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "float16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "fp8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "mixed": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
}
MASTERS = {
    "none": {},
    "whole": {"master_weights": True},
    "float16": {"master_weights": True, "master_weight_dtype": torch.float16},
    "halves": {"master_weights": True, "store_param_remainders": True},
}


def give(params, seed, decoupled):
    give_grads([params], seed, leave_out=(2,) if seed % 4 == 3 else ())
    if decoupled:
        for param in params:
            param.decoupled_grad = None if param.grad is None else param.grad.float()
            param.grad = None


def run(optimizer, params, count, first, decoupled):
    for i in range(first, first + count):
        give(params, i, decoupled)
        optimizer.step()


@pytest.mark.cover(2)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(("state", "master"), list(itertools.product(STATES, MASTERS)))
def test_resume_is_bitwise(device, state, master, decoupled, capturable):
    options = {
        **STATES[state], **MASTERS[master], "use_decoupled_grad": decoupled,
        "capturable": capturable,
    }  # fmt: skip
    params = make_params(device, torch.bfloat16)
    optimizer = FusedAdam(params, lr=0.1, **options)
    run(optimizer, params, 5, 0, decoupled)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    resumed = copies(params)
    other = FusedAdam(resumed, lr=0.7, **options)
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert_same_bits(state_tensors(other), state_tensors(optimizer))
    for param in params:
        param.grad = param.decoupled_grad = None
    twin_params, twin = copy.deepcopy((params, optimizer))
    read_params, read = pickle.loads(pickle.dumps((params, optimizer)))
    others = ((other, resumed), (twin, twin_params), (read, read_params))
    for one, own in ((optimizer, params), *others):
        run(one, own, 5, 5, decoupled)
    for one, own in others:
        assert_same_bits(own, params)
        assert_same_bits(state_tensors(one), state_tensors(optimizer))
        for mine, theirs in zip(own, params, strict=True):
            for name, value in one.state[mine].items():
                stored = optimizer.state[theirs][name]
                if isinstance(value, torch.Tensor):
                    assert value.dtype is stored.dtype


@pytest.mark.parametrize(("state", "master"), list(itertools.product(STATES, MASTERS)))
def test_a_skipped_step_changes_nothing(device, state, master):
    params = make_params(device, torch.bfloat16)
    optimizer = FusedAdam(params, lr=0.1, **STATES[state], **MASTERS[master])
    steps(optimizer, params, 4)
    before = [*copies(params), *state_tensors(optimizer)]
    give_grads([params], 9)
    optimizer.found_inf = torch.ones(1, device=device)
    optimizer.step()
    assert_same_bits([*params, *state_tensors(optimizer)], before)


def test_saved_state_is_float32_where_it_has_scales():
    params = make_params("cpu")
    optimizer = FusedAdam(params, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16)
    steps(optimizer, params, 2)
    saved = optimizer.state_dict()["state"][0]
    assert saved["exp_avg"].dtype is saved["exp_avg_sq"].dtype is torch.float32
    plain = FusedAdam(copies(params))
    plain.load_state_dict(optimizer.state_dict())
    assert torch.equal(plain.state_dict()["state"][0]["exp_avg"], saved["exp_avg"])
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float8_e4m3fn


def test_a_failed_load_keeps_scales():
    params = make_params("cpu")
    optimizer = FusedAdam(params, exp_avg_dtype=torch.float16)
    steps(optimizer, params, 2)
    before = state_tensors(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] *= 1e6
    saved["state"][5]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="exp_avg must have shape"):
        optimizer.load_state_dict(saved)
    assert_same_bits(state_tensors(optimizer), before)


def test_step_counts_of_groups_are_loaded():
    params = make_params("cpu")
    optimizer = FusedAdam(params, lr=0.1)
    for i in range(3):
        give_grads([params], i)
        optimizer.step()
    saved = optimizer.state_dict()
    for values in saved["state"].values():
        del values["step"]
    saved["param_groups"][0]["step"] = 3
    resumed = copies(params)
    other = FusedAdam(resumed, lr=0.1)
    other.load_state_dict(saved)
    assert {values["step"] for values in other.state.values()} == {3}
    assert "step" not in other.param_groups[0]
    optimizer = FusedAdam(params, lr=0.1)
    optimizer.load_state_dict(other.state_dict())
    for one, own in ((optimizer, params), (other, resumed)):
        give_grads([own], 7)
        one.step()
    assert_same_bits(params, resumed)


# Master weights of the user, and state that is made or read one by one.


def test_given_master_weights_are_updated(device):
    params = make_params(device, torch.bfloat16)
    wide = [torch.randn(p.shape, device=device) for p in params]
    wide[4] = wide[4].to(memory_format=torch.channels_last)
    params.append(torch.ones(3, device=device, requires_grad=True))
    plain = [w.clone().requires_grad_() for w in wide] + [params[-1].detach().clone()]
    plain[-1].requires_grad_()
    optimizer = FusedAdam(params, lr=0.1, master_weights=[*wide, None])
    other = FusedAdam(plain, lr=0.1)
    for i in range(3):
        give_grads([params], i)
        for p, w in zip(params, plain, strict=True):
            w.grad = p.grad.float()
        optimizer.step()
        other.step()
    for master, expected, param in zip(wide, plain, params, strict=False):
        assert_same_bits(master, expected.detach())
        assert torch.equal(param.detach(), master.bfloat16())
        assert optimizer.master_weight(param) is master
    assert_same_bits(params[-1], plain[-1])
    saved = copy.deepcopy(optimizer.state_dict())
    for master in wide:
        master.zero_()
    optimizer.load_state_dict(saved)
    for master, expected, param in zip(wide, plain, params, strict=False):
        assert_same_bits(master, expected.detach())
        assert optimizer.master_weight(param) is master


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ([], {}, ValueError, "master_weights must be a list of 2 tensors"),
        ([None, None], {}, ValueError, "master_weights must have None for plain float32"),
        ([torch.ones(2), torch.ones(3)], {}, ValueError, "master_weights must have None for plain"),
        ([torch.ones(3), None], {}, ValueError, r"master_weights must have shape \[2\]"),
        ([torch.ones(2).half(), None], {}, TypeError, "master_weights must be torch.float32"),
        ([torch.ones(2), None], {"master_weight_dtype": torch.float16}, TypeError,
         "master_weight_dtype must be torch.float32, got torch.float16"),
        ([torch.ones(2), None], {"store_param_remainders": True}, ValueError,
         "master_weights must be a bool with store_param_remainders=True"),
    ],
)  # fmt: skip
def test_wrong_master_weights(given, options, error, message):
    params = [torch.ones(2, dtype=torch.bfloat16), torch.ones(3)]
    with pytest.raises(error, match=message):
        FusedAdam(params, master_weights=given, **options)


@pytest.mark.parametrize(("state", "master"), list(itertools.product(STATES, MASTERS)))
def test_initialized_state_is_that_of_the_first_step(state, master):
    params = make_params("cpu", torch.bfloat16)
    others = copies(params)
    optimizer, other = (
        FusedAdam(own, lr=0.1, **STATES[state], **MASTERS[master]) for own in (params, others)
    )
    for param in params:
        optimizer.initialize_state(param)
        assert not optimizer.get_unscaled_state(param, "exp_avg").any()
        if master in ("whole", "float16"):
            number = optimizer.get_unscaled_state(param, "master_param")
            assert number.dtype is torch.float32
            assert torch.equal(number, param.detach().float()) or master == "float16"
    give_grads([params, others], 1)
    optimizer.step()
    other.step()
    assert_same_bits(params, others)
    assert_same_bits(state_tensors(optimizer), state_tensors(other))


@pytest.mark.parametrize(("state", "master"), list(itertools.product(STATES, MASTERS)))
def test_state_is_read_and_set_one_by_one(state, master):
    params = make_params("cpu", torch.bfloat16)
    optimizer = FusedAdam(params, lr=0.1, **STATES[state], **MASTERS[master])
    for i in range(3):
        give_grads([params], i)
        optimizer.step()
    others = copies(params)
    other = FusedAdam(others, lr=0.1, **STATES[state], **MASTERS[master])
    names = ["exp_avg", "exp_avg_sq"] + (["master_param"] if master != "none" else [])
    for mine, theirs in zip(others, params, strict=True):
        for name in names:
            number = optimizer.get_unscaled_state(theirs, name)
            halves = (name, master) == ("master_param", "halves")
            assert number.dtype is (torch.int16 if halves else torch.float32)
            other.set_scaled_state(mine, name, number.clone())
        other.state[mine]["step"] = 3
    assert_same_bits(state_tensors(other), state_tensors(optimizer))
    give_grads([params, others], 5)
    optimizer.step()
    other.step()
    assert_same_bits(params, others)


def test_no_master_weights_by_either_value():
    for value in (None, False):
        optimizer = FusedAdam([torch.ones(2, dtype=torch.bfloat16)], master_weights=value)
        assert optimizer.master_weights is False


def test_wrong_names_of_state():
    param = torch.ones(3, requires_grad=True)
    optimizer = FusedAdam([param])
    with pytest.raises(ValueError, match="state_name must be one of exp_avg, exp_avg_sq, master_"):
        optimizer.get_unscaled_state(param, "step")
    with pytest.raises(ValueError, match="state_name must be one of the parameter's states"):
        optimizer.get_unscaled_state(param, "exp_avg")
    with pytest.raises(ValueError, match="state_name must not be 'master_param' for a parameter"):
        optimizer.set_scaled_state(param, "master_param", torch.ones(3))
    with pytest.raises(ValueError, match=r"exp_avg must have shape \[3\]"):
        optimizer.set_scaled_state(param, "exp_avg", torch.ones(4))
    with pytest.raises(ValueError, match="store_param_remainders must be False"):
        optimizer.initialize_state(param, True)


def test_huge_and_tiny_numbers_keep_their_values():
    from apex_te.optimizers._narrow_state import scaled, unscaled

    for dtype, values in itertools.product(
        EXPONENTS, [[0.0, 0.0], [1e-38, -3e-39], [3e38, 1.0], [1e-45, 0.0], [float("inf"), 1.0]]
    ):
        number = torch.tensor(values)
        stored, scale = torch.zeros(2, dtype=dtype), torch.zeros(())
        scaled(number, stored, scale)
        found = unscaled(stored, scale)
        assert (scale > 0).all()
        if torch.isfinite(number).all():
            torch.testing.assert_close(found[0], number[0], rtol=2**-4, atol=1e-44)
        else:
            assert not torch.isfinite(found[0])
        again, other = torch.zeros(2, dtype=dtype), torch.zeros(())
        scaled(found, again, other)
        torch.testing.assert_close(unscaled(again, other), found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [
        {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
        {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
        {"exp_avg_dtype": torch.bfloat16},
        {"master_weights": True},
        {"master_weights": True, "master_weight_dtype": torch.float16},
        {"master_weights": True, "store_param_remainders": True},
    ],
    ids=str,
)
def test_state_follows_a_memory_format_that_changes(options):
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    values = torch.randn(7, 2, 3, 4, 5).mul(1000).to(dtype)
    found = []
    for change in (False, True):
        param = torch.nn.Parameter(values[0].contiguous(memory_format=torch.channels_last))
        optimizer = FusedAdam([param], lr=0.5, **options)
        master = optimizer.master_weight(param)
        for step in range(1, 7):
            if change and step == 4:
                param.data = param.detach().contiguous()
            param.grad = values[step].clone()
            optimizer.step()
        found.append(param.detach())
        assert optimizer.master_weight(param) is master
    assert torch.equal(*found)
