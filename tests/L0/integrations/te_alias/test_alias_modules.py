"""Alias modules beside apex_te's own: equal bits for every recipe, signatures, and identity."""

import copy
import importlib
import inspect
import pickle

import pytest
import torch
from alias_kinds import (
    FEATURES,
    FP8_KINDS,
    HIDDEN,
    KINDS,
    SPLITS,
    alias_layer,
    batches,
    call,
    first,
    own_layer,
    pair,
    same,
    states,
    step,
    steps,
)
from schemes import FIRST_STEP, SCHEMES

import apex_te
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations import from_torch
from apex_te.integrations.transformer_engine.common import recipe as te_recipe
from apex_te.integrations.transformer_engine.pytorch import module as te
from apex_te.integrations.transformer_engine.pytorch.module import base
from apex_te.recipe import DelayedScaling

CPU = torch.device("cpu")
RECIPE = DelayedScaling(amax_history_len=4)
FILES = {
    "Linear": "linear", "LayerNorm": "layernorm", "RMSNorm": "rmsnorm",
    "LayerNormLinear": "layernorm_linear", "LayerNormMLP": "layernorm_mlp",
    "GroupedLinear": "grouped_linear", "Fp8Padding": "fp8_padding",
    "Fp8Unpadding": "fp8_unpadding",
}  # fmt: skip
# Transformer Engine's positional orders.
SHARED = "sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker"
ORDERS = {
    "Linear": f"in_features out_features {SHARED} rng_tracker_name init_method bias return_bias "
    "params_dtype parallel_mode parameters_split device ub_overlap_ag ub_overlap_rs "
    "ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type "
    "save_original_input name",
    "GroupedLinear": f"num_gemms in_features out_features {SHARED} rng_tracker_name init_method "
    "bias return_bias params_dtype parallel_mode device ub_overlap_rs ub_overlap_ag ub_name "
    "delay_wgrad_compute save_original_input single_grouped_weight single_grouped_bias name "
    "use_grouped_tensor",
    "LayerNormLinear": f"in_features out_features eps {SHARED} init_method bias normalization "
    "return_bias params_dtype parallel_mode return_layernorm_output "
    "return_layernorm_output_gathered parameters_split zero_centered_gamma device ub_overlap_ag "
    "ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute "
    "symmetric_ar_type name rng_tracker_name",
    "LayerNormMLP": "hidden_size ffn_hidden_size eps sequence_parallel return_bias "
    "get_rng_state_tracker tp_group tp_size init_method bias normalization activation "
    "activation_params output_layer_init_method fuse_wgrad_accumulation params_dtype "
    "return_layernorm_output return_layernorm_output_gathered seq_length micro_batch_size "
    "set_parallel_mode zero_centered_gamma device ub_overlap_ag name ub_overlap_rs "
    "ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute symmetric_ar_type "
    "checkpoint",
    "LayerNorm": "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma "
    "hidden_size device dtype",
    "RMSNorm": "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma "
    "hidden_size device dtype",
    "Fp8Padding": "num_gemms align_size",
    "Fp8Unpadding": "num_gemms align_size",
}  # fmt: skip
FORWARDS = {
    "Linear": "inp is_first_microbatch fp8_output fp8_grad",
    "LayerNormLinear": "inp is_first_microbatch fp8_grad",
    "LayerNormMLP": "inp is_first_microbatch",
    "GroupedLinear": "inp m_splits is_first_microbatch",
    "LayerNorm": "inp",
    "RMSNorm": "inp",
    "Fp8Padding": "inp m_splits",
    "Fp8Unpadding": "inp m_splits",
}


@pytest.mark.parametrize("kind", FILES)
def test_names(kind):
    cls = getattr(te, kind)
    assert cls.__module__ == f"transformer_engine.pytorch.module.{FILES[kind]}"
    assert cls.__qualname__ == kind
    own = "apex_te.integrations.transformer_engine.pytorch.module."
    assert getattr(importlib.import_module(own + FILES[kind]), kind) is cls
    assert issubclass(cls, base.TransformerEngineBaseModule)
    assert base.TransformerEngineBaseModule.__module__ == "transformer_engine.pytorch.module.base"


