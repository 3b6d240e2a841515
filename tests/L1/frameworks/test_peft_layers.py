"""PEFT over layers of Transformer Engine and over converted ones: train, merge, files, generate."""

import copy

import pytest
import torch
from pins import pin
from tiny import LENGTH, VOCABULARY, batches, check_losses, sequences, tiny_llama

pytest.importorskip("peft", minversion=pin("peft"))
pytest.importorskip("transformers", minversion=pin("transformers"))

import peft
import transformer_engine.pytorch as te
from peft.import_utils import is_te_available, is_te_pytorch_available
from peft.tuners.lora.te import TeLinear
from transformer_engine.common import recipe
from transformers import OPTConfig, OPTForCausalLM

from apex_te.integrations import from_torch
from apex_te.module.linear import Linear
from apex_te.ops.gemm_common import fp8_gemm_count

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]


def tiny_opt():
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=64, ffn_dim=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=64, dropout=0.0,
        attn_implementation="eager", pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return OPTForCausalLM(config)


def with_te_layers(model):
    """Puts ``te.Linear`` with the same values in the place of each linear layer but the head."""
    for name, module in list(model.named_modules()):
        if type(module) is not torch.nn.Linear or name == "lm_head":
            continue
        has_bias = module.bias is not None
        layer = te.Linear(module.in_features, module.out_features, bias=has_bias)
        with torch.no_grad():
            layer.weight.copy_(module.weight)
            if has_bias:
                layer.bias.copy_(module.bias)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return model


def train(model, fp8=True):
    chosen = recipe.DelayedScaling(amax_history_len=16)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=3e-3), []
    model.train()
    for batch in batches():
        with te.fp8_autocast(enabled=fp8, fp8_recipe=chosen):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def logits(model):
    with torch.no_grad():
        return model(input_ids=sequences(2)).logits


def lora(**options):
    values = {"r": 16, "lora_alpha": 64, "modules_to_save": ["lm_head"], "target_modules": TARGETS}
    return peft.LoraConfig(**{**values, **options})


METHODS = {
    "lora": lora(),
    "rslora": lora(use_rslora=True, lora_alpha=16),
    "dora": lora(use_dora=True),
    "vera": peft.VeraConfig(r=16, target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"]),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"],
        modules_to_save=["lm_head"],
    ),
}  # fmt: skip


def test_availability():
    assert is_te_available()
    assert is_te_pytorch_available()


# The three tests that PEFT has for Transformer Engine, on a CPU: LoRA layers over te.Linear train,
# their adapter is saved and loaded, and merging them is refused.
@pytest.mark.parametrize("names", [["q_proj", "v_proj"], ["fc1", "fc2"], "all-linear"])
def test_opt_with_te_layers_trains(names):
    adapter = lora(target_modules=["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"])
    adapter.target_modules = names if names != "all-linear" else adapter.target_modules
    torch.manual_seed(1)
    plain = train(peft.get_peft_model(tiny_opt(), copy.deepcopy(adapter)), fp8=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(with_te_layers(tiny_opt()), adapter)
    layers = [m for m in model.modules() if isinstance(m, TeLinear)]
    assert len(layers) == 2 * len(adapter.target_modules)
    before = fp8_gemm_count()
    check_losses(train(model), plain)
    assert fp8_gemm_count() > before
    assert all(m.base_layer.weight.grad is None for m in layers)


def test_an_adapter_over_te_layers_is_saved_and_loaded(tmp_path):
    model = peft.get_peft_model(with_te_layers(tiny_opt()), lora(target_modules=["q_proj", "fc1"]))
    start = logits(model)
    train(model)
    expected = logits(model)
    assert not torch.allclose(expected, start, atol=1e-2)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(with_te_layers(tiny_opt()), tmp_path).eval()
    assert torch.equal(logits(loaded), expected)
    ids = sequences(2)[:, :4]
    made = [m.generate(input_ids=ids, max_new_tokens=6, do_sample=False) for m in (model, loaded)]
    assert torch.equal(*made)


def test_merging_over_te_layers_is_refused_by_peft():
    model = peft.get_peft_model(with_te_layers(tiny_opt()), lora(target_modules=["q_proj"]))
    with pytest.raises(NotImplementedError, match="TeLinear does not support merge"):
        model.merge_and_unload()


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_fused_layers_get_adapters(kind):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layer = (
                te.LayerNormLinear(64, 64)
                if kind == "LayerNormLinear"
                else te.LayerNormMLP(64, 128)
            )
            if kind == "LayerNormMLP":  # which has neither, here and in Transformer Engine
                layer.in_features = layer.out_features = 64
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    model = peft.get_peft_model(Model(), peft.LoraConfig(r=4, target_modules=["layer"]))
    assert isinstance(model.base_model.model.layer, TeLinear)
    with te.fp8_autocast(fp8_recipe=recipe.DelayedScaling()):
        y = model(torch.randn(16, 64))
    y.square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert grads
    assert all(grad is not None for grad in grads)


@pytest.mark.parametrize("method", METHODS)
def test_converted_models_train_and_merge(method, tmp_path):
    def adapted(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, copy.deepcopy(METHODS[method]))

    plain = train(adapted(tiny_llama()), fp8=False)
    model = adapted(from_torch(tiny_llama()))
    assert any(isinstance(m, Linear) for m in model.modules())
    losses = train(model)
    if plain[-1] < 0.95 * plain[0]:
        check_losses(losses, plain)
    else:  # methods of few parameters learn little in so few steps
        assert sum(losses[-5:]) == pytest.approx(sum(plain[-5:]), rel=0.02)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(from_torch(tiny_llama()), tmp_path).eval()
    assert torch.allclose(logits(again), expected, atol=1e-6)
    merged = model.merge_and_unload()
    assert not [
        m for m in merged.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)
    ]
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    ids = sequences(2)[:, :4]
    tokens = merged.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, again.generate(input_ids=ids, max_new_tokens=6, do_sample=False))
    assert tokens.shape[1] <= LENGTH
