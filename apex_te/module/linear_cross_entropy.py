"""Cross entropy of a language model's head, computed in chunks without all logits in memory."""

from __future__ import annotations

from typing import Any

import torch

from ..recipe import Recipe
from ..runtime.named_arguments import named_arguments
from ._core.vocabulary_losses import VocabularyLosses, head_losses

__all__ = ["linear_cross_entropy"]


@named_arguments()
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    fp8_recipe: Recipe | str | None = None,
    chunk_rows: int | None = None,
    weight_grad_dtype: torch.dtype | None = None,
    tp_group: Any = None,
    first_index: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Computes ``cross_entropy(hidden @ weight.T + bias, target)`` a chunk of rows at a time.

    Loss and gradients are those of the GEMM followed by ``apex_te.ops.cross_entropy``, except that
    the weight's gradient, a sum over chunks, is rounded after each chunk. In float32 and bfloat16
    with reduction "mean" or "sum", forward computes the gradients, and backward may run only once.
    Otherwise backward computes the logits again. Under ``torch.autocast`` hidden states, weight and
    bias are cast to its dtype.

    With ``tp_group`` each rank has the weight's rows for a part of the vocabulary; hidden states
    and targets are equal on all ranks. For each chunk the ranks exchange three float32 numbers per
    row in two all-reduces, and sum the gradient of the hidden states in one more.

    Args:
        hidden: hidden states ``[..., in]`` in float32, float16 or bfloat16.
        weight: the head's weight ``[vocabulary, in]`` in the dtype of ``hidden``, plain or held in
            FP8.
        target: class indices ``[...]``, int64 or int32. An index outside the vocabulary, other than
            ``ignore_index``, raises ValueError on the CPU and gives NaN on the GPU.
        bias: ``[vocabulary]`` in the dtype of ``hidden``, or None.
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count.
        label_smoothing: in [0, 1], fraction of the target's probability spread over the vocabulary.
        reduction: "mean" over rows that are not ignored, "sum" or "none".
        fp8_recipe: recipe without state, or its name, such as ``"tensorwise"`` or ``"blockwise"``,
            with which the three GEMMs run in FP8. None computes them in the dtype of ``hidden``,
            even inside ``fp8_autocast``.
        chunk_rows: rows of a chunk; None takes as many as have 320 MiB of logits, or an eighth of
            the rows if that is less and all logits are above 1 GiB.
        weight_grad_dtype: dtype in which the weight gradients of the chunks are summed: that of
            ``hidden`` (the default) or float32.
        tp_group: process group over which the vocabulary is split; None means that this rank has
            all of it.
        first_index: vocabulary index of this rank's first row of ``weight``. None means that all
            ranks have equally many rows, in rank order.
        vocab_size: total number of rows; required with ``first_index``.

    Returns:
        The loss in float32: a scalar, or with "none" the losses in the shape of ``target``.

    Raises:
        TypeError: dtypes do not match, or ``tp_group`` is not a process group.
        ValueError: a shape or option does not match, tensors are on different devices, or the
            recipe keeps state.
        NotImplementedError: the recipe's ``backward`` is not None.
    """
    loss: torch.Tensor = head_losses(
        _LinearCrossEntropy, hidden, weight, target, bias,
        ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction,
        fp8_recipe=fp8_recipe, chunk_rows=chunk_rows, weight_grad_dtype=weight_grad_dtype,
        tp_group=tp_group, first_index=first_index, vocab_size=vocab_size,
    )  # fmt: skip
    return loss


class _LinearCrossEntropy(VocabularyLosses):
    LABEL = "linear_cross_entropy"
