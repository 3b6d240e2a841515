"""Two threads that launch one kernel, each for its own width, get the results of one thread."""

import threading
from functools import partial

import pytest
import torch
from checks import assert_same_bits
from torch.utils._pytree import tree_leaves

import apex_te
from apex_te.ops import cross_entropy as loss
from apex_te.ops import layer_norm, mx_quantize, rms_norm
from apex_te.recipe import CurrentScaling, MXFP8Scaling

pytestmark = pytest.mark.cuda


def matrix(rows, cols):
    return torch.randn(rows, cols, device="cuda").bfloat16()


def in_threads(calls, rounds):
    """What each of ``calls`` returned last, run ``rounds`` times in a thread of its own."""
    results, errors = [None] * len(calls), []
    barrier = threading.Barrier(len(calls))

    def work(i):
        try:
            barrier.wait()
            for _ in range(rounds):
                results[i] = calls[i]()
            torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return results


def tensors_of(results):
    """All tensors of results, those of 8 bits as bytes, which every version of torch compares."""
    found = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
    return [t.view(torch.uint8) if t.element_size() == 1 else t for t in found]


def norm(module, rows, cols, fp8):
    x, weight = matrix(rows, cols), torch.ones(cols, device="cuda").bfloat16()
    more = () if module is rms_norm else (weight,)
    if not fp8:
        forward = getattr(module, f"{module.__name__.rpartition('.')[2]}_fwd")
        return lambda: list(forward(x, weight, *more, 1e-5))
    forward = getattr(module, f"{module.__name__.rpartition('.')[2]}_fwd_fp8")
    scale = torch.ones(1, device="cuda")
    return lambda: list(forward(x, weight, *more, 1e-5, scale, torch.float8_e4m3fn))


def norm_backward(module, rows, cols):
    x, dy = matrix(rows, cols).requires_grad_(), matrix(rows, cols)
    weight = torch.ones(cols, device="cuda").bfloat16().requires_grad_()
    name = module.__name__.rpartition(".")[2]
    rest = (weight.detach().clone().requires_grad_(),) if module is layer_norm else ()
    function = getattr(module, name)

    def call():
        inputs = (x, weight, *rest)
        return torch.autograd.grad(function(*inputs), inputs, dy)

    return call


def cross_entropy(rows, cols):
    logits, target = matrix(rows, cols), torch.arange(rows, device="cuda")

    def call():
        grad = torch.empty_like(logits)
        return [loss.cross_entropy_fwd(logits, target, grad=grad), grad]

    return call


def quantize(rows, cols):
    x = matrix(rows, cols)
    return lambda: mx_quantize.mx_quantize(x)


CASES = {
    "ring": [partial(norm, rms_norm, 1024, cols, False) for cols in (16384, 8448)],
    "ring to FP8": [partial(norm, rms_norm, 1024, cols, True) for cols in (8192, 1280)],
    "layer_norm to FP8": [partial(norm, layer_norm, 1024, cols, True) for cols in (8192, 1280)],
    "patches": [partial(norm, rms_norm, 16384, cols, True) for cols in (1024, 256)],
    "rms_norm backward": [partial(norm_backward, rms_norm, 1024, cols) for cols in (8192, 512)],
    "layer_norm backward": [partial(norm_backward, layer_norm, 1024, cols) for cols in (8192, 512)],
    "cross_entropy, a block": [partial(cross_entropy, 256, cols) for cols in (32000, 20000)],
    "cross_entropy, the ring": [partial(cross_entropy, 64, cols) for cols in (128256, 262144)],
    "mx_quantize": [partial(quantize, *shape) for shape in ((8192, 8192), (2048, 65536))],
}


@pytest.mark.parametrize("name", CASES)
def test_ops(name):
    calls = [make() for make in CASES[name]]
    expected = [call() for call in calls]
    for found, wanted in zip(in_threads(calls, 400), expected, strict=True):
        assert_same_bits(*(tensors_of(each) for each in (found, wanted)))


@pytest.mark.parametrize("recipe", [CurrentScaling(), MXFP8Scaling()])
def test_two_models_train(recipe):
    """Each in its thread, with the losses and weights of training alone."""

    def training(width):
        torch.manual_seed(width)
        options = {"device": "cuda", "params_dtype": torch.bfloat16, "normalization": "RMSNorm"}
        model = apex_te.LayerNormMLP(width, 2 * width, **options)
        head = torch.randn(1024, width, device="cuda").bfloat16().requires_grad_()
        x, target = matrix(512, width), torch.arange(512, device="cuda")

        def steps():
            losses = []
            for _ in range(20):
                with apex_te.fp8_autocast(fp8_recipe=recipe):
                    y = model(x)
                value = apex_te.linear_cross_entropy(y, head, target)
                value.backward()
                with torch.no_grad():
                    for p in (*model.parameters(), head):
                        p -= 0.01 * p.grad
                        p.grad = None
                losses.append(value.detach())
            return [torch.stack(losses), *(p.detach().clone() for p in model.parameters())]

        return steps

    expected = [training(width)() for width in (1024, 2048)]
    found = in_threads([training(width) for width in (1024, 2048)], 1)
    assert_same_bits(tensors_of(found), tensors_of(expected))
