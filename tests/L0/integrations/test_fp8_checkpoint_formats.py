"""Formats of released checkpoints: what is cast again if asked for, and what is refused."""

import json

import pytest
import torch
import transformers
from released_files import (
    BLOCKS,
    IDS,
    LAYOUTS,
    compressed,
    plain_model,
    read,
    release,
    safetensors_torch,
)

from apex_te import conversion_summary, export_fp8, from_fp8_checkpoint
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations.checkpoints.description import Form, Header
from apex_te.integrations.checkpoints.reader import read_checkpoint
from apex_te.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    RowwiseScaling,
)

pytest.importorskip("transformers", "5.23")

E4M3, F32 = torch.float8_e4m3fn, torch.float32
RECIPES = {"block": BlockScaling(), "tensor": CurrentScaling(), "channel": RowwiseScaling()}
CHANNELS = ("ct channel", "fbgemm", "modelopt channel")
AGAIN = [
    *zip(CHANNELS, ("llama", "qwen3_moe edges", "deepseek_v3"), strict=True),
    ("mxfp8", "mixtral"), ("fp8 tensor", "qwen3_moe edges"), ("fp8", "qwen3 edges"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "model", "form"),
    # Each layout is decoded, and values are cast to each form: in turn without --long.
    [pytest.param(*each, form, marks=pytest.mark.long if (i + j) % 2 else ())
     for i, each in enumerate(AGAIN) for j, form in enumerate(RECIPES)
     if form != "channel" or each[0] not in CHANNELS],
)  # fmt: skip
def test_other_scales_are_cast_again_if_asked_for(layout, model, form, tmp_path):
    recipe = RECIPES[form]
    _, decoded = release(model, layout, tmp_path / "read")
    if layout in ("mxfp8", "fp8 tensor"):
        with pytest.raises(NotImplementedError, match="recipe must be given"):
            from_fp8_checkpoint(tmp_path / "read")
    loaded = from_fp8_checkpoint(tmp_path / "read", recipe=recipe, dtype=torch.float32)
    plain = plain_model(model, decoded, tmp_path / "plain")
    weights = set()
    for name, weight in loaded.named_parameters():
        if type(weight) is FP8Parameter:
            assert weight.recipe == recipe
            found, value = weight.dequantize(), plain.get_parameter(name).detach()
            if found.shape != value.shape:
                rows, cols = value.shape[-2:]
                if "gate_up" in name:
                    found = torch.cat([part[:, : rows // 2] for part in found.chunk(2, 1)], 1)
                found = found[..., :cols]
            tiny = 2.0**-9 * value.abs().max() / 448  # subnormal codes
            assert ((found - value).abs() <= value.abs() / 16 + tiny).all(), name
            weights.add(name)
    if layout == "fp8 tensor" and isinstance(recipe, CurrentScaling):
        weights = {name for name in weights if "gate_up_proj" in name}  # of two scales each
    assert set(loaded.hf_quantizer.cast_again) == weights
    shown = repr(conversion_summary(loaded))
    assert f"weights in FP8, cast again by {type(recipe).__name__}" in shown
    export_fp8(loaded, tmp_path / "exported", layout="file")
    config = json.loads((tmp_path / "exported/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == ("compressed-tensors" if form == "channel" else "fp8")
    gates = {n.removesuffix(".weight") for n in decoded if n.endswith(".gate.weight")}
    if model != "mixtral":  # whose names differ from the files'
        ignored = config["ignore" if form == "channel" else "modules_to_not_convert"]
        assert set(ignored) == {"lm_head"} | gates
    again = from_fp8_checkpoint(tmp_path / "exported", dtype=torch.float32)
    assert not again.hf_quantizer.cast_again
    assert again.hf_quantizer.recipe == recipe
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3 edges"])
def test_mxfp8_of_values_that_blocks_hold(model, tmp_path):
    """Groups of one matrix whose exponents differ, where the smaller ones lose no bits."""
    _, decoded = release(model, "mxfp8", tmp_path / "read")
    file = tmp_path / "read/model.safetensors"
    tensors = safetensors_torch.load_file(file)
    for key, scale in tensors.items():
        if key.endswith("weight_scale_inv"):
            scale[:] = 110 + 6 * (torch.arange(scale.numel()).view_as(scale) % 3 == 0).byte()
            codes = tensors[key.removesuffix("_scale_inv")]
            kept = codes.view(torch.uint8) & 0xF0 | 0x40  # from 2 to 256, in both directions
            tensors[key.removesuffix("_scale_inv")] = kept.view(E4M3)
            wide = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
            wide = wide.repeat_interleave(32, 1)[:, : codes.shape[1]]
            decoded[key.removesuffix("_scale_inv")] = kept.view(E4M3).float() * wide
    safetensors_torch.save_file(tensors, file, metadata={"format": "pt"})
    loaded = from_fp8_checkpoint(tmp_path / "read", dtype=torch.float32)
    assert not loaded.hf_quantizer.cast_again
    assert loaded.hf_quantizer.recipe == BlockScaling()
    assert "weights in FP8, of the values that MXFP8 has" in repr(conversion_summary(loaded))
    plain = plain_model(model, decoded, tmp_path / "plain")
    names = [name for name, p in loaded.named_parameters() if type(p) is FP8Parameter]
    assert len(names) > 7
    for name in names:
        assert torch.equal(loaded.get_parameter(name).dequantize(), plain.get_parameter(name)), name
    export_fp8(loaded, tmp_path / "exported", layout="file")
    again = from_fp8_checkpoint(tmp_path / "exported", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, loaded(IDS).logits)


def test_nothing_is_decoded(tmp_path, monkeypatch):
    """No high-precision tensor as large as an expert or a linear layer exists at any time."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    _, decoded = release("qwen3_moe", "fp8", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    least = min(v.numel() for k, v in decoded.items() if v.dim() == 2 and "experts" in k)
    others = {tuple(decoded[k].shape) for k in ("model.embed_tokens.weight", "lm_head.weight")}
    large = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for each in torch.utils._pytree.tree_leaves(out):
                plain = type(each) is torch.Tensor and each.dtype.itemsize > 1 and not each.is_meta
                if plain and each.numel() >= least and tuple(each.shape) not in others:
                    large.append((str(func), each.dtype, tuple(each.shape)))
            return out

    with Watch():
        model = from_fp8_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert not large
    assert "StackedExperts: weights in FP8, block scales of the checkpoint" in (
        repr(conversion_summary(model))
    )
    weights = sum(v.numel() for k, v in decoded.items() if f"{k}_scale_inv" in read(tmp_path))
    others = sum(v.numel() for k, v in decoded.items() if f"{k}_scale_inv" not in read(tmp_path))
    assert weights + 2 * others <= model.get_memory_footprint() < 1.05 * (weights + 2 * others)


def test_layers_that_files_have_in_high_precision_stay_so(tmp_path):
    wanted, _ = release("llama", "fp8", tmp_path)
    file = tmp_path / "model.safetensors"
    from safetensors.torch import save_file

    key = "model.layers.0.mlp.up_proj.weight"
    wanted[key] = torch.randn(wanted[key].shape)
    del wanted[f"{key}_scale_inv"]
    save_file(wanted, file, metadata={"format": "pt"})
    model = from_fp8_checkpoint(tmp_path, dtype=torch.float32)
    kept = {layer.name: layer.reason for layer in conversion_summary(model).kept}
    assert kept["model.layers.0.mlp.up_proj"] == "its weights are not in FP8 in the checkpoint"
    assert torch.equal(model.get_parameter(key), wanted[key])


def headers(scale=(2, 1), dtype=F32, weight=(192, 100), name="weight_scale_inv"):
    return {"a.weight": Header(E4M3, weight), f"a.{name}": Header(dtype, scale)}


CT4 = compressed("channel")
CT4["config_groups"]["group_0"]["weights"]["num_bits"] = 4
REFUSED = {
    "another method": ({"quant_method": "gptq"}, headers(), NotImplementedError,
                       "quant_method in quantization_config must be one of fp8, .*, got 'gptq'"),
    "MXFP4": ({"quant_method": "mxfp4"}, {
        "a_blocks": Header(torch.uint8, (2, 4, 3, 16)), "a_scales": Header(torch.uint8, (2, 4))},
        ValueError, r"a_scales must be uint8 \[2, 4, 3\] beside uint8 bytes .* of a_blocks, got"),
    "another format": (BLOCKS | {"fmt": "e5m2"}, headers(), NotImplementedError, "fmt .*'e5m2'"),
    "FP4 experts": (BLOCKS | {"expert_dtype": "fp4"}, headers(), NotImplementedError,
                    "expert_dtype in quantization_config must be 'fp8', got 'fp4'"),
    "4 bits": (CT4, headers(), NotImplementedError, "must be floats of 8 bits, got 'float of 4"),
    "packed": (compressed("tensor") | {"format": "pack-quantized"}, headers(),
               NotImplementedError, "format in quantization_config must be one of float-quantized"),
    "tokens": (compressed("token"), headers(), NotImplementedError, "strategy .*got 'token'"),
    "NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, headers(), NotImplementedError,
              "quant_algo in quantization_config must be one of FP8, .*, got 'NVFP4'"),
    "a block size": (BLOCKS | {"weight_block_size": 128}, headers(), ValueError,
                     "a block size in quantization_config must be two ints, got 128"),
    "no scale": (BLOCKS, {"a.weight": Header(E4M3, (4, 4))}, ValueError,
                 "a.weight must have a scale beside it, such as a.weight_scale_inv, got none"),
    "another shape": (BLOCKS, headers((1, 2)), ValueError,
                      r"a.weight_scale_inv must be \[2, 1\] or .* for block scales of a.weight "
                      r"\[192, 100\], got \[1, 2\]"),
    "integer scales": (BLOCKS, headers(dtype=torch.int32), ValueError, "must be floating-point"),
    "E5M2": (BLOCKS, {"a.weight": Header(torch.float8_e5m2, (4, 4))}, NotImplementedError,
             "a.weight must be E4M3 to be held in FP8, got torch.float8_e5m2"),
    "no FP8": (BLOCKS, {"a.weight": Header(F32, (4, 4))}, ValueError,
               "path_or_name must have weights in FP8 with scales beside them, got 1 tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_and_configurations_that_are_refused(case):
    config, found, error, message = REFUSED[case]
    with pytest.raises(error, match=f"^from_fp8_checkpoint: .*{message}"):
        read_checkpoint(config, found)


@pytest.mark.parametrize(
    ("scale", "form"),
    [((2, 1), Form.BLOCK), ((), Form.TENSOR), ((1,), Form.TENSOR), ((192, 1), Form.CHANNEL)],
)
def test_an_absent_block_size_is_read_from_the_scale(scale, form):
    found = read_checkpoint({"quant_method": "fp8"}, headers(scale))
    assert found.weights["a.weight"].form is form


def test_groups_of_layers_have_their_own_scales():
    config = compressed("tensor")
    first = config["config_groups"]["group_0"] | {"targets": ["re:.*experts.*"]}
    blocks = compressed("block", block_structure=[128, 128])["config_groups"]["group_0"]
    config["config_groups"] = {"group_0": first, "group_1": blocks}
    names = {
        "x.experts.1.up_proj.weight": Header(E4M3, (100, 64)),
        "x.experts.1.up_proj.weight_scale": Header(torch.bfloat16, (1,)),
        "x.q_proj.weight": Header(E4M3, (100, 64)),
        "x.q_proj.weight_scale": Header(torch.bfloat16, (1, 1)),
    }
    found = read_checkpoint(config, names).weights
    assert [each.form for each in found.values()] == [Form.TENSOR, Form.BLOCK]


ARGUMENTS = {
    "path": ((3,), {}, TypeError, "path_or_name must be a str or pathlib.Path, got int"),
    "fuse": (("x",), {"fuse": 1}, TypeError, "fuse must be a bool, got int"),
    "recipe": (("x",), {"recipe": 3}, TypeError, "recipe must be"),
    "quantization_config": (("x",), {"quantization_config": {}}, ValueError,
                            "quantization_config must not be given, since the checkpoint's files"),
    "output_loading_info": (("x",), {"output_loading_info": True}, ValueError,
                            "output_loading_info must not be given, .* got a value of type bool"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_are_refused(case):
    args, options, error, message = ARGUMENTS[case]
    with pytest.raises(error, match=f"^from_fp8_checkpoint: {message}"):
        from_fp8_checkpoint(*args, **options)


def test_folders_and_models_that_are_refused(tmp_path):
    release("llama", "fp8", tmp_path / "read")
    path = tmp_path / "read" / "config.json"
    content = json.loads(path.read_text())
    del content["quantization_config"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="path_or_name must have quantization_config in config"):
        from_fp8_checkpoint(tmp_path / "read")
    content["quantization_config"] = BLOCKS
    path.write_text(json.dumps(content))
    model = from_fp8_checkpoint(tmp_path / "read", recipe=MXFP8Scaling(), dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"must be held by BlockScaling, .*got MXFP8"):
        model.save_pretrained(tmp_path / "saved")
    for layout, options, message in (
        ("other", {}, "layout must be 'file' or None, got 'other'"),
        ("file", {"weights": "block"}, "layout must be None with quant_method, weights or act"),
    ):
        with pytest.raises(ValueError, match=f"export_fp8: {message}"):
            export_fp8(model, tmp_path / "saved", layout=layout, **options)


def test_static_scales_start_delayed_scaling_and_follow_it(tmp_path):
    wanted, _ = release("llama", "fp8 static", tmp_path / "read")
    model = from_fp8_checkpoint(tmp_path / "read", dtype=torch.float32)
    recipe = model.hf_quantizer.recipe
    assert recipe == DelayedScaling()
    layer = model.model.layers[0].self_attn.q_proj
    scale = wanted["model.layers.0.self_attn.q_proj.input_scale"]
    assert torch.equal(layer.fp8_state.scale_inv_fwd[:1], scale)
    from apex_te import flush_fp8_state, fp8_autocast

    with fp8_autocast(fp8_recipe=recipe):
        model(input_ids=IDS, labels=IDS).loss.backward()
    flush_fp8_state()
    now = layer.fp8_state.scale_inv_fwd[:1].clone()
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(read(tmp_path / "saved")["model.layers.0.self_attn.q_proj.input_scale"], now)
    # The amax that the scale stood for is in the history until it has passed.
    assert now >= scale


@pytest.mark.parametrize("layout", ["ct tensor", "ct block", "ct channel", "fp8", "fp8 tensor"])
def test_other_libraries_decode_the_same_values(layout, tmp_path):
    """From what is written, by their own readers: transformers' and compressed-tensors'."""
    release("qwen3 edges", layout, tmp_path / "read")
    model = from_fp8_checkpoint(tmp_path / "read", dtype=torch.float32)
    export_fp8(model, tmp_path / "exported", layout="file")
    found = read(tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())["quantization_config"]
    if layout.startswith("ct"):
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

        scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
        reader = BaseCompressor.get_value_from_registry(config["format"])
    else:
        from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

        size = transformers.FineGrainedFP8Config.from_dict(dict(config)).weight_block_size
    for name, weight in model.named_parameters():
        if type(weight) is FP8Parameter:
            scale = found[name.removesuffix("weight") + LAYOUTS[layout][1]].float()
            if layout.startswith("ct"):
                state = {"weight": found[name], "weight_scale": scale}
                value = reader.decompress(state, scheme)["weight"]
            else:
                value = _dequantize_fp8_weight(found[name], scale, size, torch.float32)
            assert torch.equal(value, weight.dequantize()), name
