"""GroupedLinear's arguments, its state and its errors."""

import copy
import io

import pytest
import torch
from checks import assert_same_bits
from schemes import SCHEMES, chosen

from apex_te import flush_fp8_state, fp8_autocast, init_fp8_state
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.recipe import CurrentScaling, DelayedScaling

DELAYED = DelayedScaling(amax_history_len=4)
RECIPES = chosen("delayed", "blockwise")
SPLITS = [5, 0, 16, 3]
TOKENS = sum(SPLITS)


@pytest.mark.parametrize("fp8", [True, False])
def test_return_bias(fp8):
    module = GroupedLinear(2, 16, 8, return_bias=True)
    plain = GroupedLinear(2, 16, 8, False)
    for value in (module.bias0, module.bias1):
        torch.nn.init.ones_(value)
    plain.load_state_dict({k: v for k, v in module.state_dict().items() if "weight" in k})
    x = torch.randn(6, 16)
    with fp8_autocast(fp8, CurrentScaling()):
        out, biases = module(x, [2, 4])
        assert torch.equal(out, plain(x, [2, 4]))
    assert [torch.equal(b, torch.ones(8)) for b in biases] == [True, True]
    with torch.autocast("cpu", torch.bfloat16):
        assert [b.dtype for b in module(x, [2, 4])[1]] == [torch.bfloat16] * 2
    _, biases = GroupedLinear(2, 16, 8, False, return_bias=True)(x, [2, 4])
    assert [b.numel() for b in biases] == [0, 0]


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
def test_main_grad_and_delayed_weight_gradients(fp8, delayed):
    scheme = CurrentScaling()
    plain = GroupedLinear(4, 32, 16)
    fused = GroupedLinear(4, 32, 16, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
    fused.load_state_dict(plain.state_dict())
    weights = [(getattr(plain, f"weight{i}"), getattr(fused, f"weight{i}")) for i in range(4)]
    for _, weight in weights:
        weight.main_grad = torch.full((16, 32), 7.0)
    totals = [torch.zeros(16, 32) for _ in weights]
    for first in (True, False):
        plain.zero_grad()
        inputs = [torch.randn(TOKENS, 32).requires_grad_()]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        for module, x in zip((plain, fused), inputs, strict=True):
            with fp8_autocast(fp8, scheme):
                module(x, SPLITS, is_first_microbatch=first).sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        if delayed:
            assert torch.equal(weights[0][1].main_grad, torch.full((16, 32), 7.0)) == first
            fused.backward_dw()
        for total, (wanted, weight) in zip(totals, weights, strict=True):
            total += wanted.grad
            assert weight.grad is None
            assert torch.allclose(weight.main_grad, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp8", [True, False])
def test_delayed_weight_gradients_in_grad(fp8):
    module, late = GroupedLinear(4, 32, 16), GroupedLinear(4, 32, 16, delay_wgrad_compute=True)
    late.load_state_dict(module.state_dict())
    x = torch.randn(TOKENS, 32)
    for each in (module, late):
        with fp8_autocast(fp8, CurrentScaling()):
            each(x, SPLITS).sum().backward()
    assert late.weight0.grad is None
    assert torch.equal(late.bias0.grad, module.bias0.grad)
    late.backward_dw()
    for i in range(4):
        assert torch.equal(getattr(late, f"weight{i}").grad, getattr(module, f"weight{i}").grad)


def test_main_grad_is_wanted():
    module = GroupedLinear(2, 16, 8, fuse_wgrad_accumulation=True)
    with (
        fp8_autocast(True, DELAYED),
        pytest.raises(ValueError, match="main_grad must be a prealloc"),
    ):
        module(torch.randn(4, 16), [1, 3]).sum().backward()


@pytest.mark.parametrize("name", ["delayed", "blockwise"])
def test_save_original_input(name):
    module = GroupedLinear(4, 32, 16)
    saving = GroupedLinear(4, 32, 16, save_original_input=True)
    saving.load_state_dict(module.state_dict())
    x = torch.randn(TOKENS, 32, requires_grad=True)
    saved = []
    for each in (module, saving):
        saved.append([])
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=saved[-1]: kept.append(t) or t, lambda t: t
        )
        with fp8_autocast(True, RECIPES[name]), hooks:
            out = each(x, SPLITS)
        out.sum().backward()
    originals = [t for t in saved[1] if t.untyped_storage().data_ptr() == x.data_ptr()]
    assert [tuple(t.shape) for t in originals] == [(5, 32), (16, 32), (3, 32)]
    assert not [t for t in saved[0] if t.untyped_storage().data_ptr() == x.data_ptr()]
    assert torch.equal(module.weight0.grad, saving.weight0.grad)
    assert torch.equal(module.weight3.grad, saving.weight3.grad)


def test_first_microbatch_caches_the_weights(monkeypatch):
    import apex_te.fp8.scheme.current as current

    module = GroupedLinear(4, 32, 24)
    x = torch.randn(TOKENS, 32, requires_grad=True)
    calls, quantize = [], current.current_scale

    def counted(t, *args, **kwargs):
        calls.extend([t] if t.shape == (24, 32) else [])
        return quantize(t, *args, **kwargs)

    monkeypatch.setattr(current, "current_scale", counted)
    outs = []
    for first in (True, False, False):
        with fp8_autocast(True, CurrentScaling()):
            outs.append(module(x, SPLITS, is_first_microbatch=first))
    assert len(calls) == 4
    assert torch.equal(outs[0], outs[2])
    with torch.no_grad():
        module.weight2.mul_(2)
    with fp8_autocast(True, CurrentScaling()):
        changed = module(x, SPLITS, is_first_microbatch=False)
    assert len(calls) == 5
    assert not torch.equal(changed, outs[0])


def test_copies_checkpoints_and_pickles():
    module = GroupedLinear(4, 32, 16)
    x = torch.randn(TOKENS, 32)
    with fp8_autocast(True, DELAYED):
        module(x, SPLITS).sum().backward()
    flush_fp8_state()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = GroupedLinear(4, 32, 16)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = [copy.deepcopy(module), loaded, torch.load(file, weights_only=False)]
    outs = []
    for each in [module, *copies]:
        with torch.no_grad(), fp8_autocast(True, DELAYED):
            outs.append(each(x, SPLITS))
        assert torch.equal(outs[0], outs[-1])
    plain = {k: v for k, v in module.state_dict().items() if "fp8_state" not in k}
    assert sorted(plain) == sorted(f"{n}{i}" for n in ("bias", "weight") for i in range(4))
    GroupedLinear(4, 32, 16).load_state_dict(plain)  # strict


def test_construction(device):
    module = GroupedLinear(
        3,
        8,
        4,
        init_method=torch.nn.init.ones_,
        params_dtype=torch.bfloat16,
        device="meta",
        name="x",
    )
    assert module.name == "x"
    assert module.weight2.device.type == "meta"
    module.to_empty(device=device)
    module.reset_parameters()
    assert module.weight2.dtype == torch.bfloat16
    assert module.weight2.eq(1).all()
    assert module.bias2.eq(0).all()
    assert list(dict(GroupedLinear(2, 4, 4, False).named_parameters())) == ["weight0", "weight1"]
    assert abs(GroupedLinear(1, 256, 256).weight0.std().item() - 0.023) < 0.001
    assert GroupedLinear(1, 4, 4, dtype=torch.float16).weight0.dtype == torch.float16
    text = repr(GroupedLinear(2, 4, 6, False, return_bias=True))
    assert "num_gemms=2, in_features=4, out_features=6, bias=False, return_bias=True" in text
    init_fp8_state(module, DELAYED)
    assert module.fp8_state.scale_fwd.shape == (9,)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [[3, 1], [0, 5], [0, 0]])
