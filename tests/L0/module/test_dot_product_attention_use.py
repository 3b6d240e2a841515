"""DotProductAttention: dropout, checkpoints, autocast, compilation, reasons, errors."""

import copy

import pytest
import torch
from attention_cases import PATHS, take_path
from checks import assert_same_bits

from apex_te.distributed import CudaRNGStatesTracker
from apex_te.module.attention.dot_product import DotProductAttention

B, H, G, D = 2, 4, 2, 8
path = pytest.fixture(params=PATHS)(take_path)


class TestDropout:
    def build(self, p=0.25, **kwargs):
        return DotProductAttention(2, 4, attention_dropout=p, attn_mask_type="no_mask", **kwargs)

    def test_rate_and_expectation(self, path, device):
        """With equal scores and values 1 the output is (kept weights) / (1 - p)."""
        module = self.build()
        x = torch.zeros(64, 8, 2, 4, device=device)
        out = module(x, x, torch.ones_like(x))
        assert abs(out.mean().item() - 1) < 0.02
        assert abs(out.var().item() - 0.25 / 0.75 / 64) < 0.002
        assert module.eval()(x, x, torch.ones_like(x)).eq(1).all()

    def test_checkpoint_draws_again_what_it_drew(self, path, device):
        module, x = self.build(), torch.randn(8, 2, 2, 4, device=device, requires_grad=True)
        found = []
        for again in (False, True):
            torch.manual_seed(3)
            out = module(x, x, x, checkpoint_core_attention=again)
            found.append((out, *torch.autograd.grad(out.square().sum(), x)))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)

    def test_tracker(self, path):
        if torch.cuda.is_available():
            pytest.skip("the tracker follows the GPU's generator where there is one")
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 3)
        module, x = self.build(get_rng_state_tracker=lambda: tracker), torch.randn(8, 2, 2, 4)
        before = torch.get_rng_state()
        out = module(x, x, x)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(3)
        module.get_rng_state_tracker = None
        assert torch.equal(module(x, x, x), out)


def test_checkpoint_saves_only_the_inputs(path):
    module, x = DotProductAttention(2, 4), torch.randn(16, 2, 2, 4, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = module(x, x, x, checkpoint_core_attention=True)
    assert {tuple(t.shape) for t in saved if t.numel()} <= {(2, 2, 16, 4), (2, 16, 2, 4)}
    (again,) = torch.autograd.grad(out.square().sum(), x)
    (once,) = torch.autograd.grad(module(x, x, x).square().sum(), x)
    torch.testing.assert_close(again, once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast(dtype, path):
    module, x = DotProductAttention(2, 4), torch.randn(8, 2, 2, 4, requires_grad=True)
    with torch.autocast("cpu", dtype):
        out = module(x, x.to(dtype), x)
    assert out.dtype == dtype
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), module(x, x, x), rtol=2e-2, atol=2e-2)


def test_without_gradients(path):
    module, x = DotProductAttention(2, 4), torch.randn(8, 2, 2, 4)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(module(x, x, x), module(x, x, x.clone().requires_grad_()))


