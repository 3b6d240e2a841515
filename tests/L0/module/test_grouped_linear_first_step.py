"""Which groups still have their first step to come, where only the device knows who had rows."""

import copy
import io
import json

import pytest
import torch
from grouped_splits import E4M3, assert_same_state, pair, read_on_device, tensor_of

from apex_te import fp8_autocast
from apex_te.fp8.statistics import fp8_statistics
from apex_te.graphs.graphed_callables import make_graphed_callables
from apex_te.recipe import DelayedScaling
from tests.checks import needs_cuda

pytestmark = pytest.mark.filterwarnings(
    "ignore:apex_te. FP8 matrix products of groups", "ignore:FP8State. amax history"
)

FIRST = DelayedScaling(amax_history_len=4, interval=1000, first_step="current", **E4M3)
SOME, OTHERS = [16, 0, 8, 0], [8, 8, 4, 4]


@pytest.fixture(autouse=True)
def _splits_stay_on_device(monkeypatch):
    read_on_device(monkeypatch)


def run(module, splits, scheme=FIRST, size=1.0, on_device=True):
    generator = torch.Generator().manual_seed(sum(splits) + splits[1])
    weight = next(module.parameters())
    x = (size * torch.randn(24, 48, generator=generator)).to(weight)
    with fp8_autocast(True, scheme):
        out = module(x, tensor_of(splits, weight.device) if on_device else splits)
    out.backward(torch.full_like(out, 1e-3))


def due(module):
    """The flags that a state dict of ``module`` has."""
    (header,) = [v for k, v in module.state_dict().items() if k.endswith("header")]
    return json.loads(bytes(header.tolist()))["first_due"]


def after_some(device):
    """A module that had rows in some groups, counted on the device, and one on the host."""
    module, other = pair(device)
    run(module, SOME)
    run(other, SOME, on_device=False)
    return module, other


def loaded(module):
    new = pair("cpu")[0].to(next(module.parameters()).device)
    new.load_state_dict(module.state_dict())
    return new


def pickled(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def moved(module):
    device = next(module.parameters()).device
    return module.cpu().to(device)


def resized(module):
    module.fp8_state.resize(11)  # a pair of lengths that no other test has
    module.fp8_state.resize(4)
    return module


def observed(module):
    with fp8_statistics(module):
        return module


def saved(module):
    module.state_dict()
    return module


def test_saved_flags(device):
    module, other = after_some(device)
    assert due(module) == due(other)
    assert any(due(module))
    run(module, OTHERS)
    run(other, OTHERS, on_device=False)
    assert due(module) == due(other)
    assert_same_state(module, other)


@pytest.mark.parametrize("way", [loaded, copy.deepcopy, pickled, moved, resized, observed, saved])
def test_groups_keep_their_first_step(device, way):
    """Groups without rows have their first scales later, and the others not again."""
    module, other = after_some(device)
    module = way(module)
    for each, on_device in ((module, True), (other, False)):
        run(each, OTHERS, size=30.0, on_device=on_device)
    assert_same_state(module, other)


def test_another_recipe_and_a_list_know_it(device):
    for scheme, on_device in (
        (DelayedScaling(**{**vars(FIRST), "margin": 1}), True),
        (FIRST, False),
    ):
        module, other = after_some(device)
        run(module, OTHERS, scheme, 30.0, on_device)
        run(other, OTHERS, scheme, 30.0, False)
        assert_same_state(module, other)
        # And what a list has set is not due on the device.
        run(module, OTHERS, scheme, 900.0)
        run(other, OTHERS, scheme, 900.0, False)
        assert_same_state(module, other)


def test_loading_decides(device):
    """What the device was told before does not outlive a state that is loaded, or none."""
    module, other = after_some(device)
    full, host = pair(device)
    run(full, OTHERS)
    run(host, OTHERS, on_device=False)
    module.load_state_dict(full.state_dict())
    other.load_state_dict(host.state_dict())
    assert not any(flag for i, flag in enumerate(due(module)[:12]) if i % 3 < 2)
    for each, on_device in ((module, True), (other, False)):
        run(each, SOME, size=30.0, on_device=on_device)
    assert_same_state(module, other)
    for each in (module, other):
        plain = {k: v for k, v in each.state_dict().items() if "fp8_state" not in k}
        each.load_state_dict(plain, strict=False)
    assert all(due(module))
    for each, on_device in ((module, True), (other, False)):
        run(each, OTHERS, size=900.0, on_device=on_device)
    assert_same_state(module, other)


@pytest.mark.long
def test_compiled_code_knows_it():
    module, other = after_some("cpu")
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    run(compiled, OTHERS, size=30.0, on_device=False)
    run(other, OTHERS, size=30.0, on_device=False)
    assert_same_state(module, other)


def test_a_function_of_scales_is_refused(device):
    module, _ = pair(device)
    scheme = DelayedScaling(
        first_step="current",
        scaling_factor_compute_algo=lambda amax, scale, top, _: top / amax,
        **E4M3,
    )
    with pytest.raises(NotImplementedError, match="needs m_splits as a list of ints, got a tensor"):
        run(module, SOME, scheme)


@pytest.mark.cuda
@needs_cuda
def test_a_graph_has_the_first_step():
    """The steps before the capture are undone, and the first replay makes the first scales."""
    module, other = pair("cuda")
    x = torch.randn(24, 48, device="cuda").bfloat16()
    splits = tensor_of(OTHERS, "cuda")
    graphed = make_graphed_callables(module, (x, splits), fp8_enabled=True, fp8_recipe=FIRST)
    for counts in (SOME, [0, 8, 0, 16]):
        splits.copy_(tensor_of(counts, "cuda"))
        with fp8_autocast(True, FIRST):
            graphed(x, splits)
            other(x, counts)
        assert torch.equal(module.fp8_state.scale_fwd, other.fp8_state.scale_fwd)
    assert due(module)[:12] == due(other)[:12]
