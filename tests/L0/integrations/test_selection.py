"""Which layers from_torch converts: names, patterns, predicates, blocks, sizes, heads, and why."""

import logging
import pickle
import types
import unittest
import warnings

import pytest
import torch
from huggingface_like import GPT2Model, Llama
from torch import nn

from apex_te import fp8_autocast
from apex_te.integrations import conversion_summary, from_torch
from apex_te.integrations.from_torch import Conv1DLinear
from apex_te.module.layer_norm import LayerNorm
from apex_te.module.linear import Linear
from apex_te.module.rms_norm import RMSNorm
from apex_te.recipe import CurrentScaling


def converted(model, **options):
    """Names of the linear layers and norms of apex_te after conversion without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_torch(model, **options)
    linears = {k for k, m in model.named_modules() if isinstance(m, (Linear, Conv1DLinear))}
    norms = {k for k, m in model.named_modules() if isinstance(m, (LayerNorm, RMSNorm))}
    return linears, norms


PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


def names(*ends, layers=(0, 1)):
    return {f"layers.{layer}.{end}" for layer in layers for end in ends}


ALL = names(*PROJECTIONS, *MLP)
ALL_NORMS = names(*NORMS) | {"norm"}


def test_default_keeps_the_tied_head():
    model = Llama()
    assert converted(model) == (ALL, ALL_NORMS)
    assert type(model.lm_head) is nn.Linear
    x = torch.randn(2, 8, 32)
    layers = (model.lm_head, model.layers[0].mlp.up_proj)
    expected = [layer(x) for layer in layers]
    with fp8_autocast(True, CurrentScaling()):
        equal = [torch.equal(layer(x), out) for layer, out in zip(layers, expected, strict=True)]
    assert equal == [True, False]


@pytest.mark.parametrize(
    ("options", "linears", "norms"),
    [
        ({"include": "*"}, ALL | {"lm_head"}, ALL_NORMS),
        ({"include": ("*", "lm_head"), "exclude": "mlp"}, names(*PROJECTIONS) | {"lm_head"},
         ALL_NORMS),
        ({"include": "self_attn"}, names(*PROJECTIONS), set()),
        ({"include": ["q_proj", "layers.1.mlp"]},
         names("self_attn.q_proj") | names(*MLP, layers=(1,)), set()),
        ({"include": "layers.?.mlp.*_proj"}, names(*MLP), set()),
        ({"include": lambda name, module: isinstance(module, nn.Linear) and "up" in name},
         names("mlp.up_proj"), set()),
        ({"exclude": "layers.0"}, names(*PROJECTIONS, *MLP, layers=(1,)),
         names(*NORMS, layers=(1,)) | {"norm"}),
        ({"exclude": ("o_proj", lambda name, module: name.endswith("layernorm"))},
         ALL - names("self_attn.o_proj"), {"norm"}),
        ({"keep_first_blocks": 1}, names(*PROJECTIONS, *MLP, layers=(1,)), ALL_NORMS),
        ({"keep_last_blocks": 1}, names(*PROJECTIONS, *MLP, layers=(0,)), ALL_NORMS),
        ({"keep_first_blocks": 1, "keep_last_blocks": 1}, set(), ALL_NORMS),
        ({"keep_first_blocks": 5}, set(), ALL_NORMS),
        ({"min_size": 16}, ALL, ALL_NORMS),
        ({"min_size": 17}, ALL - names("self_attn.k_proj", "self_attn.v_proj"), ALL_NORMS),
        ({"size_multiple": 32}, ALL - names("self_attn.k_proj", "self_attn.v_proj"), ALL_NORMS),
        ({"include": "*", "size_multiple": 16}, ALL, ALL_NORMS),
    ],
)  # fmt: skip
def test_choices(options, linears, norms):
    assert converted(Llama(), **options) == (linears, norms)


def test_choices_hold_when_fusing():
    model = Llama()
    linears, norms = converted(model, fuse=True, keep_first_blocks=1)
    assert (linears, norms) == (
        {"layers.1.self_attn.o_proj"},
        names(*NORMS, layers=(0,)) | {"norm"},
    )
    assert hasattr(model.layers[1].self_attn, "qkv_proj")
    model = Llama()
    linears, _ = converted(model, fuse=True, exclude="k_proj")
    attention = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
    assert linears == names(*attention)
    assert type(model.layers[0].mlp).__name__ == "JoinedMLP"
    kept = {layer.name: layer.reason for layer in conversion_summary(model).kept}
    assert kept["layers.0"] == "not fused: self_attn.k_proj: excluded"
    assert kept["layers.0.self_attn.k_proj"] == "excluded"


def test_summary():
    model = Llama()
    assert repr(conversion_summary(model)) == "ConversionSummary: 0 converted, 0 kept"
    with unittest.TestCase().assertLogs("apex_te.integrations", logging.INFO) as logs:
        from_torch(model, exclude="down_proj")
    found = conversion_summary(model)
    text = repr(found)
    assert [record.getMessage() for record in logs.records] == [f"from_torch: {text}"]
    assert len(found.converted) == 12 + 5
    assert len(found.kept) == 2 + 2
    for line in (
        "ConversionSummary: 17 converted, 4 kept",
        "  layers.*.self_attn.q_proj (2): torch.nn.Linear -> apex_te.Linear",
        "  norm: LlamaRMSNorm -> apex_te.RMSNorm",
        "  layers.*.mlp.down_proj (2): torch.nn.Linear: excluded",
        "  lm_head: torch.nn.Linear: an output head: its weight is that of embed_tokens",
        "  embed_tokens: torch.nn.Embedding: no layer that from_torch converts",
    ):
        assert line in text.splitlines()
    from_torch(model)  # the layers that were left, too
    assert len(conversion_summary(model).converted) == 12 + 5 + 2
    fused = from_torch(GPT2Model(), fuse=True)
    text = repr(conversion_summary(fused))
    assert "  h.*.attn.c_attn (2): ln_1, attn.c_attn -> apex_te.JoinedLinear" in text.splitlines()
    assert "  h.*.attn.c_proj (2): Conv1D -> apex_te.Conv1DLinear" in text.splitlines()


class Wrapper(nn.Module):
    """A model around another, as PEFT, DDP and users make them."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})
        self.head = nn.Linear(32, 4)


