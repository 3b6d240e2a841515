"""main_grad on several ranks against one rank with all rows, and who has to reduce it."""

import contextlib

import pytest
import torch
from main_grad_models import model_of, with_main_grads
from on_rank import assert_told, device_of, recorded, told
from schemes import chosen
from shards import decibels
from torch import distributed

import apex_te
from apex_te import fp8_autocast
from apex_te.distributed import main_grad as implementation
from apex_te.distributed.main_grad import reduce_main_grads

RECIPES = {"none": None, **chosen("delayed", "blockwise", amax_history_len=2)}


def _gradients(model):
    return {k: getattr(p, "main_grad", p.grad).clone() for k, p in model.named_parameters()}


def _steps(rank, ranks, kind, recipe, rows):
    """Gradients of the last of three steps of two microbatches, by rows(batch)."""
    model = model_of(kind, device_of(rank))
    generator = torch.Generator().manual_seed(9)
    for _ in range(3):
        with_main_grads(model)
        for first in (True, False):
            x, dy = (torch.randn(8 * ranks, 2, 32, generator=generator) for _ in range(2))
            x, dy = (t.chunk(ranks, 0)[rank] if rows else t for t in (x, dy))
            if kind == "mlp" or kind == "layer":
                x, dy = x.transpose(0, 1), dy.transpose(0, 1)  # [tokens, batch, hidden]
            x, dy = (t.contiguous().to(device_of(rank)) for t in (x, dy))
            with fp8_autocast(recipe is not None, recipe):
                if isinstance(model, torch.nn.Sequential):
                    y = x
                    for module in model:
                        is_linear = isinstance(module, apex_te.Linear)
                        y = module(y, is_first_microbatch=first) if is_linear else module(y)
                else:
                    y = model(x, is_first_microbatch=first)
            y.backward(dy)
        if rows:
            reduce_main_grads(model, average=False)
    return _gradients(model)


def _sharded_and_whole(rank, kind, recipe):
    ranks = distributed.get_world_size()
    recipe = RECIPES[recipe]
    ours = _steps(rank, ranks, kind, recipe, True)
    whole = _steps(rank, ranks, kind, recipe, False)
    return {key: (ours[key].cpu(), whole[key].cpu()) for key in ours}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "mlp", "layer"])
def test_equals_one_rank(ranks, kind, recipe):
    results = ranks.run(_sharded_and_whole, kind, recipe)
    for found in results:
        for key, (ours, whole) in found.items():
            assert whole.abs().max() > 0, key
            assert torch.equal(ours, results[0][key][0]), key
            if recipe == "none" or (kind, recipe) == ("linear", "delayed"):
                atol = 1e-5 * whole.abs().max().item()
                torch.testing.assert_close(ours, whole, rtol=1e-5, atol=atol)
            else:  # an FP8 cast turns the order of sums before it into steps of its format
                assert decibels(ours, whole) > 25, key


@pytest.mark.cuda
def test_equals_one_rank_on_gpus(two_gpus):
    for recipe in ("none", "delayed"):
        for found in two_gpus.run(_sharded_and_whole, "linear", recipe):
            for key, (ours, whole) in found.items():
                assert decibels(ours, whole) > 40, (recipe, key)


def _exact(rank, average):
    """Gradients of many sizes, dtypes and homes, whose sums have no rounding."""
    ranks = distributed.get_world_size()
    device = device_of(rank)
    model = torch.nn.Module()
    implementation._SMALL, implementation._BUCKET = 4000, 2000  # bytes
    expected = {}
    for i, (shape, dtype, home) in enumerate(
        [
            ((40, 50), torch.float32, "main_grad"),
            ((3, 5), torch.float32, "main_grad"),
            ((7,), torch.bfloat16, "grad"),
            ((16, 16), torch.bfloat16, "main_grad"),
            ((0,), torch.float32, "grad"),
            ((30, 12), torch.float32, "main_grad"),
            ((9,), torch.float32, "grad"),
            ((50, 40), torch.float64, "strided"),
            ((20, 30), torch.float32, "both"),
        ]
    ):
        p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        model.register_parameter(f"p{i}", p)
        values = torch.arange(p.numel(), dtype=torch.float64).view(shape) % 13
        own = (values + rank * 2).to(device)
        total = values * ranks + 2 * sum(range(ranks))
        if home == "main_grad":
            p.main_grad = own.float()
        elif home == "strided":
            p.grad = own.t().contiguous().t().to(dtype)
        elif home == "both":
            p.main_grad, p.grad = own.float() - 1, torch.ones_like(p)
        else:
            p.grad = own.to(dtype)
        expected[f"p{i}"] = total / ranks if average else total

    where = {k: getattr(p, "main_grad", p.grad).data_ptr() for k, p in model.named_parameters()}
    try:
        with recorded("all_reduce", lambda tensor, **kwargs: tensor.data_ptr()) as calls:
            reduce_main_grads(model, average=average)
    finally:
        implementation._SMALL, implementation._BUCKET = 4 << 20, 32 << 20
    found = {}
    for key, p in model.named_parameters():
        gradient = getattr(p, "main_grad", p.grad)
        found[key] = torch.equal(gradient.cpu().double(), expected[key])
        found[key] &= gradient.data_ptr() == where[key]
        found[key] &= not hasattr(p, "main_grad") or p.grad is None
    return found, len(calls), where["p0"] in calls


