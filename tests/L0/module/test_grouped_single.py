"""GroupedLinear with one Parameter for all groups, against a Parameter for each."""

import copy

import pytest
import torch
from grouped_splits import (
    E4M3,
    LAYOUTS,
    RECIPES,
    assert_close,
    padded,
    read_on_device,
    tensor_of,
)
from torch.utils.checkpoint import checkpoint

from apex_te import fp8_autocast
from apex_te.fp8.parameter import decode
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.recipe import CurrentScaling, DelayedScaling, Format, MXFP8Scaling
from tests.checks import assert_same_bits, needs_cuda

pytestmark = pytest.mark.filterwarnings("ignore:apex_te")
SPLITS = [5, 0, 16, 3]


@pytest.fixture(autouse=True)
def _splits_stay_on_device(request, monkeypatch):
    if "device" in request.fixturenames:
        read_on_device(monkeypatch)


def pair(device, dtype=torch.float32, sizes=(48, 32), groups=4, **options):
    """A layer with one Parameter, and one with a Parameter for each group and the same values."""
    torch.manual_seed(1)
    options = {"device": device, "params_dtype": dtype, **options}
    other = GroupedLinear(groups, *sizes, **options)
    for name, value in other.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(value)
    single = GroupedLinear(groups, *sizes, single_parameter=True, **options)
    single.load_state_dict(other.state_dict())
    return single, other


def stacked(module, kind, of=lambda p: p.grad):
    """``of`` applied to the parameters of either layer, stacked to one tensor."""
    own = getattr(module, kind, None) if module.single_parameter else None
    if own is not None:
        return of(own)
    return torch.stack([of(getattr(module, f"{kind}{i}")) for i in range(module.num_gemms)])


def region(name):
    return fp8_autocast(name is not None, RECIPES.get(name))


def run(module, x, dy, splits, name, *rest):
    x = x.clone().requires_grad_()
    with region(name):
        out = module(x, splits, *rest)
    out.backward(dy)
    return out, x.grad


@pytest.mark.parametrize("name", [None, *RECIPES])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "splits"), LAYOUTS, ids=str)
def test_same_bits_as_a_parameter_each(device, name, bias, rows, splits):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    single, other = pair(device, dtype, bias=bias)
    for step in range(3):
        x = padded(torch.randn(sum(splits), 48), rows, float("nan")).to(device, dtype)
        dy = padded(torch.randn(sum(splits), 32), rows, float("nan")).to(device, dtype)
        given = tensor_of(splits, device)
        results = [run(each, x, dy, given, name) for each in (single, other)]
        assert_same_bits(*results)
        listed = splits if step and sum(splits) == rows else given
        with torch.no_grad(), region(name):
            assert_same_bits(single(x, listed), other(x, given))
    assert_same_bits(stacked(single, "weight"), stacked(other, "weight"))
    if bias:
        assert_same_bits(stacked(single, "bias"), stacked(other, "bias"))


