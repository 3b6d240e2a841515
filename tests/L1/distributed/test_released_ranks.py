"""A released FP8 checkpoint sharded by FSDP2: losses, gradients and weights of one rank."""

import copy

import pytest
import torch
from on_rank import device_of
from released_files import IDS, release
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from apex_te import fp8_autocast, from_fp8_checkpoint
from apex_te.fp8.parameter.parameter import FP8Parameter

pytest.importorskip("transformers", "5.23")


def _loss(model, ids):
    ids = ids.to(model.lm_head.weight.device)
    with fp8_autocast(fp8_recipe=model.hf_quantizer.recipe):
        return model(input_ids=ids, labels=ids).loss


def _train(rank, folder):
    device = device_of(rank)
    where = {} if device.type == "cpu" else {"device_map": {"": device}}
    one = from_fp8_checkpoint(folder, dtype=torch.float32, **where)
    many = copy.deepcopy(one)
    for layer in many.model.layers:
        fully_shard(layer)
    fully_shard(many)
    held = {n for n, p in one.named_parameters() if type(p) is FP8Parameter}
    shards = {n: p for n, p in many.named_parameters() if isinstance(p, DTensor)}
    assert held <= shards.keys()
    assert all(type(shards[name]._local_tensor) is FP8Parameter for name in held)
    parts = [_loss(one, IDS[i : i + 1]) for i in range(2)]
    loss = _loss(many, IDS[rank : rank + 1])
    assert torch.equal(loss, parts[rank])
    loss.backward()
    (sum(parts) / 2).backward()
    for name, parameter in one.named_parameters():
        found = shards[name].grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(NotImplementedError, match="FP8 weights must be whole to be written"):
        many.save_pretrained(folder)
    for name in held:  # whole again, byte by byte
        local = shards[name]._local_tensor.codes()[0].view(torch.uint8).contiguous()
        rows = [torch.empty_like(local) for _ in range(2)]
        distributed.all_gather(rows, local)
        whole = dict(one.named_parameters())[name].codes()[0]
        assert torch.equal(torch.cat(rows), whole.view(torch.uint8)), name


@pytest.mark.parametrize("model", ["fsdp", "fsdp experts"])
def test_fsdp_trains_as_one_rank(two_ranks, model, tmp_path):
    release(model, "fp8", tmp_path)
    two_ranks.run(_train, str(tmp_path))


@pytest.mark.cuda
@pytest.mark.parametrize("model", ["fsdp", "fsdp experts"])
def test_fsdp_trains_as_one_rank_on_gpus(two_gpus, model, tmp_path):
    release(model, "fp8", tmp_path)
    two_gpus.run(_train, str(tmp_path))
