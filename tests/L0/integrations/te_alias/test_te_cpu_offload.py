"""Offloading of activations: equal results, what is copied, and when copies are let go."""

import contextlib
import gc

import pytest
import torch

import apex_te
from apex_te.integrations.transformer_engine import pytorch as te
from apex_te.integrations.transformer_engine.pytorch import cpu_offload
from apex_te.integrations.transformer_engine.pytorch.cpu_offload import (
    ActivationOffload,
    ManualOffloadSynchronizer,
    get_cpu_offload_context,
)
from apex_te.recipe import CurrentScaling, DelayedScaling


def layers(device, count=4):
    torch.manual_seed(3)
    return torch.nn.ModuleList([apex_te.LayerNormMLP(64, 128, device=device) for _ in range(count)])


def train(device, offload, steps=3):
    """Gradients and outputs of some steps, in FP8 and with dropout between the layers."""
    model, found = layers(device), []
    context, synchronize = offload
    torch.manual_seed(4)
    for step in range(steps):
        x = torch.randn(32, 64, device=device, requires_grad=True)
        out = x
        with apex_te.fp8_autocast(True, DelayedScaling()):
            for layer in model:
                with context:
                    out = torch.nn.functional.dropout(layer(out), 0.1)
                out = synchronize(out)
        out.square().sum().backward()
        found += [x.grad.clone(), out.detach(), *(p.grad.clone() for p in model.parameters())]
        if step % 2:
            model.zero_grad()
    return found


def nothing():
    return contextlib.nullcontext(), lambda x: x


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_results_are_the_same(device, count):
    offload = ActivationOffload(count, 4, smallest=1, devices=("cpu", "cuda"))
    found = train(device, (offload, offload.synchronize))
    for a, b in zip(found, train(device, nothing()), strict=True):
        assert torch.equal(a, b)
    assert (offload.copies > 0) == (count > 0)
    assert ActivationOffload.entered == 0


def test_copies_grow_with_the_layers():
    copies = []
    for count in range(4):
        offload = ActivationOffload(count, 4, smallest=1, devices=("cpu",))
        train("cpu", (offload, offload.synchronize), steps=1)
        copies.append(offload.copies)
    assert copies[1] > 5
    assert copies == [i * copies[1] for i in range(4)]


def test_weights_marked_and_small_tensors_stay():
    offload = ActivationOffload(1, 2, smallest=64 * 4, devices=("cpu",))
    weight = torch.nn.Parameter(torch.randn(64, 64))
    big, small = torch.randn(8, 64), torch.randn(63)
    marked = torch.randn(8, 64)
    cpu_offload.mark_not_offload(marked, None)
    with offload:
        total = (big.requires_grad_() @ weight.t()).sum()  # big, and a view of the weight
        total = total + (small.requires_grad_() ** 2).sum() + (marked.requires_grad_() ** 2).sum()
    assert offload.copies == 1
    offload.synchronize(total).backward()
    assert torch.equal(weight.grad, big.detach().sum(0).expand(64, 64))
    assert torch.equal(marked.grad, 2 * marked.detach())


def test_a_tensor_that_is_saved_twice_is_copied_once():
    offload = ActivationOffload(1, 2, smallest=1, devices=("cpu",))
    x = torch.randn(64, requires_grad=True)
    with offload:
        out = (x**2).sum() + (x**3).sum()
        assert offload.copies == 1
        with torch.no_grad():
            x.mul_(2)  # another version
        out = out + (x**2).sum()
        assert offload.copies == 2
    offload.synchronize(out).backward()
    before = x.detach() / 2
    torch.testing.assert_close(x.grad, 2 * before + 3 * before**2 + 2 * x.detach())


def test_copies_are_let_go_after_the_backward():
    offload = ActivationOffload(1, 2, smallest=1, devices=("cpu",))
    x = torch.randn(64, requires_grad=True)
    with offload:
        out = (x**2).sum()
    out = offload.synchronize(out)
    layer = offload._last
    assert len(layer.saved) == 1
    with offload:
        out = out * 3
    out = offload.synchronize(out)
    out.backward()
    assert not layer.saved
    assert offload._last is None
    assert torch.equal(x.grad, 6 * x.detach())


def test_a_result_can_be_changed_in_place():
    offload = ActivationOffload(1, 2, smallest=1, devices=("cpu",))
    x = torch.randn(64, requires_grad=True)
    with offload:
        out = x**2
    offload.synchronize(out).add_(1).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_without_gradients_nothing_is_copied():
    offload = ActivationOffload(3, 4, smallest=1, devices=("cpu",))
    with torch.no_grad():
        for layer in layers("cpu"):
            with offload:
                out = layer(torch.randn(32, 64))
            offload.synchronize(out)
    assert offload.copies == 0


