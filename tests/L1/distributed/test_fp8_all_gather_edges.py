"""FP8 all-gathers of FSDP2: errors on all ranks, checkpoints, values, weights that are replaced."""

import pytest
import torch
from gathers import DELAYED, RECIPES, counted, linears, sharded, train_rows
from on_rank import alone, told
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import apex_te
from apex_te import fp8_autocast, recipe
from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather


def _forward(model, scaling, group=None):
    with fp8_autocast(True, scaling, group):
        model(torch.ones(16, 16)).sum().backward()


def _errors(rank, case, gathered, used, rows=16):
    group = alone(rank) if case == "group" else None
    build = linears(16, rows)
    model = sharded(case != "late", gathered, torch.float32, "cpu", build=build)
    if case == "late":
        return told(enable_fp8_all_gather, model)
    return told(_forward, model, used, group)


LOCAL = recipe.DelayedScaling(amax_history_len=4, reduce_amax=False)
BLOCKS, CURRENT, POW2 = (
    RECIPES["blockwise"],
    RECIPES["tensorwise"],
    recipe.CurrentScaling(pow2=True),
)
OTHER = "ValueError: fp8_autocast: fp8_recipe must quantize weights as the recipe of enable"
REDUCED = "ValueError: fp8_autocast: amaxes of weights that are gathered in FP8 must be reduced"
ERRORS = {  # what gathers and what runs, and the error
    "late": (None, None, "ValueError: enable_fp8_all_gather: model must not be sharded yet"),
    "block": (BLOCKS, BLOCKS, "NotImplementedError: enable_fp8_all_gather: shards must be rows in"),
    "recipe": (DELAYED, CURRENT, OTHER),
    "options": (CURRENT, recipe.CurrentScaling(pow2=True), OTHER),
    "group": (DELAYED, DELAYED, REDUCED),
    "local": (DELAYED, LOCAL, REDUCED),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_on_all_ranks(two_ranks, case):
    gathered, used, expected = ERRORS[case]
    messages = two_ranks.run(_errors, case, gathered, used, 200 if case == "block" else 16)
    assert all(m.startswith(expected) for m in messages), messages


def test_errors_before_sharding():
    model = linears(16, 16)(torch.float32, "cpu")
    with pytest.raises(NotImplementedError, match="MXFP8"):
        enable_fp8_all_gather(model, recipe.MXFP8Scaling())
    with pytest.raises(TypeError, match="recipe must be a recipe"):
        enable_fp8_all_gather(model, 3)
    with pytest.raises(TypeError, match="model must be a torch"):
        enable_fp8_all_gather(model.layers[0].weight)
    with pytest.raises(ValueError, match="got none"):
        enable_fp8_all_gather(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match="float64 for weight"):
        enable_fp8_all_gather(linears(16, 16)(torch.float64, "cpu"))
    parts = apex_te.Linear(16, 300, parameters_split={"a": 100, "b": 200})
    with pytest.raises(NotImplementedError, match="parts of a weight must be of whole 128-row"):
        enable_fp8_all_gather(parts, recipe.BlockScaling())
    enable_fp8_all_gather(model)
    with pytest.raises(ValueError, match="must be called once"):
        enable_fp8_all_gather(model)


def _outside(rank):
    """The output has the values of the codes, and the gradient arrives at the shards."""
    scaling = RECIPES["tensorwise"]
    model = sharded(True, scaling, torch.float32, "cpu", build=linears(16, 32, bias=False))
    weight = model.layers[0].weight.full_tensor()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    out = model(x)
    model.layers[0].unshard()
    values = model.layers[0].weight.dequantize().detach()
    model.layers[0].reshard()
    assert torch.equal(out, torch.nn.functional.linear(x, values))
    assert not torch.equal(values, weight)
    assert (values - weight).norm() / weight.norm() < 0.04
    out.sum().backward()
    total = x.sum(0)
    distributed.all_reduce(total)
    expected = (total / 2).expand(32, 16)
    torch.testing.assert_close(model.layers[0].weight.grad.full_tensor(), expected)


def test_outside_of_autocast(two_ranks):
    two_ranks.run(_outside)


def _states(rank, folder):
    from torch.distributed import checkpoint as dcp

    def new():
        model = sharded(True, DELAYED, torch.float32, "cpu", build=linears(16, 32, 16))
        apex_te.init_fp8_state(model, DELAYED)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def steps(model, optimizer, first, count):
        losses = []
        for i in range(first, first + count):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * i + rank))
            with fp8_autocast(True, DELAYED):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(3)
    model, optimizer = new()
    steps(model, optimizer, 0, 3)
    apex_te.flush_fp8_state()
    state = model.state_dict()
    for value in state.values():
        if isinstance(value, DTensor):
            assert type(value.to_local()) is torch.Tensor
            assert type(value._local_tensor) is torch.Tensor
            assert value.dtype is torch.float32
    dcp.save({"model": state, "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
    going_on = steps(model, optimizer, 3, 3)
    apex_te.flush_fp8_state()

    torch.manual_seed(4)
    model, optimizer = new()
    steps(model, optimizer, 9, 1)  # of what is loaded all is then stale
    apex_te.flush_fp8_state()
    other = {"optimizer": optimizer.state_dict()}
    dcp.load(other, checkpoint_id=folder)
    optimizer.load_state_dict(other["optimizer"])
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    model.load_state_dict(state)
    for key, value in model.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(value, full[key]), key
    assert steps(model, optimizer, 3, 3) == going_on
    apex_te.flush_fp8_state()
    one = linears(16, 32, 16)(torch.float32, "cpu")
    one.load_state_dict(full)


def test_checkpoints(two_ranks, tmp_path):
    two_ranks.run(_states, str(tmp_path))


def _meta(rank, assign):
    scaling = RECIPES["tensorwise"]
    whole = linears(16, 32)(torch.float32, "cpu")
    losses = []
    for fp8 in (True, False):
        model = sharded(fp8, scaling, torch.float32, "meta", build=linears(16, 32))
        if assign:
            like = model.state_dict()
            parts = {
                k: torch.distributed.tensor.distribute_tensor(v, like[k].device_mesh)
                for k, v in whole.state_dict().items()
            }
            parts = {k: v.redistribute(placements=like[k].placements) for k, v in parts.items()}
            model.load_state_dict(parts, assign=True)
        else:
            model.to_empty(device="cpu")
            with torch.no_grad():
                for key, value in model.named_parameters():
                    part = whole.get_parameter(key).chunk(2)[rank]
                    value.to_local().copy_(part)
        with fp8_autocast(True, scaling):
            loss = model(torch.ones(16, 16) + rank).square().mean()
        loss.backward()
        losses.append(loss.item())
        if fp8:
            with fp8_autocast(True, scaling), torch.no_grad(), counted() as counts:
                model(torch.ones(16, 16))
            assert max(counts.gathered) < 2 * 16 * 32
    assert losses[0] == losses[1]
    return losses[0]


@pytest.mark.parametrize("assign", [False, True])
def test_meta_device(two_ranks, assign):
    assert all(loss > 0 for loss in two_ranks.run(_meta, assign))


def _changed_by_hand(rank, how):
    """Amaxes are taken again whatever wrote to the weights."""
    scaling = RECIPES["tensorwise"]
    model = sharded(True, scaling, torch.float32, "cpu", build=linears(16, 32, bias=False))
    x = torch.randn(8, 16)

    def run():
        with fp8_autocast(True, scaling), torch.no_grad(), counted() as counts:
            out = model(x)
        return out, len(counts.reduced)

    before, first = run()
    again, second = run()
    assert torch.equal(before, again)
    model.reshard()
    with torch.no_grad():
        weights = list(model.parameters())
        if how == "foreach":
            torch._foreach_mul_(weights, 4.0)
        elif how == "local":
            weights[0].to_local().mul_(4.0)
        else:
            model.load_state_dict({k: v * 4.0 for k, v in model.state_dict().items()})
    after, third = run()
    assert torch.equal(after, before * 4.0)  # a power of two only moves the scale
    return first, second, third


@pytest.mark.parametrize("how", ["foreach", "local", "load"])
def test_weights_changed_without_an_optimizer(two_ranks, how):
    assert two_ranks.run(_changed_by_hand, how) == [(1, 0, 1)] * 2


def _evaluated(rank):
    """An evaluation before training and between steps changes nothing of it."""
    scaling = RECIPES["first"]
    found = []
    for evaluate in (True, False):
        model = sharded(True, scaling, torch.float32, "cpu", build=linears(16, 32, 16))
        for _ in range(2):
            if evaluate:
                with torch.no_grad(), fp8_autocast(True, scaling):
                    model(torch.full((16, 16), 100.0))
                model.reshard()
            losses, _ = train_rows(rank, model, scaling, 2)
            found.append(losses)
        found.append(torch.cat([layer.fp8_state.scale_fwd for layer in model.layers]))
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        assert torch.equal(ours, theirs)


def test_an_evaluation_changes_nothing(two_ranks):
    two_ranks.run(_evaluated)


def _evaluated_between(rank, name, kind, when):
    """Losses of steps with evaluations between, with gathers of FP8 data and without."""
    found, numbers = [], []
    for fp8 in (True, False):
        torch.manual_seed(5)
        if kind == "linears":
            model = linears(16, 32, 16)(torch.float32, "cpu")
        else:
            model = apex_te.TransformerLayer(
                16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=False
            )
        if fp8:
            enable_fp8_all_gather(model, RECIPES[name])
        fully_shard(model)  # the root, which FSDP2 keeps gathered after a forward
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        losses = []

        def evaluate(model=model, losses=losses):
            x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(rank))
            with torch.no_grad(), fp8_autocast(True, RECIPES[name]):
                losses.append(model(x).square().mean())

        for step in range(4):
            for micro in range(2):
                generator = torch.Generator().manual_seed(10 * step + 2 * micro + rank)
                x = torch.randn(8, 2, 16, generator=generator) * (step + 1)
                if when == "microbatches":
                    evaluate()
                with fp8_autocast(True, RECIPES[name]):
                    loss = model(x).square().mean()
                if when == "forward only" and micro == 0:
                    losses.append(loss.detach())
                    continue
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if when == "steps":
                evaluate()
        apex_te.flush_fp8_state()
        found.append(torch.stack(losses))
        numbers.append({k: v.full_tensor() for k, v in model.state_dict().items()
                        if isinstance(v, DTensor)})  # fmt: skip
    assert torch.equal(found[0], found[1]), (found[0] - found[1]).abs()
    assert all(torch.equal(numbers[0][key], numbers[1][key]) for key in numbers[1])


@pytest.mark.parametrize("when", ["steps", "microbatches", "forward only"])
@pytest.mark.parametrize("kind", ["linears", "layer"])
@pytest.mark.parametrize("name", ["delayed", "first", "tensorwise"])
def test_an_evaluation_keeps_no_old_scales(two_ranks, name, kind, when):
    """Weights that FSDP2 keeps gathered after an evaluation get the scales of the next step."""
    two_ranks.run(_evaluated_between, name, kind, when)
