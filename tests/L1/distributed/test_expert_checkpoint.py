"""Checkpoints of experts, and what else ``apex_te.distributed.get_state_dict`` promises."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_rank import assert_same, assert_told, load, save, told
from rank_sets import ranks_of
from test_example import DELAYED, FP8, FP32, LAYOUTS, STOP, _run, close
from torch import distributed
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, init_fp8_state
from apex_te.comm.expert_parallel import TokenDispatcher
from apex_te.distributed.state_dict.model_and_optimizer import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from apex_te.distributed.state_dict.split_tensor import Parts, SplitTensor, parts_of
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.integrations.transformer_engine.pytorch.module.grouped_linear import (
    GroupedLinear as AliasGroupedLinear,
)
from apex_te.recipe import DelayedScaling

HIDDEN, FFN, HEADS = 32, 48, 8
RECIPE = DelayedScaling(amax_history_len=4)


EXPERTS = 4


class Experts(torch.nn.Module):
    """A layer before, and experts, of which this rank has some; ``alias``: as another class."""

    def __init__(self, group, seed, alias=False):
        super().__init__()
        self.dispatcher = TokenDispatcher(EXPERTS, group) if group is not None else None
        ranks, rank = 1, 0
        if group is not None:
            ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
        count = EXPERTS // ranks
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        kind = AliasGroupedLinear if alias else apex_te.GroupedLinear
        self.fc1 = kind(count, HIDDEN, FFN, device="cpu")
        self.fc2 = kind(count, FFN, HIDDEN, bias=False, device="cpu")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                index = int(name[-1]) + rank * count if name[-1].isdigit() else 0
                generator = torch.Generator().manual_seed(seed + 10 * index + len(name))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        chosen = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, probs.topk(2).indices, True)
        dispatcher = TokenDispatcher(EXPERTS) if self.dispatcher is None else self.dispatcher
        dispatch = dispatcher.dispatch(x, probs * chosen, chosen)
        rows = self.fc2(torch.relu(self.fc1(dispatch.rows, dispatch.m_splits)), dispatch.m_splits)
        return dispatch.combine(rows)


class ExpertRun:
    """Experts in training over groups of ``ep`` ranks; every group has the same tokens."""

    def __init__(self, seed, ep, groups_of_parameters, alias=False):
        self.group, self.rank, self.ep = None, 0, ep
        self.flat = groups_of_parameters == 2  # names instead of lists in the optimizer's state
        if distributed.is_initialized():
            shape = (distributed.get_world_size() // ep, ep)
            mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
            self.group, self.rank = mesh["ep"].get_group(), mesh["ep"].get_local_rank()
        self.model = Experts(self.group, seed, alias)
        parameters = list(self.model.named_parameters())
        groups = [[p for _, p in parameters]]
        if groups_of_parameters > 1:
            kinds = ("router", "fc1", "fc2") if groups_of_parameters == 3 else ("router", "fc")
            groups = [[p for n, p in parameters if n.startswith(kind)] for kind in kinds]
        self.optimizer = torch.optim.AdamW(
            [{"params": group, "weight_decay": 0.1 * i} for i, group in enumerate(groups)], lr=0.01
        )
        amax_groups.pending = 0

    def train(self, steps):
        losses = []
        for step in steps:
            x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(step))
            x = x.chunk(self.ep)[self.rank]
            self.optimizer.zero_grad()
            with fp8_autocast(True, RECIPE):
                loss = (self.model(x) - x).square().sum()
            loss.backward()
            loss = loss.detach()
            if self.group is not None:
                distributed.all_reduce(loss, group=self.group)
                for parameter in self.model.router.parameters():
                    distributed.all_reduce(parameter.grad, group=self.group)
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def content(self):
        """Values by what they are and the name among all ranks."""
        flush_fp8_state()
        found, count = {}, self.model.fc1.num_gemms
        for name, parameter in self.model.named_parameters():
            if name[-1].isdigit():
                name = f"{name[:-1]}{int(name[-1]) + self.rank * count}"
            found["model", name] = parameter.detach().clone()
            for key, value in self.optimizer.state[parameter].items():
                found[key, name] = value.clone()
        for layer in (self.model.fc1, self.model.fc2):
            states = {key: getattr(layer.fp8_state, key).chunk(count, -1) for key in TENSORS}
            due = torch.tensor(layer.fp8_state.first_steps.due)
            states["forward"] = due[: 3 * count].chunk(count)
            states["backward"] = due[3 * count :].chunk(count)
            for key, slots in states.items():
                for i, slot in enumerate(slots):
                    found[key, layer.in_features, i + self.rank * count] = slot.clone()
        return found

    def keep(self, function, path, *functions):
        """``save`` or ``load``, with the functions that it takes."""
        options = {} if self.group is None else {"expert_group": self.group}
        if self.flat:
            options["options"] = torch_state_dict.StateDictOptions(
                flatten_optimizer_state_dict=True
            )
        function(path, self.model, self.optimizer, *functions, **options)


def _save_experts(rank, path, ep, groups, alias):
    run = ExpertRun(1, ep, groups, alias)
    run.train(range(2))
    flush_fp8_state()
    run.keep(save, path, get_state_dict)
    return run.content(), run.train(range(2, 5))


def _load_experts(rank, path, again, ep, groups, alias):
    run = ExpertRun(2, ep, groups, alias)
    init_fp8_state(run.model, RECIPE)
    run.keep(load, path, get_state_dict, set_state_dict)
    if again is not None:
        run.keep(save, again, get_state_dict)
    rates = [group["weight_decay"] for group in run.optimizer.param_groups]
    assert rates == [0.1 * i for i in range(groups)]
    return run.content(), run.train(range(2, 5))


@pytest.mark.parametrize(
    ("before", "after", "groups", "alias"),
    [
        ((2, 2), (4, 4), 2, False), ((2, 2), (1, 1), 1, False), ((1, 1), (2, 2), 3, False),
        ((4, 2), (4, 4), 1, False), ((2, 2), (4, 4), 2, True), ((2, 2), (1, 1), 1, True),
    ],
)  # fmt: skip
def test_experts(all_ranks, tmp_path, before, after, groups, alias):
    """Ranks, and those that share the experts; and groups of parameters, of experts alone too."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")

    def run(function, layout, *paths):
        size, ep = layout
        if size == 1:
            found = [function(0, *paths, ep, groups, alias)]
        else:
            found = ranks_of(all_ranks, size, "gloo").run(function, *paths, ep, groups, alias)
        whole = {}
        for content, _ in found:
            for key, value in content.items():
                assert key not in whole or torch.equal(whole[key], value), key
                whole[key] = value
        return whole, [losses for _, losses in found]

    saved, uninterrupted = run(_save_experts, before, first)
    loaded, losses = run(_load_experts, after, first, second)
    assert_same(loaded, saved)
    returned, resumed = run(_load_experts, before, second, None)
    assert_same(returned, saved)
    assert resumed == uninterrupted
    # Then the amaxes of other experts are reduced together, and scales differ.
    torch.testing.assert_close(losses[0][0], uninterrupted[0][0], rtol=1e-6, atol=0)


