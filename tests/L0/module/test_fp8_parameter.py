"""Weights held in FP8: values, ops on them, and inference mode."""

import copy
import io
import pickle
import threading

import pytest
import torch
from layer_kinds import KINDS, dtype_on, repeatable, shape_of
from layer_kinds import build as build_layers

from apex_te import Linear, fp8_autocast
from apex_te.fp8.model_init import fp8_model_init
from apex_te.fp8.parameter import decode as parameter_ops
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.fp8.scheme.base import layout_of
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.layer_norm import LayerNorm
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.ops import block_quantize
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format
from tests.checks import assert_same_bits, codes
from tests.fp8_weight_cases import E4M3, RECIPES, build, plain_twin, reference, run
from tests.schemes import SCHEMES


def stored_bytes(weight):
    held = weight._held
    tensors = (held.rowwise, held.rowwise_scale_inv, held.columnwise)
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


def test_it_is_a_parameter_of_the_nominal_dtype(device):
    module = build(params_dtype=torch.bfloat16, device=device)
    weight = module.weight
    assert type(weight) is FP8Parameter
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.dtype == torch.bfloat16
    assert weight.shape == (48, 160)
    assert weight.device.type == device.type
    assert any(p is weight for p in module.parameters())
    assert type(module.bias) is torch.nn.Parameter
    assert "FP8Parameter(shape=[48, 160]" in repr(weight)
    assert abs(weight.dequantize().float().std().item() - 0.023) < 0.002


