"""apex's fast_multihead_attn: attention layers with projections, computed by PyTorch's matmuls.

Tensors are [tokens, seqs, embed] of float32, float16 or bfloat16. Rows of a projection's weight
are ordered head, (q, k, v), channel; ``encdec`` has one weight for q and one for k and v. A mask is
[seqs, keys], or [queries, keys] with ``use_time_mask``; nonzero hides a key, and it is read only
with ``use_mask``. A query that sees no key gets zeros. What a forward returns before its output is
for its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from apex_te._version import __version__ as __version__
from apex_te.ops.layer_norm import layer_norm_bwd, layer_norm_fwd
from apex_te.ops.scaled_softmax import scaled_softmax_bwd, scaled_softmax_fwd

__all__ = [
    "additive_mask_softmax_dropout_backward",
    "additive_mask_softmax_dropout_forward",
    "encdec_multihead_attn_backward",
    "encdec_multihead_attn_forward",
    "encdec_multihead_attn_norm_add_backward",
    "encdec_multihead_attn_norm_add_forward",
    "mask_softmax_dropout_backward",
    "mask_softmax_dropout_forward",
    "self_attn_backward",
    "self_attn_bias_additive_mask_backward",
    "self_attn_bias_additive_mask_forward",
    "self_attn_bias_backward",
    "self_attn_bias_forward",
    "self_attn_forward",
    "self_attn_norm_add_backward",
    "self_attn_norm_add_forward",
]

Tensor = torch.Tensor
_EPS = 1e-5


def self_attn_forward(
    use_mask: bool,
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> list[Tensor]:
    """Returns [projected input, softmax, dropped softmax, dropout mask, context, output]."""
    mask = _Mask("self_attn_forward", pad_mask if use_mask else None, use_time_mask)
    source = (inputs, input_weights, None)
    return _forward(mask, is_training, heads, [source], output_weights, None, dropout_prob)


def self_attn_bias_forward(
    use_mask: bool,
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    input_biases: Tensor,
    output_biases: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> list[Tensor]:
    """Computes ``self_attn_forward`` with biases of both projections."""
    mask = _Mask("self_attn_bias_forward", pad_mask if use_mask else None, use_time_mask)
    source = (inputs, input_weights, input_biases)
    return _forward(mask, is_training, heads, [source], output_weights, output_biases, dropout_prob)


def self_attn_bias_additive_mask_forward(
    use_mask: bool,
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    input_biases: Tensor,
    output_biases: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> list[Tensor]:
    """Computes ``self_attn_bias_forward`` with a mask [seqs, keys] that is added to the scores.

    Raises:
        ValueError: ``use_time_mask`` is set.
    """
    op = "self_attn_bias_additive_mask_forward"
    if use_time_mask:
        raise ValueError(f"{op}: use_time_mask must be False, got {use_time_mask!r}")
    mask = _Mask(op, pad_mask if use_mask else None, additive=True)
    source = (inputs, input_weights, input_biases)
    return _forward(mask, is_training, heads, [source], output_weights, output_biases, dropout_prob)


def self_attn_norm_add_forward(
    use_mask: bool,
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs: Tensor,
    lyr_nrm_gamma_weights: Tensor,
    lyr_nrm_beta_weights: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> list[Tensor]:
    """Computes inputs + dropout(attention(layer norm of inputs)).

    Returns:
        [normalised input, mean, invvar, projected input, softmax, dropped softmax, dropout mask,
        context, mask of the last dropout, output].
    """
    mask = _Mask("self_attn_norm_add_forward", pad_mask if use_mask else None, use_time_mask)
    norm = _norm(inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights)
    source = (norm[0], input_weights, None)
    saved = _forward(mask, is_training, heads, [source], output_weights, None, dropout_prob)
    return [*norm, *_add(saved, inputs, is_training, dropout_prob)]


def encdec_multihead_attn_forward(
    use_mask: bool,
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs_q: Tensor,
    inputs_kv: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> list[Tensor]:
    """Computes attention of ``inputs_q`` to ``inputs_kv``.

    Returns:
        [projected q, projected k and v, softmax, dropped softmax, dropout mask, context, output].
    """
    op = "encdec_multihead_attn_forward"
    mask = _Mask(op, pad_mask if use_mask else None, use_time_mask)
    sources = [(inputs_q, input_weights_q, None), (inputs_kv, input_weights_kv, None)]
    return _forward(mask, is_training, heads, sources, output_weights, None, dropout_prob)


def encdec_multihead_attn_norm_add_forward(
    use_mask: bool,
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs_q: Tensor,
    inputs_kv: Tensor,
    lyr_nrm_gamma_weights: Tensor,
    lyr_nrm_beta_weights: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> list[Tensor]:
    """Computes inputs_q + dropout(attention of the layer norm of inputs_q to inputs_kv).

    Returns:
        [normalised q, mean, invvar, projected q, projected k and v, softmax, dropped softmax,
        dropout mask, context, mask of the last dropout, output].
    """
    op = "encdec_multihead_attn_norm_add_forward"
    mask = _Mask(op, pad_mask if use_mask else None, use_time_mask)
    norm = _norm(inputs_q, lyr_nrm_gamma_weights, lyr_nrm_beta_weights)
    sources = [(norm[0], input_weights_q, None), (inputs_kv, input_weights_kv, None)]
    saved = _forward(mask, is_training, heads, sources, output_weights, None, dropout_prob)
    return [*norm, *_add(saved, inputs_q, is_training, dropout_prob)]


def self_attn_backward(
    heads: int,
    output_grads: Tensor,
    matmul2_results: Tensor,
    dropout_results: Tensor,
    softmax_results: Tensor,
    input_lin_results: Tensor,
    inputs: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    dropout_mask: Tensor,
    dropout_prob: float,
) -> list[Tensor]:
    """Returns the gradients of inputs, input_weights and output_weights."""
    (dx,), (dw,), dw_out = _backward(
        heads, output_grads, matmul2_results, dropout_results, softmax_results,
        [input_lin_results], [(inputs, input_weights)], output_weights, dropout_mask, dropout_prob,
    )[:3]  # fmt: skip
    return [dx, dw, dw_out]


def self_attn_bias_backward(
    heads: int,
    output_grads: Tensor,
    matmul2_results: Tensor,
    dropout_results: Tensor,
    softmax_results: Tensor,
    input_lin_results: Tensor,
    inputs: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    dropout_mask: Tensor,
    dropout_prob: float,
) -> list[Tensor]:
    """Returns the gradients of inputs, both weights, input_biases and output_biases."""
    (dx,), (dw,), dw_out, (dlin,) = _backward(
        heads, output_grads, matmul2_results, dropout_results, softmax_results,
        [input_lin_results], [(inputs, input_weights)], output_weights, dropout_mask, dropout_prob,
    )  # fmt: skip
    return [dx, dw, dw_out, dlin.sum((0, 1)), output_grads.sum((0, 1))]


def self_attn_bias_additive_mask_backward(
    heads: int,
    output_grads: Tensor,
    matmul2_results: Tensor,
    dropout_results: Tensor,
    bmm1_results: Tensor,
    pad_mask: Tensor,
    input_lin_results: Tensor,
    inputs: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    dropout_mask: Tensor,
    dropout_prob: float,
) -> list[Tensor]:
    """Computes ``self_attn_bias_backward``.

    ``bmm1_results`` is the forward's second result, here the softmax; ``pad_mask`` is not read.
    """
    return self_attn_bias_backward(
        heads, output_grads, matmul2_results, dropout_results, bmm1_results, input_lin_results,
        inputs, input_weights, output_weights, dropout_mask, dropout_prob,
    )  # fmt: skip


def self_attn_norm_add_backward(
    heads: int,
    output_grads: Tensor,
    matmul2_results: Tensor,
    dropout_results: Tensor,
    softmax_results: Tensor,
    input_lin_results: Tensor,
    lyr_nrm_results: Tensor,
    lyr_nrm_mean: Tensor,
    lyr_nrm_invvar: Tensor,
    inputs: Tensor,
    lyr_nrm_gamma_weights: Tensor,
    lyr_nrm_beta_weights: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    dropout_mask: Tensor,
    dropout_add_mask: Tensor,
    dropout_prob: float,
) -> list[Tensor]:
    """Returns the gradients of inputs, gamma, beta, input_weights and output_weights."""
    (dnorm,), (dw,), dw_out, _ = _backward(
        heads, _kept(output_grads, dropout_add_mask, dropout_prob), matmul2_results,
        dropout_results, softmax_results, [input_lin_results],
        [(lyr_nrm_results, input_weights)], output_weights, dropout_mask, dropout_prob,
    )  # fmt: skip
    norm = (lyr_nrm_mean, lyr_nrm_invvar)
    return [*_norm_backward(output_grads, dnorm, inputs, lyr_nrm_gamma_weights, *norm), dw, dw_out]


def encdec_multihead_attn_backward(
    heads: int,
    output_grads: Tensor,
    matmul2_results: Tensor,
    dropout_results: Tensor,
    softmax_results: Tensor,
    input_lin_q_results: Tensor,
    input_lin_kv_results: Tensor,
    inputs_q: Tensor,
    inputs_kv: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    dropout_mask: Tensor,
    dropout_prob: float,
) -> list[Tensor]:
    """Returns the gradients of both inputs, both input weights and output_weights."""
    dxs, dws, dw_out, _ = _backward(
        heads, output_grads, matmul2_results, dropout_results, softmax_results,
        [input_lin_q_results, input_lin_kv_results],
        [(inputs_q, input_weights_q), (inputs_kv, input_weights_kv)],
        output_weights, dropout_mask, dropout_prob,
    )  # fmt: skip
    return [*dxs, *dws, dw_out]


def encdec_multihead_attn_norm_add_backward(
    heads: int,
    output_grads: Tensor,
    matmul2_results: Tensor,
    dropout_results: Tensor,
    softmax_results: Tensor,
    input_lin_q_results: Tensor,
    input_lin_kv_results: Tensor,
    lyr_nrm_results: Tensor,
    lyr_nrm_mean: Tensor,
    lyr_nrm_invvar: Tensor,
    inputs_q: Tensor,
    inputs_kv: Tensor,
    lyr_nrm_gamma_weights: Tensor,
    lyr_nrm_beta_weights: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    dropout_mask: Tensor,
    dropout_add_mask: Tensor,
    dropout_prob: float,
) -> list[Tensor]:
    """Returns the gradients of both inputs, gamma, beta, both input weights and output_weights."""
    (dnorm, dkv), dws, dw_out, _ = _backward(
        heads, _kept(output_grads, dropout_add_mask, dropout_prob), matmul2_results,
        dropout_results, softmax_results, [input_lin_q_results, input_lin_kv_results],
        [(lyr_nrm_results, input_weights_q), (inputs_kv, input_weights_kv)],
        output_weights, dropout_mask, dropout_prob,
    )  # fmt: skip
    norm = (lyr_nrm_mean, lyr_nrm_invvar)
    dx, *dparams = _norm_backward(output_grads, dnorm, inputs_q, lyr_nrm_gamma_weights, *norm)
    return [dx, dkv, *dparams, *dws, dw_out]


def mask_softmax_dropout_forward(
    use_mask: bool,
    is_training: bool,
    heads: int,
    inputs: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> list[Tensor]:
    """Computes dropout(softmax(scores)) of ``inputs`` [seqs * heads, queries, keys].

    Returns:
        [dropped softmax, dropout mask, softmax].
    """
    mask = _Mask("mask_softmax_dropout_forward", pad_mask if use_mask else None)
    return _masked_softmax_dropout(mask, is_training, heads, inputs, dropout_prob)


def mask_softmax_dropout_backward(
    use_mask: bool,
    heads: int,
    output_grads: Tensor,
    softmax_results: Tensor,
    dropout_mask: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> Tensor:
    """Returns the gradient of the scores; a hidden key's softmax is 0, so no mask is read."""
    dsoftmax = _kept(output_grads, dropout_mask, dropout_prob)
    return scaled_softmax_bwd(dsoftmax, softmax_results, 1.0)