def test_disabled():
    context, synchronize = get_cpu_offload_context(False, 1, 2, True, True, True)
    x = torch.ones(2)
    with context:
        assert synchronize(x) is x
        assert not cpu_offload.is_cpu_offload_enabled()


def test_enabled():
    context, synchronize = get_cpu_offload_context(True, 1, 2)
    with context:
        assert cpu_offload.is_cpu_offload_enabled()
    assert synchronize(torch.ones(2)).shape == (2,)
    assert (context.num_layers, context.model_layers) == (1, 2)
    assert get_cpu_offload_context(True, None, 3)[0].num_layers == 2


def test_wrong_arguments():
    with pytest.raises(ValueError, match="offload_stream must be None without manual_sync"):
        get_cpu_offload_context(True, 1, 2, offload_stream=object())
    with pytest.raises(ValueError, match="num_layers must be at least 0 and below model_layers"):
        get_cpu_offload_context(True, 2, 2)
    with pytest.raises(ValueError, match="offload_activations must be True"):
        get_cpu_offload_context(True, 1, 2, False)
    with pytest.warns(UserWarning, match="offload_weights has no effect"):
        get_cpu_offload_context(True, 1, 2, True, True)


@pytest.mark.cuda
def test_memory_is_freed_between_forward_and_backward():
    used = {}
    for count in (0, 3):
        offload = ActivationOffload(count, 4)
        gc.collect()
        before = torch.cuda.memory_allocated()  # of other tests of the process
        model = layers("cuda")
        out = torch.randn(1 << 15, 64, device="cuda", requires_grad=True)
        for layer in model:
            with offload:
                out = layer(out)
            out = offload.synchronize(out)
        torch.cuda.synchronize()
        used[count] = torch.cuda.memory_allocated() - before
        out.sum().backward()
        del out, model
    assert used[3] < 0.6 * used[0]


