"""checkpoint(distribute_saved_activations=True): what no checkpoint gives, in less memory."""

import gc
import weakref

import pytest
import torch
from schemes import chosen
from torch import distributed

import apex_te
from apex_te import flush_fp8_state, fp8_autocast
from apex_te.distributed import CudaRNGStatesTracker, checkpoint
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS

HIDDEN, FFN, HEADS, TOKENS, BATCH = 32, 64, 4, 8, 2
RECIPES = {"none": None, **chosen("delayed", "tensorwise", amax_history_len=2)}


def _device(rank):
    return (
        torch.device("cuda", rank) if distributed.get_backend() == "nccl" else torch.device("cpu")
    )


def _train(rank, recipe, run):
    """Losses, gradients and FP8 state of steps with two microbatches in flight, with dropout."""
    device = _device(rank)
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
    states = [
        m.fp8_state for m in layer.modules() if hasattr(m, "fp8_state") and m.fp8_state.allocated
    ]
    found += [getattr(state, name).clone() for state in states for name in TENSORS]
    return [*found, torch.rand(1), torch.rand(1, device=device), *tracker.get_states().values()]


def _same_as_none(rank, recipe):
    recipe = RECIPES[recipe]

    def saved_in_parts(layer, x, tracker):
        return checkpoint(
            layer,
            x,
            distribute_saved_activations=True,
            get_rng_state_tracker=tracker,
            tp_group=distributed.group.WORLD,
        )

    plain = _train(rank, recipe, lambda layer, x, _: layer(x))
    ours = _train(rank, recipe, saved_in_parts)
    return [torch.equal(a, b) for a, b in zip(plain, ours, strict=True)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_bitwise_what_no_checkpoint_gives(ranks, recipe):
    for same in ranks.run(_same_as_none, recipe):
        assert all(same), same


@pytest.mark.cuda
def test_bitwise_on_gpus(two_gpus):
    for recipe in RECIPES:
        for same in two_gpus.run(_same_as_none, recipe):
            assert all(same), (recipe, same)


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
    out = checkpoint(
        lambda t: t.sin().exp(),
        _Placed.apply(x, watched),
        distribute_saved_activations=distribute,
        tp_group=distributed.group.WORLD,
    )
    gc.collect()
    kept = watched[0]() is not None
    out.sum().backward()
    return kept, torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_the_whole_tensor_is_not_kept(two_ranks):
    assert two_ranks.run(_kept, True) == [(False, True)] * 2
    assert two_ranks.run(_kept, False) == [(True, True)] * 2  # the test sees what is kept


def _layouts(rank):
    """Sizes that ranks do not divide, nothing at all, views, other dtypes; not only floats."""
    group, found = distributed.group.WORLD, []
    base = torch.arange(42.0).view(6, 7)
    for x in (
        base[:3, :5],
        base[:5, :3].t(),
        base.t(),
        base[0, :1],
        base[:0],
        base[0, 0],
        base[:1].expand(3, 7),
        base.double(),
        base.bfloat16(),
    ):
        grads = []
        for distribute in (False, True):
            leaf = x.clone().requires_grad_()
            seen = []

            def function(t, scale, seen=seen):
                seen.append((t.detach().clone(), t.stride(), t.requires_grad))
                return t * t * scale

            scale = torch.tensor(2.0, requires_grad=True)
            y = leaf.as_strided(leaf.shape, leaf.stride())  # a view, not a leaf
            out = checkpoint(
                function, y, scale, distribute_saved_activations=distribute, tp_group=group
            )
            out.sum().backward()
            (first, stride, _), (again, stride_again, requires) = seen
            found.append(torch.equal(first, again) and stride == stride_again and requires)
            grads.append((leaf.grad, scale.grad))
        found += [torch.equal(a, b) for a, b in zip(*grads, strict=True)]
    # Positions travel, too, and the tensor need not come first.
    weight = torch.randn(9, 3, requires_grad=True)
    index = torch.tensor([4, 0, 8])
    out = checkpoint(
        lambda flag, i, w: torch.nn.functional.embedding(i, w) * flag,
        2.0,
        index,
        w=weight,
        distribute_saved_activations=True,
        tp_group=group,
    )
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
    group, x, found = distributed.group.WORLD, torch.ones(4, requires_grad=True), []
    parallel = apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, set_parallel_mode=True, tp_group=group, sequence_parallel=True
    )
    for function, args, options in (
        (torch.square, (x,), {"use_reentrant": False}),
        (torch.square, (2.0,), {}),
        (parallel, (x,), {}),
        (parallel.forward, (x,), {}),
        (torch.square, (torch.ones(4).as_subclass(_Odd).requires_grad_(),), {}),
    ):
        try:
            checkpoint(
                function, *args, distribute_saved_activations=True, tp_group=group, **options
            )
            found.append("nothing was raised")
        except (TypeError, ValueError, NotImplementedError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class _Odd(torch.Tensor):
    pass


def test_rejects(two_ranks):
    for found in two_ranks.run(_rejected):
        reentrant, tensor, parallel, method, odd = found
        assert reentrant.startswith("NotImplementedError: checkpoint: use_reentrant must be True")
        assert tensor.startswith("ValueError: checkpoint: one of the arguments must be a tensor")
        for message in (parallel, method):
            assert "distribute_saved_activations must be False where ranks have" in message
        assert odd.startswith("NotImplementedError: checkpoint: the first tensor must be a plain")
