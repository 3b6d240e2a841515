"""Attention as a function: softmax(query key^T) value for each head, by cuDNN where it can."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .ops import _checks

__all__ = [
    "BIAS_TYPES", "IMPLEMENTATIONS", "MASK_TYPES", "SOFTMAX_TYPES", "dot_product_attention",
]  # fmt: skip

_NAME = "dot_product_attention"
# By name: is causal, reads a mask.
MASK_TYPES = {
    "no_mask": (False, False),
    "padding": (False, True),
    "causal": (True, False),
    "padding_causal": (True, True),
    "causal_padding": (True, True),
}
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias")
SOFTMAX_TYPES = ("vanilla", "off_by_one", "learnable")
IMPLEMENTATIONS = (None, "xla", "cudnn")
# Whether a mask is causal, and a query's window.
_Kind = tuple[bool, tuple[int, int] | None]
# Finite, so that a row without visible keys has no NaN in its gradient.
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    attn_mask_type: str = "causal",
    attn_bias_type: str | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    float32_logits: bool = False,
    query_start: int | jax.Array = 0,
    softmax_type: str = "vanilla",
    softmax_offset: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes softmax(scale * query key^T + bias) value for each head; differentiable.

    The result of a query that sees no key is zero, and so are its gradients. Further options are
    those of ``apex_te.jax.flax.DotProductAttention``.

    Args:
        query: [b, sq, h, d] float32, float16 or bfloat16.
        key, value: [b, sk, g, d] and [b, sk, g, dv] in query's dtype; g divides h.
        mask: bool or integer, True = masked out, 4 dimensions that broadcast to [b, h, sq, sk];
            required with the padding types, ignored with the others.
        bias: added to the scores, 4 dimensions that broadcast to [b, h, sq, sk].
        attn_bias_type: None means "post_scale_bias" with a bias, else "no_bias".
        scale: multiplier of the scores; None means 1 / sqrt(d).
        dropout_key: random key of the dropout; required with ``dropout_rate`` > 0.
        float32_logits: multiply queries and keys in float32; scores are float32 either way.
        query_start: position of the first query, for calls with a cache of keys.
        softmax_type: "vanilla", or with a sink ``a``, a logit of each head beside the scores ``s``:
            weights are exp(s) / (exp(a) + sum(exp(s))). ``a`` is 0 with "off_by_one", and
            ``softmax_offset`` with "learnable". Not supported by cuDNN.
        softmax_offset: float32 [1, h, 1, 1]; required with "learnable".
        implementation: "cudnn", "xla" or None. None uses cuDNN's fused kernels if JAX runs on a GPU
            and ``jax.nn.dot_product_attention`` has one for these arguments, else "xla".

    Returns:
        [b, sq, h, dv] in query's dtype.
    """
    shape = checked_shapes(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    kind = checked_kind(attn_mask_type, window_size)
    mask = _checked_mask(attn_mask_type, mask, shape)
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(
            f"{_NAME}: dropout_rate must be at least 0 and below 1, got {dropout_rate}"
        )
    if dropout_rate > 0.0 and dropout_key is None:
        raise ValueError(f"{_NAME}: dropout_key must be given with dropout_rate > 0, got None")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f'{_NAME}: implementation must be None, "xla" or "cudnn", got {implementation!r}'
        )
    sink = _checked_sink(softmax_type, softmax_offset, shape[1])
    bias = _checked_bias(attn_bias_type, bias, shape)
    if bias is not None and attn_bias_type == "pre_scale_bias":
        bias = bias * scale
    is_static = isinstance(query_start, int)
    fused = functools.partial(_fused, scale=scale, kind=kind, query_start=query_start)
    if implementation == "cudnn" or (
        implementation is None
        and is_static
        and dropout_rate == 0.0
        and not float32_logits
        and sink is None
        and _cudnn_takes(fused, query, key, value, mask, bias)
    ):
        if dropout_rate > 0.0 or not is_static or sink is not None:
            raise ValueError(
                f'{_NAME}: implementation must be "xla" with dropout_rate, a softmax_type other'
                ' than "vanilla" or a query_start that is an array, got "cudnn"'
            )
        return fused(query, key, value, mask, bias)
    visible = _visible(mask, kind, shape[2], shape[3], query_start)
    if float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    return _plain(query, key, value, visible, bias, scale, dropout_rate, dropout_key, sink)


