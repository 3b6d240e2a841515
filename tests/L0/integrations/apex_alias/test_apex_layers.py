"""apex's norms, MLP, dense layers, cross entropy and small functions, against PyTorch's."""

import copy
import itertools

import pytest
import torch
from checks import assert_as_good_as_torch, assert_same_bits
from torch.nn import functional

from apex_te.integrations.apex import multi_tensor_apply, normalization
from apex_te.integrations.apex._autocast_utils import _cast_if_autocast_enabled, _get_current_dtype
from apex_te.integrations.apex.contrib.clip_grad import clip_grad_norm_
from apex_te.integrations.apex.contrib.layer_norm import FastLayerNorm
from apex_te.integrations.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex_te.integrations.apex.fused_dense import (
    FusedDense,
    FusedDenseGeluDense,
    dense_no_bias_function,
    fused_dense_function,
)
from apex_te.integrations.apex.mlp import MLP, mlp_function
from apex_te.integrations.apex.normalization import fused_layer_norm as functions

NORMS = ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm")


def torch_norm(name, x, shape, params, eps):
    if "RMS" in name:
        return functional.rms_norm(x, shape, params[0] if params else None, eps)
    return functional.layer_norm(x, shape, *params, eps=eps)


def with_grads(function, x, params, grad):
    """The output and all gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *params)]
    out = function(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtypes", ["float32", "float16", "bfloat16", "float16 float32"])
@pytest.mark.parametrize("shape", [(24,), (3, 8)])
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("affine", [True, False])
def test_norms(name, dtypes, shape, memory_efficient, affine, device):
    mixed = name.startswith("Mixed")
    if mixed and not affine:
        with pytest.raises(RuntimeError, match="elementwise_affine must be True, got False"):
            getattr(normalization, name)(shape, elementwise_affine=False)
        return
    own, *other = (getattr(torch, each) for each in dtypes.split())
    weights = other[0] if other else own
    options = {} if mixed else {"elementwise_affine": affine}
    norm = getattr(normalization, name)(
        shape, eps=1e-4, memory_efficient=memory_efficient, **options
    ).to(device, weights)
    torch.manual_seed(3)
    for param in norm.parameters():
        torch.nn.init.uniform_(param, 0.5, 1.5)
    x = torch.randn(5, 2, *shape).to(device, own)
    grad = torch.randn(5, 2, *shape, device=device)
    names = list(dict(norm.named_parameters()))
    params = list(norm.parameters())

    def ours(x, *params):
        return torch.func.functional_call(norm, dict(zip(names, params, strict=True)), (x,))

    found = with_grads(ours, x, params, grad)
    assert found[0].dtype is (weights if mixed else own)
    assert [t.dtype for t in found[1:]] == [own, *[weights] * len(params)]
    exact = with_grads(
        lambda x, *params: torch_norm(name, x, shape, params, 1e-4),
        x.double(), [p.double() for p in params], grad.to(found[0].dtype).double(),
    )  # fmt: skip
    low = weights if mixed else own
    theirs = with_grads(
        lambda x, *params: torch_norm(name, x, shape, params, 1e-4),
        x.to(low), [p.to(low) for p in params], grad,
    )  # fmt: skip
    for mine, right, torchs in zip(found, exact, theirs, strict=True):
        assert_as_good_as_torch(mine, right, torchs.to(mine.dtype))
    again = with_grads(ours, x, params, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm", "FastLayerNorm"])
def test_norms_state_and_defaults(name, device):
    cls = FastLayerNorm if name == "FastLayerNorm" else getattr(normalization, name)
    norm = cls(6).to(device)
    assert norm.eps == 1e-5
    assert norm.normalized_shape == torch.Size([6])
    expected = {"weight"} if "RMS" in name else {"weight", "bias"}
    assert set(norm.state_dict()) == expected
    with torch.no_grad():
        for param in norm.parameters():
            param.fill_(5)
    norm.reset_parameters()
    assert bool((norm.weight == 1).all())
    assert "RMS" in name or bool((norm.bias == 0).all())
    assert "eps=1e-05" in repr(norm)
    twin = copy.deepcopy(norm)
    assert_same_bits(twin(torch.ones(2, 6, device=device)), norm(torch.ones(2, 6, device=device)))


def test_norms_take_float64_and_autocast(device):
    x = torch.randn(4, 6, device=device)
    w, b = torch.rand(6, device=device), torch.rand(6, device=device)
    layer = functional.layer_norm(x.double(), (6,), w.double(), b.double(), 1e-6)
    found = functions.fused_layer_norm_affine(x.double(), w.double(), b.double(), 6)
    torch.testing.assert_close(found, layer, rtol=0, atol=0)
    wide = x.double()
    for function, args, theirs in (
        (functions.fused_layer_norm, (), functional.layer_norm(wide, (6,), eps=1e-6)),
        (functions.fused_rms_norm, (), functional.rms_norm(wide, (6,), eps=1e-6)),
        (functions.fused_rms_norm_affine, (w,), functional.rms_norm(wide, (6,), w.double(), 1e-6)),
    ):
        assert_same_bits(function(x.double(), *(t.double() for t in args), (6,)), theirs)
        torch.testing.assert_close(function(x, *args, (6,)), theirs.float(), rtol=1e-6, atol=1e-6)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            assert function(x, *args, (6,)).dtype is torch.bfloat16


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "sigmoid", "none"])
def test_mlp(bias, activation, device):
    torch.manual_seed(0)
    mlp = MLP([7, 5, 3], bias=bias, activation=activation).to(device)
    names = [f"{kind}_{i}" for i in range(2) for kind in ("weight", "bias")[: 1 + bias]]
    assert sorted(dict(mlp.named_parameters())) == sorted(names)
    act = {"relu": torch.relu, "sigmoid": torch.sigmoid, "none": lambda t: t}[activation]

    def plain(x, *params):
        for weight, shift in itertools.zip_longest(params[:2], params[2:]):
            x = act(functional.linear(x, weight, shift))
        return x

    def ours(x, *params):
        return mlp_function(mlp.bias, mlp.activation, x, *params)

    x, params = torch.randn(6, 7, device=device), [*mlp.weights, *mlp.biases]
    grad = torch.randn(6, 3, device=device)
    exact = with_grads(plain, x.double(), [p.double() for p in params], grad.double())
    theirs = with_grads(plain, x, params, grad)
    found = with_grads(ours, x, params, grad)
    for mine, torchs, right in zip(found, theirs, exact, strict=True):
        assert_as_good_as_torch(mine, right, torchs)
    assert_same_bits(mlp(x).detach(), found[0])
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert mlp(x).dtype is torch.bfloat16
    with pytest.raises(TypeError, match="activation must be one of none, relu, sigmoid, got 'tanh"):
        MLP([2, 3], activation="tanh")


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_fused_dense(shape, device):
    torch.manual_seed(0)
    x, grad = torch.randn(shape, device=device), torch.randn(*shape[:-1], 4, device=device)
    dense = FusedDense(8, 4).to(device)
    expected = functional.linear(x, dense.weight, dense.bias)
    assert_same_bits(dense(x), expected)
    assert_same_bits(fused_dense_function(x, dense.weight, dense.bias), expected)
    assert_same_bits(dense_no_bias_function(x, dense.weight), functional.linear(x, dense.weight))
    both = FusedDenseGeluDense(8, 5, 4).to(device)
    params = [both.weight1, both.bias1, both.weight2, both.bias2]
    assert list(dict(both.named_parameters())) == ["weight1", "bias1", "weight2", "bias2"]

    def plain(x, w1, b1, w2, b2):
        hidden = functional.gelu(functional.linear(x, w1, b1), approximate="tanh")
        return functional.linear(hidden, w2, b2)

    def ours(x, *params):
        made = dict(zip(["weight1", "bias1", "weight2", "bias2"], params, strict=True))
        return torch.func.functional_call(both, made, (x,))

    exact = with_grads(plain, x.double(), [p.double() for p in params], grad.double())
    theirs = with_grads(plain, x, params, grad)
    for mine, torchs, right in zip(with_grads(ours, x, params, grad), theirs, exact, strict=True):
        assert_as_good_as_torch(mine, right, torchs)
    with pytest.raises(NotImplementedError, match=r"bias must be True.*two torch\.nn"):
        FusedDenseGeluDense(8, 5, 4, bias=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("half_to_float", [False, True])
@pytest.mark.parametrize("padding_idx", [0, 3])
def test_cross_entropy(dtype, smoothing, half_to_float, padding_idx, device):
    torch.manual_seed(0)
    rows, classes = 200, 61  # enough that PyTorch's largest error is not small by chance
    logits, labels = torch.randn(rows, classes), torch.randint(0, classes, (rows,))
    labels[2] = labels[5] = padding_idx
    logits, labels = logits.to(device, dtype), labels.to(device)
    grad = torch.rand(rows, device=device)

    def plain(logits):
        return functional.cross_entropy(
            logits, labels, ignore_index=padding_idx, label_smoothing=smoothing, reduction="none"
        )

    def ours(logits):
        return SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding_idx, half_to_float)

    found = with_grads(ours, logits, [], grad)
    assert found[0].dtype is (torch.float32 if half_to_float else dtype)
    exact = with_grads(plain, logits.double(), [], grad.to(found[0].dtype).double())
    theirs = with_grads(plain, logits, [], grad)
    for mine, torchs, right in zip(found, theirs, exact, strict=True):
        assert_as_good_as_torch(mine, right, torchs.to(mine.dtype))
    assert bool((found[0][labels == padding_idx] == 0).all())


def test_small_functions(device):
    calls = []
    for applier, chunk in (
        (multi_tensor_apply.multi_tensor_applier, 256 * 32),
        (multi_tensor_apply.multi_tensor_applier_l2norm, 2048 * 32),
    ):
        assert applier.available
        assert applier.import_err is None
        assert applier(lambda *args: calls.append(args), "flag", [[1]], 2.0) is None
        assert calls.pop() == (chunk, "flag", [[1]], 2.0)
    params = [torch.nn.Parameter(torch.zeros(3, device=device)) for _ in range(2)]
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    norm = clip_grad_norm_(params, 1.0)
    assert abs(norm.item() - 24**0.5) < 1e-5
    assert abs(torch.cat([p.grad for p in params]).norm().item() - 1) < 1e-5
    assert _cast_if_autocast_enabled(params[0], 1) == (params[0], 1)
    assert _get_current_dtype() is torch.float32
