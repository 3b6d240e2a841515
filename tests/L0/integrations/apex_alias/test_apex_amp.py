"""``apex.amp``: levels, loss scalers, master weights and casts as programs of apex use them."""

import copy
import types

import pytest
import torch
from checks import assert_same_bits

import apex_te
from apex_te.integrations.apex import amp
from apex_te.integrations.apex.amp import _amp_state, lists
from apex_te.integrations.apex.amp.lists import (
    functional_overrides,
    tensor_overrides,
    torch_overrides,
)
from apex_te.integrations.apex.amp.scaler import LossScaler
from apex_te.integrations.apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

OPTIMIZERS = {
    "torch": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "FusedSGD": lambda params: FusedSGD(params, 0.1, 0.9),
    "FusedAdam": lambda params: FusedAdam(params, 0.01),
    "FusedLAMB": lambda params: FusedLAMB(params, 0.01),
}


@pytest.fixture(autouse=True)
def _off():
    """amp is off after each test."""
    yield
    amp.initialize(torch.nn.Linear(1, 1), enabled=False)


def make(device, kind="torch", **options):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    net = net.to(device)
    optimizer = OPTIMIZERS[kind](net.parameters())
    return amp.initialize(net, optimizer, verbosity=0, **options)


def batch(device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator).to(device)


def backward(model, optimizer, x, **options):
    loss = model(x).float().square().mean()
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return loss.detach()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_zeroing_the_model_is_enough(kind, level, device):
    """Programs call model.zero_grad(): bitwise as optimizer.zero_grad(), also beside overflows."""
    results = []
    for zero_model in (True, False):
        model, optimizer = make(device, kind, opt_level=level)
        for i in range(6):
            x = batch(device, i)
            if i == 3 and level in ("O1", "O2"):
                x = x * 1e30  # the gradients overflow
            backward(model, optimizer, x)
            optimizer.step()
            (model if zero_model else optimizer).zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_loss_scale_may_be_set(kind, device):
    """As BERT does it, by ``_amp_state.loss_scalers[0]._loss_scale = 2**20``."""
    model, optimizer = make(device, kind, opt_level="O2", loss_scale="dynamic")
    scaler = _amp_state.loss_scalers[0]
    assert scaler._loss_scale == scaler.loss_scale() == 2.0**16
    scaler._loss_scale = 2**20
    before = [p.detach().clone() for p in model.parameters()]
    with amp.scale_loss(model(batch(device, 0)).sum() * 0, optimizer) as scaled:
        assert scaled.item() == 0
    model(batch(device, 0)).sum().backward()
    loss = torch.ones((), device=device, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == 2.0**20
        scaled.backward()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**20
    scaler._unskipped = 1999
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert (scaler._loss_scale, scaler._unskipped) == (2.0**21, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match="loss_scale must be above 0"):
        scaler._loss_scale = 0


@pytest.mark.parametrize("found", [0, 1])
@pytest.mark.parametrize("kind", ["torch", "FusedLAMB"])
def test_update_scale_by_hand(kind, found, device):
    """A program reduces gradients itself, sets ``_overflow_buf`` and decides on the step."""
    model, optimizer = make(device, kind, opt_level="O2")
    scaler = _amp_state.loss_scalers[0]
    backward(model, optimizer, batch(device, 0) * (1e30 if found else 1), delay_overflow_check=True)
    assert scaler.loss_scale() == 2.0**16
    assert scaler._has_overflow == bool(found)
    scaler._overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)
    had = scaler.update_scale()
    assert had is bool(found)
    assert scaler.loss_scale() == 2.0 ** (15 if found else 16)
    assert "found_inf" not in vars(optimizer)
    for param in optimizer._amp_stash.all_fp32_from_fp16_params:
        assert param.grad is not None
        assert bool(param.grad.isfinite().all()) is not had
        param.grad = None
    model.zero_grad()
    backward(model, optimizer, batch(device, 1))
    before = [p.detach().clone() for p in model.parameters()]
    assert not scaler._has_overflow
    optimizer.step()  # which the first, decided by hand, does not make a skipped one
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_stash_and_master_params(kind, level, device):
    model, optimizer = make(device, kind, opt_level=level)
    optimizer._amp_lazy_init()
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    stash = optimizer._amp_stash
    params, masters = stash.all_fp16_params, stash.all_fp32_from_fp16_params
    assert [id(p) for p in params] == [id(p) for p in model.parameters()]
    assert stash.all_fp32_from_fp32_params == []
    assert [len(group) for group in stash.fp32_from_fp16_groups] == [4]
    assert all(m.dtype is torch.float32 for m in masters)
    assert [id(p) for p in amp.master_params(optimizer)] == [id(m) for m in masters]
    assert not stash.params_have_scaled_gradients
    backward(model, optimizer, batch(device, 0))
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    assert norm > 1e-3
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for master in masters:
            master.fill_(0.25)
    optimizer._master_params_to_model_params()
    assert all(bool((p == 0.25).all()) for p in params)
    with pytest.raises(NotImplementedError, match=r"use amp\.scale_loss"):
        optimizer._prepare_amp_backward()


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("kind", [None, torch.float16, torch.bfloat16])
def test_patch_torch_functions_type(level, kind, device):
    model, _ = make(device, opt_level=level, patch_torch_functions_type=kind)
    seen = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    out = model(batch(device, 0))
    default = torch.float16 if level == "O1" else torch.bfloat16
    assert seen == [kind or default]
    assert out.dtype is torch.float32  # in which apex would compute the loss
    scale = 2.0**16 if level == "O1" else 1.0
    assert _amp_state.loss_scalers[0].loss_scale() == scale
    properties = _amp_state.opt_properties
    assert (properties.enabled, properties.patch_torch_functions) == (True, True)
    assert properties.opt_level == ("O4" if seen[0] is torch.bfloat16 else "O1")
    with pytest.raises(ValueError, match=r"_type must be torch\.float16 or"):
        make(device, opt_level=level, patch_torch_functions_type=torch.float32)


