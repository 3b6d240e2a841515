"""Models of transformers under ``batch_invariant``: generation and training have equal bits."""

import pytest
import torch
from checks import assert_same_bits

import apex_te
from apex_te import batch_invariant, fp8_autocast

transformers = pytest.importorskip("transformers")
TOKENS = 40


def small(kind, device):
    config = {
        "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa",
    }  # fmt: skip
    torch.manual_seed(0)
    made = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
    }[kind]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return made[0](made[1](**config)).to(device, dtype)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("recipe", [None, "blockwise"])
def test_steps_with_a_cache_are_the_training_forward(kind, fuse, recipe, device):
    if recipe and device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block-scaled GEMMs need sm_90")
    model = apex_te.from_torch(small(kind, device), fuse=fuse)
    model.set_attn_implementation("apex_te")
    ids = torch.randint(96, (3, TOKENS), device=device)
    head = model.lm_head.weight
    with batch_invariant(), fp8_autocast(recipe or "blockwise", enabled=recipe is not None):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        log_p = apex_te.linear_log_probs(hidden[:, :-1], head, ids[:, 1:])
        with torch.no_grad():
            alone = model.model(input_ids=ids[1:2], use_cache=False).last_hidden_state
            assert_same_bits(alone, hidden[1:2])
            # Padded behind by other sequences.
            mask = torch.ones_like(ids)
            mask[0, 11:] = 0
            padded = model.model(input_ids=ids, attention_mask=mask, use_cache=False)
            assert_same_bits(padded.last_hidden_state[1:], hidden[1:])
            assert_same_bits(padded.last_hidden_state[0, :11], hidden[0, :11])
            cache = transformers.DynamicCache(config=model.config)
            for begin, end in ((0, 33), (33, 34), (34, 35), (35, TOKENS)):
                out = model.model(
                    input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True
                ).last_hidden_state
                assert_same_bits(out, hidden[:, begin:end])
                if end < TOKENS:
                    last = apex_te.linear_log_probs(out[:, -1], head, ids[:, end])
                    assert_same_bits(last, log_p[:, end - 1].contiguous())


def test_it_is_sdpa_without_the_mode(device):
    plain = small("llama", device)
    model = apex_te.from_torch(small("llama", device))
    model.set_attn_implementation("apex_te")
    ids = torch.randint(96, (2, 12), device=device)
    found = model(ids).logits
    torch.testing.assert_close(found, plain(ids).logits, rtol=2e-2, atol=2e-2)
    found.float().sum().backward()
    with batch_invariant():
        own = model(ids).logits
        torch.testing.assert_close(own, found, rtol=2e-2, atol=2e-2)
        model.zero_grad()
        own.float().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        model.config.attention_dropout = 0.1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(NotImplementedError, match="LlamaAttention: dropout must be 0"):
            model.train()(ids)
