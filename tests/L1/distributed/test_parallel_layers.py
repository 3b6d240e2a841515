"""Attention and whole layers split over ranks against the same on one rank."""

import pytest
import torch
from rank_sets import ranks_of
from shards import gathered, part_of, rows, summed

import apex_te
from apex_te import fp8_autocast
from apex_te.distributed import CudaRNGStatesTracker
from apex_te.recipe import CurrentScaling, DelayedScaling

HIDDEN, FFN, HEADS, TOKENS, BATCH = 64, 96, 4, 16, 2
NAME = "model-parallel-rng"

LAYERS = {
    "gpt": {},
    "llama": {
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "bias": False,
        "num_gqa_groups": 2,
        "fuse_qkv_params": True,
    },
    "separate": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "qk-norm": {"qk_norm_type": "RMSNorm"},
    "post-norm": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
    "parallel": {"parallel_attention_mlp": True},
    "decoder": {"layer_type": "decoder"},
    "alibi": {},
    "sinks": {"softmax_type": "learnable", "num_gqa_groups": 2},
}


def _layer(options, **parallel):
    torch.manual_seed(11)
    return apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, **options, **parallel
    )


def _fused_part(full, rank, ranks, groups):
    """Rows of a fused projection that is not interleaved: queries, keys, values, each split."""
    size = HIDDEN // HEADS
    sections = full.split([HEADS * size, groups * size, groups * size])
    return torch.cat([section.chunk(ranks)[rank] for section in sections])


def _copy(whole, shard, options, rank, ranks):
    gated = options.get("activation") == "swiglu"
    flat = options.get("qkv_weight_interleaved") is False

    def part(key, full, parameter):
        if flat and "layernorm_qkv." in key and "layer_norm" not in key.split(".")[-1]:
            return _fused_part(full, rank, ranks, options.get("num_gqa_groups", HEADS))
        if key.endswith("softmax_offset"):
            return full.chunk(ranks)[rank]
        return part_of(key.rsplit(".", 1)[-1], full, rank, ranks, gated)(parameter)

    with torch.no_grad():
        for key, parameter in shard.named_parameters():
            parameter.copy_(part(key, whole.get_parameter(key), parameter))
    return part


def _run(rank, name, sequence_parallel, recipe):
    ranks = torch.distributed.get_world_size()
    options = LAYERS[name]
    group = torch.distributed.group.WORLD
    whole = _layer(options)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    shard = _layer(
        options, set_parallel_mode=True, tp_size=ranks, sequence_parallel=sequence_parallel
    )
    shard.set_tensor_parallel_group(group)
    part = _copy(whole, shard, options, rank, ranks)
    generator = torch.Generator().manual_seed(4)
    results = []
    for _ in range(3 if recipe else 1):
        x, dy, memory = (torch.randn(TOKENS, BATCH, HIDDEN, generator=generator) for _ in range(3))
        results = []
        for module, split in ((whole, False), (shard, sequence_parallel)):
            own, grad, enc = (rows(t, rank, ranks) if split else t for t in (x, dy, memory))
            own = own.clone().requires_grad_()
            module.zero_grad()
            more = {"encoder_output": enc} if name == "decoder" else {}
            if name == "alibi":  # each rank has the slopes of its own heads
                more = {"core_attention_bias_type": "alibi"}
            with fp8_autocast(recipe is not None, recipe):
                out = module(own, **more)
            out.backward(grad)
            results.append([gathered(t) if split else t for t in (out.detach(), own.grad)])
    found = {}

    def note(what, actual, expected):
        error = (actual - expected).square().mean()
        power = expected.square().mean().clamp(min=1e-2)  # a key's bias has no gradient
        found[what] = -10 * torch.log10(error / power).item() if error > 0 else 200.0

    for what, expected, actual in zip(("output", "input"), *results, strict=True):
        note(what, actual, expected)
    for key, parameter in shard.named_parameters():
        grad = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            grad = summed(grad)
        note(key, grad, part(key, whole.get_parameter(key).grad, parameter))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(two_ranks, name, sequence_parallel):
    for found in two_ranks.run(_run, name, sequence_parallel, None):
        assert min(found.values()) > 100, found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), CurrentScaling()])
def test_layer_in_fp8(two_ranks, recipe, sequence_parallel):
    """Both are noisy; so is the difference, by about 3 dB more."""
    for found in two_ranks.run(_run, "llama", sequence_parallel, recipe):
        assert found["output"] > 25, found
        assert min(found.values()) > 12, found


def test_four_ranks(all_ranks):
    for found in ranks_of(all_ranks, 4, "gloo").run(_run, "gpt", True, None):
        assert min(found.values()) > 100, found


def _dropout(rank, sequence_parallel):
    tracker = CudaRNGStatesTracker()
    tracker.add(NAME, 100 + rank)
    torch.manual_seed(1)
    layer = apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.5, attention_dropout=0.0, set_parallel_mode=True,
        tp_group=torch.distributed.group.WORLD, sequence_parallel=sequence_parallel,
        get_rng_state_tracker=lambda: tracker,
    )  # fmt: skip
    torch.manual_seed(2)
    x = torch.zeros(TOKENS, BATCH, HIDDEN)
    with torch.no_grad():
        layer.layernorm_mlp.fc2_bias.fill_(1.0)
        layer.self_attention.proj.weight.zero_()
        layer.layernorm_mlp.fc2_weight.zero_()
    out = layer(rows(x, rank, 2) if sequence_parallel else x)
    return (out == 0).detach(), layer.self_attention.layernorm_qkv.query_weight.detach()


def test_dropout_masks_and_new_weights(two_ranks):
    """Rows of all ranks: one mask. Rows of one: its own. Split weights differ from rank to rank."""
    (first, weight), (second, other) = two_ranks.run(_dropout, False)
    assert torch.equal(first, second)
    assert 0.4 < first.float().mean() < 0.6
    assert not torch.equal(weight, other)
    (first, _), (second, _) = two_ranks.run(_dropout, True)
    assert not torch.equal(first, second)
