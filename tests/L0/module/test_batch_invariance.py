"""Under ``batch_invariant`` a row has the same bits in any batch, and with a cache as without."""

import contextlib
import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from checks import assert_same_bits, needs_cuda
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import batch_invariant, fp8_autocast, is_batch_invariant
from apex_te.module._core import plain_functions
from apex_te.recipe import BlockScaling, RowwiseScaling
from apex_te.runtime import invariance

H = 128
COUNTS = {
    "cpu": [1, 2, 3, 7, 8, 31, 33, 63, 64, 65, 129, 150],
    "cuda": [1, 2, 3, 8, 31, 64, 127, 129, 257, 511, 513, 1000, 2049, 4096, 8192],
}
RECIPES = {
    "none": None, "pow2": BlockScaling(), "fp32": BlockScaling(pow2=False),
    "rowwise": RowwiseScaling(),
}  # fmt: skip
ONE_OF_EACH = [None, BlockScaling(), RowwiseScaling()]
MODULES = {
    "Linear": lambda **k: apex_te.Linear(H, 192, **k),
    "LayerNormLinear": lambda **k: apex_te.LayerNormLinear(H, 192, **k),
    "RMSNormLinear": lambda **k: apex_te.LayerNormLinear(H, 192, normalization="RMSNorm", **k),
    "LayerNormMLP": lambda **k: apex_te.LayerNormMLP(H, 256, **k),
    "swiglu": lambda **k: apex_te.LayerNormMLP(
        H, 256, activation="swiglu", normalization="RMSNorm", bias=False, **k
    ),
    "LayerNorm": apex_te.LayerNorm,
    "RMSNorm": apex_te.RMSNorm,
}
OFF = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def default_dtype(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def skip_without_blocks(device, recipe):
    needs = isinstance(recipe, BlockScaling) and device.type == "cuda"
    if needs and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block-scaled GEMMs need sm_90")


def region(recipe):
    if recipe is None:
        return contextlib.nullcontext()
    return fp8_autocast(fp8_recipe=recipe)


@pytest.fixture
def mode():
    with batch_invariant():
        yield


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_rows_of_modules(name, recipe, device, mode):
    skip_without_blocks(device, recipe)
    args = (H,) if name in ("LayerNorm", "RMSNorm") else ()
    module = MODULES[name](*args, device=device, params_dtype=default_dtype(device))
    counts = COUNTS[device.type]
    x = torch.randn(counts[-1], H, device=device, dtype=default_dtype(device))
    with region(recipe):
        full = module(x)  # a training forward
        with torch.no_grad():
            for count in counts:
                assert_same_bits(module(x[:count].clone()), full[:count])
                assert_same_bits(module(x[-count:].clone()), full[-count:])
        with batch_invariant(False):
            usual = module(x)
    tolerance = 0.05 if device.type == "cuda" else 1e-4
    torch.testing.assert_close(full, usual, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gradients_are_the_usual_ones(recipe, device):
    skip_without_blocks(device, recipe)
    module = MODULES["swiglu"](device=device, params_dtype=default_dtype(device))
    x = torch.randn(70, H, device=device, dtype=default_dtype(device), requires_grad=True)
    grads = []
    for enabled in (False, True):
        with batch_invariant(enabled), region(recipe):
            out = module(x)
        grads.append(torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()]))
    tolerance = 0.05 if device.type == "cuda" else 1e-4
    for usual, found in zip(*grads, strict=True):
        assert (usual - found).norm() <= tolerance * usual.norm()