@pytest.mark.cover(0)
@pytest.mark.parametrize("kind", ["padding_causal", "causal"])
def test_compiles(kind, path):
    module, x = DotProductAttention(2, 4, attn_mask_type=kind), torch.randn(8, 2, 2, 4)
    mask = torch.zeros(2, 1, 1, 8, dtype=torch.bool) if kind == "padding_causal" else None
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = []
    for each in (module, compiled):
        t = x.clone().requires_grad_()
        out = each(t, t, t, mask)
        found.append((out, *torch.autograd.grad(out.square().sum(), t)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_repeatable(path, device):
    module = DotProductAttention(H, D, G)
    x = torch.randn(33, B, H, D, device=device, requires_grad=True)
    k = torch.randn(33, B, G, D, device=device, requires_grad=True)
    found = [torch.autograd.grad(module(x, k, k).square().sum(), (x, k)) for _ in range(2)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_dropout", 0.0),
        ("attention_dropout", 0.9),
        ("softmax_scale", 3.0),
        ("attn_mask_type", "no_mask"),
        ("window_size", (1, 0)),
    ],
)
@pytest.mark.parametrize("bias_type", ["no_bias", "pre_scale_bias"])
def test_an_attribute_that_is_set_counts_as_if_given(name, value, bias_type):
    options = {"attention_dropout": 0.5, "attn_mask_type": "causal"}
    changed = DotProductAttention(4, 8, **options)
    q, k, v = (torch.randn(6, 2, 4, 8) for _ in range(3))
    bias = None if bias_type == "no_bias" else torch.randn(1, 4, 6, 6)
    given = {"core_attention_bias_type": bias_type, "core_attention_bias": bias}
    changed(q, k, v, **given)
    setattr(changed, name, value)
    expected = DotProductAttention(4, 8, **{**options, name: value})
    assert getattr(changed, name) == getattr(expected, name) == value
    assert changed.extra_repr() == expected.extra_repr()
    for training in (True, False):
        outs = []
        for module in (changed, expected, copy.deepcopy(changed)):
            torch.manual_seed(4)
            outs.append(module.train(training)(q, k, v, **given))
        assert_same_bits(outs[0], outs[1])
        assert_same_bits(outs[2], outs[1])


def test_attributes_are_checked():
    module = DotProductAttention(4, 8)
    with pytest.raises(ValueError, match="attention_dropout must be at least 0 and below 1, got 2"):
        module.attention_dropout = 2
    with pytest.raises(ValueError, match=r"attn_mask_type must be one of .*, got 'none'"):
        module.attn_mask_type = "none"
    assert module.attention_dropout == 0.0
    assert module.attn_mask_type == "causal"


def test_explains_its_path():
    x = torch.randn(8, 2, 2, 4)
    module = DotProductAttention(2, 4, attention_dropout=0.1)
    assert module.explain(x, x, x) == (
        "softmax: PyTorch's fused kernel for CPUs does not support dropout"
    )
    assert module.eval().explain(x, x, x).startswith("sdpa: ")
    cu = torch.tensor([0, 4], dtype=torch.int32)
    packed = module.explain(*[torch.randn(4, 2, 4)] * 3, qkv_format="thd", cu_seqlens_q=cu)
    assert packed.startswith("padded: ")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"attention_dropout": 1.0}, ValueError, "attention_dropout must be at least 0 and below"),
        ({"layer_number": 0}, ValueError, "layer_number must be at least 1, got 0"),
        ({"attention_type": "both"}, ValueError, "attention_type must be .* got 'both'"),
        ({"qkv_format": "bhsd"}, ValueError, "qkv_format must be .* got 'bhsd'"),
        ({"window_size": (-2, 0)}, ValueError, "window_size must be -1 .* got"),
        ({"tp_size": 3}, ValueError, "num_attention_heads must be a multiple of the 3"),
    ],
)
def test_rejects_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        DotProductAttention(H, D, **kwargs)


PAD = torch.zeros(2, 1, 1, 8, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"attention_mask": PAD}, ValueError,
         r"must be None with attn_mask_type 'causal' \(use 'padding_causal' or 'arbitrary'\)"),
        ({"attention_mask": PAD, "attn_mask_type": "no_mask"}, ValueError,
         r"\(use 'padding' or 'arbitrary'\)"),
        ({"attn_mask_type": "padding"}, ValueError, "must be given with .* 'padding', got None"),
        ({"attn_mask_type": "padding", "attention_mask": PAD[..., 1:]}, ValueError,
         r"query tokens must have shape \[2, 1, 1, 8\], got \[2, 1, 1, 7\]"),
        ({"attn_mask_type": "arbitrary"}, TypeError, "must be a bool tensor.* got NoneType"),
        ({"attn_mask_type": "arbitrary", "attention_mask": PAD[..., :3]}, ValueError,
         r"must broadcast to \[2, 2, 8, 8\]"),
        ({"window_size": (1, 1)}, ValueError, "window_size must end at 0 with .*'causal'"),
        ({"qkv_format": "thd"}, ValueError, r"must have shape \[t, 2, 4\] with qkv_format 'thd'"),
        ({"core_attention_bias_type": "post_scale_bias"}, ValueError, "bias must be given unless"),
        ({"core_attention_bias": PAD}, ValueError, "bias must be given unless"),
        ({"core_attention_bias": torch.zeros(8, 8), "core_attention_bias_type": "post_scale_bias"},
         ValueError, r"core_attention_bias must broadcast to \[2, 2, 8, 8\], got \[8, 8\]"),
    ],
)  # fmt: skip
def test_rejects_options(kwargs, error, message):
    x = torch.zeros(8, 2, 2, 4)
    with pytest.raises(error, match=message):
        DotProductAttention(2, 4)(x, x, x, **kwargs)


def test_rejects_tensors():
    module, x = DotProductAttention(2, 4), torch.zeros(8, 2, 2, 4)
    with pytest.raises(ValueError, match=r"key_layer must have shape \[s, b, 2, 4\]"):
        module(x, x[:, :, :1], x)
    with pytest.raises(ValueError, match="must have the same tokens and query_layer's batch"):
        module(x, x[1:], x)
    with pytest.raises(ValueError, match="must have the same tokens and query_layer's batch"):
        module(x, x[:, 1:], x[:, 1:])
    with pytest.raises(TypeError, match=r"must have one dtype, got torch.float32, torch.float16"):
        module(x, x.half(), x)
    cross = DotProductAttention(2, 4, attention_type="cross", attn_mask_type="padding")
    with pytest.raises(ValueError, match=r"must be a tuple \(queries, keys\) in cross attention"):
        cross(x, x, x, PAD[..., 1:])
    with pytest.raises(ValueError, match=r"must be a tensor or two .* got 3"):
        cross(x, x, x, (PAD, PAD, PAD))
