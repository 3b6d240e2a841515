"""fp8_model_init and FP8Parameter: weights held in low precision only."""

import threading

import pytest
import torch

from apex_te import Linear, fp8_autocast
from apex_te.fp8.model_init import fp8_model_init
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.layer_norm import LayerNorm
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.ops import block_quantize
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format
from tests.checks import assert_same_bits, codes
from tests.fp8_weight_cases import E4M3, RECIPES, build, plain_twin, reference, run


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
    with pytest.raises(ValueError, match=r"shape must be \[rows, cols\], got \[3\]"):
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
