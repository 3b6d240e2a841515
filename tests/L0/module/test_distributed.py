"""Two processes over gloo: DDP with default arguments, amaxes reduced over ranks."""

import os

import pytest
import torch
import torch.multiprocessing as mp

from apex_te import Linear, flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.state import TENSORS, nonfinite_count
from apex_te.recipe import DelayedScaling

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs torch.distributed"
)


def _worker(rank, path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(16, 32), torch.nn.ReLU(), Linear(32, 16))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    recipe = DelayedScaling(amax_history_len=4)
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(4):
        x = torch.randn(8, 16, generator=generator)
        x[0, 0] = 10.0 * (rank + 1) + step
        optimizer.zero_grad()
        with fp8_autocast(True, recipe):
            loss = ddp(x).square().mean()
        loss.backward()
        optimizer.step()
    local = model[0].fp8_state.amax_history_fwd[0, 0].item()
    flush_fp8_state()
    state = [getattr(m.fp8_state, name).clone() for m in model[::2] for name in TENSORS]
    with fp8_autocast(True, recipe):  # NaN on one rank: seen and skipped by both
        model(torch.full((1, 16), float("nan") if rank else 1.0))
    flush_fp8_state()
    kept = model[0].fp8_state.scale_fwd[0].item()
    alone = Linear(16, 16)
    with fp8_autocast(True, DelayedScaling(reduce_amax=False)):
        alone(torch.full((1, 16), 2.0 + rank))
    flush_fp8_state()
    torch.save(
        {
            "local": local,
            "state": state,
            "weights": [p.detach() for p in model.parameters()],
            "kept": kept,
            "nonfinite": nonfinite_count().item(),
            "alone": alone.fp8_state.scale_fwd[0].item(),
        },
        f"{path}.{rank}",
    )
    torch.distributed.barrier()
    # One run in some 25 ended with SIGABRT ("terminate called without an active exception"), cause
    # not found. A crash before this line still fails the test; what runs at exit is not covered.
    os._exit(0)


@pytest.mark.long
def test_ddp_scales_are_equal_over_ranks(tmp_path):
    path = os.fspath(tmp_path / "store")
    mp.spawn(_worker, (path,), nprocs=2)
    a, b = (torch.load(f"{path}.{rank}", weights_only=True) for rank in range(2))
    assert (a["local"], b["local"]) == (13.0, 23.0)  # rank-local until the update
    for x, y in zip(a["state"] + a["weights"], b["state"] + b["weights"], strict=True):
        assert torch.equal(x, y)
    scale = a["state"][0][0].item()
    assert scale == pytest.approx(448 / 23)
    assert a["kept"] == b["kept"] == scale
    assert a["nonfinite"] == b["nonfinite"] > 0
    assert (a["alone"], b["alone"]) == (224.0, pytest.approx(448 / 3))
