"""Flax's Transformer layer: PyTorch's numbers, state dicts and errors."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from arrays import to_jax  # noqa: E402
from flax_layers import (  # noqa: E402
    BATCH,
    DECODER,
    HIDDEN,
    TOKENS,
    assert_same_steps,
    flax_layer,
    make_step,
    torch_layer,
    variables_of,
)

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402

DELAYED = recipe.DelayedScaling(amax_history_len=4)


def test_an_encoder_layer_is_torchs():
    assert_same_steps(torch_layer(), flax_layer(), DELAYED, 3)


def test_a_decoder_layer_with_masks_is_torchs():
    padded = torch.zeros(BATCH, 1, 1, TOKENS - 4, dtype=torch.bool)
    padded[1, ..., -5:] = True
    queries = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    assert_same_steps(
        torch_layer(layer_type="decoder", num_gqa_groups=2, activation="swiglu"),
        flax_layer(layer_type=DECODER, num_gqa_groups=2, mlp_activations=("silu", "linear")),
        None,
        1,
        encoder=True,
        enc_dec_attn_mask=((queries, padded), to_jax(padded)),
    )


def test_state_dicts_go_to_torch_and_back():
    layer, module = torch_layer(layer_type="decoder"), flax_layer(layer_type=DECODER)
    x = to_jax(torch.randn(BATCH, TOKENS, HIDDEN))
    variables = variables_of(module, layer, DELAYED, x, x)
    _, (gradients, _) = make_step(module, DELAYED)(variables, x, x, x)
    variables = te.update_collections({"fp8_metas": gradients["fp8_metas"]}, variables)
    with te.fp8_autocast(True, DELAYED):
        saved = te.state.to_torch(variables, "layers.3.")
    other = torch_layer(layer_type="decoder")
    other.load_state_dict(
        {n.removeprefix("layers.3."): torch.from_numpy(v.copy()) for n, v in saved.items()}
    )
    again = te.state.from_torch(other.state_dict(), variables)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(variables), strict=True):
        assert np.array_equal(ours, theirs)
    fused = torch_layer(layer_type="decoder", fuse_qkv_params=True).state_dict()
    with pytest.raises(
        ValueError, match=r"key_value.key_\w+ must be separate \(fuse_qkv_params=False"
    ):
        te.state.from_torch(fused, variables)
    stacked = jax.tree.map(lambda x: x[None], variables)
    with pytest.raises(
        ValueError, match=r"must have \d dimension.* \(te.state.unstack_layers takes"
    ):
        te.state.to_torch(stacked)


def test_what_does_not_fit_is_refused():
    x, key = jnp.ones((2, 8, HIDDEN)), jax.random.key(0)

    def init(x=x, encoded=None, /, **options):
        call = {n: options.pop(n) for n in ("decode", "attention_mask") if n in options}
        flax_layer(**options).init(key, x, encoded, deterministic=True, **call)

    with pytest.raises(TypeError, match="layer_type must be a TransformerLayerType, got 'encoder'"):
        init(layer_type="encoder")
    with pytest.raises(ValueError, match="num_attention_heads must divide hidden_size=33, got 4"):
        te_flax.TransformerLayer(33, 8, 4).init(key, x)
    with pytest.raises(ValueError, match=r"inputs must have shape \[b, s, embed\], got \[8, 32\]"):
        init(x[0])
    with pytest.raises(ValueError, match="encoded must be given to a decoder, got None"):
        init(layer_type=DECODER)
    with pytest.raises(ValueError, match="encoder_decoder_mask must be None and decode False"):
        init(decode=True)
    with pytest.raises(ValueError, match=r"drop_path must be from 0 to 1, got 1\.5"):
        init(drop_path=1.5)
    with pytest.raises(ValueError, match="mask must be given with attn_mask_type 'padding'"):
        init(self_attn_mask_type="padding")
    with pytest.raises(ValueError, match="low_rank_adaptation_scope must be one of none, all"):
        init(low_rank_adaptation_scope="most")
    with pytest.raises(ValueError, match="num_gqa_groups must divide num_attention_heads=4, got 3"):
        init(num_gqa_groups=3)
    with pytest.raises(TypeError):
        te_flax.TransformerLayer(colour="red")
