"""Policies of ``jax.checkpoint`` and ``nn.remat`` that know FP8 products and casts.

JAX's own policies know its ``dot_general`` alone: ``dots_saveable`` recomputes FP8 products.
``te_gemms_saveable`` and the two that combine it have Transformer Engine's names.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import checkpoint_policies as _policies
from jax.ad_checkpoint import checkpoint_name

__all__ = [
    "FP8_CAST_NAME", "FP8_PRODUCT_NAME", "checkpoint_dots_and_te_gemms",
    "dots_and_te_gemms_with_no_batch_dims", "fp8_casts_saveable", "te_gemms_saveable",
]  # fmt: skip

FP8_PRODUCT_NAME = "apex_te_fp8_product"
"""Name by which policies such as ``save_only_these_names`` know results of FP8 products."""
FP8_CAST_NAME = "apex_te_fp8_cast"
"""Name of FP8 data of inputs and weights, of their scales and amax values."""

te_gemms_saveable = _policies.save_only_these_names(FP8_PRODUCT_NAME)
"""Saves results of FP8 products."""
fp8_casts_saveable = _policies.save_only_these_names(FP8_CAST_NAME)
"""Saves FP8 data of inputs and weights, a byte an element, instead of casting again."""
checkpoint_dots_and_te_gemms = _policies.save_from_both_policies(
    _policies.checkpoint_dots, te_gemms_saveable
)
"""Saves results of all products, as JAX's ``checkpoint_dots`` does without FP8."""
dots_and_te_gemms_with_no_batch_dims = _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable, te_gemms_saveable
)
"""Saves results of products without batch dimensions, as those of dense layers."""


def named(name: str, x: jax.Array | None) -> jax.Array | None:
    """Returns ``x`` under a name for policies.

    FP8 data are saved as bytes: of what is saved, JAX reduces the precision to that of its dtype,
    which makes NaN of E4M3 values above 240.
    """
    if x is None:
        return None
    if x.dtype.itemsize > 1:
        return checkpoint_name(x, name)
    saved = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint8), name)
    return jax.lax.bitcast_convert_type(saved, x.dtype)
