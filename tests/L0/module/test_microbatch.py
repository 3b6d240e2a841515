"""Gradient accumulation: the FP8 weight cache and main_grad."""

import copy

import pytest
import torch

import apex_te
from apex_te import Linear, fp8_autocast
from apex_te.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4, interval=2)


def forward(module, x, first=None, fp8=True, recipe=RECIPE):
    with fp8_autocast(fp8, recipe):
        return module(x, is_first_microbatch=first)


def quantizations(module, monkeypatch):
    """Counts the casts of the weight."""
    import apex_te.fp8.scheme.delayed as delayed

    calls, cast = [], delayed.cast_transpose

    def counted(x, *args, **kwargs):
        if x.shape == module.weight.shape and (kwargs["rowwise"] or kwargs["columnwise"]):
            calls.append(x)
        return cast(x, *args, **kwargs)

    monkeypatch.setattr(delayed, "cast_transpose", counted)
    return calls


def test_cached_weight_is_quantized_once(monkeypatch):
    module, x = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    calls = quantizations(module, monkeypatch)
    for first in (True, False, False):
        forward(module, x, first).sum().backward()
    assert len(calls) == 1
    forward(module, x, None).sum().backward()
    assert len(calls) == 3  # rowwise in forward, columnwise in backward


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_step_of_a_fused_optimizer_of_torch_changes_a_cached_weight(make):
    module, x = Linear(16, 8), torch.randn(4, 16)
    optimizer = make([{"params": module.parameters()}, {"params": []}], lr=0.5, fused=True)
    forward(module, x, True, recipe="tensorwise").sum().backward()
    optimizer.step()
    with torch.no_grad():
        found = forward(module, x, False, recipe="tensorwise")
        assert torch.equal(found, forward(module, x, None, recipe="tensorwise"))


def weights_at_one_address(count):
    """Weights [32, 16] one after the other in the same memory, each of version 0."""
    numpy = pytest.importorskip("numpy")
    memory = numpy.empty((32, 16), numpy.float32)
    for i in range(count):
        memory[...] = torch.randn(32, 16, generator=torch.Generator().manual_seed(i)).numpy()
        yield torch.from_numpy(memory)


@pytest.mark.parametrize("kind", ["passed", "functional_call", "GroupedLinear", "on the device"])
def test_another_weight_at_the_same_address_is_quantized(kind):
    """Weights that are made in each call, as by a parametrization, get copies of their own."""
    x, rest = torch.randn(8, 16), {}
    module = Linear(16, 32, bias=False)
    if kind in ("GroupedLinear", "on the device"):
        module = apex_te.GroupedLinear(1, 16, 32, bias=False)
        rest = {"m_splits": [8] if kind == "GroupedLinear" else torch.tensor([8])}
    name = "weight0" if rest else "weight"
    for i, weight in enumerate(weights_at_one_address(3)):
        runs = []
        for first in (i == 0, None):
            options = {"is_first_microbatch": first, **rest}
            with fp8_autocast(True, "tensorwise"):
                if kind == "passed":
                    out = module(x, weight=weight, **options)
                else:
                    out = torch.func.functional_call(module, {name: weight}, (x,), options)
            runs.append(out)
        assert torch.equal(*runs), i


def test_a_weight_of_several_parametrized_parts_is_made_once_in_a_call():
    calls = []

    class Counted(torch.nn.Module):
        def forward(self, weight):
            calls.append(weight)
            return weight * 2

    module = Linear(16, 16, parameters_split=("query", "key"))
    torch.nn.utils.parametrize.register_parametrization(module, "query_weight", Counted())
    calls.clear()
    x, out = torch.randn(4, 16), []
    for first in (True, False, None):
        out.append(forward(module, x, first, recipe="blockwise"))
    assert len(calls) == 3
    assert torch.equal(out[1], out[2])


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear", "on the device"])
def test_weights_that_torch_func_transforms(kind, recipe):
    x, rest = torch.randn(8, 16), {}
    module = Linear(16, 16)
    if kind != "Linear":
        module = apex_te.GroupedLinear(2, 16, 16)
        rest = {"m_splits": [3, 5] if kind == "GroupedLinear" else torch.tensor([3, 5])}

    def loss(parameters, first):
        options = {"is_first_microbatch": first, **rest}
        with fp8_autocast(True, recipe):
            out = torch.func.functional_call(module, parameters, (x,), options)
        return out.square().sum()

    parameters = {name: p.detach() for name, p in module.named_parameters()}
    grads = [torch.func.grad(loss)(parameters, first) for first in (None, True, False)]
    for name, expected in grads[0].items():
        assert torch.equal(grads[1][name], expected)
        assert torch.equal(grads[2][name], expected)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("evaluated", [None, "tensorwise"])
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_evaluation_between_microbatches_leaves_the_cache(kind, evaluated, first):
    """Later microbatches use the weights that the first one cast, although scales have changed."""
    recipe = DelayedScaling(amax_history_len=2)
    torch.manual_seed(0)
    made = Linear(16, 16) if kind == "Linear" else apex_te.GroupedLinear(2, 16, 16)
    batches = [torch.randn(8, 16) * (i + 1) for i in range(6)]

    def outputs(evaluates):
        module = copy.deepcopy(made)

        def call(x, first):
            splits = () if kind == "Linear" else ([3, 5],)
            return module(x, *splits, is_first_microbatch=first)

        apex_te.flush_fp8_state()
        for i, x in enumerate(batches):
            with fp8_autocast(fp8_recipe=recipe):
                out = call(x, i % 3 == 0)
            out.square().sum().backward()
            yield out
            if evaluates:
                with torch.no_grad(), fp8_autocast(fp8_recipe=evaluated or recipe):
                    own = call(x, first)
                    assert torch.equal(call(x, False), own)
            if i % 3 == 2:
                with torch.no_grad():
                    for p in module.parameters():
                        p.mul_(-3)

    assert all(map(torch.equal, outputs(True), outputs(False)))


