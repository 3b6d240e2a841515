"""Ways to compute attention: PyTorch's fused kernels, or GEMMs around scaled_softmax."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...ops.scaled_softmax import scaled_softmax
from .alibi import Alibi
from .blocks import attend_in_blocks
from .candidates import Options, Path
from .kernels import Call, Extra, attend_by_kernel
from .masks import Visibility, band
from .places import padding_behind, without_padding
from .sinks import weights_beside_sink

_aten = torch.ops.aten


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    path: Path,
    seen: Visibility,
    options: Options,
    alibi: Alibi | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``softmax(scale * q k^T + bias) v`` [b, h, sq, dv]; 0 for queries that see no key.

    With ``alibi``, ``bias`` has ALiBi's slopes, float32 [h] or [b, h]. With ``options.has_sink``,
    ``sink`` is float32 [h]; None is 0.
    """
    if path.rest is not None:
        return _CHANGED[path.name](q, k, v, path.rest, seen, bias, options, alibi, sink)
    if alibi is not None:
        assert bias is not None
        bias = alibi.bias(bias, q, k)
    if path.name == "sdpa_efficient" and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if path.name == "blocks":
        hidden = seen.hidden
        if seen.causal is not None or seen.window is not None:
            hidden = _all_hidden(seen, q.shape[2], k.shape[2], q.device)
        out = attend_in_blocks(q, k, v, bias, sink, hidden, options.scale, options.has_sink)
    elif path.name == "softmax":
        out = _softmax(q, k, v, seen, bias, options, sink)
    elif options.has_sink or path.name == "flash":
        out = _by_kernel(q, k, v, path, seen, bias, options, sink)
    elif q.is_cuda and path.kernel in ("cudnn", "flash"):
        out = _direct(q, k, v, path, seen, options)
    elif path.name == "sdpa_efficient":
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            out = _sdpa(q, k, v, seen, bias, options)
    elif q.is_cuda and path.kernel == "efficient":
        # By itself torch may take cuDNN's kernel, whose gradients are wrong with some masks.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = _sdpa(q, k, v, seen, bias, options)
    else:
        out = _sdpa(q, k, v, seen, bias, options)
    if seen.fully_masked_queries is not None:
        out = out.masked_fill(seen.fully_masked_queries, 0.0)
    return out


def to_visible(hidden: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the ``attn_mask`` of scaled_dot_product_attention: bool, True = visible, or a bias.

    The bias is -inf where ``hidden`` is True. Returns None if both arguments are None.
    """
    if hidden is None:
        return bias
    if bias is None:
        return hidden.logical_not()
    return bias.masked_fill(hidden, -torch.inf)


def _mask(
    q: torch.Tensor, k: torch.Tensor, seen: Visibility, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, bool]:
    """Returns ``attn_mask`` and ``is_causal`` of scaled_dot_product_attention."""
    hidden, causal = seen.hidden, seen.causal is not None
    if seen.window is not None or (
        causal and (hidden is not None or bias is not None or seen.causal == "bottom_right")
    ):
        hidden, causal = _all_hidden(seen, q.shape[2], k.shape[2], q.device), False
    return to_visible(hidden, bias), causal


def _by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    path: Path,
    seen: Visibility,
    bias: torch.Tensor | None,
    options: Options,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends by the path's kernel of ``KERNELS``; see ``attend``."""
    assert path.kernel is not None
    if path.name == "flash":
        window = (-1, 0) if seen.window is None else seen.window
        mask, call = None, Call(options.scale, dropout=options.dropout, window=window)
    else:
        mask, causal = _mask(q, k, seen, bias)
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        call = Call(options.scale, causal, options.dropout)
    return attend_by_kernel(q, k, v, path.kernel, Extra(mask), call, options.has_sink, sink)


def _direct(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, path: Path, seen: Visibility,
    options: Options,
) -> torch.Tensor:  # fmt: skip
    """Attends by the kernel that scaled_dot_product_attention would call if told to.

    Telling it takes longer than the call, and sets switches of the whole process.
    """
    causal, size = seen.causal is not None, v.shape[3]
    if path.kernel == "cudnn":
        found = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, torch.is_grad_enabled(), options.dropout, causal, scale=options.scale
        )
    else:
        if size % 8:
            q, k, v = _widest(q, k, v)
        found = _aten._scaled_dot_product_flash_attention(
            q, k, v, options.dropout, causal, scale=options.scale
        )
    out: torch.Tensor = found[0]
    return out[..., :size] if size % 8 else out


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Visibility,
    bias: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """Attends by PyTorch's scaled_dot_product_attention; see ``attend``."""
    mask, causal = _mask(q, k, seen, bias)
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=causal,
        scale=options.scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),  # torch.jit.trace gives a tensor
    )


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    path: Path,
    starts: tuple[torch.Tensor, torch.Tensor],
    call: Call,
    has_sink: bool,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends within packed sequences [t, h, d] by the flash kernel; 0 for tokens of none."""
    size = v.shape[2]
    if path.name == "widened":
        q, k, v = _widest(q, k, v)
    q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))  # one batch of all tokens
    extra = Extra(None, starts[0], None if starts[1] is starts[0] else starts[1])
    out = attend_by_kernel(q, k, v, "flash", extra, call, has_sink, sink)
    return out.transpose(1, 2)[0, ..., :size]


def _widest(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns tensors with heads of one size, a multiple of 8, with zeros behind."""
    size = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [functional.pad(x, (0, size - x.shape[-1])) for x in tensors]


