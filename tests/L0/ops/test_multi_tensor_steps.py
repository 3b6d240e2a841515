"""multi_tensor's Adagrad, NovoGrad, LARS, Adam's variants and LAMB's parts against float64."""

import math

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits, needs_cuda
from optim_problem import SIZES

from apex_te.ops import multi_tensor_optim as op

OPTIONS = {
    op.adagrad: (
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.2, "eps": 1e-3},
        {"lr": 0.1, "weight_decay": 0.2, "adagrad_w": True},
    ),
    op.novograd: (
        {"step": 1, "lr": 0.1, "weight_decay": 0.1},
        {"step": 9, "lr": 0.1, "weight_decay": 0.1, "decoupled": False},
        {"step": 2, "lr": 0.1, "bias_correction": False, "grad_averaging": False},
    ),
    op.lars: (
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "eps": 0.1,
         "trust_coefficient": 0.5},
        {"lr": 0.1, "momentum": 0.5, "adapt": False},
    ),
}  # fmt: skip
REFERENCES = {
    op.adagrad: op.reference_adagrad,
    op.novograd: op.reference_novograd,
    op.lars: op.reference_lars,
}
CASES = [(step, i) for step, options in OPTIONS.items() for i in range(len(options))]
cases = pytest.mark.parametrize(
    ("step", "index"), CASES, ids=[f"{step.__name__}{i}" for step, i in CASES]
)
steps = pytest.mark.parametrize("step", OPTIONS, ids=lambda step: step.__name__)


class Lists:
    """Lists of one step, and the numbers that it takes for each tensor."""

    def __init__(self, step, device, dtype, moment_dtype=None, with_masters=False, sizes=SIZES):
        def randn():
            return [torch.randn(n) for n in sizes]

        masters = [p.to(device) for p in randn()]
        self.step = step
        self.params = [p.to(dtype) for p in masters]
        self.grads = [g.to(dtype).to(device) for g in randn()]
        self.moments = [m.abs().to(moment_dtype or dtype).to(device) for m in randn()]
        self.masters = masters if with_masters else None
        count = {op.adagrad: 0, op.novograd: 1, op.lars: 2}[step]
        self.numbers = [torch.rand(len(sizes)).to(device) + 0.1 for _ in range(count)]

    def lists(self):
        return [self.params, self.grads, self.moments, self.masters or []]

    def clones(self):
        return [[t.clone() for t in tensors] for tensors in self.lists()]

    def call(self, **options):
        masters = {} if self.masters is None else {"masters": self.masters}
        self.step(self.params, self.grads, self.moments, *self.numbers, **masters, **options)

    def check(self, **options):
        weights = self.params if self.masters is None else self.masters
        found = []
        for dtype in (torch.float64, None):
            rows = []
            for i, row in enumerate(zip(weights, self.grads, self.moments, strict=True)):
                numbers = [values[i].item() for values in self.numbers]
                wide = [t.cpu().to(dtype or t.dtype) for t in row]
                rows.append(REFERENCES[self.step](*wide, *numbers, **options))
            found.append([torch.cat(column) for column in zip(*rows, strict=True)])
        self.call(**options)
        for result, exact, same in zip((weights, self.moments), *found, strict=True):
            assert_as_good_as_torch(torch.cat(result), exact, same)
        if self.masters is not None:
            dtype = self.params[0].dtype
            assert_same_bits(self.params, [m.to(dtype) for m in self.masters])


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(device, dtype, step, index):
    Lists(step, device, dtype).check(**OPTIONS[step][index])


@steps
def test_moments_of_another_dtype(device, step):
    Lists(step, device, torch.bfloat16, torch.float32).check(**OPTIONS[step][1])
    Lists(step, device, torch.float32, torch.float16).check(**OPTIONS[step][1])


def test_novograd_of_one_tensor(device):
    Lists(op.novograd, device, torch.float32, sizes=[7]).check(**OPTIONS[op.novograd][0])


def test_lars_with_masters(device):
    Lists(op.lars, device, torch.float16, torch.float32, True).check(**OPTIONS[op.lars][1])


@pytest.mark.parametrize("which", [0, 1])
def test_lars_does_not_adapt_to_a_norm_of_zero(device, which):
    plain, other = (Lists(op.lars, device, torch.float32) for _ in range(2))
    other.params, other.grads, other.moments, _ = plain.clones()
    options = OPTIONS[op.lars][0]
    plain.numbers[which].zero_()
    plain.call(**options)
    other.call(**options, adapt=False)
    assert_same_bits(plain.params, other.params)


@steps
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_found_inf_skips_everything(device, step, dtype):
    problem = Lists(step, device, torch.bfloat16)
    problem.grads[5][3] = math.inf
    before = problem.clones()
    flag = torch.ones(1, dtype=dtype, device=device)
    problem.call(**OPTIONS[step][0], found_inf=flag)
    for ours, kept in zip(problem.lists(), before, strict=True):
        assert_same_bits(ours, kept)
    problem.call(**OPTIONS[step][0], found_inf=flag.zero_())
    assert not problem.moments[5].isfinite().all()
    assert not torch.equal(problem.params[8], before[0][8])


