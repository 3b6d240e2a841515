"""Fused projections to heads that split their FP8 output, against splitting it afterwards."""

import copy
import dataclasses

import pytest
import torch
from layer_kinds import with_repeatable_core
from schemes import SCHEMES
from torch.utils.checkpoint import checkpoint

from apex_te import fp8_autocast, fp8_model_init, fp8_statistics
from apex_te.fp8.scheme import block
from apex_te.module import layer_norm_linear
from apex_te.module._core import heads
from apex_te.module.attention import multihead
from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.ops import qkv_cast
from apex_te.recipe import DelayedScaling

HIDDEN, HEADS, SIZE = 64, 8, 16
SHAPES = {"sbhd": (24, 2, HIDDEN), "bshd": (2, 24, HIDDEN), "thd": (48, HIDDEN)}


class NoClass:
    """Stands for LayerNormLinear, so that no projection is taken for one."""


def split_afterwards(monkeypatch):
    """Makes MultiheadAttention split outputs in a function of its own, as with a rotation."""
    monkeypatch.setattr(multihead, "LayerNormLinear", NoClass)
    monkeypatch.setattr(multihead, "is_observed", lambda module: True)


def build(device="cpu", size=SIZE, **options):
    options = {"num_gqa_groups": 2, "fuse_qkv_params": True, "attention_dropout": 0.0} | options
    torch.manual_seed(5)
    module = MultiheadAttention(HIDDEN, HEADS, kv_channels=size, device=device, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return with_repeatable_core(module, device)


def inputs(layout, device, steps=3):
    torch.manual_seed(7)
    return [torch.randn(SHAPES[layout], device=device) * (i + 1) for i in range(steps)]


def kwargs_of(module, device):
    """Further arguments of a call."""
    found = {}
    if module.qkv_format == "thd":
        starts = torch.tensor([0, 20, 48], dtype=torch.int32, device=device)
        found = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "attn_mask_type": "padding"}
    if module.attention_type == "cross":
        found["encoder_output"] = inputs(module.qkv_format, device, 4)[3]
    return found


def train(module, recipe, device, call=None, **more):
    """Outputs and gradients of a few steps, and the FP8 state after them."""
    found = []
    kwargs = kwargs_of(module, device)
    call = call or (lambda x, **options: module(x, **options))
    for x in inputs(module.qkv_format, device):
        x.requires_grad_()
        module.zero_grad()
        with fp8_autocast(fp8_recipe=recipe):
            out = call(x, **kwargs, **more)
        outs = out if isinstance(out, tuple) else (out,)
        sum(o.square().mean() for o in outs).backward()
        found += [*outs, x.grad, *(p.grad for p in module.parameters())]
    states = [m.fp8_state for m in module.modules() if hasattr(m, "fp8_state")]
    for state in states:
        if state.allocated:
            found += [state.scale_fwd, state.scale_bwd, state.amax_history_fwd]
            found += [state.amax_history_bwd]
    return [t.detach().clone() for t in found]


def both_ways(monkeypatch, recipe, device, call=None, build_with=None, **options):
    """Runs equal modules, one of which splits outputs afterwards.

    Programs repeat what later steps run.
    """
    more = options.pop("more", {})
    make = build_with or build
    module = make(device, **options)
    other = copy.deepcopy(module)
    calls = counted(monkeypatch)
    found = train(module, recipe, device, call and call(module), **more)
    before = dict(calls)
    used = {name: count > 0 for name, count in calls.items()}
    with monkeypatch.context() as patch:
        split_afterwards(patch)
        expected = train(other, recipe, device, call and call(other), **more)
    assert calls == before, "splitting afterwards used the new casts"
    return found, expected, used


def counted(monkeypatch):
    """Counts the runs of both casts that no program repeats."""
    calls = {"_weight": 0, "_grad": 0}

    def counting(name, function):
        def run(*args):
            calls[name] += 1
            function(*args)

        return run

    for name in calls:
        monkeypatch.setattr(qkv_cast, name, counting(name, getattr(qkv_cast, name)))
    return calls


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a - b).abs().max()}"


