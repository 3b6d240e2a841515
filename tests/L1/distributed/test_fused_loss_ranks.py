"""Fused loss of transformers' models under DistributedDataParallel and FSDP2."""

import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from apex_te.integrations import fuse_loss
from apex_te.integrations.lazy_logits import LazyLogits

pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.append(str(Path(__file__).resolve().parents[2] / "L0" / "integrations"))

from families import IDS, build


def _wrapped(model, kind):
    """The model as ranks train it, and whether its head is left to the loss."""
    if kind == "ddp":
        return DistributedDataParallel(model), True
    for layer in model.model.layers:
        fully_shard(layer)
    if kind == "sharded head":
        fully_shard(model.lm_head)
    return fully_shard(model), kind == "root"


def _trained(rank, kind, is_first):
    """Trains three steps with and without the fused loss, on other rows on each rank."""
    ids = IDS.roll(3 * rank, 1)
    losses, weights = [], []
    for is_fused in (False, True):
        model = build("llama").train()
        if is_fused and is_first:
            fuse_loss(model, chunk_rows=8)
        run, is_lazy = _wrapped(model, kind)
        if is_fused and not is_first:
            fuse_loss(model, chunk_rows=8)
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        for _ in range(3):
            out = run(input_ids=ids, labels=ids)
            assert isinstance(out.logits, LazyLogits) == (is_fused and is_lazy)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(out.loss.detach())
        weights.append([getattr(p, "full_tensor", lambda p=p: p)().detach()
                        for p in model.parameters()])  # fmt: skip
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(weights[1], weights[0])


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["ddp", "root", "sharded head"])
def test_ranks_train_as_without_it(two_ranks, kind, is_first):
    two_ranks.run(_trained, kind, is_first)
