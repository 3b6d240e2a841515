"""What the optimizers do without the host: loss scales, skipped steps, CUDA graphs, devices."""

import warnings

import pytest
import torch
from checks import assert_same_bits, needs_cuda
from optimizer_runs import copies, flat, give_grads, make_params, state_tensors, steps

from apex_te.optimizers import FusedAdam, FusedLAMB, FusedSGD

MAKERS = {
    "adam": lambda p, **o: FusedAdam(p, lr=0.125, weight_decay=0.1, **o),
    "lamb": lambda p, **o: FusedLAMB(p, lr=0.125, weight_decay=0.1, **o),
    "sgd": lambda p, **o: FusedSGD(p, lr=0.125, momentum=0.5, **o),
    "dampening": lambda p, **o: FusedSGD(p, lr=0.125, momentum=0.5, dampening=0.25, **o),
}


def flag(value, device, dtype=torch.float32):
    return torch.tensor([value], dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_found_inf_makes_a_step_nothing(device, name, capturable, dtype):
    """First, in the middle; and so does the count of steps."""
    params = make_params(device, torch.bfloat16)
    others = copies(params)
    options = {"capturable": capturable, "master_weights": True}
    optimizer, other = MAKERS[name](params, **options), MAKERS[name](others, **options)
    for i, skipped in enumerate([True, False, True, False, False]):
        give_grads([params, others], i)
        if skipped:
            params[0].grad[1] = float("inf")
        optimizer.found_inf = flag(skipped, device, dtype)
        optimizer.step()
        if not skipped:
            other.step()
    assert_same_bits(params, others)
    assert_same_bits(state_tensors(optimizer), state_tensors(other))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("direct", [True, False])
def test_grad_scaler(device, name, direct):
    """As torch.amp.GradScaler calls a step, and handed over by the caller."""
    params = make_params(device)
    others = copies(params)
    optimizer, other = MAKERS[name](params), MAKERS[name](others)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    other_scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    plain = torch.optim.SGD(others, lr=0.0)  # unscales the other run, on the host

    for i in range(6):
        give_grads([params, others], i)
        for param in (*params, *others):
            param.grad = scaler.scale(param.grad)
            if other_scaler._scale is None:
                other_scaler.scale(param.grad)
        if i == 2:
            params[0].grad[0] = others[0].grad[0] = float("nan")
        clipped = i == 4
        if clipped:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if direct:
                optimizer.step(grad_scaler=scaler)
            else:
                scaler.step(optimizer)
        other_scaler.unscale_(plain)
        if clipped:
            torch.nn.utils.clip_grad_norm_(others, 0.5)
        if i != 2:
            other.step()
        scaler.update()
        other_scaler.update()
        assert scaler.get_scale() == other_scaler.get_scale()
    torch.testing.assert_close(flat(params), flat(others), rtol=1e-6, atol=1e-6)
    assert int(optimizer.state[params[0]].get("step", 5)) == 5


@pytest.mark.parametrize("is_inf", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_unscaled(device, name, dtype, is_inf):
    """After GradScaler.step as after torch's fused Adam: unscaled, unless the step is skipped."""
    sizes = [(5,), (70_001,), (33, 64), (0,)]
    grads = [torch.randn(size, device=device).to(dtype) * 1024 for size in sizes]
    if is_inf:
        grads[1][7] = torch.inf
    strided = [*grads]
    strided[2] = grads[2].t().contiguous().t()  # read from a dense copy; torch's needs a dense one
    found = []
    for make, given in (
        (MAKERS[name], strided),
        (lambda params: torch.optim.Adam(params, fused=True), grads),
    ):
        params = [
            torch.ones(size, device=device, dtype=dtype, requires_grad=True) for size in sizes
        ]
        for param, grad in zip(params, given, strict=True):
            param.grad = grad.clone(memory_format=torch.preserve_format)
        versions = [param.grad._version for param in params]
        scaled_step(make(params), dtype, is_inf, device)
        found.append([param.grad for param in params])
        if len(found) == 1:
            assert not params[2].grad.is_contiguous()
            if not is_inf:
                assert all(p.grad._version > v for p, v in zip(params, versions, strict=True))
    for ours, theirs, grad in zip(*found, grads, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, grad if is_inf else (grad.float() / 1024).to(dtype))


def scaled_step(optimizer, dtype, is_inf, device):
    """A step of gradients scaled by 1024, by torch.amp.GradScaler where it takes the dtype."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        # Its search for infinities takes no bfloat16 there; it hands over these two.
        optimizer.grad_scale = torch.tensor(1024.0, device=device)
        optimizer.found_inf = torch.tensor(float(is_inf), device=device)
        optimizer.step()
        return
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    scaler.scale(torch.ones((), device=device))
    scaler.step(optimizer)


def test_gradients_of_masters_are_unscaled(device):
    param = torch.ones(40, device=device, dtype=torch.bfloat16, requires_grad=True)
    optimizer = FusedAdam([param], master_weights=True)
    master = optimizer.master_weight(param)
    param.grad = torch.full_like(param, 3.0)
    master.grad = torch.full_like(master, 96.0)
    optimizer.grad_scale = torch.tensor(32.0, device=device)
    optimizer.step()
    assert (master.grad == 3).all()
    assert (param.grad == 3).all()  # not read, so not written


def test_grad_scaler_needs_an_update_between_steps(device):
    params = make_params(device)
    optimizer = FusedAdam(params)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device))
    give_grads([params], 0)
    optimizer.step(grad_scaler=scaler)
    with pytest.raises(RuntimeError, match=r"FusedAdam: grad_scaler.update\(\) must come between"):
        optimizer.step(grad_scaler=scaler)
    scaler.update()
    optimizer.step(grad_scaler=scaler)
    assert int(optimizer.state[params[0]]["step"]) == 2


def test_disabled_grad_scaler(device):
    params = make_params(device)
    others = copies(params)
    give_grads([params, others], 0)
    FusedAdam(params).step(grad_scaler=torch.amp.GradScaler(device.type, enabled=False))
    FusedAdam(others).step()
    assert_same_bits(params, others)


def test_grad_scale_divides_every_gradient(device):
    params = make_params(device)
    others = copies(params)
    for make in MAKERS.values():
        optimizer, other = make(params), make(others)
        for scale in (torch.tensor(8.0, device=device), 8.0):
            give_grads([params, others], 0)
            for param in others:
                param.grad /= 8
            optimizer.grad_scale = scale
            optimizer.step()
            other.step()
        assert_same_bits(params, others)


@needs_cuda
@pytest.mark.cuda
def test_parameters_on_several_devices():
    """The same as each device's parameters alone; LAMB clips by the norm of all."""
    for name, make in MAKERS.items():
        params = make_params("cuda")
        for i in (0, 1, 4):
            params[i] = params[i].detach().cpu().requires_grad_()
        others = [p.detach().to("cpu", copy=True).requires_grad_() for p in params]
        optimizer, other = make(params), make(others)
        for i in range(3):
            give_grads([others], i)
            for param, twin in zip(params, others, strict=True):
                param.grad = twin.grad.to(param.device, copy=True)  # each run unscales its own
            optimizer.grad_scale = torch.tensor(2.0, device="cuda")
            other.grad_scale = torch.tensor(2.0)
            optimizer.found_inf = torch.zeros((), device="cuda")
            other.found_inf = torch.zeros(())
            optimizer.step()
            other.step()
        mine = [p.detach().cpu() for p in params]
        torch.testing.assert_close(flat(mine), flat(others), rtol=1e-6, atol=1e-6, msg=name)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_captured_steps_equal_eager_ones(name, narrow):
    """20 replays, with a schedule of rates and one skipped step."""
    options = {"capturable": True, "master_weights": True}
    if narrow:
        names = ["momentum"] if name in ("sgd", "dampening") else ["exp_avg", "exp_avg_sq"]
        options |= {f"{n}_dtype": torch.bfloat16 for n in names}
    params = make_params("cuda", torch.bfloat16)
    others = copies(params)
    optimizer, other = MAKERS[name](params, **options), MAKERS[name](others, **options)
    found_inf = flag(0.0, "cuda")
    optimizer.found_inf = other.found_inf = found_inf
    for i in range(2):
        give_grads([params, others], i)
        optimizer.step()
        other.step()
    static = [p.grad for p in params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for i in range(2, 22):
        give_grads([others], i)
        for grad, twin in zip(static, others, strict=True):
            grad.copy_(twin.grad)
        found_inf.fill_(float(i == 5))
        for each in (optimizer, other):
            each.param_groups[0]["lr"].fill_(1 / i)
        graph.replay()
        other.step()
    assert_same_bits(params, others)
    assert_same_bits(state_tensors(optimizer), state_tensors(other))


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize(
    "narrow",
    [
        {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
        {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
        {"master_weight_dtype": torch.float16},
        {"store_param_remainders": True},
        {"use_decoupled_grad": True},
    ],
)
def test_captured_steps_with_narrow_state(narrow):
    """10 replays, one of them skipped; decoupled gradients know no skipped step."""
    options = {"lr": 0.1, "capturable": True, "master_weights": True, **narrow}
    decoupled = "use_decoupled_grad" in narrow
    params = make_params("cuda", torch.bfloat16)
    others = copies(params)
    optimizer, other = FusedAdam(params, **options), FusedAdam(others, **options)
    found_inf = flag(0.0, "cuda")
    if not decoupled:
        optimizer.found_inf = other.found_inf = found_inf

    def give(seed):
        give_grads([params, others], seed)
        for param in [*params, *others] if decoupled else ():
            param.decoupled_grad, param.grad = param.grad.float(), None

    name = "decoupled_grad" if decoupled else "grad"
    for i in range(2):
        give(i)
        optimizer.step()
        other.step()
    static = [getattr(p, name) for p in params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for i in range(2, 12):
        give(i)
        for grad, twin in zip(static, others, strict=True):
            grad.copy_(getattr(twin, name))
        found_inf.fill_(float(i == 5))
        graph.replay()
        other.step()
    assert_same_bits(params, others)
    assert_same_bits(state_tensors(optimizer), state_tensors(other))


@needs_cuda
@pytest.mark.cuda
def test_capture_needs_capturable_and_a_step_before():
    for options, message in (
        ({}, "capturable must be True for a step in a CUDA graph, got False"),
        ({"capturable": True}, "the captured step must follow one outside the graph"),
    ):
        params = make_params("cuda")
        optimizer = FusedAdam(params, **options)
        give_grads([params], 0)
        with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_never_waits_for_the_device(name):
    params = make_params("cuda", torch.float16)
    optimizer = MAKERS[name](params, master_weights=True)
    scaler = torch.amp.GradScaler("cuda")
    found_inf = flag(0.0, "cuda")
    steps(optimizer, params, 1)
    scaler.scale(torch.ones((), device="cuda"))
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            optimizer.found_inf = found_inf
            optimizer.step()
            del optimizer.found_inf
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_both_devices_give_the_same_bits(name):
    runs = []
    for device in ("cpu", "cuda"):
        params = make_params(device, torch.bfloat16)
        optimizer = MAKERS[name](params, master_weights=True)
        steps(optimizer, params, 5)
        runs.append([*params, *state_tensors(optimizer)])
    assert_same_bits(*runs)
