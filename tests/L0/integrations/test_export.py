"""export_fp8: files, keys, dtypes, configurations, and values that are ours bitwise."""

import builtins
import copy
import json
import os
import warnings

import pytest
import torch
import transformers
from families import build, class_of, logits

from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init
from apex_te.integrations import export_fp8, from_torch
from apex_te.ops.current_scale import current_scale
from apex_te.ops.row_quantize import reference as row_quantize
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling

safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

WIDE = {"hidden_size": 160, "intermediate_size": 272, "head_dim": 40}
RECIPES = {"tensor": CurrentScaling(), "channel": RowwiseScaling(), "block": BlockScaling()}
METHODS = {"compressed-tensors": RECIPES, "fp8": ("tensor", "block")}
FORMATS = [(method, weights) for method, each in METHODS.items() for weights in each]
FORMAT = pytest.mark.parametrize(("method", "weights"), FORMATS)


def scale_key(method, weights):
    return "weight_scale_inv" if (method, weights) == ("fp8", "block") else "weight_scale"


def read(folder):
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            found.update(safetensors_torch.load_file(folder / name))
    return found


def decoded(data, scale):
    """Values of FP8 data, by the description of the formats."""
    values = data.float()
    if scale.dim() == 2 and len(scale) < len(data):
        rows, cols = data.shape
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return values * scale


def values_of(weight, recipe):
    """Our own values of a weight: those of its cast for a product, or when it is held in blocks."""
    if isinstance(recipe, CurrentScaling):
        out = current_scale(weight.contiguous(), torch.float8_e4m3fn, columnwise=False)
        return decoded(out.rowwise.view(torch.float8_e4m3fn), out.scale_inv)
    if isinstance(recipe, RowwiseScaling):
        return decoded(*row_quantize(weight, torch.float8_e4m3fn)[:2])
    with fp8_model_init(recipe=recipe):
        layer = from_torch(torch.nn.Linear(*weight.shape[::-1], bias=False))
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer.weight.detach().dequantize()


