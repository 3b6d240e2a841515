"""A small mixture of experts of torchtitan, and what ranks do with it; see titan.py."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import titan  # noqa: F401 (before torchtitan)  # isort: skip
import spmd_types as spmd
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common import config_utils as made
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.moe_sharding import set_moe_sharding_config

from apex_te.integrations.experts import ExpertGemm
from apex_te.integrations.torchtitan import FP8GroupedExpertsConverter

DIM, HIDDEN, EXPERTS, TOP_K, BATCH, LENGTH = 64, 128, 4, 2, 2, 24
NORMAL = partial(nn.init.normal_, std=0.1)
NAMES = ("w1_EFD", "w2_EDF", "w3_EFD")


def config(recipe=None, dims=None, ep=1):
    """Configuration of a mixture of experts, converted to FP8 for a recipe."""
    weights = {"weight": NORMAL}
    linear = partial(Linear.Config, bias=False, param_init=weights)
    experts = GroupedExperts.Config(
        dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS, param_init=dict.fromkeys(NAMES, NORMAL)
    )
    dispatcher = made.make_token_dispatcher_config(
        num_experts=EXPERTS, top_k=TOP_K, comm_backend="standard"
    )
    moe = made.make_moe_config(
        num_experts=EXPERTS,
        router=made.make_router_config(
            dim=DIM, num_experts=EXPERTS, gate_param_init=weights, top_k=TOP_K
        ),
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        shared_experts=FeedForward.Config(
            w1=linear(in_features=DIM, out_features=HIDDEN),
            w2=linear(in_features=HIDDEN, out_features=DIM),
            w3=linear(in_features=DIM, out_features=HIDDEN),
        ),
    )
    if dims is not None:
        layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
        set_moe_sharding_config(moe, enable_ep=ep > 1, enable_sp=False, expert_param_layout=layout)
    if recipe is not None:
        moe = FP8GroupedExpertsConverter.Config(recipe_name=recipe).build().convert(moe)
    return moe


def build(recipe=None, ep=1, dims=None):
    """The model, made on the meta device and initialised as torchtitan's trainer does it."""
    with torch.device("meta"):
        moe = config(recipe, dims, ep).build()
    if ep > 1:
        moe.parallelize(dims)
    moe.to_empty(device=device())
    torch.manual_seed(2)
    with torch.no_grad():
        moe.init_states(buffer_device=device())
    return moe


def device():
    """The GPU of a rank, or the CPU in a process that sees none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch(rank):
    """Tokens of a rank and the gradient of their results."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, BATCH, LENGTH, DIM, generator=generator).to(device())


@contextlib.contextmanager
def joined():
    """Context that gives a list with an item for each time that weights are joined to a copy."""
    calls, of = [], ExpertGemm._weights_and_biases
    with mock.patch.object(
        ExpertGemm, "_weights_and_biases", lambda self: calls.append(1) or of(self)
    ):
        yield calls


def run(moe, x, dy, recompute=False):
    """Output and gradient of the input; those of the parameters are in ``grad``."""
    x = x.clone().requires_grad_()
    out = checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)
    out.backward(dy)
    return out.detach(), x.grad


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def rank_parallel(rank, recipe, ep, backend, recompute):
    """Differences between two ranks, with expert parallelism or FSDP2, and one with the tokens.

    Returns the number of joined copies, the names that differ, and the state dict's shapes.
    """
    wrong = []
    with mock.patch.object(parallel_dims, "device_type", device().type), joined() as copies:
        size = distributed.get_world_size()
        dims = ParallelDims(
            dp_replicate=1,
            dp_shard=size,
            cp=1,
            tp=1,
            pp=1,
            ep=ep,
            world_size=size,
            spmd_backend=backend,
        )
        dims.build_mesh()
        set_spmd_backend(dims.spmd_backend)
        moe, alone = build(recipe, ep, dims), build(recipe)
        state = alone.state_dict()
        with torch.no_grad():
            for name, value in moe.state_dict().items():
                whole = state[name]
                value = local(value)
                if value.shape != whole.shape:
                    whole = whole.chunk(size)[rank]
                value.copy_(whole)
        experts = moe.routed_experts.inner_experts
        if backend == "partial_dtensor":  # fully_shard of torch 2.13 does not take the others
            fully_shard(experts, mesh=dims.get_mesh("efsdp" if ep > 1 else "fsdp"))
        for _ in range(2):
            moe.zero_grad()
            alone.zero_grad()
            x, dy = batch(rank)
            with get_spmd_context(parallel_dims=dims)():
                found = run(moe, x, dy, recompute)
            if ep > 1:  # an expert sees the tokens of all ranks
                everything = torch.cat([batch(other) for other in range(size)], 1)
                wanted = [each.chunk(size)[rank] for each in run(alone, *everything)]
            else:
                wanted = run(alone, x, dy)
        wrong += [
            i for i, pair in enumerate(zip(found, wanted, strict=True)) if not torch.equal(*pair)
        ]
        reference = alone.routed_experts.inner_experts
        for name in NAMES:
            grad, other = getattr(experts, name).grad, getattr(reference, name).grad
            assert isinstance(grad, DTensor) == (backend == "partial_dtensor")
            if ep == 1:
                distributed.all_reduce(other)
                other /= size
            own = other.chunk(size)[rank]
            wrong += [] if torch.equal(local(grad), own) else [name]
        return len(copies), wrong, {name: tuple(v.shape) for name, v in moe.state_dict().items()}
