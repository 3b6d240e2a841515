"""A frozen weight costs nothing for its gradient: layouts asked for, tensors saved, values made."""

import pytest
import torch
from checks import assert_same_bits
from layer_kinds import KINDS, build, draw, repeatable, shape_of
from schemes import PLAIN_WGRAD, SCHEMES, groups_on_device

from apex_te import fp8_autocast
from apex_te.fp8.scheme.base import GroupQuantizer
from apex_te.module._core import fused_casts as _producers
from apex_te.module.grouped import on_device as _grouped_on_device
from apex_te.recipe import CurrentScaling, DelayedScaling

RECIPES = {
    **SCHEMES,
    "delayed, plain wgrad": DelayedScaling(amax_history_len=4, **PLAIN_WGRAD),
    "tensorwise, plain wgrad": CurrentScaling(**PLAIN_WGRAD),
}
each_recipe = pytest.mark.parametrize("name", RECIPES)

# Kinds in which a kernel that does something else casts the input of a product.
PRODUCERS = ("LayerNormLinear", "LayerNormMLP", "TransformerLayer")

pytestmark = pytest.mark.filterwarnings("ignore:apex_te. FP8 matrix products")


@pytest.fixture(autouse=True)
def _repeatable(request, device):
    with repeatable(device, request.node.callspec.params["kind"]):
        yield


class Spy:
    """A quantizer that notes (role, rowwise, columnwise) of what it is asked for."""

    def __init__(self, inner, role, calls):
        self.inner, self.role, self.calls = inner, role, calls

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def quantize(self, x, rowwise=True, columnwise=True, with_dbias=False):
        self.calls.append((self.role, rowwise, columnwise))
        return self.inner.quantize(x, rowwise, columnwise, with_dbias)

    def produce(self, producer, rowwise=True, columnwise=True):
        self.calls.append((self.role, rowwise, columnwise))
        return self.inner.produce(producer, rowwise, columnwise)

    def recast(self, x, amax):
        self.calls.append((self.role, False, True))
        return self.inner.recast(x, amax)

    def grouped(self, quantizers):
        group = self.inner.grouped([q.inner for q in quantizers])
        return None if group is None else GroupSpy(group, self.role, self.calls)


class GroupSpy(GroupQuantizer):
    """The same of groups of rows."""

    def __init__(self, inner, role, calls):
        self.inner, self.role, self.calls = inner, role, calls

    def quantize(self, x, groups, rowwise=True, columnwise=True):
        self.calls.append((self.role, rowwise, columnwise))
        return self.inner.quantize(x, groups, rowwise, columnwise)

    def quantize_matrices(self, matrices, groups, rowwise=True, columnwise=True, scales=None):
        self.calls.append((self.role, rowwise, columnwise))
        return self.inner.quantize_matrices(matrices, groups, rowwise, columnwise, scales)

    def kept_scales(self, source):
        return self.inner.kept_scales(source)


def watch(model):
    """The calls of every quantizer of ``model``, by role, as they come."""
    calls = []

    def wrap(sets):
        def spied(quantizers):
            roles = ("input", "weight", "weight_recast", "grad_output")
            return quantizers._replace(
                **{role: Spy(getattr(quantizers, role), role, calls) for role in roles}
            )

        return type(sets)(*[tuple(spied(q) for q in each) for each in sets])

    for module in model.modules():
        if hasattr(module, "_fp8"):
            module._fp8.observe(wrap)
    return calls


def is_weight(name):
    return name.rsplit(".", 1)[-1].rstrip("0123").endswith("weight") and "layer_norm" not in name


