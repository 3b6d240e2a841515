"""LayerNormMLP(checkpoint=True) gives bitwise what it gives without, and saves its input only."""

from __future__ import annotations

import pytest
import torch
from schemes import SCHEMES
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from apex_te import CudaRNGStatesTracker, LayerNormMLP, TransformerLayer, checkpoint, fp8_autocast
from apex_te.fp8.delayed.state import TENSORS
from apex_te.ops.gemm_common import fp8_gemm_count

HIDDEN, FFN, TOKENS = 32, 48, 24
OPTIONS = {
    "plain": {},
    "swiglu": {"activation": "swiglu", "normalization": "RMSNorm", "bias": False},
    "outputs": {"return_bias": True, "return_layernorm_output": True},
    "accumulated": {"fuse_wgrad_accumulation": True},
    "delayed wgrad": {"delay_wgrad_compute": True},
}


def build(device, **kwargs) -> LayerNormMLP:
    torch.manual_seed(1)
    return LayerNormMLP(HIDDEN, FFN, device=device, **kwargs)


def state_of(module) -> list[torch.Tensor]:
    state = module.fp8_state
    return [getattr(state, name) for name in TENSORS] if state.allocated else []


def first(out):
    return out[0] if isinstance(out, tuple) else out


def train(device, recipe, recompute: bool, options: dict, cached: bool = False) -> list:
    """Two microbatches in flight for three steps; returns all that must not depend on recompute."""
    module = build(device, checkpoint=recompute, **options)
    generator, seen = torch.Generator().manual_seed(2), []
    for p in module.parameters():
        if options.get("fuse_wgrad_accumulation"):
            p.main_grad = torch.zeros_like(p)
    for _ in range(3):
        inputs, losses = [], []
        for number in range(2):
            x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device) * (1 + 9 * number)
            inputs.append(x.requires_grad_())
            with fp8_autocast(recipe is not None, recipe or SCHEMES["delayed"]):
                out = module(x, number == 0 if cached else None)
            losses.append(first(out).square().mean())
            if isinstance(out, tuple):
                losses[-1] = losses[-1] + sum(x.square().sum() for x in out[1:])
        for loss in losses:
            loss.backward()
            if options.get("delay_wgrad_compute"):
                module.backward_dw()
        seen += [*(x.grad for x in inputs), *(loss.detach() for loss in losses)]
        for p in module.parameters():
            seen.append((p.main_grad if p.grad is None else p.grad).clone())
            p.data.sub_(0.1 * seen[-1])
            p.grad = None
        seen += [x.clone() for x in state_of(module)]
    return seen


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("options", OPTIONS)
def test_results_and_state_are_bitwise_equal(scheme, options, device) -> None:
    recipe = None if scheme is None else SCHEMES[scheme]
    plain, again = (train(device, recipe, flag, OPTIONS[options]) for flag in (False, True))
    assert len(plain) == len(again)
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scheme", ["delayed", "blockwise"])
def test_cached_weights_are_read_again(scheme, device) -> None:
    plain, again = (train(device, SCHEMES[scheme], flag, {}, True) for flag in (False, True))
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scheme", [None, "delayed", "mxfp8"])
def test_only_the_input_is_saved(scheme, device) -> None:
    sizes = []
    for flag in (False, True):
        module, kept = build(device, checkpoint=flag), {}

        def pack(x: torch.Tensor, own=module, kept=kept) -> torch.Tensor:
            memory = x.untyped_storage()
            if not any(memory.data_ptr() == p.data_ptr() for p in own.parameters()):
                kept[memory.data_ptr()] = memory
            return x

        x = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
        region = fp8_autocast(scheme is not None, SCHEMES[scheme or "delayed"])
        with region, saved_tensors_hooks(pack, lambda x: x):
            module(x)
        sizes.append(sum(memory.nbytes() for memory in kept.values()))
    assert sizes[1] < sizes[0]
    assert sizes[1] <= TOKENS * HIDDEN * 4


