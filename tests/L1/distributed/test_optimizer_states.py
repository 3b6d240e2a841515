"""States of the fused optimizers on DTensor parameters: checkpoints, amp and loss scales."""

import pytest
import torch
from dtensor_cases import decibels
from on_rank import assert_same, load, save
from optimizer_cases import (
    DELAYED,
    NARROW,
    OPTIONS,
    STEPS,
    distributed_as,
    loss_of,
    meshes,
    new_model,
    sharded,
    train,
    whole,
)
from rank_sets import ranks_of
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Replicate, Shard

from apex_te import amp, init_fp8_state
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.optimizers import FusedAdam, FusedLAMB, FusedSGD

STATES = {
    "adamw": (torch.float32, lambda p: FusedAdam(p, **OPTIONS)),
    "capturable": (torch.float32, lambda p: FusedAdam(p, **OPTIONS, capturable=True)),
    "masters": (torch.bfloat16, lambda p: FusedAdam(p, **OPTIONS, master_weights=True, **NARROW)),
    "halves": (
        torch.bfloat16,
        lambda p: FusedAdam(p, **OPTIONS, master_weights=True, store_param_remainders=True),
    ),
    "momentum": (torch.float32, lambda p: FusedSGD(p, lr=0.05, momentum=0.9, dampening=0.5)),
    "lamb": (torch.bfloat16, lambda p: FusedLAMB(p, lr=0.05, master_weights=True)),
    "held": (torch.float32, lambda p: FusedAdam(p, **OPTIONS, master_weights=True)),
}
FLAT = {"adamw": StateDictOptions(flatten_optimizer_state_dict=True)}


def _new(name, shard):
    dtype, make = STATES[name]
    model = new_model(name, dtype=dtype)
    init_fp8_state(model, DELAYED)
    model = sharded(model) if shard else model
    return model, make(model.parameters())


def _content(model, optimizer):
    """Whole parameters and states; of weights held in FP8 the master, of which they are made."""
    found = {}
    for key, param in model.named_parameters():
        held = type(getattr(param, "_local_tensor", param)) is FP8Parameter
        values = {} if held else {"": param.detach()}
        for name, value in {**values, **optimizer.state[param]}.items():
            value = torch.as_tensor(value)
            value = value.int() if value.dtype is torch.int16 else value  # which gloo does not know
            found[key, name] = whole(value).clone()
    return found


def _save(rank, name, path):
    model, optimizer = _new(name, True)
    train(model, optimizer, rank, range(3), name == "held")
    content = _content(model, optimizer)
    save(path, model, optimizer, get_state_dict, options=FLAT.get(name))
    return content, train(model, optimizer, rank, range(3, 6), name == "held")


def _load(rank, name, path):
    model, optimizer = _new(name, rank is not None)
    load(path, model, optimizer, get_state_dict, set_state_dict, options=FLAT.get(name))
    content = _content(model, optimizer)
    return content, train(model, optimizer, rank, range(3, 6), name == "held")


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 2), (4, 1)])
def test_save_and_load(all_ranks, tmp_path, name, before, after):
    path = str(tmp_path / "checkpoint")
    content, losses = ranks_of(all_ranks, before, "gloo").run(_save, name, path)[0]
    if after == 1:  # a process without a process group
        loaded = [_load(None, name, path)]
    else:
        loaded = ranks_of(all_ranks, after, "gloo").run(_load, name, path)
    # Of weights held in FP8 other shards have other scales.
    is_wide = STATES[name][0] is torch.float32 and name != "held"
    for own, going_on in loaded:
        assert_same(own, content)
        if before == after:
            assert torch.equal(going_on, losses)
        torch.testing.assert_close(going_on, losses, rtol=1e-5 if is_wide else 2e-2, atol=0)


