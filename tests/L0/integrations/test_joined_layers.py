"""Joined layers under the names of the plain model: decay, initialisation, freezing, accelerate."""

import copy
import io
import warnings

import pytest
import torch
from families import FAMILIES, IDS, build, class_of, inputs, load, logits, transformers
from torch import nn

from apex_te.integrations import from_torch, key_map, reorder_fused_state
from apex_te.integrations.fusion import JoinedNorm
from apex_te.module._core.norm_parameters import NormedModule
from apex_te.recipe import CurrentScaling

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
NAMES = pytest.mark.parametrize("name", FAMILIES)
FUSE = pytest.mark.parametrize("fuse", [False, True], ids=["converted", "fused"])
CASES = pytest.mark.parametrize(
    ("name", "fuse"),
    [*((name, True) for name in FAMILIES), ("llama", False), ("gpt2", False), ("t5", False)],
)


def converted(model, fuse=True):
    """The model after from_torch, whose warnings other tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_torch(model, fuse=fuse)


def decayed(model):
    """Original names of the parameters that decay by Trainer's rule and by dimensions."""
    own = dict(model.named_parameters())
    by_name = set(transformers.Trainer.get_decay_parameter_names(None, model))
    rules = (lambda key: key in by_name, lambda key: own[key].dim() > 1)
    back = key_map(model).to_original
    return [set(back({key: own[key] for key in own if rule(key)})) for rule in rules]


@CASES
def test_norms_and_biases_decay_as_in_the_plain_model(name, fuse):
    """Trainer's rule by classes and names, and the rule by dimensions, choose what they did."""
    plain = build(name)
    model = converted(copy.deepcopy(plain), fuse)
    assert decayed(model) == decayed(plain)


@NAMES
def test_joined_norms_keep_their_parameters_and_names(name):
    """A joined norm is of its former class, with the same Parameter objects under their names."""
    plain = build(name)
    norms = {
        key: p for key, p in plain.named_parameters() if p.dim() == 1 and key.endswith("weight")
    }
    model = converted(plain)
    now = dict(model.named_parameters())
    assert all(now[key] is p for key, p in norms.items())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "t5"])
def test_files_of_earlier_releases_load(name):
    """State dicts in which the joined layer had the norm's parameters load."""
    model, other = converted(build(name)), converted(build(name))
    former = [entry for entry in key_map(model).entries if entry.former]
    assert former
    state = key_map(model).to_fused(model.state_dict())
    for entry in former:
        state[entry.key] = state.pop(entry.parts[0][0])
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(0.5)
    other.load_state_dict(state, strict=True)
    assert torch.equal(logits(other, name), logits(model, name))
    original = key_map(model).to_original(state)
    assert original.keys() == build(name).state_dict().keys()


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "t5"])
def test_copies_pickles_and_a_lone_norm(name):
    """Copies and pickles are whole models of their own; a norm alone cannot be copied."""
    model = converted(build(name))
    expected = logits(model, name)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert torch.equal(logits(other, name), expected)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        assert torch.equal(logits(model, name), expected)
        assert not torch.equal(logits(other, name), expected)
    norm = next(m for m in model.modules() if type(m).__name__.startswith("Joined") and
                "Norm" in type(m).__name__)  # fmt: skip
    with pytest.raises(TypeError, match="must be copied with its block"):
        copy.deepcopy(norm)


def initialised(model, way):
    """The model with new values by one of the ways in which transformers gives them."""
    torch.manual_seed(5)
    if way == "apply":
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        for module in model.modules():
            module._is_hf_initialized = False
        model.apply(model._init_weights)
    else:
        model.to_empty(device="cpu")
        for p in model.parameters():
            p.data.fill_(7.0)
        model.init_weights()
    return dict(model.state_dict())


@pytest.mark.parametrize("way", ["apply", "meta"])
@CASES
def test_initialisation_gives_the_plain_models_values(name, fuse, way):
    """``apply(_init_weights)``, and ``init_weights`` after ``to_empty``, give the same values."""
    config, _, values = FAMILIES[name]
    config = getattr(transformers, config)(**values)
    if name.startswith("t5"):
        config.initializer_factor = 0.5
    torch.manual_seed(1)
    with torch.device("meta" if way == "meta" else "cpu"):
        plain = class_of(name)(copy.deepcopy(config))
        model = converted(class_of(name)(copy.deepcopy(config)), fuse)
    expected, actual = initialised(plain, way), initialised(model, way)
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@FUSE
def test_loaded_weights_are_not_initialised_again(fuse, tmp_path):
    """``init_weights`` of a loaded model leaves what ``from_pretrained`` has read."""
    build("llama").save_pretrained(tmp_path)
    model = converted(load("llama", tmp_path), fuse)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_initialisation_of_weights_in_fp8_is_refused():
    from apex_te import fp8_model_init

    with fp8_model_init(recipe=CurrentScaling()):
        model = converted(build("llama"))
    with pytest.raises(NotImplementedError, match="must be initialised before its weights"):
        model.apply(model._init_weights)


