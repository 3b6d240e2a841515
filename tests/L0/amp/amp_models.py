"""Small models and data of amp's tests."""

import torch
from torch import nn

from apex_te import amp
from apex_te.amp.loss import state
from apex_te.optimizers import FusedAdam, FusedSGD

OPTIMIZERS = {
    "torch": lambda p, **o: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **o),
    "torch_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "fused": lambda p, **o: FusedAdam(p, lr=0.01, weight_decay=0.1, **o),
    "torch_sgd": lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5),
    "fused_sgd": lambda p: FusedSGD(p, lr=0.125, momentum=0.5),
}


class Net(nn.Module):
    """A batch norm between two layers; tensors may come and go in containers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.register_buffer("offset", torch.full((16,), 0.5))
        self.seen = None

    def forward(self, x, *, extra=None):
        self.seen = [x.dtype, None if extra is None else extra["x"][0].dtype]
        hidden = torch.relu(self.norm(self.first(x)))
        out = self.last(hidden + self.offset)
        return out if extra is None else {"out": out, "count": extra["count"]}


def make_net(device="cpu"):
    torch.manual_seed(3)
    return Net().to(device)


def make_batch(device="cpu", rows=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, n, generator=generator).to(device) for n in (8, 4)]


def loss_of(model, batch):
    return (model(batch[0]).float() - batch[1]).square().mean()


def train(model, optimizer, steps, first=0, device="cpu"):
    """Losses of `steps` steps through scale_loss."""
    losses = []
    for i in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(device, seed=i))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def scaler(index=0):
    return state.scalers[index]


def prepared(name, level, device="cpu", **options):
    """A model and an optimizer that went through initialize."""
    model = make_net(device)
    optimizer = OPTIMIZERS[name](model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def tensors(value):
    """All tensors and step counts in nested dicts and lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value.float()]
    if isinstance(value, dict):
        return [t for key in value if key != "param_groups" for t in tensors(value[key])]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    return [torch.tensor(float(value))] if isinstance(value, (int, float)) else []