@pytest.mark.parametrize("groups", [1, 22, 128, 256])
@pytest.mark.parametrize("name", [None, "delayed", "first", "tensorwise", "blockwise"])
def test_any_number_of_groups(device, groups, name):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    single, other = pair(device, dtype, sizes=(32, 16), groups=groups)
    generator = torch.Generator().manual_seed(groups)
    splits = torch.randint(0, 5, (groups,), generator=generator, dtype=torch.int32)
    splits[groups // 2] += 1
    x = torch.randn(int(splits.sum()), 32).to(device, dtype)
    dy = torch.randn(int(splits.sum()), 16).to(device, dtype)
    for _ in range(3):
        results = [run(each, x, dy, splits.to(device), name) for each in (single, other)]
        assert_same_bits(*results)
    assert_same_bits(stacked(single, "weight"), stacked(other, "weight"))


@pytest.mark.parametrize("name", [None, "delayed", "tensorwise", "blockwise", "plain wgrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("microbatches", [True, False])
def test_main_grad(device, name, dtype, microbatches):
    """Added as it is computed, which is one rounding less than a temporary in 16 bits."""
    own = torch.bfloat16 if device.type == "cuda" else torch.float32
    single, other = pair(device, own, fuse_wgrad_accumulation=True)
    for each in (single, other):
        for value in each.parameters():
            value.main_grad = torch.full(value.shape, 2.0, dtype=dtype, device=device)
    single.weight.grad_added_to_main_grad = False
    x, dy = torch.randn(24, 48).to(device, own), torch.randn(24, 32).to(device, own)
    for first in (True, False, False):
        rest = (first,) if microbatches else ()
        for each in (single, other):
            run(each, x, dy, tensor_of(SPLITS, device), name, *rest)
    assert single.weight.grad_added_to_main_grad
    grads = [stacked(each, "weight", lambda p: p.main_grad) for each in (single, other)]
    assert_same_bits(*grads)
    assert grads[0].dtype is dtype
    assert bool((grads[0][1] == (0.0 if microbatches else 2.0)).all())


@pytest.mark.parametrize("name", [None, "delayed", "tensorwise", "blockwise", "plain wgrad"])
@pytest.mark.parametrize("fused", [True, False])
def test_delayed_weight_gradients(device, name, fused):
    options = {"fuse_wgrad_accumulation": fused}
    now, _ = pair(device, **options)
    later = GroupedLinear(
        4, 48, 32, device=device, single_parameter=True, delay_wgrad_compute=True, **options
    )
    later.load_state_dict(now.state_dict())
    for each in (now, later):
        each.weight.main_grad = torch.full((4, 32, 48), 2.0, device=device)
    for _ in range(2):
        x, dy = torch.randn(24, 48).to(device), torch.randn(24, 32).to(device)
        results = [run(each, x, dy, tensor_of(SPLITS, device), name) for each in (now, later)]
        assert_same_bits(*results)
    assert later.weight.grad is None
    assert bool((later.weight.main_grad == 2).all())
    later.backward_dw()
    assert_same_bits(now.weight.main_grad, later.weight.main_grad)
    if not fused:
        assert_same_bits(now.weight.grad, later.weight.grad)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "plain wgrad"])
def test_saving_the_original_input(device, name):
    single, _ = pair(device)
    saving = GroupedLinear(
        4, 48, 32, device=device, single_parameter=True, save_original_input=True
    )
    saving.load_state_dict(single.state_dict())
    x, dy = torch.randn(24, 48).to(device), torch.randn(24, 32).to(device)
    results = [run(each, x, dy, tensor_of(SPLITS, device), name) for each in (single, saving)]
    assert_same_bits(*results)
    assert_same_bits(single.weight.grad, saving.weight.grad)
    message = "save_original_input must be False with single_parameter=True and delayed scaling"
    with pytest.raises(NotImplementedError, match=message):
        run(saving, x, dy, tensor_of(SPLITS, device), "delayed")


@pytest.mark.parametrize("name", [None, "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(device, name, reentrant):
    single, _ = pair(device)
    other, x = copy.deepcopy(single), torch.randn(24, 48).to(device)
    splits = tensor_of(SPLITS, device)
    for _ in range(2):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        with region(name):
            out = single(inputs[0], splits)
            again = checkpoint(other, inputs[1], splits, use_reentrant=reentrant)
        out.sum().backward()
        again.sum().backward()
        assert_same_bits(inputs[0].grad, inputs[1].grad)
    assert_same_bits(single.weight.grad, other.weight.grad)


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        (MXFP8Scaling(), (64, 32)),
        (CurrentScaling(fp8_format=Format.HIF8), (64, 32)),
        (CurrentScaling(**E4M3), (48, 24)),
        (DelayedScaling(**E4M3), (40, 32)),
    ],
    ids=str,
)
def test_what_has_no_products_of_groups(device, recipe, sizes):
    """The sizes are read, and the layers run one by one."""
    single, other = pair(device, sizes=sizes)
    x, dy = torch.randn(30, sizes[0]).to(device), torch.randn(30, sizes[1]).to(device)
    for _ in range(2):
        results = []
        for each, rows, splits in ((single, 30, tensor_of(SPLITS, device)), (other, 24, SPLITS)):
            inp = x[:rows].clone().requires_grad_()
            with fp8_autocast(True, recipe):
                out = each(inp, splits)
            out.backward(dy[:rows])
            results.append((out[:24], inp.grad[:24]))
        assert_same_bits(*results)
    assert_same_bits(stacked(single, "weight"), stacked(other, "weight"))
    assert_same_bits(stacked(single, "bias"), stacked(other, "bias"))
    fused = GroupedLinear(
        4, *sizes, device=device, single_parameter=True, fuse_wgrad_accumulation=True
    )
    message = "must be False with single_parameter=True and"
    with pytest.raises(NotImplementedError, match=message), fp8_autocast(True, recipe):
        fused(x, tensor_of(SPLITS, device))


def test_state_dicts_load_into_both_kinds():
    single, other = pair("cpu")
    assert list(single.state_dict())[:2] == ["weight", "bias"]
    again = GroupedLinear(4, 48, 32)
    again.load_state_dict(single.state_dict())
    for i in range(4):
        assert_same_bits(getattr(again, f"weight{i}"), getattr(other, f"weight{i}"))
        assert_same_bits(getattr(single, f"weight{i}"), getattr(other, f"weight{i}"))
        assert_same_bits(getattr(single, f"bias{i}"), getattr(other, f"bias{i}"))
    assert single.weight3.data_ptr() == single.weight[3].data_ptr()
    with pytest.raises(AttributeError, match="weight4"):
        _ = single.weight4
    partial = {key: value for key, value in other.state_dict().items() if key != "weight2"}
    with pytest.raises(RuntimeError, match="Missing key"):
        single.load_state_dict(partial)
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing"):
        again.load_state_dict({**single.state_dict(), "weight": torch.zeros(3, 32, 48)})
    model = torch.nn.Sequential(torch.nn.ModuleList([single]))
    nested = torch.nn.Sequential(torch.nn.ModuleList([again]))
    nested.load_state_dict(model.state_dict())


def test_copies_and_first_values():
    torch.manual_seed(0)
    single = GroupedLinear(3, 48, 32, init_method=torch.nn.init.xavier_uniform_, device="meta")
    assert single.weight0.is_meta
    single = GroupedLinear(3, 48, 32, init_method=torch.nn.init.orthogonal_, single_parameter=True)
    for weight in single.weight:
        assert (weight @ weight.t() - torch.eye(32)).abs().max() < 1e-5
    again = copy.deepcopy(single)
    assert_same_bits(again(torch.ones(6, 48), [1, 2, 3]), single(torch.ones(6, 48), [1, 2, 3]))
    assert "single_parameter=True" in repr(single)


def test_return_bias_and_leading_dimensions(device):
    single, other = pair(device, return_bias=True)
    x = torch.randn(4, 6, 48).to(device)
    results = [each(x, tensor_of(SPLITS, device)) for each in (single, other)]
    assert results[0][0].shape == (4, 6, 32)
    assert_same_bits(*[(out, *biases) for out, biases in results])


def test_refusals():
    many = GroupedLinear(1024, 16, 16, single_parameter=True)
    with pytest.raises(NotImplementedError, match="num_gemms must be at most 1023"):
        many(torch.randn(1024, 16), [1] * 1024)
    single, _ = pair("cpu")
    for splits in ([1, 2], [5, -1, 16, 3], torch.tensor([40, 0, 0, 0])):
        with pytest.raises(ValueError, match="m_splits must"):
            single(torch.randn(24, 48), splits)


@pytest.mark.long
@pytest.mark.parametrize("name", [None, "tensorwise", "blockwise", "delayed"])
def test_compiled(device, name):
    single, _ = pair(device)
    other, splits = copy.deepcopy(single), tensor_of(SPLITS, device)
    compiled = torch.compile(other, fullgraph=name != "delayed", backend="aot_eager")
    for _ in range(3):
        x, dy = torch.randn(24, 48).to(device), torch.randn(24, 32).to(device)
        results = [run(each, x, dy, splits, name) for each in (single, compiled)]
        # On the CPU compiled code multiplies masked rows, in another order, and delayed scaling
        # one group after the other.
        for value, expected in zip(*results, strict=True):
            assert_close(value, expected)
    assert_close(single.weight.grad, other.weight.grad)


@pytest.mark.parametrize(
    "name",
    ["first", *(pytest.param(n, marks=pytest.mark.long) for n in ("blockwise", "tensorwise"))],
)
def test_compiled_microbatches(device, name):
    """Later microbatches read the first one's copies, until weights change."""
    single, _ = pair(device, groups=2)  # the GEMMs of each group are traced
    other, splits = copy.deepcopy(single), tensor_of([24, 0], device)
    compiled = torch.compile(other, fullgraph=name != "first", backend="eager")
    for first in (True, False, True, False):
        x, dy = torch.randn(24, 48).to(device), torch.randn(24, 32).to(device)
        results = [run(each, x, dy, splits, name, first) for each in (single, compiled)]
        for value, expected in zip(*results, strict=True):
            assert_close(value, expected)
        if not first:
            with torch.no_grad():
                for each in (single, other):
                    each.weight.mul_(1.5)
                assert_close(*[run_plain(each, x, splits, name) for each in (single, compiled)])
    assert_close(single.weight.grad, other.weight.grad)


def run_plain(module, x, splits, name):
    with region(name):
        return module(x, splits, False)


@pytest.mark.parametrize(
    "recipe", [MXFP8Scaling(), CurrentScaling(fp8_format=Format.HIF8)], ids=str
)
def test_microbatches_one_by_one(device, monkeypatch, recipe):
    single, other = pair(device)
    casts = []
    kind = type(decode.quantizers_of(recipe, device).weight)
    of = kind.quantize
    monkeypatch.setattr(kind, "quantize", lambda *args: casts.append(args[1].shape) or of(*args))
    x, dy = torch.randn(24, 48).to(device), torch.randn(24, 32).to(device)
    for first in (True, False, False):
        results = []
        for each, splits in ((single, tensor_of(SPLITS, device)), (other, SPLITS)):
            casts.clear()
            inp = x.clone().requires_grad_()
            with fp8_autocast(True, recipe):
                out = each(inp, splits, first)
            out.backward(dy)
            results.append((out, inp.grad))
            assert casts.count((32, 48)) == (4 if first else 0)
        assert_same_bits(*results)
    assert_same_bits(stacked(single, "weight"), stacked(other, "weight"))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", [None, *RECIPES])
@pytest.mark.parametrize("fused", [True, False])
def test_captured(name, fused):
    """One graph, replayed with other splits; nothing waits for the device."""
    single, _ = pair("cuda", torch.bfloat16, fuse_wgrad_accumulation=fused)
    other = copy.deepcopy(single)
    for each in (single, other):
        each.weight.main_grad = torch.zeros(4, 32, 48, device="cuda")
        each.weight.grad = torch.zeros_like(each.weight)
    x = torch.randn(96, 48, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(96, 32, device="cuda").bfloat16()
    splits = tensor_of([24, 24, 24, 24], "cuda")

    def step(module):
        with region(name):
            out = module(x, splits)
        out.backward(dy)
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(single)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(single)
    for _ in range(2):
        step(other)
    for each in (single, other):
        each.weight.main_grad.zero_()
        each.weight.grad.zero_()
    for counts in ([16, 0, 48, 16], [0, 0, 0, 90]):
        splits.copy_(tensor_of(counts, "cuda"))
        graph.replay()
        assert_same_bits(out, step(other))
    assert_same_bits(single.weight.main_grad, other.weight.main_grad)
    assert_same_bits(single.weight.grad, other.weight.grad)
