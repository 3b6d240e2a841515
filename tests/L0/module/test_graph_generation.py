"""Generation with a KV cache by CUDA graphs, whose replays compute the step announced last.

On the CPU a stand-in replaces CUDA graphs (graph_stand_in.py).
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from graph_models import RECIPES, count_replays
from graph_stand_in import graphs_on_cpu  # noqa: F401
from torch.fx.experimental.proxy_tensor import make_fx

import apex_te
from apex_te.graphs.graphed_callables import make_graphed_callables
from apex_te.integrations.transformer_engine import _device
from apex_te.integrations.transformer_engine import pytorch as te
from apex_te.integrations.transformer_engine.pytorch.graph import (
    make_graphed_callables as te_make_graphed_callables,
)
from apex_te.module.attention.inference_params import InferenceParams

HEADS, GROUPS, SIZE, ROOM, ROWS, WIDTH = 4, 2, 8, 16, 3, 6
HIDDEN = HEADS * SIZE
# Sequences that begin, go on, end and change places, by steps of several lengths.
STEPS = (
    {"a": 5, "b": 2}, {"a": 1, "b": 1}, {"b": 1, "a": 3, "c": 6}, {"c": 1, "b": 1}, {"d": 4},
    {"d": 1, "e": 1},
)  # fmt: skip
CAPTURED = dict.fromkeys(range(ROWS), WIDTH)
KINDS = (
    "MultiheadAttention", "MultiLatentAttention", "TransformerLayer", "te.TransformerLayer",
    "te.DotProductAttention",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _devices(request, monkeypatch):
    """CUDA graphs or their stand-in; modules of the alias are made where the test asks for."""
    names = request.fixturenames
    if "device" in names and request.getfixturevalue("device").type == "cpu":
        request.getfixturevalue("graphs_on_cpu")
        monkeypatch.setattr(_device, "current_gpu", lambda: None)


def build(kind, layout, device, mask="padding_causal", **kwargs):
    torch.manual_seed(3)
    if kind == "te.DotProductAttention":
        module = te.DotProductAttention(
            HEADS, SIZE, GROUPS, qkv_format=layout, attn_mask_type=mask, layer_number=1, **kwargs
        )
    elif kind == "MultiheadAttention":
        module = apex_te.MultiheadAttention(
            HIDDEN, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, layer_number=1,
            attn_mask_type=mask, qkv_format=layout, device=device, **kwargs,
        )  # fmt: skip
    elif kind == "MultiLatentAttention":
        module = apex_te.MultiLatentAttention(
            HIDDEN, HEADS, 24, 16, 12, SIZE, 10, layer_number=1, attn_mask_type=mask,
            qkv_format=layout, device=device, init_method=torch.nn.init.xavier_normal_, **kwargs,
        )  # fmt: skip
    else:
        package = te if kind.startswith("te.") else apex_te
        module = package.TransformerLayer(
            HIDDEN, 64, HEADS, num_gqa_groups=GROUPS, hidden_dropout=0.0, attention_dropout=0.0,
            layer_number=1, self_attn_mask_type=mask, attn_input_format=layout, device=device,
            **kwargs,
        )  # fmt: skip
    return module.eval()


def texts(kind, device):
    """Inputs of whole sequences [s, ...] by name, one for each argument."""
    torch.manual_seed(7)
    shapes = [(HIDDEN,)]
    if kind == "te.DotProductAttention":
        shapes = [(HEADS, SIZE), (GROUPS, SIZE), (GROUPS, SIZE)]
    return {name: [torch.randn(ROOM, *s, device=device) for s in shapes] for name in "abcde"}


def padded(parts, layout, rows=ROWS, width=WIDTH):
    """Joins the sequences' new tokens in inputs of the captured size, padded by sevens."""
    if layout == "thd":
        tokens = torch.cat(parts)
        rest = rows * width - len(tokens)
        return torch.cat((tokens, torch.full_like(parts[0][:1], 7.0).repeat_interleave(rest, 0)))
    out = parts[0].new_full((rows, width, *parts[0].shape[1:]), 7.0)
    for row, part in zip(out, parts, strict=False):
        row[: len(part)] = part
    return out if layout == "bshd" else out.transpose(0, 1).contiguous()


