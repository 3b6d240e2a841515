"""Offloading of activations: equal results, what is copied, and when copies are let go."""

import contextlib
import gc

import pytest
import torch

import apex_te
from apex_te.integrations.transformer_engine.pytorch import cpu_offload
from apex_te.integrations.transformer_engine.pytorch.cpu_offload import (
    ActivationOffload,
    get_cpu_offload_context,
)
from apex_te.recipe import DelayedScaling


def layers(device, count=4):
    torch.manual_seed(3)
    return torch.nn.ModuleList([apex_te.LayerNormMLP(64, 128, device=device) for _ in range(count)])


def train(device, offload, steps=3):
    """Gradients and outputs of some steps, in FP8 and with dropout between the layers."""
    model, found = layers(device), []
    context, synchronize = offload
    torch.manual_seed(4)
    for step in range(steps):
        x = torch.randn(32, 64, device=device, requires_grad=True)
        out = x
        with apex_te.fp8_autocast(True, DelayedScaling()):
            for layer in model:
                with context:
                    out = torch.nn.functional.dropout(layer(out), 0.1)
                out = synchronize(out)
        out.square().sum().backward()
        found += [x.grad.clone(), out.detach(), *(p.grad.clone() for p in model.parameters())]
        if step % 2:
            model.zero_grad()
    return found


def nothing():
    return contextlib.nullcontext(), lambda x: x


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_results_are_the_same(device, count):
    offload = ActivationOffload(count, 4, smallest=1, devices=("cpu", "cuda"))
    found = train(device, (offload, offload.synchronize))
    for a, b in zip(found, train(device, nothing()), strict=True):
        assert torch.equal(a, b)
    assert (offload.copies > 0) == (count > 0)
    assert ActivationOffload.entered == 0


def test_copies_grow_with_the_layers():
    copies = []
    for count in range(4):
        offload = ActivationOffload(count, 4, smallest=1, devices=("cpu",))
        train("cpu", (offload, offload.synchronize), steps=1)
        copies.append(offload.copies)
    assert copies[1] > 5
    assert copies == [i * copies[1] for i in range(4)]


def test_weights_marked_and_small_tensors_stay():
    offload = ActivationOffload(1, 2, smallest=64 * 4, devices=("cpu",))
    weight = torch.nn.Parameter(torch.randn(64, 64))
    big, small = torch.randn(8, 64), torch.randn(63)
    marked = torch.randn(8, 64)
    cpu_offload.mark_not_offload(marked, None)
    with offload:
        total = (big.requires_grad_() @ weight.t()).sum()  # big, and a view of the weight
        total = total + (small.requires_grad_() ** 2).sum() + (marked.requires_grad_() ** 2).sum()
    assert offload.copies == 1
    offload.synchronize(total).backward()
    assert torch.equal(weight.grad, big.detach().sum(0).expand(64, 64))
    assert torch.equal(marked.grad, 2 * marked.detach())


def test_a_tensor_that_is_saved_twice_is_copied_once():
    offload = ActivationOffload(1, 2, smallest=1, devices=("cpu",))
    x = torch.randn(64, requires_grad=True)
    with offload:
        out = (x**2).sum() + (x**3).sum()
        assert offload.copies == 1
        with torch.no_grad():
            x.mul_(2)  # another version
        out = out + (x**2).sum()
        assert offload.copies == 2
    offload.synchronize(out).backward()
    before = x.detach() / 2
    torch.testing.assert_close(x.grad, 2 * before + 3 * before**2 + 2 * x.detach())


def test_copies_are_let_go_after_the_backward():
    offload = ActivationOffload(1, 2, smallest=1, devices=("cpu",))
    x = torch.randn(64, requires_grad=True)
    with offload:
        out = (x**2).sum()
    out = offload.synchronize(out)
    layer = offload._last
    assert len(layer.saved) == 1
    with offload:
        out = out * 3
    out = offload.synchronize(out)
    out.backward()
    assert not layer.saved
    assert offload._last is None
    assert torch.equal(x.grad, 6 * x.detach())


def test_a_result_can_be_changed_in_place():
    offload = ActivationOffload(1, 2, smallest=1, devices=("cpu",))
    x = torch.randn(64, requires_grad=True)
    with offload:
        out = x**2
    offload.synchronize(out).add_(1).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_without_gradients_nothing_is_copied():
    offload = ActivationOffload(3, 4, smallest=1, devices=("cpu",))
    with torch.no_grad():
        for layer in layers("cpu"):
            with offload:
                out = layer(torch.randn(32, 64))
            offload.synchronize(out)
    assert offload.copies == 0


def test_disabled():
    context, synchronize = get_cpu_offload_context(False, 1, 2, True, True, True)
    x = torch.ones(2)
    with context:
        assert synchronize(x) is x
        assert not cpu_offload.is_cpu_offload_enabled()


def test_enabled():
    context, synchronize = get_cpu_offload_context(True, 1, 2)
    with context:
        assert cpu_offload.is_cpu_offload_enabled()
    assert synchronize(torch.ones(2)).shape == (2,)
    assert (context.num_layers, context.model_layers) == (1, 2)
    assert get_cpu_offload_context(True, None, 3)[0].num_layers == 2


def test_wrong_arguments():
    with pytest.raises(NotImplementedError, match="manual_synchronization"):
        get_cpu_offload_context(True, 1, 2, manual_synchronization=True)
    with pytest.raises(ValueError, match="num_layers must be at least 0 and below model_layers"):
        get_cpu_offload_context(True, 2, 2)
    with pytest.raises(ValueError, match="offload_activations must be True"):
        get_cpu_offload_context(True, 1, 2, False)
    with pytest.warns(UserWarning, match="offload_weights has no effect"):
        get_cpu_offload_context(True, 1, 2, True, True)


@pytest.mark.cuda
@pytest.mark.cuda
def test_memory_is_freed_between_forward_and_backward():
    used = {}
    for count in (0, 3):
        offload = ActivationOffload(count, 4)
        gc.collect()
        before = torch.cuda.memory_allocated()  # of other tests of the process
        model = layers("cuda")
        out = torch.randn(1 << 15, 64, device="cuda", requires_grad=True)
        for layer in model:
            with offload:
                out = layer(out)
            out = offload.synchronize(out)
        torch.cuda.synchronize()
        used[count] = torch.cuda.memory_allocated() - before
        out.sum().backward()
        del out, model
    assert used[3] < 0.6 * used[0]
