"""Optimizers with Transformer Engine's arguments, step count of groups and lists of tensors."""

import copy
import inspect

import pytest
import torch

import apex_te
from apex_te.integrations.transformer_engine.pytorch import optimizers as te
from apex_te.optimizers import FusedAdam, FusedSGD

SHAPES = [(5,), (), (40, 7), (300,)]


def make(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in SHAPES]


def copies(params):
    return [p.detach().clone().requires_grad_() for p in params]


def run(optimizer, params, count, first=0, leave_out=None, decoupled=False):
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(i)
        for j, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            grad = None if j == leave_out else grad
            if decoupled:
                param.decoupled_grad = None if grad is None else grad.float()
            else:
                param.grad = grad
        optimizer.step()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_positional_order_and_names():
    names = list(inspect.signature(te.FusedAdam).parameters)
    assert names[:6] == ["params", "lr", "betas", "eps", "weight_decay", "amsgrad"]
    kinds = [p.kind for p in inspect.signature(te.FusedAdam).parameters.values()]
    assert {k.name for k in kinds[6:]} == {"KEYWORD_ONLY"}
    assert list(inspect.signature(te.FusedSGD).parameters) == [
        "params", "lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum",
        "materialize_master_grads", "set_grad_none",
    ]  # fmt: skip
    assert te.FusedAdam.__module__ == "transformer_engine.pytorch.optimizers.fused_adam"
    assert te.FusedSGD.__module__ == "transformer_engine.pytorch.optimizers.fused_sgd"
    optimizer = te.FusedAdam(make(), 0.1, (0.8, 0.9), 1e-6, 0.2)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.9), 1e-6)
    assert (group["weight_decay"], group["bias_correction"]) == (0.2, True)
    with pytest.raises(NotImplementedError, match="amsgrad"):
        te.FusedAdam(make(), 0.1, (0.8, 0.9), 1e-6, 0.2, True)
    with pytest.raises(TypeError):
        te.FusedAdam(make(), 0.1, (0.8, 0.9), 1e-6, 0.2, False, True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adam_w_mode": False, "bias_correction": False},
        {"master_weights": True, "capturable": True},
        {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
        {"use_decoupled_grad": True, "master_weights": True, "store_param_remainders": True},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_apex_te_s(dtype, options):
    ours = make(dtype)
    theirs = copies(ours)
    decoupled = options.get("use_decoupled_grad", False)
    optimizer = te.FusedAdam(ours, 0.1, (0.9, 0.99), weight_decay=0.1, **options)
    other = FusedAdam(theirs, 0.1, betas=(0.9, 0.99), weight_decay=0.1, **options)
    run(optimizer, ours, 4, decoupled=decoupled)
    run(other, theirs, 4, decoupled=decoupled)
    assert same(ours, theirs)
    assert int(optimizer.param_groups[0]["step"]) == 4
    names = {"exp_avg", "exp_avg_sq"}
    if options.get("master_weights") and dtype is torch.bfloat16:
        names.add("master_param")
    assert all(set(state) == names for state in optimizer.state.values())


def test_a_group_counts_steps_without_gradients():
    params = make()
    optimizer = te.FusedAdam(params, 0.1)
    run(optimizer, params, 3, leave_out=1)
    assert params[1] not in optimizer.state
    run(optimizer, params, 1, first=3)
    assert optimizer.param_groups[0]["step"] == 4
    # The fourth step is the first one with a gradient, and is corrected as the fourth.
    grad = params[1].grad.double()
    m, v = 0.1 * grad, 0.001 * grad**2
    update = (m / (1 - 0.9**4)) / ((v / (1 - 0.999**4)).sqrt() + 1e-8)
    expected = make()[1].detach().double() - 0.1 * update
    torch.testing.assert_close(params[1].detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_groups_with_their_own_counts():
    first, second = make(), make()
    optimizer = te.FusedAdam(first, 0.1)
    run(optimizer, first, 2)
    optimizer.add_param_group({"params": second})
    run(optimizer, first + second, 3, first=2)
    assert [group["step"] for group in optimizer.param_groups] == [5, 3]


def test_a_skipped_step_does_not_count():
    params = make()
    optimizer = te.FusedAdam(params, 0.1)
    run(optimizer, params, 1)
    before = copies(params)
    optimizer.found_inf = torch.ones(1)
    run(optimizer, params, 1, first=1)
    assert same(params, before)
    assert int(optimizer.param_groups[0]["step"]) == 1
    optimizer.found_inf = torch.zeros(1)
    run(optimizer, params, 1, first=2)
    assert int(optimizer.param_groups[0]["step"]) == 2


@pytest.mark.parametrize("capturable", [False, True])
def test_resume_is_bitwise(capturable):
    params = make(torch.bfloat16)
    options = {"master_weights": True, "exp_avg_dtype": torch.float16, "capturable": capturable}
    optimizer = te.FusedAdam(params, 0.1, **options)
    run(optimizer, params, 3)
    resumed = copies(params)
    other = te.FusedAdam(resumed, 0.7, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, 3, first=3)
    run(other, resumed, 3, first=3)
    assert same(params, resumed)
    assert int(other.param_groups[0]["step"]) == 6
    assert isinstance(other.param_groups[0]["step"], torch.Tensor) is capturable


@pytest.mark.parametrize("source", [FusedAdam, torch.optim.AdamW])
def test_states_with_counts_of_parameters_load_and_go_back(source):
    params = make()
    optimizer = source(params, lr=0.1, weight_decay=0.1)
    run(optimizer, params, 3)
    resumed = copies(params)
    other = te.FusedAdam(resumed, 0.1, weight_decay=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["step"] == 3
    run(optimizer, params, 2, first=3)
    run(other, resumed, 2, first=3)
    for a, b in zip(resumed, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    last = copies(resumed)
    back = FusedAdam(last, lr=0.1, weight_decay=0.1)
    back.load_state_dict(copy.deepcopy(other.state_dict()))
    run(other, resumed, 2, first=5)
    run(back, last, 2, first=5)
    assert same(resumed, last)


def test_different_counts_are_refused():
    params = make()
    optimizer = FusedAdam(params)
    run(optimizer, params, 2, leave_out=1)
    run(optimizer, params, 1)
    other = te.FusedAdam(copies(params))
    with pytest.raises(ValueError, match=r"one step count for each group, got \[1, 3\]"):
        other.load_state_dict(optimizer.state_dict())


def test_a_state_dict_as_frameworks_make_it():
    """Moments of the parameters, and the count in the group, before any step."""
    params = make(torch.bfloat16)
    optimizer = te.FusedAdam(params, 0.1, master_weights=True, exp_avg_dtype=torch.bfloat16)
    for param in params:
        optimizer.initialize_state(param, False)
    saved = optimizer.state_dict()
    assert "step" not in saved["param_groups"][0]
    saved["param_groups"][0]["step"] = 7
    for values in saved["state"].values():
        values["exp_avg"] = torch.full_like(values["exp_avg"], 0.5)
    optimizer.load_state_dict(saved)
    assert float(optimizer.get_unscaled_state(params[3], "exp_avg")[0]) == 0.5
    run(optimizer, params, 1)
    assert optimizer.param_groups[0]["step"] == 8


def test_the_method_that_frameworks_replace():
    params = make(torch.bfloat16)
    optimizer = te.FusedAdam(
        params, master_weights=True, store_param_remainders=True, exp_avg_dtype=torch.float16
    )
    optimizer._initialize_state(params[0], "exp_avg", zero_buffer=True)
    optimizer._initialize_state(params[0], "master_param", False, store_param_remainders=True)
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float16
    assert optimizer.state[params[0]]["master_param"].dtype is torch.int16
    assert inspect.getsource(te.FusedAdam._initialize_state)


def test_fp8_parameters_may_be_swapped_in_before_the_step():
    with apex_te.fp8_model_init():
        layer = apex_te.Linear(32, 32, bias=False)
    optimizer = te.FusedAdam(layer.parameters(), 0.1)
    layer.weight.grad = torch.randn(32, 32)
    with pytest.raises(ValueError, match="master_weights must be True for parameters of type FP8"):
        optimizer.step()
    main = layer.weight.detach().dequantize().clone().requires_grad_()
    optimizer.param_groups[0]["params"] = [main]
    main.grad = torch.randn(32, 32)
    before = main.detach().clone()
    optimizer.step()
    assert not torch.equal(main, before)


def test_fp8_parameters_with_float16_master_weights():
    with apex_te.fp8_model_init():
        layer = apex_te.Linear(32, 32, bias=False)
    values = layer.weight.dequantize().detach().clone()
    optimizer = te.FusedAdam(
        layer.parameters(), 0.1, master_weights=True, master_weight_dtype=torch.float16
    )
    layer.weight.grad = torch.ones(32, 32)
    optimizer.step()
    master = optimizer.get_unscaled_state(layer.weight, "master_param")
    torch.testing.assert_close(master, values - 0.1, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(layer.weight.dequantize(), master, rtol=2**-3, atol=2e-3)


@pytest.mark.parametrize("set_grad_none", [None, True, False])
def test_gradients_are_dropped_or_zeroed(set_grad_none):
    for made in (
        te.FusedAdam([p := torch.ones(2, requires_grad=True)], set_grad_none=set_grad_none),
        te.FusedSGD([p], 0.1, set_grad_none=set_grad_none),
    ):
        p.grad = torch.ones(2)
        made.zero_grad()
        assert (p.grad is None) is (set_grad_none is not False)


@pytest.mark.parametrize("after", [False, True])
def test_sgd(after):
    ours = make()
    theirs = copies(ours)
    optimizer = te.FusedSGD(ours, 0.1, 0.9, 0.0, 0.2, False, after, False)
    other = FusedSGD(theirs, 0.1, 0.9, 0.0, 0.2, wd_after_momentum=after)
    run(optimizer, ours, 3)
    run(other, theirs, 3)
    assert same(ours, theirs)


def test_lists_of_tensors(device):
    tensors = [torch.randn(s, device=device) for s in SHAPES]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    total, each = te.multi_tensor_applier(te.multi_tensor_l2norm, flag, [tensors], True)
    norms = torch.stack([t.double().norm() for t in tensors])
    torch.testing.assert_close(each.double(), norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), norms.norm().reshape(1), rtol=1e-6, atol=0)
    outs = [torch.empty_like(t) for t in tensors]
    te.multi_tensor_applier(te.multi_tensor_scale, flag, [tensors, outs], 0.5)
    assert same(outs, [t * 0.5 for t in tensors])
    factor = torch.full((1,), 3.0, device=device)
    te.multi_tensor_applier(te.multi_tensor_scale_tensor, flag, [tensors, tensors], factor)
    assert same(tensors, [o * 6 for o in outs])
    assert not flag.item()
    te.multi_tensor_applier(te.multi_tensor_scale, flag, [tensors, outs], float("inf"))
    assert flag.item() == 1


@pytest.mark.parametrize("capturable", [False, True])
def test_groups_without_parameters_count_steps(capturable):
    """Frameworks read ``group["step"]`` of every group, also of one that is empty on a rank."""
    param = torch.nn.Parameter(torch.ones(4))
    groups = [{"params": []}, {"params": [param]}]
    optimizer = te.FusedAdam(groups, capturable=capturable)
    for _ in range(2):
        param.grad = torch.ones(4)
        optimizer.step()
    assert [int(group["step"]) for group in optimizer.param_groups] == [2, 2]
    other = te.FusedAdam([{"params": []}, {"params": [param]}], capturable=capturable)
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert [int(group["step"]) for group in other.param_groups] == [3, 3]


def test_master_weights_of_a_mixed_model():
    """``[p.float() for p in params]`` has float32 parameters themselves, which need no copy."""
    params = [torch.nn.Parameter(torch.ones(4, dtype=d)) for d in (torch.bfloat16, torch.float32)]
    masters = [p.detach().float() if p.dtype is torch.bfloat16 else p.float() for p in params]
    optimizer = te.FusedAdam(params, lr=0.1, master_weights=masters)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(params[0], masters[0].bfloat16())
    assert torch.equal(params[1], masters[0])
    assert "master_param" not in optimizer.state[params[1]]
    with pytest.raises(ValueError, match="or the parameter itself, and a tensor for others"):
        te.FusedAdam(params, master_weights=[masters[0], masters[1].detach().clone()])
