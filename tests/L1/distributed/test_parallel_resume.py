"""A split layer and experts with a fused optimizer: saved, loaded and trained on."""

import torch
from on_rank import device_of, load, save
from torch import distributed

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, init_fp8_state
from apex_te.distributed import get_state_dict, set_state_dict
from apex_te.optimizers import FusedAdam
from apex_te.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)


def _made(rank, seed, device):
    torch.manual_seed(seed + rank)
    options = {"params_dtype": torch.bfloat16, "device": device}
    layer = apex_te.TransformerLayer(
        128, 256, 8, activation="swiglu", normalization="RMSNorm", num_gqa_groups=4,
        fuse_qkv_params=True, qkv_weight_interleaved=False, hidden_dropout=0.0,
        attention_dropout=0.0, set_parallel_mode=True, tp_group=distributed.group.WORLD,
        sequence_parallel=True, **options,
    )  # fmt: skip
    experts = apex_te.GroupedLinear(2, 128, 128, bias=False, **options)
    model = torch.nn.ModuleDict({"layer": layer, "experts": experts})
    return model, FusedAdam(model.parameters(), lr=1e-3, master_weights=True)


def _losses(model, optimizer, steps, rank):
    found = []
    device = next(model.parameters()).device
    for seed in steps:
        x = torch.randn(32, 2, 128, generator=torch.Generator().manual_seed(seed))
        x = x.chunk(2)[rank].to(device, torch.bfloat16)
        optimizer.zero_grad()
        with fp8_autocast(True, RECIPE):
            y = model["layer"](x).reshape(-1, 128)
            loss = model["experts"](y, [16, 16]).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):  # of each rank's own rows
                distributed.all_reduce(parameter.grad)
        optimizer.step()
        found.append(loss.item())
    return found


def _resumed(rank, path):
    group, device = distributed.group.WORLD, device_of(rank)
    model, optimizer = _made(rank, 1, device)
    _losses(model, optimizer, range(2), rank)
    flush_fp8_state()
    saved = [p.detach().clone() for p in model.parameters()]
    save(path, model, optimizer, get_state_dict, expert_group=group)
    expected = _losses(model, optimizer, range(2, 5), rank)
    model, optimizer = _made(rank, 7, device)
    init_fp8_state(model, RECIPE)
    load(path, model, optimizer, get_state_dict, set_state_dict, expert_group=group)
    for before, parameter in zip(saved, model.parameters(), strict=True):
        assert torch.equal(before, parameter)
    return expected, _losses(model, optimizer, range(2, 5), rank)


def test_resumes(each_two, tmp_path):
    for expected, found in each_two.run(_resumed, str(tmp_path)):
        assert found == expected
