"""amp.initialize: properties of the levels, overrides, what is printed or refused, repetition."""

import copy
import inspect
import io

import pytest
import torch
from amp_models import OPTIMIZERS, make_batch, make_net, scaler, train
from checks import assert_same_bits
from torch import nn

import apex_te
from apex_te import amp
from apex_te.amp.levels import LEVELS
from apex_te.module.layer_norm import LayerNorm
from apex_te.optimizers import FusedAdam

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
# api: cast_model_type, autocast, keep_batchnorm_fp32, master_weights, loss_scale, FP8 recipe.
TABLE = {
    "O0": (FLOAT, None, None, False, 1.0, None),
    "O1": (None, HALF, None, None, "dynamic", None),
    "O2": (HALF, None, True, True, "dynamic", None),
    "O3": (HALF, None, False, False, 1.0, None),
    "O4": (None, BF16, None, None, 1.0, None),
    "O5": (BF16, None, True, True, 1.0, None),
    "O6": (BF16, None, True, True, 1.0, "DelayedScaling"),
    "O7": (BF16, None, True, True, 1.0, "CurrentScaling"),
}
PLAIN = [level for level in TABLE if TABLE[level][5] is None]


def fp8_net(device="cpu"):
    torch.manual_seed(3)
    layers = [apex_te.Linear(32, 64), nn.GELU(), nn.BatchNorm1d(64), apex_te.Linear(64, 16)]
    return nn.Sequential(*layers).to(device)


def test_table():
    assert list(LEVELS) == list(TABLE)
    for name, expected in TABLE.items():
        level = LEVELS[name]
        made = None if level.make_recipe is None else level.make_recipe()
        assert (
            level.cast_model_type, level.autocast_type, level.keep_batchnorm_fp32,
            level.master_weights, level.loss_scale, made and type(made).__name__,
        ) == expected  # fmt: skip
        assert level.patch_torch_functions is (expected[1] is not None)
        assert made is None or made.fp8_format is apex_te.recipe.Format.HYBRID


@pytest.mark.parametrize("level", PLAIN)
def test_what_a_level_does(device, level):
    cast, autocast, keep, masters, loss_scale, _ = TABLE[level]
    model = make_net(device)
    optimizer = FusedAdam(model.parameters())
    result = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert result[0] is model
    assert result[1] is optimizer
    weights = cast or FLOAT
    assert model.first.weight.dtype is model.offset.dtype is weights
    norms = FLOAT if keep else weights
    assert {t.dtype for t in (model.norm.weight, model.norm.running_var)} == {norms}
    x = make_batch(device)[0]
    extra = {"x": [x], "count": 3}
    out = model(x, extra=extra)
    assert model.seen == [weights, weights]
    assert out["count"] == 3
    assert out["out"].dtype is (FLOAT if cast else autocast)
    assert optimizer.master_weights is bool(masters)
    assert scaler().dynamic is (loss_scale == "dynamic")
    assert scaler().loss_scale() == (2.0**16 if loss_scale == "dynamic" else loss_scale)
    assert {v.dtype for v in model.state_dict().values() if v.is_floating_point()} == {FLOAT}


@pytest.mark.parametrize("level", ["O6", "O7"])
def test_fp8_levels(device, level):
    model = fp8_net(device)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    seen = []
    model[1].register_forward_pre_hook(
        lambda *_: seen.append((apex_te.is_fp8_enabled(), apex_te.autocast.get_fp8_recipe()))
    )
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(32, n, generator=generator).to(device) for n in (32, 16))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        out = model(x)
        loss = (out - y).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert out.dtype is FLOAT
    assert losses[-1] < 0.2 * losses[0]
    assert all(enabled for enabled, _ in seen)
    assert {type(recipe).__name__ for _, recipe in seen} == {TABLE[level][5]}
    masters = [optimizer.master_weight(p) for p in model.parameters()]
    assert [m is None for m in masters] == [p.dtype is FLOAT for p in model.parameters()]
    assert (model[0].weight.dtype, model[2].weight.dtype) == (BF16, FLOAT)
    # The layers multiply in FP8: the same weights in bfloat16 give something else.
    plain = copy.deepcopy(model)
    assert not torch.equal(amp.initialize(plain, opt_level="O5", verbosity=0)(x), model(x))


