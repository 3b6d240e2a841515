"""fp8_tensors of models under FSDP2 and with experts spread over ranks: the whole model's bits."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from free_scale_cases import made as released
from on_rank import device_of, recorded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from apex_te import fp8_model_init
from apex_te.comm.collectives import ALL_GATHER
from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather
from apex_te.integrations import fp8_tensors, from_torch
from apex_te.recipe import BlockScaling, CurrentScaling

pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.append(str(Path(__file__).resolve().parents[2] / "L0" / "integrations"))

from families import IDS, build

RECIPES = {"block": BlockScaling(), "tensor": CurrentScaling()}
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "moe_intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip


def _made(name, weights, kind, fuse, device):
    held = fp8_model_init(recipe=RECIPES[weights]) if kind == "held" else contextlib.nullcontext()
    model = build(name, **SIZES)
    with held:
        from_torch(model, fuse)
    if kind == "released":  # experts, with scales that no cast would give
        torch.manual_seed(3)
        for layer in model.model.layers:
            for key in ("gate_up_proj", "down_proj"):
                count, *shape = getattr(layer.mlp.experts, key).shape
                weight, _ = released(RECIPES[weights], shape, count, torch.float32)
                setattr(layer.mlp.experts, key, weight)
    return model.to(device)


def _assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype is value.dtype, key
        assert found[key].shape == value.shape, key
        same = torch.equal(found[key].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))
        assert same, key


def _sharded(rank, name, weights, kind, fuse, shape):
    """Compares with the whole model; returns dtypes and elements of this rank's gathers."""
    device = device_of(rank)
    wanted = dict(fp8_tensors(_made(name, weights, kind, fuse, device), weights=weights))
    model = _made(name, weights, kind, fuse, device)
    if kind == "gathers in FP8":
        enable_fp8_all_gather(model, RECIPES[weights])
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if not model.config.tie_word_embeddings:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    outputs = []
    for _ in range(2):  # before the first forward, and after it
        with recorded(ALL_GATHER, lambda out, x, **_: (x.dtype, x.numel())) as gathers:
            _assert_same(dict(fp8_tensors(model, weights=weights)), wanted)
        outputs.append(model(input_ids=IDS.to(device)).logits.detach())
    assert torch.equal(*outputs)
    return gathers, {key: value.numel() for key, value in wanted.items() if "weight_s" not in key}


def check(ranks, name, weights, kind, fuse, shape=(2,)):
    found = ranks.run(_sharded, name, weights, kind, fuse, shape)
    for gathers, sizes in found:
        quantized = sum(n for key, n in sizes.items() if key.endswith("proj.weight"))
        bytes_gathered = sum(count for dtype, count in gathers if dtype is torch.uint8)
        # Each weight once, in a byte an element; a single scale is that of all ranks' rows.
        in_fp8 = weights == "block" or kind == "held"
        assert bytes_gathered == (quantized // shape[-1] if in_fp8 else 0)
        assert max(count for _, count in gathers) * shape[-1] <= 2 * 512 * 256


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("weights", RECIPES)
@pytest.mark.parametrize("kind", ["plain", "held", "gathers in FP8"])
@pytest.mark.parametrize("fuse", [False, True])
def test_fsdp(two_ranks, name, weights, kind, fuse):
    check(two_ranks, name, weights, kind, fuse)


@pytest.mark.parametrize("kind", ["plain", "held"])
def test_replicas_of_shards(four_ranks, kind):
    check(four_ranks, "llama", "block", kind, True, (2, 2))


def _uneven(rank, weights):
    """Rows that are not equally many on all ranks, or not in whole blocks."""
    sizes = {"intermediate_size": 386, "num_hidden_layers": 1, "vocab_size": 42}
    models = [from_torch(build("llama", **SIZES | sizes)) for _ in range(2)]
    wanted = dict(fp8_tensors(models[0], layout="hf", weights=weights))
    for module in (models[1].model.layers[0], models[1]):
        fully_shard(module)
    assert models[1].lm_head.weight.to_local().shape[0] == (9 if rank == 3 else 11)
    _assert_same(dict(fp8_tensors(models[1], layout="hf", weights=weights)), wanted)


@pytest.mark.parametrize("weights", RECIPES)
def test_uneven_shards(four_ranks, weights):
    four_ranks.run(_uneven, weights)


def _experts(rank, name, weights, kind, shape):
    """Compares own experts, of a mesh's dimension "ep", and the rest with the whole model."""
    from transformers.distributed.expert_parallel import MoEParamShard

    device = device_of(rank)
    held = "released" if kind == "released" else "plain"
    wanted = dict(fp8_tensors(_made(name, weights, held, True, device), weights=weights))
    model = _made(name, weights, held, True, device)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("efsdp", "ep")[-len(shape) :])
    own = mesh["ep"] if len(shape) > 1 else mesh
    if kind in ("experts", "both"):
        for layer in model.model.layers:
            for parameter in ("gate_up_proj", "down_proj"):
                style = MoEParamShard(Shard(0), shards_expert_dim=parameter == "gate_up_proj")
                style.shard_param(layer.mlp.experts, parameter, own)
    if kind != "experts":
        for layer in model.model.layers:
            if len(shape) > 1:
                fully_shard(layer.mlp.experts, mesh=mesh["efsdp"])
            fully_shard(layer)
        fully_shard(model)
    found = dict(fp8_tensors(model, weights=weights))
    if kind in ("experts", "both"):
        count, first = 4 // own.size(), own.get_local_rank() * 4 // own.size()
        mine = [f".experts.{i}." for i in range(first, first + count)]
        wanted = {
            key: value for key, value in wanted.items()
            if ".experts." not in key or any(each in key for each in mine)
        }  # fmt: skip
    _assert_same(found, wanted)
    return sum(".experts." in key for key in found)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("weights", RECIPES)
@pytest.mark.parametrize("kind", ["fsdp", "released", "experts"])
def test_experts(two_ranks, name, weights, kind):
    counts = two_ranks.run(_experts, name, weights, kind, (2,))
    assert counts == [2 * 3 * 2 * (2 if kind == "experts" else 4)] * 2


@pytest.mark.parametrize("weights", RECIPES)
def test_sharded_experts_of_ranks(four_ranks, weights):
    """FSDP2 over the ranks that have the same experts."""
    counts = four_ranks.run(_experts, "qwen3_moe", weights, "both", (2, 2))
    assert counts == [2 * 3 * 2 * 2] * 4


@pytest.mark.cuda
@pytest.mark.parametrize("weights", RECIPES)
@pytest.mark.parametrize("kind", ["plain", "held"])
def test_fsdp_on_two_gpus(two_gpus, weights, kind):
    check(two_gpus, "llama", weights, kind, True)