def test_summary_looks_through_a_wrapper():
    model = from_torch(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 48)), exclude="1")
    own, found = conversion_summary(model), conversion_summary(Wrapper(model))
    for before, after in ((own.converted, found.converted), (own.kept, found.kept)):
        assert len(before) == 1
        assert [x._replace(name=f"base_model.model.{x.name}") for x in before] == list(after)
    assert found.share.fp8 == own.share.fp8 == 32 * 32
    assert found.share.total == own.share.total + 33 * 4
    assert len(conversion_summary(nn.DataParallel(model)).converted) == 1
    assert conversion_summary(Wrapper(nn.Linear(32, 32))).share is None


def test_summary_of_a_whole_counts_its_converted_part_once():
    model = Wrapper(from_torch(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 48)), exclude="1"))
    from_torch(model, exclude="head")
    found = conversion_summary(model)
    inner = [f"base_model.model.{i}" for i in range(2)]
    assert [layer.name for layer in found.converted] == inner
    assert [(layer.name, layer.reason) for layer in found.kept] == [("head", "excluded")]
    from_torch(model.base_model["model"])  # once more, apart from the whole
    assert [layer.name for layer in conversion_summary(model).converted] == inner


def test_summary_gives_the_share_in_fp8_padded_layers_and_reasons():
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 10), nn.Embedding(5, 4))
    from_torch(model, exclude="0")
    found = conversion_summary(model)
    rest = (
        ("torch.nn.Linear: excluded", 1536 + 48),
        ("torch.nn.Embedding: no layer that from_torch converts", 20),
        ("norms and biases", 10),
    )
    assert found.share == (480, 480 + 1536, 480 + 10 + 1536 + 48 + 20, ("1",), rest)
    lines = repr(found).splitlines()
    assert lines[1:4] == [
        "in FP8 inside fp8_autocast: 22.9% of parameters, 23.8% of matmul weights",
        "not in FP8, of all parameters:",
        "  75.6%: torch.nn.Linear: excluded",
    ]
    assert "  1: torch.nn.Linear -> apex_te.Linear" in lines
    assert lines[-2:] == [
        "padded in FP8, which costs time (a size is not a multiple of 16):",
        "  1",
    ]


