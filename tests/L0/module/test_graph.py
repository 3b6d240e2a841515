"""make_graphed_callables against eager steps, also with delayed weight gradients."""

import copy

import pytest
import torch
from checks import assert_same_bits
from graph_models import (
    DELAYED,
    RECIPES,
    ROWS,
    STEPS,
    WIDTH,
    count_replays,
    data,
    each_recipe,
    fp8_state,
    graphed,
    layer,
    on_gpu,
    stack,
)

from apex_te import Linear, flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.model_init import fp8_model_init
from apex_te.graphs.capture import no_collection
from apex_te.graphs.graphed_callables import make_graphed_callables
from apex_te.module._core.weight_cache import CapturedWeights
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.recipe import DelayedScaling


def train(model, batches, recipe=None, microbatches=1, caching=False, group=None):
    """Outputs, input gradients, parameters and FP8 state after a step for each of ``batches``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    seen = []
    for i, (x, dy) in enumerate(batches):
        x = x.clone().requires_grad_()
        first = i % microbatches == 0
        kwargs = {"is_first_microbatch": first} if caching else {}
        with fp8_autocast(recipe is not None, recipe):
            out = model(x, **kwargs)
        seen.append(out.detach().clone())
        out.backward(dy)
        seen.append(x.grad)
        if (i + 1) % microbatches == 0:
            optimizer.step()
            optimizer.zero_grad()
        seen += fp8_state(model)
    flush_fp8_state()
    return seen + [p.detach().clone() for p in model.parameters()] + fp8_state(model)


def run(captured, model, x, recipe):
    """A run of ``model`` as a capture makes it, and the codes of its weight."""
    captured.begin()
    with fp8_autocast(True, recipe):
        out = model(x)
    return out, captured._made[(0, id(model.weight))]


@each_recipe
def test_captured_weights_are_cached(recipe):
    model = Linear(16, 16)
    other = copy.deepcopy(model)
    captured = CapturedWeights("Linear", {id(p) for p in other.parameters()})
    other._modes.captured = captured
    x, dy = torch.randn(4, 16), torch.randn(4, 16)
    with fp8_autocast(True, recipe):
        outs = [model(x, is_first_microbatch=True) for _ in range(2)]
    outs[-1].backward(dy)
    captured.begin()
    with fp8_autocast(True, recipe):
        outs += [other(x) for _ in range(2)]
    outs[-1].backward(dy)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(other.weight.grad, model.weight.grad)
    assert other._modes.weight_cache == {}
    # With the flag set delayed scaling writes nothing, not even an amax; others make equal codes.
    flush_fp8_state()
    held = run(captured, other, x, recipe)[1]
    assert len(captured.kept) == recipe.keeps_state
    for kept in captured.kept.values():
        assert kept.held is held
        kept.noop = torch.ones(1, dtype=torch.int32)
    before = [held.rowwise.clone(), held.columnwise.clone(), held.rowwise_scale_inv.clone()]
    x = 100 * x
    run(captured, other, x, recipe)
    if recipe.keeps_state:
        with torch.no_grad():
            other.weight.mul_(2)
    flush_fp8_state()
    _, again = run(captured, other, x, recipe)
    assert_same_bits([again.rowwise, again.columnwise, again.rowwise_scale_inv], before)
    if recipe.keeps_state:
        assert again is held
        assert other.fp8_state.amax_history_fwd[0, 1] == 0  # of the weight; the input's is staged
        assert other.fp8_state.amax_history_fwd[0, 0] == x.abs().max()
        kept.noop.zero_()
        run(captured, other, x, recipe)
        assert other.fp8_state.amax_history_fwd[0, 1] == other.weight.abs().max()


def test_captured_weights_must_be_known():
    model = Linear(16, 16, bias=False)
    captured = CapturedWeights("Linear", {id(model.weight)})
    model._modes.captured = captured
    x, other = torch.randn(4, 16), torch.randn(16, 16)
    with fp8_autocast(True, DELAYED):
        model(x, other)  # made again in each replay
        assert captured.kept == {}
        captured.is_settled = True
        with pytest.raises(RuntimeError, match="Linear: each weight must be used in the warm-up"):
            model(x)


@on_gpu
@each_recipe
def test_equals_eager(recipe):
    model = stack()
    other = copy.deepcopy(model)
    batches = data()
    expected = train(model, batches, recipe)
    graphed(other, recipe)
    assert_same_bits(train(other, batches, recipe), expected)
    # the step that finds the first scales is eager
    assert count_replays(other) == STEPS - (recipe is RECIPES["first step"])


@on_gpu
def test_without_fp8():
    model = stack()
    other = copy.deepcopy(model)
    batches = data()
    expected = train(model, batches)
    graphed(other)
    assert_same_bits(train(other, batches), expected)
    assert count_replays(other) == STEPS
    with fp8_autocast(True, DELAYED):
        other(batches[0, 0])  # FP8 was not captured
    assert count_replays(other) == STEPS


@on_gpu
@each_recipe
@pytest.mark.parametrize("interval", [1, 2])
def test_weight_caching_equals_eager(recipe, interval):
    if recipe.keeps_state:
        recipe = DelayedScaling(amax_history_len=4, interval=interval, first_step=recipe.first_step)
    model = layer()
    other = copy.deepcopy(model)
    batches = data()
    expected = train(model, batches, recipe, 2, True)
    graphed(other, recipe, fp8_weight_caching=True)
    assert_same_bits(train(other, batches, recipe, 2, True), expected)
    assert count_replays(other) >= STEPS - 2


@on_gpu
def test_cached_weights_are_made_again_when_they_change():
    model = layer(Linear)
    other = copy.deepcopy(model)
    graphed(other, DELAYED, fp8_weight_caching=True)
    x = data()[0, 0]
    outs = []
    for m in (model, other):
        with fp8_autocast(True, DELAYED):
            m(x, is_first_microbatch=True)
            with torch.no_grad():
                m.weight.mul_(-2)
            outs.append(m(x, is_first_microbatch=False).detach().clone())
    assert torch.equal(*outs)


@on_gpu
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_weights_held_in_fp8(name):
    recipe = RECIPES[name]
    with fp8_model_init(True, recipe):
        model = layer()
    other = copy.deepcopy(model)
    batches = data(6)
    with fp8_autocast(True, recipe):  # keeps a transposed copy of the weights
        other(batches[0, 0], is_first_microbatch=True)
    other.fp8_state.reset()
    amax_groups.pending = 0
    graphed(other, recipe, fp8_weight_caching=True)
    seen = []
    for m in (model, other):
        for i, (x, dy) in enumerate(batches):
            with fp8_autocast(True, recipe):
                out = m(x, is_first_microbatch=i % 2 == 0)
            out.backward(dy)
            if i % 2:
                with torch.no_grad():
                    for p in m.parameters():
                        values = p.dequantize() if hasattr(p, "recipe") else p
                        p.copy_(values - 0.02 * p.grad)
                        p.grad = None
            seen.append([out.detach().clone()])
        flush_fp8_state()
        seen[-1] += fp8_state(m)
    for a, b in zip(seen[:6], seen[6:], strict=True):
        assert_same_bits(a, b)
    assert count_replays(other) == 6


@on_gpu
def test_main_grad():
    model = layer(fuse_wgrad_accumulation=True)
    other = copy.deepcopy(model)
    for m in (model, other):
        for weight in (m.fc1_weight, m.fc2_weight):
            weight.main_grad = torch.ones(weight.shape, device="cuda")
    other.fc1_weight.grad_added_to_main_grad = False
    graphed(other, DELAYED, fp8_weight_caching=True)
    assert other.fc1_weight.main_grad.eq(1).all()
    assert not other.fc1_weight.grad_added_to_main_grad
    for i, (x, dy) in enumerate(data(4)):
        for m in (model, other):
            with fp8_autocast(True, DelayedScaling(amax_history_len=4)):
                out = m(x, is_first_microbatch=i in (0, 3))
            out.backward(dy)
        for a, b in ((m.fc1_weight, m.fc2_weight) for m in (model, other)):
            assert a.main_grad.abs().sum() > 0
            assert b.main_grad.abs().sum() > 0
        assert torch.allclose(model.fc1_weight.main_grad, other.fc1_weight.main_grad, 1e-4, 1e-3)
        assert torch.allclose(model.fc2_weight.main_grad, other.fc2_weight.main_grad, 1e-4, 1e-3)
    assert other.fc1_weight.grad_added_to_main_grad
    assert count_replays(other) == 4


@on_gpu
def test_several_modules_with_keywords_and_constants():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = layer(Linear)

        def forward(self, x, factor, *, shift=None):
            out = self.linear(x) * factor
            return {"out": out if shift is None else out + shift, "factor": None}

    modules = [layer(LayerNormLinear), Scaled()]
    others = copy.deepcopy(modules)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    results = make_graphed_callables(
        tuple(others), ((x,), (x, 2.0)), sample_kwargs=({}, {"shift": x}), fp8_enabled=True,
        fp8_recipe=DELAYED,
    )  # fmt: skip
    assert results == tuple(others)
    for m in (modules, others):
        seen = []
        for inp, dy in data(4):
            inp = inp.clone().requires_grad_()
            with fp8_autocast(True, DELAYED):
                made = m[1](m[0](inp), 2.0, shift=inp)
            assert made["factor"] is None
            made["out"].backward(dy)
            seen += [made["out"].detach().clone(), inp.grad]
        flush_fp8_state()
        seen += [p.grad for module in m for p in module.parameters()]
        seen += [t for module in m for t in fp8_state(module)]
        if m is modules:
            expected = seen
    assert_same_bits(seen, expected)
    assert [count_replays(m) for m in others] == [4, 4]
    with pytest.raises(ValueError, match=r"Scaled: args\[1\] must be 2.0 as captured, got 3.0"):
        others[1](x, 3.0, shift=x)
    with pytest.raises(ValueError, match=r"arguments must be .* as captured"):
        others[1](x, 2.0)


@on_gpu
def test_gradients_accumulate():
    model, batches = layer(Linear), data(3)
    other = copy.deepcopy(model)
    graphed(other, DELAYED)
    x = [batches[0, 0].clone().requires_grad_() for _ in range(2)]
    for _, dy in batches:
        for m, inp in zip((model, other), x, strict=True):
            with fp8_autocast(True, DelayedScaling(amax_history_len=4)):
                out = m(inp)
            out.backward(dy)
    assert_same_bits(other.weight.grad, model.weight.grad)
    assert_same_bits(other.bias.grad, model.bias.grad)
    assert_same_bits(x[1].grad, x[0].grad)


@on_gpu
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_inside_a_checkpoint(use_reentrant):
    model, batches = layer(Linear), data(3)
    other = copy.deepcopy(model)
    graphed(other, DELAYED)
    seen = []
    for m in (model, other):
        for x, dy in batches:
            x = x.clone().requires_grad_()
            with fp8_autocast(True, DELAYED):
                out = torch.utils.checkpoint.checkpoint(
                    lambda y, m=m: torch.nn.functional.gelu(m(y)), x, use_reentrant=use_reentrant
                )
            out.backward(dy)
            seen.append([out.detach().clone(), x.grad, m.weight.grad.clone()])
        flush_fp8_state()
        seen[-1] += fp8_state(m)
    for a, b in zip(seen[:3], seen[3:], strict=True):
        assert_same_bits(a, b)


@on_gpu
@each_recipe
def test_own_capture_of_a_whole_step(recipe):
    model, batches = stack(), data(3 + STEPS)
    other = copy.deepcopy(model)
    x, dy = torch.empty_like(batches[0, 0]), torch.empty_like(batches[0, 1])

    def make_step(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

        def step():
            with fp8_autocast(True, recipe):  # scales move on entering
                out = model(x)
            out.backward(dy)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return out.detach()

        def run(batch, once=step):
            x.copy_(batch[0])
            dy.copy_(batch[1])
            return once()

        return step, run

    _, run = make_step(model)
    expected = [run(batch).clone() for batch in batches]
    flush_fp8_state()
    step, run = make_step(other)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        seen = [run(batch).clone() for batch in batches[:3]]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph):
        out = step()

    def replay():
        graph.replay()
        return out

    seen += [run(batch, replay).clone() for batch in batches[3:]]
    flush_fp8_state()
    assert_same_bits(seen, expected)
    assert_same_bits(fp8_state(other), fp8_state(model))
    assert_same_bits(list(other.parameters()), list(model.parameters()))


def build(fuse):
    torch.manual_seed(2)
    options = {
        "device": "cuda", "params_dtype": torch.bfloat16, "delay_wgrad_compute": True,
        "fuse_wgrad_accumulation": fuse,
    }  # fmt: skip
    model = torch.nn.Sequential(
        Linear(WIDTH, WIDTH, **options),
        LayerNormLinear(WIDTH, WIDTH, **options),
        LayerNormMLP(WIDTH, 2 * WIDTH, **options),
    )
    return with_main_grads(model) if fuse else model


def with_main_grads(model):
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    return model


def train_delayed(model, recipe):
    seen = []
    for x, dy in data():
        x = x.clone().requires_grad_()
        with fp8_autocast(recipe is not None, recipe):
            out = model(x)
        out.backward(dy)
        weights = [p for p in model.parameters() if p.dim() == 2]
        if not seen:
            assert all(p.grad is None for p in weights)
        for module in model:
            module.backward_dw()
        seen += [out.detach().clone(), x.grad]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen += [p.main_grad.clone() for p in weights if hasattr(p, "main_grad")]
        seen += fp8_state(model)
    flush_fp8_state()
    return seen


@on_gpu
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
def test_delayed_equals_eager(recipe, fuse):
    chosen = None if recipe is None else RECIPES[recipe]
    model = build(fuse)
    other = copy.deepcopy(model)
    if fuse:
        with_main_grads(other)
    expected = train_delayed(model, chosen)
    graphed(other, chosen)
    assert not any(module._modes.wgrad_store for module in other)
    found = train_delayed(other, chosen)
    assert len(found) == len(expected)
    assert_same_bits(found, expected)
    assert count_replays(other) > 0
    if fuse:
        assert all(p.main_grad.ne(0).any() for p in other.parameters() if p.dim() == 2)


@on_gpu
def test_a_gradient_must_be_made_before_the_next_forward():
    model = graphed(build(False))
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    model(x)
    with pytest.raises(RuntimeError, match="backward_dw must come before the next graphed forward"):
        model[0].backward_dw()


@on_gpu
def test_what_waits_already_is_kept():
    model = build(False)
    other = copy.deepcopy(model)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for m in (model, other):
        m(x).sum().backward()
    graphed(other)
    for m in (model, other):
        for module in m:
            module.backward_dw()
    assert_same_bits([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])
