"""Attention to sequences that are split over devices: one device's numbers."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax.linen import partitioning  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax import attention  # noqa: E402
from apex_te.jax.attention import dot_product_attention  # noqa: E402
from apex_te.jax.context_parallel import (  # noqa: E402
    context_parallel_attention,
    join_context_parallel,
    split_for_context_parallel,
)

pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 4, reason="jax was started before this folder's conftest"
)
B, S, H, D = 2, 16, 4, 8
MASKS = {
    "causal": {},
    "full": {"attn_mask_type": "no_mask"},
    "causal window": {"window_size": (5, 0)},
    "window": {"attn_mask_type": "no_mask", "window_size": (3, 2)},
}
TOKENS = P(None, "c")


def heads(groups=H, keys=S, dtype=jnp.float32):
    """Returns queries, keys, values and an output gradient."""
    rng = np.random.default_rng(0)
    shapes = (S, H), (keys, groups), (keys, groups), (S, H)
    return [jnp.asarray(rng.normal(size=(B, s, h, D)), dtype) for s, h in shapes]


def both(attend, q, k, v, dy, *others):
    """Returns the output of an attention and the gradients of all floats."""
    mask, bias = others[:1], others[1:]
    y, pull = jax.vjp(lambda q, k, v, *bias: attend(q, k, v, *mask, *bias), q, k, v, *bias)
    return y, *pull(dy)


@functools.cache
def expected_of(kind, groups):
    attend = functools.partial(dot_product_attention, **MASKS[kind])
    return jax.jit(functools.partial(both, attend))(*heads(groups))


def mesh_of(size):
    return jax.make_mesh((size,), ("c",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def on_devices(size, q, k, v, dy, *others, balanced=False, check_vma=True, **options):
    """Returns ``both`` of attention whose tokens lie on devices, in their own order."""
    attend = functools.partial(
        context_parallel_attention, axis_name="c", causal_load_balanced=balanced, **options
    )
    run = jax.shard_map(
        functools.partial(both, attend), mesh=mesh_of(size),
        in_specs=(TOKENS,) * 4 + (P(),) * len(others),
        out_specs=(TOKENS,) * 4 + (P(),) * len(others[1:]), check_vma=check_vma,
    )  # fmt: skip

    @jax.jit
    def reordered(*tokens):
        if not balanced:
            return run(*tokens, *others)
        found = run(*split_for_context_parallel(tokens, size), *others)
        return (*join_context_parallel(found[:4], size), *found[4:])

    return reordered(q, k, v, dy)


def assert_near(found, expected):
    """Asserts equality up to a few roundings of float32 of the largest element."""
    for x, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["all_gather", "a2a"])
def test_attention_is_one_devices(strategy, size, kind, groups, balanced):
    expected = expected_of(kind, groups)
    found = on_devices(size, *heads(groups), strategy=strategy, balanced=balanced, **MASKS[kind])
    assert_near(found, expected)


@pytest.mark.parametrize(
    ("strategy", "balanced", "check_vma"),
    [("all_gather", True, True), ("a2a", False, True), ("all_gather", False, False)],
)
def test_masks_and_biases_are_those_of_whole_sequences(strategy, balanced, check_vma):
    """Cross attention with queries that see no key, and a bias with a gradient."""
    keys = 24
    given, rng = heads(2, keys), np.random.default_rng(1)
    mask = rng.random((B, 1, S, keys)) < 0.4
    mask[1, :, 2] = True
    bias = jnp.asarray(rng.normal(size=(1, H, S, keys)), jnp.float32)
    options = {"attn_mask_type": "padding_causal", "attn_bias_type": "pre_scale_bias", "scale": 0.3}
    attend = functools.partial(dot_product_attention, **options)
    expected = jax.jit(functools.partial(both, attend))(*given, mask, bias)
    found = on_devices(
        2, *given, mask, bias, strategy=strategy, balanced=balanced, check_vma=check_vma, **options
    )
    if not check_vma:  # each device's part of the bias' gradient is left to the caller
        found, expected = found[:4], expected[:4]
    assert_near(found, expected)
    assert not np.asarray(found[0])[1, 2].any()
    assert np.isfinite(found[1]).all()


def test_gradients_of_gathered_keys_are_summed_in_float32():
    q, k, v, dy = heads(H, S, jnp.bfloat16)
    found = on_devices(4, q, k, v, dy, attn_mask_type="no_mask")
    attend = functools.partial(dot_product_attention, attn_mask_type="no_mask")
    parts = [
        jax.jit(functools.partial(both, attend))(q[:, own], k, v, dy[:, own])
        for own in (slice(i, i + S // 4) for i in range(0, S, S // 4))
    ]
    for number in (2, 3):
        wanted = sum(np.asarray(part[number], np.float32) for part in parts)
        assert np.array_equal(found[number], jnp.asarray(wanted, jnp.bfloat16))


RESOURCE = te.MeshResource(dp_resource="d", cp_resource="c")
EXCHANGES = re.compile(
    r"= \(?(\S+?)[{ ].*(?:all-gather|all-to-all|collective-permute)(?:-start)?\("
)


def assert_batches_are_split(program, heads=2):
    """Asserts that a program exchanges one sample, and at most so many heads of its tokens."""
    exchanged = EXCHANGES.findall(program.as_text())
    assert exchanged
    for text in exchanged:
        sizes = [int(n) for n in text.removeprefix("f32[").removesuffix("]").split(",")]
        assert sizes[0] == 1, exchanged
        assert np.prod(sizes) <= S * heads * D, exchanged


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("strategy", ["ALL_GATHER", "a2a"])
def test_an_axis_of_set_mesh_is_split_without_shard_map(kind, strategy):
    given = heads(2)
    attend = functools.partial(
        context_parallel_attention, axis_name="c", strategy=strategy, causal_load_balanced=True
    )
    mesh = jax.make_mesh((2, 2), ("d", "c"), axis_types=(kind, kind), devices=jax.devices()[:4])
    with jax.set_mesh(mesh), te.fp8_autocast(mesh_resource=RESOURCE):
        # Queries, keys and values whose tokens are whole are sharded, too.
        tokens = P("d", "c") if kind is AxisType.Auto else P("d")
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(
                split_for_context_parallel(given, 2), (tokens,) * 3 + (P("d", "c"),), strict=True
            )
        ]
        run = jax.jit(functools.partial(both, jax.checkpoint(attend))).lower(*placed).compile()
        found = run(*placed)
    found = [join_context_parallel(np.asarray(x), 2) for x in found]
    assert_near(found, expected_of("causal", 2))
    # Gradients of whole queries are whole.
    assert_batches_are_split(run, H if kind is AxisType.Explicit else 2)


def test_cudnn_gets_a_mask_where_queries_do_not_begin_with_the_keys(monkeypatch):
    """The path of fused kernels, with JAX's own attention in their place."""
    plain, calls = jax.nn.dot_product_attention, []

    def instead(*args, implementation, is_causal, **options):
        calls.append(is_causal)
        return plain(*args, implementation="xla", is_causal=is_causal, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    monkeypatch.setattr(attention, "_default_platform", lambda: "gpu")
    given = [x.astype(jnp.bfloat16) for x in heads(2)]
    for options in ({}, {"window_size": (3, 0)}):
        expected = dot_product_attention(*given[:3], implementation="xla", **options)[:, 6:12]
        keys = [x[:, 2:12] for x in given[1:3]]
        found = dot_product_attention(
            given[0][:, 6:12], *keys, query_start=4, implementation="cudnn",
            window_size=options.get("window_size", (-1, -1)),
        )  # fmt: skip
        if options:
            np.testing.assert_allclose(
                found.astype(jnp.float32), expected.astype(jnp.float32), atol=0.03
            )
    assert calls == [False, False]


def test_zig_zag_order_is_undone_and_gives_equal_parts():
    whole = np.arange(24).reshape(1, 12, 2)
    batch = {"ids": whole, "loss": jnp.asarray(whole, jnp.float32)}
    split = split_for_context_parallel(batch, 3)
    assert type(split["ids"]) is np.ndarray
    assert isinstance(split["loss"], jax.Array)
    assert (split["ids"][0, :, 0] // 2).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert np.array_equal(split["loss"], split["ids"])
    joined = join_context_parallel(split, 3)
    assert all(np.array_equal(x, whole) for x in joined.values())
    assert split_for_context_parallel(whole, 1, 2).tolist() == whole.tolist()
    for reorder in (split_for_context_parallel, join_context_parallel):
        with pytest.raises(
            ValueError, match=rf"{reorder.__name__}: batch must have a multiple of 8 tokens"
        ):
            reorder(batch, 4)


def test_what_does_not_fit_is_refused():
    given = heads(4)

    def refused(error, text, **options):
        with pytest.raises(error, match=text):
            on_devices(4, *given, **options)

    refused(ValueError, "strategy must be one of all_gather, a2a, default, ring, got 'p2p'",
            strategy="p2p")  # fmt: skip
    refused(NotImplementedError, "dropout_rate must be 0, .* got 0.1", dropout_rate=0.1)
    refused(NotImplementedError, "query_start must be 0, got 2", query_start=2)
    refused(ValueError, "window_size must be None or two numbers", window_size=(1, -2))
    refused(ValueError, "mask must be given with attn_mask_type 'padding'",
            attn_mask_type="padding")  # fmt: skip
    with pytest.raises(ValueError, match="query's heads must be a multiple of the 4 devices"):
        on_devices(4, *(x[:, :, :2] for x in given), strategy="a2a")
    with pytest.raises(ValueError, match=r"axes are \[\], got 'c'"):
        context_parallel_attention(*given[:3], axis_name="c")
    with pytest.raises(TypeError, match="axis_name must be the name of a mesh axis, got int"):
        context_parallel_attention(*given[:3], axis_name=0)
    mesh = mesh_of(4)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="query must have a multiple of 8 tokens on an axis of 4"),
    ):
        context_parallel_attention(
            *(x[:, :12] for x in given[:3]), axis_name="c", causal_load_balanced=True
        )


