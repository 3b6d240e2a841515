"""torch.compile(fullgraph=True) of tensor-parallel modules: eager's bits, collectives included."""

import copy

import pytest
import torch
from on_rank import all_equal, device_of, dtype_of
from schemes import chosen
from shards import BATCH, FFN, IN, MODULES, TOKENS, build
from torch._dynamo.utils import counters

import apex_te
from apex_te import fp8_autocast

RECIPES = {"none": None, **chosen("delayed", "tensorwise", "blockwise", amax_history_len=3)}


def _module(name, device, sequence_parallel):
    group = torch.distributed.group.WORLD
    dtype = dtype_of(device)
    if name != "layer":
        return build(name, device, dtype, sequence_parallel, group)[1]
    torch.manual_seed(3)
    return apex_te.TransformerLayer(
        IN, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True,
        tp_group=group, sequence_parallel=sequence_parallel, params_dtype=dtype, device=device,
    )  # fmt: skip


def _steps(module, run, recipe, shape, device):
    results = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(*shape, generator=generator)
        x = x.to(device, next(module.parameters()).dtype).requires_grad_()
        module.zero_grad()
        with fp8_autocast(recipe is not None, recipe):
            out = run(x)
        out.float().square().mean().backward()
        results += [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
    return results


def _compare(rank, name, sequence_parallel, recipe):
    device = device_of(rank)
    torch._dynamo.reset()
    module = _module(name, device, sequence_parallel)
    other = copy.deepcopy(module)
    features = IN if name == "layer" else MODULES[name][1][0]
    if name == "row":
        features //= torch.distributed.get_world_size()
    shape = (TOKENS, BATCH, features)
    expected = _steps(module, module, RECIPES[recipe], shape, device)
    counters.clear()
    backend = "aot_eager" if device.type == "cpu" else "inductor"
    compiled = torch.compile(other, backend=backend, fullgraph=True)
    found = _steps(other, compiled, RECIPES[recipe], shape, device)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    torch._dynamo.reset()
    return all_equal(found, expected)


CASES = [
    ("column", False, "delayed"),
    ("column", True, "none"),
    ("column", True, "delayed"),
    ("column", True, "blockwise"),
    ("row", False, "tensorwise"),
    ("row", True, "none"),
    ("row", True, "delayed"),
    ("row", True, "blockwise"),
    ("norm", True, "tensorwise"),
    ("gated", True, "delayed"),
    ("mlp", False, "none"),
    ("layer", True, "none"),
    ("layer", True, "delayed"),
    ("layer", False, "tensorwise"),
]


@pytest.mark.parametrize(("name", "sequence_parallel", "recipe"), CASES)
def test_equals_eager(two_ranks, name, sequence_parallel, recipe):
    assert all(two_ranks.run(_compare, name, sequence_parallel, recipe))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "sequence_parallel", "recipe"), [c for c in CASES if c[2] == "delayed"]
)
def test_equals_eager_on_gpus(two_gpus, name, sequence_parallel, recipe):
    assert all(two_gpus.run(_compare, name, sequence_parallel, recipe))
