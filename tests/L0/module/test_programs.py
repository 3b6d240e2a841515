"""Programs give what the ops give one by one, bitwise, and are not used where they would not.

Modules x recipes x shapes x uses; each case trains with programs and without them.
"""

import contextlib
import copy
import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checks import assert_same_bits
from graph_models import fp8_state
from schemes import FIRST_STEP, chosen
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import LayerNormLinear, LayerNormMLP, Linear, fp8_autocast
from apex_te.module._core import programs, recorder
from apex_te.ops import gemm_tuning
from apex_te.ops.gemm_common import fp8_gemm_count

COLS, STEPS = 32, 5
ROOT = Path(__file__).resolve().parents[3]
RECIPES = chosen("delayed", "tensorwise", "blockwise", "rowwise") | {
    "first step": FIRST_STEP,
    "plain": None,
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
KINDS = {
    "linear": lambda **k: Linear(COLS, 48, **k),
    "linear without bias": lambda **k: Linear(COLS, 48, bias=False, **k),
    "saves input": lambda **k: Linear(COLS, 48, save_original_input=True, **k),
    "layer norm": lambda **k: LayerNormLinear(COLS, 48, **k),
    "rms norm": lambda **k: LayerNormLinear(
        COLS, 48, bias=False, normalization="RMSNorm", return_layernorm_output=True, **k
    ),
    "mlp": lambda **k: LayerNormMLP(COLS, 64, **k),
    "swiglu": lambda **k: LayerNormMLP(
        COLS, 64, bias=False, normalization="RMSNorm", activation="swiglu", **k
    ),
}
# Functions of a module that programs run outside of FP8: norm and activation.
PLAIN_USES = {"layer norm": 1, "rms norm": 1, "mlp": 2, "swiglu": 2}
SHAPES = [(16, COLS), (2, 8, COLS), (3, 7, COLS)]


@pytest.fixture(autouse=True)
def _restored():
    yield
    programs.set_enabled(True)


def region(recipe):
    """A region with a recipe, or one that is off for None."""
    return fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe)


def known_in(module):
    """Returns what a module has recorded of its forwards, in FP8 and in high precision."""
    owners = [*module._modes.programs.values(), module._modes.plain]
    return [known for found in owners for known in found._known.values()]


def expected_uses(kind, recipe):
    """The numbers that ``made`` returns after training with programs, for a name of a recipe."""
    return (PLAIN_USES.get(kind, 0),) * 2 if recipe == "plain" else (1, 1)


def made(module):
    """Numbers of forwards and backwards that have a program."""
    forwards = [known for known in known_in(module) if known.program is not None]
    backwards = [b for f in forwards for b in f.backwards.values() if b.program is not None]
    return len(forwards), len(backwards)


def found_in(module):
    """All programs of a module."""
    known = known_in(module)
    known += [backward for k in known for backward in k.backwards.values()]
    return [k.program for k in known if k.program is not None]


def plain_step(module, x, recipe):
    with region(recipe):
        y = module(x)
    outputs = y if isinstance(y, tuple) else (y,)
    torch.autograd.backward(outputs, [torch.sin(7 * o.detach().float()).to(o) for o in outputs])
    return outputs


def train(kind, recipe, shape, enabled, step=plain_step, dtype=torch.float32, device="cpu"):
    """Trains with programs or without; returns all results, the FP8 state and the module."""
    programs.set_enabled(enabled)
    torch.manual_seed(1)
    module = KINDS[kind](params_dtype=dtype, device=device)
    results = []
    for _ in range(STEPS):
        x = torch.randn(shape, dtype=dtype, device=device).requires_grad_()
        outputs = step(module, x, recipe)
        results += [o.detach().clone() for o in outputs]
        for t in (x, *module.parameters()):
            results.append(None if t.grad is None else t.grad.clone())
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
    return results, fp8_state(module), module


