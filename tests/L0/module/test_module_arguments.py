"""Arguments of the modules: what each changes, and how they are given."""

import inspect

import numpy as np
import pytest
import torch

import apex_te
from apex_te.module.attention.inference_params import InferenceParams
from apex_te.runtime.named_arguments import did_you_mean, named_arguments, nearest

ATTENTION = "attn_mask_type window_size"
# What can be passed by position: the first arguments of TransformerEngine 2, up to one that its
# versions put in different places or that its documentation shows as a keyword only.
CONSTRUCTORS = {
    "Linear": "in_features out_features bias",
    "LayerNormLinear": "in_features out_features eps bias",
    "LayerNormMLP": "hidden_size ffn_hidden_size eps bias",
    "GroupedLinear": "num_gemms in_features out_features bias",
    "MoELayer": "hidden_size ffn_hidden_size num_experts top_k",
    "LayerNorm": "normalized_shape eps",
    "RMSNorm": "normalized_shape eps",
    "DotProductAttention": "num_attention_heads kv_channels num_gqa_groups attention_dropout "
    f"qkv_format {ATTENTION}",
    "MultiheadAttention": "hidden_size num_attention_heads kv_channels attention_dropout "
    f"layernorm_epsilon init_method output_layer_init_method layer_number {ATTENTION}",
    "TransformerLayer": "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups "
    "layernorm_epsilon hidden_dropout attention_dropout init_method output_layer_init_method "
    "layer_number kv_channels self_attn_mask_type window_size",
}
FORWARDS = {
    "LayerNormLinear": "inp is_first_microbatch",
    "LayerNormMLP": "inp is_first_microbatch",
    "GroupedLinear": "inp m_splits is_first_microbatch",
    "MoELayer": "hidden_states is_first_microbatch",
    "LayerNorm": "inp",
    "RMSNorm": "inp",
    "DotProductAttention": "query_layer key_layer value_layer attention_mask qkv_format "
    "cu_seqlens_q cu_seqlens_kv",
    "MultiheadAttention": f"hidden_states attention_mask encoder_output {ATTENTION}",
    "TransformerLayer": "hidden_states attention_mask self_attn_mask_type window_size "
    "encoder_output enc_dec_attn_mask",
}


def positional(function):
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = inspect.signature(function).parameters.values()
    return [p.name for p in named if p.kind in kinds][1:]


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_order_of_a_constructor(name):
    assert positional(getattr(apex_te, name).__init__) == CONSTRUCTORS[name].split()


@pytest.mark.parametrize("name", FORWARDS)
def test_order_of_a_call(name):
    assert positional(getattr(apex_te, name).forward) == FORWARDS[name].split()


def test_fourth_argument_of_a_layer_is_its_groups():
    layer = apex_te.TransformerLayer(64, 256, 8, 2, 1e-6, 0.0, 0.0)
    assert layer.self_attention.core_attention.num_gqa_groups == 2
    assert layer.self_attention.layernorm_qkv.key_weight.shape == (16, 64)
    assert layer.layernorm_mlp.eps == layer.self_attention.layernorm_qkv.eps == 1e-6


EPSILONS = {
    "LayerNorm": lambda eps: apex_te.LayerNorm(16, eps),
    "RMSNorm": lambda eps: apex_te.RMSNorm(16, eps),
    "LayerNormLinear": lambda eps: apex_te.LayerNormLinear(16, 16, eps),
    "LayerNormMLP": lambda eps: apex_te.LayerNormMLP(16, 32, eps),
    "MultiheadAttention": lambda eps: apex_te.MultiheadAttention(16, 2, layernorm_epsilon=eps),
    "norm of heads": lambda eps: apex_te.MultiheadAttention(
        16, 2, qk_norm_type="L2Normalization", qk_norm_eps=eps
    ),
    "TransformerLayer": lambda eps: apex_te.TransformerLayer(16, 32, 2, layernorm_epsilon=eps),
}
epsilons = pytest.mark.parametrize("make", EPSILONS.values(), ids=EPSILONS)


