"""FP8Parameters with the data and scales of a file: held, copied, saved and used as they are."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from grouped_splits import read_on_device

from apex_te import GroupedLinear, Linear, fp8_autocast, fp8_model_init
from apex_te.distributed import get_model_state_dict, set_model_state_dict
from apex_te.distributed.state_dict.split_model import Entry
from apex_te.distributed.state_dict.split_scales import parts_of_scales
from apex_te.distributed.state_dict.split_tensor import Parts
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.ops.block_quantize import block_quantize
from apex_te.recipe import BlockScaling, CurrentScaling, MXFP8Scaling
from tests.checks import assert_same_bits, codes, sqnr
from tests.free_scale_cases import (
    E4M3,
    FORMS,
    SHAPES,
    assert_holds,
    decoded,
    made,
    release,
    scales_of_rows,
)


def saved_and_loaded(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def halved(x):
    """As FSDP2 makes shards: rows in padded memory, and joined again from the gathered bytes."""
    whole = x.detach()
    part = whole.new_zeros(x.shape).narrow(0, 0, x.shape[0])
    part.copy_(whole)
    outputs, context = part.fsdp_pre_all_gather(None, x.shape, None, None, None)
    return part.fsdp_post_all_gather(outputs, context, torch.float32)[0]


WAYS = {
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.detach().clone(),
    "copy_": lambda x: torch.empty_like(x).copy_(x.detach()),
    "copy_ to another rule": lambda x: FP8Parameter.empty(
        tuple(x.shape), x.recipe if isinstance(x.recipe, CurrentScaling)
        else dataclasses.replace(x.recipe, eps=1e-3),
        torch.float32,
    ).copy_(x.detach()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": saved_and_loaded,
    "to dtype": lambda x: x.to(torch.float32),
    "data": lambda x: x.data,
    "view": lambda x: x.view(x.shape),
    "new_zeros": halved,
    "flatten": lambda x: FP8Parameter.__tensor_unflatten__(
        {name: getattr(x, name) for name in x.__tensor_flatten__()[0]},
        x.__tensor_flatten__()[1], x.shape, x.stride(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_copies_have_the_bytes(form, way, count):
    for shape in ((300, 100), (256, 160)):
        if way == "new_zeros" and shape[0] % 128 and count is None:
            continue  # FSDP2's shards are of whole blocks
        weight, file = made(FORMS[form], shape, count)
        with torch.no_grad():
            assert_holds(WAYS[way](weight), file)


@pytest.mark.parametrize("form", FORMS)
def test_parts_have_the_bytes(form):
    weight, (data, scale_inv) = made(FORMS[form], (576, 160))
    for start, stop in ((0, 256), (256, 576)):
        own = scales_of_rows(scale_inv, start, stop, form)
        assert_holds(weight.detach()[start:stop], (data[start:stop], own))
    stack, (data, scale_inv) = made(FORMS[form], (300, 100), 3)
    for parts in (stack.detach().unbind(0), [stack.detach()[i] for i in range(3)]):
        for i, part in enumerate(parts):
            assert_holds(part, (data[i], scale_inv[i]))
    assert_holds(stack.detach()[1:], (data[1:], scale_inv[1:]))


@pytest.mark.parametrize("form", FORMS)
def test_setting_codes(form):
    weight, before = made(FORMS[form], (300, 100))
    alias, version = weight.detach(), weight._version
    assert torch.equal(weight.dequantize(torch.float64), decoded(*before).float().double())
    file = release(FORMS[form], (300, 100))
    assert weight.set_codes_(*file) is weight
    assert weight._version > version
    for each in (weight, alias):
        assert_holds(each, file)
    scalar = FP8Parameter.from_codes(*release(CurrentScaling(), (4, 8)), "tensorwise", torch.half)
    scalar.set_codes_(scalar.codes()[0], torch.tensor(0.5))
    assert scalar.codes()[1].tolist() == [0.5]
    derived = FP8Parameter.empty((300, 100), FORMS[form], torch.float32)
    assert derived.has_free_scales is (form in ("block fp32", "channel"))
    assert_holds(derived.set_codes_(*file), file)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_forward_and_backward_use_the_decoded_values(
    form, shape, dtype, is_first, device, monkeypatch
):
    """Against float64 products of the decoded weight: only activations and gradients are cast."""
    recipe = dataclasses.replace(FORMS[form], use_split_accumulator=(True, True, True))
    rows, cols = shape
    if device.type == "cpu" and dtype is torch.bfloat16 and max(shape) > 600:
        dtype = torch.float32  # bf16 products are slow on CPUs
    weight, file = made(recipe, shape, dtype=dtype, device=device)
    layer = Linear(cols, rows, bias=False, params_dtype=dtype, device=device)
    layer.weight = weight
    # Powers of two are exact in FP8 with a scale of any kind.
    x, dy = (torch.randint(-2, 3, (32, n), device=device).sign().to(dtype) for n in (cols, rows))
    x[:, 0] = dy[:, 0] = 1
    x.requires_grad_()
    options = {"is_first_microbatch": True} if is_first else {}
    monkeypatch.setattr(FP8Parameter, "_values", lambda *args: pytest.fail("values were read"))
    for _ in range(3):  # delayed scaling finds its scales
        x.grad = layer.weight.grad = None
        with fp8_autocast(True, recipe):
            out = layer(x, **options)
        out.backward(dy)
    exact, x64, dy64 = decoded(*file).to(device), x.detach().double(), dy.double()
    # GPUs sum FP8 products of a few instructions in about 14 bits.
    floor = 60 if dtype is torch.float32 and device.type == "cpu" else 45
    for found, wanted, at_least in (
        (out, x64 @ exact.t(), floor),
        # The gradient is cast together with the scales of channels, which are any numbers.
        (x.grad, dy64 @ exact, 28 if form == "channel" else floor),
        (layer.weight.grad, dy64.t() @ x64, floor),
    ):
        assert sqnr(wanted, found.detach()) > at_least
    assert_holds(layer.weight, file)


@pytest.mark.cover(0)
@pytest.mark.parametrize("form", ["block fp32", "tensor"])
def test_compiled(form):
    layer, file = linear(form, (304, 112))
    layer.float()
    twin = copy.deepcopy(layer)
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    results = []
    for call in (layer, compiled):
        x = torch.ones(16, 112).requires_grad_()
        with fp8_autocast(True, FORMS[form]):
            out = call(x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
    assert_same_bits(*results)
    assert_holds(twin.weight, file)


def linear(form, shape, free=True):
    """A layer, its weight's release, with another than the random bias."""
    rows, cols = shape
    with fp8_model_init(recipe=FORMS[form]):
        layer = Linear(cols, rows, params_dtype=torch.bfloat16)
    if free:
        layer.weight, file = made(FORMS[form], shape)
        return layer, file
    return layer, None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_state_dicts_have_codes_and_scales(form, shape, tmp_path):
    layer, file = linear(form, shape)
    state = layer.state_dict()
    assert type(state["weight"]) is type(state["weight_scale_inv"]) is torch.Tensor
    assert torch.equal(codes(state["weight"]), codes(file[0]))
    assert torch.equal(state["weight_scale_inv"], file[1])
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, tmp_path / "f")
    for loaded in (saved_and_loaded(state), safetensors.load_file(tmp_path / "f")):
        for free in (False, True):
            other, _ = linear(form, shape, free)
            assert other.load_state_dict(loaded) == ([], [])
            assert_holds(other.weight, file)
        with torch.device("meta"):
            other, _ = linear(form, shape, False)
        other.load_state_dict(loaded, assign=True)
        assert_holds(other.weight, file)
        assert isinstance(other.weight, torch.nn.Parameter)
    plain = Linear(shape[1], shape[0], params_dtype=torch.bfloat16)
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, layer.weight.dequantize())
    layer.load_state_dict(plain.state_dict())  # values that it has
    assert_holds(layer.weight, file)
    other = "tensor" if "block" in form else "block fp32"  # another form takes the values
    held, _ = linear(other, shape, False)
    held.load_state_dict(state)
    expected = FP8Parameter.empty(shape, FORMS[other], torch.bfloat16)
    expected.copy_(layer.weight.dequantize(torch.float32).detach())
    assert torch.equal(codes(held.weight._rowwise), codes(expected._rowwise))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_entries_of_a_state_dict_stay_a_pair(form, shape):
    """Both share the weight's memory or are copies: never of different steps."""
    layer, file = linear(form, shape)
    file = [x.clone() for x in file]
    state = layer.state_dict()
    new = release(FORMS[form], shape)
    layer.weight.set_codes_(*new)
    is_live = state["weight"].data_ptr() == layer.weight.data_ptr()
    due = new if is_live else file
    assert torch.equal(codes(state["weight"]), codes(due[0]))
    assert torch.equal(state["weight_scale_inv"], due[1])


