"""Products of low rank that a frozen layer's FP8 product adds: values, sharing, memory."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from checks import assert_same_bits, needs_cuda
from graph_stand_in import graphs_on_cpu  # noqa: F401 (a fixture)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import Linear, fp8_autocast, recipe
from apex_te.fp8.autocast import local
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.fp8.scheme.block import BlockQuantizer
from apex_te.fp8.scheme.current import CurrentScalingQuantizer
from apex_te.fp8.scheme.delayed import DelayedScalingQuantizer
from apex_te.fp8.scheme.hif8 import HiF8Quantizer
from apex_te.fp8.scheme.mx import MXQuantizer
from apex_te.graphs.graphed_callables import make_graphed_callables
from apex_te.module._core import programs
from apex_te.module._core.low_rank import LastInput, cast_once

RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "tensorwise": recipe.CurrentScaling(),
    "blockwise": recipe.BlockScaling(),
    "mxfp8": recipe.MXFP8Scaling(),
    "hif8": recipe.CurrentScaling(fp8_format=recipe.Format.HIF8),
}
STATELESS = [name for name in RECIPES if name != "delayed"]
QUANTIZERS = (
    BlockQuantizer, CurrentScalingQuantizer, DelayedScalingQuantizer, HiF8Quantizer, MXQuantizer,
)  # fmt: skip
OUT = (96, 48, 32)
IN, RANK, SCALING = 64, 4, 1.3


@pytest.fixture(params=RECIPES)
def scaling(request):
    return RECIPES[request.param]


def drawn(shape, device, dtype):
    """Random values that bfloat16 has, the same on each device and in each dtype."""
    return torch.randn(*shape).bfloat16().to(device, dtype)


class Adapted(nn.Module):
    """Frozen layers with one input, and adapters; ``fused`` has the products add the adapters."""

    def __init__(self, scaling, device, held=True, dtype=torch.bfloat16, bias=True):
        super().__init__()
        torch.manual_seed(0)
        with apex_te.fp8_model_init(enabled=held, recipe=scaling):
            self.layers = nn.ModuleList(
                Linear(
                    IN, out, bias=bias, params_dtype=dtype, device=device,
                    init_method=lambda w: w.copy_(drawn(w.shape, w.device, w.dtype) / 32),
                )
                for out in OUT
            )  # fmt: skip
        self.requires_grad_(False)
        for layer in self.layers:
            if bias:
                layer.bias.copy_(drawn(layer.bias.shape, device, dtype))
        self.down = nn.ParameterList(drawn((RANK, IN), device, dtype) / 8 for _ in OUT)
        self.up = nn.ParameterList(drawn((out, RANK), device, dtype) / 8 for out in OUT)
        self.fused = True
        self.separate = False

    def forward(self, x, dropped=None):
        outs = []
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            taken = x.clone() if self.separate else x
            if self.fused:
                outs.append(layer.forward_low_rank(taken, down, up, SCALING, dropped))
                continue
            low = functional.linear(taken if dropped is None else dropped, down)
            outs.append(layer(taken) + functional.linear(low, up) * SCALING)
        return torch.cat(outs, -1)


def rows_of(device, shape=(3, 8, IN), dtype=torch.bfloat16):
    torch.manual_seed(1)
    return drawn(shape, device, dtype)


def step(model, scaling, x, dy=None, **options):
    """Output, gradient of the input and gradients of the adapters; draws ``dy`` if it is None."""
    x = x.clone().requires_grad_()
    with fp8_autocast(fp8_recipe=scaling):
        out = model(x, **options)
    if dy is None:
        torch.manual_seed(2)
        dy = drawn(out.shape, out.device, out.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = None
    out.backward(dy)
    return out.detach(), x.grad, *[p.grad for p in trained]


def run(scaling, device, fused=True, separate=False, held=True, shape=(3, 8, IN), steps=3, **how):
    model = Adapted(scaling, device, held, **how)
    model.fused, model.separate = fused, separate
    x = rows_of(device, shape, how.get("dtype", torch.bfloat16))
    found = [step(model, scaling, x) for _ in range(steps)]
    return found[-1]


def distance(found, wanted):
    return float((found.detach().double() - wanted.detach().double()).norm())


@pytest.mark.parametrize("held", [True, False])
def test_values_and_gradients_are_at_least_as_exact(device, scaling, held):
    """Compares fused and separate sums of the same quantized operands with sums in float32."""
    exact = run(scaling, device, held=held, dtype=torch.float32, fused=False)
    fused = run(scaling, device, held=held)
    plain = run(scaling, device, held=held, fused=False)
    for found, other, wanted in zip(fused, plain, exact, strict=True):
        size = float(wanted.norm())
        assert distance(found, wanted) < 1.02 * distance(other, wanted)
        assert distance(found, wanted) < 0.005 * size
    # Output and input's gradient had more roundings. Emulated products are rounded before sums.
    nearer = 0.97 if scaling in (RECIPES["mxfp8"], RECIPES["hif8"]) else 0.9
    for found, other, wanted in zip(fused[:2], plain[:2], exact[:2], strict=True):
        assert distance(found, wanted) < nearer * distance(other, wanted)


def test_fused_is_exact_in_float32(device, scaling):
    """Compares a fused layer with a plain one in float32, whose rounding alone may differ."""
    fused = run(scaling, device, dtype=torch.float32)
    plain = run(scaling, device, dtype=torch.float32, fused=False)
    # The gradient of the first layer's FP8 product is all that a rounding could have changed.
    for found, wanted in zip(fused, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("held", [True, False])
def test_sharing_keeps_bits(device, scaling, held):
    """One tensor for all layers gives the bits of one copy of it for each."""
    one, several = (run(scaling, device, separate=way, held=held) for way in (False, True))
    assert_same_bits(one[0], several[0])
    for found, wanted in zip(one[2:], several[2:], strict=True):
        assert_same_bits(found, wanted)
    # The input's gradient is the sum of three: each product adds before it rounds.
    assert distance(one[1], several[1]) < 0.01 * float(several[1].norm())


@pytest.mark.parametrize("shape", [(0, IN), (1, IN), (5, IN), (2, 0, IN), (2, 17, IN)])
def test_any_number_of_rows(device, scaling, shape):
    fused = run(scaling, device, shape=shape)
    plain = run(scaling, device, shape=shape, fused=False)
    for found, wanted in zip(fused, plain, strict=True):
        assert found.shape == wanted.shape
        assert distance(found, wanted) <= 0.02 * float(wanted.norm())


def note_casts(monkeypatch, note):
    """Calls ``note(quantizer, x, rowwise, columnwise)`` before each cast of a matrix."""

    def noting(quantize):
        def call(self, x, rowwise=True, columnwise=True, with_dbias=False):
            note(self, x, rowwise, columnwise)
            return quantize(self, x, rowwise, columnwise, with_dbias)

        return call

    for kind in QUANTIZERS:
        monkeypatch.setattr(kind, "quantize", noting(kind.quantize))


@pytest.fixture
def casts(monkeypatch):
    """List with a bool for each cast of the layers' input: did it make a columnwise copy?"""
    counted = []

    def note(quantizer, x, rowwise, columnwise):
        if rowwise and x.shape == (24, IN):
            counted.append(columnwise)

    note_casts(monkeypatch, note)
    return counted


