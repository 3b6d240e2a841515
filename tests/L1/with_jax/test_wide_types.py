"""Layers of every recipe in a process with 64-bit types enabled."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax.linen")

WIDE = """
import jax
import jax.numpy as jnp
import numpy as np
import sys

import apex_te.jax as te
import apex_te.jax.flax as te_flax
from apex_te import recipe

x = np.random.default_rng(0).standard_normal((2, 8, 32)).astype(np.float32)
layers = {
    "dense": te_flax.DenseGeneral(16),
    "norm": te_flax.LayerNormDenseGeneral((2, 16), use_bias=True, zero_centered_gamma=True),
    "mlp": te_flax.LayerNormMLP(16, activations=("gelu", "linear"), use_bias=True),
    "layer": te_flax.TransformerLayer(
        32, 16, 4, num_gqa_groups=2, enable_rotary_pos_emb=True, self_attn_mask_type="causal",
        rotary_pos_emb_group_method="alternate", use_bias=True,
    ),
}
recipes = [None, recipe.DelayedScaling(amax_history_len=2),
           recipe.DelayedScaling(amax_history_len=2, first_step="current"),
           recipe.CurrentScaling(), recipe.BlockScaling(), recipe.MXFP8Scaling(),
           recipe.CurrentScaling(fp8_format=recipe.Format.HIF8)]
saved = {}
for name, module in layers.items():
    for number, chosen in enumerate(recipes[:4] if name == "layer" else recipes):
        options = {"deterministic": True} if name == "layer" else {}

        @jax.jit
        def run(x, seed):
            key = jax.random.key(seed)
            with te.fp8_autocast(chosen is not None, chosen):
                variables = module.init(key, x, **options)

                def loss(variables, x):
                    y = module.apply(variables, x, **options)
                    return ((y[0] if isinstance(y, tuple) else y) ** 2).sum()

                value, grads = jax.value_and_grad(loss, (0, 1))(variables, x)
                return value, grads, te.update_fp8_metas(grads[0])

        for n, leaf in enumerate(jax.tree.leaves(run(x, 0))):
            assert leaf.dtype == jnp.float32, (name, chosen, leaf.dtype)
            saved[f"{name} {number} {n}"] = np.asarray(leaf)
np.savez(sys.argv[1], **saved)
"""


def test_layers_with_64_bit_types_have_the_numbers_of_those_without(tmp_path):
    """Every layer and recipe, forward, backward and state, in a process with ``jax_enable_x64``."""
    found = []
    root = Path(__file__).resolve().parents[3]
    for flag in ("0", "1"):
        path = tmp_path / f"{flag}.npz"
        env = {**os.environ, "JAX_ENABLE_X64": flag, "JAX_PLATFORMS": "cpu"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
        subprocess.run([sys.executable, "-c", WIDE, str(path)], check=True, env=env, timeout=1200)
        found.append(dict(np.load(path)))
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[0].items():
        assert np.array_equal(found[1][name], wanted), name