@pytest.mark.parametrize("form", ["block fp32", "tensor"])
def test_state_dicts_of_wrapped_models(form):
    """Names in checkpoints lack the prefix that torch.compile, like DDP, adds to the model's."""
    layer, file = linear(form, (300, 100))
    state = get_model_state_dict(torch.compile(torch.nn.Sequential(layer)))
    assert state.keys() == {"0.weight", "0.weight_scale_inv", "0.bias"}
    other, _ = linear(form, (300, 100), free=False)
    set_model_state_dict(torch.compile(torch.nn.Sequential(other)), state)
    assert_holds(other.weight, file)


def test_state_dicts_that_do_not_fit():
    layer, file = linear("block fp32", (300, 100))
    before = layer.state_dict()
    for changes, message in (
        ({"weight_scale_inv": None}, "weight must have its scales beside it, got torch.float8"),
        ({"weight_scale_inv": torch.ones(2, 1)}, r"weight: .*scale_inv must have shape \[3, 1\]"),
        ({"weight": before["weight"][:128], "weight_scale_inv": torch.ones(1, 1)}, "size mismatch"),
    ):
        state = {k: v for k, v in (before | changes).items() if v is not None}
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(state)
        assert_holds(layer.weight, file)
    missing = layer.load_state_dict({"weight_scale_inv": file[1]}, strict=False)
    assert missing.unexpected_keys == ["weight_scale_inv"]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("form", ["block fp32", "block pow2", "tensor"])
