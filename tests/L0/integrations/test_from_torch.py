"""from_torch, one to one: equal outputs, the same objects and keys, what is left alone."""

import copy
import warnings

import pytest
import torch
from huggingface_like import Conv1D, GPT2Model, Llama, LlamaRMSNorm
from rounding import assert_within, named, rounding_bounds
from schemes import chosen
from torch import nn

from apex_te import fp8_autocast
from apex_te.integrations import from_torch
from apex_te.integrations.from_torch import Conv1DLinear
from apex_te.module.layer_norm import LayerNorm
from apex_te.module.linear import Linear
from apex_te.module.rms_norm import RMSNorm
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import DelayedScaling, make_recipe

TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}


class Mixed(nn.Module):
    """Every kind of plain layer, among others that stay."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(16, 24)
        self.no_bias = nn.Linear(24, 24, bias=False)
        self.layer_norm = nn.LayerNorm(24, eps=1e-4)
        self.no_beta = nn.LayerNorm(24, bias=False)
        self.no_affine = nn.LayerNorm(24, elementwise_affine=False)
        self.rms = nn.RMSNorm(24)
        self.rms_eps = nn.RMSNorm(24, eps=1e-3)
        self.rms_plain = nn.RMSNorm(24, elementwise_affine=False)
        self.two_dims = nn.LayerNorm((3, 8))
        # With a batch's own statistics the gradient of every bias before it is exactly 0: what two
        # programs find there is their rounding, divided by a deviation that may be small.
        self.batch_norm = nn.BatchNorm1d(24).eval()
        self.out = nn.Linear(24, 7)
        for name, p in self.named_parameters():
            if "norm" in name or "rms" in name or "two" in name:
                nn.init.uniform_(p, 0.5, 1.5)

    def forward(self, x):
        x = self.no_bias(torch.relu(self.inp(x)))
        for norm in (self.layer_norm, self.no_beta, self.no_affine):
            x = x + norm(x)
        for norm in (self.rms, self.rms_eps, self.rms_plain):
            x = x * norm(x)
        x = self.two_dims(x.view(-1, 3, 8)).view(-1, 24)
        return self.out(self.batch_norm(x))


MODELS = {
    "mixed": (Mixed, lambda: torch.randn(6, 16)),
    "llama": (Llama, lambda: torch.randint(24, (2, 8))),
    "llama with biases": (lambda: Llama(bias=True), lambda: torch.randint(24, (2, 8))),
    "gpt2": (GPT2Model, lambda: torch.randint(24, (2, 8))),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2, None, False
        ),
        lambda: torch.randn(2, 5, 16),
    ),
}


def run(model, inputs):
    """Output and gradients by name."""
    model.zero_grad()
    out = model(inputs)
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def converted(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_torch(model, **options)


@pytest.mark.parametrize("name", MODELS)
def test_equal_outputs_and_gradients(name, device):
    build, make_input = MODELS[name]
    model, inputs = build().to(device), make_input().to(device)
    exact, bounds = rounding_bounds(model, inputs, run)
    plain = named(run(copy.deepcopy(model), inputs))
    same = converted(model)
    assert same is model
    assert_within(plain, exact, bounds)  # the bounds hold for PyTorch's own arithmetic
    assert_within(named(run(model, inputs)), exact, bounds)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equal_in_low_precision(dtype, device):
    model, inputs = Mixed().to(device, dtype).eval(), torch.randn(6, 16).to(device, dtype)
    exact = copy.deepcopy(model).double()(inputs.double())
    before = (model(inputs).double() - exact).abs().max()
    after = (converted(model)(inputs).double() - exact).abs().max()
    assert after <= 2 * before + torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_parameters_keys_and_objects_stay(name):
    model = MODELS[name][0]()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    keys = list(model.state_dict())
    values = [value.clone() for value in model.state_dict().values()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    converted(model)
    assert all(model.get_submodule(key) is module for key, module in modules.items())
    assert {key: id(p) for key, p in model.named_parameters()} == {
        key: id(p) for key, p in parameters.items()
    }
    assert list(model.state_dict()) == keys
    for actual, value in zip(model.state_dict().values(), values, strict=True):
        assert torch.equal(actual, value)
    MODELS[name][0]().load_state_dict(model.state_dict(), strict=True)
    run(model, MODELS[name][1]())
    before = parameters[next(iter(parameters))].clone()
    optimizer.step()
    assert not torch.equal(before, model.state_dict()[next(iter(parameters))])


def test_classes():
    model = converted(Mixed())
    kinds = {name: type(module) for name, module in model.named_children()}
    assert kinds == {
        "inp": Linear,
        "no_bias": Linear,
        "layer_norm": LayerNorm,
        "no_beta": LayerNorm,
        "no_affine": LayerNorm,
        "rms": RMSNorm,
        "rms_eps": RMSNorm,
        "rms_plain": RMSNorm,
        "two_dims": LayerNorm,
        "batch_norm": nn.BatchNorm1d,
        "out": Linear,
    }
    assert not model.no_affine.elementwise_affine
    assert model.rms.elementwise_affine
    assert "in_features=16, out_features=24, bias=True" in repr(model.inp)
    llama, gpt2 = converted(Llama()), converted(GPT2Model())
    assert isinstance(llama.layers[0].input_layernorm, RMSNorm)
    assert llama.layers[0].post_attention_layernorm.eps == 1e-5
    assert isinstance(gpt2.h[1].mlp.c_fc, Conv1DLinear)
    assert isinstance(gpt2.h[1].mlp.c_fc, Conv1D)
    assert not isinstance(gpt2.h[1].mlp.c_fc, nn.Linear)
    assert (gpt2.h[1].mlp.c_fc.in_features, gpt2.h[1].mlp.c_fc.out_features) == (32, 128)
    assert gpt2.h[1].mlp.c_fc.weight.shape == (32, 128)


@pytest.mark.parametrize("layer", [nn.Linear(8, 4), nn.LayerNorm(8), Conv1D(4, 8), LlamaRMSNorm(8)])
def test_a_single_layer(layer):
    x = torch.randn(3, 8)
    expected = layer(x)
    assert converted(layer) is layer
    assert type(layer).__module__.startswith("apex_te.")
    torch.testing.assert_close(layer(x), expected, **TOLERANCE)


def test_sizes_that_a_model_computed_with_tensors():
    """transformers' Inkling passes ``in_features`` as a tensor of no dimensions."""
    layer = nn.Linear(32, 16)
    layer.in_features = torch.tensor([8, 4]).prod()
    x = torch.randn(4, 32)
    plain = layer(x)
    from_torch(layer)
    assert (type(layer), layer.in_features) == (Linear, 32)
    torch.testing.assert_close(layer(x), plain)


