"""MultiLatentAttention with heads split over ranks against the whole module on one rank."""

import latent_cases
import pytest
import torch
from checks import in_pairs, sqnr
from rank_sets import ranks_of
from shards import gathered, part_of, rows, step, summed

import apex_te
from apex_te import InferenceParams
from apex_te.recipe import CurrentScaling

TOKENS, BATCH = 8, 2
FREQS = (torch.rand(16, 1, 1, latent_cases.P // 2) * 3).repeat_interleave(2, -1)


def _both(rank, q_lora_rank, sequence_parallel, **options):
    """The whole module, and this rank's shard of it with the same values."""
    group = torch.distributed.group.WORLD
    ranks = torch.distributed.get_world_size()
    whole = latent_cases.build(q_lora_rank, **options)
    shard = latent_cases.build(
        q_lora_rank, set_parallel_mode=True, tp_size=ranks, sequence_parallel=sequence_parallel,
        **options,
    )  # fmt: skip
    shard.set_tensor_parallel_group(group)
    with torch.no_grad():
        for key, parameter in shard.named_parameters():
            full = whole.get_parameter(key)
            parameter.copy_(part_of(key, full, rank, ranks, False)(parameter))
    return whole, shard


def _train(rank, q_lora_rank, sequence_parallel, recompute, bias, in_fp8):
    ranks = torch.distributed.get_world_size()
    whole, shard = _both(
        rank, q_lora_rank, sequence_parallel, input_layernorm=True, bias=bias,
        recompute_up_proj=recompute,
    )  # fmt: skip
    recipe = CurrentScaling() if in_fp8 else None
    x, dy = torch.randn(2, TOKENS, BATCH, latent_cases.HIDDEN)
    freqs = FREQS.clone()
    own = (rows(x, rank, ranks), rows(dy, rank, ranks)) if sequence_parallel else (x, dy)
    want = step(whole, x, dy, recipe, rotary_pos_emb=freqs)
    got = step(shard, *own, recipe, rotary_pos_emb=freqs)
    parts = [gathered(t) if sequence_parallel else t for t in got[:2]]
    found = [sqnr(a, b) for a, b in zip(want[:2], parts, strict=True)]
    for key, parameter in shard.named_parameters():
        grad = got[2][key]
        if getattr(parameter, "sequence_parallel", False):
            grad = summed(grad)
        found.append(sqnr(part_of(key, want[2][key], rank, ranks, False)(parameter), grad))
    return found


@in_pairs(
    q_lora_rank=[None, latent_cases.Q],
    sequence_parallel=[False, True],
    recompute=[False, True],
    bias=[False, True],
    in_fp8=[False, True],
    size=[2, 4],
)
def test_split_heads(all_ranks, q_lora_rank, sequence_parallel, recompute, bias, in_fp8, size):
    """fp32 by its rounding; in FP8 both are noisy, and so is the difference."""
    ranks = ranks_of(all_ranks, size, "gloo")
    for found in ranks.run(_train, q_lora_rank, sequence_parallel, recompute, bias, in_fp8):
        assert min(found) > (11 if in_fp8 else 100), found


@torch.no_grad()
def _generate(rank, q_lora_rank, sequence_parallel):
    ranks = torch.distributed.get_world_size()
    whole, shard = _both(rank, q_lora_rank, sequence_parallel, layer_number=1)
    x = torch.randn(TOKENS, BATCH, latent_cases.HIDDEN)
    want, params, found = whole(x), InferenceParams(BATCH, TOKENS), []
    for part in x.split([4, 2, 2]):
        own = rows(part, rank, ranks) if sequence_parallel else part
        out = shard.eval()(own, inference_params=params)
        found.append(gathered(out) if sequence_parallel else out)
        params.sequence_len_offset += len(part)
    return sqnr(want, torch.cat(found))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("q_lora_rank", [None, latent_cases.Q])
def test_cached_latents(two_ranks, q_lora_rank, sequence_parallel):
    assert min(two_ranks.run(_generate, q_lora_rank, sequence_parallel)) > 100


def _groups(rank):
    _, shard = _both(rank, latent_cases.Q, False)
    shard.set_tensor_parallel_group(None)
    with pytest.raises(ValueError, match="set_tensor_parallel_group must be called"):
        shard(torch.randn(TOKENS, BATCH, latent_cases.HIDDEN))
    one = torch.distributed.new_group([0])
    if rank == 0:
        with pytest.raises(
            ValueError, match="MultiLatentAttention: tp_group must have the 2 ranks"
        ):
            shard.set_tensor_parallel_group(one)
    return [name for name, p in shard.named_parameters() if p.tensor_model_parallel]


def test_groups_and_tags(two_ranks):
    split = ["linear_q_up_proj.weight", "linear_kv_up_proj.weight", "linear_proj.weight"]
    assert two_ranks.run(_groups) == [split] * 2


def _split_tokens(rank, comm_type, sequence_parallel, recompute, in_fp8):
    """Ratios to the noise-free results of the same tensor-parallel ranks with whole sequences."""
    pairs = [torch.distributed.new_group([r, r + 1]) for r in (0, 2)]
    others = [torch.distributed.new_group([r, r + 2]) for r in (0, 1)]
    tensor, context = pairs[rank // 2], others[rank % 2]
    options = {
        "input_layernorm": True, "recompute_up_proj": recompute, "set_parallel_mode": True,
        "tp_group": tensor, "sequence_parallel": sequence_parallel,
    }  # fmt: skip
    whole, split = (latent_cases.build(latent_cases.Q, **options) for _ in range(2))
    split.set_context_parallel_group(context, None, None, comm_type)
    recipe = CurrentScaling() if in_fp8 else None
    x, dy = torch.randn(2, TOKENS, BATCH, latent_cases.HIDDEN)

    def own(t):
        return rows(t, rank % 2, 2) if sequence_parallel else t

    def part(t):
        return own(apex_te.split_for_context_parallel(t, context, 0))

    want = step(whole, own(x), own(dy), recipe, rotary_pos_emb=FREQS)
    got = step(split, part(x), part(dy), recipe, rotary_pos_emb=FREQS)
    found = []
    for a, b in zip(want[:2], got[:2], strict=True):
        if sequence_parallel:
            parts = [torch.empty_like(a) for _ in range(2)]
            torch.distributed.all_gather(parts, a.contiguous(), group=tensor)
            a = torch.cat(parts)
        found.append(sqnr(part(a), b))
    for key, grad in got[2].items():
        torch.distributed.all_reduce(grad, group=context)
        found.append(sqnr(want[2][key], grad))
    return found


@in_pairs(
    comm_type=["all_gather", "a2a", "p2p"],
    sequence_parallel=[False, True],
    recompute=[False, True],
    in_fp8=[False, True],
)
def test_split_heads_and_tokens(four_ranks, comm_type, sequence_parallel, recompute, in_fp8):
    """Two ranks of heads by two of tokens; FP8 by its noise."""
    for found in four_ranks.run(_split_tokens, comm_type, sequence_parallel, recompute, in_fp8):
        assert min(found) > (11 if in_fp8 else 100), found
