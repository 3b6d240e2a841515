"""Hooks, pruning, parametrizations and wrappers on the parts of attention and of a layer."""

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize, prune

from apex_te import fp8_autocast
from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.transformer_layer import TransformerLayer

H = 32
PARTS = [
    "self_attention", "self_attention.layernorm_qkv", "self_attention.proj", "inter_attention",
    "inter_attention.layernorm_query", "inter_attention.key_value", "layernorm_mlp",
]  # fmt: skip


def build(**options):
    torch.manual_seed(0)
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerLayer(H, H, 4, layer_type="decoder", **dropouts, **options)


def run(layer, recipe, seed=1):
    """Output and gradients of one step, each a list."""
    generator = torch.Generator().manual_seed(seed)
    x, memory, grad = torch.randn(3, 4, 2, H, generator=generator)
    x.requires_grad_()
    layer.zero_grad()
    with fp8_autocast(recipe is not None, recipe):
        out = layer(x, encoder_output=memory)
    out.backward(grad)
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("recipe", [None, "blockwise"])
@pytest.mark.parametrize("options", [{}, {"apply_residual_connection_post_layernorm": True}])
@pytest.mark.parametrize("part", PARTS)
def test_hooks_see_the_calls_of_each_part(part, options, recipe):
    layer = build(**options)
    expected = run(layer, recipe)
    seen = []
    module = layer.get_submodule(part)
    module.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[-1]))
    module.register_forward_hook(lambda m, args, out: seen.append(m))
    found = run(layer, recipe)
    assert seen == [H, module]
    for a, b in zip(found, expected, strict=True):
        # Gradients of residuals are added in another order.
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 if recipe is None else 0.05)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("self_attention.layernorm_qkv", "weight"),
        ("self_attention.layernorm_qkv", "layer_norm_weight"),
        ("layernorm_mlp", "fc1_weight"),
        ("layernorm_mlp", "layer_norm_bias"),
    ],
)
def test_pruned_parameters_follow_training_and_loading(part, name):
    layer, other, plain = (build(fuse_qkv_params=True) for _ in range(3))
    for each in (layer, other):
        prune.random_unstructured(each.get_submodule(part), name, 0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for seed in range(2):
        run(layer, None, seed)
        optimizer.step()
    state = layer.state_dict()
    key = f"{part}.{name}"
    value = state[f"{key}_orig"] * state[f"{key}_mask"]
    plain.load_state_dict({n: state[n] if n != key else value for n in plain.state_dict()})
    expected = run(plain, None)[:2]
    other.load_state_dict({n: v * 3 for n, v in state.items()})
    with torch.no_grad():
        other(torch.randn(4, 2, H), encoder_output=torch.randn(4, 2, H))
    other.load_state_dict(state)
    for found in (layer, other):
        for a, b in zip(run(found, None)[:2], expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


class Scaled(torch.nn.Module):
    """Parametrization by a factor."""

    def forward(self, value):
        return value * 1.5


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@pytest.mark.parametrize("name", ["layer_norm_weight", "layer_norm_bias"])
@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_parametrized_norms(kind, name, recipe):
    module = kind(H, H)
    torch.nn.init.normal_(module.layer_norm_bias)
    plain = copy.deepcopy(module)
    with torch.no_grad():
        getattr(plain, name).mul_(1.5)
    parametrize.register_parametrization(module, name, Scaled())
    outs = []
    for m in (module, plain):
        with fp8_autocast(recipe is not None, recipe):
            outs.append(m(torch.linspace(-1, 2, 16 * H).view(16, H)))
        outs[-1].sum().backward()
    assert torch.equal(*outs)
    own = module.parametrizations[name].original.grad
    assert torch.allclose(own, getattr(plain, name).grad * 1.5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", ["self_attention", "inter_attention", "layernorm_mlp"])
def test_wrapped_parts_recompute(part):
    """A wrapper hands on the part's other methods, which would not recompute."""
    layer = build()
    expected = run(layer, None)
    calls = []
    inner = layer.get_submodule(part)
    inner.register_forward_pre_hook(lambda *args: calls.append(args))
    setattr(layer, part, checkpoint_wrapper(inner))
    for a, b in zip(run(layer, None), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    assert len(calls) == 2


def test_hooks_of_the_norm_and_projection_of_attention():
    options = {"attention_dropout": 0.0, "return_layernorm_output": True}
    module = MultiheadAttention(H, 4, input_layernorm=True, **options)
    x = torch.randn(4, 2, H)
    expected = module(x)
    seen = []
    module.layernorm_qkv.register_forward_hook(lambda m, args, out: seen.append(len(out)))
    for a, b in zip(module(x), expected, strict=True):
        assert torch.equal(a, b)
    assert seen == [2]
