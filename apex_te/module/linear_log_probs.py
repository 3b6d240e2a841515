"""Log-probabilities of tokens from a language model's head, without all logits in memory."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..recipe import Recipe
from ..runtime.named_arguments import check_flags, named_arguments
from ._core.vocabulary_losses import VocabularyLosses, head_losses

__all__ = ["linear_log_probs"]

_NAME = "linear_log_probs"


@named_arguments(target="targets")
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    ignore_index: int = -100,
    fp8_recipe: Recipe | str | None = None,
    chunk_rows: int | None = None,
    weight_grad_dtype: torch.dtype | None = None,
    tp_group: Any = None,
    first_index: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes ``log_softmax((hidden @ weight.T + bias) / temperature)`` of the tokens ``targets``.

    Policy and preference losses (GRPO, PPO, DPO) use these. Only the logits of one chunk of rows
    exist at a time; backward, which may run repeatedly, recomputes them. Results are differentiable
    in ``hidden``, ``weight`` and ``bias``. Logits are rounded to the dtype of ``hidden`` before and
    after the division by ``temperature``; everything after that is float32. Under
    ``torch.autocast`` hidden states, weight and bias are cast to its dtype.

    With ``tp_group`` each rank has the weight's rows for a part of the vocabulary; hidden states,
    targets and results are equal on all ranks.

    Args:
        hidden: hidden states ``[..., in]`` in float32, float16 or bfloat16.
        weight: the head's weight ``[vocabulary, in]`` in the dtype of ``hidden``, plain or held in
            FP8.
        targets: token indices ``[...]``, int64 or int32. An index outside the vocabulary, other
            than ``ignore_index``, raises ValueError on the CPU and gives NaN on the GPU.
        bias: ``[vocabulary]`` in the dtype of ``hidden``, or None.
        temperature: positive number that divides the logits.
        return_entropy: also return the entropy of each row's distribution over the vocabulary.
        ignore_index: rows with this target have log-probability, entropy and gradient 0.
        fp8_recipe: recipe without state, or its name, with which the GEMMs run in FP8. None
            computes them in the dtype of ``hidden``, even inside ``fp8_autocast``.
        chunk_rows, weight_grad_dtype: as in ``linear_cross_entropy``.
        tp_group: process group over which the vocabulary is split; None means that this rank has
            all of it.
        first_index: vocabulary index of this rank's first row of ``weight``. None means that all
            ranks have equally many rows, in rank order.
        vocab_size: total number of rows; required with ``first_index``.

    Returns:
        The log-probabilities, float32 in the shape of ``targets``; with ``return_entropy`` a tuple
        of them and the entropies, in the same shape and dtype.

    Raises:
        TypeError: dtypes do not match, or an argument has a wrong type.
        ValueError: a shape or option does not match, tensors are on different devices, or the
            recipe keeps state.
        NotImplementedError: the recipe has another ``backward`` than None.
    """
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"{_NAME}: temperature must be a float, got {type(temperature).__name__}")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"{_NAME}: temperature must be positive and finite, got {temperature}")
    check_flags(_NAME, return_entropy=return_entropy)
    found = head_losses(
        _LinearLogProbs, hidden, weight, targets, bias,
        ignore_index=ignore_index, fp8_recipe=fp8_recipe, chunk_rows=chunk_rows,
        weight_grad_dtype=weight_grad_dtype, tp_group=tp_group, first_index=first_index,
        vocab_size=vocab_size, temperature=float(temperature), with_entropies=return_entropy,
    )  # fmt: skip
    # A difference, as the negative of an ignored row's loss were -0.0.
    if not return_entropy:
        return 0.0 - found
    losses, entropies = found
    return 0.0 - losses, entropies


class _LinearLogProbs(VocabularyLosses):
    LABEL = _NAME
