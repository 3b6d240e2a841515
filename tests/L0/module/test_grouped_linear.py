"""GroupedLinear against one Linear for each group, and against torch.nn.functional.linear."""

import copy

import pytest
import torch
from schemes import FIRST_STEP, PLAIN_WGRAD, SCHEMES
from torch.utils.checkpoint import checkpoint

from apex_te import Linear, flush_fp8_state, fp8_autocast
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import CurrentScaling, DelayedScaling
from tests.checks import assert_same_bits

DELAYED = DelayedScaling(amax_history_len=4)
RECIPES = {**SCHEMES, "first": FIRST_STEP, "plain wgrad": CurrentScaling(**PLAIN_WGRAD)}
SPLITS = [5, 0, 16, 3]
TOKENS = sum(SPLITS)


def singles(grouped):
    """A Linear for each group, with copies of its parameters."""
    modules = []
    for i in range(grouped.num_gemms):
        weight = getattr(grouped, f"weight{i}")
        module = Linear(
            grouped.in_features, grouped.out_features, grouped.use_bias,
            params_dtype=weight.dtype, device=weight.device,
        )  # fmt: skip
        module.load_state_dict(
            {
                name: getattr(grouped, f"{name}{i}").detach()
                for name, value in module.named_parameters()
            }
        )
        modules.append(module)
    return modules


def run_singles(modules, x, splits, region):
    """Outputs of the modules over their rows; groups without rows are left out."""
    with region:
        return torch.cat(
            [
                module(part) if len(part) else part.new_empty(0, module.out_features)
                for module, part in zip(modules, x.split(splits), strict=True)
            ]
        )


def grads(grouped, modules):
    """Pairs of gradients; a group without rows has zeros where the lone module has None."""
    for i, module in enumerate(modules):
        for name, value in module.named_parameters():
            actual = getattr(grouped, f"{name}{i}").grad
            yield actual, torch.zeros_like(actual) if value.grad is None else value.grad


