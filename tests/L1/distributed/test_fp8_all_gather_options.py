"""FP8 all-gathers of FSDP2: weights that are quantized together, and the options of FSDP2."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from gathers import DELAYED, RECIPES, Small, assert_alike, linears, sharded, train_rows, weights_of
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import apex_te
from apex_te import fp8_autocast, fp8_model_init, recipe
from apex_te.distributed.fsdp import fp8_all_gather as fsdp
from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather
from apex_te.fp8.scheme.current import CurrentScalingQuantizer
from apex_te.fp8.scheme.delayed import DelayedScalingQuantizer
from apex_te.fp8.statistics import fp8_statistics
from apex_te.ops import multi_tensor


@contextmanager
def launches():
    """Counts of what quantizes shards: together, and one by one."""
    counts = {"together": 0, "alone": 0}
    kinds = (CurrentScalingQuantizer, DelayedScalingQuantizer)
    kept = [kind.quantize_rows for kind in kinds]
    quantize = multi_tensor.quantize

    def counting(what, original):
        def call(*args, **kwargs):
            counts[what] += 1
            return original(*args, **kwargs)

        return call

    multi_tensor.quantize = counting("together", quantize)
    for kind, original in zip(kinds, kept, strict=True):
        kind.quantize_rows = counting("alone", original)
    try:
        yield counts
    finally:
        multi_tensor.quantize = quantize
        for kind, original in zip(kinds, kept, strict=True):
            kind.quantize_rows = original


def steps(rank, model, scaling, count=4, features=16, watched=None):
    """Losses, and launches of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses, found = [], []
    for step in range(count):
        generator = torch.Generator().manual_seed(5 * step + rank)
        x = torch.randn(16, features, generator=generator)
        watch = nullcontext() if watched is None or step % 2 else fp8_statistics(watched)
        with launches() as counts, watch:
            with fp8_autocast(True, scaling):
                loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        found.append((counts["together"], counts["alone"]))
    apex_te.flush_fp8_state()
    return torch.stack(losses), found


def _layers(rank, name, kind):
    """Compares two groups of two weights each, gathered as FP8 data, with gathered values."""
    scaling, results = RECIPES[name], []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "policy" else None
    middle = 19 if kind == "uneven" else 32

    def build(dtype, device):
        torch.manual_seed(2)
        kwargs = {"params_dtype": dtype, "device": device, "activation": "relu"}
        return Small(*[apex_te.LayerNormMLP(16, middle, **kwargs) for _ in range(2)])

    for fp8 in (True, False):
        mesh = (2, 2) if kind == "replicas" else None
        model = sharded(fp8, scaling, torch.float32, "cpu", build=build, policy=policy, mesh=mesh)
        watched = model.layers[0] if kind == "watched" else None
        losses, counts = steps(rank, model, scaling, watched=watched)
        results.append((losses, weights_of(model), counts))
    (*ours, counts), (*theirs, _) = results
    assert_alike(ours, theirs)
    return counts


# A forward and a backward gather of each group; the first forward finds out what is a group.
USUAL = [(2, 4), (4, 0), (4, 0), (4, 0)]


@pytest.mark.parametrize("kind", ["plain", "policy", "uneven", "watched"])
@pytest.mark.parametrize("name", ["delayed", "first", "tensorwise"])
def test_one_launch_a_gather(two_ranks, name, kind):
    for counts in two_ranks.run(_layers, name, kind):
        assert counts == USUAL


def test_replicas(four_ranks):
    for counts in four_ranks.run(_layers, "tensorwise", "replicas"):
        assert counts == USUAL


def test_other_schemes_go_alone(two_ranks):
    for counts in two_ranks.run(_layers, "hif8", "plain"):
        assert counts == [(0, 8)] * 4


