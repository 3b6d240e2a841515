"""``fuse_lora`` on PEFT's layers: the same model but for rounding, in whatever way it is used."""

import copy
import io

import pytest
import torch
from checks import assert_same_bits
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import fp8_autocast, recipe
from apex_te.integrations import from_torch, fuse_lora
from apex_te.module._core.low_rank import LowRankLinearFunction
from apex_te.module.linear import Linear

peft = pytest.importorskip("peft", reason="peft is not installed")
LoraLinear = peft.tuners.lora.layer.Linear
SCALING = recipe.CurrentScaling()
# In float32 sums differ too little to change more than single roundings to FP8 behind them.
DTYPE = torch.float32
TARGETS = ["q", "k", "gate", "up", "down"]


class Block(nn.Module):
    """Projections that share inputs, as those of a decoder layer do."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        k = functional.pad(self.k(x), (0, 32))
        x = self.norm(self.q(x) * torch.tanh(k) + x)
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


def config(**options):
    values = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "init_lora_weights": False}
    return peft.LoraConfig(**{**values, **options})


def adapted(held=True, wide=False, scaling=SCALING, dtype=DTYPE, **options):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(dtype)
    with apex_te.fp8_model_init(enabled=held, recipe=scaling):
        from_torch(model, include="*")
    return peft.get_peft_model(model, config(**options), autocast_adapter_dtype=wide)


def inputs(dtype=DTYPE):
    torch.manual_seed(1)
    return torch.randn(4, 16, 64).to(dtype)


def step(model, x=None, scaling=SCALING):
    """Output and gradients by name."""
    x = inputs() if x is None else x
    model.zero_grad()
    with fp8_autocast(fp8_recipe=scaling):
        out = model(x)
    out.float().square().mean().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def assert_close(found, wanted, limit=0.02):
    def error(a, b):
        a, b = a.detach().float(), b.detach().float()
        return float((a - b).norm()) / float(b.norm())

    assert error(found[0], wanted[0]) < limit
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert error(found[1][name], grad) < 3 * limit, name


def kinds(model, kind):
    return [m for m in model.modules() if type(m) is kind]


def fused_layers(model):
    return [m for m in model.modules() if isinstance(m, LoraLinear) and type(m) is not LoraLinear]


@pytest.fixture
def fused_calls(monkeypatch):
    """Number of forwards in which a product has added its adapter."""
    calls = []
    forward = LowRankLinearFunction.forward

    def counted(*args):
        calls.append(1)
        return forward(*args)

    monkeypatch.setattr(LowRankLinearFunction, "forward", staticmethod(counted))
    return calls


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("held", [True, False])
def test_same_model_but_for_rounding(name, held, fused_calls):
    scaling = (
        recipe.CurrentScaling() if name == "tensorwise" else recipe.chosen_recipe("", "", name)
    )
    plain, fused = (adapted(held, scaling=scaling) for _ in range(2))
    assert fuse_lora(fused) is fused
    assert len(fused_layers(fused)) == 10
    assert not kinds(fused, LoraLinear)
    for _ in range(3):
        found, wanted = step(fused, scaling=scaling), step(plain, scaling=scaling)
        assert_close(found, wanted)
    assert len(fused_calls) == 30
    assert all(p.grad is None for p in fused.parameters() if not p.requires_grad)


def test_the_second_call_changes_nothing():
    model = fuse_lora(adapted())
    before = [type(m) for m in model.modules()]
    fuse_lora(model)
    assert [type(m) for m in model.modules()] == before


def test_training_lowers_the_loss():
    model = fuse_lora(adapted(lora_dropout=0.1))
    target = torch.randn(4, 16, 64)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(25):
        with fp8_autocast(fp8_recipe=SCALING):
            loss = functional.mse_loss(model(inputs()).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("first", ["fused", "plain"])
def test_saved_adapters_load(tmp_path, first):
    """Adapters, state dicts and whole models of either kind load into the other."""
    models = {"fused": fuse_lora(adapted()), "plain": adapted()}
    one = models.pop(first)
    (other,) = models.values()
    assert list(one.state_dict()) == list(other.state_dict())
    with torch.no_grad():
        for p in one.parameters():
            if p.requires_grad:
                p.normal_(0, 0.1)
    wanted = step(one)
    one.save_pretrained(tmp_path / "adapter")
    other.load_adapter(tmp_path / "adapter", "default", autocast_adapter_dtype=False)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        q.requires_grad_(p.requires_grad)
    assert_close(step(other), wanted)
    third = adapted() if first == "fused" else fuse_lora(adapted())
    third.load_state_dict(one.state_dict())
    assert_close(step(third), wanted)
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    found = step(torch.load(file, weights_only=False))
    assert_same_bits(found[0], wanted[0])
    assert_same_bits(step(copy.deepcopy(one))[0], wanted[0])


def test_merge():
    fused, plain = fuse_lora(adapted(held=False)), adapted(held=False)
    with torch.no_grad():
        before = fused(inputs())
        fused.merge_adapter()
        plain.merge_adapter()
        assert_same_bits(fused(inputs()), plain(inputs()))
        fused.unmerge_adapter()
        assert (fused(inputs()) - before).norm() < 0.02 * before.norm()
        merged = fused.merge_and_unload()
        assert not fused_layers(merged)
        assert len(kinds(merged, Linear)) == 10
        plain.unmerge_adapter()
        assert_same_bits(merged(inputs()), plain.merge_and_unload()(inputs()))


def test_disabled_and_several_adapters(fused_calls):
    fused, plain = fuse_lora(adapted()), adapted()
    for model in (fused, plain):
        torch.manual_seed(5)
        model.add_adapter("second", config(r=2))
    for use in ("second", ["default", "second"], "default"):
        fused_calls.clear()
        for model in (fused, plain):
            model.base_model.set_adapter(use)
        assert_close(step(fused), step(plain))
        assert len(fused_calls) == (0 if isinstance(use, list) else 10)
    fused_calls.clear()
    with (
        fused.disable_adapter(),
        plain.disable_adapter(),
        torch.no_grad(),
        fp8_autocast(fp8_recipe=SCALING),
    ):
        assert_same_bits(fused(inputs()), plain(inputs()))
    assert not fused_calls


def test_adapter_of_each_sample(fused_calls):
    fused, plain = fuse_lora(adapted()).eval(), adapted().eval()
    names = ["default", "__base__", "default", "__base__"]
    for model in (fused, plain):
        torch.manual_seed(5)
        model.add_adapter("second", config(r=2))
    with torch.no_grad(), fp8_autocast(fp8_recipe=SCALING):
        assert_same_bits(fused(inputs(), adapter_names=names), plain(inputs(), adapter_names=names))
    assert not fused_calls


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"lora_bias": True}, {"use_rslora": True}, {"lora_dropout": 0.3}],
)
def test_variants(options, fused_calls):
    targets = ["q", "down"] if "lora_bias" in options else TARGETS
    fused, plain = (adapted(target_modules=targets, **options) for _ in range(2))
    fuse_lora(fused)
    found = []
    for model in (fused, plain):
        torch.manual_seed(9)
        found.append(step(model))
    assert_close(*found)
    assert bool(fused_calls) == (options.keys() <= {"use_rslora", "lora_dropout"})
    fused_calls.clear()
    with torch.no_grad(), fp8_autocast(fp8_recipe=SCALING):
        a, b = fused.eval()(inputs()), plain.eval()(inputs())
    assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model, other = (fuse_lora(adapted()) for _ in range(2))
    blocks = other.base_model.model

    def forward(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    wanted = step(model)
    x = inputs().requires_grad_()  # which reentrant checkpoints need
    with fp8_autocast(fp8_recipe=SCALING):
        out = forward(x)
    out.float().square().mean().backward()
    assert_same_bits(out, wanted[0])
    found = {n: p.grad for n, p in other.named_parameters() if p.requires_grad}
    assert_close((out, found), wanted, 0.005)


def test_adapters_in_float32(fused_calls):
    """PEFT's default: in float32 without autocast, fused in autocast's dtype."""
    fused, plain = (adapted(wide=True, dtype=torch.bfloat16) for _ in range(2))
    assert next(p for p in fused.parameters() if p.requires_grad).dtype is torch.float32
    fuse_lora(fused)
    x = inputs(torch.bfloat16)
    assert_same_bits(step(fused, x)[0], step(plain, x)[0])
    assert not fused_calls
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = step(fused, x), step(plain, x)
    assert found[0].dtype is wanted[0].dtype
    assert_close(found, wanted, 0.04)  # as far as bf16's roundings change those to FP8
    assert len(fused_calls) == 10


@pytest.mark.parametrize("where", ["base", "adapter", "global", "replaced forward"])
def test_hooks_run(where, fused_calls):
    model = fuse_lora(adapted())
    layer = fused_layers(model)[0]
    seen = []

    def hook(*args):
        seen.append(args)

    handles = []
    if where == "base":
        handles.append(layer.base_layer.register_forward_hook(hook))
    elif where == "adapter":
        handles.append(layer.lora_A["default"].register_forward_hook(hook))
    elif where == "global":
        handles.append(nn.modules.module.register_module_forward_hook(hook))
    else:
        base = layer.base_layer
        base.forward = lambda x: [hook(), type(base).forward(base, x)][1]
    step(model)
    assert seen
    assert len(fused_calls) == (0 if where == "global" else 9)
    for handle in handles:
        handle.remove()


def test_a_base_of_another_class(fused_calls):
    model, plain = fuse_lora(adapted()), adapted()
    for kind, of in ((fused_layers, model), (lambda m: kinds(m, LoraLinear), plain)):
        layer = kind(of)[0]
        torch.manual_seed(3)
        layer.base_layer = nn.Linear(64, 64).requires_grad_(False)
    assert_close(step(model), step(plain))
    assert len(fused_calls) == 9


@pytest.mark.parametrize("compiled", [True, False])
def test_compile_traces_the_plain_forward(compiled, fused_calls):
    layer, plain = fused_layers(fuse_lora(adapted()))[0], kinds(adapted(), LoraLinear)[0]
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with fp8_autocast(fp8_recipe=SCALING):
        out, wanted = call(inputs()), plain(inputs())
    assert (out - wanted).norm() < 0.02 * wanted.norm()
    out.float().sum().backward()
    assert bool(fused_calls) == (not compiled)


def test_outside_of_fp8_it_is_the_plain_model(fused_calls):
    fused, plain = fuse_lora(adapted(held=False)), adapted(held=False)
    assert_same_bits(fused(inputs()), plain(inputs()))
    assert not fused_calls


def test_errors():
    with pytest.raises(TypeError, match=r"fuse_lora: model must be a torch.nn.Module, got int"):
        fuse_lora(3)
    for model in (Block(), peft.get_peft_model(nn.Sequential(Block()), config())):
        with pytest.raises(ValueError, match="fuse_lora: model must have LoRA layers of PEFT"):
            fuse_lora(model)
