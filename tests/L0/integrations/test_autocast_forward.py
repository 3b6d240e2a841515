"""autocast_forward: regions in forward, evaluation, removal, copies, pickles, compiled code."""

import copy
import inspect
import io
from types import MethodType

import pytest
import torch
from huggingface_like import Llama
from torch import nn

from apex_te import fp8_autocast
from apex_te.fp8.autocast import is_fp8_enabled
from apex_te.integrations import autocast_forward, from_torch
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling

IDS = torch.arange(16).view(2, 8) % 24
RECIPES = [DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling()]
IDENTITIES = ["delayed", "tensorwise", "blockwise"]


def model(layers=2):
    torch.manual_seed(3)
    return from_torch(Llama(layers=layers))


def step(one):
    out = one(IDS)
    out.square().mean().backward()
    grads = [p.grad.clone() for p in one.parameters()]
    one.zero_grad()
    return [out.detach(), *grads]


@pytest.mark.parametrize("recipe", RECIPES, ids=IDENTITIES)
def test_is_the_region_around_the_call(recipe):
    one, other = model(), model()
    autocast_forward(one, recipe)
    for _ in range(3):
        actual = step(one)
        with fp8_autocast(True, recipe):
            out = other(IDS)
        out.square().mean().backward()
        expected = [out.detach(), *(p.grad.clone() for p in other.parameters())]
        other.zero_grad()
        assert all(map(torch.equal, actual, expected))
    assert not is_fp8_enabled()


def test_evaluation_and_removal():
    one, plain = model(), model()
    handle = autocast_forward(one, "tensorwise")
    high = plain(IDS)
    low = one(IDS)
    assert not torch.equal(low, high)
    assert torch.equal(one.eval()(IDS), high)
    handle.remove()
    assert "forward" not in vars(one)
    assert torch.equal(one.train()(IDS), high)
    handle.remove()
    handle = autocast_forward(one, "tensorwise", during_eval=True)
    assert torch.equal(one.eval()(IDS), low)
    with pytest.raises(ValueError, match=r"model must have no autocast_forward yet, got one with"):
        autocast_forward(one)
    # A wrapper of another library around it, as accelerate's.
    wrapped = one.forward

    def outer(*args):
        return wrapped(*args)

    outer.__wrapped__ = wrapped
    one.forward = outer
    with pytest.raises(ValueError, match="yet"):
        autocast_forward(one)
    handle.remove()
    assert one.forward is outer
    assert torch.equal(one(IDS), high)
    again = autocast_forward(one, "tensorwise", during_eval=True)
    assert torch.equal(one(IDS), low)
    again.remove()
    assert one.forward is outer


def test_copies_and_pickles_run_themselves():
    one = from_torch(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)))
    x = torch.randn(2, 32)
    autocast_forward(one, CurrentScaling())
    expected = one(x)
    stream = io.BytesIO()
    torch.save(one, stream)
    stream.seek(0)
    for other in (copy.deepcopy(one), torch.load(stream, weights_only=False)):
        assert other.forward.model is other
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(x).any()
        other.forward.remove()
    assert torch.equal(one(x), expected)


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", RECIPES, ids=IDENTITIES)
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_equals_eager(recipe, in_place):
    torch._dynamo.reset()
    one, other = model(layers=1), model(layers=1)
    for each in (one, other):
        autocast_forward(each, recipe)
    call = one
    if in_place:
        one.compile(backend="aot_eager", fullgraph=True)
    else:
        call = torch.compile(one, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        out = call(IDS)
        out.square().mean().backward()
        actual = [out.detach(), *(p.grad.clone() for p in one.parameters())]
        one.zero_grad()
        assert all(map(torch.equal, actual, step(other)))
    one.eval()
    torch.testing.assert_close(call(IDS), other.eval()(IDS))


def test_arguments_are_those_of_the_forward():
    one = model()
    before = inspect.signature(one.forward)
    autocast_forward(one)
    assert inspect.signature(one.forward) == before


def test_errors_leave_the_region():
    class Failing(nn.Module):
        def forward(self, x):
            assert is_fp8_enabled()
            raise RuntimeError("no")

    one = Failing()
    autocast_forward(one)
    with pytest.raises(RuntimeError, match="no"):
        one(1)
    assert not is_fp8_enabled()


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((1,), TypeError, "model must be a torch.nn.Module, got int"),
        ((nn.Linear(2, 2), 3), TypeError, "recipe must be a recipe"),
        ((nn.Linear(2, 2), "fast"), ValueError, "recipe must be a recipe or one of"),
        ((nn.Linear(2, 2), None, 1), TypeError, "during_eval must be a bool, got int"),
    ],
)
def test_rejects(args, error, message):
    with pytest.raises(error, match=f"autocast_forward: {message}"):
        autocast_forward(*args)


def test_bound_to_the_model_like_a_function():
    """Method that unwrap_model of accelerate leaves, also in a copy of the model."""
    one = model()
    autocast_forward(one, "tensorwise")
    expected = one(IDS)
    wrapper = one.forward
    one.forward = MethodType(wrapper, one)
    other = copy.deepcopy(one)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(IDS).eq(0).all()
    assert other.forward.model is other
    assert torch.equal(one(IDS), expected)
    assert one.forward is wrapper
    wrapper.remove()
    assert not torch.equal(one(IDS), expected)


def test_accelerate_unwraps_it():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    forget = accelerate.state.AcceleratorState._reset_state
    forget(reset_partial_state=True)  # of other tests
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        one = model()
        autocast_forward(one, "tensorwise")
        expected = one(IDS)
        prepared = accelerator.prepare(one)
        prepared(IDS)
        assert torch.equal(
            accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(IDS), expected
        )
    finally:
        forget(reset_partial_state=True)
