"""Every public function under torch's tracing modes: eager's result, or a refusal by name."""

import contextlib
import warnings

import pytest
import torch
import torch._dynamo
from public_functions import DIFFERENTIABLE, NAMES, Call
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from wide_sums import WideSums

from apex_te.ops import transforms

REFUSALS = (NotImplementedError, TypeError, ValueError)
OF_CONSTANT_DERIVATIVE = ("bias_dropout_add.bias_dropout_add", "transducer_joint.transducer_joint")


def bits(t):
    return t.contiguous().reshape(-1).view(torch.uint8)


def assert_same(actual, expected):
    """Bitwise, leaf by leaf."""
    actual, expected = tree_leaves(actual), tree_leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        if isinstance(e, torch.Tensor):
            assert a.shape == e.shape
            assert a.dtype == e.dtype
            assert torch.equal(bits(a), bits(e))


@pytest.fixture
def call(request, device, monkeypatch):
    """Fills memory so that elements an op leaves unwritten show; by no view, for TorchScript."""

    def filled(make):
        return lambda *args, **kwargs: make(*args, **kwargs).fill_(77)

    # Dynamo lists torch's functions once, by identity: these before they are replaced.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
    made = Call(request.param, device)
    # Rows of no group, unused columns and the order of a map are left without values.
    assert made.expected
    return made


# On a CPU these are made of torch's own ops alone, which have derivatives.
PLAIN = ("grouped_gemm.contract_groups", "grouped_gemm.multiply_groups")
every = pytest.mark.parametrize("call", NAMES, indirect=True)