def _checked_sink(softmax_type: str, offset: Any, heads: int) -> jax.Array | float | None:
    """Returns the logit of each head beside its scores, None without."""
    kind = softmax_type.replace("-", "_") if isinstance(softmax_type, str) else softmax_type
    if kind not in SOFTMAX_TYPES:
        raise ValueError(
            f"{_NAME}: softmax_type must be one of {', '.join(SOFTMAX_TYPES)}, got {softmax_type!r}"
        )
    if (offset is None) == (kind == "learnable"):
        wanted, got = ("an array", "None") if offset is None else ("None", "an array")
        raise ValueError(
            f"{_NAME}: softmax_offset must be {wanted} with softmax_type {kind!r}, got {got}"
        )
    if offset is None:
        return 0.0 if kind == "off_by_one" else None
    return _checks.has_dtype(_NAME, "softmax_offset", offset, ["float32"], (1, heads, 1, 1))


def checked_shapes(query: Any, key: Any, value: Any) -> tuple[int, int, int, int]:
    """Checks dtypes and shapes of queries, keys and values; returns [b, h, sq, sk]."""
    query = _checks.has_dtype(_NAME, "query", query, _checks.FLOATS)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if _checks.has_dtype(_NAME, name, x, [query.dtype.name]).ndim != 4:
            raise ValueError(
                f"{_NAME}: {name} must have 4 dimensions [b, s, heads, size], got {list(x.shape)}"
            )
    b, sq, h, d = query.shape
    sk, g = key.shape[1:3]
    _checks.has_shape(_NAME, "key", key, (b, sk, g, d))
    _checks.has_shape(_NAME, "value", value, (b, sk, g, value.shape[3]))
    if g == 0 or h % g:
        raise ValueError(f"{_NAME}: key must have heads that divide query's {h}, got {g}")
    return b, h, sq, sk


def checked_kind(mask_type: str, window_size: Any, owner: str = _NAME) -> _Kind:
    """Returns whether a mask type is causal, and the window, (-1, 0) or narrower if it is."""
    if mask_type not in MASK_TYPES:
        raise ValueError(
            f"{owner}: attn_mask_type must be one of {', '.join(MASK_TYPES)}, got {mask_type!r}"
        )
    if window_size is None:
        return MASK_TYPES[mask_type][0], None
    window = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(window) != 2 or not all(isinstance(n, int) and n >= -1 for n in window):
        raise ValueError(
            f"{_NAME}: window_size must be None or two numbers of at least -1, got {window_size!r}"
        )
    return MASK_TYPES[mask_type][0], None if window == (-1, -1) else window


