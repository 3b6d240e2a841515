"""Flax's Transformer layers: every recipe for 5 steps, scans, remat, eager steps, dropout."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from arrays import to_jax  # noqa: E402
from flax_layers import (  # noqa: E402
    BATCH,
    DECODER,
    HEADS,
    HIDDEN,
    TOKENS,
    assert_near,
    assert_same_steps,
    flax_layer,
    torch_layer,
    variables_of,
)

import apex_te  # noqa: E402
import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402

DELAYED = recipe.DelayedScaling(amax_history_len=4)
RECIPES = [
    None,
    DELAYED,
    recipe.DelayedScaling(amax_history_len=2, fp8_format=recipe.Format.E4M3, margin=1),
    recipe.CurrentScaling(),
    recipe.CurrentScaling(pow2=True),
    recipe.BlockScaling(),
    recipe.MXFP8Scaling(),
    recipe.CurrentScaling(fp8_format=recipe.Format.HIF8),
    recipe.DelayedScaling(amax_history_len=4, first_step="current"),
]
# Options of PyTorch's layer and of Flax's.
LAYERS = {
    "gpt": ({}, {}),
    "llama": (
        {"num_gqa_groups": 2, "bias": False, "normalization": "RMSNorm", "activation": "swiglu"},
        {
            "num_gqa_groups": 2, "use_bias": False, "layernorm_type": "rmsnorm",
            "mlp_activations": ("silu", "linear"),
        },
    ),
    "bert": (
        {
            "apply_residual_connection_post_layernorm": True, "output_layernorm": True,
            "self_attn_mask_type": "no_mask",
        },
        {
            "apply_residual_connection_post_layernorm": True, "output_layernorm": True,
            "self_attn_mask_type": "no_mask", "fuse_qkv_params": False,
        },
    ),
    "t5 decoder": (
        {"layer_type": "decoder", "normalization": "RMSNorm", "bias": False, "activation": "relu"},
        {
            "layer_type": DECODER, "layernorm_type": "rmsnorm", "use_bias": False,
            "mlp_activations": ("relu",),
        },
    ),
    "sliding window, unfused, zero-centred": (
        {"window_size": (3, 0), "zero_centered_gamma": True},
        {"window_size": (3, 0), "zero_centered_gamma": True, "fuse_qkv_params": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("chosen", RECIPES, ids=repr)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_are_torchs_over_5_steps(kind, chosen):
    torch.manual_seed(1)
    theirs, ours = LAYERS[kind]
    decoder = "layer_type" in theirs
    assert_same_steps(torch_layer(**theirs), flax_layer(**ours), chosen, 5, encoder=decoder)


def test_padding_masks_and_relative_biases_are_torchs():
    torch.manual_seed(2)
    padded = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    padded[0, ..., -6:] = True
    layer = torch_layer(self_attn_mask_type="padding")
    module = flax_layer(self_attn_mask_type="padding", enable_relative_embedding=True)
    x = torch.randn(BATCH, TOKENS, HIDDEN)
    # PyTorch's padding mask also hides padded queries; so does one of all pairs here.
    pairs = to_jax(padded | padded.transpose(2, 3))
    table = torch.randn(HEADS, 32)
    biases = te_flax.RelativePositionBiases(32, 128, HEADS).apply(
        {"params": {"rel_embedding": to_jax(table)}}, TOKENS, TOKENS
    )
    theirs = layer(
        x, padded, core_attention_bias_type="post_scale_bias",
        core_attention_bias=torch.tensor(np.asarray(biases)),
    )  # fmt: skip
    variables = variables_of(flax_layer(self_attn_mask_type="no_mask"), layer, None, to_jax(x))[
        "params"
    ]
    variables = {"params": {**variables, "relpos_bias": {"rel_embedding": to_jax(table)}}}
    ours = module.apply(variables, to_jax(x), attention_mask=pairs, deterministic=True)
    assert_near(ours, theirs)


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
def test_multi_head_attention_with_rotary_embedding_is_torchs(method):
    torch.manual_seed(3)
    interleaved = method == "consecutive"
    layer = apex_te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, num_gqa_groups=2, qkv_format="bshd",
        input_layernorm=True, rotary_pos_interleaved=interleaved,
    )  # fmt: skip
    angles = apex_te.RotaryPositionEmbedding(HIDDEN // HEADS, interleaved=interleaved)(TOKENS)
    module = te_flax.MultiHeadAttention(
        HIDDEN // HEADS, HEADS, num_gqa_groups=2, use_bias=True, layernorm_epsilon=1e-5,
        enable_rotary_pos_emb=True, rotary_pos_emb_group_method=method, scale_attn_logits=True,
    )  # fmt: skip
    x = torch.randn(BATCH, TOKENS, HIDDEN)
    variables = variables_of(module, layer, DELAYED, to_jax(x))
    with apex_te.fp8_autocast(fp8_recipe=DELAYED):
        theirs = layer(x, rotary_pos_emb=angles)
    with te.fp8_autocast(True, DELAYED):
        ours, normed = module.apply(variables, to_jax(x))
    assert normed is None
    assert_near(ours, theirs)


class Stack(nn.Module):
    """Three layers by ``nn.scan``, each recomputed in backward if ``remat``."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        def body(layer, x, _):
            return layer(x, deterministic=True), None

        scanned = nn.scan(
            nn.remat(body, prevent_cse=False) if self.remat else body,
            variable_axes={"params": 0, "fp8_metas": 0}, split_rngs={"params": True}, length=3,
            metadata_params={nn.PARTITION_NAME: None},
        )  # fmt: skip
        return scanned(flax_layer(name="layer"), x, None)[0]


