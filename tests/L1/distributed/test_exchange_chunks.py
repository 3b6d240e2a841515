"""MoELayer whose ranks exchange rows in parts, against one exchange of all of them."""

import gc
import warnings
import weakref
from unittest import mock

import pytest
import torch
from on_rank import assert_told, device_of, told
from shards import decibels
from test_moe_layer_ranks import EXCHANGES, HIDDEN, RECIPES, layer_of, tokens_of
from torch import distributed

import apex_te
from apex_te import flush_fp8_state, fp8_autocast
from apex_te.comm.exchange_parts import Places, joined
from apex_te.comm.row_exchange import Travel
from apex_te.fp8.scheme.base import GroupQuantizer
from apex_te.fp8.scheme.block import BlockGroupQuantizer
from apex_te.module import moe_layer
from tests.checks import assert_same_bits

WAYS = ("plain", "checkpoint", "delayed wgrad", "microbatches")
# Of parts of tokens: in these a row is cast by its own values, or by scales that are known.
EXACT = ("delayed", "blockwise")
MAIN_GRAD = 3.0  # before the first step


def made(device, chunks, recipe, fused=False, **options):
    group = distributed.group.WORLD
    layer = layer_of(
        device, exchange_chunks=chunks, expert_group=group, experts=8, ffn=128, stored=recipe,
        fuse_wgrad_accumulation=fused, **options,
    )  # fmt: skip
    for weight in (layer.fc1.weight, layer.fc2.weight) if fused else ():
        weight.main_grad = torch.full(weight.shape, MAIN_GRAD, device=device)
    return layer


def run(layer, x, dy, recipe, way="plain"):
    """Output and gradient of x; weights' gradients add up."""
    x = x.clone().requires_grad_()
    for first in (True, False) if way == "microbatches" else (None,):
        with fp8_autocast(recipe is not None, recipe):
            inputs = (layer, x, first)
            out = apex_te.checkpoint(*inputs) if way == "checkpoint" else layer(*inputs[1:])
        out.backward(dy)
        if way == "delayed wgrad":
            layer.backward_dw()
    return out.detach(), x.grad


def gradient(parameter, way):
    """The sum of a weight's gradients; the first microbatch overwrites ``main_grad``."""
    if not hasattr(parameter, "main_grad"):
        return parameter.grad.clone()
    return parameter.main_grad - (0.0 if way == "microbatches" else MAIN_GRAD)


def against_one(rank, exchange, recipe, chunks, way, fused, held, wire):
    device, scaling = device_of(rank), RECIPES[recipe]
    x, dy = tokens_of(exchange, device)[rank]
    options = {
        "exchange": exchange, "wire": wire, "bias": not fused, "held": held,
        "delay_wgrad_compute": way == "delayed wgrad",
    }  # fmt: skip
    first, second = (made(device, n, scaling, fused, **options) for n in (1, chunks))
    if recipe == "delayed":  # its first scales are those of the first part
        run(first, x, dy, scaling, way)
        flush_fp8_state()
        second.load_state_dict(first.state_dict())
        for weight in (first.fc1.weight, first.fc2.weight) if fused else ():
            weight.main_grad.fill_(MAIN_GRAD)
        first.zero_grad()
    exact, close = [], {}
    for seed in range(2):
        torch.manual_seed(seed)
        x, dy = torch.randn_like(x), torch.randn_like(dy)
        found, wanted = (run(layer, x, dy, scaling, way) for layer in (second, first))
        exact.append((found, wanted))
        for name, value in second.named_parameters():
            pair = value, first.get_parameter(name)
            close[f"{seed} {name}"] = [gradient(p, way) for p in pair]
        flush_fp8_state()
        for name in ("fc1", "fc2") if recipe == "delayed" else ():
            states = [layer.get_submodule(name).fp8_state for layer in (second, first)]
            exact.append(tuple([s.scale_fwd.clone(), s.scale_bwd.clone()] for s in states))
    # After all collectives, which one rank alone cannot leave.
    if exchange == "all_to_all":
        for found, wanted in (*exact, *close.values()):
            assert_equal(found, wanted)
        return
    for i, (found, wanted) in enumerate(exact):
        if recipe in EXACT:
            assert_same_bits(found, wanted)
        close |= {f"{i} {k}": pair for k, pair in enumerate(zip(found, wanted, strict=True))}
    for name, pair in close.items():
        ratio = decibels(*pair)
        least = 16  # FP8 data of other rows, or of other blocks of weights' gradients
        if recipe in ("none", "delayed"):  # sums in another order, or of parts in bf16
            rounded = device.type == "cuda" or (recipe == "delayed" and not fused)
            least = 40 if rounded else 100
        assert ratio > least, f"{name}: {ratio:.1f} dB"