def _different_states(rank):
    """Without reduced amaxes ranks have their own; a checkpoint has the largest."""
    group = distributed.group.WORLD
    layer = apex_te.Linear(HIDDEN, FFN, parallel_mode="column", tp_group=group)
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=False)
    amax_groups.pending = 0
    for _ in range(2):
        with fp8_autocast(True, recipe):
            layer(torch.full((4, HIDDEN), 1.0 + rank)).sum().backward()
    flush_fp8_state()
    return {t: getattr(layer.fp8_state, t).clone() for t in TENSORS}, {
        k.removeprefix("fp8_state."): v
        for k, v in get_model_state_dict(layer).items()
        if k.startswith("fp8_state.") and not k.endswith("header")
    }


def test_states_that_ranks_have_of_their_own(two_ranks):
    (first, found), (second, other) = two_ranks.run(_different_states)
    assert_same(found, other)
    assert first["scale_fwd"][0] > second["scale_fwd"][0]
    for name, value in found.items():
        pick = torch.minimum if name in ("scale_fwd", "scale_bwd") else torch.maximum
        assert torch.equal(value, pick(first[name], second[name])), name


def _styles(rank, path):
    """Saved with DTensors, of every rank's rows in one piece; loaded with tp_group."""
    from torch.distributed.tensor.parallel import parallelize_module

    from apex_te.distributed import ColumnParallel, LayerParallel

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    group, ranks = mesh.get_group(), mesh.size()

    def make(seed, **split):
        torch.manual_seed(seed)
        column = {"parallel_mode": "column"} if split else {}
        llama = {"activation": "swiglu", "fuse_qkv_params": True, "qkv_weight_interleaved": False}
        more = {"set_parallel_mode": True, **split} if split else {}
        return torch.nn.ModuleDict(
            {
                "layer": apex_te.TransformerLayer(HIDDEN, FFN, HEADS, **llama, **more),
                "column": apex_te.Linear(HIDDEN, FFN, **column, **split),
            }
        )

    model = make(3)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    styles = {"layer": LayerParallel(), "column": ColumnParallel()}
    parallelize_module(model, mesh, styles)
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    found = make(4, tp_group=group)
    state = get_model_state_dict(found)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(found, state)
    cut = make(5, tp_group=group)
    set_model_state_dict(cut, plain)  # a state dict of one rank
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), cut.parameters(), strict=True))
    gate, up = plain["layer.layernorm_mlp.fc1_weight"].chunk(2)
    own = torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
    return torch.equal(cut.layer.layernorm_mlp.fc1_weight, own)