@pytest.mark.parametrize("name", RECIPES)
def test_no_columnwise_copy_is_cast(device, name, monkeypatch):
    """Expects one copy of each input and gradient, and no cast of weights that are held in FP8.

    MXFP8 alone casts held weights, since its columnwise blocks are not those of the rowwise copy.
    """
    model, x, made = Adapted(RECIPES[name], device), rows_of(device), []
    note_casts(monkeypatch, lambda _, x, *copies: made.append((tuple(x.shape), *copies)))
    step(model, RECIPES[name], x)
    if name == "mxfp8":
        made = [cast for cast in made if cast[0][0] == 24]
    inputs = [((24, IN), True, False)] * (1 if name in STATELESS else len(OUT))
    assert sorted(made) == sorted([*inputs, *[((24, out), True, False) for out in OUT]])


@pytest.mark.parametrize("name", RECIPES)
def test_layers_cast_a_shared_input_once(device, name, casts):
    """Delayed scaling has a scale for each layer, and casts for each."""
    run(RECIPES[name], device, steps=1)
    assert casts == [False] * (1 if name in STATELESS else len(OUT))


@pytest.mark.parametrize("name", STATELESS)
def test_what_ends_sharing(device, name, casts):
    """A write to the input, another tensor, another region, setting or recipe: a cast each."""
    scaling = RECIPES[name]
    model = Adapted(scaling, device)
    x = rows_of(device)

    def casts_of(*calls):
        before = len(casts)
        for call in calls:
            call()
        return len(casts) - before

    def forward_of(number):
        return lambda inp=None: model.layers[number].forward_low_rank(
            x if inp is None else inp, model.down[number], model.up[number]
        )

    q, k, v = (forward_of(number) for number in range(3))
    with fp8_autocast(fp8_recipe=scaling):
        assert casts_of(q, k, v, v) == 1
        assert casts_of(lambda: x.mul_(2), k, q) == 1
        first = v()
        assert casts_of(lambda: q(x.clone())) == 1
        assert casts_of(q, v) == 1
        with fp8_autocast(fp8_recipe=scaling):
            assert casts_of(q, v) == 1
        other = recipe.BlockScaling() if name != "blockwise" else recipe.CurrentScaling()
        with fp8_autocast(fp8_recipe=other):
            assert casts_of(k) == 1
        assert casts_of(v) == 0
        assert_same_bits(v(), first)
    with fp8_autocast(fp8_recipe=scaling):
        assert casts_of(v) == 1
    with torch.inference_mode(), fp8_autocast(fp8_recipe=scaling):
        x = x.clone()
        assert casts_of(q, k) == 2  # versions are not counted


