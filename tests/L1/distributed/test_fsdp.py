"""Modules under fully_shard, each rank with its own data, against one rank with all of it."""

import unittest.mock
import warnings

import pytest
import torch
from on_rank import told
from shards import decibels
from torch import distributed
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init, recipe
from apex_te.fp8.parameter.parameter import FP8Parameter

IN, OUT, FFN, TOKENS, STEPS = 32, 48, 64, 8, 3
DELAYED = recipe.DelayedScaling(amax_history_len=4)

MODULES = {
    "linear": lambda **kw: apex_te.Linear(IN, OUT, **kw),
    "parts": lambda **kw: apex_te.Linear(IN, OUT, parameters_split=("a", "b", "c"), **kw),
    "norm": lambda **kw: apex_te.LayerNormLinear(IN, OUT, **kw),
    "mlp": lambda **kw: apex_te.LayerNormMLP(IN, FFN, activation="swiglu", **kw),
    "grouped": lambda **kw: apex_te.GroupedLinear(2, IN, OUT, **kw),
    "layer": lambda **kw: apex_te.TransformerLayer(
        IN, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", **kw
    ),
}


def build(name, dtype, device="cpu"):
    torch.manual_seed(3)
    module = MODULES[name](params_dtype=dtype, device=device)
    if device != "meta":
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, device=device).to(dtype) * 0.1)
    return module


def shard(module, **options):
    """Parts of a layer first, which it runs by another method than forward."""
    if isinstance(module, apex_te.TransformerLayer):
        fully_shard(module.self_attention, **options)
        register_fsdp_forward_method(module.self_attention, "forward_with_residual")
    return fully_shard(module, **options)


def inputs(step, rank, ranks, name, dtype, device):
    """A rank's input, or that of all ranks; batches are dimension 1, rows of experts 0."""
    generator = torch.Generator().manual_seed(step)
    width = IN if name in ("mlp", "layer") else OUT
    found = []
    for features in (IN, width):
        x = torch.randn(TOKENS, 2 * ranks, features, generator=generator).to(device, dtype)
        found.append(x if rank is None else x.chunk(ranks, 1)[rank])
    return found