ATTENTION = {
    "causal": {"attn_mask_type": "causal"},
    "window": {"attn_mask_type": "causal", "window_size": (20, 0)},
    "sinks": {"attn_mask_type": "causal", "softmax_type": "learnable"},
    "scale": {"attn_mask_type": "causal", "softmax_scale": 0.3},
}


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("size", [16, 20])
def test_attention_of_prefixes_and_single_queries(kind, groups, size, device, mode):
    attention = apex_te.DotProductAttention(
        4, size, num_gqa_groups=groups, qkv_format="bshd", attention_dropout=0.0, device=device,
        **ATTENTION[kind],
    )  # fmt: skip
    tokens = 300 if device.type == "cuda" else 70
    shape, dtype = (2, tokens), default_dtype(device)
    q = torch.randn(*shape, 4, size, device=device, dtype=dtype, requires_grad=True)
    k = torch.randn(*shape, groups, size, device=device, dtype=dtype, requires_grad=True)
    v = torch.randn(*shape, groups, size, device=device, dtype=dtype, requires_grad=True)
    full = attention(q, k, v)
    assert "under batch_invariant" in attention.explain(q, k, v)
    with torch.no_grad():
        for n in (1, 2, 31, 33, 64, 65, tokens):
            assert_same_bits(attention(q[:, :n], k[:, :n], v[:, :n]), full[:, :n])
            one = attention(
                q[1:, n - 1 : n], k[1:, :n], v[1:, :n], attn_mask_type="causal_bottom_right"
            )
            assert_same_bits(one, full[1:, n - 1 : n])
    with batch_invariant(False):
        usual = attention(q, k, v)
    tolerance = 0.02 if device.type == "cuda" else 1e-5
    torch.testing.assert_close(full, usual, rtol=tolerance, atol=tolerance)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (full, usual)]
    for found, expected in zip(*grads, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("sink", ["vanilla", "off-by-one"])
def test_padded_and_packed_sequences(left, kind, sink, device, mode):
    """Padded or packed with others, a sequence has the bits that it has alone."""
    attention = apex_te.DotProductAttention(
        4, 16, qkv_format="bshd", attn_mask_type=kind, attention_dropout=0.0, softmax_type=sink
    ).to(device)
    kind_alone = "no_mask" if kind == "padding" else "causal"
    lengths, dtype = [70, 9, 33], default_dtype(device)
    sequences = [torch.randn(3, n, 4, 16, device=device, dtype=dtype) for n in lengths]
    alone = [
        attention(*(x[None] for x in each), attn_mask_type=kind_alone)[0] for each in sequences
    ]
    padded = torch.zeros(3, len(lengths), 70, 4, 16, device=device, dtype=dtype)
    mask = torch.ones(len(lengths), 1, 1, 70, dtype=torch.bool, device=device)
    places = [slice(70 - n, 70) if left else slice(0, n) for n in lengths]
    for i, (place, each) in enumerate(zip(places, sequences, strict=True)):
        padded[:, i, place] = each
        mask[i, ..., place] = False
    out = attention(*padded, mask)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    packed = attention(*torch.cat(sequences, 1), qkv_format="thd", cu_seqlens_q=cu)
    for i, (place, expected) in enumerate(zip(places, alone, strict=True)):
        assert_same_bits(out[i, place], expected)
        assert_same_bits(packed[cu[i] : cu[i + 1]], expected)


def test_padded_keys_of_cross_attention(device, mode):
    """Wherever the padding of queries and keys is; gradients are those without the mode."""
    attention = apex_te.DotProductAttention(
        4, 16, 2, qkv_format="sbhd", attn_mask_type="padding", attention_type="cross"
    ).to(device)
    dtype = default_dtype(device)
    q, k, v = (torch.randn(n, 2, h, 16) for n, h in ((40, 4), (90, 2), (90, 2)))
    q, k, v = (x.to(device, dtype).requires_grad_() for x in (q, k, v))
    queries, keys = torch.rand(2, 1, 1, 40) < 0.4, torch.rand(2, 1, 1, 90) < 0.4
    out = attention(q, k, v, (queries.to(device), keys.to(device)))
    for i in range(2):
        rows, columns = (~m[i, 0, 0].to(device) for m in (queries, keys))
        one = (q[rows, i : i + 1], k[columns, i : i + 1], v[columns, i : i + 1])
        alone = attention(*one, attn_mask_type="no_mask")
        assert_same_bits(out[rows, i : i + 1], alone)
    with batch_invariant(False):
        usual = attention(q, k, v, (queries.to(device), keys.to(device)))
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, usual)]
    tolerance = 0.02 if device.type == "cuda" else 1e-5
    for found, expected in zip(*grads, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("announced", [False, True])
def test_steps_with_a_cache_are_the_training_forward(recipe, announced, device, mode):
    skip_without_blocks(device, recipe)
    dtype, tokens = default_dtype(device), 40
    layers = [
        apex_te.TransformerLayer(
            H, 256, 4, num_gqa_groups=2, attn_input_format="bshd", layer_number=number,
            normalization=norm, activation="swiglu", device=device, params_dtype=dtype, **OFF,
        )
        for number, norm in ((1, "RMSNorm"), (2, "LayerNorm"))
    ]  # fmt: skip
    angles = apex_te.RotaryPositionEmbedding(H // 4)(64).to(device)

    def run(x, cache=None):
        with region(recipe):
            for layer in layers:
                x = layer(x, rotary_pos_emb=angles, inference_params=cache)
        return x

    x = torch.randn(3, tokens, H, device=device, dtype=dtype)
    expected = run(x)
    for layer in layers:
        layer.eval()
    cache = apex_te.InferenceParams(3, 64)
    ranges = [(0, 33), *((i, i + 1) for i in range(33, 36)), (36, tokens)]
    with torch.no_grad():
        for begin, end in ranges:
            if announced:
                cache.pre_step(dict.fromkeys(range(3), end - begin))
            out = run(x[:, begin:end], cache)
            cache.sequence_len_offset += end - begin
            assert_same_bits(out, expected[:, begin:end])


@pytest.mark.parametrize(
    ("vocabulary", "recipe"),
    [(256, None), (259, None), (256, RECIPES["pow2"]), (256, RECIPES["rowwise"])],
)
def test_log_probs(vocabulary, recipe, device, mode):
    skip_without_blocks(device, recipe)
    dtype = default_dtype(device)
    hidden = torch.randn(150, H, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, H, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (150,), device=device)
    targets[4] = -100

    def run(rows, chunk=None):
        return apex_te.linear_log_probs(
            hidden[rows], weight, targets[rows], temperature=0.7, return_entropy=True,
            fp8_recipe=recipe, chunk_rows=chunk,
        )  # fmt: skip

    full = run(slice(None))
    for rows in (slice(0, 1), slice(4, 5), slice(3, 40), slice(149, 150), slice(20, 150)):
        for chunk in (None, 32):
            for found, expected in zip(run(rows, chunk), full, strict=True):
                assert_same_bits(found, expected[rows])
    with batch_invariant(False):
        usual = run(slice(None))
    grads = []
    for found, expected in zip(full, usual, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    for pair in (full, usual):
        grads.append(torch.autograd.grad(pair[0].sum() + pair[1].sum(), (hidden, weight)))
    for found, expected in zip(*grads, strict=True):
        assert (found - expected).norm() <= 0.02 * expected.norm()


def test_low_rank_products(device, mode):
    dtype = default_dtype(device)
    layer = apex_te.Linear(H, 192, device=device, params_dtype=dtype)
    down, up = (torch.randn(*s, device=device, dtype=dtype) for s in ((8, H), (192, 8)))
    x = torch.randn(150, H, device=device, dtype=dtype)
    for recipe in ONE_OF_EACH:
        skip_without_blocks(device, recipe)
        with region(recipe):
            full = layer.forward_low_rank(x, down, up, 0.5)
            for count in COUNTS["cpu"]:
                found = layer.forward_low_rank(x[:count].clone(), down, up, 0.5)
                assert_same_bits(found, full[:count])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_after_the_block_runs_in_the_mode(reentrant, device, monkeypatch):
    """Backward outside of the block computes the forward again as it was, products included."""
    calls = []
    product = plain_functions.row_product
    monkeypatch.setattr(
        plain_functions, "row_product", lambda *args: calls.append(1) or product(*args)
    )
    dtype = default_dtype(device)
    layer = apex_te.TransformerLayer(
        H, 256, 4, attn_input_format="bshd", device=device, params_dtype=dtype, **OFF
    )
    x = torch.randn(2, 40, H, device=device, dtype=dtype, requires_grad=True)
    grads = []
    for recomputes in (False, True):
        calls.clear()
        with batch_invariant():
            out = checkpoint(layer, x, use_reentrant=reentrant) if recomputes else layer(x)
        before = len(calls)
        assert before == 4
        layer.zero_grad()
        out.square().sum().backward()
        assert len(calls) == (2 * before if recomputes else before)
        grads.append([x.grad, *(p.grad for p in layer.parameters())])
        x.grad = None
    assert_same_bits(*grads)
    calls.clear()
    layer(x)
    assert not calls


def refused(call, error, text):
    with batch_invariant(), pytest.raises(error, match=text):
        call()


def test_refusals():
    x = torch.randn(32, H)
    for name in ("tensorwise", "delayed", "mxfp8"):
        with fp8_autocast(name):
            refused(lambda: apex_te.Linear(H, 64)(x), NotImplementedError, "must be BlockScaling")
    head = torch.randn(64, H), torch.zeros(32, dtype=torch.int64)
    refused(
        lambda: apex_te.linear_log_probs(x, *head, fp8_recipe="tensorwise"),
        NotImplementedError,
        "linear_log_probs: fp8_recipe must be BlockScaling or RowwiseScaling .* CurrentScaling",
    )
    refused(
        lambda: apex_te.GroupedLinear(2, H, 64)(x, [16, 16]),
        NotImplementedError,
        "GroupedLinear: batch_invariant must be off",
    )
    refused(
        lambda: apex_te.Linear(H, 64, tp_size=2, parallel_mode="row")(x[:, :64]),
        NotImplementedError,
        "Linear: tp_size must be 1",
    )
    attention = apex_te.DotProductAttention(2, 16, attention_dropout=0.1)
    heads = torch.randn(3, 2, 2, 16)
    refused(lambda: attention(heads, heads, heads), NotImplementedError, "attention_dropout must")
    with batch_invariant():
        attention.eval()(heads, heads, heads)
    layer = apex_te.TransformerLayer(H, H, 2, attention_dropout=0.0, hidden_dropout=0.1)
    refused(lambda: layer(x[None]), NotImplementedError, "hidden_dropout and drop_path_rate must")
    with pytest.raises(TypeError, match="batch_invariant: enabled must be a bool, got int"):
        batch_invariant(1)


def test_blocks_threads_and_the_environment(monkeypatch):
    assert not is_batch_invariant()
    seen = []
    with batch_invariant():
        assert is_batch_invariant()
        with batch_invariant(False):
            assert not is_batch_invariant()
        thread = threading.Thread(target=lambda: seen.append(is_batch_invariant()))
        thread.start()
        thread.join()
        with contextlib.suppress(KeyError), batch_invariant(False):
            raise KeyError
        assert is_batch_invariant()
    assert seen == [is_batch_invariant()] == [False]
    assert batch_invariant()(is_batch_invariant)()
    monkeypatch.setenv("APEX_TE_BATCH_INVARIANT", "1")
    spec = importlib.util.spec_from_file_location("apex_te.runtime.again", invariance.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.is_batch_invariant()
    with again.batch_invariant(False):
        assert not again.is_batch_invariant()


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", ONE_OF_EACH[::-1], ids=["rowwise", "pow2", "none"])
def test_compiled(recipe, device):
    skip_without_blocks(device, recipe)
    module = MODULES["RMSNormLinear"](device=device, params_dtype=default_dtype(device))
    x = torch.randn(40, H, device=device, dtype=default_dtype(device))

    def run(x):
        with batch_invariant(), region(recipe):
            return module(x)

    expected = run(x)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), expected)
    assert not is_batch_invariant()
    with region(recipe):  # the mode around compiled code is one of its guards
        outer = torch.compile(module, fullgraph=True, backend="eager")
        usual = outer(x)
        with batch_invariant():
            assert_same_bits(outer(x), expected)
        assert_same_bits(outer(x), usual)


def test_compiled_attention(device):
    attention = apex_te.DotProductAttention(
        1, 16, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
    )
    x = torch.randn(1, 8, 1, 16, device=device, dtype=default_dtype(device), requires_grad=True)

    def run(x):
        with batch_invariant():
            return attention(x, x, x)

    expected = run(x)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert_same_bits(found, expected)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)


@needs_cuda
@pytest.mark.parametrize("recipe", ONE_OF_EACH, ids=["none", "pow2", "rowwise"])
def test_graphed(recipe):
    device = torch.device("cuda")
    skip_without_blocks(device, recipe)
    layer = apex_te.TransformerLayer(
        H, 256, 4, attn_input_format="bshd", device=device, params_dtype=torch.bfloat16, **OFF
    )
    x = torch.randn(2, 40, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    options = {"fp8_enabled": recipe is not None, "fp8_recipe": recipe}
    with batch_invariant():
        with region(recipe):
            expected = layer(x)
        graphed = apex_te.make_graphed_callables(layer, (x,), **options)
        with region(recipe):
            assert_same_bits(graphed(x), expected)


def test_cases_of_the_benchmark(device, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks" / "layers")
    bench = importlib.import_module("bench_invariance")
    is_old = device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0)
    if is_old:
        monkeypatch.setattr(bench, "RECIPES", {"bf16": None})
    found = list(bench.rows(bench.TINY, device, default_dtype(device)))
    assert len({row["module"] for row in found}) == 10
    assert {row["recipe"] for row in found} == set(bench.RECIPES)
    assert all(row["differing, invariant"] == 0 for row in found)