@pytest.mark.parametrize("name", STATELESS)
def test_a_buffer_with_the_next_batch(device, name):
    """A write that raises no version is noticed by the layer that took the buffer first."""
    scaling = RECIPES[name]
    model, x = Adapted(scaling, device), rows_of(device)
    with torch.no_grad(), fp8_autocast(fp8_recipe=scaling):
        model(x)
        x.data.mul_(-0.3)  # as a collective writes, or the replay of a CUDA graph
        assert_same_bits(model(x), model(x.clone()))


def test_threads_share_nothing(device, casts):
    scaling = RECIPES["tensorwise"]
    model, x = Adapted(scaling, device), rows_of(device)
    found = []

    def work():
        with fp8_autocast(fp8_recipe=scaling):
            found.append(model(x))

    with fp8_autocast(fp8_recipe=scaling):
        found.append(model(x))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(casts) == 2
    assert_same_bits(found[0], found[1])


def test_quantizers_of_other_settings_cast_anew(device):
    """Tests layers of several regions whose recomputes one backward runs, outside of any region."""
    holder, x = LastInput(), rows_of(device, (24, IN))
    float8 = torch.float8_e4m3fn
    quantizers = [
        CurrentScalingQuantizer(float8, False, 0.0),
        CurrentScalingQuantizer(float8, True, 0.0),
        CurrentScalingQuantizer(float8, False, 1e3),
        CurrentScalingQuantizer(torch.float8_e5m2, False, 0.0),
        BlockQuantizer(float8, 1, "pow2", 0.0),
        BlockQuantizer(float8, 1, "fp32", 0.0),
        BlockQuantizer(float8, 1, "server", 0.0),
        MXQuantizer(float8, "up"),
        MXQuantizer(float8, "floor"),
        HiF8Quantizer(224.0, False, 0.0),
        HiF8Quantizer(15.0, False, 0.0),
    ]
    for first in quantizers:
        holder.note(x, first.cast_key(), first.quantize(x, True, False)[0], None, x)
        entry = holder.find(x, rows_of(device))
        for second in quantizers:
            found, wanted = cast_once(entry, second, x), second.quantize(x, True, False)[0]
            assert (found is entry.quantized) == (first is second)
            assert_same_bits(found.rowwise.view(torch.uint8), wanted.rowwise.view(torch.uint8))
            assert_same_bits(found.rowwise_scale_inv, wanted.rowwise_scale_inv)
    delayed = DelayedScalingQuantizer(float8, torch.ones(1, device=device))
    assert delayed.cast_key() is None
    assert quantizers[0].shared(object()).cast_key() is None  # its scale depends on other ranks


