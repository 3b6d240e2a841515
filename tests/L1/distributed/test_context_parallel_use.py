"""Context parallelism beside tensor parallelism, in FP8 regions, with meshes and in copies."""

import copy
import pickle

import pytest
import torch
from on_rank import device_of, states_of
from torch import distributed

import apex_te
from apex_te.recipe import BlockScaling, DelayedScaling

WIDTH, HEADS, TOKENS, BATCH = 64, 4, 32, 2
RECIPES = {"none": None, "delayed": DelayedScaling(), "blockwise": BlockScaling()}


def _layer(device, **options):
    torch.manual_seed(4)
    return apex_te.TransformerLayer(
        WIDTH, 2 * WIDTH, HEADS, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        normalization="RMSNorm", softmax_type="learnable", device=device, **options,
    )  # fmt: skip


def _steps(layer, x, grad, recipe, angles):
    """Output and gradients of the last of two steps, those of parameters summed over ``group``."""
    for _ in range(2):
        layer.zero_grad()
        x.grad = None
        with apex_te.fp8_autocast(recipe is not None, recipe):
            out = layer(x, rotary_pos_emb=angles)
        out.backward(grad)
    return out.detach(), x.grad, *(p.grad for p in layer.parameters())


def _with_tensor_parallel(rank, comm_type, sequence_parallel, recipe):
    """Differences from the same tensor-parallel ranks without context parallelism."""
    device = device_of(rank)
    pairs = [distributed.new_group([r, r + 1]) for r in (0, 2)]
    others = [distributed.new_group([r, r + 2]) for r in (0, 1)]
    tensor, context = pairs[rank // 2], others[rank % 2]
    options = {"set_parallel_mode": True, "tp_group": tensor}
    layer = _layer(device, sequence_parallel=sequence_parallel, **options)
    other = _layer(device, sequence_parallel=sequence_parallel, **options)
    other.load_state_dict(layer.state_dict())
    other.set_context_parallel_group(context, None, None, comm_type)
    generator = torch.Generator().manual_seed(8)
    x, grad = (torch.randn(TOKENS, BATCH, WIDTH, generator=generator).to(device) for _ in range(2))
    angles = apex_te.RotaryPositionEmbedding(WIDTH // HEADS, device=device)(TOKENS)

    def own(whole):
        rows = apex_te.split_for_context_parallel(whole, context, 0)
        return rows.chunk(2)[rank % 2] if sequence_parallel else rows

    def part(whole):
        return whole.chunk(2)[rank % 2] if sequence_parallel else whole

    one = _steps(layer, part(x).clone().requires_grad_(), part(grad), RECIPES[recipe], angles)
    found = _steps(other, own(x).clone().requires_grad_(), own(grad), RECIPES[recipe], angles)
    whole = []
    for each in one[:2]:  # tokens of one rank, cut as those of the other
        if sequence_parallel:
            parts = [torch.empty_like(each) for _ in range(2)]
            distributed.all_gather(parts, each, group=tensor)
            each = torch.cat(parts)
        whole.append(own(each))
    for each in found[2:]:
        distributed.all_reduce(each, group=context)
    pairs = zip(found, [*whole, *one[2:]], strict=True)
    worst = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
    states = [state.scale_fwd.tolist() for state in states_of(other)]
    return worst, states


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_beside_tensor_parallelism(four_ranks, comm_type, sequence_parallel, recipe):
    found = four_ranks.run(_with_tensor_parallel, comm_type, sequence_parallel, recipe)
    for worst, states in found:
        # fp32 sums in another order; a cast to FP8 turns some into the neighbouring value.
        assert worst < (1e-6 if recipe == "none" else 1e-2)
        assert states == found[0][1]
    assert bool(found[0][1]) == (recipe == "delayed")


def _groups(rank):
    mesh = distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    module = apex_te.DotProductAttention(2, 8, cp_group=mesh["cp"], cp_comm_type="a2a")
    x = torch.randn(4, 1, 2, 8)
    expected = module(x, x, x)
    assert torch.equal(copy.deepcopy(module)(x, x, x), expected)
    plain = pickle.loads(pickle.dumps(module))  # which has no group
    assert (plain.context_ranks.size, plain.context_ranks.comm_type) == (1, "a2a")
    module.set_context_parallel_group(None)
    assert torch.equal(module(x, x, x), plain(x, x, x))
    assert not torch.equal(module(x, x, x), expected)
    return True


def test_meshes_copies_and_no_group(two_ranks):
    assert two_ranks.run(_groups) == [True, True]


def _largest_logits(rank, comm_type):
    device = device_of(rank)
    module = apex_te.DotProductAttention(4, 8, 2, return_max_logit=True, device=device)
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(16, 2, n, 8, generator=generator).to(device) for n in (4, 2))
    expected = module(q, k, k)[1]
    group = distributed.group.WORLD
    module.set_context_parallel_group(group, cp_comm_type=comm_type)
    q, k = (apex_te.split_for_context_parallel(x, group, 0) for x in (q, k))
    torch.testing.assert_close(module(q, k, k)[1], expected, rtol=1e-6, atol=1e-6)
    return True


@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
def test_largest_logits_are_those_of_whole_sequences(two_ranks, comm_type):
    assert two_ranks.run(_largest_logits, comm_type) == [True, True]


def _balance(rank, sequences, nested):
    """Load-balance loss and router gradient of split sequences, beside those of whole ones."""
    device, group = device_of(rank), distributed.group.WORLD
    if nested:
        pairs = [distributed.new_group([r, r + 1]) for r in (0, 2)]
        group = [pairs[rank // 2], [distributed.new_group([r, r + 2]) for r in (0, 1)][rank % 2]]
    torch.manual_seed(3)
    layer = apex_te.MoELayer(
        16, 24, 4, aux_loss_coeff=0.1, sequence_aux_loss=sequences, device=device
    )
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(5)).to(device)

    def results(x):
        layer.zero_grad()
        (layer(x) * 0.0).sum().backward()  # the loss alone has gradients
        return layer.aux_loss.clone(), layer.router.weight.grad.clone()

    expected, counts = results(x), layer.tokens_per_expert.clone()
    layer.set_context_parallel_group(group)
    found = results(apex_te.split_for_context_parallel(x, group))
    own = layer.tokens_per_expert.clone()  # those of this rank
    for each in (*found, own):
        distributed.all_reduce(each)
    assert torch.equal(own, counts)
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y / distributed.get_world_size(), z, rtol=1e-5, atol=1e-7)
    layer.set_context_parallel_group(None)
    assert torch.equal(results(x)[0], expected[0])
    assert pickle.loads(pickle.dumps(copy.deepcopy(layer)))(x).shape == x.shape
    return True


@pytest.mark.parametrize("sequences", [False, True])
def test_load_balance_loss_is_that_of_whole_sequences(two_ranks, sequences):
    assert two_ranks.run(_balance, sequences, False) == [True, True]


def test_load_balance_loss_over_two_groups(four_ranks):
    assert four_ranks.run(_balance, False, True) == [True] * 4


def _compiled_balance(rank):
    """Two steps of a compiled layer against the same layer uncompiled, on split sequences."""
    device, group = device_of(rank), distributed.group.WORLD
    torch.manual_seed(3)
    layer = apex_te.MoELayer(16, 24, 4, aux_loss_coeff=0.1, device=device)
    layer.set_context_parallel_group(group)
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(5)).to(device)
    x = apex_te.split_for_context_parallel(x, group)

    def results(run):
        layer.zero_grad()
        run(x).sum().backward()
        return [layer.aux_loss.clone(), *(p.grad.clone() for p in layer.parameters())]

    run = torch.compile(layer, backend="aot_eager")
    expected = results(layer)
    for _ in range(2):
        for y, z in zip(results(run), expected, strict=True):
            torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-7)
    return True


def test_compiled_load_balance_loss(two_ranks):
    assert two_ranks.run(_compiled_balance) == [True, True]
