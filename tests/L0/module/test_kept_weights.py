"""keep_fp8_weights: with kept FP8 copies of weights, bits are those of casts at each forward."""

import copy
import warnings

import pytest
import torch
from layer_kinds import HEADS, with_repeatable_core
from schemes import FIRST_STEP, SCHEMES
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import fp8_autocast, fp8_model_init, fp8_statistics, keep_fp8_weights
from apex_te.fp8.scheme.block import BlockQuantizer
from apex_te.module._core import kept_weights
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.module.transformer_layer import TransformerLayer
from apex_te.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling

WIDTH = 64
KINDS = {
    "Linear": lambda **more: Linear(WIDTH, WIDTH, **more),
    "LayerNormLinear": lambda **more: LayerNormLinear(WIDTH, WIDTH, **more),
    "LayerNormMLP": lambda **more: LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", **more),
    "TransformerLayer": lambda **more: TransformerLayer(
        WIDTH, 2 * WIDTH, HEADS, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        fuse_qkv_params=True, **more,
    ),
}  # fmt: skip
RECIPES = SCHEMES | {
    "first step": FIRST_STEP,
    "most recent": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", interval=2),
    "tensorwise, powers of two": CurrentScaling(pow2=True, eps=1e-3),
    "server": BlockScaling(scales="server", eps=1e-4),
}
KEPT = ("delayed", "tensorwise", "blockwise")


def build(kind="LayerNormMLP", device="cpu", **more):
    torch.manual_seed(3)
    return with_repeatable_core(KINDS[kind](device=device, **more), device)


def adam(params, **more):
    return FusedAdam(params, lr=2e-2, weight_decay=0.1, **more)


def batch(device, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 2, WIDTH, generator=generator) * (1 + step % 3)
    return x.to(device, dtype).requires_grad_()


def state_of(model):
    """Parameters and FP8 state."""
    found = list(model.parameters())
    for module in model.modules():
        state = getattr(module, "fp8_state", None)
        if state is not None and state.allocated:
            found += [state.scale_fwd, state.amax_history_fwd, state.scale_bwd]
    return [t.detach().clone() for t in found]


def train(model, optimizer, recipe, steps, device="cpu", between=None, call=None, first=0, **more):
    """Outputs, gradients, parameters and FP8 state of each step."""
    found = []
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        x = batch(device, step, dtype)
        with fp8_autocast(recipe):
            out = (model if call is None else call)(x, **more)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [out.detach(), x.grad, *state_of(model)]
        if between is not None:
            between(model, optimizer, step)
    return found


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i}"


def compare(device, recipe, steps=6, kind="LayerNormMLP", make=adam, options=None, **more):
    """Trains the same model with casts and with kept copies."""
    model = build(kind, device, **(options or {}))
    other = copy.deepcopy(model)
    keep_fp8_weights(other)
    expected = train(model, make(model.parameters()), recipe, steps, device, **more)
    assert_equal(train(other, make(other.parameters()), recipe, steps, device, **more), expected)


@pytest.fixture
def casts(monkeypatch):
    """One entry for each use of kept copies: True if the weight was cast, by host or device."""
    made = []
    check, into = kept_weights.check_kept_scales, BlockQuantizer.quantize_into
    current = kept_weights.KeptCopies.current

    def checking(scales, inverses, kept, amaxes, flags):
        check(scales, inverses, kept, amaxes, flags)
        made.append(not int(flags[0]))

    def casting(self, *args):
        made.append(True)
        into(self, *args)

    def reading(self, weight, quantizer, for_cache):
        is_new = self._stamp != kept_weights.stamp(weight)
        before = len(made)
        copies = current(self, weight, quantizer, for_cache)
        if len(made) == before:
            made.append(False)
        made[-1] = made[-1] or is_new
        return copies

    monkeypatch.setattr(kept_weights, "check_kept_scales", checking)
    monkeypatch.setattr(BlockQuantizer, "quantize_into", casting)
    monkeypatch.setattr(kept_weights.KeptCopies, "current", reading)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_steps(device, recipe, kind):
    compare(device, RECIPES[recipe], 20, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", KEPT)
def test_master_weights(device, recipe, dtype):
    compare(
        device, RECIPES[recipe], 6, "Linear", lambda p: adam(p, master_weights=True),
        {"params_dtype": dtype},
    )  # fmt: skip


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "server", "most recent"])
def test_no_forward_casts_what_the_step_wrote(device, casts, recipe):
    model = build("LayerNormMLP", device)
    keep_fp8_weights(model)
    train(model, adam(model.parameters()), RECIPES[recipe], 8, device)
    assert len(casts) == 2 * 8
    assert all(casts[:2])
    assert not any(casts[2:])


