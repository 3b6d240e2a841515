"""Options of ops that are given by name, and what kernels take for them; no framework.

The functions of an op that PyTorch has and those that JAX has check their options here, so that
both know the same names and refuse others in the same words.
"""

from __future__ import annotations

from typing import NamedTuple

from .named_arguments import check_flags

__all__ = [
    "ACTIVATIONS", "BLOCK_SCALES", "GATE", "KINDS", "SWISH", "ClampedSwiglu", "activation_number",
    "block_scales", "gate_arguments", "gated_activation_number", "is_most_recent", "is_tanh",
    "scales_number",
]  # fmt: skip

# Activation functions of one input, in the order of csrc/common/activation/functions.h.
KINDS = ("gelu", "gelu_erf", "quick_gelu", "relu", "squared_relu", "silu")
# Activation functions of a gate, and their numbers there.
ACTIVATIONS = {
    "silu": 5, "gelu": 0, "gelu_erf": 1, "relu": 3, "sigmoid": 6, "squared_relu": 4,
}  # fmt: skip
SWISH = 7
# Rules of the scales of blocks, in the order of csrc/common/numerics/block_rule.h.
BLOCK_SCALES = ("fp32", "pow2", "server")
# Options of the kernels of gated activations, in the order of ``gate_arguments``.
GATE = ("activation", "limit", "alpha", "offset")


class ClampedSwiglu(NamedTuple):
    """Gated activation ``gate * sigmoid(alpha * gate) * (up + offset)`` of clamped halves.

    The defaults are those of gpt-oss.

    Attributes:
        limit: at least 0. Gate is clamped to at most ``limit``, up to ``-limit`` .. ``limit``; the
            gradient of what was clamped is 0. Infinity clamps nothing.
        alpha: factor in the sigmoid.
        offset: added to up.
    """

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0


def block_scales(owner: str, scales: str | None, pow2: bool | None) -> str:
    """Returns the rule of ``BLOCK_SCALES`` that ``scales`` or its former form ``pow2`` names.

    Args:
        owner: name of the function, for errors.
        scales: the rule; None is "pow2", or "fp32" with ``pow2=False``.
        pow2: former form: True for "pow2", False for "fp32"; None for neither.

    Raises:
        TypeError: an argument has another type.
        ValueError: the rule is unknown, or ``pow2`` contradicts it.
    """
    if pow2 is not None:
        check_flags(owner, pow2=pow2)
    former = "fp32" if pow2 is False else "pow2"
    if scales is None:
        return former
    if not isinstance(scales, str):
        raise TypeError(f"{owner}: scales must be a str or None, got {type(scales).__name__}")
    if scales not in BLOCK_SCALES:
        raise ValueError(
            f"{owner}: scales must be one of {', '.join(BLOCK_SCALES)}, got {scales!r}"
        )
    if pow2 is not None and scales != former:
        raise ValueError(f"{owner}: pow2 must be None with scales={scales!r}, got {pow2}")
    return scales


def scales_number(op: str, scales: str | None, pow2: bool | None) -> int:
    """Returns the place in ``BLOCK_SCALES``, the kernels' number, of the rule of ``block_scales``.

    Arguments and errors are those of ``block_scales``.
    """
    return BLOCK_SCALES.index(block_scales(op, scales, pow2))


def activation_number(op: str, kind: str) -> int:
    """Returns the kernels' number of an activation, one of ``KINDS``.

    ``op`` is the op's name, for the error.

    Raises:
        ValueError: ``kind`` is not one of ``KINDS``.
    """
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS.index(kind)


def gated_activation_number(op: str, activation: str) -> int:
    """Returns the kernels' number of a gate's activation in ``ACTIVATIONS``.

    ``op`` is the op's name, for the error.

    Raises:
        ValueError: ``activation`` is not in ``ACTIVATIONS``.
    """
    code = ACTIVATIONS.get(activation)
    if code is None:
        raise ValueError(
            f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    return code


def gate_arguments(op: str, activation: str | ClampedSwiglu) -> tuple[int, float, float, float]:
    """Returns the kernels' number of a gated activation, and its limit, alpha and offset.

    Limit, alpha and offset are 0 except for a ``ClampedSwiglu``. ``op`` is the op's name, for
    errors.

    Args:
        activation: a name in ``ACTIVATIONS``, or a ``ClampedSwiglu``.

    Raises:
        TypeError: a field of ``activation`` is not a number.
        ValueError: the name is unknown, or the limit is below 0 or NaN.
    """
    if not isinstance(activation, ClampedSwiglu):
        return gated_activation_number(op, activation), 0.0, 0.0, 0.0
    for field, value in zip(activation._fields, activation, strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{op}: activation.{field} must be a float, got {type(value).__name__}")
    if not activation.limit >= 0.0:
        raise ValueError(f"{op}: activation.limit must be at least 0, got {activation.limit}")
    return SWISH, float(activation.limit), float(activation.alpha), float(activation.offset)


def is_tanh(op: str, form: str) -> bool:
    """Returns True for GELU's form "tanh", False for "erf".

    ``op`` is the op's name, for the error.

    Raises:
        ValueError: ``form`` is neither.
    """
    if form not in ("tanh", "erf"):
        raise ValueError(f"{op}: form must be 'tanh' or 'erf', got {form!r}")
    return form == "tanh"


def is_most_recent(op: str, algo: str) -> bool:
    """Returns True for "most_recent", the newest amax, False for "max" of the whole history.

    ``op`` is the op's name, for the error.

    Raises:
        ValueError: ``algo`` is neither.
    """
    if algo not in ("max", "most_recent"):
        raise ValueError(f"{op}: algo must be 'max' or 'most_recent', got {algo!r}")
    return algo == "most_recent"
