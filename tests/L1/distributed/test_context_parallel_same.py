"""Context-parallel ranks whose calls of attention differ: an error on all of them, at once."""

import pytest
import torch
from on_rank import device_of, told
from torch import distributed

import apex_te
from apex_te.module.attention.context_parallel import ranks as context_ranks

HEADS, SIZE, TOKENS = 4, 8, 8
# What the last rank has otherwise: options of the module, of the call, or of the tensors.
DIFFERENT = {
    "cp_comm_type": ({"cp_comm_type": "a2a"}, {}, {}),
    "attn_mask_type": ({"attn_mask_type": "no_mask"}, {}, {}),
    "window_size": ({}, {"window_size": (3, 0)}, {}),
    "return_max_logit": ({"return_max_logit": True}, {}, {}),
    "query_layer shape": ({}, {}, {"tokens": TOKENS + 2}),
    "key_layer shape": ({"num_gqa_groups": 2}, {}, {"groups": 2}),
    "dtype": ({}, {}, {"dtype": torch.float64}),
    "qkv_format": ({"qkv_format": "bshd"}, {}, {}),
    "gradients": ({}, {}, {"requires_grad": False}),
    "bias": ({}, {"core_attention_bias_type": "alibi"}, {}),
}


def _call(group, comm_type, device, build, call, tokens=TOKENS, groups=HEADS, **options):
    options = {"device": device, "requires_grad": True} | options
    build = {"cp_comm_type": comm_type} | build
    module = apex_te.DotProductAttention(HEADS, SIZE, cp_group=group, **build)
    tensors = [torch.randn(tokens, tokens, n, SIZE, **options) for n in (HEADS, groups, groups)]
    return module(*tensors, **call)


def _differing(rank, what, comm_type):
    """The message; a call that is the same everywhere then runs."""
    device, size = device_of(rank), distributed.get_world_size()
    group = distributed.new_group()
    if comm_type == "a2a+p2p":
        pairs = [distributed.new_group([r, r + 1]) for r in (0, 2)]
        group = [pairs[rank // 2], [distributed.new_group([r, r + 2]) for r in (0, 1)][rank % 2]]
    build, call, options = DIFFERENT[what] if rank == size - 1 else ({}, {}, {})
    message = told(_call, group, comm_type, device, build, call, **options)
    _call(group, comm_type, device, {}, {})
    return message


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_told(two_ranks, what):
    comm_type = "a2a" if what == "bias" else "all_gather"  # which does not take ALiBi
    first, second = two_ranks.run(_differing, what, comm_type)
    assert first == second
    start = "RankMismatchError: DotProductAttention: the ranks of cp_group (ranks 0, 1) must have"
    assert first.startswith(start), first
    assert f"{what} (got " in first


@pytest.mark.parametrize("what", ["query_layer shape", "dtype"])
def test_ranks_of_two_groups_are_told(four_ranks, what):
    found = four_ranks.run(_differing, what, "a2a+p2p")
    for message in found:
        assert message.startswith("RankMismatchError: DotProductAttention: "), message
        assert f"{what} (got " in message


def _compared(rank):
    """How many calls of each kind have been compared."""
    group, device, calls = distributed.new_group(), device_of(rank), []
    check = context_ranks.check_same

    def counted(*args):
        calls.append(args)
        check(*args)

    context_ranks.check_same = counted
    try:
        found = []
        for tokens in (8, 8, 10, 8, *range(12, 40, 2)):
            _call(group, "a2a", device, {}, {}, tokens=tokens)
            found.append(len(calls))
        module = apex_te.DotProductAttention(HEADS, SIZE, cp_group=distributed.new_group())
        x = torch.randn(4, 1, HEADS, SIZE, device=device)
        module.explain(x, x, x)
        torch._dynamo.reset()
        torch.compile(module, backend="aot_eager", fullgraph=True)(x, x, x)
        return [*found, len(calls)]
    finally:
        context_ranks.check_same = check


def test_calls_are_compared_once_and_the_first_ones_only(two_ranks):
    assert two_ranks.run(_compared) == [[1, 1, 2, 2, *range(3, 9), *([8] * 9)]] * 2
