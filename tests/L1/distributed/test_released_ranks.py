"""A released FP8 checkpoint sharded by FSDP2: losses, gradients and weights of one rank."""

import copy
from pathlib import Path

import pytest
import torch
from on_rank import device_of
from released_files import IDS, assert_same_tensors, read, release
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from apex_te import export_fp8, fp8_autocast, from_fp8_checkpoint
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
    _assert_files_of_one_rank(rank, many, one, folder)
    for name in sorted(held):  # whole again, byte by byte; in one order on all ranks
        local = shards[name]._local_tensor.codes()[0].view(torch.uint8).contiguous()
        rows = [torch.empty_like(local) for _ in range(2)]
        distributed.all_gather(rows, local)
        whole = dict(one.named_parameters())[name].codes()[0]
        assert torch.equal(torch.cat(rows), whole.view(torch.uint8)), name


def _assert_files_of_one_rank(rank, many, one, folder):
    """Files in the checkpoint's layout have the bytes of one rank's, and tensors of the release."""
    many.save_pretrained(f"{folder}/saved", is_main_process=rank == 0)
    export_fp8(many, f"{folder}/many", layout="file", max_shard_size="100KB")
    if rank:
        assert Path(folder, "many", "config.json").exists()  # before any rank goes on
        return
    export_fp8(one, f"{folder}/one", layout="file", max_shard_size="100KB")
    ours, theirs = (sorted(Path(folder, each).iterdir()) for each in ("many", "one"))
    assert [file.name for file in ours] == [file.name for file in theirs]
    assert len(ours) > 4
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(ours, theirs, strict=True))
    released = read(Path(folder))
    for each in ("many", "saved"):
        assert_same_tensors(read(Path(folder, each)), released)


def _experts(rank, folder):
    """Experts that are spread over ranks, and the rest of the model by FSDP2."""
    from transformers.distributed.expert_parallel import MoEParamShard

    device = device_of(rank)
    one = from_fp8_checkpoint(folder, dtype=torch.float32).to(device)
    many = copy.deepcopy(one)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    for layer in many.model.layers:
        for parameter in ("gate_up_proj", "down_proj"):
            style = MoEParamShard(Shard(0), shards_expert_dim=parameter == "gate_up_proj")
            style.shard_param(layer.mlp.experts, parameter, mesh["ep"])
        fully_shard(layer.mlp.experts, mesh=mesh["efsdp"])
        fully_shard(layer, mesh=mesh["efsdp"])
    fully_shard(many, mesh=mesh["efsdp"])
    _assert_files_of_one_rank(rank, many, one, folder)


def test_files_of_sharded_experts(four_ranks, tmp_path):
    release("fsdp experts", "fp8", tmp_path)
    four_ranks.run(_experts, str(tmp_path))


@pytest.mark.parametrize("model", ["fsdp", "fsdp experts"])
def test_fsdp_trains_as_one_rank(two_ranks, model, tmp_path):
    release(model, "fp8", tmp_path)
    two_ranks.run(_train, str(tmp_path))


@pytest.mark.cuda
@pytest.mark.parametrize("model", ["fsdp", "fsdp experts"])
def test_fsdp_trains_as_one_rank_on_gpus(two_gpus, model, tmp_path):
    release(model, "fp8", tmp_path)
    two_gpus.run(_train, str(tmp_path))