class _Mixed(torch.nn.Module):
    """Two modules with a recipe each, which FSDP2 gathers at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = (apex_te.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        with fp8_autocast(True, RECIPES["tensorwise"]):
            return self.second(x)


def _mixed(rank):
    results = []
    for fp8 in (True, False):
        model = _Mixed()
        if fp8:
            enable_fp8_all_gather(model.first, DELAYED)
            enable_fp8_all_gather(model.second, RECIPES["tensorwise"])
        fully_shard(model)
        losses, counts = steps(rank, model, DELAYED)
        results.append((losses, counts))
    assert torch.equal(results[0][0], results[1][0])
    return results[0][1]


def test_two_recipes_in_one_group(two_ranks):
    for counts in two_ranks.run(_mixed):
        assert counts == [(2, 0)] * 4


def _scales(rank):
    """Scales that move while weights stay: codes and inverse scales go with them."""
    scaling = recipe.DelayedScaling(amax_history_len=2)
    model = sharded(True, scaling, torch.float32, "cpu", build=linears(16, 32, bias=False))
    x, outputs = torch.randn(16, 16), []
    for _ in range(3):
        with fp8_autocast(True, scaling):
            out = model(x)
        out.sum().backward()
        model.layers[0].unshard()
        weight = model.layers[0].weight
        outputs.append((out.detach(), weight._held.rowwise_scale_inv.item()))
        model.reshard()
    expected = [1.0, *(model.layers[0].fp8_state.scale_inv_fwd[1].item() for _ in range(2))]
    assert [inverse for _, inverse in outputs] == expected
    assert expected[1] != 1.0
    torch.testing.assert_close(outputs[0][0], outputs[2][0], rtol=0.1, atol=0.1)


def test_scales_move_without_weights(two_ranks):
    two_ranks.run(_scales)


@torch.no_grad()
def _change(model):
    for parameter in model.parameters():
        parameter.mul_(1.5)


def _interrupted(rank):
    """A gather that fails half way leaves nothing behind that a later one would send."""
    scaling = RECIPES["tensorwise"]
    results = []
    for interrupt in (True, False):
        model = _Mixed()
        enable_fp8_all_gather(model, scaling)
        fully_shard(model)
        steps(rank, model, scaling, 2)
        model.reshard()
        _change(model)
        if interrupt:
            shard = model.first.weight._local_tensor
            source = shard.source
            sent = shard.fsdp_pre_all_gather(
                source.mesh, source.size, None, None, MixedPrecisionPolicy()
            )
            assert sent[0][0].dtype is torch.uint8
        _change(model)
        losses, _ = steps(rank, model, scaling, 2)
        results.append(losses)
    assert torch.equal(*results)


def test_an_interrupted_gather(two_ranks):
    two_ranks.run(_interrupted)


def _untold(rank):
    """Where torch does not say what it gathers at once, weights are quantized one by one."""
    kept = fsdp.params_gathered_with
    fsdp.params_gathered_with = lambda param: [param]
    try:
        return _layers(rank, "tensorwise", "plain")
    finally:
        fsdp.params_gathered_with = kept


def test_without_torch_telling(two_ranks):
    for counts in two_ranks.run(_untold):
        assert counts == [(8, 0)] * 4


def _after_forward(rank, kind, after):
    """Losses and weights, or what a forward says, of weights kept by ``after`` ranks."""
    scaling = RECIPES["tensorwise"]
    if kind == "held":
        with fp8_model_init(True, scaling):
            model = fully_shard(apex_te.Linear(16, 64), reshard_after_forward=after)
    else:
        model = sharded(
            kind == "codes", scaling, torch.float32, "cpu", build=linears(16, 32, 16), reshard=after
        )
    try:
        losses, _ = train_rows(rank, model, scaling)
    except NotImplementedError as error:
        return str(error)
    return losses, weights_of(model)


def test_resharding_to_some_ranks(four_ranks):
    """FSDP2 would take codes for values; values it may keep."""
    message = ": reshard_after_forward of fully_shard must be a bool if weights are gathered"
    for kind, owner in (("codes", "enable_fp8_all_gather"), ("held", "FP8Parameter")):
        for found in four_ranks.run(_after_forward, kind, 2):
            assert found.startswith(owner + message), found
    plain = four_ranks.run(_after_forward, "values", 2)
    for after in (True, False, 4):
        for ours, theirs in zip(four_ranks.run(_after_forward, "codes", after), plain, strict=True):
            assert_alike(ours, theirs)


def _offloaded(rank, name, device, pinned):
    """Losses and weights with shards on the CPU, gathered as FP8 data, as values, and without."""
    scaling, found = RECIPES[name], []
    device = f"cuda:{rank}" if device == "cuda" else device
    policy = CPUOffloadPolicy(pin_memory=pinned)
    pairs = [(True, policy), (False, policy)]
    if device == "cpu":  # where the optimizer is the same
        pairs.append((True, None))
    for fp8, offload in pairs:
        model = sharded(
            fp8, scaling, torch.float32, device, build=linears(16, 32, 16), offload=offload
        )
        assert offload is None or all(p.device.type == "cpu" for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        losses = []
        for step in range(4):
            for micro in range(2):
                generator = torch.Generator().manual_seed(10 * step + 2 * rank + micro)
                x = torch.randn(16, 16, generator=generator).to(device)
                model.set_requires_gradient_sync(micro == 1)
                with fp8_autocast(True, scaling):
                    loss = model(x).square().mean()
                loss.backward()
                losses.append(loss.detach().cpu())
            assert offload is None or all(p.grad.device.type == "cpu" for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        apex_te.flush_fp8_state()
        # This rank's shards: NCCL gathers none of the CPU.
        found.append((torch.stack(losses), [p.to_local().detach() for p in model.parameters()]))
    (ours, weights), *others = found
    assert ours[-1] < ours[0]
    for losses, expected in others:
        assert torch.equal(ours, losses), (ours, losses)
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("name", ["first", "delayed", "tensorwise", "hif8"])
def test_shards_on_the_cpu(two_ranks, name):
    two_ranks.run(_offloaded, name, "cpu", False)


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("name", ["first", "delayed", "tensorwise"])
def test_shards_on_the_cpu_of_gpus(two_gpus, name, pinned):
    two_gpus.run(_offloaded, name, "cuda", pinned)
