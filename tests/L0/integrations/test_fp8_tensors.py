"""fp8_tensors: what engines' loaders expect, restated, and the bits of export_fp8's files."""

import copy
import weakref

import pytest
import torch
import transformers
from checks import needs_cuda
from families import build
from free_scale_cases import FORMS
from free_scale_cases import made as released

from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init
from apex_te.integrations import export_fp8, fp8_tensors, from_torch
from apex_te.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    RowwiseScaling,
)

load_file = pytest.importorskip("safetensors.torch").load_file

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
ODD = {"hidden_size": 160, "intermediate_size": 200, "head_dim": 40}
RECIPES = {"block": BlockScaling(), "channel": RowwiseScaling(), "tensor": CurrentScaling()}
HELD = RECIPES | {"channel": RowwiseScaling(scales="pow2")}  # state dicts have the values
JOINED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")]
LAYOUTS, METHODS = ["vllm", "sglang", "hf"], ["fp8", "compressed-tensors"]
FORMATS = [(m, w) for m in METHODS for w in RECIPES if (m, w) != ("fp8", "channel")]
FORMAT = pytest.mark.parametrize(("method", "weights"), FORMATS)
FAMILIES = ["llama", "qwen2", "phi3", "mixtral", "qwen2_moe", "qwen3_moe"]


def made(name, fuse, recipe=None, **sizes):
    """A plain model and a converted one with the same weights, held in FP8 with ``recipe``."""
    plain = build(name, **SIZES | sizes)
    model = copy.deepcopy(plain)
    if recipe is None:
        return plain, from_torch(model, fuse)
    with fp8_model_init(recipe=recipe):
        return plain, from_torch(model, fuse)


