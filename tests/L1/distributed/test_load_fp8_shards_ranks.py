"""A released FP8 checkpoint of which each rank reads its own rows and experts."""

from pathlib import Path

import pytest
import torch
from on_rank import device_of
from released_files import IDS, assert_same_tensors, read, release
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from apex_te import export_fp8, fp8_autocast, from_fp8_checkpoint
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations import fp8_tensors, load_fp8_shards

pytest.importorskip("transformers", "5.23")


def _recorded_bytes(monkeypatch):
    """Bytes of FP8 codes that are read, whole tensors or slices."""
    from apex_te.integrations.checkpoints import shards

    counts, read_rows = [], shards._Files.read

    def counted(self, key, rows=slice(None)):
        found = read_rows(self, key, rows)
        counts.append(found.nbytes if found.dtype is torch.float8_e4m3fn else 0)
        return found

    monkeypatch.setattr(shards._Files, "read", counted)
    return counts


def _divided(rank, folder, fuse, experts):
    """Loads by parts; returns the bytes of codes read, and those of the release."""
    from transformers.distributed.expert_parallel import MoEParamShard

    device = device_of(rank)
    ranks = distributed.get_world_size()
    shape = (ranks // 2, 2) if experts else (ranks,)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "ep")[: len(shape)])
    model = from_fp8_checkpoint(folder, dtype=torch.float32, fuse=fuse, device_map="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    for layer in model.model.layers:
        if experts:
            for name in ("gate_up_proj", "down_proj"):
                style = MoEParamShard(Shard(0), shards_expert_dim=name == "gate_up_proj")
                style.shard_param(layer.mlp.experts, name, mesh["ep"])
            fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device=device)
    with pytest.MonkeyPatch.context() as patch:
        counts = _recorded_bytes(patch)
        load_fp8_shards(model)
    released = read(Path(folder))
    export_fp8(model, f"{folder}/written", layout="file")
    if rank == 0:
        assert_same_tensors(read(Path(folder, "written")), released)
    codes = {k: v.numel() for k, v in released.items() if v.dtype is torch.float8_e4m3fn}
    held = [p for p in model.parameters() if type(p.to_local()) is FP8Parameter]
    assert sum(p.numel() for p in held) == sum(codes.values())
    if experts:  # whose products in FP8 need them on one rank
        given = dict(fp8_tensors(model))
        own = {key for key in codes if ".experts." in key and key in given}
        assert len(own) * 2 == sum(".experts." in key for key in codes)
        assert all(torch.equal(given[k].cpu().view(torch.uint8), released[k].view(torch.uint8))
                   for k in own)  # fmt: skip
    else:
        whole = from_fp8_checkpoint(folder, dtype=torch.float32, fuse=fuse).to(device)
        with torch.no_grad(), fp8_autocast(fp8_recipe=model.hf_quantizer.recipe):
            assert torch.equal(*(each(IDS.to(device)).logits for each in (model, whole)))
    return sum(counts), codes


def check(ranks, model, layout, fuse, experts, folder):
    release(model, layout, folder, max_shard_size="300KB")
    for read_bytes, codes in ranks.run(_divided, str(folder), fuse, experts):
        of_experts = sum(n for key, n in codes.items() if ".experts." in key)
        if experts:  # stacks are read expert by expert, and other rows by FSDP2's ranks
            assert read_bytes == of_experts // 4 + (sum(codes.values()) - of_experts) // 2
        else:
            assert read_bytes == sum(codes.values()) // 2


CASES = [
    ("fsdp", "fp8", False), ("fsdp", "ct block", True), ("fsdp", "fp8 tensor", False),
    ("fsdp experts", "fp8 bytes", False), ("fsdp convolutions", "fp8", False),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout", "fuse"), CASES)
def test_rows_of_ranks(two_ranks, model, layout, fuse, tmp_path):
    check(two_ranks, model, layout, fuse, False, tmp_path)


def test_experts_of_ranks(four_ranks, tmp_path):
    check(four_ranks, "fsdp experts", "fp8", False, True, tmp_path)


@pytest.mark.cuda
@pytest.mark.parametrize(("model", "layout", "fuse"), CASES)
def test_rows_of_gpus(two_gpus, model, layout, fuse, tmp_path):
    check(two_gpus, model, layout, fuse, False, tmp_path)
