"""A tiny language model, its data, and the losses of training it without FP8."""

import copy

import torch

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 4, 20
# bf16 products on a CPU are a hundred times slower than fp32 ones, so fp32 is what FP8 is
# compared with.
TOLERANCE = 0.02


def tiny_llama(**options):
    """Returns a Llama of two layers with the same initial values at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    values = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "attn_implementation": "eager", "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**values, **options}))


def sequences(number=STEPS * BATCH):
    """Returns sequences that count up by a step of 1 to 5, which a model can learn."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(VOCABULARY, (number, 1), generator=generator)
    step = torch.randint(1, 6, (number, 1), generator=generator)
    return (start + step * torch.arange(LENGTH)) % VOCABULARY


def batches():
    """Yields a batch for each of ``STEPS`` steps."""
    yield from sequences().view(STEPS, BATCH, LENGTH)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def plain_losses(model):
    """Trains a copy of a language model in fp32 and returns the loss of each step."""
    model = copy.deepcopy(model)
    optimizer, losses = optimizer_of(model), []
    for batch in batches():
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_losses(losses, plain):
    """Checks that FP8 learned what fp32 did: the last losses are near, and not equal."""
    assert len(losses) == len(plain)
    assert plain[-1] < 0.95 * plain[0], "the plain model did not learn"
    mean, expected = sum(losses[-5:]) / 5, sum(plain[-5:]) / 5
    assert abs(mean - expected) <= TOLERANCE * expected, (losses, plain)
    assert losses != plain, "no product ran in FP8"