def test_current_scaling_casts_once_a_step(device, casts):
    """Both copies at the first of three microbatches."""
    model = build("Linear", device)
    keep_fp8_weights(model)
    optimizer = adam(model.parameters())
    for step in range(4):
        for i in range(3):
            with fp8_autocast(RECIPES["tensorwise"]):
                out = model(batch(device, 3 * step + i))
            out.square().mean().backward()
        optimizer.step()
    assert casts == [True, False, False] * 4


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("recipe", KEPT)
def test_programs_read_kept_copies(recipe, kind):
    """From the third step on a program runs the forward, and another the backward."""
    model = build(kind)
    keep_fp8_weights(model)
    train(model, adam(model.parameters()), RECIPES[recipe], 4)
    (programs,) = [p for p in model._modes.programs.values() if p.kept]
    (known,) = programs._known.values()
    assert known.program is not None
    assert all(backward.program is not None for backward in known.backwards.values())


def test_the_step_writes_the_copies_of_a_cast(device):
    """Data and scales, before any forward could cast again."""
    for recipe in (RECIPES["delayed"], RECIPES["blockwise"]):
        model = build("Linear", device)
        keep_fp8_weights(model)
        train(model, adam(model.parameters()), recipe, 3, device)
        kept = model._modes.kept._found[0]
        held = [copy.clone() for copy in kept.copies]
        with fp8_autocast(recipe):
            quantizer = model._fp8.quantizers(*apex_te.fp8.delayed.ranks.intern(recipe),
                                              torch.device(device)).recording[0].weight  # fmt: skip
            amax = quantizer.amax.clone() if hasattr(quantizer, "amax") else None
            cast = quantizer.quantize(model.weight.detach(), True, True)[0]
        assert_equal(
            [t.view(torch.uint8) for t in (held[0], held[2])],
            [t.view(torch.uint8) for t in (cast.rowwise, cast.columnwise)],
        )
        assert_equal([held[1], held[3]], [cast.rowwise_scale_inv, cast.columnwise_scale_inv])
        if amax is not None:
            assert amax.item() == 0
            assert torch.equal(kept.amax, quantizer.amax)


