"""batch_norm against its formula in float64 and torch's error, whole and in parts."""

import pytest
import torch
from checks import (
    DTYPES,
    assert_as_good_as_torch,
    assert_same_bits,
    in_pairs,
    needs_cuda,
    needs_memory,
)

from apex_te.contract import SIZES
from apex_te.ops.batch_norm import (
    batch_norm_bwd,
    batch_norm_combine,
    batch_norm_fwd,
    batch_norm_reduce,
    batch_norm_relu_bwd,
    batch_norm_stats,
    batch_norm_train_bwd,
    batch_norm_train_fwd,
    reference,
)

EPS = 1e-5
# Channels-first data of odd and of whole vectors, of one column a channel, of many lines.
FIRST = [
    (4, 6, 5, 7),
    (40, 16, 5, 5),
    (3, 8, 16, 16),
    (2, 3, 65, 64),
    (70, 24),
    (33, 5, 3),
    (2, 1, 9),
]
# Of channels-last data; beyond one tile of columns, of few rows, of many.
LAST = [(300, 64), (7, 3, 2, 70), (3, 520), (2, 33, 33, 8), (2000, 40), (1, 2, 17)]
CASES = [(shape, False) for shape in FIRST] + [(shape, True) for shape in LAST]
# Beyond these of few and of many channels, of small maps and of no elements.
WHOLE = [
    *CASES,
    ((32, 64, 14, 14), False),
    ((64, 24, 7, 7), False),
    ((300, 4, 72), False),
    ((40, 3, 8), False),
    ((32, 7, 7, 256), True),
    ((5000, 136), True),
    ((0, 5, 4), False),
    ((0, 7), True),
    ((3, 0, 4), False),
]


def channel_axis(shape, channels_last):
    return len(shape) - 1 if channels_last else 1