def test_scanned_and_recomputed_layers_are_single_ones():
    x = to_jax(torch.randn(BATCH, TOKENS, HIDDEN))
    with te.fp8_autocast(True, DELAYED):
        variables = jax.jit(lambda: Stack().init(jax.random.key(0), x))()
    assert variables["fp8_metas"]["layer"]["mlp"]["scale_fwd"].shape == (3, 6)

    def gradients(apply):
        def run(variables):
            with te.fp8_autocast(True, DELAYED):
                return jax.value_and_grad(lambda v: (apply(v) ** 2).sum())(variables)

        return jax.jit(run)(variables)

    def one_by_one(variables):
        y = x
        for i in range(3):
            single = jax.tree.map(lambda leaf, i=i: leaf[i], nn.unbox(variables))
            single = {name: value["layer"] for name, value in single.items()}
            y = flax_layer().apply(single, y, deterministic=True)
        return y

    scanned = gradients(lambda v: Stack().apply(v, x))
    remat = gradients(lambda v: Stack(remat=True).apply(v, x))
    for ours, theirs in zip(jax.tree.leaves(remat), jax.tree.leaves(scanned), strict=True):
        assert np.array_equal(ours, theirs)
    _, found = gradients(one_by_one)
    for ours, theirs in zip(jax.tree.leaves(scanned[1]), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (np.asarray(scanned[1]["fp8_metas"]["layer"]["mlp"]["uses"]) == 1.0).all()


def test_odd_sizes_in_bf16_have_the_bits_of_jit_eager_recomputed_and_scanned():
    module = flax_layer(hidden_size=10, mlp_hidden_size=20, num_attention_heads=2, num_gqa_groups=1)
    *inputs, target = jax.random.normal(jax.random.key(0), (4, 2, 7, 10), jnp.bfloat16)
    # Without the option XLA leaves out roundings to bf16 between operations that it fuses.
    compiled = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})

    def apply(variables, x):
        return module.apply(variables, x, deterministic=True)

    def step(variables, x, apply=apply):
        def loss(variables):
            return ((apply(variables, x).astype(jnp.float32) - target) ** 2).mean()

        with te.fp8_autocast(True, DELAYED):
            return jax.value_and_grad(loss)(variables)

    @compiled
    def scanned(variables, inputs):
        def body(state, x):
            found = step({**variables, "fp8_metas": state}, x)
            return found[1]["fp8_metas"], found

        return jax.lax.scan(body, variables["fp8_metas"], inputs)[1]

    with te.fp8_autocast(True, DELAYED):
        variables = jax.jit(lambda: module.init(jax.random.key(1), target, deterministic=True))()
    variables = {name: variables[name] for name in ("params", "fp8_metas")}
    microbatches = scanned(variables, jnp.stack(inputs))
    jitted, recomputed = compiled(step), compiled(lambda v, x: step(v, x, jax.checkpoint(apply)))
    for i, x in enumerate(inputs):
        expected = jitted(variables, x)
        others = {
            "scanned": jax.tree.map(lambda leaf, i=i: leaf[i], microbatches),
            "recomputed": recomputed(variables, x),
            "eager": step(variables, x),
        }
        for name, other in others.items():
            for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(expected), strict=True):
                assert np.array_equal(ours, theirs), name
        variables = {**variables, "fp8_metas": expected[1]["fp8_metas"]}


def test_dropout_and_drop_path_drop_at_their_rates():
    width, tokens = 64, 40
    module = te_flax.TransformerLayer(
        width, 8, 2, hidden_dropout=0.25, attention_dropout=0.0, intermediate_dropout=0.0,
        enable_relative_embedding=False, apply_residual_connection_post_layernorm=True,
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(0), (8, tokens, width))

    def init(key, shape, dtype):
        return jnp.zeros(shape, dtype)

    # With zero kernels and biases of 1 each branch's result is 1 before dropout.
    module = module.clone(
        mha_kernel_init=init, mlp_kernel_init=init, use_bias=True, bias_init=nn.initializers.ones
    )
    variables = module.init(jax.random.key(0), x, deterministic=True)
    plain = module.apply(variables, x, deterministic=True)
    draw = jax.jit(lambda key: module.apply(variables, x, rngs={"dropout": key}))
    first, again, other = (draw(jax.random.key(i)) for i in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    # The last sum is norm + dropout(1), where a norm's mean is about 0.
    share = (np.asarray(first) - np.asarray(plain) + 1.0).mean()
    assert 0.97 < share < 1.03, share

    paths = module.clone(hidden_dropout=0.0, drop_path=0.5, mlp_activations=("relu",))
    rows = jnp.ones((400, 2, width)) * jnp.arange(width)
    variables = paths.init(jax.random.key(0), rows[:1], deterministic=True)
    out = np.asarray(jax.jit(lambda key: paths.apply(variables, rows, rngs={"dropout": key}))(
        jax.random.key(5)
    ))  # fmt: skip
    kept = out - np.asarray(paths.apply(variables, rows[:1], deterministic=True)) + 1.0
    # Each sample's branch is 0 or 2, whole.
    assert np.allclose(kept, kept[:, :1, :1], atol=1e-3)
    share = (kept[:, 0, 0] > 1).mean()
    assert 0.4 < share < 0.6, share
