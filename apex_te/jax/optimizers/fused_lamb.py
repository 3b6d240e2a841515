"""LAMB as a fused optax transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..ops import multi_tensor_optim
from .fused_adam import moments_transformation
from .leaves import number
from .transformation import FusedTransformation

__all__ = ["fused_lamb"]


def fused_lamb(
    learning_rate: float | jax.Array | Callable[[Any], Any] = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    mask: Any = None,
    *,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float = 1.0,
    use_nvlamb: bool = False,
    master_weights: bool = False,
) -> FusedTransformation:
    """Makes LAMB (arXiv 1904.00962), with the steps of ``apex_te``'s ``FusedLAMB``.

    It needs norms of whole arrays, so that on a mesh every device runs the whole step.

    Args:
        learning_rate, b1, b2, eps, weight_decay, mask, bias_correction, master_weights: as in
            ``fused_adam``; the defaults of ``eps`` and ``weight_decay`` are LAMB's.
        adam_w_mode: add weight decay to the update instead of the gradient.
        grad_averaging: weight the gradient by 1 - b1 in the average of gradients, instead of 1.
        max_grad_norm: clip the norm of all gradients together to this value; 0 does not clip.
        use_nvlamb: also scale updates of parameters without weight decay by |param| / |update|.

    Returns:
        The transformation, whose state is a ``FusedAdamState``.

    Raises:
        TypeError: as in ``fused_adam``.
        ValueError: as in ``fused_adam``.
    """
    name = "fused_lamb"
    limit = number(name, "max_grad_norm", max_grad_norm)

    def norm(grads: list[Any]) -> dict[str, Any]:
        """Returns the norm of all gradients, if it is limited."""
        return {"grad_norm": multi_tensor_optim.l2norm(grads)} if limit and grads else {}

    return moments_transformation(
        name, multi_tensor_optim.lamb, learning_rate, (b1, b2), eps, weight_decay, mask,
        master_weights, norm, adamw=adam_w_mode, bias_correction=bias_correction,
        grad_averaging=grad_averaging, nvlamb=use_nvlamb, max_grad_norm=limit,
    )  # fmt: skip
