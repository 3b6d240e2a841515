"""Attention in JAX: its core, decoding with a cache, rotary embedding, biases, logical axes."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from arrays import to_jax  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te.jax import attention  # noqa: E402
from apex_te.jax.attention import dot_product_attention  # noqa: E402
from apex_te.jax.rotary import rotary_pos_emb  # noqa: E402

B, H, G, SQ, SK, D = 2, 4, 2, 6, 8, 8


def reference(q, k, v, mask, bias, kind, bias_type, scale, window):
    """Attention in float64, with a loop over what is visible."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    if bias is not None and bias_type == "pre_scale_bias":
        scores = scores + bias.double()
    scores = scores * scale
    if bias is not None and bias_type != "pre_scale_bias":
        scores = scores + bias.double()
    visible = torch.ones(scores.shape, dtype=torch.bool)
    for i in range(scores.shape[2]):
        for j in range(scores.shape[3]):
            if "causal" in kind and j > i:
                visible[:, :, i, j] = False
            if window and (0 <= window[0] < i - j or 0 <= window[1] < j - i):
                visible[:, :, i, j] = False
    if "padding" in kind:
        visible &= ~mask.bool()
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1)).masked_fill(~visible, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def tensors(dtype=torch.float32, sq=SQ, sk=SK):
    q, k, v = (torch.randn(B, s, h, D).to(dtype) for s, h in ((sq, H), (sk, G), (sk, G)))
    mask = torch.rand(B, 1, sq, sk) < 0.4
    mask[1, :, 2] = True  # a query that sees nothing
    return q, k, v, mask, torch.randn(1, H, sq, sk)


CASES = [
    ("no_mask", None, None, None),
    ("causal", None, "post_scale_bias", None),
    ("padding", None, "pre_scale_bias", 0.3),
    ("padding_causal", (2, 0), None, None),
    ("causal_padding", (-1, -1), None, 1.0),
    ("no_mask", (1, 2), None, None),
]


def assert_is_reference(kind, window, bias_type, scale, tolerance, dtype=torch.float32, sk=SK):
    q, k, v, mask, bias = tensors(dtype, sk=sk)
    bias = bias if bias_type else None
    inputs = [t.clone().requires_grad_() for t in (q, k, v, bias) if t is not None]
    whole = [*inputs, None][:4]
    y = reference(*whole[:3], mask, whole[3], kind, bias_type, scale or D**-0.5, window)
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy.double())

    def attend(q, k, v, bias=None):
        return dot_product_attention(
            q, k, v, to_jax(mask) if "padding" in kind else None, bias, attn_mask_type=kind,
            attn_bias_type=bias_type, scale=scale, window_size=window,
        )  # fmt: skip

    @jax.jit
    def run(dy, *args):
        y, pull = jax.vjp(attend, *args)
        return y, *pull(dy)

    found = run(to_jax(dy), *(to_jax(t.detach()) for t in inputs))
    for ours, theirs in zip(found, [y, *(t.grad for t in inputs)], strict=True):
        theirs = theirs.detach().double().numpy()
        assert np.isfinite(np.asarray(ours, np.float64)).all()
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), theirs, rtol=tolerance, atol=tolerance
        )
    if "padding" in kind:
        assert not np.asarray(found[0])[1, 2].any()
        assert not np.asarray(found[1])[1, 2].any()


@pytest.mark.parametrize(("kind", "window", "bias_type", "scale"), CASES)
def test_attention_is_that_of_a_float64_reference(kind, window, bias_type, scale):
    assert_is_reference(kind, window, bias_type, scale, 2e-5)


