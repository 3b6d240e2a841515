"""fp8_tensors and export_fp8 of models with tensor parallelism: the whole model's bits."""

import sys
from pathlib import Path

import pytest
import torch
from free_scale_cases import made as released
from on_rank import device_of, recorded
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import apex_te
from apex_te import distributed as te_distributed
from apex_te import fp8_autocast
from apex_te.comm.agreement import RankMismatchError
from apex_te.comm.collectives import ALL_GATHER
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations import export_fp8, fp8_tensors, from_torch
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling

pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.append(str(Path(__file__).resolve().parents[2] / "L0" / "integrations"))

from families import build

METHODS = {"block": "fp8", "channel": "compressed-tensors", "tensor": "fp8"}
RECIPES = {"block": BlockScaling(), "channel": RowwiseScaling(), "tensor": CurrentScaling()}
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 64,
}  # fmt: skip
WIDE = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def _whole(kind, weights, fuse, device, **sizes):
    model = from_torch(build("llama", **SIZES | sizes), fuse)
    if kind == "released":  # scales that no cast would give
        torch.manual_seed(3)
        for name, parameter in list(model.named_parameters()):
            owner, _, own = name.rpartition(".")
            if parameter.dim() == 2 and isinstance(model.get_submodule(owner), apex_te.Linear):
                weight, _ = released(RECIPES[weights], parameter.shape, None, torch.float32)
                model.get_submodule(owner).register_parameter(own, weight)
    return model.to(device)


def _cut(weight, dim, rank, ranks):
    """A rank's part of a weight, with its scales."""
    if type(weight) is not FP8Parameter:
        return weight.detach().chunk(ranks, dim)[rank].clone()
    codes, scale = weight.codes()
    if scale.dim() == 2 and not (dim and scale.shape[1] == 1):
        scale = scale.chunk(ranks, dim)[rank]
    part = codes.view(torch.uint8).chunk(ranks, dim)[rank].contiguous().view(codes.dtype)
    return FP8Parameter.from_codes(part, scale.contiguous(), weight.recipe, weight.dtype)


def _split(model, group):
    """Replaces the linear layers by this rank's parts."""
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    for name, layer in list(model.named_modules()):
        last = name.rpartition(".")[2]
        if last not in COLUMN + ROW:
            continue
        mode = "column" if last in COLUMN else "row"
        part = apex_te.Linear(
            layer.in_features, layer.out_features, bias=layer.bias is not None,
            parallel_mode=mode, tp_group=group, device=layer.weight.device,
        )  # fmt: skip
        weight = _cut(layer.weight, int(mode == "row"), rank, ranks)
        part.register_parameter("weight", torch.nn.Parameter(weight))
        model.set_submodule(name, part)
    return model


def _assert_same(found, wanted):
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert found[key].dtype is value.dtype, key
        assert found[key].shape == value.shape, key
        same = torch.equal(found[key].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))
        assert same, key