@pytest.mark.parametrize("inside", [True, False])
def test_nothing_made_for_sharing_outlives_its_use(device, inside):
    """The copy goes with the region, or with the first backward if that is inside of it."""
    scaling = RECIPES["tensorwise"]
    model = Adapted(scaling, device)
    x = rows_of(device).requires_grad_()
    with fp8_autocast(fp8_recipe=scaling):
        y = x * 1
        out = model(y)
        entry = local.region.last_input.entry
        copy = weakref.ref(entry.quantized.rowwise)
        assert entry.alias is not None
        del entry
        if inside:
            out.sum().backward()
            assert copy() is None
    gc.disable()
    try:
        assert copy() is None
    finally:
        gc.enable()
    if not inside:
        out.sum().backward()
    with torch.no_grad(), fp8_autocast(fp8_recipe=scaling):
        y = x.detach() * 1
        model(y)
        copy = weakref.ref(local.region.last_input.entry.quantized.rowwise)
        assert copy() is not None
        del y  # without a graph the input goes before the region
        assert copy() is None
        assert local.region.last_input.entry is None


def test_saved_for_backward(device, scaling):
    """The input, the small product, the adapter and the weight itself; no copy of either."""
    model = Adapted(scaling, device)
    x = rows_of(device).requires_grad_()
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    layer, down, up = model.layers[0], model.down[0], model.up[0]
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        fp8_autocast(fp8_recipe=scaling),
    ):
        layer.forward_low_rank(x, down, up)
    weights = [t for t in kept if type(t) is FP8Parameter]
    assert len(weights) == 1
    assert weights[0] is layer.weight
    plain = [t for t in kept if type(t) is not FP8Parameter]
    own = [t for t in plain if t.data_ptr() == x.data_ptr()]
    assert [t.shape for t in own] == [x.shape]
    rest = [tuple(t.shape) for t in plain if t is not own[0]]
    assert sorted(rest) == sorted([(24, RANK), tuple(down.shape), tuple(up.shape)])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_recompute(device, scaling, reentrant, whole):
    model = Adapted(scaling, device)
    x = rows_of(device)
    twin = Adapted(scaling, device)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = twin

        def forward(self, x):
            if whole:
                return checkpoint(twin, x, use_reentrant=reentrant)
            parts = zip(twin.layers, twin.down, twin.up, strict=True)
            outs = [
                checkpoint(layer.forward_low_rank, x, down, up, SCALING, use_reentrant=reentrant)
                for layer, down, up in parts
            ]
            return torch.cat(outs, -1)

    again = Checkpointed()
    for _ in range(3):
        found, wanted = step(again, scaling, x), step(model, scaling, x)
        assert_same_bits(found[0], wanted[0])
        for a, b in zip(found[2:], wanted[2:], strict=True):
            assert_same_bits(a, b)
        assert distance(found[1], wanted[1]) <= 0.01 * float(wanted[1].norm())


def test_dropped_input(device, scaling):
    model, x = Adapted(scaling, device), rows_of(device)
    dropped = functional.dropout(x, 0.5)
    found = step(model, scaling, x, dropped=dropped)
    model.fused = False
    for _ in range(2):
        wanted = step(model, scaling, x, dropped=dropped)
    for a, b in zip(found[:1] + found[2:], wanted[:1] + wanted[2:], strict=True):
        assert distance(a, b) < 0.05 * float(b.norm())
    dropped.requires_grad_()
    with fp8_autocast(fp8_recipe=scaling):
        out = model.layers[0].forward_low_rank(x, model.down[0], model.up[0], 2.0, dropped)
    (grad,) = torch.autograd.grad(out.sum(), dropped)
    wanted = (torch.ones_like(out) @ model.up[0] @ model.down[0] * 2).detach()
    assert distance(grad, wanted) < 0.02 * float(wanted.norm())


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_outputs_in_backwards_of_their_own(device, name):
    """Gradients of some outputs, in several backwards, are those of separate inputs."""
    scaling = RECIPES[name]
    grads = []
    for separate in (False, True):
        model = Adapted(scaling, device)
        x = rows_of(device).requires_grad_()
        with fp8_autocast(fp8_recipe=scaling):
            outs = [
                layer.forward_low_rank(x.clone() if separate else x, down, up)
                for layer, down, up in zip(model.layers, model.down, model.up, strict=True)
            ]
        outs[0].sum().backward()
        outs[2].square().sum().backward()
        grads.append(x.grad)
    assert distance(*grads) < 0.01 * float(grads[1].norm())


