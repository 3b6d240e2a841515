"""Softmax cross entropy, whose gradient is computed with the loss or later from the logits.

As on PyTorch's side the forward makes the gradient of a mean of float32 or bfloat16 logits, when it
is wanted; otherwise backward computes it from the logits and two float32 numbers for each row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _checks
from ._checked import checked
from ._contract import run
from ._gradient import flag, is_wanted, materialised

__all__ = [
    "REDUCTIONS", "CrossEntropyOutput", "count_valid", "cross_entropy", "cross_entropy_bwd",
    "cross_entropy_fwd", "sum_losses",
]  # fmt: skip

REDUCTIONS = ("mean", "sum", "none")
_MOST_COLUMNS = 2**31 - 4097


class CrossEntropyOutput(NamedTuple):
    """Results of ``cross_entropy_fwd``; None for one that was not requested.

    Attributes:
        loss: float32 [rows].
        grad: gradient of the logits, in their shape and dtype.
        stats: float32 [rows, 2], the largest logit of each row and the sum of exp(logit - largest).
    """

    loss: jax.Array
    grad: jax.Array | None
    stats: jax.Array | None


@checked
def cross_entropy(
    logits: jax.Array,
    target: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> jax.Array:
    """Computes the cross entropy of softmax(logits) and targets, differentiably.

    Backward multiplies by the incoming gradient in float32 and then rounds to the dtype of the
    logits.

    Args:
        logits: [..., V] float32, float16 or bfloat16.
        target: [...] int64 or int32. An index outside [0, V) other than ``ignore_index`` raises an
            error on the CPU, when the program runs, and gives NaN on the GPU.
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count in the mean.
        label_smoothing: in [0, 1], the part of the target's probability that is spread over all V.
        reduction: "mean" over rows that are not ignored, "sum" or "none"; under ``jax.vmap`` only
            "none".

    Returns:
        The loss in float32: a scalar, or with "none" one loss per row, in the shape of ``target``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
    """
    name = "cross_entropy"
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    logits, target = _checks.array(name, "logits", logits), _checks.array(name, "target", target)
    if logits.ndim < 1 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"{name}: target must have the shape of logits without the last dimension, "
            f"{list(logits.shape[:-1])}, got {list(target.shape)}"
        )
    rows = logits.reshape(math.prod(target.shape), logits.shape[-1])
    loss_of = _differentiable(ignore_index, float(label_smoothing), reduction)
    loss = loss_of(rows, target.reshape(-1))
    return loss.reshape(target.shape if reduction == "none" else ())


@functools.lru_cache(maxsize=256)
def _differentiable(
    ignore_index: int, label_smoothing: float, reduction: str
) -> Callable[[Any, Any], Any]:
    """Returns the loss of (logits [rows, V], targets [rows]), differentiable in the logits."""
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}

    def forward(logits: Any, target: Any, is_grad_wanted: bool) -> tuple[Any, Any, Any]:
        """Returns the loss, what ``cross_entropy_fwd`` has made, and the number of targets."""
        num_valid = count_valid(target, ignore_index) if reduction == "mean" else None
        with_grad = is_grad_wanted and reduction == "mean" and logits.dtype != jnp.float16
        made = cross_entropy_fwd(
            logits, target, with_grad=with_grad, with_stats=is_grad_wanted, num_valid=num_valid,
            **options,
        )  # fmt: skip
        loss = made.loss if reduction == "none" else sum_losses(made.loss, num_valid)
        return loss, made, num_valid

    @jax.custom_vjp
    def loss_of(logits: Any, target: Any) -> Any:
        return forward(logits, target, False)[0]

    def fwd(logits: Any, target: Any) -> tuple[Any, Any]:
        wanted = flag(logits)
        loss, made, num_valid = forward(logits.value, target.value, is_wanted(wanted))
        kept = (logits.value, target.value, made.stats, made.grad, num_valid)
        return loss, kept if is_wanted(wanted) else None

    def bwd(kept: Any, grad_output: Any) -> Any:
        if kept is None:
            return None, None
        logits, target, stats, made, num_valid = kept
        factor = materialised(grad_output).reshape(-1)
        grad = cross_entropy_bwd(
            logits, target, stats, factor, made, num_valid=num_valid, **options
        )
        return grad, None

    loss_of.defvjp(fwd, bwd, symbolic_zeros=True)
    return loss_of


def _checked_rows(
    function: str, logits: Any, target: Any, label_smoothing: float
) -> tuple[jax.Array, jax.Array]:
    """Returns logits [rows, V] and targets [rows]."""
    logits = _checks.matrix(function, "logits", logits)
    target = _checks.has_ndim(function, "target", target, 1, ["int64", "int32"])
    rows, columns = logits.shape
    _checks.has_shape(function, "target", target, (rows,))
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{function}: label_smoothing must be in [0, 1], got {label_smoothing:g}")
    if rows and not 1 <= columns <= _MOST_COLUMNS:
        raise ValueError(f"{function}: logits must have 1 to 2^31 - 4097 columns, got {columns}")
    return logits, target


@checked
def cross_entropy_fwd(
    logits: jax.Array,
    target: jax.Array,
    *,
    with_grad: bool = False,
    with_stats: bool = False,
    num_valid: jax.Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> CrossEntropyOutput:
    """Computes the loss of each row and, if requested, the gradient of the logits.

    Args:
        logits: [rows, V] float32, float16 or bfloat16.
        target: [rows] int64 or int32.
        with_grad: also compute the gradient of the logits.
        with_stats: also return what ``cross_entropy_bwd`` needs.
        num_valid: one int32 element by which the gradient is divided; None does not divide.
        ignore_index, label_smoothing: as in ``cross_entropy``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
    """
    name = "cross_entropy_fwd"
    logits, target = _checked_rows(name, logits, target, label_smoothing)
    given = {"logits": logits, "target": target, "num_valid": num_valid}
    made = run(
        "cross_entropy", name, given, ["grad"] * bool(with_grad) + ["stats"] * bool(with_stats),
        ignore_index=ignore_index, label_smoothing=float(label_smoothing),
    )  # fmt: skip
    return CrossEntropyOutput(made["loss"], made.get("grad"), made.get("stats"))


@checked
def cross_entropy_bwd(
    logits: jax.Array,
    target: jax.Array,
    stats: jax.Array,
    grad_output: jax.Array,
    grad: jax.Array | None = None,
    *,
    num_valid: jax.Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Computes ``grad_output`` times the gradient of the losses, each element rounded once.

    Args:
        logits: [rows, V] float32, float16 or bfloat16.
        target: [rows] int64 or int32.
        stats: float32 [rows, 2], from ``cross_entropy_fwd`` with ``with_stats``.
        grad_output: gradient of the losses, float32, one element or [rows].
        grad: the gradient from ``cross_entropy_fwd`` for the same arguments, or None; with it
            ``grad_output`` must have one element.
        num_valid: one int32 element by which the gradient is divided; None does not divide.
        ignore_index, label_smoothing: as in ``cross_entropy``.

    Returns:
        The gradient, in the shape and dtype of ``logits``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
    """
    name = "cross_entropy_bwd"
    logits, target = _checked_rows(name, logits, target, label_smoothing)
    rows = logits.shape[0]
    factor = _checks.has_dtype(name, "grad_output", grad_output, ["float32"])
    per_row = factor.shape == (rows,) and rows != 1
    if not per_row:
        factor = _checks.is_scalar(name, "grad_output", factor)
    given = {"logits": logits, "target": target, "stats": stats, "grad_output": factor}
    given["num_valid"] = num_valid
    if grad is not None:
        given["grad"] = grad
        if per_row:
            raise ValueError(
                f"{name}: grad_output must have one element where grad is made, got {rows}"
            )
    return run(
        "cross_entropy", name, given, dims={"grad_output": "r" if per_row else "_"},
        ignore_index=ignore_index, label_smoothing=float(label_smoothing), made=grad is not None,
    )["grad"]  # fmt: skip


@checked
def count_valid(target: jax.Array, ignore_index: int = -100) -> jax.Array:
    """Returns the number of targets other than ``ignore_index``, one int32 element.

    ``target`` is int64 or int32 [rows].
    """
    name = "cross_entropy_count"
    return run("cross_entropy", name, {"target": target}, ignore_index=ignore_index)["num_valid"]


@checked
def sum_losses(loss: jax.Array, num_valid: jax.Array | None = None) -> jax.Array:
    """Sums losses, float32 [rows], in a fixed order to a float32 scalar.

    The sum is divided by ``num_valid``, one int32 element, if it is given.
    """
    name = "cross_entropy_sum"
    given = {"loss": loss, "num_valid": num_valid}
    return run("cross_entropy", name, given)["total"].reshape(())