CASTS = {
    "half_function": torch.float16,
    "bfloat16_function": torch.bfloat16,
    "float_function": torch.float32,
    "promote_function": torch.float64,
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("by", ["decorator", "registration"])
def test_functions_cast_only_while_amp_does(cast, by, device):
    module = types.SimpleNamespace(__name__="mine")
    given = [torch.ones(2, dtype=d, device=device) for d in (torch.float16, torch.float64)]
    given.append(torch.ones(2, dtype=torch.int64, device=device))
    own = [x.dtype for x in given]

    def dtypes(first, rest, *, number):
        """Doc."""
        return [first.dtype, *(x.dtype for x in rest), number]

    def seen():
        return module.dtypes(given[0], given[1:], number=7)

    module.dtypes = dtypes
    if by == "decorator":
        module.dtypes = getattr(amp, cast)(dtypes)
        assert (module.dtypes.__name__, module.dtypes.__doc__) == ("dtypes", "Doc.")
    else:
        getattr(amp, f"register_{cast}")(module, "dtypes")
    assert seen() == [*own, 7]
    for level in ("O1", "O4"):
        if by == "registration" and level == "O4":
            assert module.dtypes is dtypes  # put back, and forgotten
            continue
        make(device, opt_level=level)
        assert seen() == [CASTS[cast], CASTS[cast], torch.int64, 7]
        with amp.disable_casts():
            assert seen() == [*own, 7]
        make(device, opt_level="O2")
        assert seen() == [*own, 7]
    with pytest.raises(ValueError, match=f"amp.register_{cast}: name must be a function of mine"):
        getattr(amp, f"register_{cast}")(module, "nothing")


def test_disable_casts_reaches_the_model(device):
    model, _ = make(device, opt_level="O1")
    x, dtypes = batch(device, 0), []
    model[0].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    model(x)
    with amp.disable_casts():
        model(x)
    model(x)
    assert dtypes == [torch.float16, torch.float32, torch.float16]


def test_the_first_interface_raises_as_in_apex(device):
    handle = amp.init(enabled=True)
    assert handle.is_active()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, device=device))], 0.1)
    wrapped = handle.wrap_optimizer(optimizer, num_loss=1)
    for scale in (wrapped.scale_loss, lambda loss: handle.scale_loss(loss, optimizer)):
        with pytest.raises(RuntimeError, match=r"amp\.initialize and amp\.scale_loss"):
            scale(torch.ones(()))
    assert wrapped.param_groups is optimizer.param_groups
    off = amp.init(enabled=False)
    assert not off.is_active()
    with off.scale_loss(torch.ones(()), optimizer) as loss:
        assert loss.item() == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resuming_is_bitwise(kind, device):
    """In apex's order: model, optimizer and amp load after initialize."""

    def train(model, optimizer, steps):
        for i in steps:
            backward(model, optimizer, batch(device, i))
            optimizer.step()
            model.zero_grad()

    model, optimizer = make(device, kind, opt_level="O2")
    train(model, optimizer, range(3))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    train(model, optimizer, range(3, 6))
    twin, other = make(device, kind, opt_level="O2")
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    train(twin, other, range(3, 6))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(ours.detach(), theirs.detach())
    into = {"kept": 1}
    assert amp.state_dict(into) is into
    assert into["loss_scaler0"]["unskipped"] == 6


