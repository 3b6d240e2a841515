"""multi_tensor's optimizer steps against float64, and against torch.optim over several steps."""

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits, needs_cuda, needs_memory
from optim_problem import Problem, adam, lamb, sgd

from apex_te.ops import multi_tensor_optim as op
from apex_te.runtime import tensor_list

# The last tensor of a launch of 624 is followed by an empty one.
MANY = [(i * 5) % 13 for i in range(1400)] + [0]

COMBINATIONS = [
    (torch.float32, torch.float32, False),
    (torch.float32, torch.bfloat16, False),
    (torch.float16, torch.float16, False),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.bfloat16, torch.float32, True),
    (torch.float16, torch.float16, True),
    (torch.bfloat16, torch.float16, True),
]
ADAM = [
    {"step": 1, "lr": 1e-2, "weight_decay": 0.1},
    {"step": 7, "lr": 0.3, "weight_decay": 0.1, "adamw": False},
    {"step": 1000, "lr": 1e-2, "betas": (0.0, 0.5), "eps": 1e-3},
    {"step": 2, "lr": 1e-2, "bias_correction": False},
]
SGD = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "first_step": True, "dampening": 0.3},
    {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "dampening": 0.3},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
]
LAMB = [
    {"step": 3, "lr": 1e-2, "weight_decay": 0.1},
    {"step": 1, "lr": 1e-2, "weight_decay": 0.1, "adamw": False, "grad_averaging": False},
    {"step": 3, "lr": 1e-2, "nvlamb": True, "bias_correction": False},
    {"step": 3, "lr": 1e-2},
]


@pytest.mark.parametrize("options", ADAM, ids=range(len(ADAM)))
@pytest.mark.parametrize(("dtype", "grad_dtype", "with_masters"), COMBINATIONS)
def test_adam(device, dtype, grad_dtype, with_masters, options):
    problem = Problem(device, dtype, grad_dtype, with_masters)
    problem.check(op.reference_adam, lambda p: adam(p, **options), **options)


@pytest.mark.parametrize("options", SGD, ids=range(len(SGD)))
@pytest.mark.parametrize(("dtype", "grad_dtype", "with_masters"), COMBINATIONS)
def test_sgd(device, dtype, grad_dtype, with_masters, options):
    problem = Problem(device, dtype, grad_dtype, with_masters)
    problem.check(op.reference_sgd, lambda p: sgd(p, **options), with_v=False, **options)