def test_fp8_levels_convert_the_model():
    """Same Parameters and keys; an optimizer made before goes on."""
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), apex_te.Linear(64, 16))
    params, keys = list(model.parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert amp.initialize(model, optimizer, opt_level="O7", verbosity=0)[0] is model
    assert [type(m) for m in model] == [apex_te.Linear, LayerNorm, apex_te.Linear]
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert list(model.state_dict()) == keys
    before = params[0].detach().clone()
    with amp.scale_loss(model(torch.randn(16, 32)).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert (params[0].dtype, before.dtype) == (BF16, BF16)
    assert not torch.equal(params[0], before)


def test_overrides():
    chosen = {
        "cast_model_type": BF16,
        "keep_batchnorm_fp32": "False",
        "master_weights": False,
        "loss_scale": "128.0",
        "cast_model_outputs": HALF,
    }
    model = make_net()
    optimizer = FusedAdam(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, num_losses=3, **chosen)
    assert model.norm.weight.dtype is BF16
    assert model(make_batch()[0]).dtype is HALF
    assert not optimizer.master_weights
    assert [scaler(i).loss_scale() for i in range(3)] == [128.0] * 3
    assert not scaler().dynamic
    amp.initialize(
        make_net(), opt_level="O1", loss_scale="dynamic", min_loss_scale=8.0, max_loss_scale=16.0,
        hysteresis=4, verbosity=0,
    )  # fmt: skip
    kept = scaler()
    assert (kept.min_loss_scale, kept.max_loss_scale, kept.hysteresis) == (8.0, 16.0, 4)
    model = amp.initialize(fp8_net(), opt_level="O7", cast_model_type=FLOAT, verbosity=0)
    assert model[0].weight.dtype is FLOAT
    model = amp.initialize(make_net(), opt_level="O1", patch_torch_functions=False, verbosity=0)
    assert model(make_batch()[0]).dtype is FLOAT
    model = amp.initialize(make_net(), opt_level="O4", cast_model_outputs=FLOAT, verbosity=0)
    assert model(make_batch()[0]).dtype is FLOAT


def test_prints_the_chosen_properties(capsys):
    amp.initialize(make_net(), opt_level="O2", loss_scale=64.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "apex_te.amp: opt_level O2"
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows == {
        "cast_model_type": ["torch.float16"] * 2,
        "patch_torch_functions": ["False"] * 2,
        "keep_batchnorm_fp32": ["True"] * 2,
        "master_weights": ["True"] * 2,
        "loss_scale": ["dynamic", "64.0"],
        "cast_model_outputs": ["None", "torch.float32"],
        "autocast_type": ["None"] * 2,
        "fp8_recipe": ["None"] * 2,
    }
    amp.initialize(fp8_net(), opt_level="O6")
    assert "DelayedScaling HYBRID" in capsys.readouterr().out
    amp.initialize(make_net(), opt_level="O2", verbosity=0)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_copies_and_pickles_keep_the_wrapping(device, level):
    model = amp.initialize(make_net(device), opt_level=level, verbosity=0)
    x = make_batch(device)[0]
    model.eval()
    expected = model(x)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert_same_bits(twin(x), expected)
        with torch.no_grad():
            twin.last.weight.zero_()
        assert not torch.equal(twin(x), expected)
        assert_same_bits(model(x), expected)
        assert twin.state_dict()["last.weight"].dtype is FLOAT


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_compile(level):
    model = amp.initialize(make_net(), opt_level=level, verbosity=0).eval()
    x = make_batch()[0]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), model(x))
    assert compiled(x).dtype is model(x).dtype


@pytest.mark.cover(0)
@pytest.mark.parametrize("level", ["O6", "O7"])
def test_compile_in_fp8(level):
    """Entering an FP8 region moves scales, outside what is compiled; the layers inside are."""
    runs = []
    for compiled in (True, False):
        model = amp.initialize(fp8_net(), opt_level=level, verbosity=0)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        run = []
        for i in range(3):
            out = call(torch.randn(32, 32, generator=torch.Generator().manual_seed(i)))
            out.square().mean().backward()
            run.append(out.detach())
        runs.append([*run, *(p.grad for p in model.parameters())])
    assert_same_bits(*runs)


def test_state_dict_is_float32_and_loads_back(device):
    model = amp.initialize(make_net(device), opt_level="O2", verbosity=0)
    saved = model.state_dict()
    assert model.first.weight.dtype is HALF
    assert_same_bits(saved["first.weight"], model.first.weight.float())
    assert model.state_dict(keep_vars=True)["first.weight"] is model.first.weight
    assert model.first.state_dict()["weight"].dtype is FLOAT
    other = make_net(device)
    other.load_state_dict(saved)
    again = amp.initialize(make_net(device), opt_level="O2", verbosity=0)
    again.load_state_dict(saved)
    assert_same_bits(again.first.weight, model.first.weight)


def test_signature_and_a_forward_of_ones_own():
    model = make_net()
    plain = inspect.signature(model.forward)
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert inspect.signature(model.forward) == plain
    model = make_net()
    model.forward = lambda x: model.last(model.first(x))
    expected = model(make_batch()[0])
    own = model.forward
    amp.initialize(model, opt_level="O0", verbosity=0)
    assert model.forward is not own
    assert_same_bits(model(make_batch()[0]), expected)
    amp.initialize(model, enabled=False)
    assert model.forward is own


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("levels", [("O2", "O5"), ("O5", "O0"), ("O0", "O2"), ("O2", "O2")])
def test_initialize_again(device, name, levels):
    """The second call alone decides; hooks, casts and masters of the first are gone."""
    model = make_net(device)
    params = list(model.parameters())
    optimizer = OPTIMIZERS[name](model.parameters())
    for level in levels:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        train(model, optimizer, 3, device=device)
    hooks = [len(m._state_dict_hooks) for m in model.modules()]
    assert hooks == [0 if levels[1] == "O0" else 1] * len(hooks)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    assert model.first.weight.dtype is TABLE[levels[1]][0]
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    if levels[1] == "O0" and name.startswith("fused"):
        assert not any("master_param" in state for state in optimizer.state.values())
    before = [p.detach().clone() for p in (params[0], params[4])]
    train(model, optimizer, 1, device=device)
    assert not torch.equal(params[0], before[0])
    assert not torch.equal(params[4], before[1])
    model, optimizer = amp.initialize(model, optimizer, enabled=False)
    assert "forward" not in model.__dict__
    assert not optimizer._optimizer_step_post_hooks
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, params, strict=True))
    loss = torch.ones((), requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


def test_moments_follow_the_dtype_of_plain_optimizers():
    model = make_net()
    optimizer = OPTIMIZERS["torch"](model.parameters())
    for level, dtype in (("O0", FLOAT), ("O3", HALF), ("O2", FLOAT)):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        moments = [s["exp_avg"] for s in optimizer.state.values()]
        assert {m.dtype for m in moments} <= {dtype}
        train(model, optimizer, 1)
        assert len(optimizer.state) == 6


def test_fp8_inputs_stay():
    model = nn.Identity()
    amp.initialize(model, opt_level="O2", cast_model_outputs=HALF, verbosity=0)
    x = torch.ones(3)
    assert model(x).dtype is HALF
    assert model(x.to(torch.float8_e4m3fn)).dtype is torch.float8_e4m3fn
    assert model(x.int()).dtype is torch.int32


def test_lists():
    models = [make_net(), make_net()]
    optimizers = [FusedAdam(m.parameters()) for m in models]
    prepared, same = amp.initialize(models, optimizers, opt_level="O5", verbosity=0)
    assert isinstance(prepared, list)
    assert prepared[1] is models[1]
    assert [a is b for a, b in zip(same, optimizers, strict=True)] == [True, True]
    assert [m.first.weight.dtype for m in models] == [BF16] * 2
    assert amp.initialize(make_net(), [], opt_level="O5", verbosity=0)[1] == []


REJECTED = [
    ({"opt_level": "02"}, ValueError, "opt_level must be one of O0, O1, O2, O3, O4, O5, O6, O7"),
    ({"opt_level": 2}, TypeError, "opt_level must be a string, got int"),
    ({"enabled": 1}, TypeError, "enabled must be a bool, got int"),
    ({"opt_level": "O1", "cast_model_type": HALF}, ValueError, "cast_model_type must be None"),
    ({"opt_level": "O4", "master_weights": True}, ValueError, "master_weights must be None"),
    ({"opt_level": "O1", "keep_batchnorm_fp32": True}, ValueError, "keep_batchnorm_fp32 must be"),
    ({"opt_level": "O2", "patch_torch_functions": True}, ValueError, "must be False or None with"),
    ({"opt_level": "O6", "cast_model_type": HALF}, ValueError, "cast_model_type must be torch.bf"),
    ({"cast_model_outputs": torch.int8}, TypeError, "cast_model_outputs must be torch.float32"),
    ({"opt_level": "O2", "master_weights": "yes"}, TypeError, "master_weights must be a bool"),
    ({"loss_scale": -1}, ValueError, 'loss_scale must be "dynamic" or above 0, got -1'),
    ({"loss_scale": "big"}, ValueError, "loss_scale must be \"dynamic\" or above 0, got 'big'"),
    ({"num_losses": 0}, ValueError, "num_losses must be at least 1, got 0"),
    ({"verbosity": "1"}, TypeError, "verbosity must be an int, got str"),
    ({"hysteresis": 0}, ValueError, "hysteresis must be at least 1, got 0"),
]


@pytest.mark.parametrize(("options", "error", "message"), REJECTED)
def test_rejects(options, error, message):
    model = make_net()
    with pytest.raises(error) as raised:
        amp.initialize(model, **options)
    assert message.replace("torch.bf", "torch.bfloat16") in str(raised.value)
    assert "forward" not in model.__dict__


def test_rejects_models_and_optimizers():
    model = make_net()
    with pytest.raises(TypeError, match=r"models must be torch.nn.Module objects, got function"):
        amp.initialize([model, make_net])
    with pytest.raises(ValueError, match="must be wrapped for data parallelism afterwards, got D"):
        amp.initialize(nn.DataParallel(model))
    with pytest.raises(TypeError, match=r"optimizers must be torch.optim.Optimizer objects, got"):
        amp.initialize(model, [model])
    with pytest.raises(ValueError, match=r"float32 with opt_level O1, got torch.float16 for first"):
        amp.initialize(make_net().half(), opt_level="O1")