@FORMAT
@pytest.mark.parametrize("fuse", [False, True], ids=["converted", "fused"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3"])
def test_decodes_to_our_values(name, fuse, method, weights, tmp_path):
    plain = build(name, **WIDE)
    model = from_torch(copy.deepcopy(plain), fuse)
    export_fp8(model, tmp_path, quant_method=method, weights=weights)
    found, state = read(tmp_path), plain.state_dict()
    linear = {
        f"{key}.weight" for key, m in plain.named_modules() if isinstance(m, torch.nn.Linear)
    } - {"lm_head.weight"}
    tied = {"lm_head.weight"} if plain.config.tie_word_embeddings else set()
    scales = {key[:-6] + scale_key(method, weights) for key in linear}
    assert found.keys() == state.keys() - tied | scales
    qkv = [f"self_attn.{n}_proj.weight" for n in "qkv"]
    for key, value in state.items():
        if key in linear:
            data, scale = found[key], found[key[:-6] + scale_key(method, weights)]
            assert data.dtype is torch.float8_e4m3fn
            assert scale.dtype is torch.float32
            blocks = [-(-size // 128) for size in value.shape]
            shapes = {"tensor": [1], "channel": [len(value), 1], "block": blocks}
            assert list(scale.shape) == shapes[weights]
            whole, rows = value, slice(None)
            joined = next((n for n in qkv if key.endswith(n)), None)
            if fuse and weights == "tensor" and name != "phi3" and "down" not in key:
                # Weights that were joined share a scale.
                if joined is not None:
                    parts = [state[key.replace(joined, n)] for n in qkv]
                    number = qkv.index(joined)
                elif "gate_proj" in key or "up_proj" in key:
                    names = [
                        key.replace("up_proj", "gate_proj"),
                        key.replace("gate_proj", "up_proj"),
                    ]
                    parts, number = [state[n] for n in names], names.index(key)
                else:
                    parts, number = [value], 0
                start = sum(len(part) for part in parts[:number])
                whole, rows = torch.cat(parts), slice(start, start + len(value))
            if weights == "tensor":
                assert torch.equal(decoded(data, scale), values_of(whole, CurrentScaling())[rows])
            else:
                assert torch.equal(decoded(data, scale), values_of(whole, RECIPES[weights])[rows])
        elif key not in tied:
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("weights", RECIPES)
@pytest.mark.parametrize("fuse", [False, True])
def test_weights_that_are_held_in_fp8_are_written_as_they_are(fuse, weights, tmp_path):
    model = build("llama", **WIDE)
    held = RECIPES | {"channel": RowwiseScaling(scales="pow2")}  # state dicts have the values
    with fp8_model_init(recipe=held[weights]):
        from_torch(model, fuse)
    method = "compressed-tensors" if weights == "channel" else "fp8"
    export_fp8(model, tmp_path, quant_method=method, weights=weights)
    found = read(tmp_path)
    for key, value in model.state_dict().items():
        if "proj" in key and "fp8_state" not in key:
            values = decoded(found[key], found[key[:-6] + scale_key(method, weights)])
            assert torch.equal(values, value), key


@FORMAT
def test_configuration(method, weights, tmp_path):
    model = from_torch(build("llama"))
    export_fp8(model, tmp_path, quant_method=method, weights=weights)
    assert sorted(os.listdir(tmp_path)) == [
        "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["dtype"] == "float32"
    found = config["quantization_config"]
    block = weights == "block"
    if method == "fp8":
        rest = {} if block else {"ignored_layers": ["lm_head"]}
        assert found == {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head"],
            "weight_block_size": [128, 128] if block else None, **rest,
        }  # fmt: skip
        return
    assert found["quant_method"] == "compressed-tensors"
    assert found["format"] == "float-quantized"
    assert found["quantization_status"] == "compressed"
    assert found["ignore"] == ["lm_head"]
    (group,) = found["config_groups"].values()
    assert group["targets"] == ["Linear"]
    for key, strategy, dynamic in (
        ("weights", weights, False),
        ("input_activations", "group" if block else "token", True),
    ):
        wanted = {"num_bits": 8, "type": "float", "symmetric": True}
        wanted |= {"strategy": strategy, "dynamic": dynamic}
        assert group[key].items() >= wanted.items()
    assert group["weights"]["block_structure"] == ([128, 128] if block else None)
    assert group["input_activations"]["group_size"] == (128 if block else None)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_static_scales_are_those_of_delayed_scaling(method, fuse, tmp_path):
    model, recipe = from_torch(build("llama"), fuse), DelayedScaling(amax_history_len=4)
    with pytest.raises(ValueError, match=r'activations must be "dynamic" for layers without'):
        export_fp8(model, tmp_path, activations="static")
    with torch.no_grad(), fp8_autocast(False, calibrating=True, fp8_recipe=recipe):
        logits(model, "llama")
    flush_fp8_state()
    export_fp8(model, tmp_path, quant_method=method, activations="static")
    found = read(tmp_path)
    layer = model.model.layers[1]
    mlp = layer.mlp if fuse else layer.mlp.up_proj
    qkv = layer.self_attn.qkv_proj if fuse else layer.self_attn.k_proj
    down = (layer.mlp.fp8_state, 3) if fuse else (layer.mlp.down_proj.fp8_state, 0)
    for key, state, slot in (
        ("self_attn.k_proj", qkv.fp8_state, 0),
        ("mlp.up_proj", mlp.fp8_state, 0),
        ("mlp.down_proj", *down),
        ("self_attn.o_proj", layer.self_attn.o_proj.fp8_state, 0),
    ):
        scale = found[f"model.layers.1.{key}.input_scale"]
        assert scale.shape == (1,)
        assert torch.equal(scale, state.scale_inv_fwd[slot : slot + 1])
        assert scale != 1
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    if method == "fp8":
        assert config["activation_scheme"] == "static"
    else:
        inputs = config["config_groups"]["group_0"]["input_activations"]
        assert (inputs["strategy"], inputs["dynamic"]) == ("tensor", False)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("weights", RECIPES)
def test_experts_have_the_names_of_their_files(name, weights, tmp_path):
    plain = build(name)
    plain.save_pretrained(tmp_path / "plain")
    expected = read(tmp_path / "plain")
    model = from_torch(copy.deepcopy(plain))
    recipe = DelayedScaling(amax_history_len=4)
    with torch.no_grad(), fp8_autocast(False, calibrating=True, fp8_recipe=recipe):
        logits(model, name)
    flush_fp8_state()
    static = {"activations": "static"} if weights == "tensor" else {}
    export_fp8(model, tmp_path / "fp8", weights=weights, **static)
    found = read(tmp_path / "fp8")
    plain_keys = {k for k in found if not k.endswith(("weight_scale", "input_scale"))}
    assert plain_keys == expected.keys()
    experts = [key for key in expected if ".experts." in key]
    assert len(experts) == 4 * 3 * (1 if name == "qwen2_moe" else 2)
    for key in experts:
        values, whole, rows = decoded(found[key], found[f"{key}_scale"]), expected[key], slice(None)
        first, second = ("w1", "w3") if name == "mixtral" else ("gate_proj", "up_proj")
        if weights == "tensor" and (first in key or second in key):  # they share a scale
            pair = [expected[key.replace(second, first)], expected[key.replace(first, second)]]
            whole, count = torch.cat(pair), len(whole)
            rows = slice(0, count) if first in key else slice(count, None)
        assert torch.equal(values, values_of(whole, RECIPES[weights])[rows]), key
    if static:
        first = next(iter(model.model.layers)).mlp.experts
        for key in experts:
            if not key.startswith("model.layers.0."):
                continue
            expert = int(key.split(".experts.")[1].split(".")[0])
            down = key.endswith(("w2.weight", "down_proj.weight"))
            gemm = first.down_gemm if down else first.gate_up_gemm
            scale = gemm.fp8_state.scale_inv_fwd[3 * expert]
            assert found[key[:-6] + "input_scale"] == scale
    ignored = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    routers = [key[:-7] for key in expected if key.endswith("gate.weight")]
    assert routers
    assert set(ignored["ignore"]) == {*routers, "lm_head"}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("bert", ["bert.pooler.dense", "classifier"]),
        (
            "qwen2",
            ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "lm_head"],
        ),
    ],
)
def test_layers_that_are_not_quantized_are_listed(name, kept, fuse, tmp_path):
    exclude = {"bert": "pooler", "qwen2": "o_proj"}[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "from_torch: left as they are")
        model = from_torch(build(name), fuse, exclude=exclude)
    export_fp8(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert sorted(config["ignore"]) == sorted(kept)
    found = read(tmp_path)
    assert all(f"{key}.weight_scale" not in found for key in kept)
    quantized = {key for key, value in found.items() if value.dtype is torch.float8_e4m3fn}
    linear = [k for k, m in build(name).named_modules() if type(m) is torch.nn.Linear]
    assert quantized == {f"{key}.weight" for key in linear} - {f"{key}.weight" for key in kept}


@FORMAT
@pytest.mark.parametrize("first", ["embedding", "head"])
def test_a_head_that_is_tied_to_its_embedding_is_not_quantized(method, weights, first, tmp_path):
    plain = build("qwen2")
    if first == "head":
        plain._modules = dict(reversed(plain._modules.items()))
    model = from_torch(copy.deepcopy(plain), include="*")
    assert type(model.lm_head) is not torch.nn.Linear
    export_fp8(model, tmp_path, quant_method=method, weights=weights)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["ignore" if method == "compressed-tensors" else "modules_to_not_convert"] == [
        "lm_head"
    ]
    found = read(tmp_path)
    (name,) = {"lm_head.weight", "model.embed_tokens.weight"} & found.keys()
    assert torch.equal(found[name], plain.lm_head.weight)
    assert not any(key.startswith("lm_head.weight_") for key in found)


def test_a_module_that_is_used_twice_is_quantized(tmp_path):
    model = build("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    export_fp8(from_torch(model), tmp_path, weights="tensor")
    found = read(tmp_path)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert found[f"model.layers.0.mlp.{name}.weight"].dtype is torch.float8_e4m3fn


def test_large_models_have_shards_and_an_index(tmp_path):
    model = from_torch(build("llama"), fuse=True)
    export_fp8(model, tmp_path)
    expected = read(tmp_path)
    export_fp8(model, tmp_path, max_shard_size="8KB")
    files = sorted(name for name in os.listdir(tmp_path) if name.endswith(".safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = read(tmp_path)
    assert index["weight_map"].keys() == found.keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
    for key, value in expected.items():
        assert torch.equal(found[key].float(), value.float())
        assert key in safetensors_torch.load_file(tmp_path / index["weight_map"][key])
    for name in files:
        assert os.path.getsize(tmp_path / name) < 8000 + 8192  # and the header
    export_fp8(model, tmp_path, max_shard_size=10**6)
    assert "model.safetensors.index.json" not in os.listdir(tmp_path)
    assert sum(name.endswith(".safetensors") for name in os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "bert"])
def test_transformers_reads_it(name, tmp_path):
    """Its own reader of FP8 blocks, which on a CPU decodes: the values are ours."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = from_torch(build(name))
    export_fp8(model, tmp_path, quant_method="fp8", weights="block")
    # Asked for by name, since only where no GPU is in the machine does the reader decode by itself.
    decode = transformers.FineGrainedFP8Config(dequantize=True)
    loaded = class_of(name).from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=decode
    )
    loaded.eval()
    held = build(name)
    with torch.no_grad():
        for module in from_torch(held).modules():
            if type(module).__name__ == "Linear" and type(module) is not torch.nn.Linear:
                module.weight.copy_(values_of(module.weight, BlockScaling()))
            elif type(module).__name__ == "StackedExperts":
                for stacked in (module.gate_up_proj, module.down_proj):
                    parts = 2 if stacked is module.gate_up_proj else 1
                    for expert in stacked:
                        for part in expert.chunk(parts):
                            part.copy_(values_of(part.contiguous(), BlockScaling()))
        for key, value in held.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key].float(), value, rtol=8e-3, atol=0)
        torch.testing.assert_close(
            logits(loaded, name).float(), logits(held, name), rtol=0.1, atol=0.05
        )


def test_refusals(tmp_path, monkeypatch):
    model = from_torch(build("llama"))
    for options, error, message in (
        (
            {"quant_method": "gptq"},
            ValueError,
            "quant_method must be 'compressed-tensors' or 'fp8'",
        ),
        ({"weights": 1}, TypeError, "weights must be a str, got int"),
        ({"activations": "none"}, ValueError, "activations must be 'dynamic' or 'static'"),
        ({"weights": "block", "activations": "static"}, ValueError, "with weights='block'"),
        ({"weights": "channel", "activations": "static"}, ValueError, "with weights='channel'"),
        ({"weights": "channel", "quant_method": "fp8"}, ValueError, "quant_method must be 'compr"),
        ({"max_shard_size": "5 GB"}, ValueError, "max_shard_size must be an int or as in"),
        ({"max_shard_size": 0}, ValueError, "max_shard_size must be at least 1, got 0"),
        ({"max_shard_size": 1.5}, TypeError, "max_shard_size must be an int or str, got float"),
    ):
        with pytest.raises(error, match=f"export_fp8: .*{message}"):
            export_fp8(model, tmp_path, **options)
    with pytest.raises(TypeError, match="model must be a model of Hugging Face, got Linear"):
        export_fp8(torch.nn.Linear(2, 2), tmp_path)
    for plain in (build("llama"), from_torch(build("gpt2"))):
        with pytest.raises(ValueError, match="must have linear layers converted by from_torch"):
            export_fp8(plain, tmp_path)
    with torch.device("meta"):
        empty = from_torch(build("llama"))
    with pytest.raises(ValueError, match=r"model must have values, got .* on the meta device"):
        export_fp8(empty, tmp_path)
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        ValueError, match=r"must not have adapters; call merge_and_unload\(\) first"
    ):
        export_fp8(from_torch(adapted), tmp_path)
    assert not os.listdir(tmp_path)
    imported = builtins.__import__

    def without(name, *args):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="export_fp8: safetensors must be installed"):
        export_fp8(model, tmp_path)


@pytest.mark.parametrize(
    ("name", "weights"), [("tensorwise", "tensor"), ("rowwise", "channel"), ("blockwise", "block")]
)
def test_weights_may_be_named_by_the_recipe(name, weights, tmp_path):
    model = from_torch(build("llama"))
    for choice in (name, weights):
        export_fp8(model, tmp_path / choice, weights=choice)
    by_name, plain = read(tmp_path / name), read(tmp_path / weights)
    assert by_name.keys() == plain.keys()
    assert all(torch.equal(value, plain[key]) for key, value in by_name.items())
