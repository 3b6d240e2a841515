"""Mixtures of experts in JAX: numbers, FP8 state and state dicts of PyTorch's ``MoELayer``."""

import functools

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from arrays import assert_same, mesh_of, to_jax  # noqa: E402
from flax_layers import assert_near  # noqa: E402

import apex_te  # noqa: E402
import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import ops as torch_ops  # noqa: E402
from apex_te import recipe, router  # noqa: E402
from apex_te.jax import ops  # noqa: E402
from apex_te.jax.ops import grouped_cast as mine  # noqa: E402
from apex_te.ops import grouped_cast as theirs  # noqa: E402

HIDDEN, FFN, EXPERTS, TOKENS = 128, 128, 4, 24
DELAYED = recipe.DelayedScaling(amax_history_len=4)
RECIPES = {
    "fp32": None,
    "delayed": DELAYED,
    "first": recipe.DelayedScaling(amax_history_len=4, first_step="current"),
    "tensorwise": recipe.CurrentScaling(),
    "blockwise": recipe.BlockScaling(),
    "blockwise_1x128": recipe.BlockScaling(wgrad_input="1x128"),
    "mxfp8": recipe.MXFP8Scaling(),
}


def quarters(*shape):
    """Returns multiples of 1/4, whose products and sums are exact in float32 in any order."""
    return torch.randint(-8, 9, shape).float() / 4


