"""Who owns main_grad under DistributedDataParallel and fully_shard; errors where nobody does."""

from contextlib import nullcontext

import pytest
import torch
from main_grad_models import model_of, with_main_grads
from on_rank import device_of, told
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from apex_te import fp8_autocast
from apex_te.distributed.main_grad import reduce_main_grads
from apex_te.recipe import DelayedScaling

OWNER = "ValueError: fuse_wgrad_accumulation: fuse_wgrad_accumulation must be False under Dist"


def _in_ddp(rank, case):
    """The first backward under DistributedDataParallel, with and without an owner of main_grad."""
    device = device_of(rank)
    ids = [rank] if device.type == "cuda" else None
    model = with_main_grads(model_of("linear" if case != "layer" else "layer", device))
    weights = {k: p for k, p in model.named_parameters() if p.dim() == 2}
    options, recipe = {}, DelayedScaling(amax_history_len=2) if case == "fp8" else None
    if case == "flag":
        for p in weights.values():
            p.grad_added_to_main_grad = False
    elif case == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(weights))
    elif case == "unused":
        options["find_unused_parameters"] = True
    ddp = DistributedDataParallel(model, device_ids=ids, **options)
    x = torch.full((4, 2, 32), 1.0 + rank, device=device, requires_grad=True)

    class Recomputed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, use_reentrant):
            return torch_checkpoint(self.inner, x, use_reentrant=use_reentrant)

    def run():
        with fp8_autocast(recipe is not None, recipe):
            if case in ("reentrant", "recomputed"):
                return DistributedDataParallel(Recomputed(), device_ids=ids)(x, case == "reentrant")
            if case == "module":  # nothing that DDP would wait for
                return model(x)
            return ddp(x)

    with ddp.no_sync() if case == "no_sync" else nullcontext():
        error = told(lambda: run().sum().backward())
    if error != "nothing was raised":
        return error
    ddp(x.detach()).sum().backward() if case != "module" else run().sum().backward()
    reduce_main_grads(weights.values())
    return {k: getattr(p, "main_grad", p.grad).cpu() for k, p in model.named_parameters()}


@pytest.mark.parametrize(
    "case", ["plain", "layer", "fp8", "unused", "no_sync", "reentrant", "recomputed"]
)
def test_ddp_without_an_owner(two_ranks, case):
    for message in two_ranks.run(_in_ddp, case):
        assert isinstance(message, str), "nothing was raised"
        assert message.startswith(OWNER), message
        assert "apex_te.distributed.reduce_main_grads" in message


@pytest.mark.parametrize("case", ["flag", "ignored", "module"])
def test_ddp_with_an_owner(two_ranks, case):
    first, second = two_ranks.run(_in_ddp, case)
    for key, value in first.items():
        assert isinstance(first, dict)
        if key.endswith("weight") or case != "module":
            assert value.abs().max() > 0
            assert torch.equal(value, second[key]), key


def _sharded(rank, owned):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    model = with_main_grads(model_of("linear", "cpu"))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    buffers = {}
    if owned:
        for i in (0, 2):

            def give(linear, _, i=i):
                weight = linear.weight
                buffers.setdefault(i, torch.zeros(weight.shape))
                weight.get_main_grad = lambda: buffers[i]

            model[i].register_forward_pre_hook(give)
    x = torch.ones(4, 2, 32)
    error = told(lambda: model(x).sum().backward())
    if not owned:
        return error
    return [buffer.abs().max().item() for buffer in buffers.values()]


def test_fully_shard(two_ranks):
    for message in two_ranks.run(_sharded, False):
        assert "weight.main_grad must be a preallocated tensor" in message
        assert "under fully_shard" in message
    for found in two_ranks.run(_sharded, True):
        assert len(found) == 2
        assert min(found) > 0