@pytest.mark.parametrize(("kind", "window", "bias_type"), [
    ("causal", None, "post_scale_bias"), ("padding", None, None), ("padding_causal", None, None),
    ("causal", (2, 0), None), ("causal", (1, -1), None),
])  # fmt: skip
def test_cudnns_path_is_the_same_function(monkeypatch, kind, window, bias_type):
    """The path of fused kernels, with JAX's own attention in their place."""
    plain, calls = jax.nn.dot_product_attention, []

    def instead(*args, implementation, **options):
        calls.append(implementation)
        return plain(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    monkeypatch.setattr(attention, "_default_platform", lambda: "gpu")
    assert_is_reference(kind, window, bias_type, None, 0.03, torch.bfloat16, sk=SQ)
    assert set(calls) == {"cudnn"}


def test_cudnn_is_left_where_it_has_no_kernel(monkeypatch):
    q, k, v, mask, bias = (to_jax(t) for t in tensors(torch.bfloat16))

    def taken(q=q, mask=None, bias=None, fused=lambda q, k, v, mask, bias: q):
        return attention._cudnn_takes(fused, q, k, v, mask, bias)

    assert not taken()  # a CPU
    monkeypatch.setattr(attention, "_default_platform", lambda: "gpu")
    assert taken()
    assert taken(bias=bias)
    assert taken(mask=mask)
    assert not taken(q=q.astype(jnp.float32))
    assert not taken(mask=mask, bias=bias)
    assert not taken(bias=jnp.broadcast_to(bias, (B, H, SQ, SK)))

    def refused(*args):
        raise NotImplementedError("head dim")

    assert not taken(fused=refused)


def test_dropout_of_attention_drops_at_its_rate_and_scales_what_it_keeps():
    keys = 512
    q, v = jnp.zeros((1, 64, 2, 4)), jnp.ones((1, keys, 2, 4))
    k = jnp.zeros((1, keys, 2, 4))
    module = te_flax.DotProductAttention(
        4, 2, attention_dropout=0.25, attn_mask_type="no_mask", transpose_batch_sequence=False
    )
    assert np.allclose(module.apply({}, q, k, v, deterministic=True), 1.0)
    draw = jax.jit(lambda key: module.apply({}, q, k, v, rngs={"dropout": key}))
    y = np.asarray(draw(jax.random.key(0)))
    # Equal weights: each output is the share that was kept, over 0.75.
    assert abs(y.mean() - 1.0) < 0.01
    spread = np.sqrt(0.25 / 0.75 / keys)
    assert 0.7 * spread < y[..., 0].std() < 1.3 * spread
    assert np.array_equal(y, draw(jax.random.key(0)))
    assert not np.array_equal(y, draw(jax.random.key(1)))


@pytest.mark.parametrize("layout", ["bs3hd", "bshd_bs2hd", "bshd_bshd_bshd"])
@pytest.mark.parametrize("sequence_first", [False, True])
def test_layouts_of_heads_give_one_result(layout, sequence_first):
    qkv = jnp.asarray(np.random.default_rng(0).normal(size=(B, SQ, 3, H, D)), jnp.float32)
    expected = dot_product_attention(*(qkv[:, :, i] for i in range(3)))
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    given = {
        "bs3hd": (qkv,), "bshd_bs2hd": (q, kv), "bshd_bshd_bshd": (q, kv[:, :, 0], kv[:, :, 1]),
    }[layout]  # fmt: skip
    module = te_flax.DotProductAttention(
        D, H, qkv_layout=layout, transpose_batch_sequence=sequence_first
    )
    if sequence_first:
        given, expected = [x.swapaxes(0, 1) for x in given], expected.swapaxes(0, 1)
    np.testing.assert_allclose(module.apply({}, *given), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attn_mask_type": "arbitrary"}, "attn_mask_type must be one of no_mask, padding"),
        ({"attn_mask_type": "padding"}, "mask must be given with attn_mask_type 'padding'"),
        ({"window_size": (1, -2)}, "window_size must be None or two numbers"),
        ({"dropout_rate": 1.0}, "dropout_rate must be at least 0 and below 1, got 1.0"),
        ({"dropout_rate": 0.5}, "dropout_key must be given"),
        ({"implementation": "flash"}, 'implementation must be None, "xla" or "cudnn"'),
        ({"attn_bias_type": "no_bias", "bias": jnp.ones((1, 1, 1, 1))}, "bias must be None"),
        ({"attn_bias_type": "post_scale_bias"}, "bias must be an array"),
        ({"bias": jnp.ones((3, 1, 1, 1))}, r"bias must broadcast to \[2, 4, 6, 8\]"),
        (
            {"attn_mask_type": "padding", "mask": jnp.ones((B, 1, 1, SK))},
            "mask must have a bool or integer dtype, got float32",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options, text):
    q, k, v, _, _ = (to_jax(t) for t in tensors())
    error = TypeError if "dtype" in text else ValueError
    with pytest.raises(error, match=f"dot_product_attention: {text}"):
        dot_product_attention(q, k, v, **options)


def test_shapes_and_layouts_that_do_not_fit_are_refused():
    q, k, v, _, _ = (to_jax(t) for t in tensors())
    with pytest.raises(ValueError, match="key must have heads that divide query's 4, got 3"):
        dot_product_attention(q, *[jnp.ones((B, SK, 3, D))] * 2)
    with pytest.raises(ValueError, match=r"value must have shape \[2, 8, 2, 8\], got \[2, 7, 2, 8"):
        dot_product_attention(q, k, v[:, 1:])
    with pytest.raises(TypeError, match="key must have dtype float32, got bfloat16"):
        dot_product_attention(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(NotImplementedError, match="qkv_layout must be one of bs3hd"):
        te_flax.DotProductAttention(D, H, qkv_layout="t3hd").apply({}, q)
    with pytest.raises(ValueError, match=r"query must have shape \[b, s, 3, heads, size\]"):
        te_flax.DotProductAttention(D, H, qkv_layout="bs3hd").apply({}, q)
    with pytest.raises(ValueError, match="query must have 2 heads of size 8"):
        te_flax.DotProductAttention(D, 2).apply({}, q, k, v)
    with pytest.raises(ValueError, match="group_method must be one of consecutive, alternate"):
        rotary_pos_emb(q, group_method="pairs")
    with pytest.raises(ValueError, match=r"x must be .* of an even size"):
        rotary_pos_emb(q[..., :3])


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
def test_rotary_embedding_turns_pairs_by_their_angles(method):
    x = np.random.default_rng(0).normal(size=(B, SQ, H, D)).astype(np.float32)
    ours = rotary_pos_emb(jnp.asarray(x), (2, 500), method, start=7)
    turned = np.empty(x.shape, np.float64)
    for i in range(D // 2):
        a, b = (2 * i, 2 * i + 1) if method == "consecutive" else (i, i + D // 2)
        angle = (7 + np.arange(SQ))[:, None] / (2 * 250.0 ** (2 * i / D))
        turned[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
        turned[..., b] = x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle)
    np.testing.assert_allclose(ours, turned, atol=2e-6)


@pytest.mark.parametrize("sequence_first", [False, True])
def test_decoding_with_a_cache_is_the_whole_forward(sequence_first):
    width, length = 16, 8
    module = te_flax.MultiHeadAttention(
        8, 4, num_gqa_groups=2, enable_rotary_pos_emb=True, use_bias=True,
        transpose_batch_sequence=sequence_first,
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(0), (B, length, width))
    bias = jax.random.normal(jax.random.key(1), (1, 4, length, length))
    turn = (lambda x: x.swapaxes(0, 1)) if sequence_first else (lambda x: x)
    key = jax.random.key(2)
    whole = turn(x)
    variables = jax.jit(lambda: module.init(key, whole, bias=bias, decode=True))()
    params, cache = {"params": variables["params"]}, variables["cache"]
    shape = (length, B, 2, 8) if sequence_first else (B, length, 2, 8)
    assert cache["cached_key"].shape == shape
    expected = turn(jax.jit(lambda: module.apply(params, whole, whole, bias=bias)[0])())

    @jax.jit
    def step(cache, tokens):
        tokens = turn(tokens)
        (y, _), changed = module.apply(
            {**params, "cache": cache}, tokens, tokens, bias=bias, decode=True, mutable=["cache"]
        )
        return changed["cache"], turn(y)

    found, at = [], 0
    for count in (3, 1, 1, 1, 1, 1):  # three at once, then one by one
        cache, y = step(cache, x[:, at : at + count])
        found.append(y)
        at += count
    np.testing.assert_allclose(jnp.concatenate(found, 1), expected, atol=2e-5)
    assert int(cache["cache_index"]) == length
    assert np.isnan(np.asarray(step(cache, x[:, :1])[1])).all()  # beyond the cache
    with pytest.raises(ValueError, match='collection "cache" with decode=True'):
        module.apply(params, whole, whole, decode=True, mutable=["cache"])
    longer = turn(jnp.ones((B, length + 1, width)))
    with pytest.raises(ValueError, match="inputs must fit the cache's shape"):
        module.apply({**params, "cache": cache}, longer, longer, decode=True, mutable=["cache"])
    with pytest.raises(ValueError, match="decode must be False in cross attention"):
        module.apply({**params, "cache": cache}, whole, turn(x * 2), decode=True)


def test_scaled_query_init_and_old_names():
    x = jnp.ones((2, 4, 256))
    keys = {}
    for scaled in (True, False):
        module = te_flax.MultiHeadAttention(64, num_heads=4, scaled_query_init=scaled)
        made = jax.jit(lambda m=module: m.init(jax.random.key(0), x))()
        kernel = made["params"]["qkv"]["kernel"].value
        keys[scaled] = np.asarray(kernel).std((0, 2))
    np.testing.assert_allclose(keys[False], 1 / 16, rtol=0.05)
    np.testing.assert_allclose(keys[True], [1 / 128, 1 / 16, 1 / 16], rtol=0.05)
    cross = te_flax.MultiHeadAttention(8, 2, fuse_qkv=False)
    made = jax.eval_shape(lambda: cross.init(jax.random.key(0), x, x * 2))
    assert made["params"].keys() == {"query", "key", "value", "out"}
    with pytest.raises(TypeError, match="num_attention_heads must be an int, got None"):
        te_flax.MultiHeadAttention(8).init(jax.random.key(0), x, x)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_position_biases_are_t5s(bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    module = te_flax.RelativePositionBiases(32, 128, 4)
    variables = module.init(jax.random.key(0), 5, 5)
    assert variables["params"]["rel_embedding"].value.shape == (4, 32)
    assert variables["params"]["rel_embedding"].names == ("heads", "relpos_buckets")
    table = jnp.arange(32.0) + 100 * jnp.arange(4.0)[:, None]
    ours = module.apply({"params": {"rel_embedding": table}}, 300, 200, bidirectional)
    places = torch.arange(200)[None] - torch.arange(300)[:, None]
    buckets = t5._relative_position_bucket(places, bidirectional, 32, 128).numpy()
    assert ours.shape == (1, 4, 300, 200)
    assert np.array_equal(ours[0], buckets + 100.0 * np.arange(4)[:, None, None])
    with pytest.raises(ValueError, match="num_buckets must be at least 4, got 2"):
        te_flax.RelativePositionBiases(2, 128, 4).init(jax.random.key(0), 5, 5)
    with pytest.raises(ValueError, match="max_distance must be above"):
        te_flax.RelativePositionBiases(32, 8, 4).init(jax.random.key(0), 5, 5)


def test_logical_axis_rules_are_extended():
    rules = (("embed", "model"), ("nvte_head", None))
    found = te_flax.extend_logical_axis_rules(rules)
    assert found[:2] == rules
    assert dict(found)["nvte_w_tp"] is None
    assert len(found) == len({name for name, _ in found}) == 13
    mesh = te.MeshResource(dp_resource="dp", tp_resource="tp", fsdp_resource="dp2")
    with te.fp8_autocast(mesh_resource=mesh):
        found = dict(te_flax.extend_logical_axis_rules((("embed", None),)))
    assert found["nvte_w_tp"] == "tp"
    assert found["nvte_batch"] == ("dp2", "dp")
    assert found["nvte_seqlen_cp"] is None
    with pytest.raises(ValueError, match="rules must map nvte_head to None, as the layers do"):
        te_flax.extend_logical_axis_rules((("nvte_head", "tp"),))
    with pytest.raises(TypeError, match="rules must be pairs"):
        te_flax.extend_logical_axis_rules((("embed",),))
