"""The alias's InferenceParams beside forwards of whole sequences."""

from collections import OrderedDict

import pytest
import torch

from apex_te.integrations.transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
)
from apex_te.integrations.transformer_engine.pytorch.transformer import TransformerLayer

HEADS, GROUPS, SIZE = 4, 2, 8


def layer(layout):
    torch.manual_seed(1)
    made = TransformerLayer(
        HEADS * SIZE, 64, HEADS, GROUPS, layer_number=1, attn_input_format=layout, device="cpu"
    )
    return made.eval()


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("allocate", [False, True])
@pytest.mark.parametrize("announced", [False, True])
@torch.no_grad()
def test_both_ways_of_counting(layout, allocate, announced):
    """By ``sequence_len_offset``, as Megatron does, and by ``pre_step``."""
    model, time = layer(layout), layout.index("s")
    x, angles = torch.randn(6, 6, HEADS * SIZE), torch.rand(16, 1, 1, SIZE)
    expected = model(x, rotary_pos_emb=angles)
    params = InferenceParams(6, 8, GROUPS, SIZE, torch.float32)
    if allocate:
        params.allocate_memory(1)
    begin, out = 0, []
    for count in (3, 1, 2):
        if announced:
            params.pre_step(OrderedDict((n, count) for n in range(6)))
            assert params.get_seqlens_pre_step().tolist() == [begin] * 6
        part = x.narrow(time, begin, count)
        out.append(model(part, None, rotary_pos_emb=angles, inference_params=params))
        begin += count
        if not announced:
            params.sequence_len_offset = begin
    torch.testing.assert_close(torch.cat(out, time), expected, rtol=1e-5, atol=1e-6)
    keys, values = params.cache_manager.cache[1]
    assert keys.shape == values.shape == (6, 8, GROUPS, SIZE)


@torch.no_grad()
def test_memory_of_another_dtype_holds_rounded_values():
    model = layer("bshd")
    params = InferenceParams(2, 8, GROUPS, SIZE, torch.bfloat16)
    params.allocate_memory(1)
    params.pre_step({"a": 4, "b": 4})
    x = torch.randn(2, 4, HEADS * SIZE)
    out = model(x, inference_params=params)
    assert params.cache_manager.cache[1][0].dtype is torch.bfloat16
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@torch.no_grad()
def test_attention_alone_caches_and_attends(layout):
    module = DotProductAttention(
        HEADS, SIZE, GROUPS, qkv_format=layout, attn_mask_type="padding_causal", layer_number=3
    )
    params = InferenceParams(2, 8, GROUPS, SIZE, torch.float32, qkv_format=layout, max_ctx_len=8)
    tokens = [[torch.randn(n, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)] for n in (5, 3)]
    whole = DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="bshd")
    expected = [whole(*(x[None] for x in each))[0] for each in tokens]
    begins = [0, 0]
    for counts in ((4, 1), (1, 2)):
        params.pre_step(OrderedDict(enumerate(counts)))
        parts = []
        for which in range(3):
            own = zip(tokens, begins, counts, strict=True)
            rows = [each[which][begin : begin + n] for each, begin, n in own]
            if layout == "thd":
                parts.append(torch.cat(rows))
                continue
            rows = [torch.nn.functional.pad(r, (0, 0, 0, 0, 0, max(counts) - len(r))) for r in rows]
            parts.append(torch.stack(rows, 1 if layout == "sbhd" else 0))
        out = module(*parts, inference_params=params)
        if layout == "thd":
            found = out.split(counts)
        else:
            found = [row[:n] for row, n in zip(out.unbind(layout.index("b")), counts, strict=True)]
        for row, (begin, n) in enumerate(zip(begins, counts, strict=True)):
            want = expected[row][begin : begin + n]
            torch.testing.assert_close(found[row], want, rtol=1e-5, atol=1e-6)
            begins[row] += n
    assert [*params.cache_manager.cache] == [3]


@torch.no_grad()
def test_a_step_returns_the_memory():
    params = InferenceParams(3, 8, GROUPS, SIZE, torch.float32, head_dim_v=4)
    params.allocate_memory(1)
    with pytest.raises(ValueError, match="pre_step must be called before step"):
        params.step(1, torch.zeros(1), torch.zeros(1), "thd")
    params.pre_step({"a": 2, "b": 1})
    k, v = torch.randn(3, GROUPS, SIZE), torch.randn(3, GROUPS, 4)
    keys, values, cu_q, cu_kv, longest, layout = params.step(1, k, v, "thd")
    assert torch.equal(keys[0, :2], k[:2])
    assert torch.equal(values[1, :1], v[2:])
    assert (cu_q.tolist(), cu_kv.tolist(), longest, layout) == (
        [0, 2, 3],
        [0, 2, 3],
        8,
        "thd_2bshd",
    )
    params.pre_step({"b": 1})
    keys, _, cu_q, cu_kv, _, layout = params.step(1, k[None, :1], v[None, :1], "bshd")
    assert torch.equal(keys[0, :2], torch.stack((k[2], k[0])))
    assert (cu_q.tolist(), cu_kv.tolist(), layout) == ([0, 1], [0, 2], "bshd")
    assert (params.batch_size, params.get_seqlens_pre_step().tolist()) == (1, [1, 0, 0])
    with pytest.raises(ValueError, match="head_dim_k and dtype must be given for allocate_memory"):
        InferenceParams(3, 8).allocate_memory(1)