@pytest.mark.filterwarnings("ignore:apex_te")
def test_stacks_of_experts(form, single, device, monkeypatch):
    """In one Parameter or in one each: the state dict of one loads into the other, bit by bit."""
    read_on_device(monkeypatch)
    recipe, sizes, dtype = FORMS[form], (256, 160), torch.bfloat16
    files = [release(recipe, sizes, device=device) for _ in range(3)]
    layers = []
    for one in (single, not single):
        with fp8_model_init(recipe=recipe):
            layers.append(GroupedLinear(
                3, 160, 256, False, params_dtype=dtype, single_parameter=one, device=device
            ))  # fmt: skip
    layer, other = layers
    if single:
        layer.weight.set_codes_(*[torch.stack(each) for each in zip(*files, strict=True)])
    else:
        for i, file in enumerate(files):
            getattr(layer, f"weight{i}").set_codes_(*file)
    other.load_state_dict(layer.state_dict())
    parts = (
        other.weight.detach().unbind()
        if not single
        else [getattr(other, f"weight{i}") for i in range(3)]
    )
    for part, file in zip(parts, files, strict=True):
        assert_holds(part, file)
    x, dy = (torch.randn(48, n, device=device).to(dtype) for n in (160, 256))
    results = []
    for each in layers:
        inp = x.clone().requires_grad_()
        with fp8_autocast(True, recipe):
            out = each(inp, torch.tensor([16, 0, 32], device=device))
        out.backward(dy)
        results.append((out.detach(), inp.grad))
    assert_same_bits(*results)
    for start, stop, file in ((0, 16, files[0]), (16, 48, files[2])):
        one = Linear(160, 256, bias=False, params_dtype=dtype, device=device)
        one.weight = torch.nn.Parameter(FP8Parameter.from_codes(*file, recipe, dtype))
        inp = x[start:stop].clone().requires_grad_()
        with fp8_autocast(True, recipe):
            out = one(inp)
        out.backward(dy[start:stop])
        for got, wanted in zip((out.detach(), inp.grad), results[0], strict=True):
            assert sqnr(wanted[start:stop], got) > 45


