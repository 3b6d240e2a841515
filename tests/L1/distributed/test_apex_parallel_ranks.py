"""apex.parallel on two ranks: as torch's DistributedDataParallel, and as one rank with all rows."""

import copy

import pytest
import torch
from on_rank import device_of, recorded, told
from torch import distributed
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex_te.integrations.apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex_te.integrations.apex.contrib.groupbn import BatchNorm2d_NHWC
from apex_te.integrations.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    flat_dist_call,
)

CHANNELS = 8


def mlp(device, kinds=(torch.float32, torch.float32, torch.float32)):
    """Linear layers of some dtypes, each fed in its own."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = ((6, 10), (10, 7), (7, 3))
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(*size, device=device, dtype=kind)
                for size, kind in zip(sizes, kinds, strict=True)
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype)).tanh()
            return x.float()

    return Model()


def rows(rank, step, device):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 5, 6, generator=generator)[rank].to(device)


def train(model, rank, device, steps=4, accumulate=1):
    """Gradients of each step and the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(accumulate):
            model(rows(rank, 10 * step + i, device)).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return [t.cpu() for t in (*found, *(p.detach() for p in model.parameters()))]


def both(rank, ours, kinds):
    """Of apex's DDP and of torch's, whose ranks begin with different parameters."""
    device = device_of(rank)
    torch.manual_seed(rank)
    model = mlp(device, kinds)
    other = copy.deepcopy(model)
    ids = [rank] if device.type == "cuda" else None
    if "triggers" in ours:
        ours = {"allreduce_trigger_params": [model.layers[ours["triggers"]].weight]}
    wrapped = DistributedDataParallel(model, **ours)
    assert all(key.startswith("module.") for key in wrapped.state_dict())
    found = train(wrapped, rank, device)
    sizes = [len(bucket) for bucket in wrapped._buckets]
    return found, train(TorchDDP(other, device_ids=ids), rank, device), sizes