def run(module, x, name, checkpointed=False, **more):
    if name == "grouped":  # half of each sequence to each expert
        more["m_splits"] = [x.shape[0] // 2 * x.shape[1]] * 2
    if checkpointed:
        return checkpoint(lambda x: module(x, **more), x, use_reentrant=False)
    return module(x, **more)


def steps(module, name, rank, ranks, scaling, dtype, device, micro=1, lr=0.05, **more):
    """Output and input gradient of the last step."""
    optimizer = torch.optim.SGD(module.parameters(), lr)
    for step in range(STEPS):
        for m in range(micro):
            x, target = inputs(step * micro + m, rank, ranks, name, dtype, device)
            x.requires_grad_()
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_requires_gradient_sync(m == micro - 1)
            with fp8_autocast(scaling is not None, scaling):
                y = run(module, x, name, **more)
                loss = (y.float() - target.float()).square().mean() / micro
            loss.backward()
        grads = {k: p.grad for k, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    flush_fp8_state()
    return y.detach(), x.grad, grads


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def _compare(rank, name, scaling, dtype, device, options):
    """SQNRs of everything that the ranks compute against what one rank does."""
    options = dict(options)
    sharding = {k: options.pop(k) for k in ("reshard_after_forward", "mp_policy") if k in options}
    meta = options.pop("meta", False)
    ranks = distributed.get_world_size()
    if device == "cuda":
        device = f"cuda:{rank}"
    one = build(name, dtype, device)
    if meta:
        many = shard(build(name, dtype, "meta"), **sharding)
        many.to_empty(device=device)
        with torch.no_grad():
            for key, parameter in many.named_parameters():
                rows = one.get_parameter(key).chunk(ranks)
                if rank < len(rows):
                    parameter.to_local().copy_(rows[rank])
    else:
        many = shard(build(name, dtype, device), **sharding)
    y, dx, grads = steps(one, name, None, ranks, scaling, dtype, device, **options)
    own, own_dx, own_grads = steps(many, name, rank, ranks, scaling, dtype, device, **options)
    found = {
        "output": decibels(gathered(own), y),
        "input": decibels(gathered(own_dx) / ranks, dx),
    }
    state = {k: whole(v) for k, v in many.state_dict().items()}
    for key, parameter in one.named_parameters():
        assert torch.isfinite(parameter).all()
        if not key.endswith("key_bias"):  # its gradient is 0 but for rounding
            found[f"grad {key}"] = decibels(whole(own_grads[key]), grads[key])
        found[key] = decibels(state[key], parameter)
    if scaling is not None:
        for key, value in one.state_dict().items():
            if key.endswith("scale_fwd"):
                # In backward a rank's gradients are as many times larger as there are ranks.
                torch.testing.assert_close(state[key], value, rtol=2e-2, atol=0)
    return found


def check(ranks, name, scaling=None, dtype=torch.float32, device="cpu", floor=None, **options):
    if floor is None:
        floor = 95 if scaling is None else 25
    for found in ranks.run(_compare, name, scaling, dtype, device, options):
        for what, value in found.items():
            gradient = what == "input" or what.startswith("grad")
            assert value > (floor if scaling is None or not gradient else 12), (what, found)


@pytest.mark.parametrize("scaling", [None, DELAYED], ids=["fp32", "delayed"])
@pytest.mark.parametrize("name", MODULES)
def test_modules(ranks, name, scaling):
    check(ranks, name, scaling)


VARIANTS = {
    "keep": {"reshard_after_forward": False},
    "reshard": {"reshard_after_forward": True},
    "accumulate": {"micro": 2},
    "checkpointed": {"checkpointed": True},
    "meta": {"meta": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["linear", "layer"])
def test_variants(two_ranks, name, variant):
    scaling = DELAYED if variant in ("reshard", "checkpointed") else None
    check(two_ranks, name, scaling, **VARIANTS[variant])


def test_bfloat16(two_ranks):
    check(two_ranks, "mlp", None, torch.bfloat16, floor=35)


def _mixed(rank):
    """float32 shards, bfloat16 weights, gradients of float32 that were reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = shard(build("mlp", torch.float32), mp_policy=policy)
    with fp8_autocast(True, DELAYED):
        out = module(torch.randn(TOKENS, 2, IN))
    out.sum().backward()
    return out.dtype, {p.grad.dtype for p in module.parameters()}


def test_mixed_precision(two_ranks):
    assert two_ranks.run(_mixed) == [(torch.bfloat16, {torch.float32})] * 2


def _cached(rank):
    """Losses with the user's promise and without, and the warnings."""
    losses, said = [], []
    for promise in (True, False):
        module = shard(build("mlp", torch.float32))
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        found = []
        for step in range(4):
            x = torch.randn(TOKENS, 2, IN, generator=torch.Generator().manual_seed(step))
            first = (step % 2 == 0) if promise else None
            with warnings.catch_warnings(record=True) as caught, fp8_autocast(True, DELAYED):
                warnings.simplefilter("always")
                loss = module(x, is_first_microbatch=first).square().mean()
            said += [str(w.message) for w in caught if "is_first_microbatch" in str(w.message)]
            loss.backward()
            found.append(loss.item())
            optimizer.step()  # also between the microbatches: no copy may outlive it
            optimizer.zero_grad()
        flush_fp8_state()
        losses.append(found)
    return losses, said


def test_weight_cache_is_off(two_ranks):
    for losses, said in two_ranks.run(_cached):
        assert losses[0] == losses[1]
        assert len(said) == 1
        assert "keeps no FP8 weights under fully_shard" in said[0]


# Weights that are held in FP8.

HELD = {
    "delayed": DELAYED,
    "tensorwise": recipe.CurrentScaling(),
    "hif8": recipe.CurrentScaling(fp8_format=recipe.Format.HIF8),
    "block": recipe.BlockScaling(),
    "mx": recipe.MXFP8Scaling(),
}


def _held_linear(scaling, rows=512, device="cpu"):
    torch.manual_seed(4)
    with fp8_model_init(True, scaling):
        return apex_te.Linear(64, rows, device=device)


def _held(rank, name):
    """One rank and many, of the same codes: outputs before and after some steps, and weights."""
    scaling, ranks = HELD[name], distributed.get_world_size()
    one, many = _held_linear(scaling), fully_shard(_held_linear(scaling))
    assert type(many.weight._local_tensor) is FP8Parameter
    rows = one.weight.dequantize().chunk(ranks)[rank]
    assert torch.equal(many.weight._local_tensor.dequantize(), rows)
    found = []
    for module, own in ((one, None), (many, rank)):
        optimizer = torch.optim.SGD(module.parameters(), 1.0)
        outputs = []
        for step in range(STEPS):
            x = torch.randn(ranks * 16, 64, generator=torch.Generator().manual_seed(step))
            x = x if own is None else x.chunk(ranks)[own]
            with fp8_autocast(True, scaling):
                y = module(x)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append((y if own is not None else y.chunk(ranks)[rank]).detach())
        flush_fp8_state()
        state = module.state_dict()
        assert all(type(getattr(v, "_local_tensor", v)) is torch.Tensor for v in state.values())
        outputs.append(whole(state["weight"]))
        found.append(outputs)
    before = _held_linear(scaling).weight.dequantize()
    assert not torch.equal(found[0][-1], before)
    with torch.no_grad():
        many.load_state_dict(many.state_dict())
    assert torch.equal(whole(many.state_dict()["weight"]), found[1][-1])
    return [decibels(b, a) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("name", HELD)
def test_held_weights(ranks, name):
    for first, *later in ranks.run(_held, name):
        # Where the input has one scale, it is that of a rank's data.
        assert first > (100 if name in ("block", "mx") else 25), first
        assert min(later) > 25, later


def _codes(weight):
    """FP8 data and scales of a weight, as bytes of the data and numbers of the scales."""
    held = weight._held
    return held.rowwise.view(torch.uint8).clone(), held.rowwise_scale_inv.float().clone()


def _same_codes(ours, theirs, scales):
    """The same data and, in the same order, the same scales; padded ones left out."""
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1].flatten()[:scales], theirs[1].flatten()[:scales])


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.5),
    # torch takes its foreach kernels, of other rounding, for a DTensor but not for FP8Parameter.
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, foreach=False),
    "fused": lambda params: apex_te.optimizers.FusedAdam(params, 0.01, master_weights=True),
}