HIDDEN = 32
PARALLEL = {"context_parallel_axis": "c", "context_parallel_causal_load_balanced": True}


def layer(**options):
    defaults = {
        "hidden_size": HIDDEN, "mlp_hidden_size": 64, "num_attention_heads": 4,
        "num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "use_bias": True,
        "enable_rotary_pos_emb": True, "mlp_activations": ("silu", "linear"),
    }  # fmt: skip
    return te_flax.TransformerLayer(**defaults | options)


def step_of(module, chosen, resource=None):
    """Returns a function of output and gradients, those of variables included."""

    def step(variables, x, grad, *others):
        def loss(variables, x):
            y = module.apply(variables, x, *others, deterministic=True)
            return (y * grad).sum(), y

        with te.fp8_autocast(chosen is not None, chosen, resource):
            (_, y), (of_variables, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
                variables, x
            )
        return y, dx, of_variables

    return step


def assert_close(found, expected, tolerance):
    for (path, x), wanted in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        where = jax.tree_util.keystr(path)
        if "['kv']['bias']" in where:  # the softmax does not depend on the keys' bias
            x, wanted = x[1], wanted[1]
        distance = np.linalg.norm(np.asarray(x, np.float64) - wanted)
        assert distance <= tolerance * np.linalg.norm(wanted), where


