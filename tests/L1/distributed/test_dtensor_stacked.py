"""DTensor parameters that hold several matrices: rows, checkpoints, fully_shard, optimizers."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dtensor_cases import (
    FFN,
    HEADS,
    HIDDEN,
    LLAMA,
    QUIET,
    batches,
    decibels,
    parallelized,
    step,
    tp_mesh,
    whole_module,
)
from on_rank import load
from shards import rows
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import apex_te
from apex_te.distributed.dtensor.local_parameters import exchange_of, rows_of_matrices
from apex_te.distributed.dtensor.parallel_styles import LayerParallel, SequenceParallel

MATRICES = [(8, 8), (8, 4, 4), (12, 12, 12), (4, 20), (4, 4, 4, 4, 4)]


def _of_rank(whole, matrices):
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    return torch.cat([matrix.chunk(ranks)[rank] for matrix in whole.split(matrices)])


def _exchanged(rank):
    mesh = tp_mesh()
    for matrices in MATRICES:
        for shape in ((), (3,)):
            count = sum(matrices)
            whole = torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))
            local = rows(whole, rank, mesh.size()).clone().requires_grad_()
            exchange = exchange_of(matrices, rank, mesh.size())
            out = rows_of_matrices(local, exchange, mesh.get_group())
            assert torch.equal(out, _of_rank(whole, matrices))
            out.backward(_of_rank(whole + 1, matrices))
            assert torch.equal(local.grad, rows(whole + 1, rank, mesh.size()))


def test_rows_of_matrices(ranks):
    ranks.run(_exchanged)


class _Model(nn.Module):
    """A Llama layer, and one whose projections are queries, keys, values, with biases."""

    def __init__(self):
        super().__init__()
        llama = {**QUIET, **LLAMA, "num_gqa_groups": HEADS}
        flat = {**llama, "bias": True, "qkv_weight_interleaved": False, "activation": "geglu"}
        self.layers = nn.ModuleList(
            apex_te.TransformerLayer(HIDDEN, FFN, 2 * HEADS, **options) for options in (llama, flat)
        )
        self.norm = apex_te.RMSNorm(HIDDEN)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


PLAN = {"layers.*": LayerParallel(sequence_parallel=True), "norm": SequenceParallel()}
# What four ranks are: replicas of a whole module, tensor-parallel ranks, both with fully_shard.
KINDS = {"plain": (4, 1), "tp 2": (2, 2), "tp 4": (1, 4), "fsdp 2 x tp 2": (2, 2)}


def _made(kind, seed=3):
    """A model, its optimizer and its mesh."""
    torch.manual_seed(seed)
    model = _Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    mesh = init_device_mesh("cpu", KINDS[kind], mesh_dim_names=("dp", "tp"))
    if kind != "plain":
        parallelize_module(model, mesh["tp"], PLAN)
    if kind.startswith("fsdp"):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    # eps: a key's bias has no gradient, but rounding errors that Adam would make steps of.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-2)
    return model, optimizer, mesh


def _train(kind, model, optimizer, mesh, data):
    for x, dy in data:
        if kind.startswith("fsdp"):  # whose gradients are means over replicas
            x, dy = (t.chunk(2, 1)[mesh["dp"].get_local_rank()] for t in (x, 2 * dy))
        if kind != "plain":
            x, dy = (rows(t, mesh["tp"].get_local_rank(), mesh["tp"].size()) for t in (x, dy))
        step(model, x.contiguous(), dy.contiguous(), None, optimizer)


def _full(state):
    """Whole tensors by name, of the model's or of the optimizer's state."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= {f"{key} {inner}": tensor for inner, tensor in _full(value).items()}
        elif isinstance(value, torch.Tensor):
            value = value.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            found[key] = value.clone()  # that of a replicated one is its local tensor
    return found


def _states(model, optimizer):
    """Both states for a checkpoint, and as whole tensors."""
    both = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return both, _full(both["model"]) | _full(both["optimizer"]["state"])


def _closest(found, expected):
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.shape == expected[key].shape
    return min(decibels(value, expected[key]) for key, value in found.items())


def _saved(rank, kind, path):
    """Two steps on one rank and as ``kind``; the latter is saved."""
    data = list(batches(2))
    made = _made(kind)
    _train(kind, *made, data)
    both, found = _states(*made[:2])
    dcp.save(both, checkpoint_id=path)
    whole = _made("plain")
    _train("plain", *whole, data)
    return found, _closest(found, _states(*whole[:2])[1])


def _loaded(rank, kind, path):
    """Of a checkpoint, into other values; and two more steps."""
    made = _made(kind, seed=5)
    load(path, *made[:2], get_state_dict, set_state_dict)
    _, found = _states(*made[:2])
    whole, data = _made("plain"), list(batches(4))
    _train("plain", *whole, data)
    _train(kind, *made, data[2:])
    return found, _closest(_states(*made[:2])[1], _states(*whole[:2])[1])


@pytest.mark.parametrize("kind", ["plain", "tp 4", "fsdp 2 x tp 2"])
def test_steps_and_checkpoints(four_ranks, tmp_path, kind):
    """As on one rank, and from there to any other way of being split."""
    answers = four_ranks.run(_saved, kind, str(tmp_path))
    saved = answers[0][0]
    for _, closest in answers:
        assert closest > 90
    for other in KINDS:
        for found, closest in four_ranks.run(_loaded, other, str(tmp_path)):
            assert found.keys() == saved.keys()
            for key, value in saved.items():
                assert torch.equal(found[key], value), (other, key)
            assert closest > 90


def _full_state(rank, kind):
    """Whole state dicts, from all ranks' parts and back from rank 0 or from every rank."""
    expected = _full(_made("plain")[0].state_dict())
    model, _, _ = _made(kind)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    assert _closest(_full(state), expected) == 200
    for from_one in (False, True):
        other, _, _ = _made(kind, seed=5)
        given = copy.deepcopy(state) if rank == 0 or not from_one else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_one)
        set_model_state_dict(other, given, options=options)
        assert _closest(_full(other.state_dict()), expected) == 200
    return {key: repr(p.placements) for key, p in model.named_parameters() if "fc1" in key}


@pytest.mark.parametrize("kind", ["tp 4", "fsdp 2 x tp 2"])
def test_full_state_dict(four_ranks, kind):
    for placements in four_ranks.run(_full_state, kind):
        assert len(placements) == 3
        assert all(repr(Shard(0)) in found for found in placements.values())


def _compiled(rank):
    """The exchange in a graph of torch.compile, to eager's bits."""
    part = parallelized(whole_module("geglu"), "geglu", True, tp_mesh())
    ((x, dy),) = batches(1)
    x, dy = (rows(t, rank, 2).contiguous() for t in (x, dy))
    expected = step(part, x, dy, None)
    grads = [parameter.grad.full_tensor() for parameter in part.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own DTensor
        actual = step(torch.compile(part, backend="aot_eager"), x, dy, None)
    found = [*actual, *(parameter.grad.full_tensor() for parameter in part.parameters())]
    return [torch.equal(*pair) for pair in zip(found, [*expected, *grads], strict=True)]


def test_compiled(two_ranks):
    for same in two_ranks.run(_compiled):
        assert same == [True] * 8
