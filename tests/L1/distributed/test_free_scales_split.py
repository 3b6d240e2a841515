"""Checkpoints of FP8 weights with free scales, split by tensor and expert parallel ranks."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_rank import told
from rank_sets import ranks_of
from torch import distributed

import apex_te
from apex_te import fp8_model_init
from apex_te.distributed.state_dict.model_and_optimizer import (
    get_model_state_dict,
    set_model_state_dict,
)
from apex_te.fp8.parameter.parameter import FP8Parameter
from tests.free_scale_cases import FORMS, assert_holds, release

EXPERTS = 4
BLOCKS = ["block fp32", "block pow2"]
# Out and in features; a row-parallel layer's last block of rows is not whole.
COLUMN, ROW, MLP = (512, 160), (300, 512), (256, 512)


def files(form):
    torch.manual_seed(5)
    found = {
        "0.weight": release(FORMS[form], COLUMN),
        "1.weight": release(FORMS[form], ROW),
        "2.fc1_weight": release(FORMS[form], (2 * MLP[1], MLP[0])),
        "2.fc2_weight": release(FORMS[form], MLP),
    }
    for i in range(EXPERTS):
        found[f"3.weight{i}"] = release(FORMS[form], (256, 160))
    found["4.weight"] = release(FORMS[form], (256, 160), EXPERTS)
    return found


def build(form, group, only=None):
    """The model of a rank; ``group`` None: the whole. Gates and ups are split one by one."""
    ranks = 1 if group is None else distributed.get_world_size(group)
    modes = [None, None] if group is None else ["column", "row"]
    with fp8_model_init(recipe=FORMS[form]):
        model = torch.nn.ModuleList([
            apex_te.Linear(*COLUMN[::-1], bias=False, parallel_mode=modes[0], tp_group=group),
            apex_te.Linear(*ROW[::-1], bias=False, parallel_mode=modes[1], tp_group=group),
            apex_te.LayerNormMLP(
                *MLP, bias=False, activation="swiglu", tp_group=group,
                set_parallel_mode=group is not None,
            ),
            apex_te.GroupedLinear(EXPERTS // ranks, 160, 256, False),
            apex_te.GroupedLinear(EXPERTS // ranks, 160, 256, False, single_parameter=True),
        ])  # fmt: skip
    return model if only is None else model[:only]


def own(name, file, rank, ranks):
    """A rank's part of a weight's codes and scales."""

    def rows(x):
        return x.chunk(ranks, 0)[rank]

    if name.startswith("2.fc1"):
        return tuple(torch.cat([half.chunk(ranks)[rank] for half in x.chunk(2)]) for x in file)
    if name in ("1.weight", "2.fc2_weight"):
        return tuple(x.chunk(ranks, 1)[rank] if x.dim() > 1 else x for x in file)
    return tuple(rows(x) if x.dim() > 1 else x for x in file)


def parts(form, rank, ranks):
    """Codes and scales by the names of a rank's parameters."""
    count, found = EXPERTS // ranks, {}
    for name, file in files(form).items():
        if name.startswith("3."):
            expert = int(name[-1]) - rank * count
            if 0 <= expert < count:
                found[f"3.weight{expert}"] = file
        else:
            found[name] = own(name, file, rank, ranks)
    return found


def fill(model, given):
    for name, parameter in model.named_parameters():
        if type(parameter) is FP8Parameter:
            parameter.set_codes_(*[x.contiguous() for x in given[name]])


def check(model, given):
    for name, parameter in model.named_parameters():
        if type(parameter) is FP8Parameter:
            assert_holds(parameter, given[name])


def _group():
    return distributed.group.WORLD if distributed.is_initialized() else None


def _save(rank, form, path):
    group, ranks = _group(), distributed.get_world_size()
    model = build(form, group)
    fill(model, parts(form, rank, ranks))
    state = get_model_state_dict(model, expert_group=group)
    assert state["1.weight_scale_inv"].shape == (3, 4)
    assert state["4.weight_scale_inv"].shape == (EXPERTS, 2, 2)
    dcp.save({"model": state}, checkpoint_id=path)


def _load(rank, form, path):
    """From the checkpoint, and from the state dict of the whole model."""
    group, ranks = _group(), distributed.get_world_size() if _group() else 1
    given = parts(form, rank, ranks)
    model = build(form, group)
    fill(model, {k: (x.flip(0), s) for k, (x, s) in given.items()})
    state = {"model": get_model_state_dict(model, expert_group=group)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"], expert_group=group)
    check(model, given)
    whole = build(form, None)
    fill(whole, files(form))
    other = build(form, group)
    set_model_state_dict(other, whole.state_dict(), expert_group=group)
    check(other, given)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("form", BLOCKS)
def test_checkpoints(all_ranks, tmp_path, form, before, after):
    path = str(tmp_path / "checkpoint")
    ranks_of(all_ranks, before, "gloo").run(_save, form, path)
    if after == 1:
        _load(0, form, path)
    else:
        ranks_of(all_ranks, after, "gloo").run(_load, form, path)


def _refused(rank, form):
    group = _group()
    model = build(form, group, 1) if form == "tensor" else torch.nn.ModuleList()
    if form == "tensor":
        fill(model, {"0.weight": release(FORMS[form], (256, 160))})
    else:
        with fp8_model_init(recipe=FORMS[form]):
            model.append(apex_te.Linear(64, 128, parallel_mode="column", tp_group=group))
    return told(get_model_state_dict, model, expert_group=None)


@pytest.mark.parametrize(("form", "message"), [
    ("tensor", "NotImplementedError: get_model_state_dict: FP8 weights that ranks split must have"),
    ("block fp32", "NotImplementedError: get_model_state_dict: FP8 weights with free scales must "),
])  # fmt: skip
def test_what_has_no_place_in_the_whole_is_refused(two_ranks, form, message):
    for text in two_ranks.run(_refused, form):
        assert text.startswith(message), text
