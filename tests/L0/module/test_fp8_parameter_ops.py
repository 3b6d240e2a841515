"""What torch's ops and torch.compile do with an FP8Parameter."""

import copy
import io
import pickle

import pytest
import torch

from apex_te import Linear, fp8_autocast, fp8_model_init
from apex_te.fp8.parameter import decode as parameter_ops
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.fp8.scheme.base import layout_of
from apex_te.recipe import BlockScaling
from tests.checks import assert_same_bits
from tests.fp8_weight_cases import RECIPES, build, run
from tests.schemes import SCHEMES


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