def _parallel_modes(rank, kind, weights, sharded, folder):
    """Returns dtypes and elements of the gathers, and the number of the matrices' elements."""
    from safetensors.torch import load_file

    device = device_of(rank)
    sizes = WIDE if sharded else {}  # for whole blocks on each rank
    if kind == "edges":  # of parts that end inside a block
        sizes = {"intermediate_size": 384}
    whole = _whole(kind, weights, False, device, **sizes)
    options = {"quant_method": METHODS[weights], "weights": weights}
    wanted = dict(fp8_tensors(whole, **options))
    ranks = distributed.get_world_size()
    mesh = init_device_mesh(device.type, (2, ranks // 2), mesh_dim_names=("tp", "dp"))
    model = _split(_whole(kind, weights, False, device, **sizes), mesh["tp"].get_group())
    if sharded:
        fully_shard(model.model.layers[0], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    with recorded(ALL_GATHER, lambda out, x, **_: (x.dtype, x.numel())) as gathers:
        _assert_same(dict(fp8_tensors(model, **options)), wanted)
    export_fp8(model, f"{folder}/parts", max_shard_size="200KB", **options)
    if rank == 0:
        export_fp8(whole, f"{folder}/whole", max_shard_size="200KB", **options)
        files = [sorted(Path(folder, each).iterdir()) for each in ("parts", "whole")]
        assert [file.name for file in files[0]] == [file.name for file in files[1]]
        assert len(files[0]) > 4
        for ours, theirs in zip(*files, strict=True):
            if ours.suffix == ".safetensors":
                _assert_same(load_file(ours), load_file(theirs))
            else:
                assert ours.read_text() == theirs.read_text()
    else:
        assert Path(folder, "parts", "config.json").exists()  # before any rank goes on
    return gathers, sum(v.numel() for k, v in wanted.items() if k.endswith("proj.weight"))


def check(ranks, kind, weights, sharded, folder):
    for gathers, elements in ranks.run(_parallel_modes, kind, weights, sharded, str(folder)):
        in_fp8 = sum(count for dtype, count in gathers if dtype is torch.uint8)
        if not sharded and kind != "edges":  # each weight once, in a byte an element
            if weights == "channel":  # of row-parallel layers the rows' parts have other scales
                assert 0 < in_fp8 < elements // 2
            else:
                assert in_fp8 == (elements // 2 if weights == "block" else 0)


# FP8 parts with single scales are cast again.
@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("plain", "block"),
        ("released", "block"),
        ("plain", "tensor"),
        ("edges", "block"),
        ("plain", "channel"),
        ("edges", "channel"),
    ],
)
def test_parallel_modes(two_ranks, kind, weights, tmp_path):
    check(two_ranks, kind, weights, False, tmp_path)


@pytest.mark.parametrize("kind", ["plain", "released"])
def test_parallel_modes_under_fsdp(four_ranks, kind, tmp_path):
    check(four_ranks, kind, "block", True, tmp_path)


def _joined_parts(rank, weights):
    """Joined layers of a rank's sizes: q, k and v, and gate and up, each split by itself."""
    device = device_of(rank)
    whole = _whole("plain", weights, True, device)
    ranks = distributed.get_world_size()
    halves = {"intermediate_size": 256, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = _whole("plain", weights, True, device, **halves)
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        modes = {"qkv_proj": ("parallel_mode", "column"), "o_proj": ("parallel_mode", "row"),
                 "mlp": ("set_parallel_mode", True)}  # fmt: skip
        if last not in modes:
            continue
        setattr(module, *modes[last])
        module.tp_size = ranks
        module.set_tensor_parallel_group(distributed.group.WORLD)
        with torch.no_grad():
            for key, parameter in module.named_parameters():
                full = whole.get_parameter(f"{name}.{key}")
                if key in ("fc2_weight", "weight") and last != "qkv_proj":
                    full = full.chunk(ranks, 1)[rank]
                elif not key.startswith("layer_norm"):
                    parts = 3 if last == "qkv_proj" else 2
                    full = torch.cat([each.chunk(ranks)[rank] for each in full.chunk(parts)])
                parameter.copy_(full)
    for key, parameter in model.named_parameters():
        if parameter.shape == whole.get_parameter(key).shape:
            parameter.data.copy_(whole.get_parameter(key))
    options = {"quant_method": METHODS[weights], "weights": weights}
    _assert_same(dict(fp8_tensors(model, **options)), dict(fp8_tensors(whole, **options)))


@pytest.mark.parametrize("weights", RECIPES)
def test_joined_parts(two_ranks, weights):
    two_ranks.run(_joined_parts, weights)


def _styles(rank, weights, fuse):
    """Parameters that are DTensors of the suite's styles."""
    device = device_of(rank)
    options = {"quant_method": METHODS[weights], "weights": weights}
    wanted = dict(fp8_tensors(_whole("plain", weights, fuse, device), **options))
    model = _whole("plain", weights, fuse, device)
    mesh = init_device_mesh(device.type, (2,))
    styles = dict.fromkeys(COLUMN, te_distributed.ColumnParallel())
    styles |= dict.fromkeys(ROW, te_distributed.RowParallel())
    layers = {f"model.layers.0.*.{name}": style for name, style in styles.items()}
    if fuse:
        layers = {"model.layers.0.mlp": te_distributed.LayerParallel()}
        layers["model.layers.0.self_attn.o_proj"] = te_distributed.RowParallel()
    parallelize_module(model, mesh, layers)
    assert sum(hasattr(p, "device_mesh") for p in model.parameters()) > 2
    _assert_same(dict(fp8_tensors(model, **options)), wanted)


@pytest.mark.parametrize("weights", RECIPES)
@pytest.mark.parametrize("fuse", [False, True])
def test_styles(two_ranks, weights, fuse):
    two_ranks.run(_styles, weights, fuse)


def _failing_writes(rank, folder):
    """The first rank cannot make the folder, or write the second file; no rank waits for it."""
    import safetensors.torch as safetensors

    device = device_of(rank)
    model = _whole("plain", "block", False, device)
    fully_shard(model, mesh=init_device_mesh(device.type, (2,)))
    Path(folder, "file").touch()
    save, calls = safetensors.save_file, []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no space left")
        return save(*args, **kwargs)

    for name, error in (("file", "FileExistsError"), ("full", "RuntimeError: no space left")):
        safetensors.save_file = fail if name == "full" else save
        expected = (OSError, RuntimeError) if rank == 0 else RankMismatchError
        try:
            with pytest.raises(expected) as found:
                export_fp8(model, f"{folder}/{name}", max_shard_size="200KB")
        finally:
            safetensors.save_file = save
        if rank:
            assert "export_fp8: writing must succeed on all of the ranks" in str(found.value)
            assert f"got {error}" in str(found.value)
            assert "on rank 0" in str(found.value)
        else:
            assert type(found.value) is not RankMismatchError
    export_fp8(model, f"{folder}/full", max_shard_size="200KB")
    assert Path(folder, "full", "config.json").exists()


def test_failing_writes(two_ranks, tmp_path):
    two_ranks.run(_failing_writes, str(tmp_path))


def _static(rank):
    device = device_of(rank)
    recipe = DelayedScaling(amax_history_len=4)
    group = distributed.group.WORLD
    model = _split(_whole("plain", "tensor", False, device), group)
    for layer in model.modules():
        if isinstance(layer, apex_te.Linear):
            torch.manual_seed(rank)
            x = torch.randn(16, layer.in_features, device=device)
            with fp8_autocast(fp8_recipe=recipe):
                layer(x).sum().backward()
    apex_te.flush_fp8_state()
    found = dict(fp8_tensors(model, weights="tensor", activations="static"))
    scales = {key: value for key, value in found.items() if key.endswith("input_scale")}
    assert len(scales) == len(COLUMN + ROW)
    for name, layer in model.named_modules():
        if isinstance(layer, apex_te.Linear):
            own = layer.fp8_state.scale_inv_fwd[:1].clone()
            distributed.all_reduce(own, distributed.ReduceOp.MAX)
            assert torch.equal(scales[f"{name}.input_scale"], own)
            assert own > 0


def test_static(two_ranks):
    two_ranks.run(_static)


@pytest.mark.cuda
def test_parallel_modes_on_two_gpus(two_gpus, tmp_path):
    check(two_gpus, "released", "block", False, tmp_path)