def split(out, counts, layout):
    """Tokens of each sequence, and what is left: the padding."""
    if layout == "thd":
        return list(out[: sum(counts)].split(counts)), [out[sum(counts) :]]
    rows = out.unbind(0 if layout == "bshd" else 1)
    found = [row[:count] for row, count in zip(rows, counts, strict=False)]
    rest = [row[count:] for row, count in zip(rows, counts, strict=False)]
    return found, [*rest, *rows[len(counts) :]]


def whole(kind, inputs, device, **kwargs):
    """What one forward of each whole sequence gives."""
    options = {k: kwargs[k] for k in ("window_size",) if k in kwargs}
    module = build(kind, "bshd", device, "causal", **options)
    call = {k: v for k, v in kwargs.items() if k != "window_size"}
    with torch.no_grad():
        return {name: module(*(x[None] for x in each), **call)[0] for name, each in inputs.items()}


def generate(module, inputs, expected, layout, params, tolerance=None, **kwargs):
    """Runs all steps and compares each with the whole sequences' forward."""
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
    at = dict.fromkeys(inputs, 0)
    for step in STEPS:
        for name in at:
            at[name] = at[name] if name in params.sequences and name in step else 0
        params.pre_step(OrderedDict(step))
        parts = [
            padded([inputs[n][i][at[n] : at[n] + count] for n, count in step.items()], layout)
            for i in range(len(inputs["a"]))
        ]
        out = module(*parts, inference_params=params, **kwargs)
        found, rest = split(out.detach(), list(step.values()), layout)
        for (name, count), got in zip(step.items(), found, strict=True):
            want = expected[name][at[name] : at[name] + count]
            torch.testing.assert_close(got, want, **tolerance)
            at[name] += count
        if "DotProduct" in str(type(module)):
            assert all(not x.any() for x in rest)


def samples(kind, layout, device):
    x = {name: [torch.ones_like(t) for t in each] for name, each in texts(kind, device).items()}
    return [padded([x["a"][i][:WIDTH] for _ in range(ROWS)], layout) for i in range(len(x["a"]))]


def cache_of(kind):
    if kind.startswith("te."):
        return te.InferenceParams(ROWS, ROOM, GROUPS, SIZE, torch.float32)
    return InferenceParams(ROWS, ROOM)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_compute_the_step_announced_last(kind, layout, device):
    """Graphs captured at the largest step equal forwards of whole sequences in every later step."""
    inputs, kwargs = texts(kind, device), {}
    if kind != "te.DotProductAttention":
        kwargs["rotary_pos_emb"] = torch.rand(ROOM, 1, 1, SIZE, device=device) * 3
    expected = whole(kind, inputs, device, **kwargs)
    module, params = build(kind, layout, device), cache_of(kind)
    params.pre_step(CAPTURED)
    make = te_make_graphed_callables if kind.startswith("te.") else make_graphed_callables
    make(
        module, samples(kind, layout, device),
        sample_kwargs={"inference_params": params, **kwargs},
    )  # fmt: skip
    params.reset()
    generate(module, inputs, expected, layout, params, **kwargs)
    assert count_replays(module) == len(STEPS)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_in_bfloat16(kind, layout):
    """The kernels of 16-bit attention, for packed sequences too, read the step on the device."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    inputs = {n: [x.to(dtype) for x in each] for n, each in texts(kind, device).items()}
    module = build(kind, layout, device).to(dtype)
    plain = build(kind, "bshd", device, "causal").to(dtype)
    with torch.no_grad():
        expected = {n: plain(*(x[None] for x in each))[0] for n, each in inputs.items()}
    params = InferenceParams(ROWS, ROOM)
    params.pre_step(CAPTURED)
    args = [x.to(dtype) for x in samples(kind, layout, device)]
    make_graphed_callables(module, args, sample_kwargs={"inference_params": params})
    params.reset()
    generate(module, inputs, expected, layout, params, {"rtol": 3.5e-2, "atol": 3.5e-2})
    assert count_replays(module) == len(STEPS)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_steps_without_a_graph(kind, layout, device):
    """Inputs larger than the announced step are taken in eager calls, as Transformer Engine's."""
    inputs = texts(kind, device)
    expected = whole(kind, inputs, device)
    with torch.no_grad():
        generate(build(kind, layout, device), inputs, expected, layout, cache_of(kind))


