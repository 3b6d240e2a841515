"""Recompute contexts, random states and collectives under Transformer Engine's names."""

import pytest
import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import apex_te
from apex_te.integrations.transformer_engine.pytorch import distributed as te
from apex_te.recipe import DelayedScaling


def model():
    torch.manual_seed(5)
    return apex_te.LayerNormMLP(32, 64)


def run(wrap, moved=False):
    """Gradients after a forward whose recompute may find other scales and no region."""
    torch.manual_seed(6)
    module, x = model(), torch.randn(16, 32)
    recipe = DelayedScaling(amax_history_len=1)
    with apex_te.fp8_autocast(True, recipe):
        module(x).sum().backward()
    for p in module.parameters():
        p.grad = None
    given = x.detach().requires_grad_()
    with apex_te.fp8_autocast(True, recipe):
        out = wrap(module, given)
    if moved:  # another microbatch moves the scales before the backward of the first
        with apex_te.fp8_autocast(True, recipe):
            module(100 * x)
        apex_te.flush_fp8_state()
    out.square().sum().backward()
    return [given.grad, *(p.grad for p in module.parameters())]


def with_contexts(module, x):
    return torch_checkpoint(
        module, x, use_reentrant=False, context_fn=te.get_activation_recompute_contexts
    )


def test_recompute_in_contexts_equals_no_recompute():
    for found, expected in zip(run(with_contexts), run(lambda m, x: m(x)), strict=True):
        assert torch.equal(found, expected)


def test_recompute_in_contexts_has_the_scales_of_its_forward():
    expected = run(lambda m, x: te.checkpoint(m, x, use_reentrant=False), moved=True)
    for found, wanted in zip(run(with_contexts, moved=True), expected, strict=True):
        assert torch.equal(found, wanted)
    plain = run(lambda m, x: torch_checkpoint(m, x, use_reentrant=False), moved=True)
    assert any(not torch.equal(a, b) for a, b in zip(plain, expected, strict=True))


def test_phases():
    assert not te.in_fp8_activation_recompute_phase()
    with apex_te.fp8_autocast(True, DelayedScaling()):
        with te.activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            assert te.is_fp8_activation_recompute_enabled()
            assert not te.in_fp8_activation_recompute_phase()
            with te.activation_recompute_forward(True, True):
                assert te.in_fp8_activation_recompute_phase()
            assert not te.in_fp8_activation_recompute_phase()
        assert not te.is_fp8_activation_recompute_enabled()
    with te.activation_recompute_forward(True):
        assert not te.is_fp8_activation_recompute_enabled()  # no region is enabled


def test_a_broken_off_forward_leaves_no_phase():
    with pytest.raises(ZeroDivisionError), te.activation_recompute_forward(True, True):
        1 / 0  # noqa: B018
    assert not te.in_fp8_activation_recompute_phase()


def test_checkpoint_is_apex_te_s():
    assert te.checkpoint is apex_te.checkpoint


def test_random_sequences():
    tracker = te.CudaRNGStatesTracker()
    assert isinstance(tracker, apex_te.CudaRNGStatesTracker)
    assert type(tracker).__module__ == "transformer_engine.pytorch.distributed"
    tracker.add("one", 11)
    generators = te.get_all_rng_states()
    assert isinstance(generators["one"], torch.Generator)
    device = generators["one"].device
    with tracker.fork("one"):
        drawn = torch.rand(5, device=device)
    assert torch.equal(torch.rand(5, device=device, generator=generators["one"]), drawn)
    with tracker.fork("one"):
        following = torch.rand(5, device=device)
    generator = torch.Generator(device).manual_seed(11)
    assert torch.equal(torch.rand(5, device=device, generator=generator), drawn)
    assert torch.equal(torch.rand(5, device=device, generator=generator), following)


def test_without_ranks():
    x = torch.arange(6.0).view(3, 2)
    assert te.get_distributed_world_size() == 1
    assert te.get_distributed_rank() == 0
    for function in (te.gather_along_first_dim, te.reduce_scatter_along_first_dim):
        out, handle = function(x, None)
        assert out is x
        assert handle is None
    with pytest.raises(NotImplementedError, match="quantizer"):
        te.gather_along_first_dim(x, None, quantizer=object())
    te.prepare_te_modules_for_fsdp(torch.nn.Linear(2, 2))


@pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")
def test_one_rank(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        assert te.get_distributed_world_size(distributed.group.WORLD) == 1
        assert te.get_distributed_rank(distributed.group.WORLD) == 0
    finally:
        distributed.destroy_process_group()