def test_styles_and_one_rank(ranks, tmp_path):
    assert all(ranks.run(_styles, str(tmp_path / "styles")))


def _errors(rank, path):
    group, found = distributed.group.WORLD, []

    def note(*args, **options):
        found.append(told(*args, **options))

    layer = apex_te.Linear(HIDDEN, FFN, parallel_mode="column", tp_group=group)
    experts = torch.nn.ModuleDict({"e": apex_te.GroupedLinear(2, 16, 16)})
    note(get_model_state_dict, experts)
    experts.e.weight0.allreduce = False
    note(get_model_state_dict, experts, expert_group=None)
    note(get_model_state_dict, layer, expert_group=2)
    note(get_model_state_dict, layer, stacked={"other": (1, 1)})
    note(get_model_state_dict, layer, stacked={"weight": (5, 2)})
    note(get_model_state_dict, layer, stacked={"weight": (1, 0)})
    full = torch_state_dict.StateDictOptions(full_state_dict=True)
    note(get_model_state_dict, layer, options=full)
    note(set_model_state_dict, layer, layer.state_dict())
    late = apex_te.Linear(HIDDEN, FFN, parallel_mode="column", tp_size=2)
    note(get_model_state_dict, torch.nn.ModuleDict({"late": late}))
    adafactor = torch.optim.Adafactor(layer.parameters())
    note(get_optimizer_state_dict, layer, adafactor)
    if rank == 0:
        init_fp8_state(layer, RECIPE)
    note(get_model_state_dict, layer)
    other = torch.nn.Linear(4, 4)
    other.weight.tensor_model_parallel = True
    note(get_model_state_dict, torch.nn.ModuleDict({"mine": other}))
    part = get_model_state_dict(apex_te.Linear(HIDDEN, FFN, parallel_mode="row", tp_group=group))
    note(torch.add, part["weight"], 1)
    note(set_model_state_dict, layer, part)
    return found