def test_the_second_product_is_not_repeated(device) -> None:
    counts = []
    for flag in (False, True):
        module = build(device, checkpoint=flag)
        x = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
        with fp8_autocast(fp8_recipe=SCHEMES["delayed"]):
            out = module(x)
        before = fp8_gemm_count()
        out.sum().backward()
        counts.append(fp8_gemm_count() - before)
    assert counts[1] == counts[0] + 1


@pytest.mark.parametrize("outer", ["none", "torch", "apex_te"])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("scheme", ["delayed", "tensorwise"])
def test_a_layer_with_dropout_draws_the_same(outer, tracked, scheme) -> None:
    """Dropout around the MLP, from a tracker or not, within another checkpoint or not."""
    seen = []
    for flag in (False, True):
        tracker = CudaRNGStatesTracker()
        if tracked:
            tracker.add("model-parallel-rng", 11)
        torch.manual_seed(1)
        layer = TransformerLayer(
            HIDDEN, FFN, 4, hidden_dropout=0.3, attention_dropout=0.3, device="cpu",
            get_rng_state_tracker=(lambda t=tracker: t) if tracked else None,
        )  # fmt: skip
        layer.layernorm_mlp.checkpoint = flag
        torch.manual_seed(5)
        for step in range(3):
            x = torch.randn(8, 2, HIDDEN, generator=torch.Generator().manual_seed(step))
            x.requires_grad_()
            with fp8_autocast(fp8_recipe=SCHEMES[scheme]):
                if outer == "none":
                    out = layer(x)
                elif outer == "torch" and not tracked:
                    out = torch_checkpoint(layer, x, use_reentrant=False)
                else:
                    get = (lambda t=tracker: t) if tracked else None
                    out = checkpoint(layer, x, get_rng_state_tracker=get, use_reentrant=False)
            out.square().mean().backward()
            seen.append([out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    for plain, again in zip(seen[:3], seen[3:], strict=True):
        for a, b in zip(plain, again, strict=True):
            assert torch.equal(a, b)


def test_autocast_and_inference(device) -> None:
    results = []
    for flag in (False, True):
        module = build(device, checkpoint=flag)
        x = torch.linspace(-1, 1, TOKENS * HIDDEN, device=device).view(TOKENS, HIDDEN)
        x.requires_grad_()
        region = fp8_autocast(fp8_recipe=SCHEMES["tensorwise"])
        with torch.autocast(torch.device(device).type, torch.bfloat16), region:
            out = module(x)
        out.float().sum().backward()
        with torch.no_grad():
            results.append([out, x.grad, module(x)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "scheme", ["delayed", *(pytest.param(s, marks=pytest.mark.long) for s in (None, "tensorwise"))]
)
def test_it_compiles_in_one_graph(scheme) -> None:
    seen = []
    for compiled in (False, True):
        module = build("cpu", checkpoint=True)
        run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        for step in range(2):
            x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step))
            x.requires_grad_()
            with fp8_autocast(scheme is not None, SCHEMES[scheme or "delayed"]):
                out = run(x)
            out.square().sum().backward()
            seen.append([out.detach(), x.grad, *state_of(module)])
    for plain, again in zip(seen[:2], seen[2:], strict=True):
        for a, b in zip(plain, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_checkpoint_is_a_bool() -> None:
    with pytest.raises(TypeError, match="LayerNormMLP: checkpoint must be a bool, got int"):
        LayerNormMLP(16, 16, checkpoint=1)


@pytest.mark.parametrize("recipe", [None, "blockwise"])
def test_recompute_uses_the_parameters_of_functional_call(recipe):
    parameters = dict(build("cpu").named_parameters())
    parameters = {name: (p * 2 + 0.1).detach().requires_grad_() for name, p in parameters.items()}
    x, found = torch.randn(TOKENS, HIDDEN), []
    for recompute in (False, True):
        module = build("cpu", checkpoint=recompute)
        with fp8_autocast(recipe is not None, recipe):
            out = torch.func.functional_call(module, parameters, (x,))
        found.append(torch.autograd.grad(out.square().sum(), list(parameters.values())))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)