@epsilons
@pytest.mark.parametrize("eps", [8, 1.0, -1e-5, float("nan"), float("inf")])
def test_refuses_epsilons_that_are_none(make, eps):
    with pytest.raises(ValueError, match=r"eps\w* must be at least 0 and below 1, got"):
        make(eps)


@epsilons
@pytest.mark.parametrize("eps", [None, True, "1e-5"])
def test_refuses_epsilons_that_are_no_numbers(make, eps):
    with pytest.raises(TypeError, match=rf"eps\w* must be a float, got {type(eps).__name__}"):
        make(eps)


@epsilons
@pytest.mark.parametrize("eps", [0, 0.5, np.float32(1e-6)])
def test_takes_other_epsilons(make, eps):
    make(eps)


ATTENTIONS = {
    "DotProductAttention": lambda *heads: apex_te.DotProductAttention(heads[0], 4, heads[1]),
    "MultiheadAttention": lambda *heads: apex_te.MultiheadAttention(
        16, heads[0], num_gqa_groups=heads[1]
    ),
    "TransformerLayer": lambda *heads: apex_te.TransformerLayer(16, 32, *heads),
}


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize(
    ("heads", "error", "match"),
    [
        ((4, 3), ValueError, "num_gqa_groups must divide num_attention_heads=4, got 3"),
        ((4, 8), ValueError, "num_gqa_groups must divide num_attention_heads=4, got 8"),
        ((4, 0), ValueError, "num_gqa_groups must be at least 1, got 0"),
        ((4, 1e-5), TypeError, "num_gqa_groups must be an int, got float"),
        ((0, None), ValueError, "num_attention_heads must be at least 1, got 0"),
        ((4.0, None), TypeError, "num_attention_heads must be an int, got float"),
    ],
)
def test_refuses_groups_that_do_not_fit(name, heads, error, match):
    with pytest.raises(error, match=f"{name}: {match}"):
        ATTENTIONS[name](*heads)


def test_refuses_what_another_order_passes():
    """The order of arguments before TransformerEngine 0.8, and that of an older release here."""
    with pytest.raises(TypeError, match="num_gqa_groups must be an int, got float"):
        apex_te.TransformerLayer(16, 32, 2, 1e-5, 0.1, 0.1)
    decoder = apex_te.TransformerLayer(16, 32, 2, layer_type="decoder")
    x = torch.randn(4, 1, 16)
    with pytest.raises(TypeError, match="attn_mask_type must be a string, got Tensor"):
        decoder(x, None, x)
    with pytest.raises(TypeError, match=r"encoder_output must be a torch.Tensor, got bool"):
        decoder(x, None, None, None, True)
    core = apex_te.DotProductAttention(2, 8)
    with pytest.raises(TypeError, match="positional argument"):
        core(x.unflatten(-1, (2, 8)), x, x, None, "sbhd", None, None, 4, 4)


def test_refuses_what_would_be_ignored():
    x = torch.randn(4, 1, 16)
    with pytest.raises(ValueError, match="Linear: bias must be None with bias=False, got one"):
        apex_te.Linear(16, 16, bias=False)(x, bias=torch.zeros(16))
    cross = apex_te.MultiheadAttention(16, 2, attention_type="cross", attn_mask_type="no_mask")
    with pytest.raises(ValueError, match="inference_params must be None in cross attention"):
        cross(x, None, x, inference_params=InferenceParams(1, 4))
    with pytest.raises(TypeError, match="kv_channels must be an int, got float"):
        apex_te.MultiheadAttention(16, 2, 8.0)


MICROBATCHED = {
    "Linear": lambda m, x, first: m(x, is_first_microbatch=first),
    "LayerNormLinear": lambda m, x, first: m(x, first),
    "LayerNormMLP": lambda m, x, first: m(x, first),
    "GroupedLinear": lambda m, x, first: m(x, [4], first),
}