@pytest.mark.parametrize("order", [(2, 1, 0), (2, 0, 1), (0, 2, 1), (1, 2, 0)])
def test_backwards_in_any_order(device, order):
    """Layers that share an input do not free what another's backward needs."""
    grads = []
    for separate in (False, True):
        model = Adapted(RECIPES["tensorwise"], device)
        x = rows_of(device).requires_grad_()
        with fp8_autocast(fp8_recipe=RECIPES["tensorwise"]):
            outs = [
                layer.forward_low_rank(x.clone() if separate else x, down, up)
                for layer, down, up in zip(model.layers, model.down, model.up, strict=True)
            ]
        for number in order:
            outs[number].square().sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            outs[0].sum().backward()
        grads.append([x.grad, *(p.grad for p in (*model.down, *model.up))])
    for found, wanted in zip(*grads, strict=True):
        assert distance(found, wanted) < 0.01 * float(wanted.norm())


def test_a_write_between_backwards_is_refused(device):
    model, x = Adapted(RECIPES["tensorwise"], device), rows_of(device).requires_grad_()
    with fp8_autocast(fp8_recipe=RECIPES["tensorwise"]):
        outs = [
            layer.forward_low_rank(x, down, up)
            for layer, down, up in zip(model.layers, model.down, model.up, strict=True)
        ]
    outs[1].sum().backward()
    with torch.no_grad():
        model.up[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outs[0].sum().backward()


@pytest.mark.parametrize("leaf", [True, False])
def test_a_detached_input_passes_no_gradient_on(device, leaf):
    """Calls after ``detach_`` or ``requires_grad_(False)`` do not reach the earlier graph."""
    grads = []
    for call in (lambda x: x, torch.clone):
        model = Adapted(RECIPES["tensorwise"], device)
        x = rows_of(device).requires_grad_()
        inp = x if leaf else x * 1
        outs = []
        with fp8_autocast(fp8_recipe=RECIPES["tensorwise"]):
            for number, layer in enumerate(model.layers):
                low = model.down[number], model.up[number]
                outs.append(layer.forward_low_rank(call(inp), *low).square().sum())
                if leaf and number == 0:
                    inp.requires_grad_(False)
                else:
                    inp.detach_().requires_grad_()
        (outs[0] + outs[1] if leaf else sum(outs)).backward()
        grads.append(x.grad)
    assert distance(*grads) < 0.01 * float(grads[1].norm())


def test_a_write_between_is_refused_in_backward(device):
    scaling = RECIPES["tensorwise"]
    model, x = Adapted(scaling, device), rows_of(device).requires_grad_()
    with fp8_autocast(fp8_recipe=scaling):
        y = x * 1
        first = model.layers[0].forward_low_rank(y, model.down[0], model.up[0])
        y.mul_(3)
        second = model.layers[0].forward_low_rank(y, model.down[0], model.up[0])
    assert distance(first, second) > 0.5 * float(first.detach().norm())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first.sum() + second.sum()).backward()


def test_only_what_is_asked_for(device):
    """An input without gradient gets none from the layers that share it."""
    scaling = RECIPES["tensorwise"]
    model, x = Adapted(scaling, device), rows_of(device)
    with fp8_autocast(fp8_recipe=scaling):
        out = model(x)
        assert local.region.last_input.entry.alias is None
    node = out.grad_fn.next_functions[1][0]
    assert node.next_functions[0][0] is None
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    for p in model.parameters():
        p.requires_grad_(False)
    with fp8_autocast(fp8_recipe=scaling):
        assert not model(x).requires_grad