class Log(TorchDispatchMode):
    """The ops that a mode sees."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def assert_refusal(error, call):
    """It names the function, or an op of its file."""
    stem, function = call.name.split(".")
    text = str(error)
    assert any(part in text for part in (function, stem.split("_")[0])), text


@every
def test_dispatch_modes_see_the_kernels(call):
    with Log() as log:
        result = call(*call.fresh())
    assert_same(result, call.expected)
    seen = [op for op in log.ops if op.namespace == "apex_te"]
    assert seen or call.name in PLAIN


@pytest.mark.cover(1)
@every
@pytest.mark.parametrize("tracing_mode", ["real", "symbolic"])
def test_make_fx(call, tracing_mode):
    try:
        graph = make_fx(call, tracing_mode=tracing_mode)(*call.fresh())
    except REFUSALS as error:
        assert_refusal(error, call)
        return
    assert_same(graph(*call.fresh()), call.expected)


@every
def test_jit_trace(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes that become constants
        try:
            traced = torch.jit.trace(lambda *t: call(*t), tuple(call.fresh()), check_trace=False)
        except REFUSALS as error:
            assert_refusal(error, call)
            return
    assert_same(traced(*call.fresh()), call.expected)


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call(*tensors)


@pytest.mark.long
@pytest.mark.cover(1)
@every
def test_export(call):
    try:
        program = torch.export.export(Module(call), tuple(call.fresh()), strict=False)
    except REFUSALS as error:
        assert_refusal(error, call)
        return
    assert_same(program.module()(*call.fresh()), call.expected)


@every
def test_fake_tensors_without_their_mode(call):
    if call.name.startswith("grouped_gemm."):
        pytest.skip("torch.arange does not know that it is to be fake")
    tensors, mode = call.fresh(), FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in tensors]
    try:
        result = call(*fakes)
    except REFUSALS as error:
        assert_refusal(error, call)
        return
    for actual, expected in zip(result, call.expected, strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert actual.device == expected.device


@every
def test_meta_tensors(call):
    try:
        result = call(*(t.to("meta") for t in call.tensors))
    except REFUSALS as error:
        assert_refusal(error, call)
        return
    for actual, expected in zip(result, call.expected, strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert actual.is_meta


@every
def test_vmap(call):
    first, second = call.fresh(), call.fresh()
    stacked = [torch.stack(pair) for pair in zip(first, second, strict=True)]
    # Of torch's own products a batch is made by other kernels.
    order = WideSums() if call.name in PLAIN else contextlib.nullcontext()
    try:
        with order:
            result = torch.func.vmap(call)(*stacked)
    except REFUSALS as error:
        assert_refusal(error, call)
        return
    with order:
        expected = call(*call.fresh())
    for sample in range(2):
        assert_same([t[sample] for t in result], expected)


@pytest.mark.parametrize(
    "call", ["fp8_gemm.fp8_gemm", "cast_transpose.cast_transpose"], indirect=True
)
def test_samples_begin_where_tensors_do(call, monkeypatch):
    """A scale of one element of each sample, too, though the second lies 4 bytes behind."""
    addresses, take = [], transforms._take

    def taken(*args):
        sample = take(*args)
        if isinstance(sample, torch.Tensor):
            addresses.append(sample.data_ptr())
        return sample

    monkeypatch.setattr(transforms, "_take", taken)
    torch.func.vmap(call)(*(torch.stack([t] * 2) for t in call.fresh()))
    assert addresses
    assert all(address % 16 == 0 for address in addresses)


def loss_of(call, tensors, at):
    """Of the floating-point results, and the function of the tensors at `at`."""

    def loss(*chosen):
        given = list(tensors)
        for i, t in zip(at, chosen, strict=True):
            given[i] = t
        outputs = [t for t in call(*given) if t.dtype is torch.float32]
        return sum((t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape).to(t)).sum()
                   for t in outputs)  # fmt: skip

    return loss


def trainable(call):
    """Places of the float32 tensors; the angles of rope get no gradient."""
    at = [i for i, t in enumerate(call.tensors) if t.dtype is torch.float32]
    return at[:1] if call.name == "rope.rope" else at


@every
def test_func_grad(call):
    at = trainable(call)
    if not at or call.name in PLAIN:
        pytest.skip("no float32 argument, or torch's own ops")
    loss = loss_of(call, call.fresh(), at)
    leaves = [call.tensors[i].clone() for i in at]
    if call.name not in DIFFERENTIABLE:
        # Eager results of these have no gradient; a silent 0 would be wrong.
        with pytest.raises(REFUSALS) as refusal:
            torch.func.grad(loss, argnums=tuple(range(len(at))))(*leaves)
        assert_refusal(refusal.value, call)
        return
    actual = torch.func.grad(loss, argnums=tuple(range(len(at))))(*leaves)
    leaves = [t.requires_grad_() for t in leaves]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    assert_same(actual, expected)
    leaves = [t.detach() for t in leaves]
    losses = [lambda *t: loss(*t).square()]
    if call.name not in OF_CONSTANT_DERIVATIVE:
        losses.append(loss)
    for outer in losses:
        nested = torch.func.grad(lambda *t, f=outer: torch.func.grad(f)(*t).square().sum())
        with pytest.raises(NotImplementedError, match="second derivative") as refusal:
            nested(*leaves)
        assert_refusal(refusal.value, call)


@pytest.mark.parametrize("call", sorted(DIFFERENTIABLE), indirect=True)
def test_per_sample_gradients(call):
    """vmap(grad), grad(vmap) and vmap(vmap) are those of a loop, but for the order of torch's sums.

    These are the losses; what the ops add up is as it was.
    """
    at = trainable(call)
    rest = call.fresh()
    loss = loss_of(call, rest, at)
    argnums = tuple(range(len(at)))
    samples = [torch.stack([call.tensors[i], call.tensors[i] * 0.5]) for i in at]
    with WideSums():
        expected = [torch.func.grad(loss, argnums)(*(t[i] for t in samples)) for i in range(2)]
        actual = torch.func.vmap(torch.func.grad(loss, argnums))(*samples)
        for i in range(2):
            assert_same([t[i] for t in actual], expected[i])
        total = torch.func.grad(lambda *t: torch.func.vmap(loss)(*t).sum(), argnums)(*samples)
        assert_same(total, actual)
        deep = torch.func.vmap(torch.func.vmap(loss))(*(t[None] for t in samples))
        assert_same(deep, torch.stack([loss(*(t[i] for t in samples)) for i in range(2)])[None])


@every
def test_jvp_is_refused(call):
    at = trainable(call)
    if not at or call.name in PLAIN:
        pytest.skip("no float32 argument, or torch's own ops")
    loss = loss_of(call, call.fresh(), at)
    primals = tuple(call.tensors[i] for i in at)
    with pytest.raises(REFUSALS) as refusal:
        torch.func.jvp(loss, primals, tuple(map(torch.ones_like, primals)))
    assert_refusal(refusal.value, call)
    from torch.autograd import forward_ad

    with forward_ad.dual_level(), pytest.raises(REFUSALS) as refusal:
        loss(*(forward_ad.make_dual(t, torch.ones_like(t)) for t in primals))
    assert_refusal(refusal.value, call)


@pytest.mark.parametrize("call", sorted(DIFFERENTIABLE), indirect=True)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, Log])
def test_gradients_in_a_mode(call, mode):
    """A backward in a dispatch mode is eager's."""
    at = trainable(call)

    def gradients():
        leaves = [call.tensors[i].clone().requires_grad_() for i in at]
        return torch.autograd.grad(loss_of(call, call.fresh(), at)(*leaves), leaves)

    expected = gradients()
    with mode():
        assert_same(gradients(), expected)


