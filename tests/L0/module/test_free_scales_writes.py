"""Writes to weights with scales of their own: what does not change keeps its bytes."""

import pytest
import torch

from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.fp8.parameter.sharded_write import write_parts
from apex_te.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.checks import codes
from tests.free_scale_cases import FORMS, assert_holds, block_of, decoded, made

OPTIMIZERS = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr, foreach=False),
    "FusedSGD": lambda p, lr: FusedSGD(p, lr, momentum=0.9, master_weights=True),
    "FusedAdam": lambda p, lr: FusedAdam(p, lr, master_weights=True),
    "FusedLAMB": lambda p, lr: FusedLAMB(p, lr, master_weights=True),
}
SHAPES = [(300, 100), (2, 130, 200)]


def made_of(form, shape, dtype=torch.float32, device="cpu"):
    weight, (data, scale_inv) = made(
        FORMS[form], shape[-2:], shape[0] if len(shape) > 2 else None, dtype, device
    )
    return weight, (data.clone(), scale_inv.clone())


def by_rule(form, values):
    """Codes and scales of a weight to which ``values`` are copied as to any other one."""
    weight = FP8Parameter.empty(tuple(values.shape), FORMS[form], torch.float32, values.device)
    weight._held.free = False
    return weight.copy_(values).codes()


def groups(form, shape):
    """An index for each element, equal for those that share a scale; the number of these."""
    *count, rows, cols = shape
    lead = torch.arange(count[0] if count else 1).view(-1, 1, 1)
    high, wide = block_of(FORMS[form])
    if not high:
        return lead.expand(*lead.shape[:1], rows, cols).reshape(shape)
    wide = wide or cols
    down, across = -(-rows // high), -(-cols // wide)
    own = torch.arange(down).view(-1, 1).repeat_interleave(high, 0)[:rows] * across
    own = own + torch.arange(across).repeat_interleave(wide)[:cols]
    return (lead * down * across + own).reshape(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_that_changes_nothing_leaves_the_bytes(form, optimizer, shape, dtype, device):
    weight, file = made_of(form, shape, dtype, device)
    own = OPTIMIZERS[optimizer]([weight], 0.0)
    for _ in range(2):
        weight.grad = torch.randn(shape, device=device).to(dtype)
        own.step()
        assert_holds(weight, file)
    master = own.state[weight].get("master_param")
    if optimizer.startswith("Fused"):
        assert torch.equal(master, decoded(*file).float())
    for group in own.param_groups:
        group["lr"] = 1e-2
    weight.grad = torch.ones_like(weight.grad)
    own.step()
    assert weight.has_free_scales
    values = weight.dequantize(torch.float32).detach()
    if optimizer.startswith("Fused"):
        data, scale_inv = by_rule(form, own.state[weight]["master_param"])
        assert torch.equal(codes(weight.codes()[0]), codes(data))
        assert torch.equal(weight.codes()[1], scale_inv)
    assert (values - decoded(*file).float()).mean() < -1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_shares_no_scale_with_a_change_keeps_its_bytes(form, shape, ranges, dtype, device):
    """Written as a whole, or by ranges as ranks of a distributed optimizer do."""
    weight, file = made_of(form, shape, dtype, device)
    values = weight.detach().dequantize(dtype)
    chosen = groups(form, shape).to(device)
    at = (*[0] * (len(shape) - 2), shape[-2] - 1, 3)
    values[at] += 1.0
    weight._transposed()
    if ranges:
        write_parts([weight], [values.flatten()], [0], None)
    else:
        with torch.no_grad():
            weight.copy_(values)
    is_new = chosen == chosen[at]
    assert 0 < is_new.sum() <= is_new.numel()
    data, scale_inv = weight.codes()
    wanted, its_scale = by_rule(form, values)
    mixed = torch.where(is_new, wanted.view(torch.uint8), file[0].view(torch.uint8))
    assert torch.equal(codes(data), codes(mixed))
    kept = torch.full(scale_inv.shape, False).flatten()
    kept[chosen[at].item()] = True
    expected = torch.where(kept.view(scale_inv.shape).to(device), its_scale, file[1])
    assert torch.equal(scale_inv, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_a_rank_alone(form, device):
    """A rank without changes, whose part is empty or missing, writes nothing."""
    for part, start in ((None, None), (torch.zeros(0, device=device), 7)):
        weight, file = made_of(form, (300, 100), device=device)
        write_parts([weight], [part], [start], None)
        assert_holds(weight, file)
    weight, file = made_of(form, (300, 100), device=device)
    values = decoded(*file).float().flatten()
    write_parts([weight], [values[1234:7777]], [1234], None)
    assert_holds(weight, file)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_a_captured_write_decides_on_the_device(form):
    weight, file = made_of(form, (300, 100), device="cuda")
    values = decoded(*file).float()
    for _ in range(2):
        weight.detach().copy_(values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        weight.copy_(values)
    graph.replay()
    assert_holds(weight, file)
    values.add_(1.0)
    graph.replay()
    assert torch.equal(codes(weight.codes()[0]), codes(by_rule(form, values)[0]))
