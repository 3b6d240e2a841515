"""Checkpoints of modules that a tp_group splits, and of experts: any ranks load what others saved.

Every model is cut of the same one on one rank, trained, saved by torch.distributed.checkpoint and
loaded on other ranks, whose parameters and optimizer state are then put together and compared bit
by bit with what was saved; both go on with the same losses.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_rank import assert_same, load, save
from rank_sets import ranks_of
from test_parallel_layers import LAYERS
from torch import distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init, init_fp8_state
from apex_te.distributed.state_dict.model_and_optimizer import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from apex_te.distributed.state_dict.split_tensor import SplitTensor
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.recipe import DelayedScaling

HIDDEN, FFN, HEADS, ROWS = 32, 48, 8, 8
RECIPE = DelayedScaling(amax_history_len=4)


class Model(torch.nn.Module):
    """Every kind of split module, one after the other."""

    def __init__(self, group, sequence_parallel):
        super().__init__()
        ranks = distributed.get_world_size(group) if group is not None else 1
        shared = {"tp_group": group, "sequence_parallel": sequence_parallel and ranks > 1}
        modes = [None, None] if group is None else ["column", "row"]
        split = {**shared, "set_parallel_mode": group is not None}
        self.column = apex_te.Linear(HIDDEN, FFN, parallel_mode=modes[0], **shared)
        self.row = apex_te.Linear(FFN, HIDDEN, parallel_mode=modes[1], **shared)
        self.norm = apex_te.LayerNormLinear(HIDDEN, FFN, parallel_mode=modes[0], **shared)
        self.back = apex_te.Linear(FFN, HIDDEN, parallel_mode=modes[1], **shared)
        self.mlp = apex_te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **split)
        # A gate and its factor, which no module knows of.
        self.fc1 = apex_te.Linear(HIDDEN, 2 * FFN, parallel_mode=modes[0], **shared)
        self.fc2 = apex_te.Linear(FFN, HIDDEN, parallel_mode=modes[1], **shared)
        llama = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
        llama |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_gqa_groups": 4}
        self.llama, self.stacked, self.parts = (
            apex_te.TransformerLayer(HIDDEN, FFN, HEADS, **llama, **fused, **split)
            for fused in (
                {"fuse_qkv_params": True},
                {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
                {},
            )
        )

    def forward(self, x):
        x = self.row(torch.relu(self.column(x)))
        x = self.back(self.norm(x))
        x = x + self.mlp(x)
        gate, up = self.fc1(x).chunk(2, -1)
        x = self.fc2(torch.sigmoid(gate) * up)
        return self.parts(self.stacked(self.llama(x)))


def _matrices(name):
    """Relative sizes of what lies one after the other in the rows of a parameter."""
    if "fc1" in name:
        return (1, 1)
    return (2, 1, 1) if name.startswith("stacked.self_attention.layernorm_qkv.") else (1,)


def _split_dim(name):
    """Over which dimension a parameter is split; None: over none."""
    if "layer_norm" in name:
        return None
    row = name.startswith(("row.", "back.", "fc2.")) or ".proj." in name or "fc2_" in name
    if not row:
        return 0
    return 1 if name.endswith("weight") else None


def _joined(name, parts):
    """The whole of a parameter from every rank's part."""
    dim = _split_dim(name)
    if dim is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if dim == 1:
        return torch.cat(parts, 1)
    sizes = _matrices(name)
    unit = parts[0].shape[0] // sum(sizes)
    pieces = [part.split([unit * size for size in sizes]) for part in parts]
    return torch.cat([piece for matrix in zip(*pieces, strict=True) for piece in matrix])


def _cut(name, whole, rank, ranks):
    dim = _split_dim(name)
    if dim is None:
        return whole
    if dim == 1:
        return whole.chunk(ranks, 1)[rank]
    sizes = _matrices(name)
    unit = whole.shape[0] // sum(sizes)
    matrices = whole.split([unit * size for size in sizes])
    return torch.cat([matrix.chunk(ranks)[rank] for matrix in matrices])


STACKED = {"fc1.*": (1, 1)}


