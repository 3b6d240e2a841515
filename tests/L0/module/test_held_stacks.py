"""Stacks of weights held in FP8, against an FP8 Parameter for each weight."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from grouped_splits import E4M3, RECIPES, read_on_device, tensor_of
from schemes import SCHEMES

from apex_te import MoELayer, fp8_autocast
from apex_te.fp8.model_init import fp8_model_init
from apex_te.fp8.parameter import decode
from apex_te.fp8.parameter.operands import dequantized
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.fp8.parameter.sharded_write import write_parts
from apex_te.fp8.scheme import base
from apex_te.module.grouped import experts
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.ops import grouped_quantize
from apex_te.optimizers import FusedAdam
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling
from tests.checks import assert_same_bits, codes

pytestmark = pytest.mark.filterwarnings("ignore:apex_te")
SPLITS = [5, 0, 16, 3]
GROUPED = ["delayed", "first", "hybrid tensorwise", "tensorwise", "blockwise", "hybrid blockwise"]
every_scheme = pytest.mark.parametrize("name", SCHEMES)


@pytest.fixture(autouse=True)
def _splits_stay_on_device(request, monkeypatch):
    if "device" in request.fixturenames:
        read_on_device(monkeypatch)


def dtype_on(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def held(recipe, single=True, sizes=(160, 48), groups=4, **options):
    with fp8_model_init(True, recipe, options.pop("preserve", False)):
        return GroupedLinear(groups, *sizes, single_parameter=single, **options)


def pair(recipe, device="cpu", **options):
    """A layer with one FP8 Parameter, and one with an FP8 Parameter for each group."""
    torch.manual_seed(1)
    single, other = (held(recipe, kind, device=device, **options) for kind in (True, False))
    with torch.no_grad():
        single.weight.copy_(torch.randn(single.weight.shape, device=device))
    other.load_state_dict(single.state_dict())
    assert type(single.weight) is type(other.weight0) is FP8Parameter
    return single, other


def each_of(module, of):
    if module.single_parameter:
        return of(module.weight)
    return torch.stack([of(getattr(module, f"weight{i}")) for i in range(module.num_gemms)])


def run(module, x, dy, recipe, splits, *rest, fp8=True):
    x = x.clone().requires_grad_()
    with fp8_autocast(fp8, recipe):
        out = module(x, splits, *rest)
    out.backward(dy)
    return out, x.grad


def rows(device, sizes=(160, 48), dtype=None):
    dtype = dtype or dtype_on(device)
    return [torch.randn(sum(SPLITS), size).to(device, dtype) for size in sizes]


@pytest.mark.parametrize("shape", [(3, 48, 160), (2, 256, 128), (1, 130, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_scheme
def test_data_are_those_of_each_weight(device, name, shape, dtype):
    stack = FP8Parameter.empty(shape, SCHEMES[name], dtype, device)
    values = (torch.randn(shape) * torch.tensor([1.0, 1e-3, 0.0])[: shape[0], None, None]).to(
        device
    )
    stack.copy_(values)
    for i, value in enumerate(values):
        one = FP8Parameter.empty(shape[1:], SCHEMES[name], dtype, device)
        one.copy_(value)
        part = stack[i]
        assert part.shape == shape[1:]
        for data, wanted in (
            (part._rowwise, one._rowwise),
            (part._transposed()[0], one._transposed()[0]),
        ):
            assert_same_bits(codes(data), codes(wanted))
        assert_same_bits(part._rowwise_scale_inv.float(), one._rowwise_scale_inv.float())
        columnwise, scale_inv = stack._transposed()
        assert_same_bits(codes(columnwise[i]), codes(one._transposed()[0]))
        assert_same_bits(scale_inv[i].float(), one._transposed()[1].float())
        assert_same_bits(stack.dequantize()[i], one.dequantize())
        assert_same_bits(stack.unbind(0)[i].dequantize(), one.dequantize())


@pytest.mark.parametrize("first", [(), (True,)])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", GROUPED)
def test_same_bits_as_a_parameter_each(device, name, fused, first):
    """Splits on the device, both kinds; the second microbatch reads what the first one keeps."""
    options = {"params_dtype": dtype_on(device), "fuse_wgrad_accumulation": fused}
    single, other = pair(RECIPES[name], device, **options)
    for each in (single, other):
        for value in each.parameters():
            value.main_grad = torch.full(value.shape, 2.0, device=device)
    for rest in (first, (False,) if first else ()):
        x, dy = rows(device)
        given = tensor_of(SPLITS, device)
        results = [run(each, x, dy, RECIPES[name], given, *rest) for each in (single, other)]
        assert_same_bits(*results)
        assert (single.weight._held.columnwise is not None) == bool(first)
    of = (lambda p: p.main_grad) if fused else (lambda p: p.grad)
    assert_same_bits(each_of(single, of), each_of(other, of))
    with torch.no_grad():
        single.weight.mul_(2.0)
    assert single.weight._held.columnwise is None


@every_scheme
def test_listed_splits(device, name):
    """Recipes without products of groups read one weight after the other."""
    recipe = SCHEMES[name]
    single, other = pair(recipe, device, params_dtype=dtype_on(device))
    x, dy = rows(device)
    results = [run(each, x, dy, recipe, SPLITS) for each in (single, other)]
    if name in ("mxfp8", "hif8"):
        assert_same_bits(*results)
        grads = [each_of(module, lambda p: p.grad) for module in (single, other)]
        assert_same_bits(*grads)
    for value, wanted in zip(*results, strict=True):  # rounded to bfloat16 before
        torch.testing.assert_close(value, wanted, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("single", [True, False])
def test_a_step_casts_no_weight(device, monkeypatch, name, single):
    module = held(RECIPES[name], single, device=device, params_dtype=dtype_on(device))
    x, dy = rows(device)

    def refused(*args, **kwargs):
        raise AssertionError("a weight was cast or decoded")

    for owner, function in (
        (grouped_quantize, "_quantize_matrices"), (grouped_quantize, "_block_quantize_matrices"),
        (base, "quantize_matrices"), (decode, "values"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, function, refused)
    for rest in ((), (True,), (False,)):
        run(module, x, dy, RECIPES[name], tensor_of(SPLITS, device), *rest)


@pytest.mark.parametrize("name", ["none", "hif8", "calibrating", "pow2"])
def test_other_regions_use_the_values(device, name):
    recipe = {"hif8": SCHEMES["hif8"], "calibrating": DelayedScaling(interval=9)}
    recipe = recipe.get(name, CurrentScaling(pow2=True, **E4M3))
    single, _ = pair(BlockScaling(), device, params_dtype=dtype_on(device))
    plain = GroupedLinear(
        4, 160, 48, single_parameter=True, device=device, params_dtype=dtype_on(device)
    )
    plain.load_state_dict(single.state_dict())
    x, dy = rows(device)
    results = []
    for each in (single, plain):
        inp = x.clone().requires_grad_()
        with fp8_autocast(name in ("hif8", "pow2"), recipe, calibrating=name == "calibrating"):
            out = each(inp, tensor_of(SPLITS, device))
        out.backward(dy)
        results.append((out, inp.grad, each.weight.grad))
    assert_same_bits(*results)
    if name == "calibrating":
        assert single.fp8_state.amax_history_fwd[0, 1] > 0
        assert_same_bits(single.fp8_state.amax_history_fwd, plain.fp8_state.amax_history_fwd)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "pow2", "blockwise"])
def test_fused_experts(device, monkeypatch, name):
    """The bits of the ops one at a time, and of plain weights whose casts give the same data."""
    recipe = {"pow2": CurrentScaling(pow2=True, **E4M3)}.get(name) or RECIPES[name]
    dtype = dtype_on(device)
    with fp8_model_init(True, recipe):
        model = MoELayer(64, 128, 6, params_dtype=dtype, device=device)
    assert type(model.fc1.weight) is type(model.fc2.weight) is FP8Parameter
    assert type(model.router.weight) is torch.nn.Parameter
    with torch.no_grad():
        for weight in (model.fc1.weight, model.fc2.weight):
            weight.copy_(torch.randn(weight.shape) * 0.1)
    plain = MoELayer(64, 128, 6, params_dtype=dtype, device=device)
    plain.load_state_dict(model.state_dict())
    x, dy = (torch.randn(40, 64).to(device, dtype) for _ in range(2))
    indices = torch.stack([torch.randperm(5)[:2] for _ in range(40)]).int().to(device)
    probs = (2.0 ** torch.randint(-2, 2, (40, 2))).to(device)
    results, calls = [], []
    of = experts.ExpertsFunction.apply
    monkeypatch.setattr(experts.ExpertsFunction, "apply", lambda *a: calls.append(1) or of(*a))
    for layer, fused in ((copy.deepcopy(model), True), (model, False), (plain, True)):
        inp = x.clone().requires_grad_()
        with monkeypatch.context() as patch, fp8_autocast(True, recipe):
            if not fused:
                patch.setattr(experts, "_fused_calls", lambda *args, **options: None)
            out, _ = experts.run_experts(layer.fc1, layer.fc2, inp, indices, probs, "swiglu")
        out.backward(dy)
        results.append([out, inp.grad, layer.fc1.weight.grad, layer.fc2.weight.grad])
    assert len(calls) == 2
    assert_same_bits(results[0], results[1])
    if name in ("pow2", "blockwise"):
        assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "fused"])
def test_optimizers(device, name, kind):
    recipe, dtype = SCHEMES[name], dtype_on(device)
    single, other = pair(recipe, device, params_dtype=dtype, bias=False)
    grads = [torch.randn(4, 48, 160).to(device, dtype) for _ in range(3)]
    for module in (single, other):
        if kind == "fused":
            optimizer = FusedAdam(module.parameters(), lr=0.1, master_weights=True)
        else:
            optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1, foreach=False)
        for grad in grads:
            for parameter, value in zip(
                module.parameters(), (grad,) if module is single else grad, strict=True
            ):
                parameter.grad = value.clone()
            optimizer.step()
    assert_same_bits(
        each_of(single, lambda p: p.dequantize()), each_of(other, lambda p: p.dequantize())
    )


@every_scheme
def test_state_dicts_of_all_kinds_load_into_all(name):
    recipe = SCHEMES[name]
    layers = [*pair(recipe)]
    layers += [GroupedLinear(4, 160, 48, single_parameter=single) for single in (True, False)]
    values = each_of(layers[0], lambda p: p.dequantize())
    for source in layers:
        if source is not layers[0]:
            source.load_state_dict(layers[0].state_dict())
        for keep_vars in (False, True):
            for target in layers:
                saved = source.state_dict(keep_vars=keep_vars)
                again = copy.deepcopy(target)
                with torch.no_grad():
                    for parameter in again.parameters():
                        parameter.fill_(3.0)
                again.load_state_dict(dict(saved))
                assert_same_bits(each_of(again, dequantized), values)
    assert type(layers[0].state_dict()["weight"]) is torch.Tensor


@every_scheme
def test_copies_moves_and_pickles(name):
    module = held(SCHEMES[name], preserve=True, params_dtype=torch.bfloat16)
    file = io.BytesIO()
    torch.save(module.weight, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    others = [loaded, copy.deepcopy(module).weight, pickle.loads(pickle.dumps(module)).weight]
    initial = module.weight.get_high_precision_init_val()
    assert initial.shape == (4, 48, 160)
    assert not hasattr(module.weight0, "get_high_precision_init_val")
    assert 0.02 < initial.float().std() < 0.026
    for other in others:
        assert type(other) is FP8Parameter
        assert isinstance(other, torch.nn.Parameter)
        assert_same_bits(other.dequantize(), module.weight.dequantize())
        assert_same_bits(other.get_high_precision_init_val(), initial)
    weight, values = module.weight, module.weight.dequantize(torch.float32)
    module.half()
    assert module.weight is weight
    assert weight.dtype is torch.float16
    assert_same_bits(weight.dequantize(torch.float32), values)
    empty = held(SCHEMES[name], device="meta", init_method=torch.nn.init.orthogonal_)
    empty.to_empty(device="cpu")
    empty.reset_parameters()
    for matrix in empty.weight:
        product = matrix.dequantize() @ matrix.dequantize().T
        assert (product - torch.eye(48)).abs().max() < 0.1


def test_views_share_the_data_and_refuse_writes():
    module = held(CurrentScaling())
    part, pair_of = module.weight2, module.weight[1:3]
    with torch.no_grad():
        module.weight.copy_(torch.randn(4, 48, 160))
        assert_same_bits(part.dequantize(), module.weight.dequantize()[2])
        assert_same_bits(pair_of.dequantize(), module.weight.dequantize()[1:3])
        for view in (part, pair_of, module.weight[-1]):
            with pytest.raises(NotImplementedError, match="only a whole weight can be written to"):
                view.fill_(1.0)
        with pytest.raises(NotImplementedError, match=r"FP8Parameter: .* use dequantize"):
            module.weight.select(1, 0)
    (module.weight[1] * 2).sum().backward()
    assert bool((module.weight.grad[1] == 2).all())
    assert not module.weight.grad[[0, 2, 3]].any()


@every_scheme
def test_fsdp_hooks(name):
    whole = held(SCHEMES[name]).weight.detach()
    shards = [whole.new_zeros(2, 48, 160) for _ in range(2)]
    mesh = SimpleNamespace(size=lambda: 2)
    for shard, part in zip(shards, whole.chunk(2), strict=True):
        shard.narrow(0, 0, 2).copy_(part)
    given = [s.fsdp_pre_all_gather(mesh, whole.shape, None, None, None) for s in shards]
    outputs = tuple(torch.cat(parts) for parts in zip(*(g[0] for g in given), strict=True))
    made, _ = shards[0].fsdp_post_all_gather(outputs, given[0][1], torch.float32)
    assert_same_bits(codes(made._rowwise), codes(whole._rowwise))
    assert_same_bits(made.dequantize(), whole.dequantize())
    uneven = SimpleNamespace(size=lambda: 3)
    with pytest.raises(NotImplementedError, match="FSDP2 shards must be rows"):
        shards[0].fsdp_pre_all_gather(uneven, whole.shape, None, None, None)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_write_parts(name):
    """Ranges of a flattened stack that begin and end inside of weights."""
    module, master = held(SCHEMES[name]), torch.randn(4, 48, 160)
    wanted = held(SCHEMES[name]).weight.detach()
    wanted.copy_(master)
    write_parts([module.weight], [master.flatten()], [0], None)
    assert_same_bits(module.weight.dequantize(), wanted.dequantize())
    # A rank's part alone, which has all amax values: the rest stays.
    size, middle = 48 * 160, torch.zeros(4 * 48 * 160)
    first, last = size + 70, 3 * size + 9
    middle[first:last] = master.flatten()[first:last] * 3
    wanted.copy_(middle.view(4, 48, 160))
    write_parts([module.weight], [middle[first:last]], [first], None)
    found, due = codes(module.weight._rowwise).flatten(), codes(wanted._rowwise).flatten()
    assert_same_bits(found[first:last], due[first:last])
    assert found[:first].any()
    assert found[last:].any()


@pytest.mark.cover(0)
@pytest.mark.parametrize("name", ["blockwise", "tensorwise", "delayed"])
def test_compiled(device, name):
    single, _ = pair(RECIPES[name], device, params_dtype=dtype_on(device))
    other = copy.deepcopy(single)
    compiled = torch.compile(other, fullgraph=name != "delayed", backend="aot_eager")
    for rest in ((), (True,), (False,)):
        x, dy = rows(device)
        given = tensor_of(SPLITS, device)
        results = [run(each, x, dy, RECIPES[name], given, *rest) for each in (single, compiled)]
        for value, wanted in zip(*results, strict=True):
            torch.testing.assert_close(value, wanted, rtol=2**-7, atol=0.1)
    torch.testing.assert_close(single.weight.grad, other.weight.grad, rtol=2**-7, atol=0.1)


def test_refusals():
    with pytest.raises(ValueError, match=r"shape must be \[rows, cols\] or \[count, rows, cols\]"):
        FP8Parameter.empty((1, 2, 3, 4), CurrentScaling(), torch.float32)
    rebuild, (packed, dtype, tensors, *rest) = held(CurrentScaling()).weight.__reduce_ex__(2)
    with pytest.raises(ValueError, match=r"scale_inv must have shape \[4, 1\] of torch.float32"):
        rebuild(packed, dtype, (tensors[0], tensors[1][:3]), *rest)