@pytest.mark.parametrize("kind", FILES)
def test_signatures(kind):
    cls = getattr(te, kind)
    parameters = inspect.signature(cls.__init__).parameters
    assert list(parameters)[1:] == ORDERS[kind].split()
    forward = inspect.signature(cls.forward).parameters
    assert list(forward)[1:] == FORWARDS[kind].split()
    for found in (*parameters.values(), *forward.values()):
        assert found.kind not in (found.VAR_POSITIONAL, found.VAR_KEYWORD)


def test_no_alias_class_is_one_of_torch():
    """Accelerate, NeMo and Lightning would convert a layer again that is one of torch's."""
    for kind in KINDS:
        layer = alias_layer(kind)
        assert not isinstance(layer, (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.RMSNorm))
    for kind in ("Linear", "LayerNorm", "RMSNorm"):
        assert isinstance(own_layer(kind), getattr(torch.nn, kind))
        assert not isinstance(own_layer(kind), base.TransformerEngineBaseModule)


def test_from_torch_makes_classes_of_apex_te():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), te.Linear(16, 16))
    alias = model[2]
    model = from_torch(model)
    assert type(model[0]) is apex_te.Linear
    assert type(model[1]) is apex_te.LayerNorm
    assert model[2] is alias


@pytest.mark.parametrize("name", ["none", *SCHEMES, "first step"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_apex_te(kind, name, device):
    recipe = {"none": None, "first step": FIRST_STEP, **SCHEMES}[name]
    layer, own = pair(kind, device)
    same(list(layer.parameters()), list(own.parameters()))
    for x in batches(device, 3):
        same(*steps([layer, own], x, recipe))
    if kind in FP8_KINDS:
        same(states(layer), states(own))


OPTIONS = {
    "Linear": [
        {"bias": False}, {"return_bias": True}, {"save_original_input": True},
        {"parameters_split": ("q", "k")}, {"parameters_split": {"a": 8, "b": 32}},
        {"bias": False, "return_bias": True}, {"init_method": torch.nn.init.ones_},
    ],
    "LayerNormLinear": [
        {"normalization": "RMSNorm"}, {"zero_centered_gamma": True}, {"return_bias": True},
        {"return_layernorm_output": True}, {"return_layernorm_output": True, "return_bias": True},
        {"parameters_split": ("q", "k")}, {"bias": False}, {"eps": 0.5},
    ],
    "LayerNormMLP": [
        {"normalization": "RMSNorm", "activation": "swiglu"}, {"return_bias": True},
        {"activation": "srelu", "bias": False}, {"return_layernorm_output": True},
        {"seq_length": 5, "micro_batch_size": 2}, {"zero_centered_gamma": True},
        {"output_layer_init_method": torch.nn.init.ones_}, {"checkpoint": True},
    ],
    "GroupedLinear": [{"bias": False}, {"return_bias": True}, {"save_original_input": True}],
    "LayerNorm": [{"zero_centered_gamma": True}, {"eps": 0.5}, {"sequence_parallel": True}],
    "RMSNorm": [{"zero_centered_gamma": True}, {"eps": 0.5}, {"sequence_parallel": True}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param(k, o, id=f"{k}-{'-'.join(o)}") for k in KINDS for o in OPTIONS[k]],
)
def test_options_are_those_of_apex_te(kind, options):
    layer, own = pair(kind, CPU, **options)
    assert [n for n, _ in layer.named_parameters()] == [n for n, _ in own.named_parameters()]
    for x in batches(CPU, 2):
        same(*steps([layer, own], x, RECIPE))
    for left, right in zip(layer.parameters(), own.parameters(), strict=True):
        assert vars(left) == vars(right)  # tags


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_microbatches(kind):
    layer, own = pair(kind, CPU)
    for i, x in enumerate(batches(CPU, 4)):
        same(*steps([layer, own], x, RECIPE, is_first_microbatch=i % 2 == 0))
    cached = layer._modes.weight_cache
    assert bool(cached)
    assert cached.keys() == own._modes.weight_cache.keys()


def test_the_second_argument_of_a_linear_is_the_microbatch():
    layer = te.Linear(16, 16)
    with apex_te.fp8_autocast(True, fp8_recipe=RECIPE):
        layer(torch.randn(4, 16), True)
    assert layer._modes.weight_cache


def test_positional_arguments_have_their_order():
    drawn = []
    layer = te.Linear(16, 32, False, False, None, 1, None, None, drawn.append, False, True)
    assert len(drawn) == 1
    assert not layer.use_bias
    assert layer.return_bias
    layer = te.LayerNormLinear(16, 32, 0.5, False, False, None, 1, None, None, False, "RMSNorm")
    assert layer.eps == 0.5
    assert layer.normalization == "RMSNorm"
    assert layer.bias is None
    layer = te.LayerNormMLP(16, 32, 0.5, False, True, None, None, 1, None, False)
    assert layer.eps == 0.5
    assert layer.return_bias
    assert layer.fc1_bias is None
    layer = te.GroupedLinear(2, 16, 32, False, False, None, 1, None, None, None, False, True)
    assert not layer.use_bias
    assert layer.return_bias
    norm = te.LayerNorm(16, 0.5, True, torch.bfloat16, True)
    assert norm.eps == 0.5
    assert norm.weight.sequence_parallel
    assert norm.zero_centered_gamma
    assert norm.weight.dtype == torch.bfloat16
    assert te.RMSNorm(hidden_size=16, sequence_parallel=None).weight.sequence_parallel is False


def test_underscores_at_the_end_of_names_are_dropped():
    for kind in (te.Linear, te.LayerNormLinear):
        layer = kind(16, 48, parameters_split=("query_", "key", "value__"))
        assert {"query_weight", "key_weight", "value_bias"} <= dict(layer.named_parameters()).keys()
        layer = kind(16, 48, parameters_split={"query_": 16, "rest_": 32})
        assert layer.rest_weight.shape == (32, 16)
        with pytest.raises(TypeError, match="parameters_split must be names or a dict"):
            kind(16, 48, parameters_split=7)


REFUSED = {
    "Linear": {
        **dict.fromkeys(
            ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad",
             "ub_bulk_wgrad"), True,
        ), "symmetric_ar_type": "two_shot",
    },
    "GroupedLinear": dict.fromkeys(
        ("ub_overlap_ag", "ub_overlap_rs", "single_grouped_bias", "use_grouped_tensor"), True,
    ),
}  # fmt: skip
REFUSED["LayerNormLinear"] = {**REFUSED["Linear"], "return_layernorm_output_gathered": True}
REFUSED["LayerNormMLP"] = REFUSED["LayerNormLinear"]


@pytest.mark.parametrize(
    ("kind", "keyword"), [(kind, keyword) for kind in REFUSED for keyword in REFUSED[kind]]
)
def test_what_is_not_served_is_refused_by_name(kind, keyword):
    with pytest.raises(NotImplementedError, match=f"^{kind}: {keyword} must be "):
        alias_layer(kind, **{keyword: REFUSED[kind][keyword]})


def test_one_parameter_for_all_groups():
    each = te.GroupedLinear(3, 16, 32)
    single = te.GroupedLinear(3, 16, 32, single_grouped_weight=True, single_grouped_bias=True)
    single.load_state_dict(each.state_dict())
    assert [name for name, _ in single.named_parameters()] == ["weight", "bias"]
    x = torch.randn(6, 16)
    torch.testing.assert_close(single(x, [1, 2, 3]), each(x, [1, 2, 3]))


def test_fp8_outputs_and_gradients_are_refused():
    x = torch.randn(4, 16)
    for keyword in ("fp8_output", "fp8_grad"):
        with pytest.raises(NotImplementedError, match=f"Linear.forward: {keyword} must be False"):
            te.Linear(16, 16)(x, **{keyword: True})
    with pytest.raises(NotImplementedError, match=r"LayerNormLinear\.forward: fp8_grad must be"):
        te.LayerNormLinear(16, 16)(x, fp8_grad=True)


def test_userbuffers_are_only_named():
    for name in ("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"):
        with pytest.raises(NotImplementedError, match=f"module.base.{name} is not available"):
            getattr(base, name)()


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_apex_te(kind):
    x = torch.randn(20, FEATURES + 1)
    layers = alias_layer(kind), own_layer(kind)
    messages = []
    for layer in layers:
        with pytest.raises(ValueError, match=f"^{kind}: inp must") as info:
            call(layer, x)
        messages.append(str(info.value))
    assert messages[0] == messages[1]
    if kind in FP8_KINDS:
        with pytest.raises(TypeError, match=f"^{kind}: sequence_parallel must be a bool"):
            alias_layer(kind, sequence_parallel=1)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_compute_the_same(kind, alias):
    layer = alias_layer(kind)
    if kind in FP8_KINDS:
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
        assert layer.fp8_meta["num_gemms"]
    step(layer, batches(CPU, 1)[0], RECIPE)
    clones = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for clone in clones:
        assert type(clone) is type(layer)
        assert "_wgrad_hooks" not in vars(clone)
        assert clone.extra_repr() == layer.extra_repr()
    for x in batches(CPU, 3)[1:]:
        results = steps([layer, *clones], x, RECIPE)
        same(results[0], results[1])
        same(results[0], results[2])


@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_may_set_attributes_first(kind):
    """Subclasses may set attributes before the base class's constructor runs, as Megatron's do."""

    class Derived(getattr(te, kind)):
        def __init__(self, *args, **kwargs):
            self.config = {"a": 1}
            self.te_return_bias = True
            self.is_first_microbatch = True
            self.tp_size = 5
            self.symmetric_ar_type = None
            super().__init__(*args, **kwargs)

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs), None

    size = {"GroupedLinear": (4, FEATURES, HIDDEN)}.get(kind, (FEATURES, HIDDEN))
    layer = Derived(*(size if kind in FP8_KINDS else (FEATURES,)))
    assert layer.config == {"a": 1}
    assert layer.te_return_bias
    assert layer.is_first_microbatch
    assert layer.tp_size == (1 if kind in FP8_KINDS else 5)
    x = batches(CPU, 1)[0]
    with apex_te.fp8_autocast(True, fp8_recipe=RECIPE):
        out, rest = call(layer, x)
    assert rest is None
    out.sum().backward()
    assert layer.state_dict()["_extra_state"].dtype == torch.uint8


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_weights_may_be_held_in_fp8(kind, preserve):
    layers = []
    for make in (alias_layer, own_layer):
        with apex_te.quantized_model_init(
            True, recipe=RECIPE, preserve_high_precision_init_val=preserve
        ):
            layers.append(make(kind))
    layer, own = layers
    assert layer.primary_weights_in_fp8
    held = [n for n, p in layer.named_parameters() if type(p) is FP8Parameter]
    assert held == [n for n, p in own.named_parameters() if type(p) is FP8Parameter]
    meta = layer.param_init_meta
    assert [meta[name].fp8_meta_index for name in held] == list(range(len(held)))
    assert all(meta[n].fp8_meta_index is None for n in meta if n not in held)
    for x in batches(CPU, 2):
        left, right = steps([layer, own], x, RECIPE)
        same(left, right)
    state = layer.state_dict()
    assert all(type(state[name]) is torch.Tensor for name in held)
    other = alias_layer(kind)
    other.load_state_dict(state, strict=True)
    assert not other.primary_weights_in_fp8
    same(states(other), states(layer))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_recomputed_layers_give_the_same_bits(kind, use_reentrant):
    layer, other = alias_layer(kind), alias_layer(kind)
    for x in batches(CPU, 3):
        left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        for p in (*layer.parameters(), *other.parameters()):
            p.grad = None
        with apex_te.fp8_autocast(True, fp8_recipe=RECIPE):
            rest = (SPLITS,) if kind == "GroupedLinear" else ()
            out = apex_te.checkpoint(layer, left, *rest, use_reentrant=use_reentrant)
            expected = call(other, right)
        out.square().mean().backward()
        expected.square().mean().backward()
        same([out, left.grad], [expected, right.grad])
        same([p.grad for p in layer.parameters()], [p.grad for p in other.parameters()])
    same(states(layer), states(other))