@pytest.mark.parametrize("name", MICROBATCHED)
@pytest.mark.parametrize("first", [1, 0, np.bool_(True), torch.tensor(True)])
def test_refuses_numbers_for_the_first_microbatch(name, first):
    sizes = (1, 16, 16) if name == "GroupedLinear" else (16, 16)
    module = getattr(apex_te, name)(*sizes)
    with pytest.raises(TypeError, match=f"{name}: is_first_microbatch must be None or a bool"):
        MICROBATCHED[name](module, torch.randn(4, 16), first)


@pytest.mark.parametrize("kind", ["causal", "no_mask", "padding"])
def test_cross_attention_of_a_type_and_a_window(kind):
    """``enc_dec_attn_mask_type`` and ``enc_dec_window_size``, of the module or of a call."""
    torch.manual_seed(0)
    sizes, options = (16, 32, 2), {"layer_type": "decoder", "hidden_dropout": 0.0}
    layer = apex_te.TransformerLayer(*sizes, attention_dropout=0.0, **options)
    window = (2, 0 if kind == "causal" else 1)
    own = apex_te.TransformerLayer(
        *sizes, attention_dropout=0.0, enc_dec_attn_mask_type=kind, enc_dec_window_size=window,
        **options,
    )  # fmt: skip
    own.load_state_dict(layer.state_dict())
    x, memory = torch.randn(5, 2, 16), torch.randn(7, 2, 16)
    given = {"encoder_output": memory}
    if kind == "padding":
        masks = [torch.zeros(2, 1, 1, n, dtype=torch.bool) for n in (5, 7)]
        masks[1][0, ..., 4:] = True
        given["enc_dec_attn_mask"] = tuple(masks)
    called = layer(x, enc_dec_attn_mask_type=kind, enc_dec_window_size=window, **given)
    assert torch.equal(own(x, **given), called)
    assert not torch.allclose(called, layer(x, **given))


def test_encoders_refuse_options_of_cross_attention():
    for option in ({"enc_dec_attn_mask_type": "causal"}, {"enc_dec_window_size": (1, 1)}):
        with pytest.raises(ValueError, match="enc_dec_attn_mask_type and enc_dec_window_size must"):
            apex_te.TransformerLayer(16, 32, 2, **option)
        with pytest.raises(ValueError, match="must be None with layer_type 'encoder'"):
            apex_te.TransformerLayer(16, 32, 2)(torch.randn(4, 1, 16), **option)


@pytest.mark.parametrize(
    ("given", "known", "found"),
    [
        ("RMSnorm", ("LayerNorm", "RMSNorm"), "RMSNorm"),
        ("bhsd", ("sbhd", "bshd", "thd"), "bshd"),
        ("dropout", ("hidden_size", "hidden_dropout"), "hidden_dropout"),
        ("x", ("eps", "bias"), None),
        (3, ("eps",), None),
        ("eps", (), None),
    ],
)
def test_nearest_name(given, known, found):
    assert nearest(given, known) == found
    assert did_you_mean(given, known) == ("" if found is None else f"; did you mean {found!r}?")


def test_decorator_keeps_the_signature_and_other_errors():
    @named_arguments(inner="outer")
    def function(outer, *, flag=False):
        if outer == "passed on":
            raise ValueError("helper: inner must be above 0, got -1")
        raise KeyError(outer)

    assert list(inspect.signature(function).parameters) == ["outer", "flag"]
    with pytest.raises(ValueError, match=r"^function: outer must be above 0, got -1$"):
        function("passed on")
    with pytest.raises(KeyError, match="other"):
        function("other")


def test_cuda_device_where_there_is_none(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^Linear: device must be .*got 'cuda:0' without a CUDA"):
        apex_te.Linear(16, 16, device="cuda:0")
    with pytest.raises(AssertionError, match="not compiled"):
        apex_te.Linear(16, 16, device="cpu")