def test_repr_tells_converted_layers_from_those_of_torch():
    class Mine(Linear):
        """A user's subclass, which keeps its name."""

    model = from_torch(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()))
    text = repr(model)
    assert "(0): apex_te.Linear(in_features=16" in text
    assert "(1): apex_te.LayerNorm((16,)" in text
    assert "(2): GELU(" in text
    assert repr(Mine(16, 16)).startswith("Mine(in_features=16")
    assert repr(pickle.loads(pickle.dumps(model))) == text


def test_fuse_says_what_was_and_was_not_joined():
    with pytest.warns(UserWarning, match="fuse=True joined no layers.*one to one.*without") as seen:
        from_torch(nn.Sequential(nn.Linear(16, 16)), fuse=True)
    assert len(seen) == 1
    model = GPT2Model()
    model.h[0].mlp.c_fc.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"left as they are: h\.0 .*; joined: h\.\*\.attn") as seen:
        from_torch(model, fuse=True)
    assert len(seen) == 1


class Net(nn.Module):
    """Layers by the names that heads have, in and outside of blocks."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(vocab_size=40)
        self.blocks = nn.ModuleList(nn.ModuleDict({"output": nn.Linear(8, 8)}) for _ in range(2))
        self.blocks[0]["classifier"] = nn.Linear(8, 8)
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        self.score = nn.Linear(8, 3)
        self.words = nn.Linear(8, 40)
        self.hidden = nn.Linear(8, 8)
        self.output = nn.Linear(8, 8)


def test_heads_by_name_size_and_place():
    model = Net()
    linears, norms = converted(model)
    assert linears == {"blocks.0.output", "blocks.0.classifier", "blocks.1.output", "hidden"}
    assert norms == {"classifier.1"}
    kept = {layer.name: layer.reason for layer in conversion_summary(model).kept}
    assert kept == {
        "classifier.0": "an output head by its name, classifier",
        "classifier.2": "an output head by its name, classifier",
        "score": "an output head by its name, score",
        "words": "an output head: it has an output for each token",
        "output": "an output head by its name, output",
    }


def test_a_single_layer_is_no_head():
    assert converted(nn.Linear(8, 8)) == ({""}, set())
    assert converted(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))) == ({"0", "1"}, set())


class Codes(torch.Tensor):
    """Stands for a library's quantized tensor in a plain nn.Linear."""


def test_layers_that_cannot_be_converted_are_named_with_reasons():
    packed, codes, old = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    packed.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    codes.weight = nn.Parameter(torch.zeros(8, 8).as_subclass(Codes))
    torch.nn.utils.parametrizations.orthogonal(old)
    model = nn.ModuleDict({"packed": packed, "codes": codes, "old": old, "free": nn.Linear(8, 8)})
    with pytest.warns(UserWarning, match="from_torch: left as they are") as seen:
        from_torch(model)
    for text in (
        "packed (a quantized layer: its weight is a tensor of torch.int8)",
        "codes (a quantized layer: its weight is a Codes of torch.float32)",
        "old (torch.nn.utils.parametrize makes its weight)",
    ):
        assert text in str(seen[0].message)
    assert type(model["free"]) is Linear
    assert [type(model[k]).__name__ for k in ("packed", "codes")] == ["Linear", "Linear"]
    assert not isinstance(model["packed"], Linear)