def _widened(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, path: Path, seen: Visibility,
    bias: torch.Tensor | None, options: Options, alibi: Alibi | None, sink: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attends with heads of one size: zeros change neither scores nor values."""
    size = v.shape[3]
    q, k, v = _widest(q, k, v)
    return attend(q, k, v, bias, path, seen, options, alibi, sink)[..., :size]


def _expanded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, path: Path, seen: Visibility,
    bias: torch.Tensor | None, options: Options, alibi: Alibi | None, sink: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attends with keys and values repeated for each head of the queries."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return attend(q, k, v, bias, path, seen, options, alibi, sink)


def _memory(x: torch.Tensor) -> tuple[bool, tuple[int, ...]]:
    """Returns if tokens of x [b, h, s, d] are [s, b] in memory, and that order of dimensions."""
    sequence_first = x.stride(0) < x.stride(2)
    return sequence_first, (2, 0, 1, 3) if sequence_first else (0, 2, 1, 3)


def _from_memory(x: torch.Tensor, sequence_first: bool) -> torch.Tensor:
    return x.permute((1, 2, 0, 3) if sequence_first else (0, 2, 1, 3))


def _move(
    padded: torch.Tensor, *tensors: torch.Tensor, back: bool = False
) -> tuple[torch.Tensor, ...]:
    """Returns tokens of tensors [b, h, s, d] with padded ones behind the others, or moved back."""
    batch, _, tokens, _ = tensors[0].shape
    sequence_first, order = _memory(tensors[0])
    places = padding_behind(padded, batch, sequence_first)
    to = places.open if back else places.close
    found = to(*[x.permute(order).flatten(0, 1) for x in tensors])
    apart = (tokens, batch) if sequence_first else (batch, tokens)
    return tuple(_from_memory(x.unflatten(0, apart), sequence_first) for x in found)


def _moved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, path: Path, seen: Visibility,
    bias: torch.Tensor | None, options: Options, alibi: Alibi | None, sink: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attends causally to tokens that are not padded, which come first; 0 for the others."""
    assert seen.padded is not None
    q, k, v = _move(seen.padded, q, k, v)
    out = attend(q, k, v, None, path, Visibility("upper_left"), options, sink=sink)
    return _move(seen.padded, out, back=True)[0]


def _moved_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, path: Path, seen: Visibility,
    bias: torch.Tensor | None, options: Options, alibi: Alibi | None, sink: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attends to keys that are not padded, which come first."""
    hidden = seen.hidden
    assert hidden is not None
    k, v = _move(hidden, k, v)
    seen = seen._replace(hidden=hidden.sort(-1).values, padded=None)
    return attend(q, k, v, None, path, seen, options, sink=sink)


def _without_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, path: Path, seen: Visibility,
    bias: torch.Tensor | None, options: Options, alibi: Alibi | None, sink: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attends within sequences packed on the device; 0 for padded queries."""
    assert seen.packed is not None
    assert seen.window is not None
    batch, heads, queries, _ = q.shape
    sequence_first, order = _memory(q)
    places, starts = without_padding(seen.packed[0], batch, sequence_first)
    key_places, key_starts = places, starts
    if seen.packed[1] is not seen.packed[0]:
        key_places, key_starts = without_padding(seen.packed[1], batch, sequence_first)
    call = Call(
        options.scale, dropout=options.dropout, window=seen.window, longest=(queries, k.shape[2])
    )
    q, k, v = (x.permute(order).flatten(0, 1) for x in (q, k, v))
    (q,), (k, v) = places.close(q), key_places.close(k, v)
    out = packed(q, k, v, path, (starts, key_starts), call, options.has_sink, sink)
    shape = (queries, batch) if sequence_first else (batch, queries)
    return _from_memory(places.open(out)[0].view(*shape, heads, -1), sequence_first)


def _with_columns(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, path: Path, seen: Visibility,
    bias: torch.Tensor | None, options: Options, alibi: Alibi | None, sink: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attends with ALiBi in columns of queries and keys."""
    assert alibi is not None
    assert bias is not None
    q, k = alibi.columns(bias, q, k, options.scale)
    return attend(q, k, v, None, path, seen, options)


_CHANGED = {
    "alibi": _with_columns,
    "moved": _moved,
    "moved keys": _moved_keys,
    "packed": _without_padding,
    "widened": _widened,
    "expanded": _expanded,
}


def _all_hidden(seen: Visibility, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Returns one mask [1 or b, 1 or h, queries, keys] of all that ``seen`` hides."""
    if seen.window is not None:
        return band(queries, keys, keys - queries, *seen.window, device)
    offset = keys - queries if seen.causal == "bottom_right" else 0
    later = band(queries, keys, offset, -1, 0, device)
    return later if seen.hidden is None else later | seen.hidden


def _softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Visibility,
    bias: torch.Tensor | None,
    options: Options,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends by two batched GEMMs around the fused scaled_softmax; see ``attend``."""
    batch, heads, queries, size = q.shape
    groups, keys = k.shape[1:3]
    hidden, causal = seen.hidden, seen.causal
    if options.has_sink and causal is not None:
        hidden, causal = _all_hidden(seen, queries, keys, q.device), None
    if seen.window is not None or (causal == "upper_left" and queries != keys):
        hidden, causal = _all_hidden(seen, queries, keys, q.device), None
    # The heads of a group are rows of one GEMM with the group's keys.
    shape = (batch * groups, heads // groups * queries, size)
    rows, columns = q.reshape(shape), k.reshape(batch * groups, keys, size).transpose(1, 2)
    scale = options.scale
    if bias is None and q.dtype is not torch.float16:
        scores = torch.bmm(rows, columns).view(batch, heads, queries, keys)
    else:
        # Scaled inside the GEMM, before its rounding, so that fp16 does not overflow.
        alpha, scale = scale / options.layer_scale, options.layer_scale
        scores = torch.baddbmm(q.new_empty(1, 1, 1), rows, columns, beta=0.0, alpha=alpha)
        scores = scores.view(batch, heads, queries, keys)
        if bias is not None:
            scores = torch.add(scores, bias, alpha=1.0 / scale)
    if options.has_sink:
        weights = weights_beside_sink(scores, scale, hidden, sink)
    else:
        weights = scaled_softmax(scores, scale, hidden, causal=causal)
    if options.dropout > 0.0:
        weights = functional.dropout(weights, options.dropout)
    weights = weights.view(*shape[:2], keys)
    out = torch.bmm(weights, v.reshape(batch * groups, keys, v.shape[3]))
    return out.view(batch, heads, queries, v.shape[3])