def _same_values(name, ours, theirs):
    """The same values, and but for MXFP8, whose scales may move with the data, the same codes."""
    assert torch.equal(ours.dequantize(), theirs.dequantize())
    if name != "mx":
        _same_codes(_codes(ours), _codes(theirs), _codes(ours)[1].numel())


def _gathered_weight(module):
    module.unshard()
    found = module.weight.detach().clone()
    module.reshard()
    return found


def _held_bits(rank, name, rows, optimizer, replicas, device="cpu"):
    """Shards of FP8 weights against one rank, which trains on the same rows as each of them."""
    scaling, ranks = HELD[name], distributed.get_world_size()
    sizes = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    mesh = torch.distributed.device_mesh.init_device_mesh(device, sizes, mesh_dim_names=names)

    def build():
        return _held_linear(scaling, rows, device)

    one, many = build(), fully_shard(build(), mesh=mesh)
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (one, many)]
    scales = _codes(one.weight)[1].numel()
    for step in range(STEPS):
        before = _codes(one.weight)
        for module, own in zip((one, many), optimizers, strict=True):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(device)
            with fp8_autocast(True, scaling):
                module(x).square().mean().backward()
            own.step()
            own.zero_grad()
        assert not torch.equal(before[0], _codes(one.weight)[0])
        codes = _codes(_gathered_weight(many))
        _same_codes(codes, _codes(one.weight), scales)
        assert torch.equal(many.bias.full_tensor(), one.bias)
        saved = whole(many.state_dict()["weight"])
        assert torch.equal(saved, one.state_dict()["weight"])
        if optimizer == "fused":
            master = optimizers[1].state[many.weight]["master_param"].full_tensor()
            once = build().weight
            with torch.no_grad():
                once.copy_(master)
            _same_codes(codes, _codes(once), scales)
    flush_fp8_state()
    # Neither saving, nor loading into another sharding, changes a value.
    for functions in (apex_te.distributed, torch_state_dict):
        fresh = fully_shard(build(), mesh=mesh)
        functions.get_state_dict(fresh, OPTIMIZERS[optimizer](fresh.parameters()))
        _same_values(name, _gathered_weight(fresh), build().weight)
    state = {k: whole(v) for k, v in many.state_dict().items()}
    other = build()
    other.load_state_dict(state, strict=False)
    _same_values(name, other.weight, one.weight)
    with torch.no_grad():
        many.load_state_dict(many.state_dict())
    _same_values(name, _gathered_weight(many), one.weight)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", HELD)