@pytest.mark.cover(2)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("groups", [2, 8, 1])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("recipe", SCHEMES)
def test_equals_splitting_afterwards(
    monkeypatch, device, recipe, layout, norm, groups, interleaved
):
    # The bias gradient of schemes that know no sums is that of torch, in an order of its own.
    bias = recipe != "tensorwise"
    found, expected, used = both_ways(
        monkeypatch, SCHEMES[recipe], device, qkv_format=layout, input_layernorm=norm,
        num_gqa_groups=groups, qkv_weight_interleaved=interleaved, bias=bias,
    )  # fmt: skip
    assert_equal(found, expected)
    if recipe in ("delayed", "tensorwise"):
        assert used == {"_weight": interleaved and groups < 8, "_grad": True}


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_tokens_that_copies_pad(monkeypatch, device, recipe, groups):
    monkeypatch.setitem(SHAPES, "sbhd", (23, 3, HIDDEN))
    options = {"num_gqa_groups": groups, "bias": recipe != "tensorwise"}
    assert_equal(*both_ways(monkeypatch, SCHEMES[recipe], device, **options)[:2])


def test_bias_gradient_of_current_scaling(monkeypatch, device):
    found, expected, _ = both_ways(monkeypatch, SCHEMES["tensorwise"], device)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_cross_attention(monkeypatch, device, recipe, norm):
    found, expected, used = both_ways(
        monkeypatch, SCHEMES[recipe], device, attention_type="cross", input_layernorm=norm,
        attn_mask_type="no_mask",
    )  # fmt: skip
    assert_equal(found, expected)
    assert used == {"_weight": False, "_grad": recipe == "delayed"}


@pytest.mark.parametrize("size", [16, 64, 128])
def test_blocks_are_sorted_where_a_head_is_whole_blocks(monkeypatch, device, size):
    sorts = []
    original = block.sorted_heads

    def sort(x, **order):
        sorts.append(x.shape)
        return original(x, **order)

    monkeypatch.setattr(block, "sorted_heads", sort)
    found, expected, _ = both_ways(monkeypatch, SCHEMES["blockwise"], device, size=size)
    assert_equal(found, expected)
    assert bool(sorts) == (size == 128)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_equals_with_the_repeatable_core(monkeypatch, layout):
    """The core that stands for attention on a GPU, in all layouts."""

    def with_core(device, **options):
        return with_repeatable_core(build(device, **options), "cuda")

    options = {"qkv_format": layout, "build_with": with_core}
    assert_equal(*both_ways(monkeypatch, SCHEMES["delayed"], "cpu", **options)[:2])


@pytest.mark.parametrize("kind", ["RMSNorm", "L2Normalization"])
def test_qk_norm(monkeypatch, device, kind):
    assert_equal(*both_ways(monkeypatch, SCHEMES["delayed"], device, qk_norm_type=kind)[:2])


def test_rotation_takes_the_other_path(monkeypatch, device):
    angles = torch.rand(24, 1, 1, SIZE, device=device)
    found, expected, used = both_ways(
        monkeypatch, SCHEMES["delayed"], device, more={"rotary_pos_emb": angles}
    )
    assert_equal(found, expected)
    assert used == {"_weight": False, "_grad": False}


def test_separate_parameters(monkeypatch, device):
    found, expected, used = both_ways(
        monkeypatch, SCHEMES["delayed"], device, fuse_qkv_params=False
    )
    assert_equal(found, expected)
    assert used == {"_weight": False, "_grad": True}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("first", [True, False])
def test_cached_weights(monkeypatch, device, recipe, first):
    options = {"bias": False, "size": 128, "more": {"is_first_microbatch": first}}
    assert_equal(*both_ways(monkeypatch, SCHEMES[recipe], device, **options)[:2])


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_weights_held_in_fp8(monkeypatch, device, recipe):
    def held(device, **options):
        torch.manual_seed(5)
        with fp8_model_init(recipe=SCHEMES[recipe]):
            module = MultiheadAttention(
                HIDDEN, HEADS, kv_channels=SIZE, num_gqa_groups=2, fuse_qkv_params=True,
                attention_dropout=0.0, bias=False, device=device, **options,
            )  # fmt: skip
        return with_repeatable_core(module, device)

    assert_equal(*both_ways(monkeypatch, SCHEMES[recipe], device, build_with=held)[:2])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_recompute(device, recipe, reentrant):
    plain = build(device, bias=False)
    recomputed = copy.deepcopy(plain)

    def call(x, **options):
        return checkpoint(recomputed, x, use_reentrant=reentrant, **options)

    expected = train(plain, SCHEMES[recipe], device)
    assert_equal(train(recomputed, SCHEMES[recipe], device, call), expected)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_twice_in_a_region(monkeypatch, device, recipe):
    def call(module):
        return lambda x, **options: module(module(x, **options).tanh(), **options)

    assert_equal(*both_ways(monkeypatch, SCHEMES[recipe], device, call, bias=False)[:2])


