"""torch.distributed.checkpoint: saved on some ranks, loaded on more, fewer or one, bit by bit."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_rank import load, save
from rank_sets import ranks_of
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init, init_fp8_state
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.recipe import DelayedScaling

HIDDEN, FFN, ROWS = 32, 64, 8
RECIPE = DelayedScaling(amax_history_len=4)
KINDS = ("plain", "sharded", "fp8", "sharded_fp8")


def _model(kind, seed):
    torch.manual_seed(seed)
    with fp8_model_init(kind.endswith("fp8"), RECIPE):
        layers = apex_te.Linear(HIDDEN, HIDDEN), apex_te.LayerNormMLP(HIDDEN, FFN)
    model = torch.nn.Sequential(*layers)
    if kind.startswith("sharded"):
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import init_device_mesh

        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for module in model:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    amax_groups.pending = 0
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(model, optimizer, steps, rank, sharded):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, HIDDEN, generator=generator)
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        if sharded:
            x = x.chunk(ranks)[rank]
        optimizer.zero_grad()
        with fp8_autocast(True, RECIPE):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _full(value):
    if hasattr(value, "full_tensor"):
        local = value.to_local()
        if isinstance(local, FP8Parameter):
            parts = [None] * distributed.get_world_size()
            distributed.all_gather_object(parts, local.detach().dequantize())
            return torch.cat(parts)
        return value.full_tensor().detach().clone()
    value = value.detach()
    return value.dequantize() if isinstance(value, FP8Parameter) else value.clone()


def _content(model, optimizer):
    """Everything that has to survive, whole."""
    flush_fp8_state()
    content = {f"model.{k}": _full(p) for k, p in model.named_parameters()}
    for name, module in model.named_modules():
        state = getattr(module, "fp8_state", None)
        if state is not None and state.allocated:
            content.update({f"{name}.{t}": getattr(state, t).clone() for t in TENSORS})
            content[f"{name}.due"] = torch.tensor(state.first_steps.due)
    for k, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            content[f"optimizer.{k}.{key}"] = _full(value)
    return content


def _save(rank, kind, path):
    model, optimizer = _model(kind, 1)
    _train(model, optimizer, range(3), rank, kind.startswith("sharded"))
    content = _content(model, optimizer)
    save(path, model, optimizer, get_state_dict)
    losses = _train(model, optimizer, range(3, 6), rank, kind.startswith("sharded"))
    return content, losses, _content(model, optimizer)


def _load(rank, kind, path):
    model, optimizer = _model(kind, 2)
    init_fp8_state(model, RECIPE)
    load(path, model, optimizer, get_state_dict, set_state_dict)
    content = _content(model, optimizer)
    losses = _train(model, optimizer, range(3, 6), rank, kind.startswith("sharded"))
    return content, losses, _content(model, optimizer)


def _same(ours, theirs, rounded=False):
    """Bit by bit; ``rounded``: but for weights in FP8, of which other shards have other scales."""
    assert ours.keys() == theirs.keys()
    different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    for key in list(different):
        if rounded and key.startswith("model.") and key.endswith("weight"):
            noise = (ours[key] - theirs[key]).square().mean()
            assert 10 * torch.log10(theirs[key].square().mean() / noise) > 25, key
            different.remove(key)
    assert not different


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2), (2, 1)])
def test_save_and_load(all_ranks, tmp_path, kind, before, after):
    path = str(tmp_path / "checkpoint")
    saved = ranks_of(all_ranks, before, "gloo").run(_save, kind, path)
    sharded = kind.startswith("sharded")
    if after == 1:  # a process without a process group, of plain modules
        loaded = [_load(0, kind.removeprefix("sharded_").replace("sharded", "plain"), path)]
    else:
        loaded = ranks_of(all_ranks, after, "gloo").run(_load, kind, path)
    for content, losses, end in loaded:
        _same(content, saved[0][0], kind == "sharded_fp8" and before != after)
        if before == after or not sharded:  # the same sums in the same order: the uninterrupted run
            assert losses == saved[0][1] or sharded
            _same(end, saved[0][2])
    if before == after:
        for (_, losses, _), (_, uninterrupted, _) in zip(loaded, saved, strict=True):
            assert losses == uninterrupted


def _plain_checkpoint(rank, path):
    """Saved from torch's layers, without FP8 state, loaded with allow_partial_load."""
    torch.manual_seed(4)
    source = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN))
    dcp.save({"model": source.state_dict()}, checkpoint_id=path)
    model = torch.nn.Sequential(apex_te.Linear(HIDDEN, HIDDEN))
    init_fp8_state(model, RECIPE)
    states = {"model": model.state_dict()}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(states, checkpoint_id=path, planner=planner)
    model.load_state_dict(states["model"])
    initial = all(getattr(model[0].fp8_state, f"scale_{way}").eq(1).all() for way in ("fwd", "bwd"))
    return torch.equal(model[0].weight, source[0].weight) and initial


def test_a_checkpoint_of_plain_layers(two_ranks, tmp_path):
    assert two_ranks.run(_plain_checkpoint, str(tmp_path / "plain")) == [True, True]