def test_evaluation(device, scaling):
    model, x = Adapted(scaling, device), rows_of(device)
    for _ in range(2):
        step(model, scaling, x)
    apex_te.flush_fp8_state()
    with torch.no_grad(), fp8_autocast(fp8_recipe=scaling):
        found = model(x)
    with torch.inference_mode(), fp8_autocast(fp8_recipe=scaling):
        assert_same_bits(model(x).clone(), found)
    assert_same_bits(found, step(model, scaling, x)[0])


def test_autocast(device):
    """Adapters in float32, as PEFT has them by default, compute in autocast's dtype."""
    scaling = RECIPES["tensorwise"]
    model = Adapted(scaling, device)
    x = rows_of(device).requires_grad_()
    wide = [p.detach().float().requires_grad_() for p in (model.down[0], model.up[0])]
    for inp in (x, x.detach().float().requires_grad_()):
        with torch.autocast(device.type, dtype=torch.bfloat16), fp8_autocast(fp8_recipe=scaling):
            out = model.layers[0].forward_low_rank(inp, *wide)
        assert out.dtype is torch.bfloat16
        grads = torch.autograd.grad(out.float().square().sum(), [inp, *wide])
        assert [g.dtype for g in grads] == [inp.dtype, torch.float32, torch.float32]
        with fp8_autocast(fp8_recipe=scaling):
            narrow = [p.bfloat16() for p in wide]
            twin = model.layers[0].forward_low_rank(x, *narrow)
        assert_same_bits(out, twin)
        expected = torch.autograd.grad(twin.float().square().sum(), [x, *wide])
        for grad, other in zip(grads, expected, strict=True):
            assert distance(grad, other) < 0.01 * float(other.norm())


@pytest.mark.parametrize("case", ["no region", "trained weight", "torch.func", "compile"])
def test_plain_ops_elsewhere(device, case):
    scaling = RECIPES["tensorwise"]
    model, x = Adapted(scaling, device, held=False), rows_of(device)
    layer, down, up = model.layers[0], model.down[0], model.up[0]
    if case == "trained weight":
        layer.requires_grad_()

    def fused(x):
        with fp8_autocast(enabled=case != "no region", fp8_recipe=scaling):
            return layer.forward_low_rank(x, down, up, 2.0)

    def plain(x):
        with fp8_autocast(enabled=case != "no region", fp8_recipe=scaling):
            return layer(x) + functional.linear(functional.linear(x, down), up) * 2.0

    if case == "torch.func":
        x = rows_of(device, (24, IN))
        for of in (fused, plain):
            of.grad = torch.func.grad(lambda x, of=of: of(x).float().square().sum())(x)
        assert_same_bits(fused.grad, plain.grad)
    elif case == "compile":
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
        out = compiled(x)
        assert distance(out, plain(x)) < 0.01 * float(out.detach().norm())
        out.sum().backward()
        assert down.grad is not None
    else:
        assert_same_bits(fused(x), plain(x))
        fused(x).sum().backward()
        assert (layer.weight.grad is not None) == (case == "trained weight")


def test_programs_of_the_layer_stay_in_use(device):
    """Calls of the layer itself run their program before and after calls with an adapter."""
    scaling = RECIPES["delayed"]
    model, x = Adapted(scaling, device), rows_of(device).requires_grad_()
    layer = model.layers[0]
    outs = []
    for enabled in (True, False):
        before = programs.set_enabled(enabled)
        try:
            other = Adapted(scaling, device)
            for i in range(6):
                with fp8_autocast(fp8_recipe=scaling):
                    if i % 2:
                        other.layers[0].forward_low_rank(x, other.down[0], other.up[0])
                    out = other.layers[0](x)
            outs.append(out)
        finally:
            programs.set_enabled(before)
    assert_same_bits(*outs)
    assert layer.weight.grad is None