@pytest.mark.parametrize("options", LAMB, ids=range(len(LAMB)))
@pytest.mark.parametrize(("dtype", "grad_dtype", "with_masters"), COMBINATIONS)
def test_lamb(device, dtype, grad_dtype, with_masters, options):
    problem = Problem(device, dtype, grad_dtype, with_masters)
    problem.weights()[5].zero_()
    problem.params[5].zero_()
    problem.check(op.reference_lamb, lambda p: lamb(p, **options), **options)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_lamb_clips_the_global_norm(device, max_norm):
    problem = Problem(device, torch.float32)
    options = {"step": 2, "lr": 1e-2, "weight_decay": 0.1}
    norm = torch.linalg.vector_norm(torch.cat(problem.grads).double()).item()
    clip = min(1.0, max_norm / norm)
    other = Problem(device, torch.float32)
    other.params, other.grads, other.m, other.v, _ = problem.clones()
    problem.check(
        op.reference_lamb, lambda p: lamb(p, max_grad_norm=max_norm, **options), clip=clip,
        **options,
    )  # fmt: skip
    # The same with scaled gradients and their norm handed in.
    other.grads = [g * 64 for g in other.grads]
    scaled_norm = torch.tensor([norm * 64], device=device)
    inv_scale = torch.tensor([1 / 64], device=device)
    lamb(other, max_grad_norm=max_norm, grad_norm=scaled_norm, inv_scale=inv_scale, **options)
    for ours, theirs in zip(other.params, problem.params, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
         lambda q, i: adam(q, step=i, lr=0.1, weight_decay=0.1)),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, maximize=True),
         lambda q, i: adam(q, step=i, lr=0.1, weight_decay=0.1, adamw=False, maximize=True)),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
            lambda q, i: sgd(
                q, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, first_step=i == 1
            ),
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
            lambda q, i: sgd(
                q, lr=0.1, momentum=0.9, dampening=0.5, maximize=True, first_step=i == 1
            ),
        ),
    ],
    ids=["adamw", "adam", "nesterov", "sgd"],
)  # fmt: skip
def test_follows_torch_optim(device, make, call):
    problem = Problem(device, torch.float32)
    for moment in (*problem.m, *problem.v):
        moment.zero_()
    runs = []
    for dtype in (torch.float64, torch.float32):
        params = [p.to(dtype, copy=True) for p in problem.params]
        runs.append((params, make(params)))
    for i in range(1, 6):
        problem.grads = [torch.randn_like(g) for g in problem.grads]
        for params, optimizer in runs:
            for p, g in zip(params, problem.grads, strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
        call(problem, i)
    lists = problem.params, runs[0][0], runs[1][0]
    assert_as_good_as_torch(*(torch.cat(params) for params in lists))


STEPS = [
    (adam, {"weight_decay": 0.1}),
    (sgd, {"momentum": 0.9, "weight_decay": 0.1}),
    (lamb, {"weight_decay": 0.1, "max_grad_norm": 1.0}),
]


@pytest.mark.parametrize(("call", "options"), STEPS)
@pytest.mark.parametrize("step_dtype", [torch.float32, torch.int32])
def test_device_scalars_give_the_same(device, call, options, step_dtype):
    def scalar(value, dtype=torch.float32):
        return torch.tensor([value], dtype=dtype, device=device)

    problem = Problem(device, torch.bfloat16, with_masters=True)
    other = Problem(device, torch.bfloat16, with_masters=True)
    other.params, other.grads, other.m, other.v, other.masters = problem.clones()
    steps = [{"step": 5}, {"step": scalar(5, step_dtype)}] if call is not sgd else [{}, {}]
    call(problem, lr=2.0**-7, **steps[0], **options)
    call(
        other, lr=scalar(2.0**-7), inv_scale=scalar(1.0), found_inf=scalar(0.0), **steps[1],
        **options,
    )  # fmt: skip
    for ours, theirs in zip(problem.lists(), other.lists(), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize(("call", "options"), STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_found_inf_skips_everything(device, call, options, dtype):
    problem = Problem(device, torch.bfloat16, with_masters=True)
    problem.grads[5][3] = float("inf")
    kept = problem.clones()
    flag = torch.ones(1, dtype=dtype, device=device)
    steps = {} if call is sgd else {"step": 1}
    call(problem, lr=0.1, found_inf=flag, **steps, **options)
    for ours, before in zip(problem.lists(), kept, strict=True):
        assert_same_bits(ours, before)
    call(problem, lr=0.1, found_inf=flag.zero_(), **steps, **options)
    assert torch.isnan(problem.masters[5]).any() or torch.isinf(problem.masters[5]).any()
    assert not torch.equal(problem.masters[8], kept[4][8])


@pytest.mark.parametrize(("call", "options"), STEPS)
def test_lists_longer_than_one_launch(device, call, options):
    """Many tensors and an empty one at the end are all updated, also from prepared lists."""
    problem = Problem(device, torch.float32, sizes=MANY)
    other = Problem(device, torch.float32, sizes=MANY)
    other.params, other.grads, other.m, other.v, _ = problem.clones()
    kept = problem.clones()
    steps = {} if call is sgd else {"step": 1}
    call(problem, lr=0.1, **steps, **options)
    assert all((p != q).all() for p, q in zip(problem.params, kept[0], strict=True))
    for name in ("params", "grads", "m", "v"):
        setattr(other, name, tensor_list(getattr(other, name)))
    call(other, lr=0.1, **steps, **options)
    assert_same_bits(list(other.params), problem.params)


@pytest.mark.parametrize(("call", "options"), STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_storage(device, call, options, dtype):
    """Views at odd offsets of one flat buffer, as sharded optimizers make them."""
    problem = Problem(device, dtype)
    other = Problem(device, dtype)
    other.params, other.grads, other.m, other.v, _ = problem.clones()

    def misaligned(tensors):
        sizes = [t.numel() for t in tensors]
        flat = torch.cat([tensors[-1].new_zeros(1), *tensors])
        return list(flat[1:].split(sizes))

    other.params, other.m = misaligned(other.params), misaligned(other.m)
    other.grads = misaligned(other.grads)
    steps = {} if call is sgd else {"step": 1}
    call(problem, lr=0.1, **steps, **options)
    call(other, lr=0.1, **steps, **options)
    assert_same_bits(other.m, problem.m)
    if call is not lamb:  # its norms are added in another order
        assert_same_bits(other.params, problem.params)


def test_rejects():
    x = torch.ones(2, 3)
    good = ([x], [x], [x.clone()], [x.clone()])
    for args, options, error, message in (
        (([x.t()], *good[1:]), {}, ValueError, "params[0] must be contiguous, got strides [1, 3]"),
        (good, {"betas": (0.9, 1.0)}, ValueError, "beta2 must be at least 0 and below 1, got 1"),
        (good, {"step": 0}, ValueError, "step must be at least 1, got 0"),
    ):
        for step in (op.adam, op.lamb):
            with pytest.raises(error) as raised:
                step(*args, **{"step": 1, "lr": 0.1, **options})
            assert message in str(raised.value)
    with pytest.raises(ValueError, match="momentums must have 1 entries like params, got 0"):
        op.sgd([x], [x], lr=0.1, momentum=0.9)


@needs_cuda
@pytest.mark.parametrize("options", ADAM, ids=range(len(ADAM)))
def test_adam_gives_the_same_bits_on_both_devices(options):
    on_cpu = Problem("cpu", torch.bfloat16)
    on_gpu = Problem("cuda", torch.bfloat16)
    cuda = [[t.cuda() for t in tensors] for tensors in on_cpu.clones()]
    on_gpu.params, on_gpu.grads, on_gpu.m, on_gpu.v, _ = cuda
    adam(on_cpu, **options)
    adam(on_gpu, **options)
    for ours, theirs in zip(on_gpu.lists(), on_cpu.lists(), strict=True):
        assert_same_bits(ours, theirs)


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(40)
    n = 2**31 + 12345
    p, g = (torch.empty(n, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    m, v = (torch.zeros(n, device="cuda") for _ in range(2))
    parts = [slice(0, 5000), slice(2**31 - 500, 2**31 + 500), slice(n - 20_000, n)]
    before = [[t[part].clone() for t in (p, g, m, v)] for part in parts]
    op.adam([p], [g], [m], [v], step=1, lr=0.1)
    for part, state in zip(parts, before, strict=True):
        op.adam(*([t] for t in state), step=1, lr=0.1)
        assert_same_bits([t[part] for t in (p, m, v)], [state[0], *state[2:]])