def test_graphs_and_samples_as_transformer_engine_has_them(device):
    """Samples may be a list; ``reset()`` frees the graph, of a copy and of the module."""
    module = build("MultiheadAttention", "bshd", device, "causal")
    x = torch.randn(2, 4, HIDDEN, device=device)
    other = build("TransformerLayer", "bshd", device, "causal")
    expected = [m(x) for m in (module, other)]
    made = te_make_graphed_callables((module, other), [[x], (x,)])
    for graphed, want in zip(made, expected, strict=True):
        assert torch.equal(graphed(x), want)
        assert count_replays(graphed) == 1
        copied = copy.deepcopy(graphed)
        copied.reset()
        graphed.reset()
        assert torch.equal(graphed(x), want)
        assert torch.equal(copied(x), want)
        assert count_replays(graphed) == 1
    assert te_make_graphed_callables(module, [x]) is module


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_windows_count_back_from_each_sequence(layout, device):
    kind, size = "te.DotProductAttention", {"window_size": (3, 0)}
    inputs = texts(kind, device)
    expected = whole(kind, inputs, device, **size)
    module, params = build(kind, layout, device, **size), cache_of(kind)
    params.pre_step(CAPTURED)
    options = {"sample_kwargs": {"inference_params": params}}
    make_graphed_callables(module, samples(kind, layout, device), **options)
    params.reset()
    generate(module, inputs, expected, layout, params)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_capture_records_holds_no_length(kind, layout, monkeypatch):
    """The operations that one step runs, run again, compute another step, as a replay does."""
    monkeypatch.setattr(_device, "current_gpu", lambda: None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # no value is checked
    device = torch.device("cpu")
    inputs = texts(kind, device)
    expected = whole(kind, inputs, device)
    module, params = build(kind, layout, device), cache_of(kind)
    args = samples(kind, layout, device)
    params.pre_step(CAPTURED)
    with torch.no_grad():
        module(*args, inference_params=params)
        params.table(device)  # as a GPU's first call makes it
        with params.captured({}):
            trace = make_fx(lambda *args: module(*args, inference_params=params))(*args)
        params.reset()
        generate(lambda *args, inference_params: trace(*args), inputs, expected, layout, params)


def test_a_capture_keeps_what_is_cached(device):
    """A capture between two steps leaves the tokens that are cached as they are."""
    kind, inputs = "MultiheadAttention", texts("MultiheadAttention", device)
    module, params = build(kind, "bshd", device), cache_of(kind)
    twin = copy.deepcopy(module)
    params.pre_step({"a": 3})
    with torch.no_grad():
        twin(inputs["a"][0][None, :3], inference_params=params)
    before = [x.clone() for x in params.key_value_memory_dict[1]]
    sample = torch.ones(1, 3, HIDDEN, device=device)
    make_graphed_callables(module, (sample,), sample_kwargs={"inference_params": params})
    for old, new in zip(before, params.key_value_memory_dict[1], strict=True):
        assert torch.equal(old, new)


def test_what_a_graph_has_no_room_for_is_refused(device):
    module, params = build("MultiheadAttention", "bshd", device), InferenceParams(4, ROOM)
    x = torch.ones(2, 3, HIDDEN, device=device)
    options = {"sample_kwargs": {"inference_params": params}}
    with pytest.raises(RuntimeError, match="inference_params must have announced its tokens by"):
        make_graphed_callables(module, (x,), **options)
    params.pre_step({0: 3, 1: 3})
    make_graphed_callables(module, (x,), **options)
    params.reset()
    with pytest.raises(ValueError, match=r"pre_step must be called before each replay"):
        module(x, inference_params=params)
    for step, message in (
        ({0: 1, 1: 1, 2: 1}, "at most 2 sequences as captured, got 3"),
        ({0: 4}, "at most 3 new tokens of a sequence as captured, got 4"),
    ):
        params.reset()
        params.pre_step(step)
        with pytest.raises(ValueError, match=message):
            module(x, inference_params=params)
    with pytest.raises(ValueError, match=r"must be <apex_te.*as captured, got <apex_te"):
        module(x, inference_params=InferenceParams(2, ROOM))
    thd, params = build("MultiheadAttention", "thd", device), InferenceParams(4, ROOM)
    params.pre_step({0: 2})
    angles = torch.rand(4, 1, 1, SIZE, device=device)
    options = {"sample_kwargs": {"inference_params": params, "rotary_pos_emb": angles}}
    make_graphed_callables(thd, (x[0],), **options)
    for steps, message in (
        ([{0: 2, 1: 2}], "at most 3 new tokens as captured, got 4"),
        ([{0: 3}, {0: 2}], "at most 4 tokens of a sequence, for which there are angles as cap"),
    ):
        params.reset()
        for step in steps:
            params.pre_step(step)
        with pytest.raises(ValueError, match=message):
            thd(x[0], inference_params=params, rotary_pos_emb=angles)


@pytest.mark.cuda
def test_own_captures_read_the_device():
    """A user's own CUDA graph computes later steps, but does not allocate the cache."""
    device = torch.device("cuda")
    kind, inputs = "TransformerLayer", texts("TransformerLayer", device)
    expected = whole(kind, inputs, device)
    module, params = build(kind, "bshd", device), InferenceParams(ROWS, ROOM)
    (x,) = samples(kind, "bshd", device)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        first = InferenceParams(ROWS, ROOM)
        first.pre_step(CAPTURED)
        module(x, inference_params=first)  # builds what kernels need
        params.pre_step(CAPTURED)
        refused = pytest.raises(RuntimeError, match="the layers must have run once, after pre_step")
        with refused, torch.cuda.graph(graph):
            module(x, inference_params=params)
        module(x, inference_params=params)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(x, inference_params=params)
        params.reset()

        def replay(given, inference_params):
            x.copy_(given)
            graph.replay()
            return out

        generate(replay, inputs, expected, "bshd", params)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_graphs_in_fp8_equal_eager_calls(name, device):
    """In an FP8 region a replay gives the bits of an eager call with the same padded inputs."""
    inputs, recipe = texts("TransformerLayer", device), RECIPES[name]
    module, twin = (build("TransformerLayer", "bshd", device) for _ in range(2))
    caches = [InferenceParams(ROWS, ROOM) for _ in range(2)]
    caches[0].pre_step(CAPTURED)
    make_graphed_callables(
        module, samples("TransformerLayer", "bshd", device), fp8_enabled=True, fp8_recipe=recipe,
        sample_kwargs={"inference_params": caches[0]},
    )  # fmt: skip
    caches[0].reset()
    for begin, count in ((0, 5), (5, 1), (6, 2)):
        x = padded([inputs[n][0][begin : begin + count] for n in "ab"], "bshd")
        outs = []
        for model, cache in zip((module, twin), caches, strict=True):
            cache.pre_step({"a": count, "b": count})
            with apex_te.fp8_autocast(fp8_recipe=recipe):
                outs.append(model(x, inference_params=cache).detach().clone())
        assert torch.equal(*outs)
    assert count_replays(module) == 3
