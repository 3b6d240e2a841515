"""bias_dropout_add against its formula in float64, and its mask against the specified one."""

import math

import pytest
import torch
from checks import assert_as_good_as_torch, assert_same_bits, in_pairs, needs_cuda, needs_memory
from torch.utils.checkpoint import checkpoint

from apex_te.ops import bias_dropout_add as op
from apex_te.ops.bias_dropout_add import bias_dropout_add

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [(F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)]  # of x and residual
SHAPES = [
    (1, 1), (3, 7), (7, 8), (8, 15), (16, 16), (17, 127), (127, 128), (128, 129), (129, 1000),
    (300, 256), (5, 3584), (2, 4095), (2, 3, 8192),
]  # fmt: skip


def seed_of(value, device):
    return torch.tensor([value], dtype=torch.int64, device=device)


def run(x, bias, residual, p, seed, grad, function=bias_dropout_add):
    """Output and gradients of clones; a bias of None has none."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, bias, residual)]
    out = function(*leaves, p, seed=seed)
    out.backward(grad)
    return [out, *(t.grad for t in leaves if t is not None)]


def check(x, bias, residual, p, seed, device):
    grad = torch.randn(residual.shape).to(residual.dtype)
    moved = [None if t is None else t.to(device) for t in (x, bias, residual)]
    ours = run(*moved, p, seed.to(device), grad.to(device))
    doubles = [None if t is None else t.double() for t in (x, bias, residual)]
    exact = run(*doubles, p, seed, grad.double(), op.reference)
    same = run(x, bias, residual, p, seed, grad, op.reference)
    for a, b, c in zip(ours, exact, same, strict=True):
        assert_as_good_as_torch(a, b, c)


@in_pairs(p=[0.0, 0.1, 1.0], dtypes=DTYPES, shape=SHAPES)
def test_fwd_and_bwd(device, poison, shape, dtypes, p):
    x, residual = torch.randn(shape).to(dtypes[0]), torch.randn(shape).to(dtypes[1])
    bias = torch.randn(shape[-1]).to(dtypes[0])
    check(x, bias, residual, p, seed_of(7, "cpu"), device)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_bias_of_float32_and_none(device, poison, dtype, p):
    x, residual = torch.randn(40, 72).to(dtype), torch.randn(40, 72).to(dtype)
    check(x, torch.randn(72), residual, p, seed_of(3, "cpu"), device)
    check(x, None, residual, p, seed_of(3, "cpu"), device)


def test_p_of_0_and_1_and_eval(device):
    x, residual = torch.randn(64, 72, device=device), torch.randn(64, 72, device=device)
    bias = torch.randn(72, device=device)
    assert torch.equal(bias_dropout_add(x, bias, residual, 1.0), residual)
    plain = residual + (x + bias)
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.0), plain)
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.7, training=False), plain)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["x", "bias", "residual"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_value_that_is_not_finite_shows(device, name, value, p):
    """Also where it is dropped."""
    tensors = {"x": torch.randn(20, 40), "bias": torch.randn(40), "residual": torch.randn(20, 40)}
    tensors[name][..., 9] = value
    tensors = {k: v.to(device) for k, v in tensors.items()}
    out = bias_dropout_add(**tensors, p=p, seed=seed_of(0, device))
    assert not out[:, 9].isfinite().any()
    assert out[:, :9].isfinite().all()
    assert out[:, 10:].isfinite().all()
    leaves = {k: v.clone().requires_grad_() for k, v in tensors.items()}
    grad = torch.ones(20, 40, device=device)
    grad[3, 5] = value
    bias_dropout_add(**leaves, p=p, seed=seed_of(0, device)).backward(grad)
    assert not leaves["x"].grad[3, 5].isfinite()
    assert not leaves["residual"].grad[3, 5].isfinite()
    assert not leaves["bias"].grad[5].isfinite()
    assert leaves["bias"].grad[:5].isfinite().all()


def test_only_the_wanted_gradients(device):
    x, bias, residual = (torch.randn(s, device=device) for s in ((9, 16), (16,), (9, 16)))
    for p in (0.0, 0.5):
        seed = seed_of(2, device)
        expected = run(x, bias, residual, p, seed, x)[1:]
        for i in range(3):
            tensors = [x.clone(), bias.clone(), residual.clone()]
            tensors[i].requires_grad_()
            bias_dropout_add(*tensors, p, seed=seed).backward(x)
            assert_same_bits(tensors[i].grad, expected[i])


def test_repeatable_and_equal_on_devices(device):
    x, residual, grad = (torch.randn(1000, 264).bfloat16() for _ in range(3))
    bias = torch.randn(264).bfloat16()
    moved = [t.to(device) for t in (x, bias, residual)]
    first = run(*moved, 0.3, seed_of(4, device), grad.to(device))
    assert_same_bits(run(*moved, 0.3, seed_of(4, device), grad.to(device)), first)
    assert_same_bits(run(x, bias, residual, 0.3, seed_of(4, "cpu"), grad), first)


def test_compiled_it_draws_anew(device):
    x = torch.ones(24, 32, device=device).requires_grad_()
    compiled = torch.compile(bias_dropout_add, fullgraph=True, backend="aot_eager")
    drawn = [compiled(x, None, torch.zeros_like(x), 0.5) for _ in range(2)]
    assert not torch.equal(*drawn)
    for out in drawn:
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(x))
        assert_same_bits(dx, out)


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(26)
    rows, cols = 65552, 32784  # 2.149e9 elements
    x, residual = (
        torch.empty(rows, cols, dtype=BF16, device="cuda").normal_().requires_grad_()
        for _ in range(2)
    )
    seed = seed_of(6, "cuda")
    out = bias_dropout_add(x, None, residual, 0.25, seed=seed)
    (dx,) = torch.autograd.grad(out, x, residual)
    last = slice(rows - 16, rows)
    kept = op.keep_mask(seed, rows, 8, 0.25)[last]
    scale = 65536 / (65536 - op.drop_threshold(0.25))
    exact = residual[last, :8].double() + x[last, :8].double() * kept * scale
    assert torch.equal(out[last, :8], exact.float().to(BF16))
    assert torch.equal(dx[last, :8], (residual[last, :8].double() * kept * scale).float().to(BF16))
    # The end of a row: its last 8 columns are vector 4097.
    vec = torch.tensor(cols // 8 - 1, device="cuda")
    row = torch.arange(rows, device="cuda")[last]
    counter = (vec.expand(16), row, row * 0, row * 0)
    words = torch.stack(op.philox4x32(counter, (seed, seed * 0)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).reshape(16, 8)
    assert torch.equal(dx[last, -8:] != 0, (halves >= 16384) & (residual[last, -8:] != 0))


@in_pairs(
    p=[1e-9, 0.1, 0.25, 0.9, 1 - 1e-9],
    seed=[0, 1, -1, 2**63 - 1, 0x0123456789ABCDEF],
    cols=[8, 100, 1001],
)
def test_mask_is_the_specified_one(device, cols, seed, p):
    x, zero = torch.ones(150, cols, device=device), torch.zeros(150, cols, device=device)
    out = bias_dropout_add(x, None, zero, p, seed=seed_of(seed, device)).cpu()
    expected = op.keep_mask(seed_of(seed, "cpu"), 150, cols, p)
    assert torch.equal(out != 0, expected)
    scale = 65536 / (65536 - op.drop_threshold(p))
    assert torch.equal(out, expected * torch.tensor(scale))


@pytest.mark.parametrize("cols", [1, 8, 100, 1001])
def test_kept_mask_is_the_specified_one(cols):
    """The bits that the CPU's forward keeps, and its backward from them and from the seed."""
    x, seed = torch.randn(150, cols), seed_of(4, "cpu")
    mask = torch.full((150, -(-cols // 8)), 0xA5, dtype=torch.uint8)
    op._fwd(x, None, x, seed, torch.empty_like(x), mask, 0.3)
    kept = mask[..., None] >> torch.arange(8) & 1
    assert torch.equal(kept.view(150, -1)[:, :cols].bool(), op.keep_mask(seed, 150, cols, 0.3))
    wanted = {"x_dtype": torch.float32, "bias_dtype": torch.float32}
    from_mask = op.bias_dropout_add_bwd(x, None, 0.3, mask=mask, **wanted)
    assert_same_bits(from_mask, op.bias_dropout_add_bwd(x, seed, 0.3, **wanted))
    with pytest.raises(ValueError, match="mask must have shape"):
        op.bias_dropout_add_bwd(x, None, 0.3, mask=mask[:-1], **wanted)


@needs_cuda
def test_kept_mask_is_refused_on_cuda():
    x, mask = torch.zeros(4, 8, device="cuda"), torch.zeros(4, 1, dtype=torch.uint8, device="cuda")
    with pytest.raises(NotImplementedError, match="mask must be None on CUDA, got a tensor"):
        op.bias_dropout_add_bwd(x, None, 0.3, x_dtype=torch.float32, mask=mask)


def test_philox_gives_the_published_answers():
    known = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
         [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]  # fmt: skip
    for counter, key, answer in known:
        words = op.philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert [w.item() for w in words] == answer


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics(device, p):
    rows, cols = 1024, 1000
    x, zero = torch.ones(rows, cols, device=device), torch.zeros(rows, cols, device=device)
    masks = [
        (bias_dropout_add(x, None, zero, p, seed=seed_of(s, device)) != 0).double().cpu()
        for s in (1, 2)
    ]
    q = 1 - op.drop_threshold(p) / 65536
    for mask in masks:
        assert abs(mask.mean() - q) < 5 * math.sqrt(q * (1 - q) / mask.numel())
        for axis in (0, 1):
            deviation = math.sqrt(q * (1 - q) / mask.shape[axis])
            means = mask.mean(axis)
            assert (means - q).abs().max() < 5.5 * deviation
            assert abs(means.var() / deviation**2 - 1) < 0.25
    centred = [(mask - q) / math.sqrt(q * (1 - q)) for mask in masks]
    limit = 5 / math.sqrt(rows * cols)
    a, b = centred
    assert abs((a * b).mean()) < limit  # of two seeds
    for shift in (1, 2, 3, 4, 8):
        assert abs((a[:, shift:] * a[:, :-shift]).mean()) < limit
        assert abs((a[shift:] * a[:-shift]).mean()) < limit
    y = torch.randn(rows, cols, device=device)
    out = bias_dropout_add(y, None, zero, p, seed=seed_of(5, device)).double()
    assert abs((out - y).mean()) < 5 * math.sqrt((1 / q - 1) / y.numel())
    assert abs(out.square().mean() * q / y.double().square().mean() - 1) < 0.02


def test_generator_governs_the_mask(device):
    x, residual = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    torch.manual_seed(5)
    first, second = (bias_dropout_add(x, None, residual, 0.5) for _ in range(2))
    torch.manual_seed(5)
    assert_same_bits(bias_dropout_add(x, None, residual, 0.5), first)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    expected = torch.rand(4, device=device)
    torch.manual_seed(5)
    for p, training in ((0.0, True), (1.0, True), (0.5, False)):
        bias_dropout_add(x, None, residual, p, training)
    assert_same_bits(torch.rand(4, device=device), expected)


def test_generator_of_ones_own(device):
    x, residual = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    before = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state()
    generator = torch.Generator(device).manual_seed(5)
    outs = [bias_dropout_add(x, None, residual, 0.5, generator=generator) for _ in range(2)]
    assert not torch.equal(*outs)
    generator.manual_seed(5)
    assert_same_bits(bias_dropout_add(x, None, residual, 0.5, generator=generator), outs[0])
    after = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(before, after)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_the_same_mask(device, reentrant):
    x, residual = torch.randn(64, 136, device=device), torch.randn(64, 136, device=device)
    bias = torch.randn(136, device=device)
    grad = torch.randn(64, 136, device=device)

    def twice(x, bias, residual):
        return bias_dropout_add(bias_dropout_add(x, bias, residual, 0.5), bias, residual, 0.3)

    def checkpointed(x, bias, residual):
        return checkpoint(twice, x, bias, residual, use_reentrant=reentrant)

    results = []
    for function in (twice, checkpointed):
        torch.manual_seed(11)
        leaves = [t.clone().requires_grad_() for t in (x, bias, residual)]
        out = function(*leaves)
        torch.rand(3, device=device)  # moves the generator on before the recomputation
        out.backward(grad)
        results.append([out, *(t.grad for t in leaves)])
    assert_same_bits(results[1], results[0])


def replays_of(step, generator=None):
    """Returns the tensor and the gradient that replays of the graph of ``step`` give."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out, dx = step()
    while True:
        graph.replay()
        assert_same_bits(dx, out)
        yield out.clone()


@needs_cuda
@pytest.mark.parametrize("own", [False, True])
def test_replayed_graph_draws_anew(own):
    """From the default generator, or from one that is registered with the graph."""
    generator = torch.Generator("cuda").manual_seed(3) if own else None
    x = torch.ones(64, 256, device="cuda", requires_grad=True)
    zeros = torch.zeros(64, 256, device="cuda")

    def step():
        out = bias_dropout_add(x, None, zeros, 0.5, generator=generator)
        return out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))

    replays = replays_of(step, generator)
    first, second = next(replays), next(replays)
    assert 0.4 < (first != 0).float().mean() < 0.6
    assert not torch.equal(first, second)
    # Setting the seed between replays brings the masks back.
    set_seed = generator.manual_seed if own else torch.cuda.manual_seed
    set_seed(17)
    expected = [next(replays), next(replays)]
    set_seed(17)
    assert_same_bits([next(replays), next(replays)], expected)
    assert not torch.equal(*expected)


@needs_cuda
def test_checkpoint_in_a_graph_takes_a_seed():
    """PyTorch's checkpoint cannot save the generator's state in a capture: the seed is drawn
    before it."""
    x = torch.ones(64, 256, device="cuda", requires_grad=True)
    zeros = torch.zeros(64, 256, device="cuda")

    def step():
        seed = torch.randint(0, 2**63 - 1, (1,), device="cuda")
        out = checkpoint(
            bias_dropout_add, x, None, zeros, 0.5,
            seed=seed, use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        return out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))

    replays = replays_of(step)
    assert not torch.equal(next(replays), next(replays))