def test_held_weights_have_the_bits_of_one_rank(two_ranks, name, optimizer):
    """A gathered FP8 weight is the whole weight quantized once, and what its state dict says."""
    two_ranks.run(_held_bits, name, 256, optimizer, 1)


@pytest.mark.parametrize("rows", [512, 33, 3, 1], ids=["even", "uneven", "empty", "one"])
@pytest.mark.parametrize("name", HELD)
def test_held_weights_on_four_ranks(four_ranks, name, rows):
    """Shards of a weight with one scale may be uneven, of one row, or empty."""
    if rows != 512 and name in ("block", "mx"):
        for found in four_ranks.run(_held_errors, HELD[name], 510 if name == "block" else rows):
            assert "as many" in found
        return
    four_ranks.run(_held_bits, name, rows, "fused", 1)


@pytest.mark.parametrize("name", HELD)
def test_held_weights_on_replicas_of_shards(four_ranks, name):
    """On a mesh of two dimensions the shards of a replica share the scale."""
    four_ranks.run(_held_bits, name, 256, "fused", 2)


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
@pytest.mark.parametrize("name", HELD)
def test_held_weights_on_gpus(two_gpus, name, optimizer):
    """A gathered FP8 weight is the whole weight quantized once on GPUs, too."""
    two_gpus.run(_held_bits, name, 256, optimizer, 1, "cuda")


def _collectives_of_a_step(rank, optimizer):
    """Number of all-reduces of an optimizer's step on four FP8 weights."""
    torch.manual_seed(4)
    with fp8_model_init(True, "tensorwise"):
        layers = [apex_te.Linear(64, 64), apex_te.LayerNormMLP(64, 64), apex_te.Linear(64, 3)]
    model = fully_shard(torch.nn.Sequential(*layers))
    made = OPTIMIZERS[optimizer](model.parameters())
    model(torch.ones(16, 64)).sum().backward()
    with unittest.mock.patch.object(
        distributed, "all_reduce", side_effect=distributed.all_reduce
    ) as counted:
        made.step()
    return counted.call_count


def test_amaxes_of_a_step_take_one_collective(two_ranks):
    """A fused optimizer reduces the amaxes of all FP8 weights at once, torch's one by one."""
    assert two_ranks.run(_collectives_of_a_step, "fused") == [1, 1]
    assert two_ranks.run(_collectives_of_a_step, "sgd") == [4, 4]


def _held_from_meta(rank, name, rows):
    """Shards that leave the meta device and are then loaded, or drawn on each rank."""
    scaling = HELD[name]
    whole_weight = _held_linear(scaling, rows)
    many = fully_shard(_held_linear(scaling, rows, "meta"))
    many.to_empty(device="cpu")
    many.reset_parameters()
    drawn = _gathered_weight(many).dequantize()
    assert torch.equal(whole(many.state_dict()["weight"]), drawn)
    assert 0 < drawn.abs().max() < 1
    source = fully_shard(_held_linear(scaling, rows))
    many.load_state_dict(source.state_dict())
    _same_values(name, _gathered_weight(many), whole_weight.weight)


@pytest.mark.parametrize("rows", [512, 3], ids=["even", "empty"])
@pytest.mark.parametrize("name", ["tensorwise", "hif8", "block"])
def test_held_weights_from_the_meta_device(four_ranks, name, rows):
    """Weights that are made on the meta device get one scale as they are drawn or loaded."""
    if name != "block" or rows == 512:
        four_ranks.run(_held_from_meta, name, rows)


def _held_errors(rank, scaling, rows):
    def run():
        module = fully_shard(_held_linear(scaling, rows))
        with fp8_autocast(True, scaling):
            module(torch.ones(16, 64))

    return told(run)


def test_held_weights_that_cannot_be_sharded(ranks):
    """Shards that cut a block raise an error on every rank, also on those whose shard is whole."""
    for found in ranks.run(_held_errors, HELD["block"], 320):
        assert "cut what shares a scale" in found


@pytest.mark.cuda
@pytest.mark.parametrize("scaling", [None, DELAYED], ids=["bf16", "delayed"])
@pytest.mark.parametrize("name", ["linear", "mlp", "layer"])
def test_on_gpus(two_gpus, name, scaling):
    check(two_gpus, name, scaling, torch.bfloat16, "cuda", 35 if scaling is None else 25)
