"""LayerNormMLP(checkpoint=True) over tensor-parallel ranks: bitwise what it gives without."""

import pytest
import torch
import torch.distributed as dist
from on_rank import all_equal

from apex_te import LayerNormMLP, fp8_autocast, recipe


def train(rank, scheme, sequence_parallel, recompute):
    torch.manual_seed(1)
    module = LayerNormMLP(
        32, 64, activation="swiglu", set_parallel_mode=True, tp_group=dist.group.WORLD,
        tp_size=dist.get_world_size(), sequence_parallel=sequence_parallel, checkpoint=recompute,
        device="cpu",
    )  # fmt: skip
    seen = []
    for step in range(3):
        torch.manual_seed(10 * step + (rank if sequence_parallel else 0))
        x = torch.randn(16, 2, 32, requires_grad=True)
        region = fp8_autocast(scheme is not None, getattr(recipe, scheme or "DelayedScaling")())
        with region:
            out = module(x)
        out.square().mean().backward()
        seen += [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        module.zero_grad()
    return seen


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("scheme", [None, "DelayedScaling", "CurrentScaling", "BlockScaling"])
def test_recompute_is_bitwise(two_ranks, scheme, sequence_parallel):
    plain = two_ranks.run(train, scheme, sequence_parallel, False)
    again = two_ranks.run(train, scheme, sequence_parallel, True)
    assert all(map(all_equal, plain, again))
