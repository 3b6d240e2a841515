"""Modules under torch's tracing modes and transforms: eager's result, or a refusal by name."""

import contextlib
import copy

import pytest
import torch
from layer_kinds import repeatable
from schemes import chosen
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from wide_sums import WideSums

import apex_te

MODULES = {
    "Linear": lambda **k: apex_te.Linear(32, 32, **k),
    "LayerNormLinear": lambda **k: apex_te.LayerNormLinear(32, 32, **k),
    "LayerNormMLP": lambda **k: apex_te.LayerNormMLP(32, 64, **k),
    "LayerNorm": lambda **k: apex_te.LayerNorm(32, **k),
    "RMSNorm": lambda **k: apex_te.RMSNorm(32, **k),
    "MultiheadAttention": lambda **k: apex_te.MultiheadAttention(32, 4, attention_dropout=0.0, **k),
    "TransformerLayer": lambda **k: apex_te.TransformerLayer(
        32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, **k
    ),
    "GroupedLinear": lambda **k: apex_te.GroupedLinear(2, 32, 32, **k),
}
RECIPES = {"none": None, **chosen("tensorwise", "blockwise", "delayed")}
every = pytest.mark.parametrize("name", MODULES)
all_recipes = pytest.mark.parametrize("kind", RECIPES)
STATE = "DelayedScaling does, cannot record inside of"


class Setting:
    def __init__(self, name, kind, device):
        self.original = MODULES[name](device=device)
        self.kind = kind
        rows = (16, 2, 32) if name in ("MultiheadAttention", "TransformerLayer") else (16, 32)
        dtype = torch.float32
        self.x = torch.randn(rows, dtype=dtype, device=device)
        self.more = ([8, 8],) if name == "GroupedLinear" else ()

    def region(self):
        if RECIPES[self.kind] is None:
            return contextlib.nullcontext()
        return apex_te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[self.kind])

    def module(self):
        return copy.deepcopy(self.original)

    def run(self, module, x, parameters=None):
        with self.region():
            if parameters is None:
                return module(x, *self.more)
            return torch.func.functional_call(module, parameters, (x, *self.more))

    def gradients(self):
        module, x = self.module(), self.x.clone().requires_grad_()
        loss = self.run(module, x).square().sum()
        return torch.autograd.grad(loss, [x, *module.parameters()])

    def transformed(self):
        module = self.module()
        parameters = {k: v.detach() for k, v in module.named_parameters()}

        def loss(x, parameters):
            return self.run(module, x, parameters).square().sum()

        return loss, parameters


@pytest.fixture
def setting(name, kind, device):
    return Setting(name, kind, device)


def assert_same(actual, expected):
    for a, e in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert torch.equal(a, e)


def refused(setting):
    """The state of delayed scaling cannot be moved by what is traced; nothing is left behind."""
    if setting.kind != "delayed":
        return contextlib.nullcontext()
    return pytest.raises(Exception, match=STATE)


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "apex_te":
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@every
@all_recipes
def test_modes_see_the_ops_of_both_passes(setting, name, kind):
    expected = setting.gradients()
    with Counter() as seen:
        assert_same(setting.gradients(), expected)
    plain = kind == "none" and name in ("Linear", "GroupedLinear", "MultiheadAttention")
    assert seen.names or plain


@every
@all_recipes
def test_make_fx(setting):
    expected = setting.run(setting.module(), setting.x)
    graph = make_fx(lambda x: setting.run(setting.module(), x))(setting.x)
    assert_same(graph(setting.x), expected)


@every
@all_recipes
@pytest.mark.filterwarnings("ignore")
def test_jit_trace(setting):
    expected = setting.run(setting.module(), setting.x)
    module = setting.module()
    with refused(setting):
        traced = torch.jit.trace(Wrapped(setting, module), (setting.x,), check_trace=False)
        assert_same(traced(setting.x), expected)
    assert_same(setting.run(setting.module(), setting.x), expected)


class Wrapped(torch.nn.Module):
    def __init__(self, setting, module):
        super().__init__()
        self.setting, self.module = setting, module

    def forward(self, x):
        return self.setting.run(self.module, x)


@every
@all_recipes
def test_export(setting):
    expected = setting.run(setting.module(), setting.x)
    module = setting.module()
    with refused(setting):
        program = torch.export.export(Wrapped(setting, module), (setting.x,), strict=False)
        assert_same(program.module()(setting.x), expected)
    assert_same(setting.run(module, setting.x), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_trained_delayed_model(device, strict):
    setting = Setting("LayerNormMLP", "delayed", device)
    module = setting.original
    other = apex_te.Linear(32, 32, device=device)  # not run yet, and not to be prepared by export
    for _ in range(3):
        setting.run(module, setting.x).sum().backward()
    wrapped = Wrapped(setting, module)
    with torch.no_grad():
        expected = wrapped(setting.x)
        program = torch.export.export(wrapped, (setting.x,), strict=strict)
        assert_same(program.module()(setting.x), expected)
        assert_same(wrapped(setting.x), expected)
    for user in (module, other, module):
        setting.run(user, setting.x).sum().backward()


@every
@all_recipes
def test_func_grad(setting):
    expected = setting.gradients()
    loss, parameters = setting.transformed()
    with refused(setting):
        dx, others = torch.func.grad(loss, argnums=(0, 1))(setting.x, parameters)
        assert_same([dx, *others.values()], expected)
    assert_same(setting.gradients(), expected)


@every
@pytest.mark.parametrize("kind", ["none", "tensorwise"])
def test_per_sample_gradients(setting, name, device):
    """They are those of a loop, but for the order of torch's own products and sums."""
    with repeatable(device, name), WideSums():
        expected = setting.gradients()[1:]
        loss, parameters = setting.transformed()
        x = torch.stack([setting.x, setting.x * 0.5])
        made = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None))(x, parameters)
        assert_same([t[0] for t in made.values()], expected)
        setting.x = setting.x * 0.5
        assert_same([t[1] for t in made.values()], setting.gradients()[1:])


@every
@all_recipes
def test_jvp(setting, name, kind):
    if kind == "none" and name in ("Linear", "GroupedLinear"):
        pytest.skip("made of torch's own ops, which have it")
    with pytest.raises(NotImplementedError, match=rf"jvp\).* not supported|{STATE}"):
        torch.func.jvp(lambda x: setting.run(setting.module(), x), (setting.x,), (setting.x,))
    setting.run(setting.module(), setting.x)


def test_state_is_not_made_of_fake_tensors(device):
    setting = Setting("Linear", "delayed", device)
    mode = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.raises(NotImplementedError, match=STATE):
        setting.run(setting.original, mode.from_tensor(setting.x))
    setting.run(setting.original, setting.x)