def additive_mask_softmax_dropout_forward(
    use_mask: bool,
    is_training: bool,
    heads: int,
    inputs: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> list[Tensor]:
    """Computes ``mask_softmax_dropout_forward`` with a mask that is added to the scores."""
    op = "additive_mask_softmax_dropout_forward"
    mask = _Mask(op, pad_mask if use_mask else None, additive=True)
    return _masked_softmax_dropout(mask, is_training, heads, inputs, dropout_prob)


def additive_mask_softmax_dropout_backward(
    use_mask: bool,
    heads: int,
    output_grads: Tensor,
    softmax_results: Tensor,
    dropout_mask: Tensor,
    dropout_prob: float,
) -> Tensor:
    """Returns the gradient of the scores."""
    return mask_softmax_dropout_backward(
        use_mask, heads, output_grads, softmax_results, dropout_mask, None, dropout_prob
    )


class _Mask:
    """A function's mask; ``view`` checks it and shapes it for scores [seqs, heads, q, k]."""

    def __init__(
        self, op: str, mask: Tensor | None, over_time: bool = False, additive: bool = False
    ) -> None:
        self.op, self.mask, self.over_time, self.additive = op, mask, over_time, additive

    def view(self, scores: Tensor) -> Tensor | None:
        if self.mask is None:
            return None
        seqs, _, queries, keys = scores.shape
        wanted = (queries, keys) if self.over_time else (seqs, keys)
        if self.mask.shape != wanted:
            raise ValueError(
                f"{self.op}: pad_mask must have shape {list(wanted)}, got {list(self.mask.shape)}"
            )
        shaped = self.mask[None, None] if self.over_time else self.mask[:, None, None]
        return shaped.to(scores.dtype if self.additive else torch.bool)


def _check(
    op: str, heads: int, tensors: Sequence[tuple[str, Tensor, Sequence[int | None]]]
) -> None:
    """Checks dtypes against the first tensor's and shapes, in which None is any size."""
    dtype = tensors[0][1].dtype
    for name, tensor, wanted in tensors:
        if tensor.dtype is not dtype:
            raise TypeError(
                f"{op}: {name} must be {dtype} as {tensors[0][0]} is, got {tensor.dtype}"
            )
        sizes = zip(tensor.shape, wanted, strict=False)
        if tensor.dim() != len(wanted) or any(w not in (None, n) for n, w in sizes):
            shown = ["any" if w is None else w for w in wanted]
            raise ValueError(f"{op}: {name} must have shape {shown}, got {list(tensor.shape)}")
    embed = tensors[0][1].shape[-1]
    if heads < 1 or embed % heads:
        raise ValueError(f"{op}: heads must divide the {embed} channels, got {heads}")


@torch.no_grad()
def _forward(
    mask: _Mask,
    is_training: bool,
    heads: int,
    sources: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    w_out: Tensor,
    b_out: Tensor | None,
    p: float,
) -> list[Tensor]:
    """Returns projections of the sources (x, weight, bias) and all that attention makes of them."""
    heads, seqs = int(heads), sources[0][0].shape[1:2]
    embed = sources[0][0].shape[-1]
    parts = (3,) if len(sources) == 1 else (1, 2)
    named: list[tuple[str, Tensor, Sequence[int | None]]] = []
    for suffix, (x, weight, bias), n in zip(("_q", "_kv"), sources, parts, strict=False):
        suffix = suffix if len(sources) > 1 else ""
        named += [("inputs" + suffix, x, (None, *seqs, embed))]
        named += [("input_weights" + suffix, weight, (n * embed, embed))]
        named += [("input_biases", bias, (n * embed,))] if bias is not None else []
    named += [("output_weights", w_out, (embed, embed))]
    named += [("output_biases", b_out, (embed,))] if b_out is not None else []
    _check(mask.op, heads, named)
    lins = [linear(*source) for source in sources]
    q, k, v = _heads(lins, heads, embed)
    scores = q.new_empty(len(q) // heads, heads, q.shape[1], k.shape[1])
    hidden = mask.view(scores)
    beta = 0
    if mask.additive and hidden is not None:
        scores.copy_(hidden)
        hidden, beta = None, 1
    # Scale and sum belong to the matmul: float16 does not overflow, and rounds once.
    scores.flatten(0, 1).baddbmm_(q, k.mT, beta=beta, alpha=q.shape[-1] ** -0.5)
    dropped, dropout_mask, softmax = _softmax_dropout(is_training, scores, hidden, p)
    context = q.new_empty(*lins[0].shape[:2], embed)
    torch.bmm(dropped, v, out=_heads([context], heads, embed)[0])
    return [*lins, softmax, dropped, dropout_mask, context, linear(context, w_out, b_out)]


@torch.no_grad()
def _backward(
    heads: int,
    dout: Tensor,
    context: Tensor,
    dropped: Tensor,
    softmax: Tensor,
    lins: Sequence[Tensor],
    sources: Sequence[tuple[Tensor, Tensor]],
    w_out: Tensor,
    dropout_mask: Tensor,
    p: float,
) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor]]:
    """Returns the gradients of inputs, of input weights, of w_out, and of the projections."""
    heads, embed = int(heads), context.shape[-1]
    rows = dout.reshape(-1, embed)
    (dcontext,) = _heads([(rows @ w_out).view_as(context)], heads, embed)
    q, k, v = _heads(lins, heads, embed)
    dlins = [torch.empty_like(lin) for lin in lins]
    dq, dk, dv = _heads(dlins, heads, embed)
    torch.bmm(dropped.mT, dcontext, out=dv)
    dsoftmax = _kept(torch.bmm(dcontext, v.mT), dropout_mask, p)
    dscores = scaled_softmax_bwd(dsoftmax, softmax, 1.0, out=dsoftmax)
    scale = q.shape[-1] ** -0.5
    dq.baddbmm_(dscores, k, beta=0, alpha=scale)
    dk.baddbmm_(dscores.mT, q, beta=0, alpha=scale)
    dxs, dws = [], []
    for dlin, (x, weight) in zip(dlins, sources, strict=True):
        dlin_rows = dlin.view(-1, dlin.shape[-1])
        dxs.append((dlin_rows @ weight).view(x.shape))
        dws.append(dlin_rows.t() @ x.reshape(-1, embed))
    return dxs, dws, rows.t() @ context.view(-1, embed), dlins