ROUTERS = [
    {"top_k": 1},
    {"top_k": 8, "use_pre_softmax": True, "scaling_factor": 2.5},
    {"top_k": 4, "score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
    {"top_k": 2, "score_function": "sqrtsoftplus"},
]


@pytest.mark.parametrize("options", ROUTERS, ids=lambda o: o.get("score_function", "softmax"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_has_torchs_bits(options, dtype):
    logits = torch.randn(37, 16).to(dtype)
    logits[3] = logits[4] = 0.5  # equal scores
    bias = None if "score_function" not in options else torch.randn(16)
    grads = torch.randn(37, options["top_k"]), torch.randn(37, 16), torch.randn(37)
    names = ("probs", "scores", "lse", "counts")
    run = functools.partial(torch_ops._router_function.run, expert_bias=bias)
    rest = {"score_function": "softmax", **options}
    expected = run(logits.requires_grad_(), outputs=names, **rest)
    torch.autograd.backward((expected.probs, expected.scores, expected.lse), grads)
    chosen = ops.moe_router.RouterOptions(**options)

    @jax.jit
    def both(logits, grads):
        def values(logits):
            made = ops.moe_router.route(
                logits, chosen, names, None if bias is None else to_jax(bias)
            )
            return (made.probs, made.scores, made.lse), made

        _, pull, made = jax.vjp(values, logits, has_aux=True)
        return made, pull(grads)[0]

    made, grad = both(to_jax(logits.detach()), tuple(map(to_jax, grads)))
    for name in ("index", "probs", "scores", "counts"):
        assert_same(getattr(made, name), getattr(expected, name))
    np.testing.assert_allclose(made.lse, expected.lse.detach(), rtol=1e-6)
    assert_same(grad, logits.grad)


SPLITS = torch.tensor([130, 0, 20, 5], dtype=torch.int32)
ROWS, WIDTH = 160, 256


def sources(kind, dtype):
    """Returns a source of PyTorch and one of JAX with the same tensors."""
    row_of = torch.randint(-1, 40, (ROWS,), dtype=torch.int32)
    x, grad = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(ROWS, WIDTH // 2).to(dtype)
    bias, factor = torch.randn(4, WIDTH).to(dtype), torch.rand(ROWS)
    given = {
        "Gather": {"x": x[:40], "row_of": row_of},
        "Gated": {"x": x, "factor": factor, "activation": "gelu", "bias": bias},
        "GatedGradient": {"grad": grad, "x": x, "factor": factor, "bias": None},
    }[kind]
    ours = {n: to_jax(v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    return getattr(theirs, kind)(**given), getattr(mine, kind)(**ours)


@pytest.mark.parametrize("kind", ["Gather", "Gated", "GatedGradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_rows", [None, 1, 128])
def test_casts_of_sources_have_torchs_bits(kind, dtype, block_rows):
    source, ours = sources(kind, dtype)
    groups = torch_ops.grouped_quantize.groups_of(SPLITS, ROWS)
    used, columns = int(SPLITS.sum()), int(groups.column_ends[-1])
    scale, amax, factor_grad = torch.rand(4) * 9, torch.rand(4), None
    with_factor = kind == "GatedGradient"
    if with_factor:
        factor_grad = torch.empty(ROWS)
    fp8, rule = torch.float8_e4m3fn, mine.GroupScales(to_jax(scale), None, to_jax(amax))
    if block_rows is None:
        expected = theirs.quantize_source(
            source, groups, scale, fp8, amax=amax, factor_grad=factor_grad
        )
    else:
        rule = mine.BlockRule(columnwise_block_rows=block_rows)
        expected = theirs.block_quantize_source(
            source, groups, fp8, columnwise_block_rows=block_rows, factor_grad=factor_grad
        )

    def cast(splits, arrays):
        given = {**ours._asdict(), **arrays}
        own = ops.grouped_quantize.groups_of(splits, ROWS)
        return mine.cast_source(
            type(ours)(**given), own, jnp.float8_e4m3fn, rule, factor_grad=with_factor
        )

    arrays = {n: v for n, v in ours._asdict().items() if isinstance(v, jax.Array)}
    made, grads = jax.jit(cast)(to_jax(SPLITS), arrays)
    assert_same(made.rowwise[:used], expected.rowwise[:used])
    assert_same(made.columnwise[:, :columns], expected.columnwise[:, :columns])
    if block_rows is None:
        assert_same(made.row_scale_inv[:used], expected.row_scale_inv[:used])
        assert_same(made.scale_inv, expected.scale_inv)
        assert_same(made.amax, amax)
    else:
        assert_same(made.row_scale_inv[:, :used], expected.row_scale_inv[:, :used])
        begin = 0
        for g, (rows, end) in enumerate(
            zip(SPLITS.tolist(), groups.column_ends.tolist(), strict=True)
        ):
            lines = slice(begin // 128 + g, begin // 128 + g + max(-(-rows // 128), 1))
            assert_same(made.scale_inv[lines], expected.scale_inv[lines])
            begin = end
    if with_factor:
        np.testing.assert_allclose(grads.factor, factor_grad, rtol=1e-4, atol=1e-5)


def test_block_products_have_torchs_bits_where_sums_are_exact():
    groups = torch_ops.grouped_quantize.groups_of(SPLITS, ROWS)
    own = ops.grouped_quantize.groups_of(to_jax(SPLITS), ROWS)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    quantize, quantize_matrices = (
        torch_ops.grouped_quantize.block_quantize_groups,
        torch_ops.grouped_quantize.block_quantize_matrices,
    )
    x, dy = quarters(ROWS, 144), quarters(ROWS, 272)
    weights = quarters(4, 144, 272)
    qx, qdy = quantize(x, groups, e4m3), quantize(dy, groups, e5m2)
    qw = quantize_matrices(weights, e4m3)
    made = ops.grouped_quantize.block_quantize_matrices(
        to_jax(weights), jnp.float8_e4m3fn, groups=own
    )
    for name in ("rowwise", "columnwise", "scale_inv", "row_scale_inv"):
        assert_same(getattr(made, name), getattr(qw, name))
    used = int(SPLITS.sum())
    operands = qx.rowwise, qx.row_scale_inv, qw.columnwise, qw.scale_inv
    expected = torch_ops.grouped_gemm.block_multiply_groups(*operands, groups)
    found = jax.jit(ops.grouped_gemm.block_multiply_groups)(*map(to_jax, operands), own)
    assert_same(found[:used], expected[:used])
    operands = qx.columnwise, qx.scale_inv, qdy.columnwise, qdy.scale_inv
    for wide in (False, True):
        expected = torch_ops.grouped_gemm.block_contract_groups(*operands, groups, wide)
        run = jax.jit(ops.grouped_gemm.block_contract_groups, static_argnums=5)
        assert_same(run(*map(to_jax, operands), own, wide), expected)


def torch_layer(top_k=1, exact=True, **options):
    """Returns a layer of PyTorch; ``exact`` has parameters whose sums are exact."""
    sizes = [options.pop(n, d) for n, d in (("hidden", HIDDEN), ("ffn", FFN))]
    layer = apex_te.MoELayer(*sizes, options.pop("experts", EXPERTS), top_k, **options)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(quarters(*p.shape) / 2 if exact else torch.randn_like(p) * 0.2)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.randn(layer.num_experts) * 0.1)
    return layer


def variables_of(module, layer, chosen, x):
    """Returns variables of a Flax module with the parameters of one of PyTorch, new state."""
    with te.fp8_autocast(chosen is not None, chosen):
        shapes = dict(jax.eval_shape(module.init, jax.random.key(0), x))
    made = {
        name: jax.tree.map_with_path(
            lambda path, s: (jnp.zeros if "amax" in str(path[-1]) else jnp.ones)(s.shape, s.dtype),
            shapes[name],
        )
        for name in ("params", "fp8_metas")
        if name in shapes
    }
    return {**made, **te.state.from_torch(layer.state_dict(), {"params": made["params"]})}


def make_step(module, chosen):
    """Returns a jitted function of (variables, x, output gradient): y, counts, and gradients."""

    @jax.jit
    def step(variables, x, grad):
        def loss(variables, x):
            (y, losses), kept = module.apply(variables, x, mutable=["intermediates"])
            total = (y * grad).sum() + (0.0 if losses is None else losses)
            return total, (y, kept["intermediates"]["tokens_per_expert"][0])

        with te.fp8_autocast(chosen is not None, chosen):
            (_, made), found = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)
        return made, found

    return step


def torch_step(layer, chosen, x, grad):
    with apex_te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
        y = layer(x)
    layer.zero_grad()
    y.backward(grad)
    return y


def assert_same_steps(layer, module, chosen, same, *, steps, tokens=TOKENS, exact=True):
    """Asserts equal outputs, routing, gradients and FP8 state; returns the variables."""
    draw = quarters if exact else torch.randn
    hidden = layer.hidden_size
    variables = variables_of(module, layer, chosen, jnp.ones((tokens, hidden)))
    step = make_step(module, chosen)
    for number in range(steps):
        x = (draw(tokens, hidden) * 2.0 ** (number % 3)).requires_grad_()
        grad = draw(tokens, hidden)
        y = torch_step(layer, chosen, x, grad)
        (ours, counts), (gradients, dx) = step(variables, to_jax(x), to_jax(grad))
        assert_same(counts, layer.tokens_per_expert)
        same(ours, y)
        same(dx, x.grad)
        with te.fp8_autocast(chosen is not None, chosen):
            found = te.state.to_torch(gradients)
        for name, p in layer.named_parameters():
            same(found[name], p.grad)
        if "fp8_metas" in variables:
            for name, value in layer.state_dict().items():
                if "fp8_state" in name and "header" not in name:
                    same(found[name], value)
            variables = te.update_collections({"fp8_metas": gradients["fp8_metas"]}, variables)
    assert step._cache_size() == 1  # though the experts' numbers of tokens change
    return variables


def assert_rounded_alike(ours, theirs):
    """Asserts equality within fp32 rounding, but of a few elements that bf16 rounds apart."""
    assert_near(ours, theirs)
    theirs = theirs.detach().numpy()
    apart = np.abs(np.asarray(ours) - theirs) > 2.0**-19 * np.abs(theirs).max() + 1e-30
    assert apart.mean() <= 1e-3


@pytest.mark.parametrize("name", RECIPES)
def test_experts_are_torchs_over_5_steps(name):
    layer = torch_layer(activation="reglu")
    module = te_flax.MoEBlock(EXPERTS, 1, FFN, "relu")
    assert_same_steps(layer, module, RECIPES[name], assert_rounded_alike, steps=5)


# Each with the number of tokens; sizes that are not multiples of a block, empty experts, one token.
CASES = {
    "top8": ("tensorwise", 40, {"top_k": 8, "experts": 8, "aux_loss_coeff": 1e-2}),
    "one": ("blockwise", 1, {"top_k": 2, "experts": 6, "z_loss_coeff": 1e-3}),
    "odd": ("blockwise", 37, {"top_k": 3, "hidden": 144, "ffn": 80, "bias": True}),
    "fp32": ("fp32", 30, {
        "top_k": 2, "experts": 8, "score_function": "sigmoid", "num_groups": 4, "group_topk": 2,
        "expert_bias": True, "aux_loss_coeff": 1e-2, "z_loss_coeff": 1e-3, "scaling_factor": 2.5,
        "bias": True,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_experts_are_torchs(name):
    chosen, tokens, options = CASES[name]
    layer = torch_layer(exact=False, **options)
    kept = {
        n: v for n, v in options.items()
        if n.endswith(("coeff", "function", "factor", "topk")) or n == "num_groups"
    }  # fmt: skip
    module = te_flax.MoEBlock(
        options.get("experts", EXPERTS), options["top_k"], options.get("ffn", FFN),
        use_ffn_bias="bias" in options, use_expert_routing_bias="expert_bias" in options, **kept,
    )  # fmt: skip
    found = RECIPES[chosen]
    assert_same_steps(layer, module, found, assert_near, steps=2, tokens=tokens, exact=False)


def test_state_dicts_go_to_torch_and_back():
    layer = torch_layer(exact=False, bias=True, score_function="sigmoid", expert_bias=True)
    module = te_flax.MoEBlock(
        EXPERTS, 1, FFN, score_function="sigmoid", use_ffn_bias=True, use_expert_routing_bias=True
    )
    variables = variables_of(module, layer, DELAYED, jnp.ones((TOKENS, HIDDEN)))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    state = jax.tree.map_with_path(
        lambda path, x: jax.random.uniform(next(keys), x.shape) if "amax" in str(path[-1]) else x,
        variables["fp8_metas"],
    )
    variables = {**variables, "fp8_metas": state}
    with te.fp8_autocast(True, DELAYED):
        saved = te.state.to_torch(variables, "moe.")
    other = torch_layer(bias=True, score_function="sigmoid", expert_bias=True)
    other.load_state_dict(
        {n.removeprefix("moe."): torch.from_numpy(v.copy()) for n, v in saved.items()}
    )
    for name, value in layer.state_dict().items():
        if "fp8_state" not in name:
            assert torch.equal(other.state_dict()[name], value), name
    again = te.state.from_torch(other.state_dict(), variables)
    for ours, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(variables), strict=True):
        assert np.array_equal(ours, wanted)


def test_recomputed_experts_have_the_same_bits():
    x, grad = jax.random.normal(jax.random.key(0), (2, TOKENS, HIDDEN))
    policy = te.checkpoint_policies.fp8_casts_saveable
    found = []
    for kind in (te_flax.MoEBlock, nn.remat(te_flax.MoEBlock, policy=policy)):
        module = kind(EXPERTS, 2, FFN)
        if not found:
            shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
            drawn = jax.tree.map(lambda s: jax.random.normal(jax.random.key(1), s.shape), shapes)
            variables = {"params": drawn}
        found.append(make_step(module, RECIPES["blockwise"])(variables, x, grad))
    for plain, again in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.array_equal(plain, again)


@pytest.mark.parametrize(("name", "sizes"), [
    ("delayed", {"expert": 4}), ("blockwise", {"data": 2, "expert": 2}),
])  # fmt: skip
@pytest.mark.parametrize("top_k", [1, 3])
def test_experts_of_four_devices_are_those_of_one(name, sizes, top_k):
    mesh, chosen = mesh_of("Auto", **sizes), RECIPES[name]
    resource = te.MeshResource(dp_resource="data") if "data" in sizes else None
    plain = te_flax.MoEBlock(8, top_k, FFN, aux_loss_coeff=1e-2)
    spread = te_flax.MoEBlock(8, top_k, FFN, aux_loss_coeff=1e-2, ep_axis="expert")
    layer = torch_layer(top_k, exact=False, experts=8)
    x, grad = map(to_jax, torch.randn(2, TOKENS, HIDDEN))
    variables = variables_of(plain, layer, chosen, x)
    (y, counts), (gradients, dx) = make_step(plain, chosen)(variables, x, grad)
    with jax.set_mesh(mesh), te.autocast(mesh_resource=resource):
        made, (ours, our_dx) = make_step(spread, chosen)(variables, x, grad)
    assert np.array_equal(made[1], counts)
    if top_k == 1:  # no sums over devices
        assert np.array_equal(made[0], y)
    leaves = map(jax.tree.leaves, ((made[0], our_dx, ours), (y, dx, gradients)))
    for found, wanted in zip(*leaves, strict=True):
        bound = 2.0**-7 * np.abs(wanted).max() + 1e-6
        assert np.abs(np.asarray(found) - np.asarray(wanted)).max() <= bound


def test_expert_bias_is_updated_as_torch_does():
    bias, counts = torch.randn(8), torch.randint(0, 9, (8,), dtype=torch.int32)
    made = te.update_expert_bias(to_jax(bias), to_jax(counts), 1e-2)
    assert_same(made, router.update_expert_bias(bias, counts, 1e-2))


def test_what_does_not_fit_is_refused():
    gate, wi, wo = jnp.ones((8, 4)), jnp.ones((4, 8, 32)), jnp.ones((4, 16, 8))
    x, bias = jnp.ones((3, 8)), jnp.ones(4)
    run = te.moe
    with pytest.raises(TypeError, match=r"moe: x must have dtype float32, .*, got int32"):
        run(x.astype(int), gate, wi, wo)
    with pytest.raises(ValueError, match=r"moe: x and gate_kernel must be .*got \[3, 8\] and"):
        run(x, gate.T, wi, wo)
    with pytest.raises(ValueError, match=r"moe: wi must have shape \[4, 8, 32\], got \[4, 8, 16\]"):
        run(x, gate, wi[..., :16], wo)
    with pytest.raises(TypeError, match=r"moe: wo must have x's dtype float32, got bfloat16"):
        run(x, gate, wi, wo.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"moe: expert_bias must be None with score_function"):
        run(x, gate, wi, wo, None, None, bias)
    with pytest.raises(ValueError, match=r"top_k must be from 1 to the 4 experts, got 5"):
        run(x, gate, wi, wo, num_experts_per_tok=5)
    with pytest.raises(ValueError, match=r"activation must be one of silu, .*, got 'swiglu'"):
        run(x, gate, wi, wo, activation_type="swiglu")
    with pytest.raises(ValueError, match=r"moe: ep_axis must be an axis of the mesh"):
        run(x, gate, wi, wo, ep_axis="expert")
    for chosen, match in (
        (recipe.CurrentScaling(fp8_format=recipe.Format.HIF8), "fp8_recipe must not have HiF8"),
        (recipe.BlockScaling(override_linear_precision=(False, False, True)), "override_linear_pr"),
    ):
        with (
            pytest.raises(NotImplementedError, match=f"moe: {match}"),
            te.fp8_autocast(True, chosen),
        ):
            run(x, gate, wi, wo)
    error = pytest.raises(ValueError, match="moe: states must be given with DelayedScaling")
    with error, te.fp8_autocast(True, DELAYED):
        run(x, gate, wi, wo)
    with jax.set_mesh(mesh_of("Auto", expert=4)):
        with pytest.raises(ValueError, match=r"moe: x must have a multiple of 4 tokens with ep_ax"):
            run(x, gate, wi, wo, ep_axis="expert")
        with pytest.raises(ValueError, match=r"num_experts must be a multiple of the 4 devices"):
            te_flax.MoEBlock(6, ep_axis="expert").init(jax.random.key(0), x)