def sqnr(reference, actual):
    reference, actual = reference.detach().double(), actual.detach().double()
    return 20 * torch.log10(reference.norm() / (reference - actual).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_without_fp8_it_is_linear_on_each_group(dtype, bias, device):
    if dtype is torch.float16 and device.type == "cpu":
        pytest.skip("slow FP16 matmul")
    module = GroupedLinear(4, 24, 8, bias, params_dtype=dtype, device=device)
    for name, value in module.named_parameters():
        torch.nn.init.normal_(value) if "bias" in name else None
    x = torch.randn(TOKENS, 24).to(device, dtype).requires_grad_()
    dy = torch.randn(TOKENS, 8).to(device, dtype)
    out = module(x, SPLITS)
    out.backward(dy)
    grad, x.grad = x.grad, None
    parameters = dict(module.named_parameters())
    plain = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
    parts = [
        torch.nn.functional.linear(part, plain[f"weight{i}"], plain.get(f"bias{i}"))
        for i, part in enumerate(x.split(SPLITS))
    ]
    expected = torch.cat(parts)
    expected.backward(dy)
    assert torch.equal(out, expected)
    assert torch.equal(grad, x.grad)
    for name, value in parameters.items():
        assert torch.equal(value.grad, plain[name].grad)
        assert value.grad.dtype == dtype
    assert not module.fp8_state.allocated


@pytest.mark.parametrize(
    "count", [21, 22, 1023, *(pytest.param(n, marks=pytest.mark.long) for n in (64, 200))]
)
def test_many_experts_update_their_scales(count, device):
    """Experts have the outputs and the state of a Linear of their own, step by step."""
    grouped = GroupedLinear(count, 16, 16, bias=False, device=device)
    lone = {i: module for i, module in enumerate(singles(grouped)) if i % (count // 7) == 0}
    for _ in range(3):
        x = (torch.randn(count, 16) * torch.rand(count, 1).mul(8).exp2()).to(device)
        with fp8_autocast(True, DELAYED):
            out = grouped(x, [1] * count)
            outs = {i: module(x[i : i + 1]) for i, module in lone.items()}
        (out.sum() + sum(out.sum() for out in outs.values())).backward()
        for i, expected in outs.items():
            assert torch.equal(out[i : i + 1], expected)
    flush_fp8_state()
    for i, module in lone.items():
        for name, slots in (("fwd", 3), ("bwd", 2)):
            for kind in ("scale_", "scale_inv_", "amax_history_"):
                whole = getattr(grouped.fp8_state, kind + name)
                part = whole[..., slots * i : slots * i + slots]
                assert torch.equal(part, getattr(module.fp8_state, kind + name))
                assert kind != "scale_" or part[0] != 1


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("splits", [SPLITS, [0, 7, 1, 16], [24, 0, 0, 0]])
def test_equals_a_linear_for_each_group(name, splits, device):
    scheme = RECIPES[name]
    grouped = GroupedLinear(4, 40, 24, device=device)
    modules = singles(grouped)
    for _ in range(2):
        x = torch.randn(24, 40).to(device)
        dy = torch.randn(24, 24).to(device)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        grouped.zero_grad()
        for module in modules:
            module.zero_grad()
        with fp8_autocast(True, scheme):
            out = grouped(inputs[0], splits)
            expected = run_singles(modules, inputs[1], splits, fp8_autocast(True, scheme))
        out.backward(dy)
        expected.backward(dy)
        assert torch.equal(out, expected)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for actual, wanted in grads(grouped, modules):
            assert torch.equal(actual, wanted)
    if not scheme.keeps_state:
        return
    flush_fp8_state()
    for i, rows in enumerate(splits):
        if rows:
            assert torch.equal(
                grouped.fp8_state.scale_fwd[3 * i : 3 * i + 2], modules[i].fp8_state.scale_fwd[:2]
            )
            assert torch.equal(
                grouped.fp8_state.scale_bwd[2 * i], modules[i].fp8_state.scale_bwd[0]
            )
        else:  # keeps its scales and its first step
            assert grouped.fp8_state.scale_fwd[3 * i : 3 * i + 3].eq(1).all()
            if name == "first":
                assert all(grouped.fp8_state.first_steps.due[3 * i : 3 * i + 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["delayed", "blockwise"])
def test_sqnr_floors(dtype, name, device):
    module = GroupedLinear(3, 50, 30, params_dtype=dtype, device=device)
    splits = [17, 40, 33]
    x, dy = torch.randn(90, 50).to(device, dtype), torch.randn(90, 30).to(device, dtype)
    for _ in range(2):
        inp = x.clone().requires_grad_()
        module.zero_grad()
        with fp8_autocast(True, RECIPES[name]):
            out = module(inp, splits)
        out.backward(dy)
    assert out.dtype == inp.grad.dtype == dtype
    exact_x, exact_dy = x.double().cpu(), dy.double().cpu()
    start = 0
    for i, rows in enumerate(splits):
        part = slice(start, start + rows)
        weight = getattr(module, f"weight{i}")
        bias = getattr(module, f"bias{i}")
        w = weight.detach().double().cpu()
        assert sqnr(exact_x[part] @ w.t() + bias.detach().double().cpu(), out[part].cpu()) >= 25
        assert sqnr(exact_dy[part] @ w, inp.grad[part].cpu()) >= 17
        assert sqnr(exact_dy[part].t() @ exact_x[part], weight.grad.cpu()) >= 17
        assert sqnr(exact_dy[part].sum(0), bias.grad.cpu()) >= 30
        assert weight.grad.dtype == bias.grad.dtype == dtype
        start += rows


@pytest.mark.parametrize("fp8", [True, False])
def test_no_rows_at_all(fp8, device):
    module = GroupedLinear(2, 16, 8, device=device)
    x = torch.empty(0, 16, device=device, requires_grad=True)
    with fp8_autocast(fp8, DELAYED):
        out = module(x, [0, 0])
    assert out.shape == (0, 8)
    out.sum().backward()
    assert x.grad.shape == (0, 16)
    assert all(value.grad.eq(0).all() for value in module.parameters())


@pytest.mark.parametrize("fp8", [True, False])
def test_leading_dimensions_and_strides(fp8, device):
    module = GroupedLinear(2, 32, 16, device=device)
    wide = torch.randn(4, 32, 6).to(device)
    x = wide.transpose(1, 2)
    with fp8_autocast(fp8, CurrentScaling()):
        out = module(x, [7, 17])
        flat = module(x.reshape(24, 32), [7, 17])
        assert out.shape == (4, 6, 16)
        assert torch.equal(out.reshape(24, 16), flat)
        torch.relu_(out).sum().backward()


def test_three_gemms_for_each_group_with_rows(device):
    module = GroupedLinear(4, 32, 16, device=device)
    x = torch.randn(TOKENS, 32, device=device, requires_grad=True)
    before = fp8_gemm_count()
    with fp8_autocast(True, DELAYED):
        module(x, SPLITS).sum().backward()
    assert fp8_gemm_count() - before == 9
    before = fp8_gemm_count()
    with torch.no_grad(), fp8_autocast(True, DELAYED):
        module(x, SPLITS)
    assert fp8_gemm_count() - before == 3


def test_evaluation_changes_nothing():
    module, x = GroupedLinear(4, 32, 16), torch.randn(TOKENS, 32)
    for _ in range(2):  # the same amaxes twice: the scales that an evaluation reads are these
        with fp8_autocast(True, DELAYED):
            expected = module(x, SPLITS)
    before = copy.deepcopy(module.fp8_state)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard(), fp8_autocast(True, DELAYED):
            assert torch.equal(module(x, SPLITS), expected)
    assert torch.equal(before.amax_history_fwd, module.fp8_state.amax_history_fwd)


def test_frozen_parts():
    module, x = GroupedLinear(4, 32, 16), torch.randn(TOKENS, 32, requires_grad=True)
    module.weight0.requires_grad_(False)
    module.bias2.requires_grad_(False)
    other = copy.deepcopy(module).requires_grad_()
    for each in (module, other):
        with fp8_autocast(True, CurrentScaling()):
            each(x, SPLITS).sum().backward()
    assert module.weight0.grad is None
    assert module.bias2.grad is None
    assert torch.equal(module.weight2.grad, other.weight2.grad)
    assert torch.equal(module.bias0.grad, other.bias0.grad)
    module.zero_grad()
    with fp8_autocast(True, CurrentScaling()):
        module(x.detach(), SPLITS).sum().backward()
    assert torch.equal(module.weight2.grad, other.weight2.grad)


def test_calibrating_stages_what_fp8_would():
    module = GroupedLinear(4, 32, 16)
    other = copy.deepcopy(module)
    x, dy = torch.randn(TOKENS, 32), torch.randn(TOKENS, 16)
    scheme = DelayedScaling(interval=9)
    with fp8_autocast(False, scheme, calibrating=True):
        out = module(x, SPLITS)
    out.backward(dy)
    with fp8_autocast(True, scheme):
        other(x, SPLITS).backward(dy)
    assert torch.equal(out, GroupedLinear.forward(module, x, SPLITS))
    histories = module.fp8_state.amax_history_fwd[0], other.fp8_state.amax_history_fwd[0]
    used = [0, 1, 6, 7, 9, 10]  # input and weight of the groups with rows
    assert torch.equal(histories[0], histories[1])
    assert histories[0].nonzero().flatten().tolist() == used
    assert torch.equal(module.fp8_state.amax_history_bwd[0], other.fp8_state.amax_history_bwd[0])


@pytest.mark.parametrize("fp8", [True, False])
def test_torch_autocast(fp8):
    module, x = GroupedLinear(2, 32, 16), torch.randn(6, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), fp8_autocast(fp8, CurrentScaling()):
        out = module(x, [1, 5])
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert x.grad.dtype == module.weight1.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_is_bitwise_equal(reentrant):
    module = GroupedLinear(4, 32, 16)
    other = copy.deepcopy(module)
    x = torch.randn(TOKENS, 32)
    for _ in range(2):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        with fp8_autocast(True, DELAYED):
            out = module(inputs[0], SPLITS)
            again = checkpoint(other, inputs[1], SPLITS, use_reentrant=reentrant)
        out.sum().backward()
        again.sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert_same_bits([p.grad for p in module.parameters()], [p.grad for p in other.parameters()])
    assert torch.equal(module.fp8_state.amax_history_fwd, other.fp8_state.amax_history_fwd)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["delayed", "blockwise", "plain wgrad", "tensorwise", "hif8", "mxfp8"]
)
def test_compiles(name):
    module = GroupedLinear(4, 32, 16)
    other = copy.deepcopy(module)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for step in range(4):
        x = torch.randn(TOKENS, 32)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        with fp8_autocast(True, RECIPES[name]):
            out = module(inputs[0], SPLITS)
            with torch._dynamo.config.patch(error_on_recompile=step > 1):
                actual = compiled(inputs[1], SPLITS)
        out.square().sum().backward()
        actual.square().sum().backward()
        assert torch.equal(out, actual)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    for value, wanted in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(value.grad, wanted.grad)
    if name == "delayed":
        assert torch.equal(module.fp8_state.amax_history_fwd, other.fp8_state.amax_history_fwd)
        assert torch.equal(module.fp8_state.amax_history_bwd, other.fp8_state.amax_history_bwd)


def test_double_backward_raises():
    module, x = GroupedLinear(2, 16, 8), torch.randn(4, 16, requires_grad=True)
    with fp8_autocast(True, DELAYED):
        out = module(x, [1, 3])
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