def assert_equal_ways(kind, recipe, shape, step=plain_step, uses=(1, 1), **options):
    """Compares training with programs, of which there must be ``uses``, and without."""
    count = fp8_gemm_count()
    expected, state, without = train(kind, recipe, shape, False, step, **options)
    between = fp8_gemm_count()
    actual, same_state, module = train(kind, recipe, shape, True, step, **options)
    assert fp8_gemm_count() - between == between - count
    assert made(without) == (0, 0)
    assert made(module) == uses
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if b is None:
            assert a is None
        else:
            assert_same_bits(a, b)
    for a, b in zip(same_state, state, strict=True):
        assert_same_bits(a, b)
    return module


@pytest.mark.cover(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_training(kind, recipe, shape, dtype, device):
    # Block-scaled products of other numbers of rows resize what they made.
    uses = expected_uses(kind, recipe)
    if recipe == "blockwise" and torch.Size(shape[:-1]).numel() % 4:
        uses = (0, 0)
    options = {"uses": uses, "dtype": dtype, "device": device}
    module = assert_equal_ways(kind, RECIPES[recipe], shape, **options)
    is_whole = torch.Size(shape[:-1]).numel() % 16 == 0 and dtype is torch.bfloat16
    # torch adds the gradient of a norm's output that "rms norm" returns, and copies a scale.
    by_torch = kind in ("rms norm", "saves input")
    if recipe == "plain":
        assert all(p.is_native for p in found_in(module))
    elif device == "cuda" and is_whole and RECIPES[recipe].keeps_state and not by_torch:
        assert all(p.is_native for p in found_in(module))  # one call for all ops


def retained(module, x, recipe):
    with region(recipe):
        y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.cos(y.detach()), retain_graph=True)
    y.backward(torch.sin(y.detach()))
    return (y,)


def twice(module, x, recipe):
    with region(recipe):
        first, second = module(x), module(2 * x)
    for y in (first, second):
        y = y[0] if isinstance(y, tuple) else y
        y.backward(torch.cos(y.detach()))
    return ()


def hooked(module, x, recipe):
    seen = []
    handles = [
        module.register_full_backward_hook(lambda m, dx, dy: seen.append(dy[0].clone())),
        module.register_forward_hook(lambda m, args, y: seen.append(args[0].clone())),
        *(p.register_hook(lambda g: g * 2) for p in module.parameters()),
    ]
    with region(recipe):
        y = module(x * 1)
    y = y[0] if isinstance(y, tuple) else y
    y.register_hook(lambda g: g * 0.5)
    y.backward(torch.cos(y.detach()))
    for handle in handles:
        handle.remove()
    return (y, *seen)


def packed(module, x, recipe):
    """Saved tensors travel as lists of copies."""

    def pack(t):
        return [t.clone()]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0].clone()):
        return plain_step(module, x, recipe)


def recomputed(module, x, recipe):
    with region(recipe):
        y = checkpoint(module, x, use_reentrant=False)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.cos(y.detach()))
    return (y,)


def recomputed_reentrant(module, x, recipe):
    with region(recipe):
        y = checkpoint(module, x, use_reentrant=True)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.cos(y.detach()))
    return (y,)


def strided(module, x, recipe):
    """Input and gradient have strides of their own."""
    with region(recipe):
        y = module(torch.cat([x, x], -1)[..., ::2])
    y = y[0] if isinstance(y, tuple) else y
    y.sum().backward()  # an expanded gradient
    return (y,)


def evaluated(module, x, recipe):
    with torch.no_grad(), region(recipe):
        y = module(x)
    return (*(y if isinstance(y, tuple) else (y,)), *plain_step(module, x, recipe))


def without_input_gradient(module, x, recipe):
    return plain_step(module, x.detach(), recipe)


def with_frozen_weight(module, x, recipe):
    frozen = next(p for name, p in module.named_parameters() if name.endswith("weight"))
    frozen.requires_grad_(False)
    return plain_step(module, x, recipe)


def in_autocast(module, x, recipe):
    with torch.autocast(x.device.type, torch.bfloat16):
        return plain_step(module, x, recipe)


def deferred(module, x, recipe):
    """The backward of one step comes after the forward of the next."""
    with region(recipe):
        y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    with region(recipe):
        other = module(x * 3)
    other = other[0] if isinstance(other, tuple) else other
    y.backward(torch.cos(y.detach()))
    other.backward(torch.cos(other.detach()))
    return y, other