@pytest.mark.parametrize("pow2", [False, True])
def test_model_init_keeps_the_rule_of_scales(pow2, device):
    recipe = BlockScaling(pow2=pow2)
    with fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        weight = Linear(300, 200, device=device).weight
    assert weight.recipe == recipe
    assert weight.has_free_scales is not pow2
    values = weight.get_high_precision_init_val().to(device)
    wanted = block_quantize(values, E4M3, block_rows=128, columnwise=False, pow2=pow2)
    data, scale_inv = weight.codes()
    assert torch.equal(codes(data), codes(wanted.rowwise))
    assert torch.equal(scale_inv, wanted.rowwise_scale_inv[:, :3])
    assert bool((scale_inv.log2() % 1 == 0).all()) is pow2
    for like in (FP8Parameter.empty((200, 300), recipe, torch.half, device), weight.detach()):
        again = torch.empty_like(like).zero_()
        assert again.codes()[0].float().eq(0).all()
        assert again.codes()[1].eq(1).all()


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"codes": torch.zeros(4, 8)}, TypeError, "codes must be torch.float8_e4m3fn with CurrentScal"),
    ({"codes": 3}, TypeError, "codes must be a tensor, got int"),
    ({"codes": torch.zeros(8).to(E4M3)}, ValueError, r"codes must be \[rows, .* got \[8\]"),
    ({"scale_inv": 1.0}, TypeError, "scale_inv must be a float32 tensor, got float"),
    ({"scale_inv": torch.ones(1).half()}, TypeError, "scale_inv must be .* torch.float16"),
    ({"scale_inv": torch.ones(2)}, ValueError, r".* shape \[1\] for codes \[4, 8\], got \[2\]"),
    ({"recipe": BlockScaling(), "scale_inv": torch.ones(1, 4)}, ValueError, r".* shape \[1, 1\]"),
    ({"recipe": MXFP8Scaling()}, NotImplementedError, "recipe must have weights .* MXFP8Scaling"),
    ({"recipe": "block"}, ValueError, "recipe must be"),
    ({"dtype": torch.int8}, TypeError, "dtype must be float32, float16, bfloat16 or float64"),
])  # fmt: skip
def test_refusals(changes, error, message):
    given = {
        "codes": torch.zeros(4, 8).to(E4M3), "scale_inv": torch.ones(1),
        "recipe": CurrentScaling(), "dtype": torch.float32,
    } | changes  # fmt: skip
    with pytest.raises(error, match=f"FP8Parameter: {message}"):
        FP8Parameter.from_codes(**given)


def test_refusals_of_writes():
    weight, file = made(BlockScaling(), (256, 128))
    with pytest.raises(ValueError, match=r"codes must have shape \[256, 128\], got \[128, 128\]"):
        weight.set_codes_(file[0][:128], file[1][:1])
    with pytest.raises(NotImplementedError, match="only a whole weight can be written to"):
        weight.detach()[:128].set_codes_(file[0][:128], file[1][:1])
    with pytest.raises(NotImplementedError, match="a weight must be whole, with one scale or bloc"):
        weight.detach().view(-1).codes()
    with fp8_model_init(recipe=MXFP8Scaling()):
        other = Linear(64, 64).weight
    assert not other.has_free_scales
    with pytest.raises(NotImplementedError, match=r"got .* with MXFP8"):
        other.codes()


def test_scales_of_rows_lie_as_the_rows_that_ranks_have():
    """Rows that cut blocks have places; columns have none, since a rank's scales are not all's."""
    rows, cols = Parts(0, 96, ((0, 40, 40),)), Parts(1, 128, ((0, 64, 64),))
    entry, scales = Entry(("w",), "w", torch.Size((40, 64)), rows), torch.ones(40, 1)
    assert parts_of_scales("save", "w", entry, scales) == rows
    with pytest.raises(NotImplementedError, match=r"^save: .* split by rows, got w .*dimension 1"):
        parts_of_scales("save", "w", entry._replace(parts=cols), scales)
    with pytest.raises(NotImplementedError, match="in whole blocks of 128"):
        parts_of_scales("save", "w", entry, torch.ones(1, 1))
