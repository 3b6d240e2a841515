"""FP8 weights with scales of their own on several ranks: FSDP2, checkpoints, sharded writes."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_rank import device_of
from rank_sets import ranks_of
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

import apex_te
from apex_te import fp8_autocast, fp8_model_init
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.fp8.parameter.sharded_write import write_parts
from apex_te.optimizers import FusedAdam
from tests.checks import codes
from tests.free_scale_cases import FORMS, assert_holds, decoded, release

ROWS, COLS = 512, 160
FILES = ["block fp32", "block pow2", "channel", "tensor"]
OPTIMIZERS = {
    "torch": lambda p, lr: torch.optim.AdamW(p, lr, foreach=False),
    "fused": lambda p, lr: FusedAdam(p, lr, master_weights=True),
}


def file_of(form, device="cpu", rows=ROWS):
    torch.manual_seed(3)
    return release(FORMS[form], (rows, COLS), device=device)


def layer(form, device, held=True, rows=ROWS):
    """A layer in a Sequential, whose weight holds the release."""
    torch.manual_seed(4)
    with fp8_model_init(recipe=FORMS[form]):
        model = torch.nn.Sequential(apex_te.Linear(COLS, rows, device=device))
    if held:
        weight = FP8Parameter.from_codes(*file_of(form, device, rows), FORMS[form], torch.float32)
        model[0].weight = torch.nn.Parameter(weight)
    return model


def sharded(form, device, held=True, rows=ROWS):
    return fully_shard(layer(form, device, held, rows))


def gathered(model):
    model.unshard()
    found = model[0].weight.detach().clone()
    model.reshard()
    return found


def step(model, form, x, optimizer):
    with fp8_autocast(True, FORMS[form]):
        out = model(x)
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.detach()


def _train(rank, form, optimizer, rows):
    device = device_of(rank)
    one, many = (make(form, device, True, rows) for make in (layer, sharded))
    file = file_of(form, device, rows)
    assert_holds(gathered(many), file)
    own = [OPTIMIZERS[optimizer](model.parameters(), 0.0) for model in (one, many)]
    x = torch.randn(16, COLS, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(2):  # a step of lr 0
        outs = [step(m, form, x, o) for m, o in zip((one, many), own, strict=True)]
        assert torch.equal(*outs)
        assert_holds(one[0].weight, file)
        assert_holds(gathered(many), file)
    get_state_dict(many, own[1])  # which takes a step to make states
    assert_holds(gathered(many), file)
    for each in own:
        for group in each.param_groups:
            group["lr"] = 1e-2
    for _ in range(2):
        for model, its in zip((one, many), own, strict=True):
            step(model, form, x, its)
        found, wanted = gathered(many).codes(), one[0].weight.codes()
        assert torch.equal(codes(found[0]), codes(wanted[0]))
        assert torch.equal(found[1], wanted[1])
        assert not torch.equal(codes(found[0]), codes(file[0]))


# Rows that cut no block; with one scale also a row fewer, and none for the second rank.
@pytest.mark.parametrize(
    ("form", "rows"), [*((f, ROWS) for f in FILES), ("tensor", 3), ("tensor", 1)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fsdp_has_the_bits_of_one_rank(two_ranks, form, optimizer, rows):
    two_ranks.run(_train, form, optimizer, rows)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FILES)
def test_fsdp_on_gpus(two_gpus, form):
    two_gpus.run(_train, form, "fused", ROWS)


def _save(rank, form, path):
    model = sharded(form, "cpu")
    state = model.state_dict()
    assert {type(v.to_local()) for v in state.values() if hasattr(v, "to_local")} == {torch.Tensor}
    other = sharded(form, "cpu", held=False)
    other.load_state_dict(state)
    assert_holds(gathered(other), file_of(form))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)


def _load(rank, form, path):
    alone = not distributed.is_initialized()
    for held in (True, False):
        model = (layer if alone else sharded)(form, "cpu", held)
        if held:  # with other bytes than the file's
            weight = getattr(model[0].weight, "_local_tensor", model[0].weight)
            with torch.no_grad():
                weight.fill_(1.0)
        elif form != "block fp32":
            continue  # state dicts of these have values
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        assert_holds(model[0].weight.detach() if alone else gathered(model), file_of(form))


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("form", FILES)
def test_checkpoints(all_ranks, tmp_path, form, after):
    path = str(tmp_path / "checkpoint")
    ranks_of(all_ranks, 2, "gloo").run(_save, form, path)
    if after == 1:
        _load(0, form, path)
    else:
        ranks_of(all_ranks, after, "gloo").run(_load, form, path)


def _load_whole(rank, form):
    device = device_of(rank)
    state = layer(form, device).state_dict()
    model = sharded(form, device, held=False)
    state["0.bias"] = model.state_dict()["0.bias"]  # which torch wants as a DTensor
    model.load_state_dict(state)
    assert_holds(gathered(model), file_of(form))
    if device.type == "cuda":  # gloo does not send FP8
        options = StateDictOptions(full_state_dict=True)
        whole = get_model_state_dict(model, options=options)
        assert torch.equal(codes(whole["0.weight"]), codes(file_of(form)[0]))
        other = sharded(form, device, held=False)
        set_model_state_dict(other, whole, options=options)
        assert_holds(gathered(other), file_of(form))


@pytest.mark.parametrize("form", FILES)
def test_a_whole_state_dict_in_shards(two_ranks, form):
    two_ranks.run(_load_whole, form)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FILES)
def test_a_whole_state_dict_on_gpus(two_gpus, form):
    two_gpus.run(_load_whole, form)


def _write(rank, form):
    """Ranges of the flattened weight that cut blocks; then a change in one rank's range alone."""
    ranks = distributed.get_world_size()
    weight, file = layer(form, "cpu")[0].weight, file_of(form)
    size, values = weight.numel(), decoded(*file).float().flatten()
    bounds = [0, *[size * (i + 1) // ranks + 37 for i in range(ranks - 1)], size]
    start, stop = bounds[rank], bounds[rank + 1]

    def write():
        write_parts([weight], [values[start:stop].clone()], [start], None)
        parts = [None] * ranks
        data = codes(weight._rowwise).flatten()[start:stop]
        distributed.all_gather_object(parts, (data, weight.codes()[1]))
        assert all(torch.equal(scale, parts[0][1]) for _, scale in parts)
        return torch.cat([data for data, _ in parts]).view(ROWS, COLS), parts[0][1]

    data, scale_inv = write()
    assert torch.equal(data, codes(file[0]))
    assert torch.equal(scale_inv, file[1])
    values[start + 5 if rank == 0 else 5] += 1.0
    data, scale_inv = write()
    whole = layer(form, "cpu")[0].weight.detach()
    whole.copy_(values.view(ROWS, COLS))
    assert torch.equal(data, codes(whole._rowwise))
    assert torch.equal(scale_inv, whole.codes()[1])
    assert not torch.equal(scale_inv, file[1])


@pytest.mark.parametrize("form", FILES)
def test_sharded_writes(two_ranks, form):
    two_ranks.run(_write, form)