def inferred(module, x, recipe):
    with torch.inference_mode(), region(recipe):
        y = module(x.detach())
    return (*(y if isinstance(y, tuple) else (y,)), *plain_step(module, x, recipe))


def toggled(module, x, recipe):
    """Every other step some parameters need no gradient."""
    frozen = [p for name, p in module.named_parameters() if name.endswith(("weight", "fc1_bias"))]
    for needs in (True, False):
        for parameter in frozen:
            parameter.requires_grad_(needs)
        outputs = plain_step(module, x, recipe)
    for parameter in frozen:
        parameter.requires_grad_(True)
    return outputs


def threaded(module, x, recipe):
    """Another thread runs the step, and meanwhile this one a step of another module."""
    other, mine = copy.deepcopy(module), x.detach().clone().requires_grad_()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(plain_step, module, x, recipe)
        if recipe is None or not recipe.keeps_state:  # else both are of one amax group
            plain_step(other, mine, recipe)
        return running.result()


def functional(module, x, recipe):
    """The parameters are results of ops."""
    made_of = {name: parameter * 1 for name, parameter in module.named_parameters()}
    with region(recipe):
        y = torch.func.functional_call(module, made_of, (x,))
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.cos(y.detach()))
    return (y,)


def transformed(module, x, recipe):
    """A step in a transform comes first, and its output into the next step's input."""
    if recipe is not None and recipe.keeps_state:
        return plain_step(module, x, recipe)

    def call(t):
        with region(recipe):
            y = module(t)
        return y[0] if isinstance(y, tuple) else y

    y, pull = torch.func.vjp(call, x.detach())
    (dx,) = pull(torch.cos(y))
    return (y, dx, *plain_step(module, x, recipe))


USES = {
    step.__name__: step
    for step in (retained, twice, hooked, packed, recomputed, recomputed_reentrant, strided,
                 evaluated, without_input_gradient, with_frozen_weight, in_autocast, deferred,
                 inferred, toggled, threaded, functional, transformed)
}  # fmt: skip


@pytest.mark.cover(2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "saves input", "layer norm", "rms norm", "swiglu"])
@pytest.mark.parametrize("use", USES)
def test_uses(use, kind, recipe):
    expected, state, _ = train(kind, RECIPES[recipe], (2, 8, COLS), False, USES[use])
    actual, same_state, module = train(kind, RECIPES[recipe], (2, 8, COLS), True, USES[use])
    assert made(module)[0] or not expected_uses(kind, recipe)[0]
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_same_bits(a, b)
    for a, b in zip(same_state, state, strict=True):
        assert_same_bits(a, b)


LAYERS = {
    "llama": {"bias": False, "normalization": "RMSNorm", "activation": "swiglu"},
    "gpt": {"attn_input_format": "sbhd", "activation": "gelu"},
    "grouped": {"num_gqa_groups": 2, "attn_input_format": "bshd"},
    "parts": {"fuse_qkv_params": False},
    "dropout": {"attn_input_format": "bshd", "hidden_dropout": 0.3},
}


def layer_steps(options, recipe, dtype, enabled, device="cpu"):
    """All results of a few steps of a Transformer layer, with programs or without."""
    programs.set_enabled(enabled)
    torch.manual_seed(3)
    fixed = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    layer = apex_te.TransformerLayer(
        64, 96, 4, params_dtype=dtype, device=device, **(fixed | options)
    )
    results = []
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(16, 2, 64, dtype=dtype, device=device, requires_grad=True)
        with region(recipe):
            y = layer(x)
        y.backward(torch.sin(7 * y.detach().float()).to(y))
        results += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        layer.zero_grad()
    return results, layer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", LAYERS)