def test_converting_again_changes_nothing():
    model = converted(Llama())
    states = [m.fp8_state for m in model.modules() if isinstance(m, (Linear, Conv1DLinear))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_torch(model)
    assert [m.fp8_state for m in model.modules() if isinstance(m, (Linear, Conv1DLinear))] == states


RECIPES = list(chosen("delayed", "tensorwise", "blockwise", "mxfp8"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.filterwarnings("ignore:apex_te. .* need")
def test_models_in_fp8(name, recipe, device):
    build, make_input = MODELS[name]
    model, inputs = build().to(device), make_input().to(device)
    out, _ = run(copy.deepcopy(model), inputs)
    converted(model)
    linears = sum(isinstance(m, (Linear, Conv1DLinear)) for m in model.modules())
    for _ in range(2):
        before = fp8_gemm_count()
        with fp8_autocast(True, make_recipe(recipe)):
            actual, grads = run(model, inputs)
    assert fp8_gemm_count() - before == 3 * linears
    assert not torch.equal(actual, out)
    assert (actual - out).norm() < 0.15 * out.norm()
    assert all(grad.isfinite().all() and grad.any() for grad in grads.values())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("build", [lambda: nn.Linear(32, 48), lambda: Conv1D(48, 32)])
@pytest.mark.filterwarnings("ignore:apex_te. .* need")
def test_layers_in_fp8_are_bitwise_those_of_apex_te(build, recipe, device):
    layer = build()
    transposed = isinstance(layer, Conv1D)
    own = Linear(32, 48)
    with torch.no_grad():
        own.weight.copy_(layer.weight.t() if transposed else layer.weight)
        own.bias.copy_(layer.bias)
    converted(layer).to(device)
    own.to(device)
    x, grad = torch.randn(24, 32).to(device), torch.randn(24, 48).to(device)
    for _ in range(2):
        results = []
        with fp8_autocast(True, make_recipe(recipe)):
            for module in (layer, own):
                module.zero_grad()
                inp = x.clone().requires_grad_()
                out = module(inp)
                out.backward(grad)
                results.append([out, inp.grad, module.weight.grad, module.bias.grad])
    if transposed:
        results[0][2] = results[0][2].t()
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_conv1d_weight_cache_and_state():
    layer = converted(Conv1D(16, 32))
    recipe, x = DelayedScaling(amax_history_len=4), torch.randn(8, 32)
    with fp8_autocast(True, recipe):
        first = layer(x, is_first_microbatch=True)
        again = layer(x, is_first_microbatch=False)
        assert torch.equal(first, again)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert not torch.equal(layer(x, is_first_microbatch=False), again)
    assert "fp8_state.scale_fwd" in layer.state_dict()
    other = converted(Conv1D(16, 32))
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other(x), layer(x))


@pytest.mark.long
def test_compiled_conv1d_equals_eager():
    torch._dynamo.reset()
    layer = converted(nn.Sequential(Conv1D(16, 32), nn.LayerNorm(16)))
    eager, recipe = copy.deepcopy(layer), DelayedScaling(amax_history_len=4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        results = []
        for call, owner in ((compiled, layer), (eager, eager)):
            owner.zero_grad()
            x = torch.arange(128.0).view(4, 32).sin().requires_grad_()
            with fp8_autocast(True, recipe):
                out = call(x)
            out.square().sum().backward()
            results.append([out, x.grad, *(p.grad for p in owner.parameters())])
        assert all(map(torch.equal, *results))


def test_hooks_modes_and_flags_stay():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model[0].eval()
    model[2].weight.requires_grad_(False)
    model[1].mine = "kept"
    calls = []
    handle = model[0].register_forward_hook(lambda *a: calls.append("forward"))
    model[1].register_forward_pre_hook(lambda *a: calls.append("pre"))
    model[2].register_full_backward_hook(lambda *a: calls.append("backward"))
    held = model[0]
    converted(model)
    assert held is model[0]
    assert [m.training for m in model] == [False, True, True]
    assert [p.requires_grad for p in model[2].parameters()] == [False, True]
    assert model[1].mine == "kept"
    model(torch.randn(2, 8)).sum().backward()
    assert calls == ["forward", "pre", "backward"]
    handle.remove()
    model(torch.randn(2, 8))
    assert calls[3:] == ["pre"]


def test_shared_modules_and_parameters_stay_shared():
    shared = nn.Linear(8, 8)
    tied = nn.Linear(8, 8)
    tied.weight = shared.weight
    model = converted(nn.ModuleList([shared, shared, tied]))
    assert model[0] is model[1]
    assert model[0].weight is model[2].weight
    assert len(list(model.parameters())) == 3
    llama = converted(Llama())
    assert llama.lm_head.weight is llama.embed_tokens.weight
    copied = copy.deepcopy(llama)
    assert copied.lm_head.weight is copied.embed_tokens.weight
    assert copied.lm_head.weight is not llama.lm_head.weight


@pytest.mark.parametrize("build", [Llama, GPT2Model, Mixed])
def test_meta(build):
    with torch.device("meta"):
        model = build()
    converted(model)
    assert all(p.is_meta for p in model.parameters())
    values = build().state_dict()
    model.to_empty(device="cpu")
    model.load_state_dict(values, strict=True)
    expected = build()
    expected.load_state_dict(values)
    inputs = torch.randn(3, 16) if build is Mixed else torch.randint(24, (2, 4))
    torch.testing.assert_close(model.eval()(inputs), expected.eval()(inputs), **TOLERANCE)


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class OwnNorm(nn.LayerNorm):
    pass


class LlamaRMSNormElsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        return x


def test_what_cannot_be_converted_is_left_and_named_once():
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    elsewhere = LlamaRMSNormElsewhere()
    type(elsewhere).__name__ = "LlamaRMSNorm"
    model = nn.ModuleDict(
        {
            "own": OwnForward(4, 4),
            "norm": OwnNorm(4),
            "replaced": replaced,
            "parametrized": parametrized,
            "fp64": nn.LayerNorm(4).double(),
            "attention": nn.MultiheadAttention(4, 2),
            "empty": nn.Linear(4, 0),
            "elsewhere": elsewhere,
            "plain": nn.Linear(4, 4),
        }
    )
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.warns(UserWarning, match="from_torch: left as they are") as seen:
        from_torch(model)
    assert len(seen) == 1
    message = str(seen[0].message)
    for text in (
        "own (OwnForward is a subclass)",
        "norm (OwnNorm is a subclass)",
        "replaced (its forward was replaced)",
        "parametrized (torch.nn.utils.parametrize makes its weight)",
        "fp64 (norms of torch.float64 are not available)",
        "attention.out_proj (NonDynamicallyQuantizableLinear is a subclass)",
        "empty (it has no features)",
    ):
        assert text in message
    assert "plain" not in message
    assert "elsewhere" not in message
    after = {name: type(module) for name, module in model.named_modules()}
    assert {name for name in before if before[name] is not after[name]} == {"plain"}
    assert seen[0].filename == __file__


def test_nothing_is_said_where_all_was_converted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_torch(GPT2Model())


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("model",), {}, "model must be a torch.nn.Module, got str"),
        ((nn.Linear(2, 2), 1), {}, "fuse must be a bool, got int"),
        ((nn.Linear(2, 2), True), {"optimizer": 3}, "optimizer must have param_groups, got int"),
    ],
)
def test_rejects(args, kwargs, message):
    with pytest.raises(TypeError, match=f"from_torch: {message}"):
        from_torch(*args, **kwargs)
