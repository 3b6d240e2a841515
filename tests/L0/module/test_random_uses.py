"""Random products of modules, recipes and uses: the bits of the plain run, the numbers of float32.

The ops that sm_90 fuses count as such on the CPU, at any size, so that modules call them.
"""

import copy
import io
import random

import pytest
import torch
from schemes import FIRST_STEP, PLAIN_WGRAD, SCHEMES
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    TransformerLayer,
    fp8_autocast,
    fp8_statistics,
    keep_fp8_weights,
)
from apex_te.fp8.scheme import gemm_backend
from apex_te.module._core import programs
from apex_te.ops import dense_gemm_swiglu
from apex_te.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex_te.recipe import BlockScaling, DelayedScaling

WIDTH, FFN, STEPS = 64, 128, 3
RECIPES = {
    **SCHEMES,
    "first step": FIRST_STEP,
    "most recent": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
    "1x128": BlockScaling(wgrad_input="1x128"),
    "high precision": BlockScaling(backward="high_precision"),
    "no wgrad": DelayedScaling(**PLAIN_WGRAD),
}
OPTIMIZERS = {
    "adam": lambda p: FusedAdam(p, lr=1e-2),
    "lamb": lambda p: FusedLAMB(p, lr=1e-2),
    "sgd": lambda p: FusedSGD(p, lr=1e-2, momentum=0.9),
}
CHECKPOINTS = {
    None: lambda model, x: model(x),
    "own": lambda model, x: apex_te.checkpoint(model, x),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "not reentrant": lambda model, x: checkpoint(model, x, use_reentrant=False),
}
BETWEEN = ["copy", "load", "save and load", "keep weights or not", "evaluate", None, None]
SEEDS = [pytest.param(n, marks=pytest.mark.long if n >= 100 else ()) for n in range(1000)]


@pytest.fixture(autouse=True)
def _fused(monkeypatch):
    monkeypatch.setattr(gemm_backend, "has_dense_fp8", lambda device: True)
    for name in ("_MIN_ROWS", "_MIN_DEPTH", "_MIN_WORK"):
        monkeypatch.setattr(dense_gemm_swiglu, name, 0)


def drawn(seed):
    """Draws a model, its training options, and uses that must not change the results."""
    pick = random.Random(seed)
    model = {
        "kind": pick.choice(["MLP", "MLP", "layer", "linears"]),
        "activation": pick.choice(["swiglu", "swiglu", "gelu", "geglu"]),
        "bias": pick.random() < 0.4,
        "normalization": pick.choice(["RMSNorm", "LayerNorm"]),
        "params_dtype": pick.choice([torch.bfloat16, torch.float32]),
    }
    run = {
        "recipe": pick.choice([*RECIPES]), "save": pick.choice(["all", "small"]),
        "tokens": pick.choice([8, 16, 19]), "micro": pick.choice([1, 2]),
        "optimizer": pick.choice([*OPTIMIZERS]),
    }  # fmt: skip
    use = {name: pick.random() < 0.3 for name in ("kept", "columnwise", "statistics", "eager")}
    use["checkpoint"] = pick.choice([*CHECKPOINTS])
    use["between"] = [pick.choice(BETWEEN) for _ in range(STEPS)]
    return model, run, use


PLAIN = {
    "kept": False, "columnwise": False, "statistics": False, "eager": False, "checkpoint": None,
    "between": [None] * STEPS,
}  # fmt: skip


def build(kind, activation, **options):
    torch.manual_seed(3)
    if kind == "linears":
        rest = {key: options[key] for key in ("bias", "params_dtype")}
        parts = LayerNormLinear(WIDTH, FFN, **options), Linear(FFN, WIDTH, **rest)
        return torch.nn.Sequential(*parts)
    options["activation"] = activation
    if kind == "MLP":
        return torch.nn.Sequential(LayerNormMLP(WIDTH, FFN, **options))
    layer = TransformerLayer(
        WIDTH, FFN, 4, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        fuse_qkv_params=True, self_attn_mask_type="causal", attn_input_format="bshd", **options,
    )  # fmt: skip
    return torch.nn.Sequential(layer)


def changed(model, optimizer, options, make, keeps, what):
    """Applies a change that must keep all bits; returns the model, optimizer and kept flag."""
    state = copy.deepcopy(optimizer.state_dict())
    if what == "copy":
        model = copy.deepcopy(model)
    elif what == "load":
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    elif what == "save and load":
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        model = build(**options)
        model.load_state_dict(torch.load(file, weights_only=False))
    elif what == "evaluate":
        with torch.no_grad():
            model(torch.ones(1, 8, WIDTH, dtype=options["params_dtype"]))
    keeps = keeps != (what == "keep weights or not")
    if what is None or what == "evaluate":
        return model, optimizer, keeps
    keep_fp8_weights(model, keeps)
    optimizer = make(model.parameters())
    optimizer.load_state_dict(state)
    return model, optimizer, keeps


def train(options, run, use, monkeypatch):
    """Outputs, input gradients and parameters of all steps, and the first step's gradients."""
    model, make, found, first = build(**options), OPTIMIZERS[run["optimizer"]], [], []
    optimizer, keeps = make(model.parameters()), use["kept"]
    keep_fp8_weights(model, keeps)
    generator = torch.Generator().manual_seed(5)
    region = {"fp8_recipe": RECIPES[run["recipe"]], "save": run["save"]}
    region["keep_columnwise_weights"] = use["columnwise"]
    monkeypatch.setattr(programs, "_enabled", not use["eager"])
    for step, what in enumerate(use["between"]):
        model, optimizer, keeps = changed(model, optimizer, options, make, keeps, what)
        for _ in range(run["micro"]):
            x = torch.randn(2, run["tokens"], WIDTH, generator=generator) * (1 + step)
            x = x.to(options["params_dtype"]).requires_grad_()
            observed = fp8_statistics(model) if use["statistics"] else fp8_autocast(enabled=False)
            with observed:
                with fp8_autocast(**region):
                    y = CHECKPOINTS[use["checkpoint"]](model, x)
                y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
            found += [y.detach(), x.grad]
        first = first or [*found, *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found += [p.detach().clone() for p in model.parameters()]
    return found, first


def exact(options, run):
    """The first step's outputs and gradients in float32."""
    model = build(**options)
    other = build(**{**options, "params_dtype": torch.float32})
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(run["micro"]):
        x = torch.randn(2, run["tokens"], WIDTH, generator=generator)
        x = x.to(options["params_dtype"]).float().requires_grad_()
        y = other(x)
        y.backward(torch.randn(y.shape, generator=generator))
        found += [y.detach(), x.grad]
    return [*found, *(p.grad for p in other.parameters())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_uses_change_no_bit(monkeypatch, seed):
    options, run, use = drawn(seed)
    print(options, run, use)
    expected, _ = train(options, run, PLAIN, monkeypatch)
    found, first = train(options, run, use, monkeypatch)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i} of {len(found)}"
    for i, (a, b) in enumerate(zip(first, exact(options, run), strict=True)):
        a, b = a.flatten().double(), b.flatten().double()
        # A wrong scale, a lost or doubled part; rounding to FP8 takes a few percent.
        assert torch.cosine_similarity(a, b, dim=0) > 0.93, f"tensor {i} of {len(first)}"
        assert 0.85 < a.norm() / b.norm() < 1.15, f"tensor {i} of {len(first)}"