def test_transformer_layer(options, recipe, dtype, device):
    """Programs of projections to heads and from them, whose gradients are joined."""
    arguments = (LAYERS[options], RECIPES[recipe], dtype)
    with sdpa_kernel(SDPBackend.MATH):  # which a GPU repeats bitwise
        expected, _ = layer_steps(*arguments, False, device)
        actual, layer = layer_steps(*arguments, True, device)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)
    of_modules = [made(m) for m in layer.modules() if hasattr(m, "_modes")]
    assert all(found != (0, 0) for found in of_modules[:1] + of_modules[-1:])
    if recipe != "plain" and options != "parts":
        assert all(found == (1, 1) for found in of_modules)


def prepared(kind="linear", recipe="delayed", steps=3, shape=(16, COLS)):
    """A module whose programs are in use, and its input."""
    module = KINDS[kind]()
    x = torch.randn(shape, requires_grad=True)
    for _ in range(steps):
        plain_step(module, x, RECIPES[recipe])
    assert made(module) == expected_uses(kind, recipe)
    return module, x


def both(module, x, recipe="delayed"):
    """Compares one more step with a copy of the module that uses no programs."""
    other = copy.deepcopy(module)
    results = []
    for one, enabled in ((module, True), (other, False)):
        programs.set_enabled(enabled)
        for parameter in one.parameters():
            parameter.grad = None
        leaf = x.detach().clone().requires_grad_()
        outputs = plain_step(one, leaf, RECIPES[recipe])
        results.append([*outputs, leaf.grad, *(p.grad for p in one.parameters())])
    programs.set_enabled(True)
    for a, b in zip(*results, strict=True):
        assert_same_bits(a.detach(), b.detach())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "plain"])
@pytest.mark.parametrize("kind", ["linear", "saves input", "mlp"])
class TestChanges:
    """The recipe keeps no scales, so that a copy of a module computes the same."""

    def test_of_parameters(self, kind, recipe):
        module, x = prepared(kind, recipe)
        with torch.no_grad():
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, torch.nn.Parameter(parameter * 2))
        both(module, x, recipe)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone() + 1
        both(module, x, recipe)

    def test_of_strides(self, kind, recipe):
        module, x = prepared(kind, recipe)
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()
        for _ in range(6):
            both(module, x, recipe)

    def test_of_dtype(self, kind, recipe):
        module, x = prepared(kind, recipe)
        module.bfloat16()
        assert made(module) == (0, 0)
        for _ in range(3):
            both(module, x.bfloat16(), recipe)

    def test_of_shapes(self, kind, recipe):
        module, _ = prepared(kind, recipe)
        for rows in (16, 5, 16, 5, 1, 0, 0, 0, 5):
            both(module, torch.randn(rows, COLS), recipe)

    def test_of_alignment(self, kind, recipe):
        module, x = prepared(kind, recipe)
        shifted = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x.detach())
        for _ in range(3):
            both(module, shifted, recipe)

    def test_while_a_mode_is_active(self, kind, recipe):
        class Counter(TorchDispatchMode):
            own = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.own += func.namespace == "apex_te"
                return func(*args, **(kwargs or {}))

        module, x = prepared(kind, recipe)
        with Counter() as counter:
            both(module, x, recipe)
        with_mode = counter.own
        programs.set_enabled(False)
        with Counter() as counter:
            plain_step(module, x, RECIPES[recipe])
        assert with_mode == 2 * counter.own
        assert counter.own or recipe == "plain"

    def test_while_algorithms_are_tuned(self, kind, recipe, monkeypatch):
        module, x = prepared(kind, recipe)
        monkeypatch.setattr(gemm_tuning, "is_active", True)
        assert not any(p.is_usable() for p in module._modes.programs.values())
        both(module, x, recipe)


def test_state_that_moves():
    module, x = prepared()
    recipe = apex_te.recipe.DelayedScaling(amax_history_len=8)
    for step in range(1, 6):  # with new tensors, which the old programs do not know
        plain_step(module, step * x, recipe)
        staged = module.fp8_state.amax_history_fwd[0, 0].item()
        assert staged == (step * x).abs().max().item()


def test_a_first_scale_that_is_due_again():
    module, x = prepared(recipe="first step")
    module.fp8_state.reset()
    plain_step(module, 100 * x, RECIPES["first step"])
    scale = module.fp8_state.scale_fwd[0].item()
    assert scale == pytest.approx(448 / (100 * x).abs().max().item())