def _checked_mask(mask_type: str, mask: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the mask as bool, None for types that read none."""
    if not MASK_TYPES[mask_type][1]:
        return None
    if mask is None:
        raise ValueError(f"{_NAME}: mask must be given with attn_mask_type {mask_type!r}, got None")
    found = _checks.array(_NAME, "mask", mask)
    if not (found.dtype == bool or jnp.issubdtype(found.dtype, jnp.integer)):
        raise TypeError(f"{_NAME}: mask must have a bool or integer dtype, got {found.dtype.name}")
    return _broadcasts("mask", found, shape).astype(bool)


def _checked_bias(bias_type: str | None, bias: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the bias; the type must say whether there is one."""
    if bias_type is not None and bias_type not in BIAS_TYPES:
        raise ValueError(
            f"{_NAME}: attn_bias_type must be None or one of {', '.join(BIAS_TYPES)}, got"
            f" {bias_type!r}"
        )
    if bias_type is not None and (bias is None) != (bias_type == "no_bias"):
        wanted = "None" if bias_type == "no_bias" else "an array"
        got = "None" if bias is None else "an array"
        raise ValueError(
            f"{_NAME}: bias must be {wanted} with attn_bias_type {bias_type!r}, got {got}"
        )
    if bias is None:
        return None
    return _broadcasts("bias", _checks.has_dtype(_NAME, "bias", bias, _checks.FLOATS), shape)


def _broadcasts(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns ``x``, whose four extents must be 1 or those of the scores."""
    if x.ndim != 4 or any(n not in (1, whole) for n, whole in zip(x.shape, shape, strict=True)):
        raise ValueError(
            f"{_NAME}: {name} must broadcast to {list(shape)} from 4 dimensions, got"
            f" {list(x.shape)}"
        )
    return x


def _visible(
    mask: jax.Array | None, kind: _Kind, sq: int, sk: int, query_start: int | jax.Array
) -> jax.Array | None:
    """Returns which scores count, bool, broadcast to [b, h, sq, sk]; None: all."""
    found = None if mask is None else ~mask
    is_causal, window = kind
    if not is_causal and window is None:
        return found
    distance = (query_start + jnp.arange(sq))[:, None] - jnp.arange(sk)
    left, right = window or (-1, -1)
    near = jnp.ones((sq, sk), bool)
    if left >= 0:
        near &= distance <= left
    if is_causal or right >= 0:
        near &= distance >= (0 if is_causal else -right)
    return near[None, None] if found is None else near & found


def _plain(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array | None,
    bias: jax.Array | None,
    scale: float,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    sink: jax.Array | float | None,
) -> jax.Array:
    """Attends by two GEMMs around a softmax in float32."""
    b, sq, h, d = query.shape
    g = key.shape[2]
    grouped = query.reshape(b, sq, g, h // g, d)
    logits = jnp.einsum(
        "bqgrd,bkgd->bgrqk", grouped, key, preferred_element_type=jnp.float32
    ).reshape(b, h, sq, key.shape[1])
    logits = logits * scale
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if visible is not None:
        logits = jnp.where(visible, logits, _HIDDEN)
    # A softmax without a division, which XLA rounds differently from program to program.
    top = logits.max(-1, keepdims=True, initial=-jnp.inf)
    if sink is not None:
        top = jnp.maximum(top, sink)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    weights = weights * (1.0 / (total if sink is None else total + jnp.exp(sink - top)))
    if visible is not None:
        # Of rows without visible keys, too, whose softmax is not 0.
        weights = jnp.where(visible, weights, 0.0)
    weights = weights.astype(value.dtype)
    if dropout_rate > 0.0:
        assert dropout_key is not None
        kept = jax.random.bernoulli(dropout_key, 1.0 - dropout_rate, weights.shape)
        weights = jnp.where(kept, weights / (1.0 - dropout_rate), 0).astype(value.dtype)
    weights = weights.reshape(b, g, h // g, sq, key.shape[1])
    return jnp.einsum("bgrqk,bkgd->bqgrd", weights, value).reshape(b, sq, h, value.shape[3])


def _fused(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    *,
    scale: float,
    kind: _Kind,
    query_start: int,
) -> jax.Array:
    """Attends by cuDNN's fused kernels, which hide scores by a finite bias."""
    sq, sk = query.shape[1], key.shape[1]
    is_causal, window = kind
    if query_start and (is_causal or window is not None):
        # cuDNN's causal masks and windows begin at the first key.
        visible = _visible(mask, kind, sq, sk, query_start)
        assert visible is not None
        mask, is_causal, window = ~visible, False, None
    local = None
    if window is not None:
        left, right = (sk if n < 0 else n for n in window)
        local = (left, 0 if is_causal else right)
    shown = None if mask is None else ~jnp.broadcast_to(mask, (*mask.shape[:2], sq, sk))
    out = jax.nn.dot_product_attention(
        query, key, value, None if bias is None else bias.astype(query.dtype), shown, scale=scale,
        is_causal=is_causal, local_window_size=local, implementation="cudnn",
    )  # fmt: skip
    visible = _visible(mask, (is_causal, window), sq, sk, 0)
    if mask is None and not (window is not None and sq > sk):
        return out
    assert visible is not None
    any_visible = jnp.broadcast_to(visible.any(-1), (visible.shape[0], visible.shape[1], sq))
    return jnp.where(any_visible.transpose(0, 2, 1)[..., None], out, 0)


def _default_platform() -> str:
    """Returns the platform of the device that JAX computes on unless told otherwise."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _cudnn_takes(fused: Any, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> bool:
    """Returns True if cuDNN has kernels for both directions of these arguments."""
    if _default_platform() not in ("gpu", "cuda") or query.dtype == jnp.float32:
        return False
    # Of other biases cuDNN gives no gradient, and a mask makes a bias per sample of them.
    whole = (1, query.shape[2], query.shape[1], key.shape[1])
    if bias is not None and (mask is not None or bias.shape != whole):
        return False

    def both(*args: Any) -> Any:
        return jax.vjp(lambda q, k, v: fused(q, k, v, *args[3:]), *args[:3])[1](args[0])

    given = [
        None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in (query, key, value, mask, bias)
    ]
    try:
        jax.eval_shape(both, *given)
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True
