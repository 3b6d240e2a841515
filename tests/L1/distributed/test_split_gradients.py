"""Norm and overflow of gradients of which ranks have parts: agreed upon by all of them."""

import math

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import apex_te
from apex_te import amp
from apex_te.distributed import LayerParallel, clip_grad_norm_, reduce_found_inf
from apex_te.optimizers import FusedAdam, FusedLAMB, FusedSGD

HIDDEN, FFN, HEADS = 32, 64, 4
LAYOUTS = ("tp_group", "styles", "tp_group fsdp", "styles fsdp", "tp_group ddp", "fsdp")
OPTIMIZERS = {
    "adam": lambda params: FusedAdam(params, lr=0.5),
    "lamb": lambda params: FusedLAMB(params, lr=0.5),
    "sgd": lambda params: FusedSGD(params, lr=0.5),
    "torch": lambda params: torch.optim.SGD(params, lr=0.5),
}
_meshes = {}


def _mesh(*sizes):
    if sizes not in _meshes:
        _meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
    return _meshes[sizes]


def _layer(**options):
    return apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, **options
    )


def _built(layout):
    """A model and its layer, split as the layout says."""
    ranks = distributed.get_world_size()
    tp = 1 if layout == "fsdp" else 2 if ("fsdp" in layout or "ddp" in layout) else ranks
    mesh = _mesh(ranks // tp, tp) if tp not in (1, ranks) or layout == "tp_group ddp" else None
    tp_mesh = mesh["tp"] if mesh is not None else _mesh(ranks)
    torch.manual_seed(1)
    if layout.startswith("tp_group"):
        options = {"set_parallel_mode": True, "tp_group": tp_mesh.get_group()}
        model = nn.Sequential(_layer(**options), nn.Linear(HIDDEN, HIDDEN))
    else:
        model = nn.Sequential(_layer(), apex_te.Linear(HIDDEN, HIDDEN))
        if layout.startswith("styles"):
            model[1] = nn.Identity()
            parallelize_module(model, tp_mesh, {"0": LayerParallel()})
    layer = model[0]
    if layout.endswith("fsdp"):
        model = fully_shard(model, mesh=tp_mesh if mesh is None else mesh["dp"])
    elif layout.endswith("ddp"):
        model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    return model, layer


def _backward(model):
    x = torch.randn(8, 2, HIDDEN, generator=torch.Generator().manual_seed(3))
    loss = model(x).square().sum()
    loss.backward()
    return loss


def _local(x):
    return x.to_local() if hasattr(x, "to_local") else x


def _clipped(rank, layout, norm_type):
    """The norm that clip_grad_norm_ gives, the norm of the one-rank model's gradients, and the norm
    after clipping.
    """
    model, layer = _built(layout)
    _backward(model)
    expected = 0.0
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            grad = parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            value = grad.abs().pow(norm_type).sum() if norm_type != math.inf else grad.abs().max()
            if layout.startswith("tp_group") and module in set(layer.modules()):
                split = name in ("fc1_weight", "fc1_bias", "fc2_weight") or (
                    type(module) is not apex_te.LayerNormMLP
                    and getattr(module, "parallel_mode", None) is not None
                    and "layer_norm" not in name
                    and (module.parallel_mode == "column" or name.endswith("weight"))
                )
                if split:
                    op = distributed.ReduceOp.MAX if norm_type == math.inf else None
                    group = module.tp_group
                    distributed.all_reduce(value, *([op] if op else []), group=group)
            expected = max(expected, value) if norm_type == math.inf else expected + value
    if norm_type != math.inf:
        expected = expected ** (1 / norm_type)
    norm = clip_grad_norm_(model, 0.25, norm_type)
    return norm.item(), float(expected), clip_grad_norm_(model, 1e9, norm_type).item()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_of_a_split_model(four_ranks, layout, norm_type):
    """The norm is that of the whole model, the same on all ranks, and at most the limit after."""
    found = four_ranks.run(_clipped, layout, norm_type)
    norm, expected, after = found[0]
    assert norm == pytest.approx(expected, rel=1e-5)
    assert after == pytest.approx(0.25, rel=1e-4)
    assert all(each[0] == norm for each in found)


def _overflow(rank, layout, optimizer, how):
    """Whether a step was taken on this rank, and the scale after an update."""
    model, layer = _built(layout)
    made = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [_local(p).detach().clone() for p in model.parameters()]
    scaler.scale(_backward(model) * 0 + 1)  # makes the scale
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2.0**10)
    if rank == distributed.get_world_size() - 1:
        _local(layer.layernorm_mlp.fc1_weight.grad).view(-1)[:1].fill_(float("inf"))
    refused = None
    if how == "argument":
        made.step(grad_scaler=scaler)
    else:
        if how == "helper":
            reduce_found_inf(scaler, made, model)
        elif how == "helper after unscale":
            scaler.unscale_(made)
            reduce_found_inf(scaler, made, model)
        try:
            scaler.step(made)
        except RuntimeError as error:
            refused = str(error)
    same = all(torch.equal(_local(p), b) for p, b in zip(model.parameters(), before, strict=True))
    if refused is None:
        scaler.update()
    return same, scaler.get_scale(), refused


@pytest.mark.parametrize("how", ["argument", "helper", "helper after unscale"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_overflow_on_one_rank(four_ranks, layout, optimizer, how):
    """A value that is not finite in one rank's part skips the step of all ranks."""
    if how == "argument" and optimizer == "torch":
        pytest.skip("torch's optimizers do not take a scaler")
    if how == "argument" and layout == "tp_group fsdp":
        pytest.skip("parameters that FSDP2 makes do not name their tp_group")
    found = four_ranks.run(_overflow, layout, optimizer, how)
    assert found == [(True, 2.0**9, None)] * 4


@pytest.mark.parametrize("optimizer", ["adam", "lamb", "sgd"])
@pytest.mark.parametrize("layout", ["tp_group", "styles", "tp_group ddp", "styles fsdp"])
def test_a_flag_of_one_rank_is_refused(four_ranks, layout, optimizer):
    """A GradScaler that asks this rank alone raises on all ranks, and changes no parameter."""
    for same, _, refused in four_ranks.run(_overflow, layout, optimizer, "scaler"):
        assert same
        assert "found_inf must be that of all ranks" in refused


def _amp_overflow(rank, layout, optimizer):
    model, layer = _built(layout)
    model, made = amp.initialize(
        model, OPTIMIZERS[optimizer](model.parameters()), opt_level="O2", verbosity=0,
        cast_model_type=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(8, 2, HIDDEN, generator=torch.Generator().manual_seed(3))
    before = [_local(p).detach().clone() for p in model.parameters()]
    with amp.scale_loss(model(x).float().square().sum(), made) as loss:
        loss.backward()
        if rank == distributed.get_world_size() - 1:
            _local(layer.layernorm_mlp.fc1_weight.grad).view(-1)[:1].fill_(float("inf"))
    made.step()
    return all(torch.equal(_local(p), b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("optimizer", ["adam", "torch"])
@pytest.mark.parametrize("layout", ["tp_group", "styles"])
def test_amp_overflow_on_one_rank(two_ranks, layout, optimizer):
    """amp.scale_loss skips the step of all ranks that hold parts of the model."""
    assert two_ranks.run(_amp_overflow, layout, optimizer) == [True, True]
