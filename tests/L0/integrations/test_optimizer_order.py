"""Parameters of GroupedLinear in Transformer Engine's order, and optimizer states of before."""

import copy

import pytest
import torch

from apex_te import GroupedLinear, Linear
from apex_te.integrations import reorder_grouped_linear_state
from apex_te.optimizers import FusedAdam

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "FusedAdam": lambda groups: FusedAdam(groups, lr=1e-2),
}


class Experts(torch.nn.Module):
    """Square experts, so that a state of another weight has the same shape."""

    def __init__(self, bias=True):
        super().__init__()
        self.first = Linear(16, 16)
        self.up = GroupedLinear(3, 16, 16, bias=bias)
        self.down = GroupedLinear(3, 16, 16, bias=bias)

    def forward(self, x):
        splits = [x.shape[0] - 3, 2, 1]
        return self.down(self.up(self.first(x), splits), splits)


def in_earlier_order(model):
    """The parameters as earlier versions registered them."""
    for module in model.children():
        names = [name for name, _ in module.named_parameters()]
        for name in sorted(names, key=lambda n: n.startswith("bias")):
            yield getattr(module, name)


def grouped(parameters, split):
    parameters = list(parameters)
    if not split:
        return [{"params": parameters}]
    return [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def train(model, optimizer, steps):
    for seed in steps:
        generator = torch.Generator().manual_seed(seed)
        model(torch.randn(9, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_order():
    names = [name for name, _ in GroupedLinear(3, 16, 16).named_parameters()]
    assert names == ["weight0", "bias0", "weight1", "bias1", "weight2", "bias2"]
    names = [name for name, _ in GroupedLinear(3, 16, 16, bias=False).named_parameters()]
    assert names == ["weight0", "weight1", "weight2"]


def test_same_initial_values_in_any_order():
    torch.manual_seed(3)
    module = GroupedLinear(3, 16, 16)
    torch.manual_seed(3)
    expected = [torch.empty(16, 16).normal_(0, 0.023) for _ in range(3)]
    for i, weight in enumerate(expected):
        assert torch.equal(getattr(module, f"weight{i}"), weight)


def test_earlier_state_dicts_load():
    module, other = GroupedLinear(3, 16, 16), GroupedLinear(3, 16, 16)
    saved = module.state_dict()
    other.load_state_dict({key: saved[key] for key in sorted(saved, reverse=True)})
    for key, value in module.named_parameters():
        assert torch.equal(getattr(other, key), value)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on(name, split):
    model = Experts()
    optimizer = OPTIMIZERS[name](grouped(in_earlier_order(model), split))
    train(model, optimizer, range(3))
    resumed = copy.deepcopy(model)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 6))
    later = OPTIMIZERS[name](grouped(resumed.parameters(), split))
    before = copy.deepcopy(saved)
    later.load_state_dict(reorder_grouped_linear_state(saved, later, resumed))
    assert saved["param_groups"] == before["param_groups"]
    train(resumed, later, range(3, 6))
    for expected, actual in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_without_biases_nothing_moves():
    model = Experts(bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = optimizer.state_dict()
    assert reorder_grouped_linear_state(state, optimizer, model) == state


def test_fused_optimizers_refuse_the_earlier_order():
    model = Experts()
    optimizer = FusedAdam(list(in_earlier_order(model)), lr=1e-2)
    train(model, optimizer, range(1))
    later = FusedAdam(model.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=r"must have shape \[16\], got \[16, 16\]"):
        later.load_state_dict(optimizer.state_dict())


def test_other_groups_are_refused():
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.optim.SGD(model.first.parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"must have groups of \[14\] parameters, got \[2\]"):
        reorder_grouped_linear_state(state, optimizer, model)