def assert_equal(found, wanted):
    """Equal but for the sign of zeros."""
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wire", [None, "blockwise"])
@pytest.mark.parametrize("held", [False, True], ids=["bf16 weights", "FP8 weights"])
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("recipe", ["none", "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_equals_one_exchange(each_two, exchange, recipe, chunks, way, fused, held, wire):
    each_two.run(against_one, exchange, recipe, chunks, way, fused, held, wire)


@pytest.mark.parametrize("way", ["plain", "checkpoint", "microbatches"])
def test_experts_one_by_one(each_two, way):
    each_two.run(against_one, "all_to_all", "mxfp8", 2, way, False, False, None)


def few_tokens(rank, exchange, recipe):
    """Fewer tokens than parts, and none on the last rank."""
    device, scaling = device_of(rank), RECIPES[recipe]
    count = 3 if exchange == "all_gather" or not rank else 0
    x, dy = (t[:count] for t in tokens_of("all_gather", device)[rank])
    layers = [made(device, n, scaling, True, exchange=exchange, bias=False) for n in (1, 4)]
    results = [run(layer, x, dy, scaling, "microbatches") for layer in layers]
    if recipe in EXACT or exchange == "all_to_all":
        assert_equal(*results)
    for pair in zip(*results, strict=True):
        assert not count or decibels(*pair) > 40
    for name in ("fc1", "fc2"):
        grads = [gradient(layer.get_submodule(name).weight, "microbatches") for layer in layers]
        assert decibels(*grads) > 16


@pytest.mark.parametrize("recipe", ["none", "blockwise"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_few_tokens(each_two, exchange, recipe):
    each_two.run(few_tokens, exchange, recipe)


def order(rank, exchange):
    """What runs in forward and backward: D and C dispatch and combine a part, E are its experts."""
    log, numbers = [], {}
    of, run_ordered = vars(Travel).copy(), moe_layer.run_ordered

    def named(travel):
        kind = "C" if travel._returns else "D"
        numbers.setdefault(kind, [])
        if travel not in numbers[kind]:
            numbers[kind].append(travel)
        # The first brings tokens into the order of parts, or probabilities to all ranks.
        return f"{kind}{numbers[kind].index(travel) - (kind == 'D')}"

    def logged(method, sign):
        def call(travel, *args):
            log.append(named(travel) + sign)
            return of[method](travel, *args)

        return call

    def experts(*args):
        part = sum(entry[0] == "E" for entry in log)
        log.append(f"E{part}")
        out = run_ordered(*args)
        out.register_hook(lambda grad: log.append(f"E{part}"))
        return out

    signs = {"begin": "+", "begin_gradient": "+", "take": "-"}
    calls = {method: logged(method, sign) for method, sign in signs.items()}
    device = device_of(rank)
    layer = made(device, 3, None, exchange=exchange)
    x, dy = tokens_of(exchange, device)[rank]
    with (
        mock.patch.multiple(Travel, **calls),
        mock.patch.object(moe_layer, "run_ordered", experts),
    ):
        out = layer(x.requires_grad_())
        forward = log.copy()
        log.clear()
        out.backward(dy)
    return forward, log


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_order(each_two, exchange):
    """A part's experts run while the next part and the last results travel, also in backward."""
    wanted = ["D-1+", "D-1-", "D0+", "D1+", "D0-", "E0", "C0+", "D2+", "D1-", "E1", "C1+", "C0-"]
    wanted += ["D2-", "E2", "C2+", "C1-", "C2-"]
    for forward, backward in each_two.run(order, exchange):
        assert forward == wanted
        other = {"+": "-", "-": "+"}
        assert backward == [e[:-1] + other.get(e[-1], e[-1]) for e in reversed(wanted)]


def casts(rank, exchange, recipe):
    """For each value of is_first_microbatch: copies of weights that forward made, and that are
    there before backward; and the same after backward."""
    device, scaling = device_of(rank), RECIPES[recipe]
    x, dy = tokens_of(exchange, device)[rank]
    layer = made(device, 3, scaling, bias=False, exchange=exchange)
    kind = BlockGroupQuantizer if recipe == "blockwise" else GroupQuantizer
    copies, of = [], kind.quantize_matrices

    def recorded(*args, **kwargs):
        result = of(*args, **kwargs)
        copies.extend(weakref.ref(copy) for copy in result[:2] if copy is not None)
        return result

    def counts():
        gc.collect()
        return len(copies), sum(ref() is not None for ref in copies)

    found = {}
    with mock.patch.object(kind, "quantize_matrices", recorded):
        for first in (None, True, False):
            copies.clear()
            with fp8_autocast(True, scaling):
                out = layer(x.requires_grad_(), first)
            before = counts()
            out.backward(dy)
            del out
            found[first] = before, counts()
    return found


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_weights_are_cast_once(each_two, exchange, recipe):
    """Two weights, each in two layouts; without microbatches no copy outlives its use."""
    wanted = {None: ((2, 0), (4, 0)), True: ((4, 4), (4, 4)), False: ((0, 0), (0, 0))}
    assert each_two.run(casts, exchange, recipe) == [wanted] * 2


def test_joined_parts():
    """Parts that lie one after the other are joined as they lie, others are copied."""
    places = Places([2, 0, 3])
    rounds = []
    for _ in range(2):
        parts = [places.of(part)(torch.empty(9, 4)) for part in (2, 0, 1)]
        for value, part in enumerate(parts):
            part.fill_(value)
        rounds.append([parts[1], parts[2], parts[0]])
    assert [len(part) for part in rounds[0]] == [2, 0, 3]
    for parts in rounds:
        whole = joined(parts)
        assert torch.equal(whole, torch.cat(parts))
        assert whole.data_ptr() == parts[0].data_ptr()
    assert rounds[0][0].data_ptr() != rounds[1][0].data_ptr()
    for parts in (rounds[0][::-1], [rounds[0][0], rounds[1][2]]):
        assert torch.equal(joined(parts), torch.cat(parts))


def refused(rank):
    group = distributed.group.WORLD
    options = {"expert_group": group, "num_experts": 4}
    found = [told(apex_te.MoELayer, HIDDEN, 48, exchange_chunks=n, **options) for n in (0, 2.0)]
    found.append(told(apex_te.MoELayer, HIDDEN, 48, exchange_chunks=3, **options))
    layer = apex_te.MoELayer(HIDDEN, 48, exchange_chunks=1 + rank, **options)
    return [*found, told(layer, torch.randn(4, HIDDEN))]


def test_errors(two_ranks):
    for found in two_ranks.run(refused):
        assert_told(found, [
            "ValueError: MoELayer: exchange_chunks must be at least 1, got 0",
            "TypeError: MoELayer: exchange_chunks must be an int, got float",
            "ValueError: MoELayer: exchange_chunks must be at most the 2 experts of a rank with "
            "exchange 'all_to_all', got 3",
            "RankMismatchError: TokenDispatcher: the ranks of group (ranks 0, 1) must have the "
            "same exchange_chunks (got 1 on rank 0 and 2 on rank 1)",
        ])  # fmt: skip


def compiled(rank, exchange):
    """Parts in what torch.compile cannot trace, and one exchange in what it can."""
    device = device_of(rank)
    layers = [made(device, n, None, exchange=exchange) for n in (1, 2)]
    x, dy = tokens_of(exchange, device)[rank]
    wanted = run(layers[0], x, dy, None)
    found = run(torch.compile(layers[1], backend="eager"), x, dy, None)
    assert min(decibels(*pair) for pair in zip(found, wanted, strict=True)) > 100


@pytest.mark.long
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_compiled(two_ranks, exchange):
    two_ranks.run(compiled, exchange)


def waits(rank, exchange, chunks):
    """How often a step makes the host wait for the GPU."""
    device = device_of(rank)
    layer = made(device, chunks, RECIPES["delayed"], exchange=exchange, bias=False)
    x, dy = tokens_of(exchange, device)[rank]
    for _ in range(2):  # the second makes the ranks' first update of scales
        run(layer, x, dy, RECIPES["delayed"])
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(layer, x, dy, RECIPES["delayed"])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # A process's first change of the mode warns, too, of "synchronizing operations".
    return sum("called a synchronizing" in str(warning.message) for warning in found)


@pytest.mark.cuda
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_host_waits(two_gpus, exchange):
    """For "all_to_all" once, however many parts."""
    expected = [1 if exchange == "all_to_all" else 0] * 2
    assert [two_gpus.run(waits, exchange, n) for n in (1, 3)] == [expected] * 2