@pytest.mark.parametrize("make", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_made_by_hooks(make):
    """The older norms set ``weight`` before each forward; the layer takes what they made."""
    layer = make(nn.Linear(8, 8)).eval()
    x = torch.randn(3, 8)
    expected = layer(x)
    assert converted(layer)[0] == {""}
    torch.testing.assert_close(layer(x), expected)
    with fp8_autocast(True, CurrentScaling()):
        out = layer(x)
    assert not torch.equal(out, expected)
    assert (out - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"include": 3}, TypeError, "include must be names, patterns or predicates, got int"),
        ({"exclude": ["a", None]}, ValueError, "exclude must match a layer, got 'a'"),
        ({"exclude": [None]}, TypeError, "exclude must be names, .* got NoneType"),
        ({"exclude": "lmhead"}, ValueError, "exclude must match a layer, got 'lmhead'"),
        ({"include": "layers.7"}, ValueError, "include must match a layer, got 'layers.7'"),
        ({"keep_first_blocks": True}, TypeError, "keep_first_blocks must be an int, got bool"),
        ({"keep_last_blocks": -1}, ValueError, "keep_last_blocks must be at least 0, got -1"),
        ({"min_size": 1.5}, TypeError, "min_size must be an int, got float"),
        ({"size_multiple": 0}, ValueError, "size_multiple must be at least 1, got 0"),
    ],
)
def test_rejects(options, error, message):
    model = Llama()
    with pytest.raises(error, match=f"from_torch: {message}"):
        from_torch(model, **options)
    assert type(model.layers[0].self_attn.q_proj) is nn.Linear


def test_blocks_of_a_model_without_blocks():
    with pytest.raises(ValueError, match="keep_last_blocks must be 0 for a model without a list"):
        from_torch(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), keep_last_blocks=2)


class Wrapped(nn.Module):
    """A router that wraps its linear layer, as Switch Transformers' does."""

    def __init__(self, outputs=4):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.classifier = nn.Linear(32, outputs)


class TopKGating(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 4)


class GatedMLP(nn.Module):
    """A dense MLP whose gate is no router."""

    def __init__(self):
        super().__init__()
        self.gate, self.gate_proj, self.up_proj = (nn.Linear(32, 64) for _ in range(3))
        self.attn_gate, self.forget_gate = nn.Linear(32, 32), nn.Linear(32, 4)


class Mixture(nn.Module):
    def __init__(self, name, router):
        super().__init__()
        self.add_module(name, router)
        self.experts = nn.ModuleList(GatedMLP() for _ in range(4))
        self.shared_experts, self.output = GatedMLP(), nn.Linear(32, 32)


@pytest.mark.parametrize(
    ("name", "router", "reason"),
    [
        ("router", Wrapped(), "a router by its name, router"),
        ("gate", Wrapped(), "a router by its name beside experts, gate"),
        ("shared_expert_gate", nn.Linear(32, 1), "shared_expert_gate"),
        ("density_router", Wrapped(3), "a router by its name, density_router"),
        ("choice", TopKGating(), "a router by its class, TopKGating"),
        ("choice", nn.Linear(32, 4), "a router: choice has an output for each expert"),
    ],
)
def test_routers_stay_with_all_that_is_in_them(name, router, reason):
    """Every linear layer of a router stays, and the summary says why; gates of MLPs do not."""
    model = nn.Sequential(Mixture(name, router), GatedMLP())
    inside = [id(m) for m in router.modules() if isinstance(m, nn.Linear)]
    from_torch(model)
    for key, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert (type(module) is Linear) == (id(module) not in inside), key
    kept = conversion_summary(model).kept
    assert len(kept) == len(inside)
    assert all(reason in layer.reason for layer in kept)
    from_torch(model, include="0")  # who names them gets them
    assert all(type(m) is Linear for m in router.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("kind", ["SwitchTransformers", "NllbMoe", "Jamba", "JetMoe", "Afmoe"])
def test_routers_of_transformers_stay(kind):
    """Models whose routers wrap a linear layer keep it in high precision."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(transformers, f"{kind}Config")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{kind}Model")(config())
        from_torch(model)
    routers = [m for m in model.modules() if "Router" in type(m).__name__
               or "Gating" in type(m).__name__]  # fmt: skip
    inside = [part for m in routers for part in m.modules() if isinstance(part, nn.Linear)]
    assert routers
    assert not any(isinstance(part, Linear) for part in inside)
    assert any(isinstance(m, Linear) for m in model.modules())