def test_errors(device):
    layer = Linear(IN, 32, params_dtype=torch.bfloat16, device=device)
    x = rows_of(device)
    down = torch.zeros(RANK, IN, dtype=torch.bfloat16, device=device)
    up = torch.zeros(32, RANK, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"Linear: down must have shape \[4, 64\], got \[4, 32\]"):
        layer.forward_low_rank(x, down[:, :32], up)
    with pytest.raises(ValueError, match=r"Linear: up must have shape \[32, 4\], got \[32, 3\]"):
        layer.forward_low_rank(x, down, up[:, :3])
    with pytest.raises(ValueError, match="Linear: low_rank_inp must have shape"):
        layer.forward_low_rank(x, down, up, 1.0, x[:1])
    with pytest.raises(TypeError, match="Linear: inp must have the dtype of the parameters"):
        layer.forward_low_rank(x, down.float(), up)
    with pytest.raises(TypeError, match=r"Linear: down must be a torch\.Tensor, got NoneType"):
        layer.forward_low_rank(x, None, up)
    with pytest.raises(TypeError, match=r"Linear: inp must be a torch\.Tensor, got list"):
        layer.forward_low_rank([x], down, up)
    with pytest.raises(TypeError, match="Linear: scaling must be a float, got Tensor"):
        layer.forward_low_rank(x, down, up, torch.ones(()))
    with pytest.raises(ValueError, match=r"Linear: up must be on the device of inp, .*, got meta"):
        layer.forward_low_rank(x, down, up.to("meta"))
    layer = Linear(IN, 32, params_dtype=torch.bfloat16, device=device, return_bias=True)
    with pytest.raises(NotImplementedError, match="Linear: return_bias must not be set"):
        layer.forward_low_rank(x, down, up)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_graphed_callables(device, request, name, held):
    if device.type == "cpu":
        request.getfixturevalue("graphs_on_cpu")
    scaling = RECIPES[name]
    eager, graphed = (Adapted(scaling, device, held) for _ in range(2))
    sample = rows_of(device).requires_grad_()
    make_graphed_callables(graphed, (sample,), fp8_enabled=True, fp8_recipe=scaling)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn_like(sample).detach()
        found, wanted = step(graphed, scaling, x), step(eager, scaling, x)
        assert_same_bits(found[0], wanted[0])
        for a, b in zip(found[2:], wanted[2:], strict=True):
            assert_same_bits(a, b)
        # Captured layers share nothing, so that autograd adds up the input's gradient.
        assert distance(found[1], wanted[1]) < 0.01 * float(wanted[1].norm())
    assert graphed.forward.capture.run >= 3


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_kept_columnwise_weights(device, name):
    scaling, found = RECIPES[name], []
    for keep in (True, False):
        model, x = Adapted(scaling, device, held=False), rows_of(device).requires_grad_()
        for _ in range(2):
            model.zero_grad()
            x.grad = None
            with fp8_autocast(fp8_recipe=scaling, keep_columnwise_weights=keep):
                out = model(x)
            out.float().square().sum().backward()
        found.append([out, x.grad, *[p.grad for p in model.parameters() if p.requires_grad]])
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_statistics_see_each_layer(device, name):
    """While statistics are recorded each layer casts, and results stay the same."""
    scaling, noted, outs = RECIPES[name], [], []
    for fused in (True, False):
        model, x = Adapted(scaling, device), rows_of(device)
        model.fused = fused
        with apex_te.fp8_statistics(model) as stats:
            outs.append(step(model, scaling, x)[0])
        noted.append(stats.to_dict())
        if fused:
            assert_same_bits(step(Adapted(scaling, device), scaling, x)[0], outs[0])
    assert noted[0].keys() == noted[1].keys()
    inputs = [key for key in noted[0] if key.endswith(".input")]
    assert len(inputs) == len(OUT)
    for key in inputs:
        assert noted[0][key] == noted[1][key]


