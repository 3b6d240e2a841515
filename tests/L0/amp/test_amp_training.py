"""Training through amp: master weights, resume, what is loaded or scheduled, whole CUDA graphs."""

import copy

import pytest
import torch
from amp_models import OPTIMIZERS, loss_of, make_batch, make_net, prepared, scaler, tensors, train
from checks import assert_same_bits, needs_cuda
from quantized_param import QuantizedParam

from apex_te import amp
from apex_te.optimizers import FusedSGD

HOW = list(OPTIMIZERS)


@pytest.mark.parametrize("name", ["torch_sgd", "fused_sgd"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_train_as_written_out(device, name, level):
    """Float32 copies of 16-bit weights, their gradients divided by the scale, step by step."""
    model, optimizer = prepared(name, level, device)
    twin = make_net(device)
    amp.initialize(twin, opt_level=level, verbosity=0)
    halves = [p for p in twin.parameters() if p.dtype is not torch.float32]
    masters = {id(p): p.detach().float().requires_grad_() for p in halves}
    own = [masters.get(id(p), p) for p in twin.parameters()]
    plain = torch.optim.SGD(own, lr=0.125, momentum=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scale = scaler().loss_scale()
    for i in range(5):
        plain.zero_grad()
        (loss_of(twin, make_batch(device, seed=i)) * scale).backward()
        for p in twin.parameters():
            if id(p) in masters:
                masters[id(p)].grad, p.grad = p.grad.float() / scale, None
            else:
                p.grad /= scale
        plain.step()
        with torch.no_grad():
            for p in halves:
                p.copy_(masters[id(p)])
        train(model, optimizer, 1, first=i, device=device)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-6, atol=1e-6)
    for param, theirs in zip(model.parameters(), own, strict=True):
        master = master_of(optimizer, model, param)
        torch.testing.assert_close(master, theirs.detach(), rtol=1e-6, atol=1e-6)


def master_of(optimizer, model, param):
    if isinstance(optimizer, FusedSGD):
        master = optimizer.master_weight(param)
        return param.detach() if master is None else master
    index = [p is param for p in model.parameters()].index(True)
    return optimizer.param_groups[0]["params"][index].detach()


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_resume_is_bitwise(device, name, level):
    """In apex's order: initialize, then load model, optimizer and amp."""
    model, optimizer = prepared(name, level, device)
    train(model, optimizer, 4, device=device)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    losses = train(model, optimizer, 4, first=4, device=device)
    expected = [model.state_dict(), optimizer.state_dict()]
    other, other_optimizer = prepared(name, level, device)
    for target, state in zip((other, other_optimizer, amp), saved, strict=True):
        target.load_state_dict(copy.deepcopy(state))
    assert train(other, other_optimizer, 4, first=4, device=device) == losses
    assert_same_bits(tensors([other.state_dict(), other_optimizer.state_dict()]), tensors(expected))


@pytest.mark.parametrize("name", HOW)
def test_weights_loaded_after_initialize_are_trained(device, name):
    """Masters do not overwrite them."""
    model, optimizer = prepared(name, "O2", device)
    loaded = {k: v + 1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(loaded)
    train(model, optimizer, 1, device=device)
    assert (model.first.weight.float() - loaded["first.weight"].to(device)).abs().max() < 0.5


@pytest.mark.parametrize("name", HOW)
def test_groups_that_are_added_have_master_weights(device, name):
    """Groups added before and after amp.initialize train, save and load state with equal bits."""
    model = make_net(device)
    optimizer = OPTIMIZERS[name]([{"params": list(m.parameters())} for m in model.children()])
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    other = make_net(device)
    later = OPTIMIZERS[name](other.first.parameters())
    amp.initialize(other, later, opt_level="O5", verbosity=0)
    for added in (other.norm, other.last):
        later.add_param_group({"params": added.parameters()})
    for each in (model, other):
        each.load_state_dict({k: v + 1 for k, v in each.state_dict().items()})
    assert train(other, later, 3, device=device) == train(model, optimizer, 3, device=device)
    assert_same_bits(tensors(later.state_dict()), tensors(optimizer.state_dict()))
    assert len(list(amp.master_params(later))) == len(list(model.parameters()))


def test_a_group_with_a_parameter_of_another_is_refused():
    model, optimizer = prepared("torch", "O5")
    with pytest.raises(ValueError, match="amp: param_group must have parameters that are in no"):
        optimizer.add_param_group({"params": [model.first.weight]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, 1)


@pytest.mark.parametrize("name", ["torch", "fused"])
def test_parameters_without_plain_storage(device, name):
    """Any optimizer updates the master, whose value copy_ quantizes."""
    start = torch.randn(4, 6, device=device)
    weight = QuantizedParam(start)
    twin = start.clone().requires_grad_()
    fused = {"master_weights": True} if name == "fused" else {}
    optimizer = OPTIMIZERS[name]([weight], **fused)
    other = OPTIMIZERS[name]([twin])
    amp.initialize(make_net(device), optimizer, opt_level="O5", verbosity=0)
    for _ in range(3):
        grad = torch.randn(4, 6, device=device)
        for param, each in ((weight, optimizer), (twin, other)):
            param.grad = grad.clone()
            each.step()
            each.zero_grad()
    assert weight.copies == 3
    assert torch.equal(weight.codes, QuantizedParam.quantize(twin))


def test_scheduler_before_and_after(device):
    for after in (True, False):
        model = make_net(device)
        optimizer = OPTIMIZERS["torch"](model.parameters())
        make = torch.optim.lr_scheduler.ExponentialLR
        schedule = None if after else make(optimizer, 0.5)
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        schedule = make(optimizer, 0.5) if after else schedule
        train(model, optimizer, 1, device=device)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.005


@needs_cuda
@pytest.mark.cuda
def test_a_whole_step_in_a_graph():
    """Forward, backward, unscaling, update and the scale itself: replays equal eager steps."""
    runs = []
    for captured in (True, False):
        model = make_net("cuda")
        optimizer = OPTIMIZERS["fused"](model.parameters(), capturable=True)
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        x, y = (t.clone() for t in make_batch("cuda"))
        factor = torch.ones((), device="cuda")

        def step(model=model, optimizer=optimizer, x=x, y=y, factor=factor):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean() * factor
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        call = step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            call = graph.replay
        for i in range(20):
            for target, source in zip((x, y), make_batch("cuda", seed=i), strict=True):
                target.copy_(source)
            factor.fill_(float("inf") if i == 7 else 1.0)
            call()
        assert scaler().skipped() == 1
        runs.append(tensors([model.state_dict(), optimizer.state_dict(), amp.state_dict()]))
    assert_same_bits(*runs)
