"""InferenceParams.pre_step: sequences of several lengths that begin and end while generating."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

import apex_te
from apex_te.module.attention.inference_params import InferenceParams

HIDDEN, HEADS, GROUPS = 32, 4, 2
FREQS = torch.rand(32, 1, 1, 4) * 3


def layers(layout: str, kind: str = "causal", **kwargs) -> torch.nn.ModuleList:
    torch.manual_seed(3)
    made = [
        apex_te.TransformerLayer(
            HIDDEN, 64, HEADS, GROUPS, hidden_dropout=0.0, attention_dropout=0.0,
            layer_number=number, self_attn_mask_type=kind, attn_input_format=layout,
            device="cpu", **kwargs,
        )
        for number in (1, 2)
    ]  # fmt: skip
    return torch.nn.ModuleList(made).eval()


def run(model: torch.nn.ModuleList, x: torch.Tensor, **kwargs) -> torch.Tensor:
    for layer in model:
        x = layer(x, rotary_pos_emb=FREQS, **kwargs)
    return x


def batched(parts: list[torch.Tensor], layout: str) -> torch.Tensor:
    """Joins the sequences' new tokens as the layout has it, with sevens behind shorter ones."""
    if layout == "thd":
        return torch.cat(parts)
    longest = max(len(part) for part in parts)
    rows = [
        torch.nn.functional.pad(part, (0, 0, 0, longest - len(part)), value=7.0) for part in parts
    ]
    return torch.stack(rows, 0 if layout == "bshd" else 1)


def split(out: torch.Tensor, counts: list[int], layout: str) -> list[torch.Tensor]:
    if layout == "thd":
        return list(out.split(counts))
    rows = out.unbind(0 if layout == "bshd" else 1)
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


@pytest.mark.parametrize("kind", ["causal", "padding_causal"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("interleaved", [True, False])
@torch.no_grad()
def test_steps_equal_a_forward_of_the_whole_sequences(
    layout: str, kind: str, interleaved: bool
) -> None:
    options = {"fuse_qkv_params": True, "qkv_weight_interleaved": interleaved}
    model = layers(layout, kind, **options)
    whole = layers("sbhd", "causal", **options)
    torch.manual_seed(1)
    texts = {name: torch.randn(12, HIDDEN) for name in "abcd"}
    expected = {name: run(whole, x[:, None])[:, 0] for name, x in texts.items()}
    params, at = InferenceParams(3, 12), dict.fromkeys(texts, 0)
    steps = (
        {"a": 4, "b": 4}, {"a": 1, "b": 1}, {"a": 1, "b": 3}, {"b": 1, "c": 5},
        {"c": 2, "b": 1, "d": 1}, {"d": 3}, {"d": 1},
    )  # fmt: skip
    for step in steps:
        params.pre_step(OrderedDict(step))
        parts = [texts[name][at[name] : at[name] + count] for name, count in step.items()]
        out = run(model, batched(parts, layout), inference_params=params)
        counts = list(step.values())
        for name, count, got in zip(step, counts, split(out, counts, layout), strict=True):
            want = expected[name][at[name] : at[name] + count]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            at[name] += count
        assert list(params.sequences.items()) == [(name, at[name]) for name in step]


@torch.no_grad()
def test_even_steps_equal_the_offset_bitwise() -> None:
    model = layers("bshd")
    x = torch.randn(2, 6, HIDDEN)
    by_offset, by_step = InferenceParams(2, 6), InferenceParams(2, 6)
    for begin, end in ((0, 4), (4, 5), (5, 6)):
        by_step.pre_step({0: end - begin, 1: end - begin})
        one = run(model, x[:, begin:end], inference_params=by_offset)
        two = run(model, x[:, begin:end], inference_params=by_step)
        by_offset.sequence_len_offset += end - begin
        assert torch.equal(one, two)
    by_step.reset()
    assert not by_step.sequences
    assert by_step.step_lengths is None


@torch.no_grad()
def test_steps_are_checked() -> None:
    params = InferenceParams(2, 8)
    with pytest.raises(ValueError, match=r"step_dict must have 1 to max_batch_size = 2 sequences"):
        params.pre_step({0: 1, 1: 1, 2: 1})
    with pytest.raises(ValueError, match="must add at least 1 token"):
        params.pre_step({0: 0})
    with pytest.raises(ValueError, match=r"max_sequence_length = 8, got 9"):
        params.pre_step({0: 9})
    with pytest.raises(TypeError, match="step_dict must have ints, got float"):
        params.pre_step({0: 1.0})
    params.pre_step({0: 3, 1: 2})
    with pytest.raises(ValueError, match=r"announced, \[2, 3\], got \[2, 2\]"):
        run(layers("bshd"), torch.randn(2, 2, HIDDEN), inference_params=params)
    with pytest.raises(ValueError, match=r"at most max_batch_size = 2, got \[3, 3\]"):
        run(layers("bshd"), torch.randn(3, 3, HIDDEN), inference_params=params)
    with pytest.raises(ValueError, match=r"announced, \[5\], got \[4\]"):
        run(layers("thd"), torch.randn(4, HIDDEN), inference_params=params)
    with pytest.raises(ValueError, match="attn_mask_type must not be 'arbitrary' after"):
        run(layers("bshd", "arbitrary"), torch.randn(2, 3, HIDDEN), inference_params=params)
    with pytest.raises(ValueError, match="rotary_pos_emb must have angles for 3 positions, got 2"):
        layers("bshd")[0](
            torch.randn(2, 3, HIDDEN), inference_params=params, rotary_pos_emb=FREQS[:2]
        )


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_evaluation_needs_no_no_grad(layout: str, announced: bool) -> None:
    """In evaluation mode gradients may be recorded; a backward through the cache is refused."""
    model, x = layers(layout), torch.randn(2, 2, HIDDEN)
    outs = []
    for grad in (True, False):
        params = InferenceParams(2, 4)
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                if announced:
                    params.pre_step({0: 2, 1: 2})
                outs.append(run(model, x, inference_params=params))
                params.sequence_len_offset += 2
        keys, values = params.key_value_memory_dict[1]
        assert not keys.requires_grad
        assert not values.requires_grad
    for with_grad, without in zip(outs[:2], outs[2:], strict=True):
        assert torch.equal(with_grad, without)
    with pytest.raises(RuntimeError, match="inference_params must be None for a backward"):
        outs[1].sum().backward()
    with pytest.raises(ValueError, match=r"training mode without torch\.no_grad"):
        run(model.train(), x, inference_params=InferenceParams(2, 4))