class Run:
    """A model in training on ``tp`` of the ranks, with ``fully_shard`` over the others."""

    def __init__(self, seed, tp, sequence_parallel, fsdp, fp8, optimizer):
        self.group, self.rank, self.tp = None, 0, tp
        self.split_rows = sequence_parallel and tp > 1
        self.recipe = RECIPE if fp8 else None
        mesh = None
        if distributed.is_initialized():
            shape = (distributed.get_world_size() // tp, tp)
            mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            self.group, self.rank = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
        self.model = Model(self.group, sequence_parallel)
        generator = torch.Generator().manual_seed(seed)
        whole = Model(None, False)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                value = torch.randn(whole.get_parameter(name).shape, generator=generator) * 0.2
                parameter.copy_(_cut(name, value, self.rank, tp))
        parameters = self.model.named_parameters()
        self.summed = {n for n, p in parameters if getattr(p, "sequence_parallel", False)}
        if fsdp:
            from torch.distributed.fsdp import fully_shard

            for child in (self.model.mlp, self.model.stacked):
                fully_shard(child, mesh=mesh["dp"])
            fully_shard(self.model, mesh=mesh["dp"])
        kind = getattr(torch.optim, optimizer, None) or getattr(apex_te.optimizers, optimizer)
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        amax_groups.pending = 0

    def train(self, steps):
        losses = []
        for step in steps:
            x = torch.randn(ROWS, 2, HIDDEN, generator=torch.Generator().manual_seed(step))
            x = x.chunk(self.tp)[self.rank] if self.split_rows else x
            self.optimizer.zero_grad()
            with fp8_autocast(self.recipe is not None, self.recipe):
                loss = (self.model(x) - x).square().sum() / (ROWS * 2 * HIDDEN)
            loss.backward()
            if self.split_rows:
                loss = loss.detach()
                distributed.all_reduce(loss, group=self.group)
                for name, parameter in self.model.named_parameters():
                    if name in self.summed:
                        grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
                        distributed.all_reduce(grad, group=self.group)
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def content(self):
        """This tensor-parallel rank's values by what they are and the parameter's name."""
        flush_fp8_state()
        found = {}
        for name, parameter in self.model.named_parameters():
            found["model", name] = _whole_of_shards(parameter)
            for key, value in self.optimizer.state[parameter].items():
                value = torch.as_tensor(value)
                found[key, name] = _whole_of_shards(value)
        for name, module in self.model.named_modules():
            state = getattr(module, "fp8_state", None)
            if state is not None and state.allocated:
                found.update({(t, name): getattr(state, t).clone() for t in TENSORS})
                found["due", name] = torch.tensor(state.first_steps.due)
        return found


def _whole_of_shards(value):
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def _save(rank, path, tp, *options):
    run = Run(1, tp, *options)
    run.train(range(2))
    content = run.content()
    save(path, run.model, run.optimizer, get_state_dict, stacked=STACKED)
    return content, run.train(range(2, 5))


def _load(rank, path, again, tp, *options, plain=False):
    run = Run(2, tp, *options)
    if run.recipe is not None:
        init_fp8_state(run.model, run.recipe)
    get, put, more = get_state_dict, set_state_dict, {"stacked": STACKED}
    if plain:
        get, put, more = torch_state_dict.get_state_dict, torch_state_dict.set_state_dict, {}
    load(path, run.model, run.optimizer, get, put, **more)
    content = run.content()
    if again is not None:
        save(again, run.model, run.optimizer, get, **more)
    return content, run.train(range(2, 5))


def _joined_content(contents):
    whole = {}
    for kind, name in contents[0]:
        parts = [content[kind, name] for content in contents]
        if kind in (*TENSORS, "due") or parts[0].dim() == 0:
            assert all(torch.equal(part, parts[0]) for part in parts), (kind, name)
            whole[kind, name] = parts[0]
        else:
            whole[kind, name] = _joined(name, parts)
    return whole


LAYOUTS = {  # ranks; tensor-parallel ones, sequence_parallel, fsdp
    "tp2": (2, (2, False, False)),
    "sp2": (2, (2, True, False)),
    "tp4": (4, (4, False, False)),
    "sp4": (4, (4, True, False)),
    "dp2 tp2": (4, (2, False, False)),
    "fsdp2 sp2": (4, (2, True, True)),
    "fsdp2": (2, (1, False, True)),
    "one": (1, (1, False, False)),
}


@pytest.mark.parametrize(
    ("before", "after", "fp8", "optimizer"),
    [
        ("sp2", "tp4", True, "FusedAdam"),
        ("sp2", "one", True, "AdamW"),
        ("tp4", "sp2", False, "AdamW"),
        ("tp2", "plain", False, "AdamW"),
        ("one", "sp4", True, "AdamW"),
        ("fsdp2 sp2", "sp4", False, "FusedAdam"),
        ("dp2 tp2", "fsdp2 sp2", False, "AdamW"),
        ("fsdp2 sp2", "fsdp2", False, "AdamW"),
    ],
)
def test_there_and_back(all_ranks, tmp_path, before, after, fp8, optimizer):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")

    def run(function, name, *paths):
        """Whole content, and losses, by tensor-parallel group; ``plain``: torch's own functions."""
        more = {"plain": True} if name == "plain" else {}
        size, layout = LAYOUTS["one" if name == "plain" else name]
        options = (*paths, *layout, fp8, optimizer)
        if size == 1:
            found = [function(0, *options, **more)]
        else:
            found = ranks_of(all_ranks, size, "gloo").run(function, *options)
        tp = layout[0]
        groups = [found[at : at + tp] for at in range(0, size, tp)]
        wholes = [_joined_content([content for content, _ in group]) for group in groups]
        for other in wholes[1:]:
            assert_same(other, wholes[0])
        return wholes[0], [losses for _, losses in found]

    saved, uninterrupted = run(_save, before, first)
    loaded, losses = run(_load, after, first, second)
    assert_same(loaded, saved)
    returned, resumed = run(_load, before, second, None)
    assert_same(returned, saved)
    assert resumed == uninterrupted
    if fp8 and "one" in (before, after):
        return  # alone, a bias is added in the FP8 product, in 16 bits
    for own in losses:  # the same numbers, summed in another order
        expected = torch.tensor(uninterrupted[0])
        torch.testing.assert_close(torch.tensor(own), expected, rtol=1e-6, atol=0)


def test_one_file_of_all_parts(two_ranks, tmp_path):
    """What torch makes of a checkpoint is the state dict of one rank."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved = two_ranks.run(_save, str(tmp_path / "parts"), 2, False, False, False, "AdamW")
    dcp_to_torch_save(tmp_path / "parts", tmp_path / "whole.pt")
    model = Model(None, False)
    model.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["model"])
    whole = _joined_content([content for content, _ in saved])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole["model", name]), name


def _cut_layers(rank, name):
    """Of the state dict of a whole layer every rank takes its part: the same output."""
    torch.manual_seed(5)
    sizes, dropout = (HIDDEN, FFN, 4), {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    whole = apex_te.TransformerLayer(*sizes, **dropout, **LAYERS[name])
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    split = {"set_parallel_mode": True, "tp_group": distributed.group.WORLD}
    part = apex_te.TransformerLayer(*sizes, **dropout, **LAYERS[name], **split)
    set_model_state_dict(part, whole.state_dict())
    x, memory = torch.randn(2, ROWS, 2, HIDDEN)
    more = {"encoder_output": memory} if name == "decoder" else {}
    torch.testing.assert_close(part(x, **more), whole(x, **more), rtol=1e-5, atol=1e-5)
    # By its names in wrappers, too.
    expected = get_model_state_dict(part)
    wrapped = torch.compile(checkpoint_wrapper(part))
    found = get_model_state_dict(torch.nn.ModuleDict({"layer": wrapped}))
    assert list(found) == [f"layer.{key}" for key in expected]
    assert [value.shape for value in found.values()] == [v.shape for v in expected.values()]
    shapes = {key: value.shape for key, value in whole.state_dict().items()}
    assert {key: value.shape for key, value in expected.items()} == shapes


@pytest.mark.parametrize("name", LAYERS)
def test_layers_cut_of_one(two_ranks, name):
    two_ranks.run(_cut_layers, name)


def _fp8_weights(rank, path, save):
    """Weights that are FP8 data: values as they were saved, with scales of other parts."""
    group = distributed.group.WORLD
    torch.manual_seed(rank)
    with fp8_model_init(recipe=RECIPE):
        layer = apex_te.Linear(HIDDEN, FFN, parallel_mode="row", tp_group=group)
    state = get_model_state_dict(layer)
    if save:
        dcp.save(state, checkpoint_id=path)
    else:
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(layer, state)
    return layer.weight.detach().dequantize()


def test_fp8_weights(two_ranks, four_ranks, tmp_path):
    path = str(tmp_path / "weights")
    saved = two_ranks.run(_fp8_weights, path, True)
    for found, expected in zip(two_ranks.run(_fp8_weights, path, False), saved, strict=True):
        assert torch.equal(found, expected)
    expected = torch.cat(saved, 1)
    found = torch.cat(four_ranks.run(_fp8_weights, path, False), 1)
    noise = (found - expected).square().mean()
    assert 10 * torch.log10(expected.square().mean() / noise.clamp(min=1e-30)) > 25


def _megatron(rank):
    """Places by Megatron's names are those of the DTensors that these layers make themselves."""
    from test_megatron_layers import LAYERS as NAMES
    from test_megatron_layers import _make

    for name in NAMES:
        layer = _make(name, distributed.group.WORLD)
        expected, found = layer.sharded_state_dict(), get_model_state_dict(layer)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            split = isinstance(value, DTensor)
            assert isinstance(found[key], SplitTensor) is split, key
            assert value.shape == found[key].shape
            if split:
                assert found[key].__create_chunk_list__() == value.__create_chunk_list__()


def test_megatron_names(two_ranks):
    two_ranks.run(_megatron)
