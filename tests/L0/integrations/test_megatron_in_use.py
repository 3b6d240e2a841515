"""Layers by Megatron's names where Megatron is in use: its groups, random states, sharded state."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from test_megatron_names import group_of, make

from apex_te import CudaRNGStatesTracker
from apex_te.integrations.megatron import MindSpeedTERowParallelGroupedLinear


@pytest.fixture
def megatron(monkeypatch):
    """Stands for a program that has imported Megatron: what is looked up of it."""
    state = types.ModuleType("megatron.core.parallel_state")
    state.calls = []
    state.model_parallel_is_initialized = lambda: state.initialized
    state.initialized = True
    for which in ("tensor_model", "expert_tensor"):

        def get(check_initialized=True, which=which):
            state.calls.append((which, check_initialized))

        setattr(state, f"get_{which}_parallel_group", get)
    tracker = CudaRNGStatesTracker()
    tracker.is_initialized = lambda: bool(tracker.get_states())
    random = types.ModuleType("megatron.core.tensor_parallel.random")
    random.get_cuda_rng_tracker = lambda: tracker
    utils = types.ModuleType("megatron.core.transformer.utils")
    utils.make_sharded_tensors_for_checkpoint = lambda *args, **kwargs: (args, kwargs)
    for module in (state, random, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(state=state, tracker=tracker)


def test_nothing_is_imported():
    make("column")
    group_of(MindSpeedTERowParallelGroupedLinear)
    assert not [name for name in sys.modules if name.split(".")[0] in ("megatron", "mindspeed")]


def test_megatron_in_use(megatron):
    """Its groups and its tracker are asked for, once it is initialised."""
    make("column")
    make("row", is_expert=True)
    group_of(MindSpeedTERowParallelGroupedLinear)
    assert megatron.state.calls == [
        ("tensor_model", False), ("expert_tensor", False), ("expert_tensor", False),
    ]  # fmt: skip
    megatron.state.initialized = False
    make("column")
    assert len(megatron.state.calls) == 3
    config = SimpleNamespace(tensor_model_parallel_size=2)
    torch.manual_seed(9)
    plainly = make("column", config).weight
    megatron.tracker.add("model-parallel-rng", 77)
    torch.manual_seed(9)
    assert not torch.equal(make("column", config).weight, plainly)


def test_sharded_state_of_megatron(megatron):
    config = SimpleNamespace(tensor_model_parallel_size=2)
    for name, axes in (("column", {"weight": 0, "bias": 0}), ("row", {"weight": 1})):
        layer = make(name, config)
        (state, *rest), options = layer.sharded_state_dict("a.", ((0, 1, 2),), {"dp_cp_group": 5})
        assert state["weight"] is layer.weight
        assert rest == ["a.", axes, ((0, 1, 2),)]
        assert options == {"tp_group": None, "dp_cp_group": 5}


def test_sharded_state_of_whole_layers():
    layer = make("norm")
    state = layer.sharded_state_dict("a.")
    assert {k: v.data_ptr() for k, v in state.items()} == {
        f"a.{k}": p.data_ptr() for k, p in layer.named_parameters()
    }
    with pytest.raises(ValueError, match=r"sharded_offsets must be \(\) without Megatron"):
        layer.sharded_state_dict("a.", ((0, 1, 2),))
