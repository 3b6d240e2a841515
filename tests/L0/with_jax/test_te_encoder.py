"""Transformer Engine's encoder layer restated in plain jnp, and the Flax layer with its weights."""

import math

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402

import apex_te  # noqa: E402
import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te.jax.attention import dot_product_attention  # noqa: E402

BATCH, TOKENS, WIDTH, HEADS, MLP, RANK = 2, 12, 16, 4, 24, 3
HEAD = WIDTH // HEADS
MASK = np.arange(TOKENS) >= np.array([TOKENS, 7])[:, None]  # padding of the second sample
ACTS = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "linear": lambda x: x}
ACTS["quick_gelu"] = lambda x: x * jax.nn.sigmoid(1.702 * x)


def normalised(x, p, kind):
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]
    return x + p["ln_bias"] if kind == "layernorm" else x


def linear(x, p, alpha, prefix=""):
    """A product with a bias and a low-rank adapter, if there are any."""
    y = jnp.tensordot(x, p[f"{prefix}kernel"], 1)
    if f"{prefix}bias" in p:
        y = y + p[f"{prefix}bias"]
    if f"{prefix}lora_a_kernel" in p:
        a, b = p[f"{prefix}lora_a_kernel"], p[f"{prefix}lora_b_kernel"]
        inner, outer = ("bsi,inr->bsnr", "bsnr,nrl->bsnl") if a.ndim == 3 else (
            "bsi,ir->bsr", "bsr,rl->bsl")  # fmt: skip
        y = y + jnp.einsum(outer, jnp.einsum(inner, x, a), b) * (alpha / RANK)
    return y


def buckets():
    """T5's buckets of distances, half for each direction: 8 exact ones, then logarithmic ones."""
    found = np.zeros((TOKENS, TOKENS), np.int32)
    for q in range(TOKENS):
        for k in range(TOKENS):
            distance = abs(q - k)
            if distance >= 8:
                far = math.log(distance / 8 + 1e-7) / math.log(128 / 8) * 8
                distance = min(8 + int(far), 15)
            found[q, k] = distance + (16 if k > q else 0)
    return found


