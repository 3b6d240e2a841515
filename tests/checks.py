"""Comparisons shared by the ops' tests: error bounds, FP8 data, storage layouts, graphs."""

import atexit
import functools
import json
import os
import subprocess
import sys

import pytest
import torch

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DIMS = [0, 1, 3, 7, 8, 15, 16, 17, 127, 128, 129, 1000, 3584, 4095, 8192]

needs_cuda = pytest.mark.cuda  # tests/conftest.py skips these where there is no GPU


def on_gpus(*shapes):
    """Shapes for which a GPU has other kernels, but not a CPU: long where there is no GPU."""
    marks = () if torch.cuda.is_available() else pytest.mark.long
    return [pytest.param(shape, marks=marks, id=str(shape)) for shape in shapes]


def one(value, device="cpu"):
    """A tensor of one float32 element, as scales and amaxes are."""
    return torch.tensor([value], dtype=torch.float32, device=device)


def spread(shape, dtype):
    """Normal values whose size changes over five decades from block to block."""
    decades = torch.randint(-3, 3, (shape[0], -(-shape[1] // 16))).repeat_interleave(16, 1)
    return (torch.randn(shape) * 10.0 ** decades[:, : shape[1]]).to(dtype)


def sqnr(reference, actual):
    """The ratio of a signal to its quantization noise in dB; 6,000 for none."""
    reference, actual = reference.double().cpu(), actual.double().cpu()
    return 20 * torch.log10(reference.norm() / (reference - actual).norm().clamp(1e-300)).item()


def needs_memory(gigabytes):
    """Skips a test where a GPU has less free memory."""
    if torch.cuda.mem_get_info()[0] < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory")


def codes(tensor):
    """The bytes of an FP8 tensor, on the CPU."""
    return tensor.view(torch.uint8).cpu()


def assert_as_good_as_torch(actual, exact, same_dtype):
    """max |actual - exact| <= 2 max |same_dtype - exact| + atol.

    `exact` is the formula in float64, `same_dtype` PyTorch's formula in the op's dtype, atol two
    roundings at each value. Where `exact` is NaN `actual` must be, where it is infinite in the
    op's dtype `actual` must be not finite.
    """
    dtype = actual.dtype
    actual, exact, same_dtype = (t.detach().cpu() for t in (actual, exact, same_dtype))
    assert exact.dtype == torch.float64
    assert same_dtype.dtype == dtype
    assert actual.shape == exact.shape == same_dtype.shape
    if not actual.numel():
        return
    rounded = exact.to(dtype)
    finite = torch.isfinite(rounded)
    if not finite.all():
        assert not torch.isfinite(actual[~finite]).any(), "NaN or Inf was hidden"
        assert torch.isnan(actual[torch.isnan(rounded)]).all(), "NaN is missing"
    finite &= torch.isfinite(same_dtype)
    if not finite.any():
        return
    if not finite.all():
        actual, exact, same_dtype, rounded = (
            t[finite] for t in (actual, exact, same_dtype, rounded)
        )
    atol = 2 * ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max()
    error = (actual.double() - exact).abs().max()
    bound = 2 * (same_dtype.double() - exact).abs().max() + atol
    assert error <= bound, f"error {error:.3e} must be at most {bound:.3e}"


def assert_error_as_torch(actual, exact, same_dtype, above=1.1):
    """The root mean square of actual's error is at most `above` times that of PyTorch's result.

    `exact` is the formula in float64, `same_dtype` PyTorch's result in the op's dtype, or `exact`
    rounded to it. All values are finite.
    """
    assert actual.dtype == same_dtype.dtype
    assert exact.dtype == torch.float64
    assert actual.shape == exact.shape == same_dtype.shape
    exact = exact.detach().cpu()
    error, bound = (
        (t.detach().cpu().double() - exact).square().mean().sqrt() for t in (actual, same_dtype)
    )
    assert error <= above * bound, f"error {error:.3e} is {error / bound:.2f} times PyTorch's"


def assert_adjacent_codes(actual, expected, one_in=10_000):
    """FP8 tensors whose differing codes are neighbours, at most one element in `one_in`."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    a, b = codes(actual).to(torch.int32), codes(expected).to(torch.int32)
    differs = a != b
    if not differs.any():
        return
    # Sign and magnitude to a number in order of value; -0 and 0 become neighbours.
    a, b = (torch.where(t < 128, t, 127 - t)[differs] for t in (a, b))
    assert (a - b).abs().max() <= 1, "codes differ by more than a step"
    assert differs.sum() <= max(1, differs.numel() // one_in), f"{int(differs.sum())} codes differ"


def assert_close_amax(actual, expected, ulps=4):
    """Two float32 amaxes within `ulps`, both NaN, or both infinite."""
    a, b = (t.detach().cpu().float().reshape(-1) for t in (actual, expected))
    assert torch.equal(torch.isnan(a), torch.isnan(b))
    keep = ~torch.isnan(a)
    distance = (a[keep].view(torch.int32).long() - b[keep].view(torch.int32).long()).abs()
    assert (distance <= ulps).all(), f"amax {actual} is not {expected}"


def layouts(x):
    """(name, tensor equal to the 2-dimensional x) in other storage: offset, sliced, transposed."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    offset = flat[1:].view(x.shape)
    offset.copy_(x)
    wide = torch.empty(x.shape[0], 2 * x.shape[1] + 1, dtype=x.dtype, device=x.device)
    sliced = wide[:, 1 : 1 + x.shape[1]]
    sliced.copy_(x)
    strided = wide.clone()[:, : 2 * x.shape[1] : 2]
    strided.copy_(x)
    return [
        ("offset", offset),
        ("sliced", sliced),
        ("strided", strided),
        ("transposed", x.t().contiguous().t()),
    ]


def bits(tensors):
    """The bytes of one tensor or of a sequence with None in it, for exact comparison."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    tensors = [t.detach().cpu().reshape(-1) for t in tensors if t is not None]
    return [t.view(torch.uint8) for t in tensors]


def assert_same_bits(actual, expected):
    actual, expected = bits(actual), bits(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def assert_runs_in_graph_and_on_stream(call, inputs):
    """`call(*inputs)` gives the same bits on a side stream and captured, replayed on new inputs."""
    expected = bits(call(*inputs))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_side = call(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    assert_same_bits(on_side, expected)
    static = [t.clone() for t in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*static)
    graph.replay()
    assert_same_bits(captured, expected)
    changed = [t.flip(0) for t in inputs]
    for target, source in zip(static, changed, strict=True):
        target.copy_(source)
    graph.replay()
    assert_same_bits(captured, call(*changed))


# Answers with a digest of what `run()` of each line's source yields.
_DIGESTS = """
import hashlib, json, sys, traceback
import torch
for line in sys.stdin:
    scope, digest = {}, hashlib.sha256()
    torch.manual_seed(0)
    try:
        exec(json.loads(line), scope)
        for t in scope["run"]():
            digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
        answer = [True, digest.hexdigest()]
    except BaseException:
        answer = [False, traceback.format_exc()]
    print(json.dumps(answer), flush=True)
"""


@functools.cache
def _process_of(isa):
    """A process that uses an instruction set, for all tests: importing torch takes seconds."""
    env = dict(os.environ, APEX_TE_CPU_ISA=isa, PYTHONPATH=os.pathsep.join(sys.path))
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", _DIGESTS], env=env, stdin=pipe, stdout=pipe, text=True
    )
    atexit.register(process.kill)
    return process


def assert_portable_gives_same_bits(body):
    """Runs `body`, which yields CPU tensors from `run()`, with each instruction set there is."""
    processes = [_process_of(isa) for isa in ("", "avx2", "portable")]
    for process in processes:
        print(json.dumps(body), file=process.stdin, flush=True)
    answers = [json.loads(process.stdout.readline()) for process in processes]
    assert all(good for good, _ in answers), [text for good, text in answers if not good]
    assert len({digest for _, digest in answers}) == 1


def each_of(**values):
    """Parametrizes a test with the product of its arguments' values, by their names."""

    def decorate(test):
        for name, choices in values.items():
            ids = [getattr(value, "__name__", str(value)) for value in choices]
            test = pytest.mark.parametrize(name, list(choices), ids=ids)(test)
        return test

    return decorate


def in_pairs(**values):
    """Parametrizes a test with the product of its arguments' values, in pairs without ``--long``.

    A product is tested where a fault takes two of its values; few take three.
    """
    return lambda test: pytest.mark.cover(2)(each_of(**values)(test))