class Problem:
    """Arguments of one call on the CPU, and what the formula gives for them in a dtype."""

    def __init__(self, shape, channels_last, dtype, affine="own", with_z=False, relu=False):
        self.made_with = shape, channels_last, dtype, affine, with_z, relu
        self.channels_last, self.relu, self.dtype = channels_last, relu, dtype
        self.axis = channel_axis(shape, channels_last)
        c = shape[self.axis]
        self.x = (torch.randn(shape) * 2 + torch.randn(c).view(self.spread(c, shape)) * 4).to(dtype)
        self.z = torch.randn(shape).to(dtype) if with_z else None
        self.dy = torch.randn(shape).to(dtype)
        kind = torch.float32 if affine == "float32" else dtype
        self.weight = None if affine == "none" else (torch.rand(c) + 0.5).to(kind)
        self.bias = None if affine == "none" else torch.randn(c).to(kind)
        self.count = torch.tensor([self.x.numel() // max(c, 1)], dtype=torch.int32)

    def spread(self, c, shape):
        return [c if i == self.axis else 1 for i in range(len(shape))]

    def exact(self, wide):
        """(y, dx, dz, dweight, dbias), in float64 or rounded from the arithmetic of the dtype."""
        given = [self.x, self.z, self.weight, self.bias]
        leaves = [None if t is None else t.to(wide, copy=True).requires_grad_() for t in given]
        x, z, weight, bias = leaves
        options = {"relu": self.relu, "channels_last": self.channels_last}
        y = reference(x, weight, bias, EPS, z=z, **options)
        y.backward(self.dy.to(wide))
        return [y.detach(), *(None if t is None else t.grad for t in (x, z, weight, bias))]

    def run(self, device, ranks=1):
        """The same by the op, with the batch in parts as ranks have them."""
        options = {"relu": self.relu, "channels_last": self.channels_last}
        on = lambda t: None if t is None else t.to(device)  # noqa: E731
        weight, bias = on(self.weight), on(self.bias)
        xs, dys = (on(t).chunk(ranks) for t in (self.x, self.dy))
        zs = on(self.z).chunk(ranks) if self.z is not None else [None] * ranks
        found = [batch_norm_stats(x, channels_last=self.channels_last) for x in xs]
        means, variances = (torch.stack(each) for each in zip(*found, strict=True))
        counts = torch.tensor([x.numel() // means.shape[1] for x in xs], dtype=torch.int32)
        counts = counts.to(device)
        stats = batch_norm_combine(means, variances, counts, EPS)
        affine = (stats.mean, stats.inv_std, weight, bias)
        parts = list(zip(xs, dys, zs, strict=True))
        y = [batch_norm_fwd(x, *affine, z=z, **options) for x, _, z in parts]
        sums = [batch_norm_reduce(dy, x, *affine, z=z, **options) for x, dy, z in parts]
        both = [sum(each[i] for each in sums) for i in range(2)]
        grads = [
            batch_norm_bwd(
                dy, x, *affine[:3], *both, counts, bias, z=z, **options,
                with_dz=self.z is not None,
            )
            for x, dy, z in parts
        ]  # fmt: skip
        whole = [None if each[0] is None else torch.cat(each) for each in zip(*grads, strict=True)]
        params = [None if sums[0][i] is None else sum(each[i] for each in sums) for i in (2, 3)]
        return [torch.cat(y), *whole, *params], stats


def check(problem, found):
    """Each result as near to the formula in float64 as torch's in the dtype.

    Of sums, which can be of one channel, as near as torch's for the worst of eight problems.
    """
    problems = [problem, *(Problem(*problem.made_with) for _ in range(7))]
    exact, same = ([p.exact(wide) for p in problems] for wide in (torch.float64, torch.float32))
    near = same[0]
    for i in (3, 4):
        if near[i] is not None:
            errors = [(b[i].double() - a[i]).abs().max() for a, b in zip(exact, same, strict=True)]
            near[i] = (exact[0][i] + max(errors)).float()
    exact = exact[0]
    for ours, right, other in zip(found, exact, near, strict=True):
        assert (ours is None) == (right is None)
        if ours is not None:
            assert_as_good_as_torch(ours, right, other.to(ours.dtype))


@in_pairs(
    case=CASES, dtype=DTYPES, affine=["none", "own", "float32"], with_z=[False, True],
    relu=[False, True],
)  # fmt: skip
def test_forward_and_backward(device, poison, case, dtype, affine, with_z, relu):
    problem = Problem(*case, dtype, affine, with_z, relu)
    found, stats = problem.run(device)
    check(problem, found)
    assert found[0].dtype is dtype
    assert found[0].is_contiguous()
    moved = problem.x.double().movedim(problem.axis, -1).flatten(0, -2)
    exact, near = statistics(moved), statistics(moved.float())
    for ours, right, other in zip(stats, exact, near, strict=True):
        if len(moved) > 1 or ours is not stats.var:
            assert_as_good_as_torch(ours, right, other)


def statistics(x):
    """Those of the op by their formulas, in the dtype of ``x``."""
    n, mean = len(x), x.mean(0)
    var = (x - mean).square().mean(0)
    return mean, var * (n / max(n - 1, 1)), (var + EPS).rsqrt()


@in_pairs(
    case=WHOLE, dtype=DTYPES, affine=["none", "own", "float32"], with_z=[False, True],
    relu=[False, True], running=["none", "both", "mean"],
)  # fmt: skip
def test_whole_has_the_bits_of_its_steps(
    device, poison, case, dtype, affine, with_z, relu, running
):
    problem = Problem(*case, dtype, affine, with_z, relu)
    given = problem.x, problem.z, problem.dy, problem.weight, problem.bias
    x, z, dy, weight, bias = (None if t is None else t.to(device) for t in given)
    layout = {"channels_last": problem.channels_last}
    options = {"z": z, "relu": relu, **layout}
    c = x.shape[problem.axis]
    made = {"running_mean": torch.randn(c, device=device)} if running != "none" else {}
    made |= {"running_var": torch.rand(c, device=device)} if running == "both" else {}
    steps, whole = ({name: t.clone() for name, t in made.items()} for _ in range(2))
    mean, var = batch_norm_stats(x, **layout)
    counts = problem.count.to(device)
    stats = batch_norm_combine(mean[None], var[None], counts, EPS, **steps, momentum=0.3)
    y = batch_norm_fwd(x, stats.mean, stats.inv_std, weight, bias, **options)
    found = batch_norm_train_fwd(x, weight, bias, EPS, **options, **whole, momentum=0.3)
    assert_same_bits(found, (y, stats.mean, stats.inv_std))
    assert_same_bits(whole.values(), steps.values())
    affine = (stats.mean, stats.inv_std, weight)
    sums = batch_norm_reduce(dy, x, *affine, bias, **options)
    grads = batch_norm_bwd(dy, x, *affine, *sums[:2], counts, bias, **options, with_dz=with_z)
    found = batch_norm_train_bwd(dy, x, *affine, bias, **options, with_dz=with_z)
    assert_same_bits(found, (*grads, *sums[2:]))


@in_pairs(memory=["first", "last", "odd"], dtype=DTYPES, backward=[False, True])
def test_whole_of_other_storage(device, memory, dtype, backward):
    """In channels_last memory, and where no vector of 16 bytes is aligned."""
    x, z, dy = (torch.randn(32, 16, 6, 4).to(dtype).to(device) for _ in range(3))
    moved = [t.to(memory_format=torch.channels_last) if memory == "last" else t for t in (x, z, dy)]
    if memory == "odd":
        moved = [t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t) for t in moved]
    weight, bias = torch.rand(16, device=device), torch.randn(16, device=device)
    y, mean, inv_std = batch_norm_train_fwd(moved[0], weight, bias, z=moved[1], relu=True)
    assert y.stride() == moved[0].stride()
    exact = Problem((32, 16, 6, 4), False, dtype, "float32", True, True)
    exact.x, exact.z, exact.dy = (t.cpu() for t in (x, z, dy))
    exact.weight, exact.bias = weight.cpu(), bias.cpu()
    right, same = exact.exact(torch.float64), exact.exact(torch.float32)
    assert_as_good_as_torch(y, right[0], same[0].to(dtype))
    if backward:
        grads = batch_norm_train_bwd(
            moved[2], moved[0], mean, inv_std, weight, bias, z=moved[1], relu=True, with_dz=True
        )
        for i in range(2):
            assert_as_good_as_torch(grads[i], right[i + 1], same[i + 1].to(dtype))


@in_pairs(case=[((9, 6, 5, 7), False), ((9, 40), True)], dtype=DTYPES, relu=[False, True])
def test_parts_are_one_batch(device, case, dtype, relu):
    problem = Problem(*case, dtype, "own", True, relu)
    found, _ = problem.run(device, ranks=3)
    if dtype is torch.float32:  # else the sum of rounded gradients of parameters
        check(problem, found)
    else:
        exact, same = problem.exact(torch.float64), problem.exact(torch.float32)
        for i in range(3):
            assert_as_good_as_torch(found[i], exact[i], same[i].to(dtype))


@pytest.mark.parametrize("channels_last", [False, True])
def test_variance_of_a_large_mean(device, channels_last):
    """Of which sums of squares would leave nothing, and rounded means of parts too little."""
    shape = (64, 40, 6, 4)
    x = torch.randn(shape) + 4096.0
    x = x if channels_last is False else x.movedim(1, -1).contiguous()
    _, var = batch_norm_stats(x.to(device), channels_last=channels_last)
    moved = (x if channels_last else x.movedim(1, -1)).double().flatten(0, -2)
    right = moved.var(0, correction=0)
    torch.testing.assert_close(var.cpu().double(), right, rtol=2e-6, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
def test_running_statistics(device, momentum):
    x = torch.randn(6, 5, 9) * 3 + 1
    ours = [torch.zeros(5).to(device), torch.ones(5).to(device)]
    mean, var = batch_norm_stats(x.to(device))
    count = torch.tensor([54], dtype=torch.int32).to(device)
    batch_norm_combine(
        mean[None], var[None], count, running_mean=ours[0], running_var=ours[1], momentum=momentum
    )
    theirs = [torch.zeros(5).double(), torch.ones(5).double()]
    torch.nn.functional.batch_norm(x.double(), *theirs, training=True, momentum=momentum)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.cpu(), b.float(), rtol=1e-6, atol=1e-7)


def test_a_part_without_elements_counts_for_nothing(device):
    mean, var = batch_norm_stats(torch.randn(4, 3, 5, device=device))
    of_none, none = batch_norm_stats(torch.randn(0, 3, 5, device=device))
    assert not of_none.any()
    assert not none.any()
    counts = torch.tensor([20, 0], dtype=torch.int32, device=device)
    nan = torch.full_like(mean, torch.nan)
    alone = batch_norm_combine(mean[None], var[None], counts[:1])
    both = batch_norm_combine(torch.stack((mean, nan)), torch.stack((var, nan)), counts)
    assert_same_bits(both, alone)
    one = batch_norm_combine(mean[None], var[None], torch.ones_like(counts[:1]))
    assert one.var.isfinite().logical_not().all()
    assert one.inv_std.isfinite().all()


@in_pairs(case=[((4, 6, 5, 7), False), ((50, 40), True)], dtype=DTYPES, with_z=[False, True])
def test_relu_bwd(device, case, dtype, with_z):
    problem = Problem(*case, dtype, "own", with_z, True)
    on = [None if t is None else t.to(device) for t in (problem.dy, problem.x, problem.z)]
    dy, x, z = on
    c = x.shape[problem.axis]
    mean, inv_std = torch.randn(c, device=device), torch.rand(c, device=device) + 0.1
    affine = (mean, inv_std, problem.weight.to(device), problem.bias.to(device))
    options = {"z": z, "channels_last": problem.channels_last}
    found = batch_norm_relu_bwd(dy, x, *affine, **options)
    argument = batch_norm_fwd(x.float(), *(t.float() for t in affine),
                              z=None if z is None else z.float(),
                              channels_last=problem.channels_last)  # fmt: skip
    assert_same_bits(found, torch.where(argument > 0, dy, 0))


def test_nan_and_infinity_show(device):
    for channels_last in (False, True):
        x = torch.randn(40, 16, device=device)
        x[3, 5], x[4, 6] = torch.nan, torch.inf
        mean, var = batch_norm_stats(x, channels_last=channels_last)
        assert mean[5].isnan()
        assert not mean[6].isfinite()
        assert not var[5:7].isfinite().any()
        assert mean[:5].isfinite().all()
        y = batch_norm_fwd(x, torch.zeros_like(mean), torch.ones_like(mean), relu=True)
        assert y[3, 5].isnan()
        assert y[4, 6].isinf()


@in_pairs(case=[((64, 24, 7, 7), False), ((8, 24, 64, 64), False), ((9999, 72), True)],
          dtype=DTYPES, relu=[False, True])  # fmt: skip
def test_repeats_its_bits(device, case, dtype, relu):
    problem = Problem(*case, dtype, "float32", True, relu)
    first, _ = problem.run(device)
    second, _ = problem.run(device)
    assert_same_bits(first, second)


def test_other_storage(device):
    """Views at odd offsets, of channels_last memory and of expanded gradients."""
    x = torch.randn(5, 8, 6, 4).to(device)
    mean, var = batch_norm_stats(x)
    flat = torch.empty(x.numel() + 1, device=device)[1:].view(x.shape).copy_(x)
    for other in (flat, x.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(batch_norm_stats(other)[0], mean, rtol=1e-6, atol=1e-6)
        assert_same_bits(batch_norm_fwd(other, mean, var), batch_norm_fwd(x, mean, var))
    dy = torch.ones(1, device=device).expand(x.shape)
    sums = batch_norm_reduce(dy, x, mean, var)
    assert sums.sum_dy.eq(120).all()


def test_scratch_of_every_shape():
    """The formula of Python is that of the header, whose check refuses another size."""
    shapes = [(n, c, s) for n in (1, 31, 32, 65, 5000) for c in (1, 3, 256, 700)
              for s in (1, 7, 8, 49, 64, 3136) if n * c * s < 4e6]  # fmt: skip
    for shape in shapes:
        x = torch.zeros(shape)
        batch_norm_stats(x)
        assert SIZES["batch_norm_floats"](*shape) % (2 * shape[1]) == 0


@pytest.mark.cuda
@needs_cuda
def test_beyond_32_bits():
    needs_memory(20)
    x = torch.randn(2**25 + 3, 72, dtype=torch.bfloat16, device="cuda")
    mean, var = batch_norm_stats(x, channels_last=True)
    near = batch_norm_stats(x.mT.contiguous().unsqueeze(0))
    for a, b in zip((mean, var), near, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    y = batch_norm_fwd(x, mean, var, channels_last=True)
    again = batch_norm_fwd(x[-7:], mean, var, channels_last=True)
    assert_same_bits(y[-7:], again)


def test_rejects():
    x = torch.randn(4, 3, 5)
    mean, var = batch_norm_stats(x)
    with pytest.raises(ValueError, match=r"x must have 2 dimensions or more, got \[5\]"):
        batch_norm_stats(x[0, 0])
    with pytest.raises(
        TypeError, match="x must have dtype float32, float16 or bfloat16, got float64"
    ):
        batch_norm_stats(x.double())
    with pytest.raises(ValueError, match=r"mean must have shape \[3\], got \[2\]"):
        batch_norm_fwd(x, mean[:2], var)
    with pytest.raises(ValueError, match=r"z must have shape \[4, 3, 5\], got \[4, 3, 4\]"):
        batch_norm_fwd(x, mean, var, z=x[..., :4])
    with pytest.raises(TypeError, match="bias must have dtype float32, got bfloat16"):
        batch_norm_fwd(x, mean, var, mean, var.bfloat16())
    counts = torch.tensor([20])
    with pytest.raises(TypeError, match="counts must have dtype int32, got int64"):
        batch_norm_combine(mean[None], var[None], counts)
    with pytest.raises(ValueError, match=r"dy must have shape \[4, 3, 5\], got \[3, 5\]"):
        batch_norm_reduce(x[0], x, mean, var)