def variables_of(module, x, chosen, *others):
    with te.fp8_autocast(chosen is not None, chosen):
        made = jax.jit(functools.partial(module.init, deterministic=True))(
            jax.random.key(0), x, *others
        )
    return nn.unbox(made)


@pytest.mark.parametrize(
    ("strategy", "chosen", "options"),
    [
        ("DEFAULT", recipe.DelayedScaling(amax_history_len=4), {}),
        ("a2a", None, {"layer_type": te_flax.TransformerLayerType.DECODER,
                       "transpose_batch_sequence": True, "window_size": (5, -1)}),
    ],
    ids=["encoder", "decoder"],
)  # fmt: skip
def test_layers_are_those_of_one_device(strategy, chosen, options):
    """With FP8 beside it, rotary embedding and relative biases, under one jit."""
    whole = layer(**options)
    module = layer(**options, **PARALLEL, context_parallel_strategy=strategy)
    rng = np.random.default_rng(0)
    dim = 0 if options else 1
    shape = (S, B, HIDDEN) if options else (B, S, HIDDEN)
    x, grad, encoded = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3))
    others = (encoded,) if options else ()
    variables = variables_of(module, x, chosen, *others)  # without a mesh
    expected = jax.jit(step_of(whole, chosen))(variables, x, grad, *others)
    tokens = P("c") if options else TOKENS
    run = jax.shard_map(
        step_of(module, chosen, te.MeshResource(cp_resource="c")), mesh=mesh_of(2),
        in_specs=(P(), tokens, tokens, *(tokens for _ in others)), out_specs=(tokens, tokens, P()),
    )  # fmt: skip
    given = split_for_context_parallel([x, grad, *others], 2, dim)
    y, dx, gradients = jax.jit(run)(variables, *given)
    y, dx = join_context_parallel([y, dx], 2, dim)
    assert_close((y, dx, gradients), expected, 1e-5 if chosen is None else 2e-2)
    if chosen is not None:  # amax values of all devices
        assert_close(gradients["fp8_metas"], expected[2]["fp8_metas"], 2e-2)
        assert_close((y,), expected[:1], 1e-5)