def test_selective_checkpoint_recomputes_the_ops():
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    from apex_te.ops.rms_norm import rms_norm
    from apex_te.ops.swiglu import swiglu

    seen = []

    def block(x, w, m):
        return torch.mm(swiglu(torch.mm(rms_norm(x, w), m)), m[:32, :])

    def policy(save):
        def choose(ctx, op, *args, **kwargs):
            seen.append(op)
            return CheckpointPolicy.MUST_SAVE if save(op) else CheckpointPolicy.PREFER_RECOMPUTE

        return lambda: create_selective_checkpoint_contexts(choose)

    torch.manual_seed(0)
    x, w, m = torch.randn(16, 64), torch.rand(64), torch.randn(64, 64)

    def gradients(save):
        leaves = [t.clone().requires_grad_() for t in (x, w, m)]
        if save is None:
            out = block(*leaves)
        else:
            out = checkpoint(block, *leaves, use_reentrant=False, context_fn=policy(save))
        return torch.autograd.grad(out.square().sum(), leaves)

    expected = gradients(None)
    assert_same(gradients(lambda op: op is torch.ops.aten.mm.default), expected)
    assert torch.ops.apex_te.swiglu_fwd.default in seen
    assert_same(gradients(lambda op: False), expected)
    with pytest.raises(NotImplementedError, match=r"swiglu_fwd: .* must have it recomputed"):
        gradients(lambda op: op is torch.ops.apex_te.swiglu_fwd.default)


def test_prepared_lists_in_a_mode():
    from apex_te import runtime
    from apex_te.ops import multi_tensor

    tensors = [torch.randn(5), torch.randn(3, 3)]
    with Log() as log:
        result = multi_tensor.amax(runtime.tensor_list(tensors))
    assert torch.equal(result, torch.stack([t.abs().max() for t in tensors]))
    assert torch.ops.apex_te.multi_tensor_amax.default in log.ops


def test_loaders_refuse_what_they_cannot_show():
    """The functions of apex_te.compatibility.<op> are C functions, which no mode sees."""
    from apex_te.compatibility import byte_transpose

    codes, out = torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8)
    byte_transpose.byte_transpose(codes, out)
    with Log(), pytest.raises(NotImplementedError, match=r"byte_transpose: .*apex_te.ops"):
        byte_transpose.byte_transpose(codes, out)


def test_device_modes_change_nothing():
    from apex_te.ops.rms_norm import rms_norm

    x, w = torch.randn(4, 64), torch.rand(64)
    expected = rms_norm(x, w)
    with torch.device("meta"):
        actual = rms_norm(x, w)
    assert_same(actual, expected)
