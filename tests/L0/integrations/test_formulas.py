"""Formulas of norms, MLPs and gates: what is recognised, and what only resembles it."""

import collections
import copy
import importlib
import inspect
import pathlib

import pytest
import torch
from torch import nn
from torch.nn import functional

from apex_te.integrations import from_torch
from apex_te.integrations._mlp_formula import MLPFormula, mlp_formula
from apex_te.integrations._norm_formula import NormFormula, known_norm

SIZE = 24


class Norm(nn.Module):
    """An RMS norm, whose ``change`` makes it another."""

    def __init__(self, change="", eps=1e-4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))
        self.epsilon, self.change = eps, change
        if change == "bias":
            self.bias = nn.Parameter(torch.randn(SIZE))
        if change == "buffer":
            self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        if self.change == "in training" and self.training:
            return x
        if self.change == "channels first" and x.dim() == 4:
            return self.forward(x.transpose(1, 3)).transpose(1, 3)
        h = x.float()
        if self.change == "random":
            h = h + torch.randn(())
        eps = {"no eps": 0, "eps after": 0}.get(self.change, self.epsilon)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        if self.change == "eps after":
            h = h / (1 + self.epsilon)
        h = h * (1 + self.weight if self.change == "centred" else self.weight)
        if self.change == "clamped":
            h = h.clamp(-50, 50)
        return h if self.change == "fp32 result" else h.to(x.dtype)


class GatedNorm(Norm):
    def forward(self, x, gate=None):
        out = super().forward(x)
        return out if gate is None else out * gate


class LayerNorm(Norm):
    def forward(self, x):
        bias = self.bias.float() if self.change == "bias" else None
        out = functional.layer_norm(x.float(), (SIZE,), self.weight.float(), bias, self.epsilon)
        return out.to(x.dtype)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Norm, NormFormula(True, False, 1e-4)),
        (lambda: Norm(eps=0.0), NormFormula(True, False, 0.0)),
        (lambda: Norm("centred"), NormFormula(True, True, 1e-4)),
        (LayerNorm, NormFormula(False, False, 1e-4)),
        (lambda: LayerNorm("bias"), NormFormula(False, False, 1e-4)),
        (lambda: nn.RMSNorm(SIZE), NormFormula(True, False, torch.finfo(torch.float32).eps)),
        (lambda: nn.LayerNorm(SIZE, 1e-3), NormFormula(False, False, 1e-3)),
        *(
            ((lambda change=change: Norm(change)), None)
            for change in ("in training", "channels first", "random", "eps after", "clamped",
                           "bias", "buffer", "fp32 result")
        ),
        (GatedNorm, None),
        (lambda: nn.PReLU(SIZE), None),
        (lambda: nn.GroupNorm(1, SIZE), None),
        (lambda: type("Mine", (nn.LayerNorm,), {})(SIZE), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["cpu", "meta", "in bf16"])
def test_norms(build, expected, place):
    """A norm is known by what it computes, wherever it is; the random state stays."""
    module = build()
    if place == "meta":
        module = module.to("meta")
    elif place == "in bf16":
        module = module.bfloat16()
    state = torch.get_rng_state()
    assert known_norm(module) == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Norm, LayerNorm])
@pytest.mark.parametrize("change", ["", "centred", "bias"])
def test_converted_norms_compute_the_same(kind, change, dtype, device):
    if (kind, change) in ((Norm, "bias"), (LayerNorm, "centred")):
        return
    plain = kind(change).to(device, dtype)
    module = from_torch(copy.deepcopy(plain))
    assert isinstance(module, (nn.RMSNorm, nn.LayerNorm))
    assert isinstance(module, kind)
    assert list(module.state_dict()) == list(plain.state_dict())
    x = torch.randn(5, SIZE, device=device, dtype=dtype)
    low = dtype is torch.bfloat16
    tolerance = {"rtol": 0.02, "atol": 0.02} if low else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(module(x), plain(x), **tolerance)


# Classes of transformers 5.23 that take a size alone, and have a weight.
COUNTS = {(True, False): 178, (True, True): 15, (False, False): 6, None: 18}


