"""Packed sequences with tokens of no sequence between them: cu_seqlens_q_padded and kv_padded."""

from __future__ import annotations

import pytest
import torch

import apex_te

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTHS, ROOMS = (3, 0, 5, 1), (4, 2, 5, 4)


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def places(rooms: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    """The places of the sequences' tokens in tensors with gaps."""
    begins = starts(rooms).tolist()
    own = [torch.arange(b, b + n) for b, n in zip(begins, lengths, strict=False)]
    return torch.cat(own)


def with_gaps(x: torch.Tensor, where: torch.Tensor, tokens: int) -> torch.Tensor:
    """``x`` at the places ``where`` of a tensor that is NaN elsewhere."""
    out = torch.full((tokens, *x.shape[1:]), float("nan"))
    out[where] = x.detach()
    return out.requires_grad_()


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("bias", ["no_bias", "alibi"])
@pytest.mark.parametrize("cross", [False, True])
def test_gaps_hold_tokens_of_no_sequence(kind: str, bias: str, cross: bool) -> None:
    torch.manual_seed(0)
    module = apex_te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type=kind)
    key_lengths, key_rooms = ((2, 1, 6, 1), (2, 3, 8, 1)) if cross else (LENGTHS, ROOMS)
    q = torch.randn(sum(LENGTHS), HEADS, SIZE, requires_grad=True)
    k = torch.randn(sum(key_lengths), GROUPS, SIZE, requires_grad=True)
    v = torch.randn(sum(key_lengths), GROUPS, SIZE, requires_grad=True)
    cu, cu_kv = starts(LENGTHS), starts(key_lengths)
    options = {"core_attention_bias_type": bias, "max_seqlen_q": 5, "max_seqlen_kv": 8}
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu_kv if cross else cu}
    expected = module(q, k, v, **given, **options)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    where, where_kv = places(ROOMS, LENGTHS), places(key_rooms, key_lengths)
    tokens, tokens_kv = sum(ROOMS) + 2, sum(key_rooms)
    tokens_kv = tokens_kv if cross else tokens
    wide = [with_gaps(q, where, tokens), with_gaps(k, where_kv, tokens_kv)]
    wide.append(with_gaps(v, where_kv, tokens_kv))
    given["cu_seqlens_q_padded"] = starts(ROOMS)
    given["cu_seqlens_kv_padded"] = starts(key_rooms) if cross else given["cu_seqlens_q_padded"]
    out = module(*wide, **given, **options)
    assert torch.equal(out[where], expected)
    gap = torch.ones(tokens, dtype=torch.bool)
    gap[where] = False
    assert not out[gap].any()
    wide_grad = torch.full_like(out, float("nan"))
    wide_grad[where] = grad
    out.backward(wide_grad)
    for x, y, at in zip(wide, (q, k, v), (where, where_kv, where_kv), strict=True):
        assert torch.equal(x.grad[at], y.grad)
        rest = torch.ones(len(x), dtype=torch.bool)
        rest[at] = False
        assert not x.grad[rest].any()


@pytest.mark.parametrize("recipe", [None, "Float8CurrentScaling"])
def test_a_layer_rotates_by_positions_within_the_sequences(recipe: str | None) -> None:
    torch.manual_seed(0)
    layer = apex_te.TransformerLayer(
        32, 64, HEADS, GROUPS, hidden_dropout=0.0, attention_dropout=0.0, layer_number=1,
        self_attn_mask_type="padding_causal", attn_input_format="thd", device="cpu",
    )  # fmt: skip
    freqs = torch.rand(16, 1, 1, SIZE // 2)
    x = torch.randn(sum(LENGTHS), 32)
    where, tokens = places(ROOMS, LENGTHS), sum(ROOMS)
    wide = torch.zeros(tokens, 32)
    wide[where] = x
    region = apex_te.fp8_autocast(
        enabled=recipe is not None,
        fp8_recipe=getattr(apex_te.recipe, recipe or "Float8CurrentScaling")(),
    )
    with region, torch.no_grad():
        expected = layer(x, cu_seqlens_q=starts(LENGTHS), rotary_pos_emb=freqs)
        out = layer(
            wide, cu_seqlens_q=starts(LENGTHS), cu_seqlens_q_padded=starts(ROOMS),
            rotary_pos_emb=freqs,
        )  # fmt: skip
    torch.testing.assert_close(out[where], expected, rtol=1e-5, atol=1e-6)


def test_padded_starts_are_checked() -> None:
    module = apex_te.DotProductAttention(2, 4, qkv_format="thd", attn_mask_type="padding")
    x, cu = torch.randn(6, 2, 4), starts((2, 3))
    match = r"cu_seqlens_q_padded must leave room for each sequence within 6 tokens"
    for rooms in ((1, 4), (2, 5)):
        with pytest.raises(ValueError, match=match):
            module(x, x, x, cu_seqlens_q=cu, cu_seqlens_q_padded=starts(rooms))
    with pytest.raises(TypeError, match="cu_seqlens_q_padded must be an int32 tensor"):
        module(x, x, x, cu_seqlens_q=cu, cu_seqlens_q_padded=starts((3, 3)).long())
    with pytest.raises(ValueError, match="cu_seqlens_q_padded must have the shape"):
        module(x, x, x, cu_seqlens_q=cu, cu_seqlens_q_padded=starts((3, 1, 2)))
    y = torch.randn(3, 1, 2, 4)
    with pytest.raises(ValueError, match="must be None with qkv_format 'sbhd'"):
        module(y, y, y, None, "sbhd", cu, cu, cu_seqlens_q_padded=cu)