def _whole_states(rank, from_first):
    """A state of whole tensors, of all ranks or of the first, and what loading refuses."""
    model, optimizer = _new("masters", True)
    train(model, optimizer, rank, range(2))
    saved = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=from_first)
    )
    other, loaded = _new("masters", True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
    set_optimizer_state_dict(other, loaded, saved, options=options)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[a].items():
            assert torch.equal(*(whole(torch.as_tensor(x)) for x in (value, loaded.state[b][name])))
    plain = new_model(dtype=torch.bfloat16)
    messages = []
    for target, source in (
        (FusedAdam(plain.parameters(), master_weights=True, **NARROW), optimizer),
        (loaded, _stepped(plain)),
    ):
        with pytest.raises(TypeError) as raised:
            target.load_state_dict(source.state_dict())
        messages.append(str(raised.value))
    return messages


def _stepped(model):
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    loss_of(model, 0, None).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("from_first", [False, True])
def test_whole_states(two_ranks, from_first):
    for plain, split in two_ranks.run(_whole_states, from_first):
        assert "must be plain tensors, as their parameters are, got DTensor for" in plain
        assert "must be DTensors, as their parameters are, got Tensor for DTensor" in split


# amp, loss scales and norms of gradients.


def _amp(rank, fused):
    """Against one rank: norms of all gradients, losses, masters, scales and a skipped step."""
    found = []
    for own in (None, rank):
        model = new_model()
        model = model if own is None else sharded(model)
        make = FusedAdam if fused else torch.optim.AdamW
        optimizer = make(model.parameters(), **OPTIONS)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O5", loss_scale="dynamic", verbosity=0
        )
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, step, own), optimizer) as scaled:
                scaled.backward()
                if step == 2 and own in (None, distributed.get_world_size() - 1):
                    grad = model[0].weight.grad
                    (grad if own is None else grad.to_local())[-1, 0] = float("inf")
            before = [p.detach().clone() for p in model.parameters()]
            if step != 2:
                masters = list(amp.master_params(optimizer))
                norms.append(whole(torch.nn.utils.clip_grad_norm_(masters, 0.5)))
            optimizer.step()
            same = [torch.equal(whole(a), whole(b.detach()))
                    for a, b in zip(before, model.parameters(), strict=True)]  # fmt: skip
            assert all(same) if step == 2 else not any(same)
        state = model.state_dict()
        assert {value.dtype for value in state.values()} == {torch.float32}
        masters = [p if m is None else m for p, m in _masters(optimizer)]
        flat = torch.cat([whole(m.detach()).flatten() for m in masters])
        found.append((torch.stack(norms), flat, amp.state_dict()["loss_scaler0"]))
    (norms, masters, scales), (own_norms, own_masters, own_scales) = found
    assert scales["loss_scale"] == own_scales["loss_scale"] == 2.0**15
    return decibels(own_norms, norms), decibels(own_masters, masters)


def _masters(optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield param, optimizer.state[param].get("master_param")


@pytest.mark.parametrize("fused", [True, False])
def test_amp(ranks, fused):
    """An infinite gradient on one rank makes the step nothing on all."""
    for found in ranks.run(_amp, fused):
        assert min(found) > 25, found


def _grad_scaler(rank, how):
    """A gradient that is not finite on one rank, in a tensor split otherwise than the first."""
    line, grid = meshes()
    second = (line, [Shard(0)]) if how == "torch" else (grid, [Replicate(), Shard(0)])
    first = second if how == "torch" else (grid, [Shard(0), Replicate()])
    params = [nn.Parameter(distributed_as(torch.ones(4, 4), *where)) for where in (first, second)]
    optimizer = FusedAdam(params, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(2):
        for param in params:
            param.grad = scaler.scale(torch.ones_like(param))
        if step == 0 and rank == distributed.get_world_size() - 1:
            params[1].grad.to_local().fill_(float("nan"))
        if how == "torch":
            scaler.step(optimizer)
        else:
            optimizer.step(grad_scaler=scaler)
        scaler.update()
        scales.append(scaler.get_scale())
        assert all(p.to_local().eq(1 - 0.5 * step).all() for p in params)
    return scales


@pytest.mark.parametrize("how", ["torch", "several dimensions"])
def test_grad_scaler(four_ranks, how):
    for scales in four_ranks.run(_grad_scaler, how):
        assert scales == [2.0**9, 2.0**9]
