"""Graph functions under Transformer Engine's names: what they save, and what they refuse."""

import inspect

import pytest
import torch

import apex_te
from apex_te.fp8.delayed.state import TENSORS
from apex_te.integrations.transformer_engine.common import recipe
from apex_te.integrations.transformer_engine.pytorch import graph


def run(module, x):
    with apex_te.fp8_autocast(True, recipe.DelayedScaling()):
        module(x).sum().backward()


def state(module):
    return {name: getattr(module.fp8_state, name).clone() for name in TENSORS}


def test_fp8_state_is_saved_and_restored_in_place():
    module = torch.nn.Sequential(apex_te.Linear(32, 32), apex_te.LayerNormLinear(32, 48))
    x = torch.randn(16, 32)
    run(module, x)
    run(module, x)
    before = [state(child) for child in module]
    addresses = [child.fp8_state.scale_fwd.data_ptr() for child in module]
    saved = graph.save_fp8_tensors([module], recipe.DelayedScaling())
    for _ in range(3):
        run(module, 7 * x)
    assert not torch.equal(module[0].fp8_state.scale_fwd, before[0]["scale_fwd"])
    graph.restore_fp8_tensors([module], saved)
    for child, values, address in zip(module, before, addresses, strict=True):
        assert child.fp8_state.scale_fwd.data_ptr() == address
        for name, value in values.items():
            assert torch.equal(getattr(child.fp8_state, name), value)


def test_state_that_was_not_there_is_reset():
    module = apex_te.Linear(32, 32)
    saved = graph.save_fp8_tensors([module], recipe.DelayedScaling())
    run(module, torch.randn(16, 32))
    assert module.fp8_state.allocated
    graph.restore_fp8_tensors([module], saved)
    values = state(module)
    assert not values["amax_history_fwd"].any()
    assert not values["amax_history_bwd"].any()
    assert (values["scale_fwd"] == 1).all()


def test_other_modules_are_refused():
    saved = graph.save_fp8_tensors([apex_te.Linear(16, 16)], recipe.DelayedScaling())
    with pytest.raises(ValueError, match="restore_fp8_tensors: modules must be those"):
        graph.restore_fp8_tensors([apex_te.Linear(16, 16)], saved)


@pytest.mark.parametrize("made", [None, recipe.Float8CurrentScaling()])
def test_recipes_without_state(made):
    module = apex_te.Linear(16, 16)
    saved = graph.save_fp8_tensors([module], made)
    assert saved is None
    graph.restore_fp8_tensors([module], saved)


def test_capture_flag():
    assert not graph.is_graph_capturing()
    graph.set_capture_start()
    assert graph.is_graph_capturing()
    graph.set_capture_end()
    assert not graph.is_graph_capturing()


def test_positional_order():
    names = list(inspect.signature(graph.make_graphed_callables).parameters)
    assert names[:5] == [
        "modules", "sample_args", "num_warmup_iters", "allow_unused_input", "sample_kwargs",
    ]  # fmt: skip
    assert {"enabled", "calibrating", "recipe", "amax_reduction_group"} <= set(names)
    assert {"cache_quantized_params", "_order", "pool"} <= set(names)


@pytest.mark.parametrize(
    "wrong",
    [
        {"_num_layers_per_chunk": [1]},
        {"retain_graph_in_backward": True},
        {"_reuse_graph_input_output_buffers": True},
        {"pre_warmup_hook": print},
    ],
)
def test_what_is_not_served_is_refused_by_name(wrong):
    with pytest.raises(NotImplementedError, match=next(iter(wrong))):
        graph.make_graphed_callables(torch.nn.Linear(2, 2), (torch.ones(1, 2),), **wrong)


def test_an_argument_has_one_name():
    x = (torch.ones(1, 2),)
    with pytest.raises(TypeError, match="fp8_enabled must be None beside enabled"):
        graph.make_graphed_callables(torch.nn.Linear(2, 2), x, enabled=True, fp8_enabled=False)
    with pytest.raises(NotImplementedError, match="enabled must be equal for all modules"):
        graph.make_graphed_callables(torch.nn.Linear(2, 2), x, enabled=(True, False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="CUDA graphs need a CUDA device"):
        graph.make_graphed_callables(torch.nn.Linear(2, 2), (torch.ones(1, 2),), enabled=True)


def test_an_order_is_checked():
    layers, x = (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), (torch.ones(1, 2),)
    options = {"_num_layers_per_chunk": [1], "_reuse_graph_input_output_buffers": True}
    with pytest.raises(ValueError, match="_num_layers_per_chunk must give the layers of 1 chunks"):
        graph.make_graphed_callables(layers, [x] * 2, _order=[1, -1], **options)
    with pytest.raises(ValueError, match="sample_args must be given for each layer and microbatch"):
        graph.make_graphed_callables(layers, [x] * 2, _order=[1, 1, -1, -1])
    with pytest.raises(TypeError, match=r"_order must hold ints, got -0\.5"):
        graph.make_graphed_callables(layers, [x] * 2, _order=[1, -0.5, -1])


@pytest.mark.cuda
@pytest.mark.cuda
@pytest.mark.parametrize("old", [False, True])
def test_graphs_compute_what_modules_compute(old):
    torch.manual_seed(2)
    module = apex_te.Linear(64, 64, device="cuda")
    twin = apex_te.Linear(64, 64, device="cuda")
    twin.load_state_dict(module.state_dict())
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    made = recipe.DelayedScaling()
    names = ("fp8_enabled", "fp8_recipe") if old else ("enabled", "recipe")
    options = dict(zip(names, (True, made), strict=True))
    graphed = graph.make_graphed_callables(module, (x,), **options)
    for step in range(3):
        values = torch.randn(32, 64, device="cuda") * (step + 1)
        results = []
        for run_module in (graphed, twin):
            given = values.clone().requires_grad_()
            with apex_te.fp8_autocast(True, made):
                out = run_module(given)
            out.sum().backward()
            results.append((out.detach().clone(), given.grad.clone()))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