MIXED = (torch.float32, torch.float16, torch.float32)
ONE = (torch.float32,) * 3
OPTIONS = {
    "default": ({}, ONE, [6]),
    "small buckets": ({"message_size": 30}, ONE, [3, 1, 2]),
    "one a parameter": ({"message_size": 1}, ONE, [1] * 6),
    "delayed": ({"delay_allreduce": True}, ONE, []),
    "triggers": ({"triggers": 1}, ONE, None),
    "predivide": ({"gradient_predivide_factor": 4.0}, ONE, [6]),
    "mixed": ({"message_size": 1}, MIXED, [1] * 6),
    "fp32": ({"allreduce_always_fp32": True}, MIXED, None),
    "retained": ({"retain_allreduce_buffers": True, "message_size": 30}, MIXED, None),
    "delayed, retained": ({"delay_allreduce": True, "retain_allreduce_buffers": True}, MIXED, []),
    "communicators": ({"message_size": 1, "num_allreduce_streams": 2}, ONE, [1] * 6),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_ddp_is_torch_ddp(each_two, name):
    options, kinds, sizes = OPTIONS[name]
    for ours, theirs, found in each_two.run(both, options, kinds):
        assert sizes is None or found == sizes, found
        for a, b in zip(ours, theirs, strict=True):
            # Two ranks' sum is rounded once; only halves and 16-bit sums in float32 differ.
            kind = {"rtol": 2e-3, "atol": 1e-3} if kinds is MIXED else {"rtol": 1e-6, "atol": 1e-7}
            torch.testing.assert_close(a, b, **kind)
    first, second = (each[0] for each in each_two.run(both, options, kinds))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def of_options(rank):
    device = device_of(rank)
    torch.manual_seed(0)
    found = {}
    groups = [distributed.new_group([0, 1]) for _ in range(2)]
    for name, options in {
        "sum": {"gradient_average": False},
        "communicators": {"allreduce_communicators": (groups, [None, None]), "message_size": 1},
        "plain": {},
    }.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(mlp(device), **options)
        model(rows(rank, 0, device)).square().sum().backward()
        model.zero_grad()
        model(rows(rank, 1, device)).square().sum().backward()
        found[name] = [p.grad.cpu() for p in model.parameters()]
    model = DistributedDataParallel(mlp(device), message_size=30, retain_allreduce_buffers=True)
    for step in range(2):
        model.zero_grad()
        model(rows(rank, step, device)).square().sum().backward()
    bases = {b.untyped_storage().data_ptr() for b in model.allreduce_buffers}
    found["are views"] = [p.grad.untyped_storage().data_ptr() in bases for p in model.parameters()]
    x = model(rows(rank, 0, device)).square().sum()
    x.backward(retain_graph=True)
    found["again"] = told(x.backward)
    return found


def test_options(each_two):
    for found in each_two.run(of_options):
        for name, factor in (("sum", 2.0), ("communicators", 1.0)):
            for a, b in zip(found[name], found["plain"], strict=True):
                torch.testing.assert_close(a, factor * b, rtol=1e-6, atol=1e-7)
        assert all(found["are views"])
        assert found["again"].startswith(
            "RuntimeError: DistributedDataParallel: allreduce_buffers[0]"
        )


def held_back(rank):
    """Accumulation without reduction, as against the gradients of torch's no_sync."""
    device = device_of(rank)
    torch.manual_seed(0)
    model = mlp(device)
    other = copy.deepcopy(model)
    ours = DistributedDataParallel(model)
    theirs = TorchDDP(other, device_ids=[rank] if device.type == "cuda" else None)
    found = []
    for step in range(3):
        for each in (ours, theirs):
            each.zero_grad()
        ours.disable_allreduce()
        with theirs.no_sync(), recorded("all_reduce") as calls:
            for each in (ours, theirs):
                each(rows(rank, step, device)).square().sum().backward()
        assert calls == []
        ours.enable_allreduce()
        for each in (ours, theirs):
            each(rows(rank, step + 5, device)).square().sum().backward()
        found += [
            (a.grad.cpu(), b.grad.cpu())
            for a, b in zip(model.parameters(), other.parameters(), strict=True)
        ]
    # Two forwards before two backwards, and a copy.
    ours.zero_grad()
    losses = [ours(rows(rank, step, device)).square().sum() for step in range(2)]
    for loss in losses:
        loss.backward()
    twin = copy.deepcopy(ours)
    twin.zero_grad()
    sum(twin(rows(rank, step, device)).square().sum() for step in range(2)).backward()
    found += [
        (a.grad.cpu(), b.grad.cpu())
        for a, b in zip(ours.parameters(), twin.parameters(), strict=True)
    ]
    return found


def test_accumulation_and_copies(each_two):
    for found in each_two.run(held_back):
        for a, b in found:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Branches(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(6, 3, device=device) for _ in range(2))
        self.uses_second = True

    def forward(self, x):
        return self.first(x) + self.second(x) if self.uses_second else self.first(x)


def unused(rank):
    device = device_of(rank)
    model = Branches(device)
    wrapped = DistributedDataParallel(model)
    delayed = DistributedDataParallel(Branches(device), delay_allreduce=True)
    found = []
    for uses in (True, False):
        for each in (wrapped, delayed):
            each.zero_grad()
            each.module.uses_second = uses
            loss = each(rows(rank, 0, device)).square().sum()
            found.append(told(loss.backward))
    late = DistributedDataParallel(Branches(device))
    for uses in (False, True):
        late.module.uses_second = uses
        found.append(told(late(rows(rank, 0, device)).square().sum().backward))
    found.append(told(DistributedDataParallel, model, shared_param=True))
    options = {"delay_allreduce": True, "allreduce_trigger_params": [model.first.weight]}
    return [*found, told(DistributedDataParallel, model, **options)]


def test_parameters_without_gradients(each_two):
    for found in each_two.run(unused):
        good, text = "nothing was raised", "RuntimeError: DistributedDataParallel: "
        assert found[:2] == [good, good]
        assert found[2].startswith(text + "1 of 1 buckets are incomplete")
        assert found[3:5] == [good, good]
        assert found[5].startswith(text + "a parameter got a gradient that had none in the first")
        assert found[6].startswith("ValueError: DistributedDataParallel: shared_param must be None")
        assert found[7].startswith(
            "ValueError: DistributedDataParallel: allreduce_trigger_params must be None"
        )


def reduced(rank):
    device = device_of(rank)
    torch.manual_seed(rank)
    model = mlp(device)
    reducer = Reducer(model)
    model(rows(rank, 0, device)).square().sum().backward()
    own = [p.grad.clone() for p in model.parameters()]
    reducer.reduce()
    lists = [torch.full((3,), float(rank), device=device), torch.tensor(rank * 2.0, device=device)]
    Reducer([lists[0], (lists[1],)]).reduce()
    flat = [torch.full((2,), rank + 1.0, device=device), torch.tensor([rank + 1], device=device)]
    flat_dist_call(flat, distributed.broadcast, (1,))
    params = [p.detach().cpu() for p in model.parameters()]
    found = [p.grad.cpu() for p in model.parameters()]
    return params, [t.cpu() for t in own], found, [t.cpu() for t in (*lists, *flat)]


def test_reducer(each_two):
    first, second = each_two.run(reduced)
    for part in (0, 2):
        assert all(torch.equal(a, b) for a, b in zip(first[part], second[part], strict=True))
    for a, b, mean in zip(first[1], second[1], first[2], strict=True):
        torch.testing.assert_close((a + b) / 2, mean, rtol=1e-6, atol=1e-7)
    for found in (first[3], second[3]):
        assert [t.tolist() for t in found] == [[0.5] * 3, 1.0, [2.0, 2.0], [2]]


def batch(step, kind=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(7, CHANNELS, 5, 3, generator=generator).to(kind) + 1 for _ in range(3)]


def share(rank, t):
    """Four images of the first rank, three of the second."""
    return t[:4] if rank == 0 else t[4:]


def normalised(rank, layout, dtype):
    """Results, gradients and state of a step on this rank's images."""
    device = device_of(rank)
    relu = layout == "last"
    model = SyncBatchNorm(CHANNELS, channel_last=relu, fuse_relu=relu).to(device)
    found = []
    for step in range(2):
        x, z, dy = (share(rank, t).to(device) for t in batch(step, dtype))
        if layout == "last":
            x, z, dy = (t.movedim(1, -1).contiguous() for t in (x, z, dy))
        if layout == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        z.requires_grad_()
        y = model(x, z)
        y.backward(dy)
        back = (lambda t: t.movedim(-1, 1)) if relu else (lambda t: t)
        found += [back(t).detach().cpu() for t in (y, x.grad, z.grad)]
    return found, [p.grad.cpu() for p in model.parameters()], [b.cpu() for b in model.buffers()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["first", "channels_last", "last"])
def test_sync_batch_norm_is_batch_norm_of_the_joined_batch(each_two, layout, dtype):
    first, second = each_two.run(normalised, layout, dtype)
    model = torch.nn.BatchNorm2d(CHANNELS)
    right = []
    for step in range(2):
        x, z, dy = (t.float() for t in batch(step, dtype))
        x.requires_grad_()
        z.requires_grad_()
        y = model(x) + z
        (y.relu() if layout == "last" else y).backward(dy)
        right += [y.relu() if layout == "last" else y, x.grad, z.grad]
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 8e-3}
    for a, b, exact in zip(first[0], second[0], right, strict=True):
        torch.testing.assert_close(torch.cat((a, b)).float(), exact.detach(), **close)
    for a, b, p in zip(first[1], second[1], model.parameters(), strict=True):
        torch.testing.assert_close(a + b, p.grad, rtol=1e-5, atol=1e-4)
    for a, b, exact in zip(first[2], second[2], model.buffers(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, exact, rtol=1e-5, atol=1e-6)


def grouped(rank, size):
    """The group norms of images over groups of a size, and SyncBatchNorm in a group of its own."""
    device = device_of(rank)
    x = torch.randn(2, CHANNELS, 4, 3, generator=torch.Generator().manual_seed(rank)).to(device)
    models = [
        BatchNorm2d_NHWC(CHANNELS, bn_group=size, torch_channels_last=True).to(device),
        GroupBatchNorm2d(CHANNELS, size).to(device),
        SyncBatchNorm(CHANNELS, process_group=create_syncbn_process_group(size)).to(device),
    ]
    error = told(BatchNorm2d_NHWC, CHANNELS, bn_group=3)
    return x.cpu(), [model(x).detach().cpu() for model in models], error


@pytest.mark.parametrize("size", [1, 2])
def test_groups(four_ranks, size):
    found = four_ranks.run(grouped, size)
    for begin in range(0, 4, size):
        members = found[begin : begin + size]
        right = torch.nn.BatchNorm2d(CHANNELS)(torch.cat([x for x, _, _ in members])).detach()
        for model in range(3):
            ours = torch.cat([results[model] for _, results, _ in members])
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
    assert {error for _, _, error in found} == {
        "ValueError: BatchNorm2d_NHWC: bn_group must divide the number of ranks, 4, got 3"
    }


class Net(torch.nn.Module):
    """A small residual network for images."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(16) for _ in range(3))
        self.convs = torch.nn.ModuleList(
            torch.nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2)
        )
        self.head = torch.nn.Linear(16, 5)

    def forward(self, x):
        x = self.norms[0](self.stem(x)).relu()
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            x = (norm(conv(x)) + x).relu()
        return self.head(x.mean((2, 3)))


def images(step):
    generator = torch.Generator().manual_seed(step % 2)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(5, (8,), generator=generator)


def program(model, own, device, amp, steps=20):
    """The losses of the training loop of apex's ImageNet example."""
    model = model.to(device, memory_format=torch.channels_last)
    model = own(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=amp)
    losses = []
    for step in range(steps):
        x, target = (t.to(device) for t in images(step))
        if own is not _whole:
            x, target = (t[distributed.get_rank() :: 2] for t in (x, target))
        x = x.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        with torch.autocast(device.type, dtype=dtype, enabled=amp):
            loss = torch.nn.functional.cross_entropy(model(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach().float().cpu())
    return torch.stack(losses)


def _whole(model):
    return model


def _on_two(model):
    return DistributedDataParallel(convert_syncbn_model(model), message_size=1000)


def imagenet(rank, amp):
    device = device_of(rank)
    torch.manual_seed(0)
    start = Net()
    ours = program(copy.deepcopy(start), _on_two, device, amp).to(device)
    distributed.all_reduce(ours)
    return (ours / 2).cpu(), program(start, _whole, device, amp)


@pytest.mark.parametrize("amp", [False, True])
def test_the_imagenet_program_trains_as_on_one_rank(each_two, amp):
    """Its losses as plain torch's with the whole batch: amp, DDP, SyncBatchNorm, channels_last."""
    for ours, plain in each_two.run(imagenet, amp):
        assert plain[-4:].mean() < 0.5 * plain[:4].mean()
        close = 0.02 if amp else 2e-4  # what 20 steps make of roundings
        torch.testing.assert_close(ours, plain, rtol=0, atol=close)
