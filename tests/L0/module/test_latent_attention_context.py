"""MultiLatentAttention with sequences split over ranks that one process emulates."""

import latent_cases
import pytest
import torch
from checks import assert_same_bits, in_pairs
from emulated_ranks import EmulatedRanks, emulate
from test_context_parallel import own

import apex_te
from apex_te import InferenceParams
from apex_te.module.attention.context_parallel.split import PackedZigZag

TOKENS, BATCH = 16, 2
FREQS = (torch.rand(24, 1, 1, latent_cases.P // 2) * 3).repeat_interleave(2, -1)
STARTS = (0, 8, 24, 40)  # of packed sequences


def results(module, x, grad, call):
    module.zero_grad()
    x = x.detach().requires_grad_()
    out = module(x, **call)
    out.backward(grad)
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@in_pairs(
    layout=["sbhd", "bshd", "thd"],
    q_lora_rank=[None, latent_cases.Q],
    comm_type=["all_gather", "a2a"],
    size=[2, 4],
    mask=["causal", "no_mask", "window", "padding_causal"],
    yarn=[False, True],
)
def test_equals_one_rank(layout, q_lora_rank, comm_type, size, mask, yarn, device):
    """Positions are those of whole sequences; gradients of parameters sum up over the ranks."""
    if layout == "thd" and mask == "window" and comm_type == "all_gather":
        pytest.skip("refused by DotProductAttention, whose tests say so")
    options = {
        "qkv_format": layout, "input_layernorm": True, "device": device,
        "attn_mask_type": "causal" if mask == "window" else mask,
        "window_size": (5, 0) if mask == "window" else None,
        **(latent_cases.YARN if yarn else {}),
    }  # fmt: skip
    shapes = {"sbhd": (TOKENS, BATCH), "bshd": (BATCH, TOKENS), "thd": (STARTS[-1],)}
    x, grad = torch.randn(2, *shapes[layout], latent_cases.HIDDEN).to(device)
    call = {"rotary_pos_emb": FREQS.to(device)}
    cu = torch.tensor(STARTS, dtype=torch.int32, device=device)
    if layout == "thd":
        call |= {"cu_seqlens_q": cu, "max_seqlen_q": 16, "max_seqlen_kv": 16}
    elif "padding" in mask:
        call["attention_mask"] = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool, device=device)
        call["attention_mask"][0, ..., 11:] = True
    dim = max(layout.find("s"), 0)
    order = PackedZigZag(size, cu, STARTS[-1]) if layout == "thd" else None

    def part(whole, rank):
        if order is None:
            return own(whole, size, rank, dim)
        return order.by_rank(whole).chunk(size)[rank]

    one = results(latent_cases.build(q_lora_rank, **options), x, grad, call)
    found = []
    for recompute in (False, True):
        module = latent_cases.build(q_lora_rank, recompute_up_proj=recompute, **options)

        def run(ranks, module=module):
            module.core_attention._context = ranks
            return results(module, part(x, ranks.rank), part(grad, ranks.rank), call)

        found.append(emulate(size, comm_type, run))
    for rank, each in enumerate(found[0]):
        for got, want in zip(each[:2], one[:2], strict=True):
            torch.testing.assert_close(got, part(want, rank), rtol=1e-5, atol=1e-5)
        if device.type == "cpu":
            assert_same_bits(each, found[1][rank])
    for *parts, want in zip(*(each[2:] for each in found[0]), one[2:], strict=True):
        torch.testing.assert_close(sum(parts), want, rtol=1e-4, atol=1e-4)


def test_in_a_transformer_layer_and_with_a_cache():
    """The layer sets the ranks of its attention; a cache has whole sequences alone."""
    layer = apex_te.TransformerLayer(latent_cases.HIDDEN, 48, 4, hidden_dropout=0.0)
    layer.self_attention = module = latent_cases.build(layer_number=1)
    layer.set_context_parallel_group(None, None, None, "a2a")
    assert module.core_attention.context_ranks.comm_type == "a2a"
    with pytest.raises(ValueError, match="cp_comm_type must be one of"):
        module.set_context_parallel_group(None, None, None, "ring")
    module.core_attention._context = EmulatedRanks(2, 0, "a2a", [])
    x = torch.randn(4, BATCH, latent_cases.HIDDEN)
    message = "^MultiLatentAttention: inference_params must be None with a cp_group of 2 ranks"
    with pytest.raises(NotImplementedError, match=message):
        module(x, inference_params=InferenceParams(BATCH, 16))
