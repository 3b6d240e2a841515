"""A Llama over the alias's layers beside transformers' own: training, generation and files."""

import pytest
import torch
from schemes import SCHEMES

import apex_te

pytest.importorskip("transformers")

from te_llama import TELlamaConfig, TELlamaForCausalLM, cache_for, converted
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LENGTHS = (9, 4, 6)


def plain():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2)).eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.uniform_(0.5, 1.5)
    return model


def over_alias(layout):
    reference = plain()
    model = TELlamaForCausalLM(TELlamaConfig(**SIZES, attn_input_format=layout)).eval()
    missing = model.load_state_dict(converted(reference.state_dict(), reference.config), False)
    assert missing.unexpected_keys == []
    assert all(key.endswith(("_extra_state", "inv_freq")) for key in missing.missing_keys)
    return reference, model


def prompts(side):
    """Ids and mask of prompts of several lengths, padded on a side."""
    torch.manual_seed(2)
    ids = torch.randint(2, SIZES["vocab_size"], (len(LENGTHS), max(LENGTHS)))
    place = torch.arange(max(LENGTHS))
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = place < lengths if side == "right" else place >= max(LENGTHS) - lengths
    return ids.masked_fill(~mask, 0), mask.long()


@pytest.mark.parametrize(("layout", "side"), [("bshd", "right"), ("thd", "right"), ("thd", "left")])
@torch.no_grad()
def test_logits_are_those_of_transformers(layout, side):
    reference, model = over_alias(layout)
    ids, mask = prompts(side)
    expected = reference(ids, mask).logits[mask.bool()]
    torch.testing.assert_close(model(ids, mask).logits[mask.bool()], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_it_trains(layout, scheme):
    _, model = over_alias(layout)
    ids, mask = prompts("right")
    labels = ids.masked_fill(~mask.bool(), -100)
    optimizer, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    for _ in range(12):
        with apex_te.fp8_autocast(scheme is not None, SCHEMES[scheme or "delayed"]):
            loss = model(ids, mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_layouts_train_alike():
    models = [over_alias(layout)[1] for layout in ("bshd", "thd")]
    ids, mask = prompts("right")
    labels = ids.masked_fill(~mask.bool(), -100)
    for model in models:
        model(ids, mask, labels=labels).loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("allocate", [True, False])
@pytest.mark.parametrize(("layout", "side"), [("bshd", "even"), ("thd", "even"), ("thd", "left")])
def test_generation_with_a_cache(layout, side, allocate):
    """Tokens are those of transformers, and logits of a forward over all tokens at once."""
    reference, model = over_alias(layout)
    ids, mask = prompts("left")
    if side == "even":
        ids, mask = ids[:2, -4:], mask[:2, -4:]
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": mask}
    expected = reference.generate(ids, **options)
    cache = cache_for(model.config, len(ids), 32, allocate)
    got = model.generate(
        ids, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **options
    )
    assert torch.equal(got.sequences, expected)
    lengths = mask.sum(1).tolist()
    assert list(cache.sequences.values()) == [n + 9 for n in lengths]
    with torch.no_grad():
        for row, length in enumerate(lengths):
            own = got.sequences[row : row + 1, -10 - length :]
            whole = model(own).logits[0, length - 1 : -1]
            steps = torch.stack([logits[row] for logits in got.logits])
            torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-4)
    cache.reset()
    again = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(again, expected)


def test_generation_in_fp8():
    _, model = over_alias("thd")
    ids, mask = prompts("left")
    with apex_te.fp8_autocast(fp8_recipe=SCHEMES["tensorwise"]):
        cache = cache_for(model.config, 3, 32)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=6, attention_mask=mask)
    assert out.shape == (3, max(LENGTHS) + 6)


def test_beams_reorder_the_cache():
    """Rows of the cache may be exchanged between steps, as beam search exchanges them."""
    _, model = over_alias("bshd")
    torch.manual_seed(5)
    ids, more = torch.randint(2, 64, (2, 5)), torch.randint(2, 64, (2, 1))
    with torch.no_grad():
        cache = cache_for(model.config, 2, 16)
        model(ids, past_key_values=cache)
        order = torch.tensor([1, 0])
        cache.reorder_cache(order)
        out = model(more, torch.ones(2, 6), past_key_values=cache).logits
        expected = model(torch.cat((ids[order], more), 1)).logits[:, -1:]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_files(layout, tmp_path):
    _, model = over_alias(layout)
    ids, mask = prompts("right")
    with apex_te.fp8_autocast(fp8_recipe=SCHEMES["delayed"]):
        model(ids, mask, labels=ids).loss.backward()
    model.save_pretrained(tmp_path)
    config = TELlamaConfig.from_pretrained(tmp_path)
    assert config.attn_input_format == layout
    loaded, info = TELlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids, mask).logits, model(ids, mask).logits)
