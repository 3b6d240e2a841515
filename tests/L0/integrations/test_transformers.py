"""from_torch on Hugging Face's own Llama and GPT-2, where transformers is installed."""

import copy

import pytest
import torch

from apex_te import fp8_autocast
from apex_te.integrations import from_torch, key_map
from apex_te.integrations.from_torch import Conv1DLinear
from apex_te.module.linear import Linear
from apex_te.recipe import DelayedScaling

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}
IDS = torch.arange(24).view(2, 12) % 40


def llama():
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def build(make):
    model = make()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, float("norm" in name or "ln_" in name), 0.1)
    return model


def run(model, ids=IDS):
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_equal_outputs_gradients_and_generated_ids(make, fuse, device):
    model, ids = build(make).to(device), IDS.to(device)
    original = copy.deepcopy(model)
    out, grads = run(original, ids)
    assert from_torch(model, fuse) is model
    actual, actual_grads = run(model, ids)
    torch.testing.assert_close(actual, out, **TOLERANCE)
    actual_grads = key_map(model).to_original(actual_grads)
    assert actual_grads.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close({key: actual_grads[key]}, {key: grad}, **TOLERANCE)
    options = {
        "attention_mask": torch.ones_like(ids[:, :4]), "max_new_tokens": 6, "do_sample": False
    }  # fmt: skip
    expected = original.eval().generate(ids[:, :4], **options)
    assert torch.equal(model.eval().generate(ids[:, :4], **options), expected)
    assert list(model.state_dict()) == list(original.state_dict())
    model.load_state_dict(original.state_dict(), strict=True)
    model.load_state_dict(key_map(model).to_fused(original.state_dict()), strict=True)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_fp8(make, fuse, device):
    model, ids = from_torch(build(make).to(device), fuse), IDS.to(device)
    out, _ = run(model, ids)
    for _ in range(2):
        with fp8_autocast(True, DelayedScaling(amax_history_len=4)):
            actual, grads = run(model, ids)
    assert not torch.equal(actual, out)
    assert (actual - out).norm() < 0.15 * out.norm()
    assert all(grad.isfinite().all() and grad.any() for grad in grads.values())


def test_every_linear_layer_of_a_block_is_converted():
    model = from_torch(build(llama))
    names = {name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, Linear)}
    assert names == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    model = from_torch(build(gpt2))
    kind = Conv1DLinear
    names = {name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, kind)}
    assert names == {"c_attn", "c_proj", "c_fc"}