def test_freezing_one_joined_layer_is_refused():
    """``requires_grad_`` of a part says what it cannot do; of all parts together it works."""
    layer = converted(build("llama")).model.layers[0]
    for part in (layer.self_attn.q_proj, layer.mlp.gate_proj):
        part.requires_grad_(True)
        with pytest.raises(ValueError, match=r"requires_grad must be True for a layer that"):
            part.requires_grad_(False)
    with pytest.raises(RuntimeError):
        layer.self_attn.q_proj.weight.requires_grad = False
    layer.requires_grad_(False)
    layer.self_attn.q_proj.requires_grad_(False)
    assert not any(p.requires_grad for p in layer.parameters())
    layer.input_layernorm.requires_grad_(True)
    assert layer.self_attn.qkv_proj.layer_norm_weight.requires_grad


@pytest.mark.parametrize("trainers", [False, True], ids=["one group", "trainer"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_optimizer_states_of_earlier_releases_load(name, trainers):
    """``reorder_fused_state`` gives each parameter the state that it had in the former order."""
    model = converted(build(name))
    former = {}
    for module in model.modules():
        if not isinstance(module, JoinedNorm):
            norm = vars(module).get("norm") if isinstance(module, NormedModule) else None
            for owner in (norm, module) if norm is not None else (module,):
                former.update((id(p), p) for p in owner._parameters.values() if p is not None)
    decay = set(transformers.Trainer.get_decay_parameter_names(None, model))
    decayed = [p for key, p in model.named_parameters() if key in decay]
    rest = [p for key, p in model.named_parameters() if key not in decay]
    groups = [decayed, rest] if trainers else [list(model.parameters())]
    now = torch.optim.Adam([{"params": group, "weight_decay": 0.0} for group in groups])
    joined = {id(vars(m)["norm"].weight) for m in model.modules()
              if isinstance(m, NormedModule) and "norm" in vars(m)}  # fmt: skip
    if trainers:
        own = {id(p) for p in decayed} | joined
        groups = [
            [p for p in former.values() if (id(p) in own) == first] for first in (True, False)
        ]
    else:
        groups = [list(former.values())]
    then = torch.optim.Adam([{"params": group, "weight_decay": 0.0} for group in groups])
    logits(model, name).square().mean().backward()
    then.step()
    saved = then.state_dict()
    now.load_state_dict(reorder_fused_state(saved, now, model))
    assert len(now.state) == len(then.state)
    for p, state in then.state.items():
        assert torch.equal(now.state[p]["exp_avg"], state["exp_avg"])
    short = {**saved, "param_groups": saved["param_groups"][:0]}
    with pytest.raises(ValueError, match="reorder_fused_state: state_dict must have groups of"):
        reorder_fused_state(short, now, model)


accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3", "bert"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("meta", [False, True], ids=["cpu", "meta"])
def test_accelerate_loads_checkpoints(name, meta, dtype, tmp_path):
    """``load_checkpoint_in_model`` with a device map sets joined parameters by original names."""
    saved = build(name)
    saved.save_pretrained(tmp_path)
    config, _, values = FAMILIES[name]
    with accelerate.init_empty_weights() if meta else warnings.catch_warnings():
        model = class_of(name)(getattr(transformers, config)(**values))
    model = converted(model.eval())
    accelerate.load_checkpoint_in_model(model, str(tmp_path), device_map={"": "cpu"}, dtype=dtype)
    model.tie_weights()
    state = saved.to(dtype or torch.float32).state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    if not meta:
        torch.testing.assert_close(logits(model, name), logits(saved, name), **(
            CLOSE if dtype is None else {"rtol": 0.1, "atol": 0.1}))  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "t5"])
def test_accelerate_offloads_and_dispatches(name):
    """``cpu_offload`` and ``dispatch_model`` run a fused model as it was."""
    expected = logits(build(name), name)
    model = accelerate.cpu_offload(converted(build(name)), torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(logits(model, name), expected, **CLOSE)
        assert all(p.is_meta for p in model.parameters())
        model = converted(build(name))
        model = accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
        torch.testing.assert_close(logits(model, name), expected, **CLOSE)


def test_set_module_tensor_to_device():
    """A part is set by its original name, in another dtype and on another device, too."""
    from accelerate.utils import set_module_tensor_to_device as place

    model = converted(build("llama"))
    layer = model.model.layers[0]
    for name in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm"):
        value = torch.randn(
            layer.get_submodule(name).weight.shape if "mlp" not in name else (48, 32)
        )
        place(layer, f"{name}.weight", "cpu", value=value)
        assert torch.equal(layer.state_dict()[f"{name}.weight"], value)
    with pytest.raises(ValueError, match="which has shape"):
        place(layer, "self_attn.k_proj.weight", "cpu", value=torch.ones(3, 3))
    with pytest.raises(ValueError, match="does not have a parameter"):
        place(layer, "self_attn.k_proj.bias", "cpu", value=torch.ones(3))
    place(layer, "self_attn.k_proj.weight", "meta")
    assert layer.self_attn.qkv_proj.weight.is_meta
    parts = [torch.randn(n, 32) for n in (32, 16, 16)]
    for part, value in zip("vqk", (parts[2], parts[0], parts[1]), strict=True):
        place(layer, f"self_attn.{part}_proj.weight", "cpu", value=value)
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(parts))
    assert isinstance(layer.self_attn.qkv_proj.weight, nn.Parameter)
    assert logits(model, "llama").isfinite().all()
    assert inputs("llama")["input_ids"] is IDS