EXPECTED = (
    "ValueError: get_model_state_dict: expert_group must be given for e (GroupedLinear)",
    "ValueError: get_model_state_dict: expert_group must be given for e (GroupedLinear)",
    "TypeError: get_model_state_dict: expert_group must be a torch.distributed.ProcessGroup or",
    "ValueError: get_model_state_dict: stacked must name parameters whose rows are split, got",
    "ValueError: get_model_state_dict: stacked must give weight sizes whose sum divides",
    "ValueError: get_model_state_dict: stacked must give the relative size of each matrix as",
    "NotImplementedError: get_model_state_dict: full_state_dict must be False for a model that",
    "ValueError: set_model_state_dict: weight must be the whole, of 48 in dimension 0",
    "ValueError: get_model_state_dict: set_tensor_parallel_group must be called of late",
    "NotImplementedError: get_optimizer_state_dict: weight.row_var must be a tensor of its",
    "ValueError: get_model_state_dict: FP8 state of the model must be allocated with one history",
    "NotImplementedError: get_model_state_dict: split parameters must be of a module of apex_te",
    "NotImplementedError: SplitTensor: aten.add.Tensor must be called with its local tensor",
    "ValueError: set_model_state_dict: weight must be the whole, of 48 in dimension 0",
)


def test_errors(two_ranks, tmp_path):
    for found in two_ranks.run(_errors, str(tmp_path / "errors")):
        assert_told(found, EXPECTED)


def _two_names(rank):
    """A split weight that another module shares is split there, too; so is one module twice."""
    head = apex_te.Linear(HIDDEN, FFN, parallel_mode="column", tp_group=distributed.group.WORLD)
    tokens = torch.nn.Embedding(*head.weight.shape)
    tokens.weight = head.weight
    state = get_model_state_dict(torch.nn.ModuleDict({"t": tokens, "h": head, "again": head}))
    return [list(value.shape) for value in state.values()]


def test_parameters_of_two_names(two_ranks):
    expected = [[FFN, HIDDEN], *[[FFN, HIDDEN], [FFN]] * 2]
    assert two_ranks.run(_two_names) == [expected, expected]


def _in_the_background(rank, path):
    """async_save copies to the CPU first; what is trained meanwhile is not saved."""
    layer = apex_te.LayerNormMLP(
        HIDDEN, FFN, activation="swiglu", set_parallel_mode=True, tp_group=distributed.group.WORLD
    )
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    saving = dcp.async_save(get_model_state_dict(layer), checkpoint_id=path)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    saving.result()
    state = get_model_state_dict(layer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(layer, state)
    return all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_async_save(two_ranks, tmp_path):
    assert two_ranks.run(_in_the_background, str(tmp_path / "async")) == [True, True]


def test_the_example_on_other_ranks(all_ranks, tmp_path):
    """Two tensor-parallel ranks of FSDP shards; resumed, four that have no shards."""
    ranks = ranks_of(all_ranks, 4, "gloo")
    words = [*DELAYED, "--out", tmp_path]
    expected = ranks.run(_run, [*words, *LAYOUTS["all"][1]])[0]
    words += ["--checkpoint", tmp_path / "kept"]
    ranks.run(_run, [*words, *LAYOUTS["all"][1], "--stop-at", STOP])
    resumed = ranks.run(_run, [*words, "--tp", "4", "--resume"])
    for precision, tolerances in (("fp32", FP32), ("delayed", FP8)):
        whole = expected[precision]
        whole = whole | {"train_losses": whole["train_losses"][STOP:]}
        close([r[precision] for r in resumed], whole, **tolerances)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts(ranks):
    """Those of all ranks make up the whole, each element once."""
    whole = torch.arange(3 * 24).view(24, 3)
    seen = []
    for rank in range(ranks):
        parts = parts_of(0, 24 // ranks, rank, ranks, (1, 2))
        local = parts.cut(whole)
        assert local.shape == (24 // ranks, 3)
        split = SplitTensor(local, parts)
        assert split.shape == whole.shape
        for chunk in split.__create_chunk_list__():
            first, rows = chunk.offsets[0], chunk.sizes[0]
            seen += list(range(first, first + rows))
            piece = split.__get_tensor_shard__(MetadataIndex("x", chunk.offsets))
            assert torch.equal(piece, whole[first : first + rows])
    assert sorted(seen) == list(range(24))
    assert Parts(0, 24, ((0, 8, 0),)) != parts
