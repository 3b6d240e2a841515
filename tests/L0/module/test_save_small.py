"""fp8_autocast(save="small"): fewer saved bytes, and the results that it promises."""

import contextlib
import copy

import pytest
import torch
from checks import assert_same_bits
from layer_kinds import with_repeatable_core
from schemes import SCHEMES, chosen
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import apex_te
from apex_te import (
    LayerNormLinear,
    LayerNormMLP,
    MultiheadAttention,
    TransformerLayer,
    fp8_autocast,
    recipe,
)
from apex_te.module import layer_norm_mlp
from apex_te.module._core import held_rows
from apex_te.module._core.programs import set_enabled
from apex_te.ops.block_quantize import block_dequantize

WIDTH, TOKENS = 64, 16


def layer(**more):
    return TransformerLayer(
        WIDTH, 2 * WIDTH, 4, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        normalization="RMSNorm", activation="swiglu", **more,
    )  # fmt: skip


KINDS = {
    "LayerNormLinear": lambda **k: LayerNormLinear(WIDTH, 96, **k),
    "RMSNorm": lambda **k: LayerNormLinear(
        WIDTH, 96, bias=False, normalization="RMSNorm", zero_centered_gamma=True, **k
    ),
    "norm returned": lambda **k: LayerNormLinear(WIDTH, 96, return_layernorm_output=True, **k),
    "parts": lambda **k: LayerNormLinear(WIDTH, 96, parameters_split=("a", "b", "c"), **k),
    "attention": lambda **k: MultiheadAttention(
        WIDTH, 4, attention_dropout=0.0, input_layernorm=True, **k
    ),
    "gelu": lambda **k: LayerNormMLP(WIDTH, 2 * WIDTH, **k),
    "swiglu": lambda **k: LayerNormMLP(
        WIDTH, 2 * WIDTH, bias=False, activation="swiglu", normalization="RMSNorm", **k
    ),
    "geglu, norm returned": lambda **k: LayerNormMLP(
        WIDTH, 2 * WIDTH, activation="geglu", return_layernorm_output=True, **k
    ),
    "layer": layer,
}
# Whose gate and up are not held.
LINEAR = ("LayerNormLinear", "RMSNorm", "norm returned", "parts", "attention")
RECIPES = {
    **SCHEMES,
    "delayed, no wgrad": recipe.DelayedScaling(override_linear_precision=(False, False, True)),
    "high precision": recipe.BlockScaling(backward="high_precision"),
    "dequantized": recipe.CurrentScaling(backward="dequantized"),
}


def build(kind, device, **more):
    torch.manual_seed(3)
    return with_repeatable_core(KINDS[kind](device=device, **more), device)


@pytest.fixture
def exactly_held(monkeypatch):
    """Holds FC1's output as it is, so that what is left of ``"small"`` only casts again."""
    monkeypatch.setattr(layer_norm_mlp, "hold", lambda x: (x, None))


def plain(module, x, **more):
    return module(x, **more)


def through(function, **options):
    return lambda module, x, **more: function(lambda x: module(x, **more), x, **options)


WAYS = {
    "plain": plain,
    "checkpoint": through(torch_checkpoint, use_reentrant=False),
    "reentrant": through(torch_checkpoint, use_reentrant=True),
    "own checkpoint": through(apex_te.checkpoint, use_reentrant=False),
}