@pytest.mark.parametrize(
    ("kind", "args", "names"),
    [
        (Linear, (32, 16), {"weight"}),
        (GroupedLinear, (2, 32, 16), {"weight0", "weight1"}),
        (LayerNormLinear, (32, 16), {"weight"}),
        (LayerNormMLP, (32, 16), {"fc1_weight", "fc2_weight"}),
        (LayerNorm, (32,), set()),
    ],
)
def test_weights_of_gemms_are_held_in_fp8(kind, args, names):
    module = build(kind, *args)
    found = {name for name, p in module.named_parameters() if type(p) is FP8Parameter}
    assert found == names
    if not names:
        return
    extra = ([3, 5],) if kind is GroupedLinear else ()
    with fp8_autocast(True, CurrentScaling()):
        module(torch.randn(8, 32), *extra).sum().backward()
    assert all(type(p.grad) is torch.Tensor for p in module.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_memory(name, device):
    module = build(Linear, 256, 512, scheme=RECIPES[name], device=device)
    weight, x = module.weight, torch.randn(8, 256, device=device, requires_grad=True)
    elements = weight.numel()
    assert elements <= stored_bytes(weight) < 1.04 * elements
    for first, copies in ((None, 1), (True, 2), (False, 2)):
        with fp8_autocast(True, RECIPES[name]):
            out = module(x, is_first_microbatch=first)
        out.sum().backward()
        assert elements * copies <= stored_bytes(weight) < 1.04 * elements * copies
    with torch.no_grad():
        weight.mul_(2)
    assert stored_bytes(weight) < 1.04 * elements
    weight.requires_grad_(False)
    with fp8_autocast(True, RECIPES[name]):
        module(x).sum().backward()
        with torch.inference_mode():
            module(x)
    assert stored_bytes(weight) < 1.04 * elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_a_plain_module_of_the_same_values(name, dtype, device):
    if dtype is torch.float16 and device.type == "cpu" and name != "tensorwise":
        pytest.skip("dtypes once are enough")
    scheme = RECIPES[name]
    module = build(Linear, 160, 48, scheme=scheme, params_dtype=dtype, device=device)
    twin = plain_twin(module)
    for _ in range(2):  # delayed scaling has its scales in the second region
        x, dy = torch.randn(32, 160).to(device, dtype), torch.randn(32, 48).to(device, dtype)
        ours, theirs = run(module, x, dy, scheme), run(twin, x, dy, scheme)
    for actual, expected in zip(ours, theirs, strict=True):
        assert actual.dtype == dtype
        if dtype is torch.float32:  # the amax of values may be a rounding off
            torch.testing.assert_close(actual, expected)
        else:
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("fp8", [True, False])
def test_another_scheme_and_no_fp8_use_the_values(name, fp8, device):
    module = build(scheme=RECIPES[name], device=device)
    twin = plain_twin(module)
    assert torch.equal(twin.weight, module.weight.dequantize())
    x, dy = torch.randn(32, 160).to(device), torch.randn(32, 48).to(device)
    other = RECIPES["hif8"]
    for ours, theirs in zip(
        run(module, x, dy, other, fp8), run(twin, x, dy, other, fp8), strict=True
    ):
        assert torch.equal(ours, theirs)
    cached = [run(m, x, dy, other, fp8, is_first_microbatch=True) for m in (module, twin)]
    assert_same_bits(*cached)
    with torch.autocast(device.type, torch.bfloat16), torch.no_grad():
        assert torch.equal(module(x), twin(x))


def test_calibrating():
    scheme = DelayedScaling(interval=9)
    module = build()
    twin = plain_twin(module)
    x, dy = torch.randn(8, 160), torch.randn(8, 48)
    for each in (module, twin):
        inp = x.clone().requires_grad_()
        with fp8_autocast(False, scheme, calibrating=True):
            each(inp).backward(dy)
    assert torch.equal(module.fp8_state.amax_history_fwd, twin.fp8_state.amax_history_fwd)
    assert module.fp8_state.amax_history_fwd[0, 1] > 0
    assert torch.equal(module.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("name", RECIPES)
def test_copy_quantizes_by_the_current_amax(name, device):
    module = build(
        Linear, 150, 70, scheme=RECIPES[name], params_dtype=torch.bfloat16, device=device
    )
    weight, master = module.weight, torch.randn(70, 150).to(device) * 3
    addresses = [t.data_ptr() for t in (weight._rowwise, weight._rowwise_scale_inv)]
    version = weight._version
    with torch.no_grad():
        weight.copy_(master)  # float32, quantized without rounding to bfloat16 first
    assert weight._version > version
    assert addresses == [t.data_ptr() for t in (weight._rowwise, weight._rowwise_scale_inv)]
    if name in ("delayed", "tensorwise"):
        expected = reference(master)
        assert torch.equal(codes(weight._rowwise), codes(expected.rowwise))
        assert torch.equal(weight._rowwise_scale_inv.cpu(), expected.scale_inv)
        through_bf16 = reference(master.bfloat16())
        assert not torch.equal(codes(weight._rowwise), codes(through_bf16.rowwise))
    elif name == "blockwise":
        expected = block_quantize.reference(master.cpu(), E4M3, block_rows=128)
        assert torch.equal(codes(weight._rowwise), codes(expected.rowwise))
        assert torch.equal(weight._rowwise_scale_inv.cpu(), expected.rowwise_scale_inv)
        layout = weight._transposed()
        assert torch.equal(codes(layout[0]), codes(expected.columnwise))
        assert torch.equal(layout[1].cpu(), expected.columnwise_scale_inv)
    error = (weight.dequantize(torch.float32) - master).norm() / master.norm()
    assert error < 0.04


def test_copies_of_copies(device):
    module = build(device=device)
    other = build(device=device)
    with torch.no_grad():
        other.weight.copy_(module.weight)
        assert torch.equal(codes(other.weight._rowwise), codes(module.weight._rowwise))
        plain = torch.zeros(48, 160, dtype=torch.float16, device=device)
        plain.copy_(module.weight)
        assert torch.equal(plain, module.weight.dequantize(torch.float16))
        blocks = build(scheme=BlockScaling(), device=device)
        blocks.weight.copy_(module.weight)
        expected = block_quantize.reference(module.weight.dequantize().cpu(), E4M3, block_rows=128)
        assert torch.equal(codes(blocks.weight._rowwise), codes(expected.rowwise))
        blocks.weight.copy_(torch.ones(160, dtype=torch.float64))  # broadcast, another dtype
        assert blocks.weight.dequantize().eq(1).all()
        with pytest.raises(RuntimeError, match="expand"):
            blocks.weight.copy_(torch.ones(7))


@pytest.mark.parametrize("change", ["copy", "data", "assign", "optimizer", "load", "in place"])
def test_a_write_invalidates_what_is_cached(change):
    scheme, x = CurrentScaling(), torch.randn(8, 160, requires_grad=True)
    module = build()
    with fp8_autocast(True, scheme):
        module(x, is_first_microbatch=True).sum().backward()
    value = torch.randn(48, 160)
    with torch.no_grad():
        if change == "copy":
            module.weight.copy_(value)
        elif change == "data":
            module.weight.data.copy_(value)
        elif change == "assign":
            module.weight.data = value
        elif change == "load":
            module.load_state_dict({"weight": value, "bias": module.bias.detach()})
        elif change == "in place":
            module.weight.mul_(-2)
        else:
            torch.optim.SGD(module.parameters(), lr=1.0).step()
    fresh = plain_twin(module)
    results = []
    for each in (module, fresh):
        inp = x.detach().clone().requires_grad_()
        with fp8_autocast(True, scheme):
            out = each(inp, is_first_microbatch=False)
        out.square().sum().backward()
        results.append((out, inp.grad))
    assert_same_bits(*results)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [True, False])
def test_optimizers_step_on_the_values(optimizer, foreach):
    module = build(Linear, 32, 16)
    twin = plain_twin(module)
    for each in (module, twin):
        each(torch.ones(4, 32)).square().sum().backward()
        step = optimizer(each.parameters(), lr=0.1, foreach=foreach)
        step.step()
    expected = reference(twin.weight)
    assert torch.equal(codes(module.weight._rowwise), codes(expected.rowwise))
    for state in step.state.values():
        assert all(type(t) is torch.Tensor for t in state.values() if t is not None)
    assert type(torch.zeros_like(module.weight)) is torch.Tensor


def test_gradients_arrive_in_the_nominal_dtype_and_can_be_set():
    module = build(params_dtype=torch.bfloat16)
    with fp8_autocast(True, CurrentScaling()):
        module(torch.randn(4, 160, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad.dtype == torch.bfloat16
    module.weight.grad = torch.ones(48, 160, dtype=torch.bfloat16)
    assert torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0) > 80
    (module.weight * 3).sum().backward()
    module.weight.dequantize(torch.float32).sum().backward()
    assert module.weight.grad[0, 0] == 4  # and 0.01, lost in bfloat16


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
def test_main_grad(fp8, delayed):
    module = build(fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
    twin = plain_twin(module)
    module.weight.main_grad = torch.zeros(48, 160)
    module.weight.grad_added_to_main_grad = False
    x, dy = torch.randn(8, 160), torch.randn(8, 48)
    run(twin, x, dy, CurrentScaling(), fp8)
    with fp8_autocast(fp8, CurrentScaling()):
        module(x).backward(dy)
    module.backward_dw()
    assert torch.allclose(module.weight.main_grad, twin.weight.grad, atol=1e-5)


def test_model_init_nests_and_is_per_thread():
    assert type(Linear(4, 4).weight) is torch.nn.Parameter
    with fp8_model_init(True, CurrentScaling(fp8_format=Format.HIF8)):
        outer = Linear(4, 4)
        with fp8_model_init(False):
            off = Linear(4, 4)
        with fp8_model_init(recipe=BlockScaling()):
            inner = Linear(4, 4)
        again = Linear(4, 4)
        made = []
        thread = threading.Thread(target=lambda: made.append(Linear(4, 4)))
        thread.start()
        thread.join()
    assert outer.weight.recipe == again.weight.recipe == CurrentScaling(fp8_format=Format.HIF8)
    assert inner.weight.recipe == BlockScaling()
    assert type(off.weight) is type(made[0].weight) is type(Linear(4, 4).weight)
    with fp8_model_init():
        assert Linear(4, 4).weight.recipe == CurrentScaling()  # what DelayedScaling() stands for
    pow2 = DelayedScaling(fp8_format=Format.E4M3, scaling_factor_compute_algo="pow2")
    with fp8_model_init(recipe=pow2):
        assert Linear(4, 4).weight.recipe == CurrentScaling(fp8_format=Format.E4M3, pow2=True)


def test_parameters_in_parts():
    module = build(Linear, 32, 64, parameters_split=("query", "key"))
    assert type(module.key_weight) is FP8Parameter
    x = torch.randn(4, 32)
    for first in (None, True, False):
        with fp8_autocast(True, CurrentScaling()):
            out = module(x, is_first_microbatch=first)
        out.sum().backward()
    assert type(module.key_weight.grad) is torch.Tensor
    values = torch.cat([module.query_weight.dequantize(), module.key_weight.dequantize()])
    assert torch.allclose(out, x @ values.t(), atol=0.05)


def test_rejects():
    with pytest.raises(TypeError, match="fp8_model_init: enabled must be a bool, got int"):
        fp8_model_init(1)
    with pytest.raises(TypeError, match="preserve_high_precision_init_val must be a bool, got '"):
        fp8_model_init(preserve_high_precision_init_val="yes")
    with pytest.raises(TypeError, match=r"fp8_model_init: recipe must be a recipe .* got int"):
        fp8_model_init(recipe=1)
    with pytest.raises(TypeError, match="dtype must be float32, float16, bfloat16 or float64, got"):
        build(params_dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"data must have shape \[48, 160\] on cpu, got \[3\] on"):
        build().weight.data = torch.ones(3)
    with pytest.raises(ValueError, match=r"shape must be \[rows, cols\] or .* got \[3\]"):
        FP8Parameter.empty((3,), CurrentScaling(), torch.float32)


def test_training_through_a_master_copy(device):
    module = build(Linear, 32, 32, scheme=DelayedScaling(), preserve=True, device=device)
    master = module.weight.get_high_precision_init_val().to(device)
    module.weight.clear_high_precision_init_val()
    target = torch.randn(32, 32).to(device)
    losses = []
    for _ in range(60):
        x = torch.randn(64, 32).to(device)
        module.zero_grad()
        with fp8_autocast(True, DelayedScaling(amax_history_len=4)):
            loss = (module(x) - x @ target.t()).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            master -= 5.0 * module.weight.grad
            module.bias -= 0.5 * module.bias.grad
            module.weight.copy_(master)
    assert losses[-1] < 0.01 * losses[0]
    assert (module.weight.dequantize() - target).norm() < 0.05 * target.norm()


def saved(value):
    """The value after ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READS = {
    "float": lambda w: w.float(),
    "bfloat16": lambda w: w.bfloat16(),
    "to its dtype": lambda w: w.to(w.dtype),
    "cpu": lambda w: w.cpu(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "transpose": lambda w: w.transpose(0, 1),
    "clone": lambda w: w.clone(),
    "dequantize": lambda w: w.dequantize(),
    "deepcopy": copy.deepcopy,
    "view": lambda w: w.view(-1),
    "flatten": lambda w: w.flatten(),
    "contiguous": lambda w: w.contiguous(),
    "slice": lambda w: w[:128],
    "chunk": lambda w: w.chunk(2)[1],
    "matmul": lambda w: torch.ones(3, 256, device=w.device) @ w.T,
    "linear": lambda w: torch.nn.functional.linear(torch.ones(3, 256, device=w.device), w),
    "file": saved,
    "write": lambda w: w.mul_(2.0),
    "copy_": lambda w: w.copy_(torch.ones_like(w)),
}


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_ops(name, made_inside, device):
    """Also of a weight that was made in inference mode, there and later under no_grad."""
    weights = []
    for inside in (False, made_inside):
        torch.manual_seed(0)
        with torch.inference_mode(inside):
            weights.append(build(Linear, 256, 256, scheme=RECIPES[name], device=device).weight)
    for read in READS.values():
        found = []
        for weight, mode in zip(weights, (torch.no_grad, torch.inference_mode), strict=True):
            with mode():
                got = read(copy.deepcopy(weight))
                values = got.dequantize() if type(got) is FP8Parameter else got
                found.append((type(got), got.dtype, values.as_subclass(torch.Tensor).clone()))
        assert found[0][:2] == found[1][:2]
        assert_same_bits(found[0][2], found[1][2])
    if made_inside:
        with torch.no_grad():
            assert_same_bits(weights[1].t().clone(), weights[0].t().clone())
            assert_same_bits(weights[1].detach().dequantize(), weights[0].dequantize())


def test_views_share_the_data():
    """A write after inference mode is seen in a view made there, and training goes on."""
    weight = build(Linear, 32, 32).weight
    with torch.inference_mode():
        alias, rows = weight.detach(), weight[:16]
    with torch.no_grad():
        weight.fill_(2.0)
        assert torch.equal(alias.dequantize(), torch.full((32, 32), 2.0))
        assert torch.equal(rows.dequantize(), torch.full((16, 32), 2.0))
    weight.dequantize().sum().backward()
    assert torch.equal(weight.grad, torch.ones(32, 32))
    # An alias of rows refuses a write as they do.
    for part in (weight[:16], weight[:16].detach(), weight.detach()[:16].detach()):
        with torch.no_grad(), pytest.raises(NotImplementedError, match="FP8Parameter"):
            part.fill_(1.0)
    assert torch.equal(weight.detach().dequantize(), torch.full((32, 32), 2.0))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("tensor")])
def test_modules(kind, name, device):
    """Forward in and outside a region, under autocast, and with state dicts and copies."""
    with fp8_model_init(True, RECIPES[name]):
        model = build_layers(kind, device)
    x = torch.randn(shape_of(kind, device)).to(device, dtype_on(device))

    def evaluation(model):
        outside = model(x).clone()
        with torch.autocast(device.type, torch.bfloat16):
            outside = [outside, model(x).clone()]
        with fp8_autocast(True, RECIPES[name]):
            inside = model(x).clone()
        state = [v for v in model.state_dict().values() if isinstance(v, torch.Tensor)]
        model.load_state_dict(model.state_dict())
        again = copy.deepcopy(model)(x)
        saved({key: v for key, v in model.state_dict().items() if isinstance(v, torch.Tensor)})
        return [*outside, inside, again.clone(), *[torch.clone(v.float()) for v in state]]

    with repeatable(device, kind):
        with torch.no_grad():
            expected = evaluation(copy.deepcopy(model))
        with torch.inference_mode():
            found = evaluation(model)
        for a, b in zip(found, expected, strict=True):
            a, b = (t.dequantize() if type(t) is FP8Parameter else t for t in (a, b))
            assert_same_bits(a, b)
        model(x.clone().requires_grad_()).sum().backward()


def test_views_and_parts():
    module = build(Linear, 32, 64)
    weight = module.weight.detach()
    values = weight.dequantize()
    for part, expected in [
        (weight[8:24], values[8:24]),
        (weight.split(24)[2], values[48:]),
        (weight.split([60, 4])[1], values[60:]),
        (weight.chunk(4)[3], values[48:]),
        (weight.narrow(0, 3, 5), values[3:8]),
        (weight.view(-1), values.view(-1)),
        (weight.view(64, 32), values),
        (weight.reshape(8, 8, 32), values.view(8, 8, 32)),
        (weight.clone(), values),
        (weight.contiguous(), values),
    ]:
        assert type(part) is FP8Parameter
        assert part.shape == expected.shape
        assert torch.equal(part.dequantize(), expected)
    for part, expected in [
        (weight.t() * 1, values.t()),
        (weight + 1, values + 1),
        (torch.cat([weight, weight]), torch.cat([values, values])),
        (weight.int(), values.int()),
        (weight.sum(0), values.sum(0)),
    ]:
        assert type(part) is torch.Tensor
        assert torch.equal(part, expected)
    out = torch.add(values, 1, out=weight.clone())
    assert type(out) is FP8Parameter
    assert torch.allclose(out.dequantize(), values + 1, atol=0.07)
    flat = weight.view(-1)
    flat.copy_(torch.arange(2048.0))
    assert weight.dequantize()[-1, -1] == flat.dequantize()[-1] > 1900
    assert not torch.equal(values, weight.dequantize())
    with torch.no_grad():
        assert torch.equal(module(torch.ones(2, 32)), torch.ones(2, 32) @ weight.dequantize().t())


VIEWS = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "transpose": lambda w: torch.transpose(w, 0, 1),
    "permute": lambda w: w.permute(1, 0),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "None": lambda w: w[None],
    "expand": lambda w: w.expand(1, 64, 32),
    "row of t": lambda w: w.t()[3],
    "data": lambda w: w.t().data,
    "detach": lambda w: w.t().detach(),
    "chunk": lambda w: w.t().chunk(2)[1],
    "unbind": lambda w: w.t().unbind()[1],
}
WRITES = {
    "copy_": lambda v: v.copy_(torch.ones(v.shape)),
    "mul_": lambda v: v.mul_(2.0),
    "setitem": lambda v: v.__setitem__(0, 1.0),
    "operator": lambda v: v.__iadd__(1.0),
    "out": lambda v: torch.add(v, 1.0, out=v),
    "init": lambda v: torch.nn.init.normal_(v),
    "foreach": lambda v: torch._foreach_add_([v], 1.0),
    "overload": lambda v: torch.ops.aten.zero_.default(v),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_writes_that_would_be_lost_are_refused(view, write):
    """Writes to a view of a plain weight change the weight; an FP8 weight's views are copies."""
    weight = build(Linear, 32, 64).weight
    values = weight.detach().dequantize()
    for of in (weight.detach(), weight.data):
        with pytest.raises(NotImplementedError, match=r"must write to the whole weight, .* got a"):
            write(view(of))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="must write to the whole"):
        write(view(weight))
    assert torch.equal(weight.detach().dequantize(), values)


def test_an_op_writes_every_weight_of_a_list():
    weights = [build(Linear, 32, 64).weight.detach() for _ in range(2)]
    values = [weight.dequantize() for weight in weights]
    torch._foreach_mul_(weights, 2.0)
    for weight, value in zip(weights, values, strict=True):
        assert torch.equal(weight.dequantize(), 2 * value)


def test_an_array_of_a_view_is_read_only():
    weight = build(Linear, 32, 64).weight.detach()
    array = weight.t().numpy()
    assert torch.equal(torch.tensor(array), weight.dequantize().t())
    with pytest.raises(ValueError, match="read-only"):
        array.fill(0)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_read_as_plain_values(view):
    weight = build(Linear, 32, 64).weight.detach()
    found, expected = view(weight), view(weight.dequantize())
    saved = io.BytesIO()
    torch.save(found, saved)
    saved.seek(0)
    for read in (
        found + 0, found.clone(), copy.deepcopy(found), found.abs(),
        pickle.loads(pickle.dumps(found)), torch.load(saved, weights_only=True),
    ):  # fmt: skip
        assert type(read) is torch.Tensor
    assert torch.equal(found, expected)
    target = torch.zeros(found.shape)
    target.copy_(found)
    target += found
    assert torch.equal(target, 2 * expected)
    assert found.requires_grad_().sum().backward() is None
    assert torch.equal(found.grad, torch.ones(found.shape))


def test_new_ones_of_its_kind():
    weight = build(Linear, 32, 64).weight.detach()
    zeros = weight.new_zeros(16, 32)
    assert type(zeros) is FP8Parameter
    assert zeros.recipe == weight.recipe
    assert zeros.dequantize().eq(0).all()
    assert type(weight.new_zeros(7)) is torch.Tensor
    assert type(torch.empty_like(weight)) is FP8Parameter
    assert torch.empty_like(weight, dtype=torch.float64).dtype == torch.float64
    for plain in (weight.new_empty(3), torch.ones_like(weight), torch.full_like(weight, 1.0)):
        assert type(plain) is torch.Tensor
        assert plain.dtype == torch.float32
    assert torch.ones_like(weight).eq(1).all()


def test_what_cannot_be_shared_is_refused():
    weight = build(Linear, 256, 256, scheme=BlockScaling()).weight.detach()
    assert torch.equal(weight.chunk(2)[1].dequantize(), weight.dequantize()[128:])
    for part in (
        lambda: weight[:, 3:5],
        lambda: weight[3:5],
        lambda: weight[::2],
        lambda: weight[3],
        lambda: weight.chunk(2, 1),
        lambda: weight.split([100, 156]),
        lambda: weight.diagonal(),
        lambda: weight.as_strided((2, 2), (1, 1)),
    ):
        with pytest.raises(NotImplementedError, match="FP8Parameter: "):
            part()
    with pytest.raises(NotImplementedError, match="only a whole weight can be written to"):
        weight[:128].zero_()
    with pytest.raises(NotImplementedError, match="only a whole weight"):
        weight.chunk(2)[0].copy_(torch.ones(128, 256))


@pytest.mark.parametrize("name", RECIPES)
def test_reads_of_fake_codes(name):
    """What torch's tracing sees has the shapes, dtypes and later the bits of the real thing."""
    weight = build(Linear, 40, 24, scheme=RECIPES[name]).weight
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(weight.detach())
        read = (*fake._transposed(), fake.dequantize(torch.bfloat16))
    real = (*weight._transposed(), weight.detach().dequantize(torch.bfloat16))
    for a, b in zip(read, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    held, text = weight._held, parameter_ops._packed(weight.recipe)
    arguments = (held.rowwise, held.rowwise_scale_inv, text)
    assert_same_bits(torch.ops.apex_te.fp8_codes_transposed(*arguments), real[:2])
    assert_same_bits(torch.ops.apex_te.fp8_codes_values(*arguments, torch.bfloat16), real[2])


@pytest.mark.parametrize("name", RECIPES)
def test_flattens(name):
    weight = build(scheme=RECIPES[name]).weight
    names, context = weight.__tensor_flatten__()
    assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(weight)
    inner = {name: getattr(weight, name) for name in names}
    assert all(type(t) is torch.Tensor for t in inner.values())
    again = FP8Parameter.__tensor_unflatten__(inner, context, weight.shape, weight.stride())
    assert again.__tensor_flatten__()[1] == context
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.cover(0)
@pytest.mark.parametrize(
    ("name", "other"),
    [*((name, "same") for name in RECIPES), ("mxfp8", "hif8"), ("blockwise", "none")],
)
def test_compiles(name, other):
    scheme = RECIPES[name]
    used = scheme if other == "same" else RECIPES["hif8"]
    module = build(scheme=scheme)
    twin = copy.deepcopy(module)
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for step in range(3):
        x, dy = torch.randn(8, 160), torch.randn(8, 48)
        expected = run(module, x, dy, used, other != "none")
        inp = x.clone().requires_grad_()
        twin.zero_grad()
        with (
            fp8_autocast(other != "none", used),
            torch._dynamo.config.patch(error_on_recompile=step > 1),
        ):
            out = compiled(inp)
        out.backward(dy)
        assert_same_bits((out, inp.grad, twin.weight.grad, twin.bias.grad), expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_flattened_weight_gives_parts(name):
    """Parts of what one scale multiplies, as ZeRO optimizers take them, and can read them."""
    recipe = SCHEMES[name]
    with fp8_model_init(recipe=recipe):
        weight = Linear(48, 32, bias=False, device="cpu").weight
    layout, flat = layout_of(weight.recipe), weight.detach().view(-1)
    if layout.block_rows or layout.block_cols:
        with pytest.raises(NotImplementedError, match="cut what shares a scale"):
            flat[5:700]
        return
    part = flat[5:700]
    assert type(part) is type(weight)
    assert part.shape == (695,)
    assert torch.equal(part.float(), weight.detach().float().view(-1)[5:700])
    assert torch.equal(part[10:20].clone().float(), part.float()[10:20])
    with pytest.raises(NotImplementedError, match="only a whole weight can be written to"):
        part.copy_(torch.zeros(695))
    with torch.no_grad():
        weight.copy_(torch.randn(32, 48))
    assert torch.equal(part.float(), weight.detach().float().view(-1)[5:700])


@pytest.mark.parametrize("shape", [(1, 64, 32), (2048,), (8, 8, 32)])
def test_copies_and_files_of_a_view_keep_its_shape(shape):
    """Megatron's checkpoints have weights with further dimensions of size 1."""
    view, file = build(Linear, 32, 64).weight.detach().view(shape), io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    for other in (torch.load(file), copy.deepcopy(view), view.clone(), view.cpu()):
        assert type(other) is FP8Parameter
        assert other.shape == shape
        assert torch.equal(other.dequantize(), view.dequantize())