@pytest.mark.long
def test_norms_of_all_families():
    """The formulas of all classes of transformers that are named norm."""
    transformers = pytest.importorskip("transformers", "5.0", reason="transformers is not there")
    found = collections.defaultdict(list)
    folder = pathlib.Path(transformers.__file__).parent / "models"
    for file in sorted(folder.glob("*/modeling_*.py")):
        name = f"transformers.models.{file.parent.name}.{file.stem}"
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for kind in list(vars(module).values()):
            own = inspect.isclass(kind) and kind.__module__ == name and "Norm" in kind.__name__
            if not own or not issubclass(kind, nn.Module) or issubclass(kind, nn.LayerNorm):
                continue
            try:
                norm = kind(SIZE)
            except Exception:
                continue
            if any(True for _ in norm.parameters()):
                formula = known_norm(norm)
                found[formula and formula[:2]].append(kind.__name__)
    if transformers.__version__.startswith("5.23."):
        assert {key: len(names) for key, names in found.items()} == COUNTS, found[None]


class MLP(nn.Module):
    """``act(gate) * up`` in one of several ways."""

    def __init__(self, way="", act=None, p=0.0):
        super().__init__()
        self.way, self.act = way, act or nn.SiLU()
        double = way in ("halves", "up first")
        self.one = nn.Linear(SIZE, 2 * 32 if double else 32, bias=way != "ungated")
        if not double and way != "ungated":
            self.two = nn.Linear(SIZE, 32)
        self.out = nn.Linear(32, SIZE)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        if self.way in ("halves", "up first"):
            gate, up = self.one(x).chunk(2, -1)
            if self.way == "up first":
                gate, up = up, gate
        elif self.way == "ungated":
            gate, up = self.one(x), 1
        else:
            gate, up = self.one(x), self.two(x)
        if self.way == "clamped":
            gate, up = gate.clamp(max=100.0), up.clamp(-100.0, 100.0)
        hidden = self.act(gate) * up
        if self.way == "dropped inside":
            hidden = self.drop(hidden)
        out = self.out(hidden)
        if self.way == "scaled":
            out = out * 1.001
        if self.way == "noisy":
            return functional.dropout(out, 0.5, self.training)
        return (
            x + out if self.way == "residual" else self.drop(out) if self.way == "dropped" else out
        )


@pytest.mark.parametrize(
    ("mlp", "expected"),
    [
        (MLP(), MLPFormula(("one", "two"), "out", "swiglu", None)),
        (MLP(act=nn.GELU(approximate="tanh")), MLPFormula(("one", "two"), "out", "geglu", None)),
        (MLP(act=nn.ReLU()), MLPFormula(("one", "two"), "out", "reglu", None)),
        (MLP(act=nn.Sigmoid()), MLPFormula(("one", "two"), "out", "glu", None)),
        (MLP("halves"), MLPFormula(("one",), "out", "swiglu", None)),
        (MLP("ungated"), MLPFormula(("one",), "out", "silu", None)),
        (MLP("dropped", p=0.5), MLPFormula(("one", "two"), "out", "swiglu", "drop")),
        (MLP("dropped"), MLPFormula(("one", "two"), "out", "swiglu", "drop")),
        (MLP("dropped inside"), MLPFormula(("one", "two"), "out", "swiglu", None)),
        (MLP("dropped inside", p=0.5), None),
        (MLP(act=nn.GELU()), None),
        (MLP("up first"), None),
        (MLP("clamped"), None),
        (MLP("scaled"), None),
        (MLP("noisy"), None),
        (MLP("residual"), None),
        (nn.Sequential(nn.Linear(SIZE, 32), nn.Linear(32, SIZE)), None),
        (nn.Sequential(nn.Linear(SIZE, 32), nn.Softplus(), nn.Linear(32, SIZE)), None),
    ],
)
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_mlps(mlp, expected, place):
    state = torch.get_rng_state()
    assert mlp_formula(copy.deepcopy(mlp).to(place)) == expected
    assert torch.equal(torch.get_rng_state(), state)