FEATURES = 64
MODULES = {
    "Linear": lambda **k: te.Linear(FEATURES, FEATURES, **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(FEATURES, FEATURES, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(FEATURES, FEATURES, **k),
    "GroupedLinear": lambda **k: te.GroupedLinear(4, FEATURES, FEATURES, **k),
    "MultiheadAttention": lambda **k: te.MultiheadAttention(
        FEATURES, 4, attention_dropout=0.0, **k
    ),
    "TransformerLayer": lambda **k: te.TransformerLayer(
        FEATURES, FEATURES, 4, attention_dropout=0.0, hidden_dropout=0.0, **k
    ),
}
RECIPES = {"none": None, "delayed": DelayedScaling(), "tensorwise": CurrentScaling()}
each_module = pytest.mark.parametrize("kind", MODULES)
each_recipe = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture
def repeatable(device):
    """Has attention's gradients be the same in each run."""
    torch.use_deterministic_algorithms(device.type == "cuda")
    yield
    torch.use_deterministic_algorithms(False)


class Model(torch.nn.Module):
    """Two layers in a context of ``get_cpu_offload_context``, or in none."""

    def __init__(self, kind, recipe, offload, **options):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList([MODULES[kind](**options) for _ in range(2)])
        self.kind, self.recipe, self.offload = kind, recipe, offload

    def forward(self, x):
        context, synchronize = self.offload
        more = {"m_splits": [x.shape[0] * x.shape[1] // 4] * 4} if "Grouped" in self.kind else {}
        for layer in self.layers:
            region = apex_te.fp8_autocast(self.recipe is not None, self.recipe)
            with context, region:
                x = layer(x, **more)
            x = synchronize(x)
        return x


def gradients(model, x, steps=3):
    found = []
    for _ in range(steps):
        inp = x.clone().requires_grad_()
        out = model(inp)
        out.square().mean().backward()
        found += [out.detach().clone(), inp.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return found


@each_recipe
@each_module
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.usefixtures("repeatable")
def test_modules_offloaded(kind, name, retain, device):
    """Each module gives the bits that it gives without offloading, and nothing stays behind."""
    x = torch.randn(32, 4, FEATURES, device=device)
    options = {"device": device}
    expected = gradients(Model(kind, RECIPES[name], nothing(), **options), x)
    offload = ActivationOffload(1, 2, smallest=1, devices=("cpu", "cuda"), retain=retain)
    model = Model(kind, RECIPES[name], (offload, offload.synchronize), **options)
    for a, b in zip(gradients(model, x), expected, strict=True):
        assert torch.equal(a, b)
    assert offload.copies > 0
    assert offload.offload_synchronizer.get_offloaded_total_size_mb() == 0
    out = model(x.requires_grad_())
    assert offload.get_offloaded_total_size_mb() > 0
    del out
    assert offload.get_offloaded_total_size_mb() == 0  # and no cycle keeps it


@each_recipe
@each_module
@pytest.mark.parametrize("released", [0, 1, 2])
@pytest.mark.usefixtures("repeatable")
def test_manual_synchronization(kind, name, released, device):
    """The caller's copies, of some layers or of all, change no bit."""
    x = torch.randn(32, 4, FEATURES, device=device, requires_grad=True)
    options = {"device": device}
    plain = Model(kind, RECIPES[name], nothing(), **options)
    offload = ManualOffloadSynchronizer(2, smallest=1, devices=("cpu", "cuda"))
    model = Model(kind, RECIPES[name], (offload, offload.synchronize), **options)
    outs = []
    for each in (plain, model):
        out = each(x)
        if each is model:
            for layer in range(released):
                offload.start_offload_layer(layer)
                offload.release_activation_forward_gpu_memory(layer)
            assert (offload.get_offloaded_total_size_mb() > 0) == (released > 0)
            for layer in range(released - 1, -1, -1):
                offload.start_reload_layer(layer)
        out.square().mean().backward()
        outs.append([out.detach(), x.grad, *(p.grad for p in each.parameters())])
        x.grad = None
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"layer_id must be a layer that has run, one of \[0, 1\]"):
        offload.start_offload_layer(2)


def test_manual_synchronization_is_returned():
    context, synchronize, controller = get_cpu_offload_context(
        True, model_layers=3, manual_synchronization=True
    )
    assert context is controller
    assert synchronize.__self__ is controller
    assert get_cpu_offload_context(False, manual_synchronization=True)[2] is None
    controller.devices, controller.smallest = ("cpu",), 1
    x = torch.ones(4, requires_grad=True)
    with context:
        out = x.sigmoid()
    out = synchronize(out)
    out.detach().add_(1)
    with pytest.raises(RuntimeError, match="must not be changed in place before it is offloaded"):
        controller.start_offload_layer(0)
    with pytest.raises(RuntimeError, match="must not be changed in place before it is offloaded"):
        out.sum().backward()


@pytest.mark.cuda
@each_recipe
@each_module
def test_offloading_in_a_graph(kind, name):
    """A captured forward and backward copy to the CPU and back, if the pinned memory is kept."""
    x = torch.randn(64, 32, FEATURES, device="cuda", dtype=torch.bfloat16)
    options = {"device": "cuda", "params_dtype": torch.bfloat16}
    recipe = RECIPES[name]
    plain = Model(kind, recipe, nothing(), **options)
    offload = get_cpu_offload_context(True, 1, 2, retain_pinned_cpu_buffers=True)
    graphed = Model(kind, recipe, offload, **options)
    enabled = {"enabled": recipe is not None, "recipe": recipe}
    te.make_graphed_callables(graphed, (x.clone().requires_grad_(),), **enabled)
    for a, b in zip(gradients(graphed, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)  # attention's order of sums
    other = Model(kind, recipe, get_cpu_offload_context(True, 1, 2), **options)
    with pytest.raises(RuntimeError, match="retain_pinned_cpu_buffers must be True for CUDA"):
        te.make_graphed_callables(other, (x.clone().requires_grad_(),), **enabled)


@pytest.mark.cuda
@each_recipe
@each_module
def test_memory_of_a_layer_is_freed(kind, name):
    """What a layer saves leaves the GPU at once, and its bytes are counted on the CPU."""
    recipe = RECIPES[name]
    options = {"device": "cuda", "params_dtype": torch.bfloat16}
    layer = Model(kind, recipe, nothing(), **options)
    layer.layers = layer.layers[:1]
    make = lambda: torch.randn(512, 128, FEATURES, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    used = lambda: torch.cuda.memory_allocated() / 2**20  # noqa: E731
    gc.collect()
    gc.disable()
    try:
        layer(make()).sum().backward()
        x = make()
        out = layer(x)
        del x
        without = used()
        out.sum().backward()
        out = out.detach()
        before = used()
        offload = get_cpu_offload_context(True, 1, 2)
        layer.offload = offload
        x = make()
        out = layer(x)
        del x
        assert used() == pytest.approx(before, rel=0.1, abs=1)
        total = used() + offload[0].offload_synchronizer.get_offloaded_total_size_mb()
        assert total == pytest.approx(without, rel=0.1, abs=1)
    finally:
        gc.enable()