def test_delayed_state_is_that_of_separate_sums(device):
    """Scales and amax histories do not tell whether a product has added the adapter."""
    scaling = RECIPES["delayed"]
    states = []
    for fused in (True, False):
        model, x = Adapted(scaling, device), rows_of(device)
        model.fused = fused
        for _ in range(4):
            step(model, scaling, x)
        apex_te.flush_fp8_state()
        states.append([v for k, v in model.state_dict().items() if "fp8_state" in k])
    assert states[0]
    for a, b in zip(*states, strict=True):
        assert_same_bits(a, b)


@pytest.mark.cuda
@needs_cuda
class TestCUDA:
    def test_replays_cast_anew(self, casts):
        """A captured step casts for each layer, with what replays then read."""
        for name in ("delayed", "tensorwise", "blockwise"):
            scaling, device = RECIPES[name], torch.device("cuda")
            model, x = Adapted(scaling, device), rows_of(device)
            with fp8_autocast(fp8_recipe=scaling):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), torch.no_grad():
                    for _ in range(2):
                        model(x)
                torch.cuda.current_stream().wait_stream(stream)
                casts.clear()
                graph = torch.cuda.CUDAGraph()
                with torch.no_grad(), torch.cuda.graph(graph):
                    out = model(x)
                assert len(casts) == len(OUT)
            for factor in (1.0, -0.5):
                x.copy_(rows_of(device) * factor)
                graph.replay()
                with torch.no_grad(), fp8_autocast(fp8_recipe=scaling):
                    wanted = model(x)
                if name != "delayed":  # whose scales are those of the capture
                    assert_same_bits(out, wanted)
                assert distance(out, wanted) < 0.1 * float(wanted.norm())

    def test_another_stream_casts_anew(self, casts):
        scaling, device = RECIPES["tensorwise"], torch.device("cuda")
        model, x = Adapted(scaling, device), rows_of(device)
        with fp8_autocast(fp8_recipe=scaling):
            first = model(x)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                second = model(x)
            torch.cuda.current_stream().wait_stream(stream)
        assert len(casts) == 2
        assert_same_bits(first, second)

    @pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
    def test_peak_memory_and_values_at_size(self, name):
        """A step of 4096 rows takes no more memory than that of separate sums."""
        scaling, device = RECIPES[name], torch.device("cuda")
        peaks, found = [], []
        for fused in (True, False):
            torch.manual_seed(0)
            with apex_te.fp8_model_init(recipe=scaling):
                layers = [
                    Linear(2048, out, bias=False, params_dtype=torch.bfloat16, device=device)
                    for out in (2048, 512, 512, 4096)
                ]
            x = torch.randn(4096, 2048, device=device, dtype=torch.bfloat16, requires_grad=True)
            down = [torch.randn(16, 2048, device=device).mul(0.02).bfloat16() for _ in layers]
            up = [
                torch.randn(layer.out_features, 16, device=device).mul(0.02).bfloat16()
                for layer in layers
            ]
            for tensor in (*down, *up):
                tensor.requires_grad_()
            for layer in layers:
                layer.requires_grad_(False)
            for _ in range(4):
                for tensor in (x, *down, *up):
                    tensor.grad = None
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                with fp8_autocast(fp8_recipe=scaling):
                    h = functional.silu(x)
                    outs = []
                    for layer, a, b in zip(layers, down, up, strict=True):
                        if fused:
                            outs.append(layer.forward_low_rank(h, a, b, 2.0))
                        else:
                            low = functional.linear(functional.linear(h, a), b)
                            outs.append(layer(h) + low * 2.0)
                loss = sum(out.float().square().mean() for out in outs)
                loss.backward()
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
                values = [loss.detach(), x.grad, *[t.grad for t in (*down, *up)]]
                del loss, outs, h
            peaks.append(peak)
            found.append(values)
        assert peaks[0] <= peaks[1], peaks
        for a, b in zip(*found, strict=True):
            assert distance(a, b) < 0.02 * float(b.double().norm())

    def test_no_synchronisation(self):
        scaling, device = RECIPES["delayed"], torch.device("cuda")
        model, x = Adapted(scaling, device), rows_of(device)
        for _ in range(3):
            out = step(model, scaling, x)[0]
        dy = drawn(out.shape, device, out.dtype)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(model, scaling, x, dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