def saved_codes(model, x, recipe, **kwargs):
    """The output, and the bytes of FP8 data and of all that is saved for backward."""
    sizes = {"codes": 0, "all": 0}
    own = {p.data_ptr() for p in model.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            is_codes = tensor.element_size() == 1 and tensor.dim() == 2
            sizes["codes"] += tensor.nbytes * is_codes
            sizes["all"] += tensor.nbytes
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, fp8_autocast(True, recipe):
        out = model(x, **kwargs)
    return out, sizes


def prepared(kind, name, device, monkeypatch):
    recipe = RECIPES[name]
    if kind.endswith("tensor"):
        if not groups_on_device(recipe):
            pytest.skip("groups whose sizes are on the device have one scale each")
        monkeypatch.setattr(_grouped_on_device, "stays_on_device", lambda device: True)
    (x, dy), *_ = draw(shape_of(kind, device), device, 1, 1)[0]
    return recipe, x, dy


@each_recipe
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learns", ["nothing", "biases"])
def test_layouts(learns, kind, name, device, monkeypatch):
    recipe, x, dy = prepared(kind, name, device, monkeypatch)
    model = build(kind, device)
    for key, p in model.named_parameters():
        p.requires_grad_(learns == "biases" and not is_weight(key))
    calls = watch(model)
    out, sizes = saved_codes(model, x.requires_grad_(), recipe)
    assert {call for call in calls if call[0] == "input"} == {("input", True, False)}
    assert {call for call in calls if call[0] == "weight"} == {("weight", True, False)}
    assert sizes["codes"] == 0
    calls.clear()
    made = []
    plain = _producers.ActivationBackward.plain
    monkeypatch.setattr(
        _producers.ActivationBackward, "plain", lambda self: made.append(self) or plain(self)
    )
    out.backward(dy)
    assert set(calls) == {("grad_output", True, False), ("weight_recast", False, True)}
    fused = name.startswith(("delayed", "tensorwise"))
    assert not (fused and made)  # the gradient of the hidden values is written as codes alone
    assert x.grad is not None


@each_recipe
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_of_the_input(kind, name, device, monkeypatch):
    """Only biases of the last layer learn: nothing of dy is quantized there."""
    recipe, x, dy = prepared(kind, name, device, monkeypatch)
    model = build(kind, device)
    last = list(model.layers[-1].named_parameters())
    for p in model.parameters():
        p.requires_grad_(False)
    wanted = {
        "LayerNormMLP": "fc2_bias", "MultiheadAttention": "proj.bias",
        "TransformerLayer": "layernorm_mlp.fc2_bias",
    }.get(kind)  # fmt: skip
    biases = [p for key, p in last if (key == wanted if wanted else "bias" in key)]
    biases = [p for p in biases if p.shape == (x.shape[-1],)]
    for p in biases:
        p.requires_grad_(True)
    if kind == "LayerNormLinear":
        model.layers[-1].layer_norm_bias.requires_grad_(False)
    calls = watch(model)
    out, sizes = saved_codes(model, x, recipe)
    assert {call for call in calls if call[0] == "input"} == {("input", True, False)}
    assert sizes["codes"] == 0
    calls.clear()
    out.backward(dy)
    assert calls == []


@each_recipe
@pytest.mark.parametrize("kind", [k for k in KINDS if "tensor" not in k])
def test_only_what_learns_has_its_copies(kind, name, device, monkeypatch):
    """Every second weight is frozen: each GEMM by itself, and gradients of the others as ever."""
    recipe, x, dy = prepared(kind, name, device, monkeypatch)
    model, whole = build(kind, device), build(kind, device)
    weights = [p for key, p in model.named_parameters() if is_weight(key)]
    for p in weights[1::2]:
        p.requires_grad_(False)
    seen, sizes = [], []
    for m in (model, whole):
        inp = x.clone().requires_grad_()
        calls = watch(m)
        out, size = saved_codes(m, inp, recipe)
        out.backward(dy)
        sizes.append(size)
        seen.append([out.detach(), inp.grad])
        columnwise = [
            sum(call[0] == r and call[2] for call in calls) for r in ("input", "grad_output")
        ]
        seen[-1].append(columnwise)
    # In bfloat16 a norm or an activation writes FP8 from float32, or 16-bit values which are then
    # cast: the second for the whole model, where a weight gradient in high precision needs them.
    # Everything behind that layer has other bits.
    is_16_bit = x.dtype is not torch.float32
    is_rounded_twice = is_16_bit and "plain wgrad" in name and kind in PRODUCERS
    if not is_rounded_twice:
        assert_same_bits(seen[0][:2], seen[1][:2])
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            if p.requires_grad and q.grad is not None:
                assert_same_bits(p.grad, q.grad)
    fewer, all_of_them = seen[0][2], seen[1][2]
    if "plain wgrad" in name:
        assert fewer == all_of_them == [0, 0]
    elif kind not in ("MultiheadAttention", "TransformerLayer"):  # whose projections are joined
        assert fewer[1] < all_of_them[1]
        assert fewer[0] < all_of_them[0]
        assert sizes[0]["codes"] < sizes[1]["codes"]
    assert sizes[0]["all"] <= sizes[1]["all"]