def test_norm_output_and_its_gradient(monkeypatch, device):
    options = {"input_layernorm": True, "return_layernorm_output": True}
    assert_equal(*both_ways(monkeypatch, SCHEMES["delayed"], device, **options)[:2])


def test_only_the_norm_output_is_used(device):
    module = build(device, input_layernorm=True, return_layernorm_output=True)
    x = torch.randn(SHAPES["sbhd"], device=device).requires_grad_()
    with fp8_autocast(fp8_recipe=DelayedScaling()):
        _, norm = module(x)
    norm.square().mean().backward()
    assert not module.layernorm_qkv.weight.grad.any()
    assert x.grad.any()


def test_high_precision_wgrad(monkeypatch, device):
    recipe = dataclasses.replace(SCHEMES["delayed"], override_linear_precision=(False, False, True))
    found, expected, used = both_ways(monkeypatch, recipe, device)
    assert_equal(found, expected)
    assert used == {"_weight": True, "_grad": False}


@pytest.mark.parametrize("frozen", ["weight", "input", "all but the bias"])
def test_parts_that_need_no_gradient(monkeypatch, device, frozen):
    def call(module):
        module.qkv.weight.requires_grad_(frozen == "input")

        def run(x, **options):
            y = module(x.detach() if frozen != "weight" else x, **options)
            return y + 0 * x  # which thus has a gradient in all cases

        return run

    module = build(device)
    other = copy.deepcopy(module)

    def grads(m):
        found = []
        for x in inputs("sbhd", device):
            x.requires_grad_()
            m.zero_grad()
            with fp8_autocast(fp8_recipe=SCHEMES["delayed"]):
                out = call(m)(x)
            out.square().mean().backward()
            found += [out, x.grad, *(p.grad for p in m.parameters() if p.grad is not None)]
        return [t.detach().clone() for t in found]

    found = grads(module)
    with monkeypatch.context() as patch:
        split_afterwards(patch)
        assert_equal(found, grads(other))


def test_hooks_see_the_whole_output(device):
    module, shapes = build(device), []
    module.qkv.register_forward_hook(lambda m, inputs, out: shapes.append(tuple(out.shape)))
    with fp8_autocast(fp8_recipe=DelayedScaling()):
        module(torch.randn(SHAPES["sbhd"], device=device))
    assert shapes == [(24, 2, 12 * SIZE)]


def test_queries_are_views(monkeypatch, device):
    """The projection's output is one tensor, of which attention reads parts."""
    seen = []
    module = build(device, bias=False)
    core = module.core_attention.forward
    monkeypatch.setattr(
        module.core_attention,
        "forward",
        lambda q, k, v, *args, **kwargs: (seen.extend((q, k, v)), core(q, k, v, *args, **kwargs))[
            1
        ],
    )
    with fp8_autocast(fp8_recipe=DelayedScaling()):
        module(torch.randn(SHAPES["sbhd"], device=device))
    storages = {t.untyped_storage().data_ptr() for t in seen}
    assert len(storages) == 1
    assert [t.stride(1) for t in seen] == [12 * SIZE] * 3


def test_compiled(device):
    module = build(device, bias=False)
    x = torch.randn(SHAPES["sbhd"], device=device)

    def run(x):
        with fp8_autocast(fp8_recipe=SCHEMES["tensorwise"]):
            return module(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), run(x))


def test_statistics_of_sorted_weights(device):
    module = build(device, bias=False)
    with fp8_statistics(module) as found:
        train(module, SCHEMES["delayed"], device)
    assert found


def test_gradients_of_one_part_only(monkeypatch, device):
    """Gradients that autograd leaves out count as zeros."""
    gradients = heads.HeadGradients
    made = []

    class Watched(gradients):
        def __init__(self, layout, heads):
            super().__init__(layout, heads)
            made.append([h.shape for h in heads])

    monkeypatch.setattr(layer_norm_linear, "HeadGradients", Watched)
    module = build(device, input_layernorm=True)
    monkeypatch.setattr(
        module.core_attention, "forward", lambda q, k, v, *args, **kwargs: q.flatten(2)
    )
    with fp8_autocast(fp8_recipe=DelayedScaling()):
        out = module(torch.randn(SHAPES["sbhd"], device=device).requires_grad_())
    out.sum().backward()
    assert made == [[(24, 2, 8, SIZE), (24, 2, 2, SIZE), (24, 2, 2, SIZE)]]
    grad = module.layernorm_qkv.weight.grad.view(2, 6, SIZE, HIDDEN)
    assert grad[:, :4].any()
    assert not grad[:, 4:].any()