@pytest.mark.parametrize("average", [True, False])
def test_buckets(ranks, average):
    for found, calls, in_place in ranks.run(_exact, average):
        assert all(found.values()), found
        # The header, p0 and p7 by themselves, fp32 in two buckets, bf16.
        assert calls == 6
        assert in_place


@pytest.mark.cuda
def test_buckets_on_gpus(two_gpus):
    for found, _, in_place in two_gpus.run(_exact, True):
        assert all(found.values()), found
        assert in_place


def _without_waiting(rank):
    """The second call for a model leaves the host alone."""
    device = device_of(rank)
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.zeros(n, device=device)) for n in (5, 7)
    )
    for p in model:
        p.main_grad = torch.full_like(p, 1.0 + rank)
    reduce_main_grads(model, average=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        reduce_main_grads(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [p.main_grad.unique().tolist() for p in model]


@pytest.mark.cuda
def test_no_synchronisation(two_gpus):
    assert two_gpus.run(_without_waiting) == [[[3.0], [3.0]]] * 2


def _on_two_devices(rank):
    """Devices of the numbers that two models with one header send, one on each device."""
    group, reduced = distributed.group.WORLD, []
    check, reduce = implementation._check_agreement, distributed.all_reduce
    implementation._agreed.pop(group, None)
    implementation._check_agreement = lambda *args: None

    def recorded(tensor, **options):
        reduced.append(tensor.device.type)
        return None if tensor.is_meta else reduce(tensor, **options)

    distributed.all_reduce = recorded
    try:
        for device in ("cpu", "meta", "cpu"):
            gradients = [torch.zeros(3, device=device)]
            with contextlib.suppress(NotImplementedError):  # numbers of the meta device are none
                implementation._complete(gradients, list(gradients), group, None)
    finally:
        implementation._check_agreement, distributed.all_reduce = check, reduce
        implementation._agreed.pop(group, None)
    return reduced


def test_numbers_are_sent_from_the_gradients_device(two_ranks):
    assert two_ranks.run(_on_two_devices) == [["cpu", "meta", "cpu"]] * 2


def _partly(rank):
    """Of p0 both ranks have a gradient, of p1 and p2 one, of p3 none; p4 is frozen."""
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(3)) for _ in range(5))
    model[4].requires_grad_(False)
    model[0].grad = torch.full((3,), 1.0 + rank)
    model[1 + rank].grad = torch.full((3,), 4.0)
    reduce_main_grads(model)
    return [None if p.grad is None else p.grad[0].item() for p in model]


def test_a_gradient_that_some_ranks_lack(two_ranks):
    assert two_ranks.run(_partly) == [[1.5, 2.0, 2.0, None, None]] * 2


def _differ(rank, what):
    sizes = [(4, 4)] * 3
    if what == "count" and rank:
        sizes.append((4, 4))
    if what == "size" and rank:
        sizes[1] = (4, 5)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(s)) for s in sizes)
    for i, p in enumerate(model):
        if what == "main_grad" and rank and i == 2:
            p.main_grad = torch.zeros(4, 4)
        else:
            p.grad = torch.zeros_like(p)
    if what == "nothing" and rank:
        model = torch.nn.ParameterList()
    if what == "frozen" and rank:
        model[0].requires_grad_(False)
    return told(reduce_main_grads, model)


def _one_fails(rank):
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    parameter.main_grad = torch.zeros(3 if rank else 16)
    return told(reduce_main_grads, [parameter])


def test_an_error_on_one_rank(two_ranks):
    other, own = two_ranks.run(_one_fails)
    assert own.startswith("ValueError: reduce_main_grads: main_grad must be contiguous with shape")
    assert other.startswith("RankMismatchError: reduce_main_grads: the gradients of every rank")


@pytest.mark.parametrize("what", ["count", "size", "main_grad", "frozen", "nothing"])
def test_other_parameters(two_ranks, what):
    for message in two_ranks.run(_differ, what):
        assert message.startswith("RankMismatchError: reduce_main_grads: every rank of group")