def scale_rule(layout, method, weights, shape):
    """Name and shape of a weight's scale, as the loaders of vLLM, SGLang and transformers have."""
    if weights == "block":
        name = "weight_scale_inv" if method == "fp8" else "weight_scale"
        return name, [-(-size // 128) for size in shape]
    if weights == "channel":
        return "weight_scale", [shape[0], 1]
    if layout == "hf" and method == "fp8":
        return "weight_scale_inv", []
    return "weight_scale", [1]


def decoded(data, scale):
    rows, cols = data.shape
    if scale.dim() == 2 and len(scale) < rows:
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return data.float() * scale


def load(tensors, expected, layout, method, weights, is_quantized):
    """Decodes what a loader gets, after the checks that it makes: names, order, dtypes, shapes."""
    found = dict(tensors)
    assert len(found) == len(tensors)
    names = [name for name, _ in tensors]
    scales = {}
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert found[name].is_contiguous()
        if not is_quantized(name):
            assert torch.equal(found[name], value), name
            continue
        last, shape = scale_rule(layout, method, weights, value.shape)
        scale = f"{name.removesuffix('weight')}{last}"
        assert names[names.index(name) + 1] == scale
        assert found[name].dtype is torch.float8_e4m3fn
        assert found[scale].dtype is torch.float32
        assert list(found[scale].shape) == shape
        assert found[scale].is_contiguous()
        scales[name] = found[scale]
    assert len(names) == len(expected) + len(scales)
    return found, scales


def merge(found, scales, weights, shared):
    """Joins layers as an engine does, whose codes and scales must stay as they are."""
    for key in scales:
        for names in JOINED:
            if f"{names[0]}.weight" not in key:
                continue
            parts = [key.replace(names[0], name) for name in names]
            data = torch.cat([found[part].view(torch.uint8) for part in parts])
            data = data.view(torch.float8_e4m3fn)
            if weights != "tensor":
                rows = 128 if weights == "block" else 1
                assert all(len(found[part]) % rows == 0 for part in parts[:-1])
                scale = torch.cat([scales[part] for part in parts])
            elif shared(key):  # the parts are decoded and cast again with the largest otherwise
                scale = torch.stack([scales[part] for part in parts]).max()
                assert all(scales[part] == scale for part in parts)
            else:
                continue
            whole = torch.cat([decoded(found[part], scales[part]) for part in parts])
            assert torch.equal(decoded(data, scale), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@FORMAT
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_engines_load_it(device, name, fuse, weights, method, layout):
    plain, model = made(name, fuse)
    plain, model = plain.to(device), model.to(device)
    state = plain.state_dict()
    if plain.config.tie_word_embeddings:
        del state["lm_head.weight"]
    expected = transformers.core_model_loading.revert_weight_conversion(plain, state)
    linear = {k for k, m in plain.named_modules() if type(m) is torch.nn.Linear} - {"lm_head"}

    def is_quantized(key):
        # A gate of one output is not converted.
        name = key.removesuffix(".weight")
        return (name in linear and not name.endswith("expert_gate")) or ".experts." in key

    tensors = list(fp8_tensors(model, layout=layout, quant_method=method, weights=weights))
    assert all(tensor.device.type == device.type for _, tensor in tensors)
    found, scales = load(tensors, expected, layout, method, weights, is_quantized)
    merge(found, scales, weights, lambda key: fuse or ".experts." in key)
    quantizer = RECIPES[weights]
    for key, scale in scales.items():
        error = (decoded(found[key], scale) - expected[key]).norm() / expected[key].norm()
        assert 0 < error < 0.04
        if weights == "channel":  # as servers do
            amax = expected[key].float().abs().amax(1, keepdim=True)
            assert torch.equal(scale, amax / torch.full_like(amax, 448))
            codes = (expected[key].float() / scale).to(torch.float8_e4m3fn)
            assert torch.equal(found[key].view(torch.uint8), codes.view(torch.uint8))
        if weights == "block":
            again = fp8_tensors_of(expected[key], quantizer)
            assert torch.equal(found[key].view(torch.uint8), again[0].view(torch.uint8))
            assert torch.equal(scale, again[1])


def fp8_tensors_of(weight, recipe):
    """Codes and scales of one weight, as the product of a Linear reads them."""
    from apex_te.fp8.parameter.decode import quantizers_of

    made = quantizers_of(recipe, weight.device).weight.quantize(weight, True, False)[0]
    blocks = [-(-size // 128) for size in weight.shape]
    scale = made.rowwise_scale_inv
    return made.rowwise, scale[: blocks[0], : blocks[1]] if scale.dim() == 2 else scale


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral", "gpt_neox", "t5"])
@pytest.mark.parametrize("fuse", [False, True])
@FORMAT
def test_files_have_the_same_bits(name, fuse, method, weights, tmp_path):
    _, model = made(name, fuse)
    export_fp8(model, tmp_path, quant_method=method, weights=weights)
    wanted = load_file(tmp_path / "model.safetensors")
    if (name, method, weights) == ("t5", "compressed-tensors", "block"):
        with pytest.raises(ValueError, match="weights must be 'tensor' with quant_method 'compr"):
            dict(fp8_tensors(model, quant_method=method, weights=weights))
        return
    found = dict(fp8_tensors(model, quant_method=method, weights=weights))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype is value.dtype
        assert found[key].shape == value.shape
        assert torch.equal(found[key].contiguous().view(torch.uint8), value.view(torch.uint8)), key


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fuse", [False, True])
def test_scales_of_inputs(layout, method, fuse, tmp_path):
    """Those of files, which test_export compares with the state of delayed scaling."""
    _, model = made("mixtral", fuse)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad(), fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
        model(input_ids=ids)
    flush_fp8_state()
    export_fp8(model, tmp_path, quant_method=method, activations="static")
    files = load_file(tmp_path / "model.safetensors")
    options = {"quant_method": method, "weights": "tensor"}
    found = dict(fp8_tensors(model, layout=layout, activations="static", **options))
    scalar = layout == "hf" and method == "fp8"
    wanted = {
        key.replace("input_scale", "activation_scale").replace("weight_scale", "weight_scale_inv")
        if scalar
        else key: value.reshape(()) if scalar and key.endswith("_scale") else value
        for key, value in files.items()
    }
    assert found.keys() == wanted.keys()
    assert len(found) == len(dict(fp8_tensors(model, **options))) + 2 * (4 + 4 * 3)
    for key, value in wanted.items():
        assert found[key].shape == value.shape
        assert torch.equal(found[key].float(), value.float()), key


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("weights", RECIPES)
def test_weights_held_in_fp8_go_out_as_they_are(fuse, weights):
    """Data share the parameters' memory; joined weights are split, with one scale or blocks."""
    _, model = made("llama", fuse, HELD[weights])
    held = {
        p._held.rowwise.untyped_storage().data_ptr()
        for p in model.parameters()
        if type(p).__name__ == "FP8Parameter"
    }
    method = METHODS[weights == "channel"]
    tensors = dict(fp8_tensors(model, quant_method=method, weights=weights))
    data = [t for t in tensors.values() if t.dtype is torch.float8_e4m3fn]
    assert len(data) == 14
    assert {t.untyped_storage().data_ptr() for t in data} == held
    for key, value in model.state_dict().items():
        if "proj" in key and "fp8_state" not in key:
            last, _ = scale_rule("vllm", method, weights, value.shape)
            scale = tensors[f"{key.removesuffix('weight')}{last}"]
            assert torch.equal(decoded(tensors[key], scale), value)


@pytest.mark.parametrize("form", ["block fp32", "channel", "tensor"])
def test_released_experts_keep_their_bytes(form):
    """Data and scales that no cast of the values would give, in stacks of experts."""
    _, model = made("qwen3_moe", False)
    weights, wanted, held = form.partition(" ")[0], {}, set()
    method = METHODS[weights == "channel"]
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            shape = getattr(layer.mlp.experts, name).shape
            weight, (data, scales) = released(FORMS[form], shape[1:], shape[0], torch.float32)
            setattr(layer.mlp.experts, name, weight)
            held.add(weight._held.rowwise.untyped_storage().data_ptr())
            parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
            for expert in range(shape[0]):
                pairs = [(data[expert], scales[expert])]
                if len(parts) == 2:
                    both = scales[expert].chunk(2) if weights != "tensor" else [scales[expert]] * 2
                    pairs = list(zip(data[expert].chunk(2), both, strict=True))
                for part, pair in zip(parts, pairs, strict=True):
                    wanted[f"model.layers.{number}.mlp.experts.{expert}.{part}.weight"] = pair
    found = dict(fp8_tensors(model, quant_method=method, weights=weights))
    last, _ = scale_rule("vllm", method, weights, shape)
    for key, (data, scale) in wanted.items():
        assert torch.equal(found[key].view(torch.uint8), data.view(torch.uint8)), key
        assert torch.equal(found[f"{key.removesuffix('weight')}{last}"], scale), key
        assert found[key].untyped_storage().data_ptr() in held


def test_what_follows_a_training_step_is_new():
    """The names are found once; values and shapes of the parameters are read each time."""
    _, model = made("qwen3_moe", True)
    before = {key: value.clone() for key, value in fp8_tensors(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= -2
    after = dict(fp8_tensors(model))
    assert after.keys() == before.keys()
    for key, value in after.items():
        factor = 2 if "scale" in key else -1 if value.dtype is torch.float8_e4m3fn else -2
        assert torch.equal(value.float(), before[key].float() * factor), key


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("weights", RECIPES)
def test_tensors_are_made_one_after_the_other(name, weights):
    """While one is consumed no others live but those of the same joined weight."""
    _, model = made(name, True)
    alive, most = [], 0
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    method = METHODS[weights == "channel"]
    for _, tensor in fp8_tensors(model, quant_method=method, weights=weights):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append((weakref.ref(tensor), storage.nbytes()))
        del tensor, storage
        most = max(most, sum(size for ref, size in alive if ref() is not None))
    assert len(alive) > 20
    scales = 4 * 256 if weights == "channel" else 64  # of the largest matrix
    assert 0 < most <= (64 << 10 if weights == "tensor" else 32 << 10) + scales


def test_scales_that_are_not_powers_of_two():
    _, model = made("llama", True)
    found = dict(fp8_tensors(model, weights=BlockScaling(pow2=False)))
    for key, scale in found.items():
        if key.endswith("weight_scale_inv"):
            assert (scale.frexp().mantissa != 0.5).all()
            data = found[key.removesuffix("_scale_inv")]
            assert data.float().abs().max() == 448


def test_tensors_that_transformers_computes(monkeypatch):
    """Ones that are not parts of a parameter: joined, reordered, or transposed in memory."""
    _, model = made("llama", True)
    plain = model.state_dict()
    loading = transformers.core_model_loading

    def revert(model, state):
        found, layer = {}, "model.layers.0."
        for key, value in state.items():
            if key == f"{layer}self_attn.k_proj.weight":
                other = state[key.replace("k_proj", "v_proj")]
                found[f"{layer}kv.weight"] = torch.cat([value, other])
            elif key == f"{layer}mlp.down_proj.weight":
                found[key] = value.view(2, -1, value.shape[1]).transpose(0, 1).reshape(value.shape)
            elif key == f"{layer}self_attn.o_proj.weight":
                found[key] = value.t()
            elif key != f"{layer}self_attn.v_proj.weight":
                found[f"plain.{key}"] = value
        return found

    monkeypatch.setattr(loading, "revert_weight_conversion", revert)
    found = dict(fp8_tensors(model))
    for key, value in revert(model, plain).items():
        if "fp8_state" in key:
            continue
        if found[key].dtype is not torch.float8_e4m3fn:
            assert torch.equal(found[key], value), key
            continue
        data, scale = fp8_tensors_of(value.contiguous(), BlockScaling())
        assert torch.equal(found[key].view(torch.uint8), data.view(torch.uint8)), key
        assert torch.equal(found[f"{key}_scale_inv"], scale)


def test_rows_that_an_engine_cannot_join():
    """Blocks of parts that end inside of one would be taken for the next part's."""
    joint = "weights must be 'tensor' for layers that the engine joins.*got"
    for sizes, error in (
        ({"head_dim": 40}, f"{joint} 160 rows in model.layers.0.self_attn.q_proj"),
        ({"intermediate_size": 200}, f"{joint} 200 rows in model.layers.0.mlp.gate_proj"),
    ):
        model = made("llama", False, **sizes)[1]
        for layout in ("vllm", "sglang"):
            with pytest.raises(ValueError, match=f"^fp8_tensors: {error}"):
                fp8_tensors(model, layout=layout)
        dict(fp8_tensors(model, layout="hf"))
        dict(fp8_tensors(model, weights="tensor"))
    with pytest.raises(ValueError, match=r"not a multiple of 128, got 200 in .*down_proj.weight"):
        fp8_tensors(model, layout="hf", quant_method="compressed-tensors")
    experts = made("qwen3_moe", False, moe_intermediate_size=64)[1]
    with pytest.raises(ValueError, match=f"{joint} 64 rows in .*experts.0.gate_proj"):
        fp8_tensors(experts, layout="hf")


def test_refusals():
    model = made("llama", False)[1]
    for options, error, message in (
        ({"layout": "trt"}, ValueError, "layout must be 'vllm', 'sglang' or 'hf', got 'trt'"),
        ({"layout": None}, TypeError, "layout must be a str, got NoneType"),
        ({"quant_method": "fbgemm"}, ValueError, "quant_method must be 'fp8' or 'compressed-"),
        ({"activations": "none"}, ValueError, "activations must be 'dynamic' or 'static', got 'no"),
        ({"activations": "static"}, ValueError, "activations must be 'dynamic' with scales of bl"),
        ({"weights": "group"}, ValueError, "weights must be a recipe or one of"),
        ({"weights": "channel"}, ValueError, "quant_method must be 'compressed-tensors' with sc"),
        ({"weights": 3}, TypeError, "weights must be a recipe from apex_te.recipe or its name"),
        (
            {"weights": MXFP8Scaling()},
            ValueError,
            "weights must be 'block', 'channel', 'tensor', or b",
        ),
        ({"weights": CurrentScaling(fp8_format="HIF8")}, ValueError, "weights must be 'block'"),
    ):
        with pytest.raises(error, match=f"^fp8_tensors: {message}"):
            fp8_tensors(model, **options)
    with pytest.raises(ValueError, match=r'activations must be "dynamic" for layers without'):
        fp8_tensors(model, weights="tensor", activations="static")
    with pytest.raises(TypeError, match=r"^fp8_tensors: model must be a model of Hugging Face"):
        fp8_tensors(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"^fp8_tensors: model must have linear layers converted"):
        fp8_tensors(build("llama"))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("weights", RECIPES)
@pytest.mark.parametrize("held", [False, True])
def test_extra_memory_is_that_of_the_largest_group(fuse, weights, held):
    """At most a byte for each element of the largest joined weight; nothing if held in FP8."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128, "vocab_size": 4096}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4}
    with torch.device("cuda"):
        _, model = made("llama", fuse, RECIPES[weights] if held else None, **sizes)
    model = model.to(torch.bfloat16)
    largest = 2048 * 8192 * (2 if fuse else 1)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method = METHODS[weights == "channel"]
        for _, tensor in fp8_tensors(model, quant_method=method, weights=weights):
            del tensor
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= (1 << 20 if held else 1.1 * largest)