@pytest.mark.parametrize("name", [None, *SCHEMES])
def test_rows_after_the_last_group_are_not_read(name, splits, bias, device):
    """Outputs and gradients there are zeros, for splits in a list as for those in a CPU tensor."""
    made = GroupedLinear(2, 16, 16, bias, device=device)
    x = torch.randn(2, 4, 16, device=device)
    x.view(8, 16)[sum(splits) :] = torch.nan
    dy = torch.randn(8, 16, device=device)
    results = []
    kinds = [list] if device.type == "cuda" else [list, torch.tensor]
    for rows, given in ((8, kinds[0](splits)), (8, kinds[-1](splits)), (sum(splits), splits)):
        part = x.view(8, 16)[:rows].clone().requires_grad_()
        shaped = part.view(2, 4, 16) if rows == 8 else part
        module = copy.deepcopy(made)
        with fp8_autocast(name is not None, SCHEMES.get(name)):
            out = module(shaped, given)
        out.backward(dy[:rows].view(out.shape))
        grads = [p.grad for p in module.parameters()]
        out, grad = out.detach().view(rows, 16), part.grad
        assert not out[sum(splits) :].any()
        assert not grad[sum(splits) :].any()
        results.append([out[: sum(splits)], grad[: sum(splits)], *grads])
    assert_same_bits(results[0], results[2])
    assert_same_bits(results[1], results[2])