def _heads(lins: Sequence[Tensor], heads: int, embed: int) -> list[Tensor]:
    """Returns a view [seqs * heads, tokens, channels] of each part of each projection's width."""
    views = []
    for lin in lins:
        tokens, seqs, width = lin.shape
        split = lin.view(tokens, seqs * heads, width // embed, embed // heads)
        views += [part.transpose(0, 1) for part in split.unbind(2)]
    return views


@torch.no_grad()
def _masked_softmax_dropout(
    mask: _Mask, is_training: bool, heads: int, scores: Tensor, p: float
) -> list[Tensor]:
    """Returns [dropped softmax, dropout mask, softmax] of scores [seqs * heads, q, k]."""
    heads = int(heads)
    if scores.dim() != 3 or heads < 1 or scores.shape[0] % heads:
        raise ValueError(
            f"{mask.op}: inputs must have shape [seqs * {heads}, queries, keys], "
            f"got {list(scores.shape)}"
        )
    by_head = scores.unflatten(0, (-1, heads))
    hidden = mask.view(by_head)
    if mask.additive and hidden is not None:
        by_head, hidden = by_head + hidden, None
    return _softmax_dropout(is_training, by_head, hidden, p)


def _softmax_dropout(
    is_training: bool, scores: Tensor, hidden: Tensor | None, p: float
) -> list[Tensor]:
    """Returns [dropped softmax, dropout mask, softmax], [seqs * heads, q, k] of scores by head."""
    softmax = scaled_softmax_fwd(scores, 1.0, hidden).flatten(0, 1)
    dropped, kept = _dropout(softmax, is_training, p)
    return [dropped, kept, softmax]


def _dropout(x: Tensor, is_training: bool, p: float) -> tuple[Tensor, Tensor]:
    """Returns x after dropout, and the mask of kept elements, which is empty without dropout."""
    if is_training and p > 0:
        return torch.native_dropout(x, float(p), True)
    return x, x.new_empty(0, dtype=torch.bool)


def _kept(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    """Returns the gradient of what ``_dropout`` dropped; a new tensor, or ``grad`` without one."""
    if not mask.numel():
        return grad
    scale = 1 / (1 - float(p)) if p < 1 else 0.0
    return torch.ops.aten.native_dropout_backward(grad, mask.bool(), scale)


def _norm(x: Tensor, gamma: Tensor, beta: Tensor) -> list[Any]:
    """Returns [layer norm of x, mean, 1 / standard deviation]."""
    out = layer_norm_fwd(x.reshape(-1, x.shape[-1]), gamma, beta, _EPS)
    return [out.y.view(x.shape), out.mean, out.rstd]


def _norm_backward(
    dout: Tensor, dnorm: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor
) -> list[Any]:
    """Returns the gradients of x, which is also the residual, of gamma and of beta."""
    rows = (-1, x.shape[-1])
    grads = layer_norm_bwd(
        dnorm.view(rows), x.reshape(rows), gamma, mean, rstd, d_residual=dout.reshape(rows)
    )
    return [grads.dx.view(x.shape), grads.dweight, grads.dbias]


def _add(saved: list[Tensor], residual: Tensor, is_training: bool, p: float) -> list[Tensor]:
    """Replaces the output, which is last, by the dropout's mask and residual + dropout(output)."""
    out, kept = _dropout(saved.pop(), is_training, p)
    return [*saved, kept, residual + out]
