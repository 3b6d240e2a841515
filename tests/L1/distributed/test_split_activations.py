"""checkpoint(distribute_saved_activations=True): what no checkpoint gives, in less memory."""

import gc
import weakref

import pytest
import torch
from on_rank import all_equal, assert_told, device_of, states_of, told
from rank_sets import ranks_of
from schemes import chosen
from torch import distributed

import apex_te
from apex_te import flush_fp8_state, fp8_autocast
from apex_te.distributed import CudaRNGStatesTracker, checkpoint
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS

HIDDEN, FFN, HEADS, TOKENS, BATCH = 32, 64, 4, 8, 2
RECIPES = {"none": None, **chosen("delayed", "tensorwise", amax_history_len=2)}


def _train(rank, recipe, run):
    """Losses, gradients and FP8 state of steps with two microbatches in flight, with dropout."""
    device = device_of(rank)
    amax_groups.pending = 0
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 100 + rank)
    torch.manual_seed(1)
    layer = apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.1, attention_dropout=0.1, set_parallel_mode=True,
        tp_group=distributed.group.WORLD, get_rng_state_tracker=lambda: tracker, device=device,
    )  # fmt: skip
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(2):
        outs, inputs = [], []
        for scale in (1.0, 4.0):
            x = scale * torch.randn(TOKENS, BATCH, HIDDEN, generator=generator)
            inputs.append(x.to(device).requires_grad_())
            with fp8_autocast(recipe is not None, recipe):
                outs.append(run(layer, inputs[-1] * 1.5, lambda: tracker))
        for out, x in zip(outs, inputs, strict=True):
            out.square().sum().backward()
            found += [out.detach(), x.grad]
        found += [p.grad.clone() for p in layer.parameters()]
    flush_fp8_state()
    found += [getattr(state, name).clone() for state in states_of(layer) for name in TENSORS]
    return [*found, torch.rand(1), torch.rand(1, device=device), *tracker.get_states().values()]


def in_parts(function, *args, **options):
    """A checkpoint whose saved tensor is split over all ranks."""
    options = {"distribute_saved_activations": True, "tp_group": distributed.group.WORLD} | options
    return checkpoint(function, *args, **options)


def _same_as_none(rank, recipe):
    def saved_in_parts(layer, x, tracker):
        return in_parts(layer, x, get_rng_state_tracker=tracker)

    plain = _train(rank, RECIPES[recipe], lambda layer, x, _: layer(x))
    return all_equal(plain, _train(rank, RECIPES[recipe], saved_in_parts))


WHERE = [(2, "gloo"), (4, "gloo"), pytest.param((2, "nccl"), marks=pytest.mark.cuda)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("where", WHERE)
def test_bitwise_what_no_checkpoint_gives(all_ranks, where, recipe):
    assert all(ranks_of(all_ranks, *where).run(_same_as_none, recipe))


class _Memory(bytearray):
    """What a tensor's storage keeps alive, to be watched."""


class _Placed(torch.autograd.Function):
    """A copy in watched memory, of which the graph keeps nothing."""

    @staticmethod
    def forward(ctx, x, watched):
        memory = _Memory(x.numel() * 4)
        watched.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.float32).view(x.shape).copy_(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _kept(rank, distribute):
    watched, x = [], torch.randn(6, 4, requires_grad=True)
    options = {"distribute_saved_activations": distribute}
    # The input has no name here: nothing but the checkpoint may keep it.
    out = in_parts(lambda t: t.sin().exp(), _Placed.apply(x, watched), **options)
    gc.collect()
    kept = watched[0]() is not None
    out.sum().backward()
    return kept, torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_the_whole_tensor_is_not_kept(two_ranks):
    assert two_ranks.run(_kept, True) == [(False, True)] * 2
    assert two_ranks.run(_kept, False) == [(True, True)] * 2  # the test sees what is kept


def _layouts(rank):
    """Sizes that ranks do not divide, nothing at all, views, other dtypes; not only floats."""
    found, base = [], torch.arange(42.0).view(6, 7)
    given = [base[:3, :5], base[:5, :3].t(), base.t(), base[0, :1], base[:0], base[0, 0]]
    for x in (*given, base[:1].expand(3, 7), base.double(), base.bfloat16()):
        grads = []
        for distribute in (False, True):
            leaf = x.clone().requires_grad_()
            seen = []

            def function(t, scale, seen=seen):
                seen.append((t.detach().clone(), t.stride(), t.requires_grad))
                return t * t * scale

            scale = torch.tensor(2.0, requires_grad=True)
            y = leaf.as_strided(leaf.shape, leaf.stride())  # a view, not a leaf
            out = in_parts(function, y, scale, distribute_saved_activations=distribute)
            out.sum().backward()
            (first, stride, _), (again, stride_again, requires) = seen
            found.append(torch.equal(first, again) and stride == stride_again and requires)
            grads.append((leaf.grad, scale.grad))
        found += [torch.equal(a, b) for a, b in zip(*grads, strict=True)]
    # Positions travel, too, and the tensor need not come first.
    weight = torch.randn(9, 3, requires_grad=True)
    index = torch.tensor([4, 0, 8])
    embedding = torch.nn.functional.embedding
    out = in_parts(lambda flag, i, w: embedding(i, w) * flag, 2.0, index, w=weight)
    out.sum().backward()
    expected = torch.zeros(9, 3).index_add_(0, index, torch.full((3, 3), 2.0))
    return [*found, torch.equal(weight.grad, expected)]


def test_any_size_and_layout(ranks):
    for found in ranks.run(_layouts):
        assert all(found), found


def _earlier_order(rank):
    import warnings

    x = torch.randn(5, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = checkpoint(torch.square, True, None, distributed.group.WORLD, x)
    out.sum().backward()
    return torch.equal(x.grad, 2 * x.detach()), [w.category for w in caught]


def test_earlier_order(two_ranks):
    for same, categories in two_ranks.run(_earlier_order):
        assert same
        assert DeprecationWarning in categories


def _rejected(rank):
    group, x = distributed.group.WORLD, torch.ones(4, requires_grad=True)
    parallel = apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, set_parallel_mode=True, tp_group=group, sequence_parallel=True
    )
    odd = torch.ones(4).as_subclass(_Odd).requires_grad_()
    given = (torch.square, 2.0), (parallel, x), (parallel.forward, x), (torch.square, odd)
    found = [told(in_parts, *args) for args in given]
    return [told(in_parts, torch.square, x, use_reentrant=False), *found]


class _Odd(torch.Tensor):
    pass


def test_rejects(two_ranks):
    split = "ValueError: checkpoint: distribute_saved_activations must be False if ranks have"
    expected = (
        "NotImplementedError: checkpoint: use_reentrant must be True",
        "ValueError: checkpoint: one of the arguments must be a tensor",
        split,
        split,
        "NotImplementedError: checkpoint: the first tensor must be a plain",
    )
    for found in two_ranks.run(_rejected):
        assert_told(found, expected)