@steps
def test_many_tensors_and_misaligned_ones(device, step):
    """More than one launch takes, each with its own numbers; then the same at odd addresses."""
    sizes = [(i * 5) % 13 for i in range(700)] + [0]
    problem, other = (Lists(step, device, torch.float16, sizes=sizes) for _ in range(2))
    copies = problem.clones()
    for name, tensors in zip(("params", "grads", "moments"), copies, strict=False):
        flat = torch.cat([tensors[1].new_zeros(1), *tensors])
        setattr(other, name, list(flat[1:].split(sizes)))
    other.numbers = problem.numbers
    problem.check(**OPTIONS[step][0])
    other.call(**OPTIONS[step][0])
    assert_same_bits(other.params, problem.params)
    assert_same_bits(other.moments, problem.moments)


@needs_cuda
@cases
def test_same_bits_on_both_devices(step, index):
    on_cpu, on_gpu = Lists(step, "cpu", torch.bfloat16), Lists(step, "cuda", torch.bfloat16)
    moved = [[t.cuda() for t in tensors] for tensors in on_cpu.clones()]
    on_gpu.params, on_gpu.grads, on_gpu.moments, _ = moved
    on_gpu.numbers = [values.cuda() for values in on_cpu.numbers]
    on_cpu.call(**OPTIONS[step][index])
    on_gpu.call(**OPTIONS[step][index])
    for ours, theirs in zip(on_gpu.lists(), on_cpu.lists(), strict=True):
        assert_same_bits(ours, theirs)


def test_adagrad_follows_torch(device):
    params = [torch.randn(n, device=device) for n in SIZES]
    sums = [torch.zeros_like(p) for p in params]
    runs = []
    for dtype in (torch.float64, torch.float32):
        own = [p.to(dtype, copy=True) for p in params]
        runs.append((own, torch.optim.Adagrad(own, lr=0.1, weight_decay=0.1)))
    for _ in range(5):
        grads = [torch.randn_like(p) for p in params]
        for own, optimizer in runs:
            for p, g in zip(own, grads, strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
        op.adagrad(params, grads, sums, lr=0.1, weight_decay=0.1)
    assert_as_good_as_torch(*(torch.cat(tensors) for tensors in (params, runs[0][0], runs[1][0])))


def _adam_lists(device, dtype=torch.float32):
    made = [[torch.randn(n, device=device).to(dtype) for n in SIZES]]
    made += [[torch.randn(n, device=device) for n in SIZES] for _ in range(3)]
    for v in made[3]:
        v.abs_()
    return made


@pytest.mark.parametrize("bias_correction", [False, True])
def test_adam_with_eps_inside_the_root(device, bias_correction):
    lists = _adam_lists(device)
    options = {"step": 3, "lr": 0.1, "eps": 1e-2}

    def formula(p, g, m, v):
        b1, b2 = 0.9, 0.999
        c1, c2 = (1 - b1**3, 1 - b2**3) if bias_correction else (1.0, 1.0)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        return p - 0.1 * (m / c1) / ((v + 1e-2) / c2).sqrt()

    rows = list(zip(*lists, strict=True))
    exact, same = (
        torch.cat([formula(*(t.cpu().to(dtype) for t in row)) for row in rows])
        for dtype in (torch.float64, torch.float32)
    )
    op.adam(*lists, **options, bias_correction=bias_correction, eps_inside_sqrt=True)
    assert_as_good_as_torch(torch.cat(lists[0]), exact, same)


def test_adam_with_remainders_is_adam_on_float32(device):
    """The joined halves are, bit for bit, the weights that Adam on float32 has."""
    weights, grads, m, v = _adam_lists(device)
    weights[6][0], grads[6][1] = math.inf, math.nan
    bits = [w.view(torch.int32) for w in weights]
    params = [((b + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16) for b in bits]
    rest = [((b << 16) >> 16).to(torch.int16) for b in bits]
    copies = [[t.clone() for t in tensors] for tensors in (m, v)]
    inv_scale = torch.tensor([0.5], device=device)
    read = [g.clone() for g in grads]
    for step in (1, 2, 3):
        options = {"step": step, "lr": 0.05, "weight_decay": 0.1}
        op.adam(weights, read, m, v, **options, inv_scale=inv_scale)
        op.adam(
            params, grads, *copies, masters=rest, **options, inv_scale=inv_scale,
            unscale_grads=True,
        )  # fmt: skip
        read = [g * 0.5 for g in read]
    for w, high, low in zip(weights, params, rest, strict=True):
        joined = (high.view(torch.int16).to(torch.int32) << 16) + low
        torch.testing.assert_close(joined.view(torch.float32), w, rtol=0, atol=0, equal_nan=True)
    for ours, theirs in zip((*copies, grads), (m, v, read), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def _kept_by_a_step(params, rest):
    """Steps weights in two halves by 0; returns the joined numbers."""
    zeros = [[torch.zeros_like(p, dtype=torch.float32)] for p in params for _ in range(3)]
    op.adam(params, *zeros, masters=rest, step=1, lr=0.0)
    high = params[0].view(torch.int16).to(torch.int32) << 16
    return (high + rest[0]).view(torch.float32)


def test_every_remainder_comes_back(device):
    """Ties, both signs, the largest numbers, infinities and NaN."""
    low = torch.arange(0, 1 << 16, 7, dtype=torch.int64)
    low = torch.cat((low, torch.tensor([0x7FFF, 0x8000, 0x8001, 0xFFFF])))
    for high in (0x0000, 0x3F80, 0xBF80, 0x7F7E, 0xFF7E, 0x0001, 0x8001):
        bits = (high << 16) + low
        bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
        param = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16).to(device)
        rest = ((bits << 16) >> 16).to(torch.int16).to(device)
        number = bits.view(torch.float32)
        assert torch.equal(_kept_by_a_step([param], [rest]).cpu(), number)
        error = (param.cpu().double() - number.double()).abs()
        assert (error <= (number.bfloat16().double() - number.double()).abs()).all()
    special = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 3.4028e38], device=device)
    bits = special.view(torch.int32)
    param = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    rest = ((bits << 16) >> 16).to(torch.int16)
    kept = _kept_by_a_step([param], [rest])
    torch.testing.assert_close(kept, special, rtol=0, atol=0, equal_nan=True)
    assert param[:2].tolist() == [math.inf, -math.inf]
    assert param[2:4].isnan().all()


