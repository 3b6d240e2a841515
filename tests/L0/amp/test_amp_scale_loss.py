"""scale_loss: unscaled gradients, skipped steps, delays, several losses."""

import copy
import warnings

import pytest
import torch
from amp_models import OPTIMIZERS, loss_of, make_batch, make_net, prepared, scaler, tensors, train
from checks import assert_same_bits, needs_cuda
from torch import nn

from apex_te import amp

HOW = list(OPTIMIZERS)


def backward(model, optimizer, seed=0, device="cpu", factor=1.0, **options):
    loss = loss_of(model, make_batch(device, seed=seed)) * factor
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return scaled / loss


def held(optimizer):
    return [p.grad.clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_gradients_are_unscaled_and_add_up(device, name, level):
    """Two blocks without a step between give the sum; none of it depends on the scale."""
    results = []
    for scale in (1.0, 1024.0):
        model, optimizer = prepared(name, level, device, loss_scale=scale)
        assert backward(model, optimizer, 0, device).item() == pytest.approx(scale, rel=1e-3)
        first = held(optimizer)
        backward(model, optimizer, 1, device)
        both = held(optimizer)
        optimizer.zero_grad()
        backward(model, optimizer, 1, device)
        second = held(optimizer)
        assert all(torch.count_nonzero(t) for t in first)
        exact = level in ("O0", "O1", "O4") or scale != 1.0 or not name.startswith("fused")
        tolerance = {"rtol": 1e-6, "atol": 1e-7} if exact and level != "O3" else {}
        for a, b, c in zip(first, second, both, strict=True):
            tolerances = tolerance or {"rtol": 1e-2, "atol": 2e-3}
            torch.testing.assert_close(c, a + b.to(a.dtype), **tolerances)
        results.append(first)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["torch_sgd", "fused_sgd"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_any_memory_format(device, name, level):
    """channels_last weights and a gradient without storage of its own: the same numbers."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 2).to(device, memory_format=layout)
        model.register_parameter("shift", nn.Parameter(torch.zeros(4, 5, device=device)))
        optimizer = OPTIMIZERS[name](model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3, 4, 4, device=device)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                grad = torch.full((), scaler().loss_scale() / 4, device=device)
                model.shift.grad = grad.to(model.shift.dtype).expand(4, 5)
            optimizer.step()
        results.append([model.weight.detach().float(), model.shift.detach().float()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    assert torch.equal(results[0][1], torch.full_like(results[0][1], -0.125 * 2.5 / 4))


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_small_gradients_survive_in_float32(device, name, level):
    """Of magnitudes that float16 does not hold; the scale carries them through the backward."""
    model, optimizer = prepared(name, level, device)
    backward(model, optimizer, 0, device, factor=2.0**-18)
    largest = max(g.abs().max().item() for g in held(optimizer))
    assert 0 < largest < 2.0**-17
    assert {g.dtype for g in held(optimizer)} == {torch.float32}


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_skips_one_step(device, name, level):
    model, optimizer = prepared(name, level, device)
    train(model, optimizer, 2, device=device)
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    norms = copy.deepcopy(model.norm.state_dict())
    optimizer.zero_grad()
    backward(model, optimizer, 3, device, factor=float("inf"))
    optimizer.step()
    model.norm.load_state_dict(norms)
    now = [model.state_dict(), optimizer.state_dict()]
    assert_same_bits(tensors(now), tensors(kept))
    assert (scaler().loss_scale(), scaler().skipped()) == (2.0**15, 1)
    assert not hasattr(optimizer, "found_inf")
    train(model, optimizer, 1, first=4, device=device)
    later = [model.state_dict(), optimizer.state_dict()]
    assert not torch.equal(later[0]["first.weight"], kept[0]["first.weight"])
    assert all(torch.isfinite(t).all() for t in tensors(later))
    assert (scaler().loss_scale(), scaler().skipped()) == (2.0**15, 1)


@pytest.mark.parametrize("name", HOW)
def test_dropped_gradients_skip_nothing(device, name):
    model, optimizer = prepared(name, "O2", device)
    before = model.first.weight.detach().clone()
    backward(model, optimizer, 0, device, factor=float("inf"))
    optimizer.zero_grad()
    backward(model, optimizer, 1, device)
    optimizer.step()
    assert not torch.equal(model.first.weight, before)
    assert torch.isfinite(model.first.weight).all()


def test_hysteresis_and_floor_through_initialize(device):
    model, optimizer = prepared("fused", "O2", device, hysteresis=2, min_loss_scale=2.0**15)
    scales = []
    for factor in ("inf", "inf", "nan", 1.0, "inf"):
        optimizer.zero_grad()
        backward(model, optimizer, 0, device, factor=float(factor))
        optimizer.step()
        scales.append(scaler().loss_scale())
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**15]
    assert scaler().skipped() == 4


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_delay_unscale(device, name, level):
    """Gradients of two backwards, unscaled once, give the same step."""
    results = []
    for delay in (True, False):
        model, optimizer = prepared(name, level, device)
        backward(model, optimizer, 0, device, delay_unscale=delay)
        if delay and level != "O5":
            with pytest.raises(RuntimeError, match="got scaled gradients"):
                optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            backward(model, optimizer, 0, device, delay_unscale=True)
        backward(model, optimizer, 1, device)
        results.append(held(optimizer))
        optimizer.step()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["torch", "fused"])
def test_delay_overflow_check(device, name):
    model, optimizer = prepared(name, "O2", device)
    before = model.first.weight.detach().clone()
    backward(model, optimizer, 0, device, factor=float("inf"), delay_overflow_check=True)
    assert scaler().loss_scale() == 2.0**16
    backward(model, optimizer, 1, device)
    assert scaler().loss_scale() == 2.0**15
    optimizer.step()
    assert_same_bits(model.first.weight, before)


def test_several_losses_and_optimizers(device):
    models = [make_net(device) for _ in range(2)]
    optimizers = [OPTIMIZERS["fused"](m.parameters()) for m in models]
    amp.initialize(models, optimizers, opt_level="O2", num_losses=2, verbosity=0)
    batch = make_batch(device)
    losses = [loss_of(m, batch) for m in models]
    with amp.scale_loss(losses[0] * float("inf"), optimizers[0], loss_id=0) as scaled:
        scaled.backward()
    with amp.scale_loss(losses[1], optimizers[1], loss_id=1) as scaled:
        scaled.backward()
    before = [m.first.weight.detach().clone() for m in models]
    for optimizer in optimizers:
        optimizer.step()
    moved = [not torch.equal(m.first.weight, b) for m, b in zip(models, before, strict=True)]
    assert moved == [False, True]
    assert [scaler(i).skipped() for i in range(2)] == [1, 0]
    # One loss for both: what one model finds holds the other back, too.
    before = [m.first.weight.detach().clone() for m in models]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(models[0], batch) * float("inf") + loss_of(models[1], batch)
    with amp.scale_loss(loss, optimizers) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same_bits([m.first.weight for m in models], before)


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_clipping_through_master_params(device, name, level):
    model, optimizer = prepared(name, level, device)
    backward(model, optimizer, 0, device)
    total = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
    assert total > 0.02
    norm = torch.linalg.vector_norm(torch.cat([g.float().reshape(-1) for g in held(optimizer)]))
    assert norm.item() == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("level", ["O5"])
def test_backward_without_scale_loss(device, name, level):
    """Where no scale is needed a plain backward does."""
    results = []
    for plain in (True, False):
        model, optimizer = prepared(name, level, device)
        for i in range(3):
            optimizer.zero_grad()
            if plain:
                loss_of(model, make_batch(device, seed=i)).backward()
            else:
                backward(model, optimizer, i, device)
            optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        results.append(list(model.parameters()))
    assert_same_bits(*results)


def test_an_exception_leaves_gradients_of_before(device):
    model, optimizer = prepared("fused", "O1", device)
    backward(model, optimizer, 0, device)
    before = held(optimizer)
    loss = loss_of(model, make_batch(device))
    with pytest.raises(KeyError), amp.scale_loss(loss, optimizer):
        raise KeyError
    assert_same_bits(held(optimizer), before)


def backward_of_a_sparse_embedding():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    amp.initialize(table, optimizer, opt_level="O1", verbosity=0)
    with amp.scale_loss(table(torch.tensor([1])).sum(), optimizer) as scaled:
        scaled.backward()


def test_rejects():
    loss = torch.ones((), requires_grad=True)
    model = make_net()
    optimizer = OPTIMIZERS["torch"](model.parameters())

    def enter(*args, **options):
        with amp.scale_loss(*args, **options):
            pass

    with pytest.raises(RuntimeError, match=r"scale_loss: amp.initialize must be called before"):
        enter(loss, optimizer)
    amp.initialize(model, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match=r"optimizers must have gone through amp.initialize"):
        enter(loss, optimizer)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for args, options, error, message in (
        ((1.0, optimizer), {}, TypeError, "loss must be a tensor, got float"),
        ((loss, model), {}, TypeError, "optimizers must be torch.optim.Optimizer objects, got Net"),
        ((loss, optimizer), {"loss_id": 1}, ValueError, "loss_id must be below num_losses 1"),
        ((loss, optimizer), {"loss_id": "0"}, TypeError, "loss_id must be an int, got str"),
        ((loss, optimizer), {"model": 3}, TypeError, "model must be a Module, got int"),
    ):
        with pytest.raises(error) as raised:
            enter(*args, **options)
        assert message in str(raised.value)
    with pytest.raises(NotImplementedError, match=r"must be dense, got one of layout torch\.s"):
        backward_of_a_sparse_embedding()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    enter(loss, optimizer, model=model)
    with pytest.raises(RuntimeError, match="step must be without a closure after scale_loss"):
        optimizer.step(lambda: loss)
    with pytest.raises(TypeError, match="master_params: optimizers must be"):
        list(amp.master_params(model))
    saved = copy.deepcopy(optimizer.state_dict())
    last = max(saved["state"])
    wrong = copy.deepcopy(saved)
    for i, value in ((0, 5.0), (last, 7.0)):
        wrong["state"][i]["master_param"].fill_(value)
    wrong["state"][last]["master_param"] = torch.zeros(99)
    with pytest.raises(ValueError, match=r"master_param must have shape .*, got \[99\]"):
        optimizer.load_state_dict(wrong)
    wrong["state"][last]["master_param"] = [1.0]
    with pytest.raises(TypeError, match="master_param must be a dense tensor, got list"):
        optimizer.load_state_dict(wrong)
    wrong = copy.deepcopy(saved)
    wrong["state"][0]["master_param"].fill_(5.0)
    wrong["param_groups"].append(wrong["param_groups"][0])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(wrong)  # by torch, after the masters were looked at
    found = optimizer.state_dict()["state"]
    for i, values in saved["state"].items():
        assert torch.equal(found[i]["master_param"], values["master_param"])
    saved["state"][0]["master_param"].fill_(5.0)
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"][0]["master_param"].eq(5).all()


@pytest.mark.parametrize("name", ["torch", "torch_fused", "torch_sgd"])
def test_only_missing_master_weights_are_made_anew(device, name):
    model, optimizer = prepared(name, "O2", device)
    train(model, optimizer, 2, device=device)
    saved = copy.deepcopy(optimizer.state_dict())
    masters = [s["master_param"].clone() for s in saved["state"].values() if "master_param" in s]
    assert [torch.equal(m, m.half().float()) for m in masters[:3]] == [False] * 3
    lacking = [i for i, s in saved["state"].items() if "master_param" in s][1]
    del saved["state"][lacking]["master_param"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer.load_state_dict(saved)
    assert [str(w.message) for w in warned] == [
        f"amp: the state dict of {type(optimizer).__name__} has no master_param for parameters "
        f"{lacking}; the next step makes these master weights from the parameters"
    ]
    # A step without gradients writes no weight; it makes the master weight that is missing.
    optimizer.zero_grad()
    optimizer.step()
    states = optimizer.state_dict()["state"].values()
    found = [s["master_param"] for s in states if "master_param" in s]
    for i, (now, was) in enumerate(zip(found, masters, strict=True)):
        assert torch.equal(now, was.half().float() if i == 1 else was), i


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("name", ["fused", "torch_fused", "fused_sgd"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_never_waits_for_the_device(name, level):
    model, optimizer = prepared(name, level, "cuda")
    batches = [make_batch("cuda", seed=i) for i in range(5)]
    try:
        for i, batch in enumerate(batches):
            if i == 2:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, batch), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler().skipped() < 5