def _expert(rank):
    """Left out of the module's, reduced by themselves over a group of their own."""
    own = [distributed.new_group([r]) for r in range(2)][rank]
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    model[1].allreduce = False
    model[2].sequence_parallel = True
    for p in model:
        p.main_grad = torch.full((2,), 1.0 + rank)
    reduce_main_grads(model)
    reduce_main_grads([model[1], model[1]], own)
    found = [p.main_grad[0].item() for p in model]
    reduce_main_grads((p for p in model if hasattr(p, "sequence_parallel")), average=False)
    return [*found, model[2].main_grad[0].item()]


def test_expert_and_sequence_parallel_parameters(two_ranks):
    assert two_ranks.run(_expert) == [[1.5, 1.0, 1.5, 3.0], [1.5, 2.0, 1.5, 3.0]]


def _tied(rank):
    """A weight whose gradient comes both ways; the dummy of the flag is dropped."""
    linear = apex_te.Linear(16, 16, bias=False, fuse_wgrad_accumulation=True)
    weight, found = linear.weight, []
    for owner in (None, "flag"):
        weight.main_grad = torch.zeros(16, 16)
        if owner:
            weight.grad_added_to_main_grad = False
        x = torch.ones(4, 16) * (1.0 + rank)
        tied = 0.0 if owner else weight.sum()
        (linear(x).sum() + tied).backward()
        flag = getattr(weight, "grad_added_to_main_grad", None)
        reduce_main_grads(linear)
        after = getattr(weight, "grad_added_to_main_grad", None)
        found.append((weight.main_grad.unique().tolist(), weight.grad is None, flag, after))
    return found


def test_gradients_that_come_both_ways(two_ranks):
    expected = [([7.0], True, None, None), ([6.0], True, True, False)]
    assert two_ranks.run(_tied) == [expected] * 2


def _many(rank, case):
    """More parameters than the first collective has numbers for, on one rank or on both."""
    group = distributed.new_group([0, 1])
    small = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    count = 5 if rank and case == "differ" else 5000
    many = [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)]
    found = []

    def run():
        for parameters in (small, many, small, many):
            for parameter in parameters:
                parameter.grad = torch.ones(1)
            if rank:
                parameters[-1].grad = None
            if rank and case == "error" and parameters is many:
                parameters[0].main_grad = torch.zeros(3)
            reduce_main_grads(parameters, group, average=False)
            found.append([parameters[0].grad.item(), parameters[-1].grad.item()])

    with recorded("all_reduce", lambda x, **kwargs: (x.dtype, x.numel())) as calls:
        error = told(run)
    return found, error, [numbers for dtype, numbers in calls if dtype is torch.int32]


def test_more_parameters_than_the_first_collective_holds(two_ranks):
    """It grows once, where all ranks have more; then it is one collective again."""
    for found, error, calls in two_ranks.run(_many, "same"):
        assert (found, error) == ([[2.0, 1.0]] * 4, "nothing was raised")
        assert calls == [4096, 4096, 4096, 8192, 8192]


@pytest.mark.parametrize("case", ["differ", "error"])
def test_ranks_on_both_sides_of_the_size(two_ranks, case):
    for rank, (_, error, calls) in enumerate(two_ranks.run(_many, case)):
        assert calls == [4096, 4096]
        kind = "ValueError" if case == "error" and rank else "RankMismatchError"
        assert error.startswith(f"{kind}: reduce_main_grads: ")


def _rejected(rank):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    replicated = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()]))
    sparse = torch.nn.Embedding(4, 4, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    small = torch.nn.Parameter(torch.zeros(4, 4))
    small.main_grad = torch.zeros(3)
    given = ([parameter], "world"), (parameter,), ([1.0],), ([replicated],), (sparse,), ([small],)
    found = [told(reduce_main_grads, *args) for args in given]
    return [*found, told(reduce_main_grads, [parameter], average=1)]


def test_rejects(two_ranks):
    expected = (
        "TypeError: reduce_main_grads: group must be a torch.distributed.ProcessGroup",
        "TypeError: reduce_main_grads: model must be a torch.nn.Module or parameters, got",
        "TypeError: reduce_main_grads: model must be a torch.nn.Module or parameters, got",
        "TypeError: reduce_main_grads: parameters must not be DTensors over ranks of group",
        "NotImplementedError: reduce_main_grads: gradients must be dense tensors, got",
        "ValueError: reduce_main_grads: main_grad must be contiguous with shape [4, 4]",
        "TypeError: reduce_main_grads: average must be a bool, got int",
    )
    for found in two_ranks.run(_rejected):
        assert_told(found, expected)