@pytest.mark.parametrize("adamw", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lamb_in_two_parts_is_lamb(device, dtype, adamw):
    """Updates with options for each tensor, then a step at the rate of each."""
    lists = _adam_lists(device, torch.float32)
    lists[1] = [g.to(dtype) for g in lists[1]]
    n = len(SIZES)
    beta1s, beta2s = (torch.linspace(*ends, n).to(device) for ends in ((0, 0.9), (0.5, 0.99)))
    decays, eps = torch.linspace(0, 0.2, n).to(device), torch.full((n,), 1e-3, device=device)
    corrections = torch.tensor([i % 2 for i in range(n)], dtype=torch.int32, device=device)
    updates = [torch.full_like(p, math.nan, dtype=dtype) for p in lists[0]]
    before = [[t.clone() for t in tensors] for tensors in lists]
    step, factor = torch.tensor([4], dtype=torch.int32), torch.tensor([0.5])
    op.lamb_update(
        *lists, updates, beta1s=beta1s, beta2s=beta2s, eps=eps, weight_decays=decays,
        bias_corrections=corrections, step=step.to(device), factor=factor.to(device), adamw=adamw,
    )  # fmt: skip
    found = []
    for wide in (torch.float64, torch.float32):
        rows = []
        for i, row in enumerate(zip(*before, strict=True)):
            p, g, m, v = (t.cpu().to(wide) for t in row)
            b1, b2, wd = (x[i].item() for x in (beta1s, beta2s, decays))
            c1, c2 = (1 - b1**4, 1 - b2**4) if i % 2 else (1.0, 1.0)
            g = g * 0.5 + (0.0 if adamw else wd) * p
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            u = (m / c1) / ((v / c2).sqrt() + eps[i].item()) + (wd * p if adamw else 0.0)
            rows.append((m, v, u if wide is torch.float64 else u.to(dtype)))
        found.append([torch.cat(column) for column in zip(*rows, strict=True)])
    for result, exact, same in zip((*lists[2:], updates), *found, strict=True):
        assert_as_good_as_torch(torch.cat(result), exact, same)
    assert_same_bits(lists[0], before[0])
    rates = torch.linspace(0.1, 1, n).to(device)
    copies = [torch.empty_like(u) for u in updates]
    op.descend(copies, updates, rates, masters=lists[0])
    for p, u, b, rate in zip(lists[0], updates, before[0], rates, strict=True):
        torch.testing.assert_close(p, b - rate * u.float(), rtol=0, atol=0)
    assert_same_bits(copies, [p.to(dtype) for p in lists[0]])


def test_refuses():
    x = [torch.ones(3)]
    with pytest.raises(ValueError, match="norms must have shape"):
        op.novograd(x, x, [torch.ones(3)], torch.ones(2), step=1, lr=0.1)
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        op.novograd(x, x, [torch.ones(3)], torch.ones(1), step=0, lr=0.1)
    with pytest.raises(ValueError, match="sums must have 1 entries like params, got 0"):
        op.adagrad(x, x, [], lr=0.1)
    with pytest.raises(TypeError, match=r"params\[0\] must have dtype bfloat16"):
        op.adam(x, x, x, x, masters=[torch.zeros(3, dtype=torch.int16)], step=1, lr=0.1)