def train(module, scaling, save, call=plain, micro=1, cached=False, region=None, **options):
    """Outputs, gradients and FP8 state of three steps, the last two of which run programs."""
    found, device = [], next(module.parameters()).device
    torch.manual_seed(4)
    module.zero_grad()
    for step in range(3):
        for i in range(micro):
            x = torch.randn(TOKENS, 2, WIDTH, device=device) * (step + 1)
            x.requires_grad_()
            first = {"is_first_microbatch": i == 0} if cached else {}
            with fp8_autocast(fp8_recipe=scaling, save=save, **options):
                out = call(module, x, **first)
            outs = out if isinstance(out, tuple) else (out,)
            sum((o * o).mean() * (j + 1) for j, o in enumerate(outs)).backward()
            found += [*outs, x.grad]
        for p in module.parameters():
            grad = p.grad if p.grad is not None else getattr(p, "main_grad", None)
            if grad is None:
                continue
            found.append(grad.clone())
            with torch.no_grad():
                p -= 0.1 * grad
            p.grad = None
    return [t.detach().clone() for t in found]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_casts_made_again_have_the_same_bits(device, exactly_held, name, kind, way):
    if way == "own checkpoint" and "returned" in kind:
        way = "checkpoint"
    module = build(kind, device)
    other = copy.deepcopy(module)
    expected = train(module, RECIPES[name], "all")
    assert_equal(train(other, RECIPES[name], "small", WAYS[way]), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_recomputed_has_the_bits_of_saved(device, name, kind):
    """Also where FC1's output is held in FP8; forward has those of ``save="all"``."""
    module = build(kind, device)
    others = [copy.deepcopy(module) for _ in WAYS]
    expected = train(module, RECIPES[name], "small")
    first = train(others[-1], RECIPES[name], "all")
    outs = 2 if "returned" in kind else 1
    assert_equal(first[:outs], expected[:outs])
    if kind in LINEAR:
        assert_equal(first, expected)
    for other, way in zip(others[:-1], ("checkpoint", "reentrant", "plain"), strict=True):
        assert_equal(train(other, RECIPES[name], "small", WAYS[way]), expected)


OPTIONS = {
    "microbatches": ({}, {"micro": 2}),
    "cached weights": ({}, {"micro": 2, "cached": True}),
    "main_grad": ({"fuse_wgrad_accumulation": True}, {"micro": 2}),
    "columnwise weights": ({}, {"keep_columnwise_weights": True}),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["RMSNorm", "attention", "gelu", "swiglu", "layer"])
@pytest.mark.parametrize("name", chosen("delayed", "tensorwise", "blockwise", "mxfp8"))
def test_options(device, exactly_held, name, kind, option):
    made, used = OPTIONS[option]
    if made and kind in ("attention", "layer"):
        made = {**made, "fuse_qkv_params": True}
    module = build(kind, device, **made)
    if made:
        for p in module.parameters():
            p.main_grad = torch.zeros_like(p)
    other = copy.deepcopy(module)
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        if made:
            q.main_grad = p.main_grad.clone()
    expected = train(module, SCHEMES[name], "all", **used)
    assert_equal(train(other, SCHEMES[name], "small", **used), expected)


@pytest.mark.parametrize("kind", ["LayerNormLinear", "norm returned", "swiglu", "layer"])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_scales_that_have_moved_since_forward(device, exactly_held, name, kind):
    """Backwards of several regions after the last forward, as pipelines run them.

    A joined weight is cast with the scale of forward, as with ``keep_columnwise_weights``.
    """
    module = build(kind, device, **({"fuse_qkv_params": True} if kind == "layer" else {}))
    found = {}
    for save in ("all", "small"):
        one, outs = copy.deepcopy(module), []
        torch.manual_seed(6)
        for step in range(4):
            x = (torch.randn(TOKENS, 2, WIDTH, device=device) * 4**step).requires_grad_()
            with fp8_autocast(fp8_recipe=SCHEMES[name], save=save):
                out = one(x)
            outs.append((x, out[0] if isinstance(out, tuple) else out))
        gradients = []
        for x, out in outs:
            parameters = [x, *(p for p in one.parameters() if p.requires_grad)]
            gradients += torch.autograd.grad(out.square().sum(), parameters)
        found[save] = gradients
    assert_equal(found["small"], found["all"])


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_an_mlp_that_recomputes_itself(device, name):
    module = build("swiglu", device)
    other = build("swiglu", device, checkpoint=True)
    other.load_state_dict(module.state_dict())
    expected = train(module, SCHEMES[name], "small")
    assert_equal(train(other, SCHEMES[name], "small"), expected)


@pytest.mark.parametrize("kind", ["parts", "layer", "gelu"])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_programs_and_what_is_frozen(device, name, kind):
    """With and without programs, with frozen weights, norms and inputs, and a retained graph."""
    module = build(kind, device)
    for frozen in ([], ["layer_norm"], ["fc1", "a_weight"], ["fc2", "qkv"], ["bias"]):
        found = []
        for use in (True, False):
            one = copy.deepcopy(module)
            for key, p in one.named_parameters():
                p.requires_grad_(not any(part in key for part in frozen))
            before = set_enabled(use)
            try:
                found.append(train(one, SCHEMES[name], "small"))
            finally:
                set_enabled(before)
        assert_equal(*found)

    def gradients(repeats):
        x = torch.ones(8, 2, WIDTH, device=device).requires_grad_()
        with fp8_autocast(fp8_recipe=SCHEMES[name], save="small"):
            out = module(x)
        given = [x, *(p for p in module.parameters() if p.requires_grad)]
        return [torch.autograd.grad(out.sum(), given, retain_graph=True) for _ in range(repeats)]

    first, second = gradients(2)
    assert_equal(first, second)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_what_is_saved_is_overwritten_only_in_the_last_backward(device, name):
    """With a retained graph, and where hooks hand out tensors that others keep."""
    module = LayerNormMLP(
        WIDTH, 2 * WIDTH, bias=False, activation="swiglu", normalization="RMSNorm",
        params_dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    given = [p for p in module.parameters() if p.requires_grad]
    kept = []

    def forward():
        x = torch.ones(8, 2, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()
        with fp8_autocast(fp8_recipe=SCHEMES[name], save="small"):
            return x, module(x)

    def pack(t):
        kept.append((t, t.clone()))
        return t

    before = set_enabled(False)
    try:
        forward()
        for hooks in (contextlib.nullcontext(), saved_tensors_hooks(pack, lambda t: t)):
            with hooks:
                x, out = forward()
            found = [
                torch.autograd.grad(out.sum(), [x, *given], retain_graph=retain)
                for retain in (True, True, False)
            ]
            for other in found[1:]:
                assert_equal(other, found[0])
        assert kept
        for now, then in kept:
            assert_same_bits(now.view(torch.uint8), then.view(torch.uint8))
    finally:
        set_enabled(before)


# Saved bytes for an element of the layer's input: that input, queries, keys and values, attention's
# output, the residual, and scales and statistics (last).
LLAMA = 2 + 3 + 2 + 2
EXPECTED = {
    "all": LLAMA + 2 * 1 + 7 * 2 + 3.5,  # columnwise copies of the norms, FC1's output, its result
    "small": LLAMA + 7 * (1 + 4 / 128),
}


@pytest.mark.parametrize("save", EXPECTED)
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_bytes_of_a_llama_layer(device, name, save):
    hidden, tokens = 256, 128
    torch.manual_seed(3)
    module = TransformerLayer(
        hidden, 7 * hidden // 2, 4, num_gqa_groups=1, normalization="RMSNorm", bias=False,
        activation="swiglu", hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
        self_attn_mask_type="causal", attn_input_format="bshd", params_dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for _ in range(3):  # programs save the same
        x = torch.randn(2, tokens // 2, hidden, device=device, dtype=torch.bfloat16)
        x.requires_grad_()
        sizes, kept = {}, []

        def pack(t, sizes=sizes, kept=kept):
            storage = t.untyped_storage()
            if storage.data_ptr() not in known:
                sizes[storage.data_ptr()] = storage.nbytes()
                kept.append(t)
            return t

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            fp8_autocast(fp8_recipe=SCHEMES[name], save=save),
        ):
            out = module(x)
        found = sum(sizes.values()) / x.numel()
        out.sum().backward()
        # Per row: rstd of two norms and attention's logsumexp; scales of columnwise blocks.
        more = (2 * 4 + 4 * 4) / hidden + (0.25 if save == "all" else 0.01)
        expected = EXPECTED[save]
        if save == "all" and device.type == "cuda" and name == "delayed":
            expected -= 3.5 if found < expected else 0  # fused SwiGLU makes it again anyway
        assert expected <= found <= expected + more


def test_a_joined_weight_is_saved_in_fp8(device):
    """The parts are parameters, and the weight that forward joins would be saved besides them."""
    sizes = {}
    for save in ("all", "small"):
        module, saved = build("parts", device), []

        def pack(t, saved=saved):
            saved.append((t.dtype, tuple(t.shape)))
            return t

        x = torch.randn(TOKENS, WIDTH, device=device).requires_grad_()
        with (
            fp8_autocast(fp8_recipe="tensorwise", save=save),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            module(x)
        sizes[save] = saved
    weight, columnwise = (torch.float32, (96, WIDTH)), (torch.float8_e4m3fn, (WIDTH, 96))
    assert weight in sizes["all"]
    assert columnwise not in sizes["all"]
    assert columnwise in sizes["small"]
    assert weight not in sizes["small"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 128), (1, 1), (7, 100), (64, 384)], ids=str)
def test_held_rows_are_within_a_rounding_to_e4m3(device, dtype, shape):
    """Half a unit of three mantissa bits, or of the smallest number of the block's scale."""
    torch.manual_seed(1)
    x = (torch.randn(shape, device=device) * torch.randn(shape, device=device).exp()).to(dtype)
    held, scale_inv = held_rows.hold(x)
    assert held.dtype is torch.float8_e4m3fn
    found = block_dequantize(held, scale_inv, dtype=dtype)
    assert found.dtype is dtype
    error, exact = (found.double() - x.double()).abs(), x.double().abs()
    blocks = torch.nn.functional.pad(exact, (0, -shape[1] % 128)).unflatten(1, (-1, 128))
    smallest = blocks.amax(-1) * 2 / 448 * 2.0**-10  # pow2 scales are up to two times smaller
    bound = torch.maximum(exact * 2.0**-4, smallest.repeat_interleave(128, 1)[:, : shape[1]])
    assert (error <= bound).all()


def swiglu_gradients(x, w, gamma, rows):
    """Gradients of an RMSNorm, SwiGLU MLP and sum of squares in float64."""
    x, gamma, *w = (t.detach().double().requires_grad_() for t in (x, gamma, *w))
    norm = torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, 1e-5)
    gate, up = (norm @ w[0].t()).chunk(2, -1)
    out = (torch.nn.functional.silu(gate) * up) @ w[1].t()
    (out * rows.double()).sum().backward()
    return [x.grad, gamma.grad, w[0].grad, w[1].grad]


@pytest.mark.parametrize("name", chosen("delayed", "tensorwise", "blockwise", "mxfp8"))
def test_gradients_against_float64(device, name):
    """FP8 adds a few roundings to E4M3, summed in squares, to the gradients' error.

    A rounding of E4M3 is 2^-4 / sqrt(3) / sqrt(2) of a value in the mean of squares, at most
    2^-4. Two of gate and up reach each gradient of the first GEMM: |d silu'(g) / d g * g| and
    |d silu(g) / d g * g| are at most about twice what they multiply.
    """
    torch.manual_seed(5)
    width, ffn, tokens = 128, 256, 512
    module = LayerNormMLP(
        width, ffn, bias=False, normalization="RMSNorm", activation="swiglu", device=device
    )
    with torch.no_grad():
        for w in (module.fc1_weight, module.fc2_weight):
            w.normal_(0, w.shape[1] ** -0.5)
    x = torch.randn(tokens, width, device=device)
    rows = torch.randn(tokens, width, device=device)
    weights = (module.fc1_weight, module.fc2_weight)
    exact = swiglu_gradients(x, weights, module.layer_norm_weight, rows)
    scaling = SCHEMES[name]
    errors = {}
    for save in ("all", "small"):
        one = copy.deepcopy(module)
        for _ in range(2):  # the second with delayed scales
            given = x.clone().requires_grad_()
            one.zero_grad()
            with fp8_autocast(fp8_recipe=scaling, save=save):
                out = one(given)
            (out * rows).sum().backward()
        found = [given.grad, one.layer_norm_weight.grad, one.fc1_weight.grad, one.fc2_weight.grad]
        errors[save] = [
            ((f.double() - e).norm() / e.norm()).item() for f, e in zip(found, exact, strict=True)
        ]
    rounding = 2.0**-4 / 6**0.5
    for one, other in zip(errors["all"], errors["small"], strict=True):
        assert other <= (one**2 + 2 * (2 * rounding) ** 2) ** 0.5
    assert errors["small"] != errors["all"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["parts", "RMSNorm", "gelu", "swiglu"])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_compiled(device, name, kind):
    module = build(kind, device)
    other = copy.deepcopy(module)

    def run(module, x, save="small"):
        with fp8_autocast(fp8_recipe=SCHEMES[name], save=save):
            return module(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for step in range(2):
        x = torch.randn(TOKENS, WIDTH, device=device) * (step + 1)
        found = []
        for call, one in ((compiled, other), (run, module)):
            given = x.clone().requires_grad_()
            out = call(one, given)
            parameters = [given, *one.parameters()]
            found.append([out, *torch.autograd.grad(out.square().sum(), parameters)])
        assert_equal(*found)
    if kind in ("gelu", "swiglu"):  # another value is another graph
        x = torch.randn(TOKENS, WIDTH, device=device).requires_grad_()
        grads = [
            torch.autograd.grad(compiled(other, x, save).sum(), x)[0] for save in ("all", "small")
        ]
        assert not torch.equal(*grads)


def saved_bytes(module, enter):
    """Bytes that a call saves, besides parameters, with the regions that ``enter`` enters."""
    known, total = {p.untyped_storage().data_ptr() for p in module.parameters()}, []

    def pack(t):
        if t.untyped_storage().data_ptr() not in known:
            total.append(t.numel() * t.element_size())
        return t

    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        enter(stack)
        module(x)
    return sum(total)


def test_the_innermost_region_decides():
    module = build("swiglu", "cpu")

    def regions(*saves, **options):
        def enter(stack):
            for save in saves:
                stack.enter_context(fp8_autocast("tensorwise", save=save, **options))

        return saved_bytes(module, enter)

    small, whole = regions("small"), regions("all")
    assert small < whole / 2
    assert regions("all", "small") == small
    assert regions("small", "all") == whole
    # In bf16 and fp32 nothing changes.
    assert regions("small", enabled=False) == regions("all", enabled=False)

    decorated = fp8_autocast("tensorwise", save="small")(lambda x: module(x))
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    with fp8_autocast("tensorwise", save="small"):
        expected = torch.autograd.grad(module(x).sum(), x)
    assert_same_bits(torch.autograd.grad(decorated(x).sum(), x), expected)


def test_argument():
    assert "save" not in repr(fp8_autocast())
    shown = repr(fp8_autocast(keep_columnwise_weights=True, save="small"))
    assert shown.endswith("calibrating=False, keep_columnwise_weights=True, save='small')")
    with pytest.raises(ValueError, match="fp8_autocast: save must be 'all' or 'small', got 'tiny'"):
        fp8_autocast(save="tiny")
    with pytest.raises(TypeError, match="fp8_autocast: save must be 'all' or 'small', got None"):
        fp8_autocast(save=None)
    with pytest.raises(ValueError, match="autocast: save must be 'all' or 'small', got ''"):
        apex_te.autocast(save="")
