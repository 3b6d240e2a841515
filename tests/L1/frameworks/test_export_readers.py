"""Exported FP8 checkpoints, read by compressed-tensors through transformers: values are ours."""

import pytest
import torch

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.integrations import export_fp8, from_torch
from apex_te.recipe import DelayedScaling

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
quantization = pytest.importorskip(
    "compressed_tensors.quantization", reason="compressed-tensors is not installed"
)
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

IDS = torch.arange(24).view(2, 12)


def build():
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    "options", [("tensor", "dynamic"), ("tensor", "static"), ("block", "dynamic")]
)
def test_decodes(options, fuse, tmp_path):
    weights, activations = options
    model = from_torch(build(), fuse)
    recipe = DelayedScaling(amax_history_len=4)
    with torch.no_grad(), fp8_autocast(False, calibrating=True, fp8_recipe=recipe):
        expected = model(IDS).logits
    flush_fp8_state()
    export_fp8(model, tmp_path, weights=weights, activations=activations)
    written = safetensors_torch.load_file(tmp_path / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(tmp_path).quantization_config
    parsed = quantization.QuantizationConfig.model_validate(config)
    assert parsed.ignore == ["lm_head"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    ).eval()
    for key, value in loaded.state_dict().items():
        if f"{key}_scale" not in written:
            continue
        scale = written[f"{key}_scale"]
        if weights == "block":
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            scale = scale[: value.shape[0], : value.shape[1]]
        assert torch.equal(value.float(), written[key].float() * scale), key
    with torch.no_grad():
        found = loaded(IDS).logits
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()