def rotated(x):
    """Neighbours as pairs, by angles position / 10000^(2 i / d)."""
    angles = np.arange(TOKENS)[:, None] / 10000 ** (2 * np.arange(HEAD // 2) / HEAD)
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[:, None] for f in (np.cos, np.sin))
    one, two = x[..., 0::2], x[..., 1::2]
    return jnp.stack([one * cos - two * sin, one * sin + two * cos], -1).reshape(x.shape)


def encoder(
    p, x, *, layernorm_type="layernorm", mlp_activations=("gelu",), num_gqa_groups=HEADS,
    self_attn_mask_type="causal", enable_relative_embedding=True, enable_rotary_pos_emb=False,
    scale_attn_logits=False, softmax_type="vanilla", output_layernorm=False,
    apply_residual_connection_post_layernorm=False, low_rank_adaptation_alpha=RANK, **_,
):  # fmt: skip
    """The layer of Transformer Engine 2.20 with its defaults, without dropout."""
    alpha, attention = low_rank_adaptation_alpha, p["attention"]
    first = attention["qkv" if "qkv" in attention else "query"]
    h = x if output_layernorm else normalised(x, first, layernorm_type)
    if "qkv" in attention:
        qkv = linear(h, first, alpha)
        q, k, v = (qkv[:, :, i] for i in range(3))
    else:
        q, kv = linear(h, first, alpha), linear(h, attention["kv"], alpha)
        k, v = kv[:, :, 0], kv[:, :, 1]
    q = q.reshape(BATCH, TOKENS, HEADS, HEAD)
    k, v = (each.reshape(BATCH, TOKENS, num_gqa_groups, HEAD) for each in (k, v))
    if enable_rotary_pos_emb:
        q, k = rotated(q), rotated(k)
    k, v = (jnp.repeat(each, HEADS // num_gqa_groups, axis=2) for each in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if scale_attn_logits:
        scores = scores / math.sqrt(HEAD)
    if enable_relative_embedding:
        scores = scores + p["relpos_bias"]["rel_embedding"][:, buckets()]
    hidden = np.zeros((1, 1, TOKENS, TOKENS), bool)
    if "causal" in self_attn_mask_type:
        hidden = hidden | ~np.tri(TOKENS, dtype=bool)
    if "padding" in self_attn_mask_type:
        hidden = hidden | MASK[:, None, None]
    weights = jnp.where(hidden, 0.0, jnp.exp(scores))
    total = weights.sum(-1, keepdims=True)
    if softmax_type == "off_by_one":
        total = total + 1.0
    if softmax_type == "learnable":
        total = total + jnp.exp(attention["DotProductAttention_0"]["softmax_offset"])
    out = jnp.einsum("bhqk,bkhd->bqhd", weights / total, v).reshape(x.shape)
    y = linear(out, attention["out"], alpha)
    x = y + (h if apply_residual_connection_post_layernorm else x)
    mlp = p["mlp"]
    h = normalised(x, mlp, layernorm_type)
    parts = linear(h, mlp, alpha, "wi_")
    a = math.prod(ACTS[name](parts[:, :, i]) for i, name in enumerate(mlp_activations))
    x = linear(a, mlp, alpha, "wo_") + (h if apply_residual_connection_post_layernorm else x)
    return normalised(x, p["output_layernorm"], layernorm_type) if output_layernorm else x


CASES = {
    "defaults": {},
    "learnable sinks": {
        "softmax_type": "learnable", "use_bias": True, "layernorm_type": "rmsnorm",
        "mlp_activations": ("silu", "linear"), "self_attn_mask_type": "padding_causal",
    },
    "sinks of 0": {
        "softmax_type": "off_by_one", "num_gqa_groups": 2, "enable_rotary_pos_emb": True,
        "scale_attn_logits": True, "enable_relative_embedding": False,
        "self_attn_mask_type": "padding", "mlp_activations": ("quick_gelu", "linear"),
    },
    "adapters": {
        "low_rank_adaptation_scope": "all", "low_rank_adaptation_dim": RANK,
        "low_rank_adaptation_alpha": 8.0, "apply_residual_connection_post_layernorm": True,
        "use_bias": True,
    },
    "adapters of groups": {
        "low_rank_adaptation_scope": "exclude_mlp", "low_rank_adaptation_dim": RANK,
        "num_gqa_groups": 1, "output_layernorm": True,
        "self_attn_mask_type": "no_mask",
    },
}  # fmt: skip


def layer_of(**options):
    sizes = {"hidden_size": WIDTH, "mlp_hidden_size": MLP, "num_attention_heads": HEADS}
    return te_flax.TransformerLayer(**sizes, **options)


def random_like(tree, seed=0):
    """Parameters that differ from zero and from each other; scales of norms are near 1."""
    leaves, structure = jax.tree.flatten_with_path(tree)
    rng, made = np.random.default_rng(seed), []
    for path, leaf in leaves:
        value = rng.standard_normal(leaf.shape).astype(np.float32) * 0.3
        made.append(jnp.asarray(value + ("scale" in jax.tree_util.keystr(path))))
    return jax.tree.unflatten(structure, made)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_the_published_formula(name):
    """Output and all gradients, with equal weights, within rounding of float32."""
    options, x = CASES[name], jax.random.normal(jax.random.key(0), (BATCH, TOKENS, WIDTH))
    layer = layer_of(**options)
    mask = jnp.asarray(MASK[:, None, None])
    shapes = jax.eval_shape(
        lambda: layer.init(jax.random.key(0), x, None, mask, deterministic=True)
    )
    params = random_like(nn.unbox(shapes["params"]))
    weights = jax.random.normal(jax.random.key(1), x.shape)

    def ours(p, x):
        return layer.apply({"params": p}, x, None, mask, deterministic=True)

    def both(f):
        def loss(p, x):
            y = f(p, x)
            return (y * weights).sum(), y

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    (found, y), (expected, y1) = both(ours), both(lambda p, x: encoder(p, x, **options))
    np.testing.assert_allclose(y, y1, rtol=1e-5, atol=2e-5)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 1e-4
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * np.abs(other).max())


SCOPES = {
    "none": set(),
    "all": {"qkv", "out", "mlp"},
    "qkv_proj": {"qkv"},
    "output_proj": {"out"},
    "mlp": {"mlp"},
    "exclude_qkv_proj": {"out", "mlp"},
    "exclude_output_proj": {"qkv", "mlp"},
    "exclude_mlp": {"qkv", "out"},
}


def test_scopes_of_adapters_and_their_start():
    """Adapters change nothing at first, as their second kernel is 0."""
    x = jnp.ones((1, 4, WIDTH))
    for scope, expected in SCOPES.items():
        layer = layer_of(low_rank_adaptation_scope=scope, low_rank_adaptation_dim=RANK)
        made = jax.eval_shape(lambda: layer.init(jax.random.key(0), x, deterministic=True))  # noqa: B023
        paths = [path for path, _ in jax.tree.flatten_with_path(nn.unbox(made["params"]))[0]]
        assert {path[-2].key for path in paths if "lora" in path[-1].key} == expected
    with pytest.raises(ValueError, match="low_rank_adaptation_scope must be one of none, all, qkv"):
        layer_of(low_rank_adaptation_scope="some").init(jax.random.key(0), x, deterministic=True)
    with pytest.raises(ValueError, match="low_rank_adaptation_dim must be"):
        te_flax.DenseGeneral(4, enable_low_rank_adaptation=True, low_rank_adaptation_dim=0).init(
            jax.random.key(0), x
        )
    dense = te_flax.DenseGeneral((2, 6), axis=(-2, -1), enable_low_rank_adaptation=True)
    y, made = dense.init_with_output(jax.random.key(0), x)
    params = nn.unbox(made["params"])
    assert params["lora_a_kernel"].shape == (4, WIDTH, 2, 32)
    assert params["lora_b_kernel"].shape == (2, 32, 6)
    assert np.abs(params["lora_a_kernel"]).max() > 0
    plain = te_flax.DenseGeneral((2, 6), axis=(-2, -1))
    assert np.array_equal(y, plain.apply({"params": {k: params[k] for k in ("kernel", "bias")}}, x))
    params = random_like(params)
    a, b = params["lora_a_kernel"], params["lora_b_kernel"]
    more = jnp.einsum("bsi,sinr,nrl->bnl", x, a, b)
    expected = plain.apply({"params": {k: params[k] for k in ("kernel", "bias")}}, x) + more
    found = dense.apply({"params": params}, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("chosen", ["delayed", "blockwise"])
def test_adapters_are_beside_the_fp8_product(chosen):
    """In FP8 the product is the layer's own, and adapters are added in the input's dtype."""
    x, both = jax.random.normal(jax.random.key(0), (8, 32)), []
    with te.fp8_autocast(True, chosen):
        for enable in (True, False):
            layer = te_flax.LayerNormDenseGeneral(16, enable_low_rank_adaptation=enable)
            made = nn.unbox(layer.init(jax.random.key(1), x))
            both.append((layer, made))
        (layer, made), (plain, without) = both
        params = {**random_like(made["params"]), **without["params"]}
        (y, _), (y1, _) = layer.apply({**made, "params": params}, x), plain.apply(without, x)
    normed = te_flax.LayerNorm().apply({"params": {k: params[k] for k in ("scale", "ln_bias")}}, x)
    more = normed @ params["lora_a_kernel"] @ params["lora_b_kernel"]
    np.testing.assert_allclose(y, y1 + more, rtol=1e-5, atol=1e-4)


def test_sinks_of_torchs_modules_have_the_same_checkpoint_and_numbers():
    import torch

    torch.manual_seed(0)
    options = {"softmax_type": "learnable", "attn_mask_type": "causal", "attention_dropout": 0.0}
    theirs = apex_te.MultiheadAttention(
        WIDTH, HEADS, qkv_format="bshd", input_layernorm=False, fuse_qkv_params=False, **options
    )
    with torch.no_grad():
        theirs.core_attention.softmax_offset.copy_(torch.randn(HEADS))
    ours = te_flax.MultiHeadAttention(
        HEAD, HEADS, input_layernorm=False, use_bias=True, scale_attn_logits=True, **options
    )
    x = torch.randn(BATCH, TOKENS, WIDTH)
    made = ours.init(jax.random.key(0), x.numpy())
    read = te.state.from_torch(theirs.state_dict(), made)
    assert np.array_equal(
        nn.unbox(read["params"])["DotProductAttention_0"]["softmax_offset"].reshape(-1),
        theirs.core_attention.softmax_offset.detach(),
    )
    y = theirs(x)
    y = y[0] if isinstance(y, tuple) else y
    found = ours.apply(read, x.numpy())[0]
    np.testing.assert_allclose(found, y.detach(), rtol=1e-5, atol=1e-5)
    back = te.state.to_torch(read)
    assert back["core_attention.softmax_offset"].shape == (HEADS,)
    for key, value in back.items():
        assert np.array_equal(value, theirs.state_dict()[key])


def test_softmax_types_are_checked():
    q = jnp.ones((1, 4, 2, 8))
    for given, text in (
        ({"softmax_type": "other"}, "softmax_type must be one of vanilla, off_by_one, learnable"),
        ({"softmax_type": "learnable"}, "softmax_offset must be an array with softmax_type"),
        ({"softmax_offset": q}, "softmax_offset must be None with softmax_type 'vanilla'"),
        (
            {"softmax_type": "learnable", "softmax_offset": jnp.ones((2,))},
            r"softmax_offset must have shape \[1, 2, 1, 1\]",
        ),
        ({"softmax_type": "off_by_one", "implementation": "cudnn"}, 'must be "xla" with'),
    ):
        with pytest.raises(ValueError, match=text):
            dot_product_attention(q, q, q, **given)
    same = [dot_product_attention(q, q, q, softmax_type=f"off{c}by{c}one") for c in "_-"]
    assert np.array_equal(*same)
    core = te_flax.DotProductAttention(8, 2, softmax_type="off_by_one", context_parallel_axis="cp")
    with pytest.raises(NotImplementedError, match='softmax_type must be "vanilla" with context'):
        core.init(jax.random.key(0), q, q, q)