def test_lists_models_and_wrapped_optimizers(device):
    """Lists stay lists; a wrapper of an optimizer, such as LARC, is looked into."""
    models = [torch.nn.Linear(8, 4).to(device) for _ in range(2)]
    inner = torch.optim.SGD([p for m in models for p in m.parameters()], 0.1)
    larc = types.SimpleNamespace(optim=inner, param_groups=inner.param_groups)
    made, optimizers = amp.initialize(
        models, [larc], opt_level="O2", num_losses=2, loss_scale="128.0", verbosity=0
    )
    assert isinstance(made, list)
    assert optimizers[0] is larc
    assert [s.loss_scale() for s in _amp_state.loss_scalers] == [128.0, 128.0]
    backward(made[1], larc, batch(device, 0), loss_id=1)
    assert sum(m.grad is not None for m in amp.master_params(larc)) == 2
    made, none = amp.initialize(models, [], enabled=False)
    assert made == models
    assert none == []
    assert _amp_state.loss_scalers == []
    assert not _amp_state.opt_properties.enabled
    assert amp.initialize(models[0], enabled=False) is models[0]


def test_a_wrapper_of_a_fused_optimizer_needs_no_master_weights(device):
    """Its gradients would be where the wrapper does not look."""
    model = torch.nn.Linear(8, 4).to(device)
    larc = types.SimpleNamespace(optim=FusedSGD(model.parameters(), 0.1))
    with pytest.raises(NotImplementedError, match=r"SimpleNamespace around a fused .*level O5"):
        amp.initialize(model, larc, opt_level="O5", verbosity=0)
    assert model.weight.dtype is torch.float32
    assert amp.initialize(model, larc, opt_level="O1", verbosity=0)[1] is larc


def test_models_are_wrapped_for_data_parallelism_afterwards(device):
    wrapper = type("DistributedDataParallel", (torch.nn.Sequential,), {})
    with pytest.raises(ValueError, match="models must be wrapped for data parallelism afterwards"):
        amp.initialize(wrapper(torch.nn.Linear(8, 4).to(device)), verbosity=0)


def test_loss_scaler_of_its_own():
    scaler = LossScaler("dynamic", init_scale=2.0**8, scale_window=2, max_loss_scale=2.0**9)
    for found, expected in ((0, 2.0**8), (0, 2.0**9), (0, 2.0**9), (1, 2.0**8)):
        scaler.clear_overflow_state()
        scaler._overflow_buf += found
        assert scaler.update_scale() is bool(found)
        assert scaler.loss_scale() == expected
    assert LossScaler(4.0).update_scale() is False
    with pytest.raises(NotImplementedError, match=r"scale_factor must be 2.*got 3"):
        LossScaler("dynamic", scale_factor=3.0)


def test_lists_name_functions_that_exist():
    for module in (functional_overrides, torch_overrides, tensor_overrides):
        names = [*module.FP16_FUNCS, *module.BFLOAT16_FUNCS, *module.FP32_FUNCS]
        names += [name for name, _ in getattr(module, "BANNED_FUNCS", [])]
        names += [*getattr(module, "SEQUENCE_CASTS", [])]
        names += [n for n in getattr(module, "CASTS", []) if "div__" not in n]  # of Python 2
        assert names
        assert all(hasattr(module.MODULE, name) for name in names)
    assert lists.torch_overrides is torch_overrides


def test_apex_te_amp_keeps_gradients_of_master_weights(device):
    """Only programs of apex count on a step that drops them."""
    model = torch.nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    apex_te.amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    with apex_te.amp.scale_loss(model(batch(device, 0)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(p.grad is not None for p in apex_te.amp.master_params(optimizer))