def test_evaluation_keeps_no_copies_of_former_weights():
    module, x = Linear(16, 8), torch.randn(4, 16)
    cache = module._modes.weight_cache
    forward(module, x, True)
    with torch.no_grad():
        forward(module, x, True)
        assert (len(cache), len(cache.evaluated)) == (1, 1)
        module.weight.mul_(2)
        forward(module, x, True)
        assert (len(cache), len(cache.evaluated)) == (0, 1)
    forward(module, x, False)
    assert (len(cache), len(cache.evaluated)) == (1, 0)
    with torch.no_grad():
        forward(module, x, False)
        assert (len(cache), len(cache.evaluated)) == (1, 0)


def test_cache_is_dropped_by_copies_and_moves():
    module, x = Linear(16, 8), torch.randn(4, 16)
    forward(module, x, True)
    assert module._modes.weight_cache
    assert copy.deepcopy(module)._modes.weight_cache == {}
    assert not any("cache" in key for key in module.state_dict())
    module.float()
    assert module._modes.weight_cache == {}


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("hp_wgrad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_equals_grad(fp8, hp_wgrad, dtype):
    recipe = DelayedScaling(override_linear_precision=(False, False, hp_wgrad))
    plain = Linear(16, 8, params_dtype=dtype)
    fused = Linear(16, 8, params_dtype=dtype, fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    fused.weight.main_grad = torch.full((8, 16), 7.0)  # overwritten by the first microbatch
    tolerance = 1e-5 if dtype is torch.float32 else 0.03

    def backward(first):
        """Both modules in one region, so that both use the same scales."""
        plain.zero_grad()
        x, dy = torch.randn(2, 3, 16).to(dtype), torch.randn(2, 3, 8).to(dtype)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        with fp8_autocast(fp8, recipe):
            outs = [
                module(inp, is_first_microbatch=first)
                for module, inp in zip((plain, fused), inputs, strict=True)
            ]
        for out in outs:
            out.backward(dy)
        assert fused.weight.grad is None
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        return plain.weight.grad.float()

    total = torch.zeros(8, 16)
    for first in (True, False, False):
        total += backward(first)
        assert torch.allclose(fused.weight.main_grad, total, atol=tolerance, rtol=tolerance)
    fused.weight.overwrite_main_grad = True
    last = backward(None)
    assert torch.allclose(fused.weight.main_grad, last, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("fp8", [True, False])
def test_none_accumulates_and_frameworks_get_a_dummy(fp8):
    module = Linear(16, 8, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(8, 16)
    module.weight.grad_added_to_main_grad = False
    x = torch.randn(4, 16)
    with fp8_autocast(fp8, DelayedScaling(interval=9)):
        module(x).sum().backward()
        once = module.weight.main_grad.clone()
        assert module.weight.grad_added_to_main_grad
        assert module.weight.grad.eq(0).all()
        module.weight.grad = None
        module(x).sum().backward()
    assert once.abs().sum() > 0
    assert torch.equal(module.weight.main_grad, 2 * once)


@pytest.mark.parametrize("fp8", [True, False])
def test_main_grad_is_checked(fp8):
    module = Linear(16, 8, fuse_wgrad_accumulation=True)
    with pytest.raises(ValueError, match=r"main_grad must be a preallocated tensor .* got None"):
        forward(module, torch.randn(4, 16), fp8=fp8).sum().backward()
    module.weight.main_grad = torch.zeros(8, 15)
    with pytest.raises(ValueError, match=r"main_grad must be .* \[8, 16\], got \[8, 15\]"):
        forward(module, torch.randn(4, 16), fp8=fp8).sum().backward()