OPTIMIZERS = {
    "FusedLAMB": lambda p: FusedLAMB(p, lr=1e-2),
    "FusedSGD": lambda p: FusedSGD(p, lr=1e-1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "bfloat16 moments": lambda p: adam(p, exp_avg_dtype=torch.bfloat16),
    "L2": lambda p: adam(p, adam_w_mode=False, bias_correction=False, betas=(0.5, 0.9)),
    "capturable": lambda p: adam(p, capturable=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("recipe", KEPT)
def test_other_optimizers(device, recipe, make):
    compare(device, RECIPES[recipe], 5, make=OPTIMIZERS[make])


def _in_place(model, optimizer, step):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)


def _loaded(model, optimizer, step):
    changed = {k: v * 2 if v.is_floating_point() else v for k, v in model.state_dict().items()
               if "fp8_state" not in k}  # fmt: skip
    model.load_state_dict(changed, strict=False)


def _new_data(model, optimizer, step):
    for p in model.parameters():
        p.data = p.data * 0.5


def _new_parameter(model, optimizer, step):
    old = model.fc1_weight
    model.fc1_weight = torch.nn.Parameter(old.detach() * 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def _reset(model, optimizer, step):
    model.fp8_state.reset()


def _new_scale(model, optimizer, step):
    with torch.no_grad():
        model.fp8_state.scale_fwd.mul_(0.25)
        model.fp8_state.scale_inv_fwd.mul_(4.0)


def _evaluated(model, optimizer, step):
    with torch.no_grad(), fp8_autocast(SCHEMES["delayed"]):
        model(batch(next(model.parameters()).device, 100 + step))


def _moved(model, optimizer, step):
    model.to(next(model.parameters()).device).eval().train()
    model.double().float()


def _calibrated(model, optimizer, step):
    with torch.no_grad(), fp8_autocast(SCHEMES["delayed"], enabled=False, calibrating=True):
        model(batch(next(model.parameters()).device, 100 + step))


def _flushed(model, optimizer, step):
    apex_te.flush_fp8_state()


CHANGES = [
    _in_place, _loaded, _new_data, _new_parameter, _reset, _new_scale, _evaluated, _moved,
    _calibrated, _flushed,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("recipe", KEPT)
def test_changes_between_steps(device, recipe, change):
    if recipe != "delayed" and change in (_reset, _new_scale):
        pytest.skip("only delayed scaling keeps a scale between steps")

    def between(model, optimizer, step):
        if step % 2:
            change(model, optimizer, step)

    compare(device, RECIPES[recipe], 6, between=between)


def test_other_recipe_at_each_step(device):
    model = build("LayerNormMLP", device)
    other = copy.deepcopy(model)
    keep_fp8_weights(other)
    names = ("delayed", "blockwise", "tensorwise", "server", "most recent")

    def run(model):
        optimizer, found = adam(model.parameters()), []
        for step in range(12):
            found += train(model, optimizer, RECIPES[names[step % 5]], 1, device, first=step)
        apex_te.flush_fp8_state()
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FP8State: amax history")
        assert_equal(run(other), run(model))


@pytest.mark.parametrize(
    "flags", [(None,) * 3, (True, False, False), (True, None, False), (True, True, False)]
)
@pytest.mark.parametrize("recipe", KEPT)
def test_microbatches(device, recipe, flags):
    def run(model):
        optimizer, found = adam(model.parameters()), []
        for step in range(5):
            for i, flag in enumerate(flags):
                x = batch(device, 10 * step + i)
                with fp8_autocast(RECIPES[recipe]):
                    out = model(x, is_first_microbatch=flag)
                out.square().mean().backward()
                found += [out.detach(), x.grad]
            optimizer.step()
            optimizer.zero_grad()
            found += state_of(model)
        return found

    model = build("LayerNormMLP", device)
    other = copy.deepcopy(model)
    keep_fp8_weights(other)
    assert_equal(run(other), run(model))


@pytest.mark.parametrize("recipe", KEPT)
def test_two_forwards_before_their_backwards(device, recipe):
    """The order of a pipeline; the second forward may have another scale than the first."""

    def run(model):
        optimizer, found = adam(model.parameters()), []
        for step in range(5):
            waiting = []
            for i in range(2):
                x = batch(device, 10 * step + i)
                with fp8_autocast(RECIPES[recipe]):
                    waiting.append((x, model(x)))
            for x, out in waiting:
                out.square().mean().backward()
                found += [out.detach(), x.grad]
            optimizer.step()
            optimizer.zero_grad()
            found += state_of(model)
        return found

    model = build("LayerNormMLP", device)
    other = copy.deepcopy(model)
    keep_fp8_weights(other)
    assert_equal(run(other), run(model))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", KEPT)
def test_recompute(device, recipe, reentrant):
    model = build("TransformerLayer", device)
    other = copy.deepcopy(model)
    keep_fp8_weights(other)
    found = [
        train(m, adam(m.parameters()), RECIPES[recipe], 5, device,
              call=lambda x, m=m: checkpoint(m, x, use_reentrant=reentrant))
        for m in (model, other)
    ]  # fmt: skip
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("overflows", [(0, 2), (3,), (0, 1, 4, 5)])
@pytest.mark.parametrize("recipe", KEPT)
def test_skipped_steps(device, recipe, overflows):
    """Steps that a GradScaler skips on the device, also at the first of all."""

    def run(model):
        optimizer, found = adam(model.parameters()), []
        scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=8.0)
        for step in range(8):
            x = batch(device, step)
            with fp8_autocast(RECIPES[recipe]):
                out = model(x)
            loss = scaler.scale(out.square().mean())
            loss.backward()
            if step in overflows:
                model.fc1_weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [out.detach(), *state_of(model)]
        return found

    model = build("LayerNormMLP", device)
    other = copy.deepcopy(model)
    keep_fp8_weights(other)
    assert_equal(run(other), run(model))


@pytest.mark.parametrize("recipe", KEPT)
def test_resumed(device, recipe, tmp_path):
    model = build("LayerNormMLP", device)
    keep_fp8_weights(model)
    optimizer = adam(model.parameters())
    train(model, optimizer, RECIPES[recipe], 3, device)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    expected = train(model, optimizer, RECIPES[recipe], 3, device, first=3)

    resumed = build("LayerNormMLP", device)
    keep_fp8_weights(resumed)
    optimizer = adam(resumed.parameters())
    train(resumed, optimizer, RECIPES[recipe], 2, device, first=50)  # other copies, to be dropped
    saved = torch.load(tmp_path / "c", weights_only=True)
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert_equal(train(resumed, optimizer, RECIPES[recipe], 3, device, first=3), expected)


def test_nan_weights(device):
    model = build("Linear", device)
    other = copy.deepcopy(model)
    keep_fp8_weights(other)

    def between(model, optimizer, step):
        with torch.no_grad():
            model.weight[0, 0] = float("nan") if step == 2 else 1.0

    found = [
        train(m, adam(m.parameters()), RECIPES["delayed"], 6, device, between=between)
        for m in (model, other)
    ]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_backward_after_the_step_is_refused(device, recipe):
    model = build("Linear", device)
    keep_fp8_weights(model)
    optimizer = adam(model.parameters())
    train(model, optimizer, RECIPES[recipe], 2, device)
    with fp8_autocast(RECIPES[recipe]):
        out = model(batch(device, 5))
    out.sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_weights_that_do_not_take_part(device):
    """Odd extents, weights held in FP8, shared parameters, a frozen weight."""
    with fp8_model_init(recipe=SCHEMES["delayed"]):
        held = Linear(WIDTH, WIDTH, device=device)
    models = {
        "odd": torch.nn.Sequential(Linear(WIDTH, 40, device=device), Linear(40, 24, device=device)),
        "shared": torch.nn.Sequential(*[Linear(WIDTH, WIDTH, device=device) for _ in range(2)]),
        "frozen": Linear(WIDTH, WIDTH, device=device),
        "held": held,
    }
    models["shared"][1].weight = models["shared"][0].weight
    models["frozen"].weight.requires_grad_(False)
    for name, model in models.items():
        other = copy.deepcopy(model)
        keep_fp8_weights(other)
        found = [
            train(m, adam([p for p in m.parameters() if p.requires_grad],
                          master_weights=name == "held"), SCHEMES["delayed"], 4, device)
            for m in (model, other)
        ]  # fmt: skip
        for a, b in zip(*found, strict=True):
            assert torch.equal(a.float(), b.float()), name


@pytest.mark.parametrize("recipe", KEPT)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_weights_of_groups(device, recipe, on_device, single):
    splits = [16, 0, 12, 4]
    splits = torch.tensor(splits, dtype=torch.int32, device=device) if on_device else splits
    torch.manual_seed(3)
    model = GroupedLinear(4, WIDTH, WIDTH, device=device, single_parameter=single)
    other = copy.deepcopy(model)
    keep_fp8_weights(other)
    found = [
        train(m, adam(m.parameters()), RECIPES[recipe], 4, device,
              call=lambda x, m=m: m(x.view(-1, WIDTH), splits))
        for m in (model, other)
    ]  # fmt: skip
    assert_equal(found[1], found[0])


def test_turned_off_and_copied(device):
    model = build("Linear", device)
    keep_fp8_weights(model)
    train(model, adam(model.parameters()), RECIPES["delayed"], 2, device)
    assert copy.deepcopy(model)._modes.kept is None
    keep_fp8_weights(model, enabled=False)
    assert model._modes.kept is None


def test_arguments():
    with pytest.raises(TypeError, match="keep_fp8_weights: model must be"):
        keep_fp8_weights(torch.ones(1))
    with pytest.raises(TypeError, match="keep_fp8_weights: enabled must be"):
        keep_fp8_weights(build("Linear"), 1)
    with pytest.warns(UserWarning, match="model must contain FP8 layers"):
        keep_fp8_weights(torch.nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep_fp8_weights(torch.nn.Sequential(torch.nn.Linear(4, 4), build("Linear")))


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", KEPT)
def test_compiled_forward(recipe):
    def call(model):
        return torch.compile(model, backend="eager")

    model = build("Linear")
    other = copy.deepcopy(model)
    keep_fp8_weights(other)
    found = [
        train(m, adam(m.parameters()), RECIPES[recipe], 4, call=call(m)) for m in (model, other)
    ]
    assert_equal(found[1], found[0])


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", KEPT)
def test_a_captured_step_ends_it(recipe):
    """Replays of a captured step change weights unseen by the host."""

    def run(model):
        optimizer, found = adam(model.parameters(), capturable=True), []
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        graph = None
        for step in range(6):
            x = batch("cuda", step)
            with fp8_autocast(RECIPES[recipe]):
                out = model(x)
            for p in model.parameters():
                p.grad.zero_()
            out.square().mean().backward()
            if step == 2:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            if graph is None:
                optimizer.step()
            else:
                graph.replay()
            found += [out.detach(), *state_of(model)]
        return found

    model = build("LayerNormMLP", "cuda")
    other = copy.deepcopy(model)
    keep_fp8_weights(other)
    assert_equal(run(other), run(model))


@pytest.mark.parametrize("recipe", KEPT)
@pytest.mark.parametrize("is_own", [True, False])
def test_statistics_see_kept_weights(device, recipe, is_own):
    """A recompute, whose casts are not reported, finds what forward saved."""
    found = []
    for keeps in (False, True):
        model = torch.nn.Sequential(build(device=device, checkpoint=is_own))
        keep_fp8_weights(model, keeps)
        call = None if is_own else lambda x, m=model: checkpoint(m, x, use_reentrant=False)
        with fp8_statistics(model) as stats:
            bits = train(model, adam(model.parameters()), SCHEMES[recipe], 3, device, call=call)
        noted = stats.to_dict()
        assert len(noted["0.fc1.weight"]["amax"]) == 3
        found.append((bits, noted))
    (bits, noted), (expected, others) = found
    assert noted == others
    for a, b in zip(bits, expected, strict=True):
        assert torch.equal(a, b)
