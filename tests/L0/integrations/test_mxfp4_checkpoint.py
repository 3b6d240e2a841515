"""gpt-oss in MXFP4: held in FP8 with the same values, trained, written and read again."""

import copy
import json

import pytest
import torch
from released_files import IDS, LLAMA, read, safetensors_torch, transformers
from test_fp8_checkpoint import fp8_weights, load, logits, loss_of

from apex_te import conversion_summary, export_fp8, fp8_autocast
from apex_te.integrations.checkpoints.mxfp4 import in_blocks, unpacked
from apex_te.optimizers import FusedAdam
from apex_te.recipe import BlockScaling, CurrentScaling
from tests.checks import codes, sqnr

pytest.importorskip("transformers", "5.23")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

SIZES = LLAMA | {
    "hidden_size": 160, "intermediate_size": 96, "head_dim": 40, "num_local_experts": 4,
    "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2,
}  # fmt: skip


def release(folder, exponents=(118, 126)):
    """Writes random weights as OpenAI's files have them; returns the model of transformers' values.

    Scales of 32 have these exponents, biased by 127; a row's first group is zeros, of any scale.
    """
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(folder)
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        count, inner, outer = tensors.pop(key).shape
        blocks = torch.randint(0, 256, (count, outer, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(*exponents, blocks.shape[:-1], dtype=torch.uint8)
        blocks[:, 3, 0], scales[:, 3, 0] = 0, 250
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        values = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(key).data.copy_(values)
    safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("fuse", [False, True], ids=["converted", "fused"])
@pytest.mark.filterwarnings("ignore:from_torch", "ignore:apex_te")
def test_values_are_those_of_the_file(fuse, device, tmp_path):
    """Bit by bit; logits and gradients, in a region within the casts of activations."""
    plain = release(tmp_path / "read").to(device)
    model = load(tmp_path / "read", device, fuse=fuse)
    recipe = model.hf_quantizer.recipe
    assert recipe == BlockScaling()
    assert not model.hf_quantizer.cast_again
    assert "weights in FP8, of the values that MXFP4 has" in repr(conversion_summary(model))
    weights = fp8_weights(model)
    assert len(weights) == 4
    for name, weight in weights.items():
        wanted = plain.get_parameter(name).detach().transpose(1, 2)
        assert torch.equal(weight.dequantize(torch.float32).detach(), wanted), name
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=2e-5)
    wanted = loss_of(plain)
    wanted.backward()
    for region, floor in ((None, 70), (recipe, 17)):
        model.zero_grad()
        loss = loss_of(model, region)
        loss.backward()
        torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-4 if region is None else 1e-2)
        for name, weight in weights.items():
            grad = plain.get_parameter(name).grad.transpose(1, 2)
            assert sqnr(grad, weight.grad) > floor, name


@pytest.mark.filterwarnings("ignore:apex_te")
def test_files_and_copies_have_the_same_bytes(device, tmp_path):
    """They have the layout of fp8; a step of lr 0 changes nothing, another one trains."""
    release(tmp_path / "read")
    model = load(tmp_path / "read", device)
    recipe, expected = model.hf_quantizer.recipe, logits(model)
    before = {name: [t.clone() for t in w.codes()] for name, w in fp8_weights(model).items()}
    for rate in (0.0, 1e-3):
        optimizer = FusedAdam(model.parameters(), lr=rate, master_weights=True)
        losses = []
        for _ in range(3):
            loss = loss_of(model, recipe)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        changed = {
            name for name, weight in fp8_weights(model).items()
            if not torch.equal(codes(weight.codes()[0]), codes(before[name][0]))
        }  # fmt: skip
        assert changed == (set(before) if rate else set())
        if not rate:
            assert torch.equal(logits(model), expected)
    assert losses[-1] < losses[0]
    expected = logits(model)
    torch.save(model, tmp_path / "model.pt")
    model.save_pretrained(tmp_path / "saved")
    export_fp8(model, tmp_path / "exported", layout="file")
    for name in ("saved", "exported"):
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == "fp8"
        assert config["weight_block_size"] == [128, 128]
        found = read(tmp_path / name)
        key = "model.layers.1.mlp.experts.gate_up_proj"
        assert found[key].dtype is torch.float8_e4m3fn
        assert found[key].shape == (4, 192, 160)
        assert found[f"{key}_scale_inv"].shape == (4, 2, 2)
    others = [
        load(tmp_path / "saved", device), load(tmp_path / "exported", device),
        copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False),
    ]  # fmt: skip
    state = model.state_dict()
    for other in others:
        assert torch.equal(logits(other), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(state)
        assert torch.equal(logits(other), expected)


@pytest.mark.filterwarnings("ignore:apex_te")
def test_values_that_blocks_do_not_hold(tmp_path):
    """They are counted, or cast again where a recipe is given."""
    plain = release(tmp_path / "read", (105, 127))
    with pytest.raises(
        NotImplementedError, match=r"recipe must be given.* got .*_proj with [1-9]\d* values"
    ):
        load(tmp_path / "read")
    with pytest.raises(NotImplementedError, match=r"device_map must be .* with mxfp4 scales"):
        load(tmp_path / "read", device_map="meta")
    with pytest.raises(NotImplementedError, match=r"recipe must be None or .* got CurrentScaling"):
        load(tmp_path / "read", recipe=CurrentScaling())
    model = load(tmp_path / "read", recipe=BlockScaling(pow2=False))
    assert set(model.hf_quantizer.cast_again) == set(fp8_weights(model))
    for name, weight in fp8_weights(model).items():
        wanted = plain.get_parameter(name).detach().transpose(1, 2)
        assert 28 < sqnr(wanted, weight.dequantize(torch.float32).detach()) < 60
    with fp8_autocast(True, model.hf_quantizer.recipe):
        assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("span", range(18))
def test_blocks_hold_exponents_that_differ_by_14(span):
    """All 16 values at both ends of a block's exponents, and edges that are not whole blocks."""
    rows, groups = 200, 7
    packed = torch.randint(0, 256, (rows, groups, 16), dtype=torch.uint8)
    packed[:, :, :8] = torch.tensor([0x10 * (2 * i + 1) + 2 * i for i in range(8)])
    made = unpacked(packed)
    wanted = mxfp4.convert_moe_packed_tensors(
        packed[None], torch.full((1, rows, groups), 127, dtype=torch.uint8), dtype=torch.float32
    )[0].t()
    assert torch.equal(made.float(), wanted)
    scale = torch.where(torch.rand(rows, groups) < 0.5, 2.0**-20, 2.0 ** (span - 20))
    found, scale_inv, changed = in_blocks(made, scale)
    assert scale_inv.shape == (2, 2)
    exact = made.float() * scale.repeat_interleave(32, 1)
    each = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, : groups * 32]
    differ = (found.float() * each != exact).sum().item()
    assert changed == differ
    assert (changed == 0) == (span <= 14)
    scale[5, 2] = torch.nan
    assert in_blocks(made, scale)[2] >= 32