def test_a_layer_under_set_mesh_keeps_its_tokens_split():
    chosen = recipe.CurrentScaling()
    module = layer(**PARALLEL, enable_relative_embedding=False)
    rng = np.random.default_rng(0)
    x, grad = (jnp.asarray(rng.normal(size=(B, S, HIDDEN)), jnp.float32) for _ in range(2))
    variables = variables_of(module, x, chosen)
    expected = jax.jit(step_of(layer(enable_relative_embedding=False), chosen))(variables, x, grad)
    mesh = jax.make_mesh(
        (2, 2), ("d", "c"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    with jax.set_mesh(mesh), te.fp8_autocast(mesh_resource=RESOURCE):
        rules = te_flax.extend_logical_axis_rules(())
        tokens = NamedSharding(mesh, P("d", "c"))
        given = [jax.device_put(a, tokens) for a in split_for_context_parallel([x, grad], 2)]
        with partitioning.axis_rules(rules):
            step = jax.jit(step_of(module, chosen, RESOURCE)).lower(variables, *given)
        program = step.compile()
        y, dx, gradients = program(variables, *given)
    found = *(join_context_parallel(np.asarray(a), 2) for a in (y, dx)), gradients
    assert_close(found, expected, 2e-2)
    assert y.sharding.shard_shape(y.shape) == (B // 2, S // 2, HIDDEN)
    assert_batches_are_split(program)


def test_modules_refuse_what_split_sequences_lack():
    x, key = jnp.ones((B, S, HIDDEN)), jax.random.key(0)

    def init(module, **call):
        module.init({"params": key, "dropout": key}, x, **call)

    module = te_flax.MultiHeadAttention(8, 4, **PARALLEL)
    with pytest.raises(NotImplementedError, match="decode and enable_sequence_parallel must be"):
        init(module, decode=True)
    with pytest.raises(NotImplementedError, match="context_parallel_axis 'c', got False and True"):
        init(te_flax.MultiHeadAttention(8, 4, enable_sequence_parallel=True, **PARALLEL))
    with pytest.raises(NotImplementedError, match="drop_path must be 0 with context_parallel_axis"):
        init(layer(drop_path=0.1, **PARALLEL))
    init(layer(drop_path=0.1, **PARALLEL), deterministic=True)
    variables = module.init(key, x)
    with pytest.raises(ValueError, match="axis_name must be an axis of the mesh"):
        module.apply(variables, x)


def test_the_guides_example_has_the_loss_of_one_device():
    text = (Path(__file__).resolve().parents[3] / "docs/guides/long_context.md").read_text()
    example = text.split("\n## JAX\n")[1].split("```python\n")[1].split("```")[0]
    found: dict = {}
    exec(example, found)
    whole = found["layer"].clone(context_parallel_axis="")
    with te.fp8_autocast(True, "delayed"):
        y = jax.jit(functools.partial(whole.apply, deterministic=True))(
            found["variables"], found["tokens"]
        )
    np.testing.assert_allclose(found["loss"], (y**2).mean(), rtol=1e-4)
    assert len(jax.tree.leaves(found["grads"])) == len(jax.tree.leaves(found["variables"]))