@pytest.mark.cover(0)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers(kind):
    layer = alias_layer(kind)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = batches(CPU, 1)[0]
    rest = (SPLITS,) if kind == "GroupedLinear" else ()
    for recipe in (SCHEMES["tensorwise"], RECIPE):
        with apex_te.fp8_autocast(True, fp8_recipe=recipe):
            out = first(compiled(x, *rest))
            expected = first(layer(x, *rest))
        assert torch.equal(out, expected)
        out.square().mean().backward()


def test_autocast():
    layer, own = te.Linear(16, 16), apex_te.Linear(16, 16)
    own.load_state_dict(layer.state_dict(), strict=False)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.ones(4, 16))
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, own(torch.ones(4, 16)))


@pytest.mark.parametrize("kind", KINDS)
def test_reset_parameters(kind):
    layer = alias_layer(kind, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    layer.reset_parameters(defer_init=True)
    assert all(p.is_meta for p in layer.parameters())
    layer.reset_parameters()
    where = "cuda" if torch.cuda.is_available() else "cpu"
    assert {p.device.type for p in layer.parameters()} == {where}
    torch.manual_seed(7)
    layer.reset_parameters(defer_init=False)
    expected = alias_layer(kind, device=where)
    same([p.detach() for p in layer.parameters()], [p.detach() for p in expected.parameters()])
    before = [p.detach().clone() for p in layer.parameters()]
    layer.reset_parameters(defer_init=True)
    same([p.detach() for p in layer.parameters()], before)


def test_modules_without_parameters_reset_nothing():
    te.Fp8Padding(2).reset_parameters()


def test_the_default_device(own_device):
    where = "cuda" if torch.cuda.is_available() else "cpu"
    assert te.Linear(4, 4).weight.device.type == where
    with torch.device("meta"):
        assert te.Linear(4, 4).weight.is_meta
        assert te.LayerNorm(4).weight.is_meta
        assert te.Linear(4, 4, device="cpu").weight.device.type == "cpu"
    with torch.device("cpu"):
        assert te.RMSNorm(4).weight.device.type == "cpu"
    torch.set_default_device("meta")
    try:
        assert te.GroupedLinear(2, 4, 4).weight1.is_meta
    finally:
        torch.set_default_device(None)


@pytest.mark.cuda
def test_the_default_device_is_the_current_gpu(own_device):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU in this process")
    for kind in KINDS:
        here = torch.device("cuda", torch.cuda.current_device())
        assert {p.device for p in alias_layer(kind).parameters()} == {here}
        with torch.device("cpu"):  # asked for
            assert {p.device.type for p in alias_layer(kind).parameters()} == {"cpu"}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_delayed_weight_gradients(kind, fused):
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": fused}
    layer, own = alias_layer(kind, **options), own_layer(kind, **options)
    weights = [p for n, p in layer.named_parameters() if n.endswith("weight") or "weight" in n]
    weights = [p for p in weights if p.dim() == 2]
    assert all(p.skip_backward_post_hook for p in weights)
    others = [p for p in layer.parameters() if not any(p is w for w in weights)]
    assert not any(hasattr(p, "skip_backward_post_hook") for p in others)
    assert layer.need_backward_dw()
    assert not alias_layer(kind).need_backward_dw()
    for module in (layer, own):
        for p in module.parameters():
            p.main_grad = torch.zeros_like(p)
    calls = []

    def hook():
        calls.append([(p.main_grad if fused else p.grad).clone() for p in weights])

    layer.register_wgrad_accumulation_and_reduce_hooks(hook)
    layer.backward_dw()
    assert not calls
    steps([layer, own], batches(CPU, 1)[0], RECIPE)
    assert not calls
    assert all(p.grad is None for p in weights)
    layer.backward_dw()
    own.backward_dw()
    names = [n for n, p in layer.named_parameters() if p.dim() == 2]
    expected = [getattr(own, n).main_grad if fused else getattr(own, n).grad for n in names]
    assert len(calls) == 1
    assert any(w.count_nonzero() for w in calls[0])
    same(calls[0], expected)
    layer.backward_dw()
    assert len(calls) == 1


def test_weights_that_left_the_meta_device_are_marked():
    layer = te.Linear(16, 16, delay_wgrad_compute=True, device="meta")
    layer.reset_parameters()
    assert layer.weight.skip_backward_post_hook


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fp8_meta(kind):
    layer = alias_layer(kind, name="here")
    assert isinstance(layer.fp8_meta, dict)
    assert layer.fp8_meta["fp8_checkpoint"] is False
    assert layer.fp8_meta["recipe"].delayed()
    assert not layer.fp8
    assert not layer.fp8_calibration
    gemms = layer.fp8_state.gemms
    layer.init_fp8_metadata(num_gemms=gemms)
    with pytest.raises(ValueError, match=f"^{kind}: num_gemms must be {gemms}, that of the con"):
        layer.init_fp8_metadata(num_gemms=gemms + 1)
    x = batches(CPU, 1)[0]
    with apex_te.fp8_autocast(False, calibrating=True, fp8_recipe=RECIPE):
        call(layer, x)
    assert layer.fp8_calibration
    assert not layer.fp8
    with apex_te.fp8_autocast(True, fp8_recipe=RECIPE):
        call(layer, x)
    assert layer.fp8
    assert not layer.fp8_calibration
    assert layer.fp8_meta["fp8_checkpoint"] is True
    found = layer.fp8_meta["recipe"]
    assert isinstance(found, te_recipe.DelayedScaling)
    assert found.amax_history_len == 4
    layer.fp8_meta["recipe"] = other = te_recipe.MXFP8BlockScaling()
    layer.fp8_meta["fp8_group"] = "group"
    assert layer.fp8_meta["recipe"] is other
    assert layer.fp8_meta["fp8_group"] == "group"


def test_fp8_meta_follows_the_region():
    layer = te.Linear(32, 32)
    for recipe in (te_recipe.Float8CurrentScaling(), te_recipe.MXFP8BlockScaling()):
        with apex_te.fp8_autocast(True, fp8_recipe=recipe):
            layer(torch.randn(32, 32))
        assert layer.fp8_meta["recipe"] == recipe


@pytest.mark.parametrize("name", SCHEMES)
def test_fp8_meta_has_a_recipe_of_every_scheme(name):
    layer = te.Linear(32, 32)
    with apex_te.fp8_autocast(True, fp8_recipe=SCHEMES[name]):
        layer(torch.randn(32, 32))
    found = layer.fp8_meta["recipe"]
    assert isinstance(found, type(SCHEMES[name]))
    assert found.fp8_format == SCHEMES[name].fp8_format
    assert layer.fp8_meta["fp8_checkpoint"] is True
    assert layer.state_dict()["_extra_state"].numel()


def test_norms_have_the_attributes_of_fp8_modules():
    norm = te.LayerNorm(8)
    assert norm.fp8_meta["fp8_checkpoint"] is False
    norm.init_fp8_metadata()
    assert not norm.fp8
    assert not norm.fp8_calibration
    assert not norm.primary_weights_in_fp8


def test_attributes_that_frameworks_read():
    layer = te.Linear(16, 16, ub_name="qkv", return_bias=True)
    assert layer.ub_name == "qkv"
    assert layer.apply_bias is False
    assert te.GroupedLinear(2, 16, 16).apply_bias is True
    assert te.LayerNormMLP(16, 16, bias=False).apply_bias is False
    assert layer.is_first_microbatch is None
    assert te.LayerNorm(4).ub_name is None
    layer._validate_name()
    first_name = layer.name
    assert first_name.startswith("Linear_")
    layer._validate_name()
    assert layer.name == first_name
    norm = te.RMSNorm(4)
    norm._validate_name()
    assert norm.name.startswith("RMSNorm_")
    layer.name = 7
    with pytest.raises(TypeError, match="Linear: name must be a string, got int"):
        layer._validate_name()


def test_sizes_of_split_layers():
    layer = te.Linear(32, 64, tp_size=2, parallel_mode="column", sequence_parallel=True)
    assert layer.weight.shape == (32, 32)
    assert layer.weight.partition_dim == 0
    assert layer.sequence_parallel
    layer = te.Linear(32, 64, tp_size=2, parallel_mode="row")
    assert layer.weight.shape == (64, 16)
    assert layer.weight.partition_dim == 1
    layer.set_tensor_parallel_group(None)


def test_dummy_gradients_are_shared():
    dummy = base.get_dummy_wgrad([3, 4], torch.bfloat16)
    assert dummy.shape == (3, 4)
    assert dummy.dtype == torch.bfloat16
    assert not dummy.requires_grad
    dummy.fill_(1)
    again = base.get_dummy_wgrad([3, 4], torch.bfloat16, zero=True)
    assert again.data_ptr() == dummy.data_ptr()
    assert not again.count_nonzero()
    assert base.get_dummy_wgrad([3, 4], torch.float32).data_ptr() != dummy.data_ptr()
    assert dummy.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_workspace_is_one_buffer():
    workspace = base.get_workspace()
    assert workspace.dtype == torch.uint8
    assert workspace.numel() >= 4 << 20
    assert base.get_workspace() is workspace


def test_padding():
    x = torch.randn(16, 3)
    padded, splits = te.Fp8Padding(3, 4)(x, [5, 0, 11])
    expected, own = apex_te.Fp8Padding(3, 4)(x, [5, 0, 11])
    assert torch.equal(padded, expected)
    assert splits == own
    assert torch.equal(te.Fp8Unpadding(3, 4)(padded, [5, 0, 11]), x)
