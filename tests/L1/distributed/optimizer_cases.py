"""Models under fully_shard, their training and comparison for the tests of fused optimizers."""

import torch
from dtensor_cases import decibels
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init, recipe
from apex_te.distributed import enable_fp8_all_gather
from apex_te.fp8.parameter.parameter import FP8Parameter

STEPS = 4
HIDDEN, FFN, TOKENS = 32, 64, 8
DELAYED = recipe.DelayedScaling(amax_history_len=4)
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
NARROW = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def meshes(device="cpu"):
    """Of one dimension, and of two."""
    size = distributed.get_world_size()
    return init_device_mesh(device, (size,)), init_device_mesh(
        device, (2, size // 2), mesh_dim_names=("dp", "tp")
    )


def distributed_as(value, mesh, placements):
    """A rank's part of what every rank has; no collective."""
    value = value.clone()  # of which a whole DTensor is a view
    if mesh is None:
        return value
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def new_model(kind="plain", device="cpu", dtype=torch.float32):
    """The last layer has one row, and all ranks but one none of it."""
    torch.manual_seed(3)
    with fp8_model_init(kind == "held", DELAYED):
        model = nn.Sequential(apex_te.Linear(HIDDEN, FFN), nn.GELU(), apex_te.Linear(FFN, HIDDEN))
    model.append(nn.Linear(HIDDEN, 1))
    if kind == "gathered":
        enable_fp8_all_gather(model, DELAYED)
    return model.to(device, dtype)


def sharded(model):
    for module in model:
        fully_shard(module)
    return fully_shard(model)


def loss_of(model, step, rank, fp8=False):
    """Of a rank's data, of all where ``rank`` is None."""
    parameter = next(model.parameters())
    x = torch.randn(TOKENS, 4, HIDDEN, generator=torch.Generator().manual_seed(step))
    x = x if rank is None else x.chunk(distributed.get_world_size(), 1)[rank]
    x = x.to(parameter.device, parameter.dtype)
    with fp8_autocast(fp8, DELAYED):
        return (model(x).float() - x[..., :1].float()).square().mean()


def train(model, optimizer, rank, steps=None, fp8=False):
    """Losses of steps, means over ranks."""
    losses = []
    for step in range(STEPS) if steps is None else steps:
        loss = loss_of(model, step, rank, fp8)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    flush_fp8_state()
    losses = torch.stack(losses)
    if rank is not None:
        distributed.all_reduce(losses)
        losses /= distributed.get_world_size()
    return losses


def worst(ours, theirs):
    """dB of parameters."""
    found = []
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        a, b = a.detach(), b.detach()
        if isinstance(b, DTensor):
            a, b = a.to_local(), b.to_local()
        a, b = (x.dequantize() if type(x) is FP8Parameter else whole(x) for x in (a, b))
        if a.numel():
            found.append(decibels(a, b))
    return min(found)