def test_options_that_change():
    """Programs of one choice of an option do not run for the other."""
    module, x = prepared("linear", "tensorwise")
    for saves in (True, True, True, False, True, False):
        module.save_original_input = saves
        both(module, x, "tensorwise")
    assert made(module) == (2, 2)
    norm, x = prepared("layer norm", "plain")
    for eps in (0.5, 0.5, 0.5, 1e-5):
        norm.eps = eps
        both(norm, x, "plain")


@pytest.mark.parametrize("changes", [
    {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True},
])  # fmt: skip
def test_options_do_without(changes):
    module = Linear(COLS, 48, **changes)
    module.weight.main_grad = torch.zeros(48, COLS)
    for _ in range(4):
        plain_step(module, torch.randn(16, COLS), RECIPES["delayed"])
        module.backward_dw()
    assert made(module) == (0, 0)


def test_microbatches_and_statistics_do_without():
    module = Linear(COLS, 48)
    for first in (True, False, True, False):
        with fp8_autocast(fp8_recipe=RECIPES["delayed"]):
            y = module(torch.randn(16, COLS), is_first_microbatch=first)
        y.sum().backward()
    assert made(module) == (0, 0)
    with apex_te.statistics.fp8_statistics(module):
        for _ in range(4):
            plain_step(module, torch.randn(16, COLS), RECIPES["delayed"])
    assert made(module) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_a_step_is_kept(kind):
    module = KINDS[kind]()
    gone = []
    for _ in range(4):
        x = torch.randn(16, COLS, requires_grad=True)
        outputs = plain_step(module, x, RECIPES["tensorwise"])
        gone += [weakref.ref(t.untyped_storage()) for t in (x, *outputs)]
        addresses = weakref.ref(x)
        del x, outputs
        with contextlib.suppress(UnboundLocalError):
            gc.collect()
        assert addresses() is None
    assert made(module) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_large_tensors_are_not_kept_while_recorded(kind, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_BYTES", 1000)
    module = KINDS[kind]()
    for _ in range(4):
        plain_step(module, torch.randn(16, COLS), RECIPES["delayed"])
    assert made(module) == (0, 0)


def test_a_tensor_passed_twice_is_not_taken_for_one():
    torch.manual_seed(0)
    module = LayerNormLinear(COLS, 48)
    x, other = torch.randn(16, COLS), torch.randn(16, COLS)

    def run(a, b):
        with fp8_autocast(fp8_recipe=RECIPES["tensorwise"]):
            return module.forward_with_residual(a, b)[0].detach().clone()

    for _ in range(4):
        run(x, x)
    actual = run(x, other)
    programs.set_enabled(False)
    assert_same_bits(actual, run(x, other))


def test_a_steady_step_makes_few_python_calls():
    """Linear with delayed scaling: calls within the package, from a new recipe to the gradients."""
    module, x = Linear(64, 64, device="cpu"), torch.randn(32, 64, requires_grad=True)
    package = str(Path(apex_te.__file__).parent)
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(5):
            calls.clear()
            sys.setprofile(note)
            try:
                with fp8_autocast(fp8_recipe=apex_te.recipe.DelayedScaling()):
                    out = module(x)
                out.sum().backward()
            finally:
                sys.setprofile(None)
    assert len(calls) <= 104, calls
    assert len({file for file, _ in calls}) <= 14, calls


FIRST_RECORDING = """
import gc, sys, weakref
import torch, apex_te
gc.disable()
module = apex_te.LayerNormMLP(64, 64, device="cpu")
for _ in range(3):
    x = torch.randn(16, 64)
    known = weakref.ref(x)
    out = module(x)
    del x, out
    assert known() is None, "kept"
assert "torch._dynamo" not in sys.modules, "imported"
"""


@pytest.mark.long
def test_the_first_recording_of_a_process_keeps_no_tensor():
    """Nothing is left for the garbage collector, and the compiler is not imported."""
    result = subprocess.run(
        [sys.executable, "-c", FIRST_RECORDING], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
